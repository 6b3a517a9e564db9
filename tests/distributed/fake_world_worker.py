"""Collectives of a rank among many that do not exist: torch's fake process group communicates nothing.

Arguments: directory, output file. The output is JSON: for each number of ranks, view (a rank) and engine the
collectives of its start and of an update of two equal micro-batches, in order: name, dtype, bytes and size of the
group; and where the update waits for the device. Each view is a process of its own, forked when everything has been
imported.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from deepspeed_nmt import cli, parity
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.engine import deepspeed  # noqa: F401  # imported before processes are forked
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine
from deepspeed_nmt.parallel import collectives, world
from deepspeed_nmt.parallel.world import World
from tests.host_waits import HostCopies, HostWaits
from tests.support import batch_of

RANKS, TOKENS = (8, 64, 256), 64
VIEWS = ((8, 0), (8, 7), (64, 0), (256, 0))
COMMANDS = ((64, 0), (64, 63), (256, 0))
"""Numbers of ranks, and the one of them that is there."""
ENGINES = ("plain", "zero1:bf16", "zero2:bf16", "zero3:bf16")
SHARED = ("zero1:bf16", "plain+recompute")
# As ds_configs/zero3.json has them for a model that is too large to stay gathered.
SCALED = {
    "stage3_max_reuse_distance": 8_000,
    "stage3_max_live_parameters": 20_000,
    "stage3_prefetch_bucket_size": 2_000,
}
DEEP = {"encoder_layers": 4, "decoder_layers": 4}
"""Layers under ZeRO-3, more than stay gathered. Others have the two and two of a self-test."""
_WHOLE = {"_reduce_scatter_base_": 1}
"""Argument with the whole tensor, if that is not the first."""


class Recorder(TorchDispatchMode):
    """List of the collectives inside its ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, str, int, int]] = []

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            (tensor, *_), whole = _tensors(args[_WHOLE.get(func._opname, 0)]), func._opname
            group = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
            size = dist.ProcessGroup.unbox(group).size()
            self.collectives.append((whole, str(tensor.dtype).removeprefix("torch."), tensor.nbytes, size))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def fake_group(*arguments: Any, rank: int, world_size: int, **options: Any) -> None:
    """Join ranks that do not exist."""
    distributed_c10d._store_based_barrier = lambda *arguments: None  # nobody else would come
    initialize("fake", store=FakeStore(), rank=rank, world_size=world_size)


def scaled(config: Any, optimizer: Any, here: World) -> EngineSettings:
    """Resolve an engine whose ZeRO-3 gathers as it does for large models."""
    if config.ds_config is not None:
        file = Path(config.ds_config)
        content = json.loads(file.read_text())
        content["zero_optimization"] |= SCALED
        file.write_text(json.dumps(content))
    return resolve_engine(config, optimizer, here)


def batch() -> Batch:
    """Return a micro-batch with the lengths of those that the planner counts."""
    text = [torch.randint(4, parity.VOCABULARY.size, (TOKENS // 32, 32)) for _ in range(3)]
    return batch_of(*text, pad=parity.VOCABULARY.pad)


def views(rank: int, ranks: int, directory: Path) -> dict[str, Any]:
    """Return what one rank does under all engines."""
    fake_group(rank=rank, world_size=ranks)
    groups, report = [], {}
    new_group = dist.new_group
    dist.new_group = lambda *a, **k: groups.append(1) or new_group(*a, **k)  # type: ignore[func-returns-value]
    alone = World(rank, ranks, 0, torch.device("cpu"))
    for shared, here, names in ((1, alone, ENGINES), (2, alone.regrouped(2), SHARED)):
        for name in names:
            with Recorder() as start:
                engine = parity.build("deep" if "zero3" in name else "shallow", name, here, directory)
            for _ in range(2 if "zero3" in name else 0):  # it records the order of modules
                engine.update([batch()], TOKENS * here.data_ranks, 0.0)
            waits, batches = HostWaits(), [batch()] * 2
            with Recorder() as update, HostCopies(waits), waits:
                engine.update(batches, 2 * TOKENS * here.data_ranks, 0.0)
            engine.close()
            report[f"{name} x{shared}"] = {
                "start": start.collectives, "update": update.collectives, "waits": waits.places,
            }  # fmt: skip
    return {**report, "groups": len(groups)}


def command(rank: int, ranks: int, directory: Path) -> dict[str, Any]:
    """Return what one rank does in `train` until its first update ends, and afterwards."""
    world.meet = lambda *arguments: None  # type: ignore[assignment]
    dist.init_process_group = partial(fake_group)
    if rank:  # it would receive nothing
        receive = collectives.from_main
        for module in list(sys.modules.values()):
            if getattr(module, "from_main", None) is receive:
                module.from_main = lambda value, here: value  # type: ignore[attr-defined]
    words = ["train", "--data", str(directory / "data"), "--run", str(directory / f"run-{ranks}-{rank}")]
    words += ["--recipe", "sample_quick", "engine.device=cpu", "engine.silent_s=0", "training.max_updates=1"]
    words += ["model.dim=32", "model.ffn_dim=32", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"]
    words += ["validation.metrics=[]", "collapse.every=0", "batch.update_tokens=20000"]
    with Recorder() as record, suppress(ZeroDivisionError):  # a rank without validation text receives no loss
        assert cli.main(words) == 0
    return {"all": record.collectives}


initialize = dist.init_process_group


def main() -> None:
    torch.set_num_threads(1)
    directory, report = Path(sys.argv[1]), {}
    os.environ.update(LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    parity.resolve_engine = scaled
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None  # rank 0 sends none
    case = parity.self_tests()["vanilla"]
    deep = replace(case, settings={**case.settings, "model": {**case.settings["model"], **DEEP}})
    parity.self_tests = lambda: {"shallow": case, "deep": deep}
    corpus = directory / "corpus"
    corpus.mkdir()
    parity.write_corpus(corpus)
    jobs = [("views", place, lambda *place: views(*place, corpus)) for place in VIEWS]
    jobs += [("command", place, lambda *place: command(*place, directory)) for place in COMMANDS]
    for what, (ranks, rank), work in jobs:
        file = directory / f"{what}-{ranks}-{rank}.json"
        if (child := os.fork()) == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
            file.write_text(json.dumps(work(rank, ranks)))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        report[f"{what} {ranks} {rank}"] = json.loads(file.read_text()) if file.exists() else None
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
