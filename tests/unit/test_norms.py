"""Norms of gradient and change by layer: against the gradient and the weights themselves, in each precision."""

import math
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import norms
from deepspeed_nmt.engine.norms import Squares, squared_changes
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.kernels.precision import Precision
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.log import norms_by_layer
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig
from tests.support import random_corpus

WORLD = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
V = Vocabulary(50)


@pytest.mark.parametrize(
    ("precision", "optimizer", "decay"),
    [("fp32", AdamWConfig, 0.5), ("fp32", AdamConfig, 0.5), ("bf16", AdamWConfig, 0.0), ("fp16", AdamWConfig, 0.5)],
)
def test_the_change_is_that_of_the_weights_and_the_gradient_that_before_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision, optimizer: type[AdamConfig], decay: float
) -> None:
    monkeypatch.setattr(norms, "_AT_ONCE", 100)  # most parameters are cut
    torch.manual_seed(1)
    model = build_transformer(TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=2, decoder_layers=1), V)
    model.encoder.layers[0].requires_grad_(False)
    module = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))
    engine = PlainEngine(module, optimizer(weight_decay=decay, clip_norm=0.01), precision, WORLD)
    loader = TrainLoader.of_corpus(
        random_corpus(tmp_path, 40, 50, 1), BatchConfig(update_tokens=300, micro_tokens=60), 1, 0, 1, V
    )
    measured = 0
    for update in loader.updates(Cursor(), 1):
        before = {state.name: state.weight.clone() for state in engine.parameters()}
        result = engine.update(update.micro_batches, update.target_tokens, 2e-3, measure=update.number > 1)
        assert (result.squares is None) == (update.number == 1 or result.skipped)
        if result.squares is not None:
            measured += 1
            after = {state.name: state.weight for state in engine.parameters()}
            trained = [name for name in before if not name.startswith("encoder.layers.0.")]
            expected = {name: float((after[name] - before[name]).norm()) for name in trained}
            found = {name: math.sqrt(value) for name, value in result.squares.change.items()}
            assert found == pytest.approx(expected, rel=1e-3) and min(expected.values()) > 1e-4
            assert list(result.squares.gradient) == trained
            assert math.sqrt(sum(result.squares.gradient.values())) == pytest.approx(result.grad_norm, rel=1e-5)
        if update.number == 4:
            break
    assert measured > 1


def test_norms_are_summed_by_layer_under_tags_that_count_from_one() -> None:
    names = ["source_embedding.weight", "encoder.layers.0.a.weight", "encoder.layers.0.b.bias"]
    names += ["decoder.layers.11.a.weight", "decoder.final_norm.weight"]
    squares = Squares(dict(zip(names, (4.0, 9.0, 16.0, 1.0, 0.0), strict=True)), dict.fromkeys(names, 1.0))
    found = norms_by_layer(squares)
    paths = ["source_embedding", "encoder/layer_01", "decoder/layer_12", "decoder/final_norm"]
    assert list(found) == [f"norm/{kind}/{path}" for kind in ("gradient", "update") for path in paths]
    assert [found[f"norm/gradient/{path}"] for path in paths] == [2.0, 5.0, 1.0, 0.0]
    assert found["norm/update/encoder/layer_01"] == pytest.approx(math.sqrt(2.0))


def test_a_rank_without_a_part_adds_nothing() -> None:
    changes_P = squared_changes(AdamConfig(), [None, None], 1e-3, 1)
    assert changes_P is not None and changes_P.tolist() == [0.0, 0.0]
    assert norms.squares_of([None, torch.full((4,), 3.0), torch.empty(0)]).tolist() == pytest.approx([0.0, 36.0, 0.0])
