"""Depth growing: equations, freezing, exits."""

from collections.abc import Iterator

import pytest
import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.depth_growing import DepthGrowing, DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.nn.layers import Draw
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.counting import sizes
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests import transformer_equations as equations
from tests.models import two_pairs

V = Vocabulary(40)


def growing(dropout: float = 0.0, **settings: object) -> DepthGrowing:
    torch.manual_seed(1)
    shape = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "norm": "post"}
    config = DepthGrowingConfig.model_validate({**shape, "dropout": dropout, **settings})
    return build_depth_growing(config, V)


def sentences(data: Batch) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yield source, target with BOS, and target with EOS of each sentence, without padding."""
    for rows in zip(data.source_BS, data.target_input_BT, data.target_output_BT, strict=True):
        source, target_input, target_output = ([token for token in row.tolist() if token != V.pad] for row in rows)
        yield source, target_input, target_output


@pytest.mark.parametrize(
    ("norm", "residual_norm", "attend"),
    [
        ("pre", True, "h1"),
        ("post", False, "h1_plus_input"),
        ("post", True, "h1"),
        ("post/pre", True, "h1_plus_input"),
    ],
)
def test_loss_and_gradients_are_those_of_the_equations(norm: str, residual_norm: bool, attend: str) -> None:
    """Equations 1 to 3 of Wu et al. 2019, for both exits, with the gradients of all that is trained."""
    model, data = (
        growing(**equations.norms(norm), residual_norm=residual_norm, attend=attend).double().train(),
        two_pairs(),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    weight, expected = model.projection.weight, torch.zeros((), dtype=torch.float64)
    for row, (source, target_input, target_output) in enumerate(sentences(data)):
        s2 = equations.grown(model, norm, 2, source, target_input, attend == "h1_plus_input")
        expected = expected + equations.smoothed_loss(equations.log_probs(s2, weight), target_output, 0.1)
        s1 = equations.bottom(model.bottom, norm, 2, source, target_input)
        torch.testing.assert_close(model(data)[row, : len(s2)], s2, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model.at_exit("shallow")(data)[row, : len(s1)], s1, rtol=1e-6, atol=1e-6)
    loss = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))(data).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6, check_dtype=False)
    gradients = torch.autograd.grad(expected, list(trained.values()))
    loss.backward()
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        assert float(gradient.abs().max()) > 1e-3, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: n + text)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if name not in trained)


def test_the_bottom_is_frozen_to_the_bit_and_has_no_optimizer_state() -> None:
    model = growing(dropout=0.1)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    moving = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in frozen} == {"bottom"}
    trained = sum(p.numel() for name, p in model.named_parameters() if name not in frozen)
    assert sizes(model) == (trained, sum(p.numel() for p in frozen.values()))
    assert {name.split(".")[0] for name in moving} == {"top_encoder", "top_decoder", "source_norm", "target_norm"}
    module = TrainModule(model, Objective(LabelSmoothed(0.1, 0)))
    world = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
    engine = PlainEngine(module, AdamConfig(), "fp32", world)
    for update in range(1, 4):
        engine.update([two_pairs(update)], 6, 0.01)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], weight) for name, weight in frozen.items())
    assert all(not torch.equal(now[name], weight) for name, weight in moving.items())
    assert all(now[name].grad is None for name in frozen)
    assert {state.name for state in engine.state() if state.states} == set(moving)


@pytest.mark.parametrize("frozen_dropout", [True, False])
def test_dropout_of_the_frozen_part_can_be_switched_off(frozen_dropout: bool) -> None:
    model, data = growing(dropout=0.5, frozen_dropout=frozen_dropout).train(), two_pairs()
    first, second = (model.encode(data.source_BS).below_BSD for _ in range(2))
    assert torch.equal(first, second) is not frozen_dropout
    assert not model.eval().bottom.training


def test_drop_depth_counts_the_layers_of_the_top() -> None:
    torch.manual_seed(1)
    config = DepthGrowingConfig(
        dim=16, ffn_dim=24, heads=2, encoder_layers=1, decoder_layers=2, top_decoder_layers=2, dropout=0.0
    )
    drop = CrossAttentionDropConfig(drop_depth=1, drop_ratio=1.0)
    model = build_depth_growing(config, V, lambda number, parts: build_cross_attention_drop(drop, number, parts))
    assert all(layer.cross_attention is not None for layer in model.bottom.decoder.layers)
    assert [layer.cross_attention is None for layer in model.top_decoder.layers] == [True, False]
    assert sorted(model.cross_attending()) == [1, 2, 4]
    model.train().decode(two_pairs().target_input_BT, model.encode(two_pairs().source_BS), Draw(1, 1))
