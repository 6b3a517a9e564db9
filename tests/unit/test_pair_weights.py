"""Weights of pairs: factors on the loss of each pair, in every objective and layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.data.corpus import Corpora, Corpus, CorpusPart
from deepspeed_nmt.data.loader import collate, collate_packed
from deepspeed_nmt.data.packing import PackedPart
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import VOCABULARY, loader_of, methods, settings_of, write_corpus
from tests.support import write_weights

ONE = World(0, 1, 0, torch.device("cpu"))
WEIGHTS = (0.5, 2.0, 1.0, 3.25, 0.125)
LAYOUTS = ("padded", "packed")


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Five pairs without weights."""
    write_corpus(tmp_path, pairs=len(WEIGHTS), longest=12)
    return Corpus(tmp_path, "train")


def batch_of(corpus: Corpus, layout: str, *pairs: int) -> Batch:
    """Return pairs, all unless some are given, as a micro-batch of an update that has all pairs of the corpus."""
    indices = np.array(pairs or range(len(corpus)), dtype=np.int64)
    info = UpdateInfo(seed=5, number=4, tokens=int(corpus.target_lengths.sum()), sentences=len(corpus))
    if layout == "padded":
        return collate(corpus, indices, VOCABULARY, info)
    sizes = (int(lengths[indices].sum()) + 3 for lengths in (corpus.source_lengths, corpus.target_lengths))
    return collate_packed(corpus, PackedPart(indices, *sizes), VOCABULARY, info)


def module_of(method: str) -> TrainModule:
    torch.manual_seed(3)
    config = settings_of(method)
    return TrainModule(build_model(config, VOCABULARY), build_objective(config, VOCABULARY)).train()


def test_weights_of_a_batch_are_those_of_its_pairs(corpus: Corpus, tmp_path: Path) -> None:
    weighted = write_weights(tmp_path, *WEIGHTS)
    for layout in LAYOUTS:
        assert batch_of(corpus, layout).token_weights is None
        batch = batch_of(weighted, layout, 3, 0)
        found, output_BT = batch.token_weights, batch.target_output_BT
        assert found is not None and found.shape == output_BT.shape
        expected = np.repeat(np.array([3.25, 0.5]), weighted.target_lengths[[3, 0]])
        np.testing.assert_array_equal(found[output_BT.ne(VOCABULARY.pad)], expected)
        moved = batch.to(torch.device("meta"))
        assert moved.weights_B is not None and moved.weights_B.is_meta


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_sum_of_each_pairs_weighted_cross_entropy(
    corpus: Corpus, tmp_path: Path, layout: str
) -> None:
    module = module_of("vanilla").double()
    smoothing = 0.1
    assert module.objective._likelihood.smoothing == smoothing  # type: ignore[attr-defined]
    expected, expected_nll = torch.zeros(2, dtype=torch.float64)
    for pair, weight in enumerate(WEIGHTS):
        batch = batch_of(corpus, "padded", pair)
        (logits_TV,) = module.model.projection(module.model.single_pass(batch)["top"])
        logp_TV = logits_TV.log_softmax(-1)
        target_T = batch.target_output_BT[0]
        nll = -logp_TV[range(len(target_T)), target_T].sum()
        expected = expected + weight * ((1 - smoothing) * nll - smoothing / VOCABULARY.size * logp_TV.sum())
        expected_nll = expected_nll + nll
    output = module(batch_of(write_weights(tmp_path, *WEIGHTS), layout))
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(output.nll, expected_nll.detach(), rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(loss, list(module.model.parameters())) for loss in (output.loss, expected))
    for gradient, transcribed in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, transcribed, rtol=1e-9, atol=1e-10)


def cases() -> list[tuple[str, str]]:
    """Every method, in the layouts that its model has."""
    return [(name, layout) for name in methods() for layout in LAYOUTS[: 1 + settings_of(name).model.packed]]


@pytest.mark.parametrize(("method", "layout"), cases())
def test_every_part_of_an_objective_weighs_pairs(corpus: Corpus, tmp_path: Path, method: str, layout: str) -> None:
    """The loss of a batch and each of its metrics but likelihoods are sums of those of its pairs, times weights."""
    module = module_of(method)
    each = [module(batch_of(corpus, "padded", pair)) for pair in range(len(WEIGHTS))]
    whole = module(batch_of(corpus, layout))
    weighted = module(batch_of(write_weights(tmp_path, *WEIGHTS), layout))
    torch.testing.assert_close(
        weighted.loss, sum(w * x.loss for w, x in zip(WEIGHTS, each, strict=True)), rtol=2e-5, atol=0
    )
    assert torch.equal(weighted.nll, whole.nll) and weighted.metrics.keys() == whole.metrics.keys()
    for name in weighted.metrics.keys() - {"mean_exit_nll"}:
        expected = sum(w * x.metrics[name] for w, x in zip(WEIGHTS, each, strict=True))
        torch.testing.assert_close(weighted.metrics[name], expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("method", "layout"), cases())
def test_weights_of_one_change_no_bit(corpus: Corpus, tmp_path: Path, method: str, layout: str) -> None:
    module = module_of(method)
    found: list[list[Tensor]] = []
    for pairs in (corpus, write_weights(tmp_path, *[1.0] * len(corpus))):
        module.zero_grad()
        output = module(batch_of(pairs, layout))
        output.loss.backward()
        gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found.append([output.loss.detach(), output.nll, *output.metrics.values(), *gradients])
    assert len(found[0]) == len(found[1]) > 6
    assert all(torch.equal(plain, ones) for plain, ones in zip(*found, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_weigh_the_pairs_of_an_update_as_one_does(tmp_path: Path, layout: str) -> None:
    write_corpus(tmp_path, pairs=90)
    write_weights(tmp_path)
    engine, module = f"plain+{layout}", module_of("vanilla")
    losses = []
    for ranks in (1, 3):
        worlds = [replace(ONE, rank=rank, ranks=ranks) for rank in range(ranks)]
        shares = [next(loader_of(tmp_path, world, engine).updates(Cursor(), 1)) for world in worlds]
        assert len({share.target_tokens for share in shares}) == 1
        losses.append(sum(float(module(batch).loss.detach()) for share in shares for batch in share.micro_batches))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    unweighted = sum(float(module(replace(batch, weights_B=None)).nll) for batch in shares[0].micro_batches)
    assert unweighted == sum(float(module(batch).nll) for batch in shares[0].micro_batches)


def test_rows_of_several_corpora_and_segmentations_have_the_weights_of_their_pairs(tmp_path: Path) -> None:
    """Pairs of a corpus without weights weigh 1, all segmentations of a pair the same."""
    texts = []
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, pairs=3, longest=12)
        texts.append(Corpus(tmp_path / name, "train"))
    plain, _, other = texts
    weighted = write_weights(tmp_path / "b", 0.5, 2.0, 4.0)
    corpora = Corpora([CorpusPart("a", (plain,)), CorpusPart("b", (weighted, other))])
    found = corpora.weights_of(np.array([0, 8, 4, 3, 7, 2]))
    assert found is not None and found.tolist() == [1.0, 4.0, 2.0, 0.5, 2.0, 1.0]
    assert corpora.weights_of(np.array([1])) is not None, "all micro-batches of a run have weights, or none"
    assert Corpora([CorpusPart("a", (plain,)), CorpusPart("c", (other,))]).weights_of(np.array([1])) is None
