"""Models train equally with all backends. Triton runs on a GPU or in its interpreter."""

from pathlib import Path

import pytest
import torch

from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import ParameterState
from deepspeed_nmt.kernels.choice import Kernels, is_installed
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import VOCABULARY, build, train, write_corpus

pytest.importorskip("triton", reason="needs triton")
UPDATES = 2


def curve(
    directory: Path, device: torch.device, method: str, kernels: Kernels, **options: float
) -> tuple[list[float], list[ParameterState]]:
    """Return losses and weights of a few updates, which are small because the interpreter is slow.

    Options: dropout, recompute (k to recompute every k-th layer), and updates.
    """
    world = World(0, 1, 0, device)
    engine = build(method, "plain", world, directory, dropout=options.get("dropout", 0.0), kernels=kernels)
    engine.module.model.recompute(*[int(options.get("recompute", 0))] * 2)
    batches = BatchConfig(update_tokens=30, micro_tokens=64)
    loader = TrainLoader.of_corpus(Corpus(directory, "train"), batches, 5, 0, 1, VOCABULARY)
    done = train(engine, loader, world, 1, int(options.get("updates", UPDATES)), Cursor())
    return done["loss"], list(engine.parameters())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("curve")
    write_corpus(directory, pairs=40, longest=12)
    return directory


@pytest.mark.parametrize("method", ["deep_decoder", "growing"])
def test_every_backend_gives_the_same_losses_and_weights(corpus: Path, device: torch.device, method: str) -> None:
    expected, weights = curve(corpus, device, method, Kernels("torch", "sdpa"))
    backends = ["triton", *(["apex"] if is_installed("softmax", "apex") else [])]
    for backend in ["torch", *backends]:
        kernels = Kernels(backend, "fused")
        losses, found = curve(corpus, device, method, kernels)
        assert losses == pytest.approx(expected, abs=1e-5, rel=0), backend
        assert backend in kernels.choices(device, torch.float32).values()
        for one, other in zip(found, weights, strict=True):
            torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_recomputation_draws_the_same_masks(corpus: Path, device: torch.device, backend: str) -> None:
    kernels = Kernels(backend, "fused")
    kept = curve(corpus, device, "vanilla", kernels, dropout=0.1, updates=1)
    recomputed = curve(corpus, device, "vanilla", kernels, dropout=0.1, updates=1, recompute=1)
    assert kept[0] == recomputed[0]
    for one, other in zip(kept[1], recomputed[1], strict=True):
        assert torch.equal(one.weight, other.weight), one.name
