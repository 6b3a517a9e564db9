"""Common code of the tests: ranks that form a world, and small corpora."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor

from deepspeed_nmt.cli import main
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpora, Corpus, CorpusPart, CorpusWriter, Indices, Lengths
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.mixture import MixtureOrder, Phase, Stream, Weight
from deepspeed_nmt.data.tokenizer import EOS
from deepspeed_nmt.data.update_order import Cursor, EpochOrder, Window
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import loader_of, write_corpus
from deepspeed_nmt.run.directory import replace_files
from deepspeed_nmt.sample import write_sample
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointManifest
from tests.programs import Program

ROOT = Path(__file__).resolve().parents[1]
ZERO2 = f"engine.ds_config={ROOT / 'tests/zero2.json'}"
"""ZeRO-2 with small buckets: deterministic torch fills them with NaN for each micro-batch, the usual 400 MB, too."""


class LengthsOnly(Corpus):
    """A corpus of which only the lengths are known.

    Args:
        source: source lengths, EOS included. Shape: (N,)
        target: target lengths, EOS included. Shape: (N,)
    """

    def __init__(self, source: Lengths, target: Lengths) -> None:
        self._sides = source, target

    @property
    def longest(self) -> tuple[int, int]:
        return int(self._sides[0].max()), int(self._sides[1].max())

    def __len__(self) -> int:
        return len(self._sides[0])

    def lengths(self, indices: Indices) -> tuple[Lengths, Lengths]:
        return self._sides[0][indices], self._sides[1][indices]

    @property
    def target_tokens(self) -> int:
        return int(self._sides[1].sum())


def epoch_window(source: Lengths, target: Lengths, update_tokens: int, seed: int = 1, epoch: int = 0) -> Window:
    """Return all updates of an epoch of a corpus with these lengths; rows are its indices."""
    order = EpochOrder(Corpora.of(LengthsOnly(source, target)), seed, update_tokens)
    places = [order.place(Cursor(epoch, update), 0) for update in range(order.updates_in(epoch))]
    return Window.joined([order.window(key) for key in dict.fromkeys(place.window for place in places)])


def free_port() -> int:
    """Return a free port, which no other worker of pytest takes meanwhile.

    Jobs of SLURM take ports below 30000, and the system gives those from 32768 on to outgoing connections.
    """
    workers, worker = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), os.environ.get("PYTEST_XDIST_WORKER", "")
    while True:
        port = random.SystemRandom().randrange(30000 + int(worker[2:] or 0), 32768, workers)
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


def run_ranks(command: list[str], ranks: int, scratch: Path, status: int = 0, **environment: str) -> list[str]:
    """Run ``python *command`` on several ranks and return the output of each. After 800 s all are killed.

    Raises:
        AssertionError: with the output of all ranks, if one does not end with ``status`` in time.
    """
    port = free_port()
    logs = [scratch / f"rank{rank}.log" for rank in range(ranks)]
    processes = [
        Program(command, {**rank_environment(rank, ranks, port, scratch), **environment}, log)
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + 800
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


def write_weights(directory: Path, *weights: float) -> Corpus:
    """Give the training pairs of a directory these weights, or if there are none random ones from 0.25 to 4."""
    count = len(Corpus(directory, "train"))
    drawn = 4.0 ** np.random.default_rng(count).uniform(-1.0, 1.0, count)
    np.asarray(weights or drawn, dtype="<f4").tofile(directory / "train.weights.bin")
    return Corpus(directory, "train")


def parity_loader(directory: Path, world: World, engine: str = "plain", mixture: bool = False) -> TrainLoader:
    """Return a loader of this rank's micro-batches, over the self-test's corpus in ``directory``.

    An update has two to eight micro-batches in one process, and one to four on each of two ranks. All are small:
    their number, not their size, takes the time.

    Args:
        directory: directory of the corpus.
        world: the ranks.
        engine: name of the engine, as the self-test takes it.
        mixture: True for the mixture that :func:`write_mixture` has written.
    """
    batches = BatchConfig(update_tokens=240, micro_tokens=200)
    loader = loader_of(directory, world, engine, batches)
    if not mixture:
        return loader
    first = CorpusPart("first", (Corpus(directory, "train"), Corpus(directory / "again", "train")), key=1)
    second = CorpusPart("second", (Corpus(directory / "second", "train"),), source_tag=7, key=2)
    schedule = (Weight(value=1.0, last=5), Weight(value=3.0, first=6))
    streams = tuple(
        Stream(corpus=part.name, pairs=len(part), tokens=part.mean_target_tokens, weights=weights)
        for part, weights in ((first, (Weight(value=2.0),)), (second, schedule))
    )
    corpora, phase = Corpora([first, second]), Phase(first=1, temperature=0.0, streams=streams)
    order = MixtureOrder(corpora, 5, batches.update_tokens, phase, 1000)
    return TrainLoader(order, loader.config, world.data_rank, world.data_ranks, loader.vocabulary)


def write_mixture(directory: Path) -> None:
    """Write two corpora, the first of them in two segmentations, the second a small one that is soon repeated."""
    write_corpus(directory)
    for name, pairs, longest in (("again", 300, 34), ("second", 40, 30)):
        (directory / name).mkdir()
        write_corpus(directory / name, pairs, longest)


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
    """Assert that the checkpoints of two runs are equal bit for bit.

    Compared are weights, their moments if they have them, scalars, and the progress but for the time that it took.
    """
    first = Checkpoint(run / "checkpoints" / f"update-{update:07d}")
    second = Checkpoint(other / "checkpoints" / f"update-{update:07d}")
    assert first.scalars == second.scalars
    for name, weight in first.weights().items():
        assert torch.equal(weight, second.weight(name)), name
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = [f"{name}.{kind}" in each._where["optimizer"] for each in (first, second)]
            assert moments[0] == moments[1], name
            if moments[0]:
                assert torch.equal(first.optimizer_state(name, kind), second.optimizer_state(name, kind)), name
    assert replace(first.progress, train_seconds=0.0) == replace(second.progress, train_seconds=0.0)
