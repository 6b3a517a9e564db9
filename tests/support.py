"""Common code of the tests: ranks that form a world, and small corpora."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from deepspeed_nmt.cli import main
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.tokenizer import EOS
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.manifest import replace_files
from deepspeed_nmt.sample.corpus import write_sample
from deepspeed_nmt.selftest.models import loader_of
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointManifest
from tests.programs import Program

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """Return a free port below the ephemeral ports, which the system may give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) != 0:
                return port


def rank_environment(rank: int, ranks: int, port: int, scratch: Path) -> dict[str, str]:
    """Return the environment that a launcher would give to one of several ranks on this host."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        "PYTHONPATH": str(ROOT),
    }


def run_ranks(
    command: list[str], ranks: int, scratch: Path, timeout: float, status: int = 0, **environment: str
) -> list[str]:
    """Run ``python *command`` on several ranks and return the output of each. At the timeout all are killed.

    Raises:
        AssertionError: with the output of all ranks, if one does not end with ``status`` in time.
    """
    port = free_port()
    logs = [scratch / f"rank{rank}.log" for rank in range(ranks)]
    processes = [
        Program(command, {**rank_environment(rank, ranks, port, scratch), **environment}, log)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [log.read_text() for log in logs]
    done = list(zip(processes, outputs, strict=True))
    assert all(process.returncode == status for process in processes), "\n".join(
        f"--- rank {rank}, status {process.returncode}\n{output[-5000:]}"
        for rank, (process, output) in enumerate(done)
    )
    return outputs


def batch_of(
    source_BS: Tensor,
    target_input_BT: Tensor,
    target_output_BT: Tensor,
    *,
    ids: list[int] | None = None,
    pad: int = 0,
    seed: int = 1,
    update: int = 1,
) -> Batch:
    """Return a batch that is a whole update."""
    rows, target_tokens = len(source_BS), int(target_output_BT.ne(pad).sum())
    return Batch(
        source_BS=source_BS,
        target_input_BT=target_input_BT,
        target_output_BT=target_output_BT,
        sentence_ids_B=torch.arange(rows) if ids is None else torch.tensor(ids),
        source_tokens=int(source_BS.ne(pad).sum()),
        target_tokens=target_tokens,
        pad=pad,
        update=UpdateInfo(seed=seed, number=update, tokens=target_tokens, sentences=rows),
    )


def random_corpus(
    directory: Path, pairs: int, vocab: int, seed: int, longest: int = 30, split: str = "train"
) -> Corpus:
    """Write a corpus of random tokens, with sources and targets of similar length."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.gamma(2.0, longest / 6, pairs), 1, longest - 2).astype(int)
    sources = [rng.integers(EOS + 2, vocab, n).tolist() for n in lengths]
    targets = [rng.integers(EOS + 2, vocab, max(1, n + rng.integers(-1, 2))).tolist() for n in lengths]
    with CorpusWriter(directory, split, vocab) as writer:
        writer.append(sources, targets)
    return Corpus(directory, split)


def parity_loader(directory: Path, world: World, engine: str = "plain") -> TrainLoader:
    """Return a loader of this rank's micro-batches, over the self-test's corpus in ``directory``.

    An update has one to eight micro-batches in one process, and one to four on each of two ranks. All are small:
    under DeepSpeed their size hardly affects the time.
    """
    batches = BatchConfig(update_tokens=240, micro_tokens=130)
    return loader_of(directory, world, engine, batches)


def prepare_sample(directory: Path, vocab_size: int, options: Sequence[str] = (), **pairs: int) -> Path:
    """Make a data directory of the sample corpus in data/, with its text in text/, and return it.

    Args:
        directory: for both.
        vocab_size: size of the vocabulary.
        options: further options of `prepare`.
        pairs: pairs of ``train``, ``valid`` and ``test``.
    """
    text = directory / "text"
    write_sample(text, **pairs, seed=3)
    words = ["prepare", "--out", str(directory / "data"), "--vocab-size", str(vocab_size), *options]
    for split in pairs:
        words += [f"--{split}-source", str(text / f"{split}.en"), f"--{split}-target", str(text / f"{split}.de")]
    assert main(words) == 0
    return directory / "data"


def change_settings(run: Path, config: Mapping[str, object]) -> None:
    """Make a run one that was trained with other settings, checkpoints included."""
    replace_files(run, {"config.yaml": yaml.safe_dump(config).encode()})
    for directory in (run / "checkpoints").glob("update-*"):
        record = json.loads((directory / "run.json").read_text())
        (directory / "run.json").write_text(json.dumps({**record, "config": config}))
        manifest = CheckpointManifest.model_validate_json((directory / "manifest.json").read_bytes())
        files = {**manifest.files, "run.json": FileRecord.of(directory / "run.json")}
        manifest.model_copy(update={"files": files}).write(directory)


def assert_same(run: Path, other: Path, update: int = 12) -> None:
    """Assert that the checkpoints of two runs are equal bit for bit, with the moments of weights that have them."""
    first = Checkpoint(run / "checkpoints" / f"update-{update:07d}")
    second = Checkpoint(other / "checkpoints" / f"update-{update:07d}")
    assert first.scalars == second.scalars
    for name, weight in first.weights().items():
        assert torch.equal(weight, second.weight(name)), name
        moments = [f"{name}.exp_avg" in each._where["moments"] for each in (first, second)]
        assert moments[0] == moments[1], name
        if moments[0]:
            assert torch.equal(first.moment(name, "exp_avg"), second.moment(name, "exp_avg")), name
