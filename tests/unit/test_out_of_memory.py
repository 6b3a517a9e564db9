"""Messages about simulated lack of memory."""

import itertools
import logging
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed_nmt.core.batch import UpdateInfo
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.errors import TrainingError
from deepspeed_nmt.train.out_of_memory import explained, probe
from tests.support import random_corpus

CPU = torch.device("cpu")
CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB"


def engine_with(error: Exception | None = None) -> mock.Mock:
    """Return an engine whose probe may raise an error."""
    engine: mock.Mock = mock.create_autospec(Engine, instance=True)
    engine.device = CPU
    engine.probe.side_effect = error
    return engine


@pytest.fixture
def loader(tmp_path: Path) -> TrainLoader:
    corpus = random_corpus(tmp_path, pairs=400, vocab=50, seed=2)
    return TrainLoader.of_corpus(corpus, BatchConfig(update_tokens=900, micro_tokens=200), 3, 1, 2, Vocabulary(50))


def test_the_probe_is_the_largest_micro_batch(loader: TrainLoader, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with()
    with caplog.at_level(logging.INFO, "deepspeed_nmt"):
        probe("always", engine, loader)
    (batch,) = engine.probe.call_args.args
    assert engine.probe.call_count == 1
    some = itertools.islice(loader.updates(Cursor(), 1), 20)
    seen = max(batch.padded_tokens for update in some for batch in update.micro_batches)
    assert 0.97 * seen <= batch.padded_tokens <= 200
    assert batch.update == UpdateInfo(seed=batch.update.seed, tokens=batch.target_tokens, sentences=batch.rows)
    assert f"largest micro-batch: {batch.rows} rows x {batch.longest} tokens; peak memory" in caplog.text


@pytest.mark.parametrize(("wanted", "times"), [("auto", 0), ("never", 0), ("always", 1)])
def test_a_cpu_is_probed_only_on_request(loader: TrainLoader, wanted: str, times: int) -> None:
    engine = engine_with()
    probe(wanted, engine, loader)  # type: ignore[arg-type]
    assert engine.probe.call_count == times


def chained() -> Exception:
    """Return an error that was raised while another was handled."""
    try:
        try:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        except RuntimeError as error:
            raise ValueError("backward failed") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("NCCL error: Call to CUDA function failed: 'out of memory'"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        chained(),
    ],
)
def test_out_of_memory_is_explained(loader: TrainLoader, error: Exception) -> None:
    with pytest.raises(TrainingError) as caught:
        probe("always", engine_with(error), loader)
    message, batch = str(caught.value), loader.largest()
    assert message.startswith("the largest expected micro-batch ran out of the memory of RAM with ")
    assert f"{batch.rows} rows x {batch.longest} tokens, {batch.padded_tokens} of batch.micro_tokens" in message
    assert str(error).split("\n")[0].rstrip(".") in message
    for setting in ("batch.micro_tokens", "engine.recompute_decoder=1", "zero3", "engine.tensor_parallel"):
        assert setting in message
    assert "training.probe=never" in message


def test_an_update_names_its_largest_micro_batch(loader: TrainLoader) -> None:
    batches = next(loader.updates(Cursor(), 7)).micro_batches
    largest = max(batches, key=lambda batch: batch.padded_tokens)
    message = f"^update 7 ran out of .* {largest.rows} rows x {largest.longest} tokens"
    with pytest.raises(TrainingError, match=message), explained("update 7", batches, CPU):
        raise torch.OutOfMemoryError(CUDA_MESSAGE)


def test_other_errors_are_not_changed(loader: TrainLoader) -> None:
    with pytest.raises(RuntimeError, match="shapes do not match"):
        probe("always", engine_with(RuntimeError("shapes do not match")), loader)
