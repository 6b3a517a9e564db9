"""Attention weights that a pass requests: in each layout, with recomputation, and of every model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.core.objective import Objective, Passes, Regularizer, States, TrainModule
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import collate, collate_packed
from deepspeed_nmt.data.packing import PackedPart
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of, write_corpus
from deepspeed_nmt.search.alignment import watched

LAYOUTS = ("padded", "packed")


class Entropy(Regularizer):
    """Entropy of the attention of a decoder layer, in every pass: -sum_t sum_s a_ts log a_ts."""

    name = "entropy"
    weight = 1.0

    def __init__(self, layer: int, passes: int = 1) -> None:
        self.layer, self.passes = layer, passes

    def request_passes(self, passes: Passes) -> Callable[[States], Tensor]:
        name = passes.request_attention(self.layer)
        for _ in range(1, self.passes):
            passes.add_pass(0)
        batch = passes.batch

        def value(states: States) -> Tensor:
            attention_PBTS = torch.stack([of[name] for of in states])
            rows_BT = -(attention_PBTS * attention_PBTS.clamp(min=1e-30).log()).sum(dim=(0, 3))
            return batch.weighted((rows_BT * batch.target_mask).sum(dim=1)).sum()

        return value


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_corpus(tmp_path, pairs=5, longest=12)
    return Corpus(tmp_path, "train")


def batch_of(corpus: Corpus, layout: str) -> Batch:
    pairs = np.arange(len(corpus))
    info = UpdateInfo(seed=5, number=4, tokens=int(corpus.target_lengths.sum()), sentences=len(corpus))
    if layout == "padded":
        return collate(corpus, pairs, VOCABULARY, info)
    sizes = (int(lengths.sum()) + 3 for lengths in (corpus.source_lengths, corpus.target_lengths))
    return collate_packed(corpus, PackedPart(pairs, *sizes), VOCABULARY, info)


def model_of(method: str) -> TranslationModel:
    config = settings_of(method)
    return build_model(config, VOCABULARY).double().train()


def run(model: TranslationModel, batch: Batch, *, every: int = 0, passes: int = 1) -> list[Tensor]:
    """Return the loss, the entropy of the highest layer, and the gradients."""
    model.recompute(every, every)
    module = TrainModule(
        model, Objective(LabelSmoothed(0.1, VOCABULARY.pad), [Entropy(max(model.attention_layers()), passes)])
    )
    output = module(batch)
    entropy = output.metrics["entropy"]
    assert 1.0 < float(entropy) < 1000.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output.loss, parameters, allow_unused=True)
    return [output.loss, entropy, *(g for g in gradients if g is not None)]


WITHOUT = ("abnet", "added_exits", "deep_decoder", "dlcl", "gnmt", "convs2s", "coordination")
"""Methods in whose self-test no layer attends in every update, or none that attends is trained."""
RECORDING = [name for name in methods() if name not in WITHOUT]


@pytest.mark.parametrize("method", RECORDING)
def test_layouts_and_recomputation_hand_over_the_same_weights(corpus: Corpus, method: str) -> None:
    model = model_of(method)
    expected = run(model, batch_of(corpus, "padded"), passes=2)
    layouts = LAYOUTS[: 1 + settings_of(method).model.packed]
    for layout in layouts:
        for ours, theirs in zip(run(model, batch_of(corpus, layout), every=1, passes=2), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_recomputation_gives_the_same_bits_with_dropout(corpus: Corpus) -> None:
    model = build_model(settings_of("vanilla", dropout=0.3), VOCABULARY).train()
    results = []
    for every in (0, 1):
        torch.manual_seed(3)
        results.append(run(model, batch_of(corpus, "packed"), every=every))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("method", RECORDING)
def test_weights_are_those_that_alignments_read(corpus: Corpus, method: str) -> None:
    model = model_of(method)
    batch, layer = batch_of(corpus, "padded"), max(model.attention_layers())
    attention = model.cross_attentions()[layer]
    passes = Passes(model, batch)
    name = passes.request_attention(layer)
    (states,) = passes.run()
    with watched([attention]) as seen:
        expected_BTD = model(batch)
    torch.testing.assert_close(states[TOP], expected_BTD, rtol=0, atol=0)
    torch.testing.assert_close(states[name], seen[attention], rtol=1e-12, atol=0)
    torch.testing.assert_close(states[name].sum(dim=2), torch.ones_like(states[name][..., 0]), rtol=1e-12, atol=0)
    assert not states[name].masked_select(batch.source_rows().eq(VOCABULARY.pad).unsqueeze(1)).any()


def test_with_several_encoder_exits_weights_are_those_of_the_top(corpus: Corpus) -> None:
    model, batch = model_of("exits"), batch_of(corpus, "packed")
    layer, weights = max(model.attention_layers()), []
    for exits in ([model.stages[0]], [model.stages[0], 1], [1, model.stages[0]]):
        passes = Passes(model, batch)
        passes.encoder_exits = exits
        name = passes.request_attention(layer)
        passes.add_pass(passes.add_source(batch.source_BS.flip(1)))
        weights.append([states[name] for states in passes.run()])
    for ours in weights[1:]:
        torch.testing.assert_close(ours, weights[0], rtol=1e-12, atol=0)
    assert not torch.equal(*weights[0])


def test_gradients_are_those_of_the_entropy(corpus: Corpus) -> None:
    model = model_of("vanilla")
    batch = batch_of(corpus, "packed")
    weight = model.cross_attentions()[2].q_proj.bias
    assert weight is not None

    def entropy(bias: Tensor) -> Tensor:
        with torch.no_grad():
            weight.copy_(bias)
        passes = Passes(model, batch)
        value = Entropy(2).request_passes(passes)
        return value(passes.run())

    start = weight.detach().clone()
    (gradient,) = torch.autograd.grad(entropy(start), [weight])
    direction = torch.randn_like(start)
    numeric = (entropy(start + 1e-5 * direction) - entropy(start - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-9)


def test_a_layer_without_weights_in_every_update_is_refused(corpus: Corpus) -> None:
    batch = batch_of(corpus, "padded")
    for method, layer, said in (
        ("vanilla", 3, "are 1, 2"),
        ("abnet", 1, "are none"),
        ("deep_decoder", 4, "layer 4 "),
    ):
        passes = Passes(model_of(method), batch)
        with pytest.raises(ConfigError, match=said):
            passes.request_attention(layer)
