"""One of two ranks that make an update under several engines, and count the bytes of all tensors afterwards.

They also count the collectives that gather the training state.

Arguments: corpus directory, output file, engines as in tests/parity/engine_worker.py. The output is JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader, collate
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.contract import Engine, checkpoint_bytes
from deepspeed_nmt.engine.settings import EngineConfig, load_ds_config, resolve_engine
from deepspeed_nmt.engine.transfer import HostBuffer
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.collectives import gather_over_data_ranks
from deepspeed_nmt.parallel.world import World, join_world, leave_world
from deepspeed_nmt.planning.memory import Layout, state_bytes
from deepspeed_nmt.train.optimizers.adam import AdamConfig

V = Vocabulary(5000)
CONFIG = TransformerConfig(dim=256, ffn_dim=1024, heads=4, encoder_layers=2, decoder_layers=2)


def held() -> int:
    """Return the bytes of all tensor storages that Python can reach."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@contextmanager
def collectives() -> Iterator[list[str]]:
    """Yield a list of the names of the collectives that begin inside the block."""
    begun: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            begun.append(name)
            return function(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor"):
            stack.enter_context(patch.object(dist, name, counted(name)))
        yield begun


def gathering(engine: Engine, stage: int | None) -> dict[str, Any]:
    """Return the numbers of collectives, and the names of parameters whose state is not DeepSpeed's to the bit."""
    with collectives() as for_weights:
        weights = {state.name: state.weight.clone() for state in engine.parameters()}
    with collectives() as for_state:
        states = list(engine.state())
    differing = [state.name for state in states if not torch.equal(state.weight, weights[state.name])]
    elements = sum(weight.numel() for weight in weights.values())
    buffer = HostBuffer(checkpoint_bytes(elements, 0, 2 * elements) // 4, engine.device)
    for state, copy in zip(states, list(engine.state(buffer=buffer)), strict=True):
        pairs = [
            (state.weight, copy.weight),
            *((state.states[which], copy.states[which]) for which in AdamConfig.states),
        ]
        if not all(torch.equal(*pair) for pair in pairs):
            differing.append(f"copy of {state.name}")
    for name, parameter in engine.module.model.named_parameters() if stage else ():
        found = next(state for state in states if state.name == name)
        expected = {which: safe_get_full_optimizer_state(parameter, which) for which in AdamConfig.states}
        if not torch.equal(found.weight, safe_get_full_fp32_param(parameter)) or not all(
            torch.equal(found.states[which], expected[which]) and expected[which].any() for which in AdamConfig.states
        ):
            differing.append(name)
    return {"weights": len(for_weights), "state": len(for_state), "differing": differing, "count": len(states)}


def count(directory: Path, name: str, world: World) -> dict[str, Any]:
    for _ in range(2):  # a collected engine has parts that the next collection frees
        gc.collect()
    before = held()
    torch.manual_seed(1)
    module = TrainModule(build_transformer(CONFIG, V), Objective(LabelSmoothed(0.1, V.pad)))
    trained = sum(p.numel() for p in module.parameters())
    if world.rank:  # has another CPU, whose initialisation is rounded otherwise
        for parameter in module.parameters():
            parameter.data += 1e-3
    corpus = Corpus(directory, "train")
    dummy = collate(corpus, torch.empty(0, dtype=torch.int64).numpy(), V)
    kind, _, precision = name.partition(":")
    settings = EngineConfig(
        name="plain" if kind == "plain" else "deepspeed", ds_config=kind, precision=precision or "fp32", device="cpu"
    )
    whole: list[int] = []
    initialize = deepspeed.initialize

    def watched(**options: Any) -> Any:
        whole.append(sum(parameter.numel() for parameter in options["model"].parameters()))
        return initialize(**options)

    with patch.object(deepspeed, "initialize", watched):
        engine = build_engine(resolve_engine(settings, AdamConfig(), world), module, world, dummy)
    loader = TrainLoader.of_corpus(
        corpus, BatchConfig(update_tokens=200, micro_tokens=200), 1, world.data_rank, world.data_ranks, V
    )
    update = next(iter(loader.updates(Cursor(), 1)))
    engine.update(update.micro_batches, update.target_tokens, 1e-3)
    gc.collect()
    found = held() - before
    stage = None if kind == "plain" else int(kind[-1])
    total = torch.stack([parameter.detach().double().sum() for parameter in engine.module.parameters()]).sum()
    zero = {} if stage is None else load_ds_config(kind)["zero_optimization"]
    layout = Layout(stage, world.ranks, bits=16 if precision else 32, zero=zero)
    gathered = gathering(engine, stage)
    engine.close()
    return {
        "held": found,
        "planned": state_bytes(trained, 0, layout),
        "trained": trained,
        "gathered": gathered,
        "whole": whole,
        "totals": gather_over_data_ranks(total[None], world).flatten().tolist() if stage != 3 else [],
    }


def main() -> None:
    warnings.simplefilter("ignore")
    world = join_world("cpu", timeout_s=300)
    report = {name: count(Path(sys.argv[1]), name, world) for name in sys.argv[3:]}
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main()
