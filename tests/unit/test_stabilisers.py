"""Residual connections of deep stacks: equations, how they begin, Admin's profile, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.description import NotStandardError
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.optimizer import set_lr
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.stabilisers import Admin, CompleteP, profile
from deepspeed_nmt.train.optimizers.adafactor import AdafactorConfig
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig
from deepspeed_nmt.train.optimizers.muon import MuonConfig
from tests.equations import attend
from tests.transformer_equations import embed, network, norm

V = Vocabulary(40)
HEADS = 2
SHAPE = {"dim": 8, "ffn_dim": 12, "heads": HEADS, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.0}
NORMS = ["b2t", "admin", "layernorm_scaling", "peri", "layer_scale", "completep"]
SOURCE, TARGET = [7, 8, 9, 10, 2], [1, 17, 18, 19]
Function = Callable[[Tensor], Tensor]


def built(**model: Any) -> Any:
    """Build a model in float64."""
    settings = {"name": "transformer", **SHAPE, **model}
    return build_model(validate({"model": settings}), V).double()


def connect(kind: str, part: Any, number: int, x: Tensor, f: Function, bottom: Tensor | None = None) -> Tensor:
    """Connect a sub-layer f of layer ``number``; ``bottom`` is the layer's input, given to its last sub-layer."""
    if kind == "b2t":
        return norm(part.norm, x + f(x) if bottom is None else x + bottom + f(x))
    if kind == "admin":
        return norm(part.norm, part.branch_scale * x + f(x))
    if kind == "layernorm_scaling":
        return x + f(norm(part.norm, x) / math.sqrt(number))
    if kind == "peri":
        return x + norm(part.output_norm, f(norm(part.norm, x)))
    if kind == "completep":
        return x + part.output_scale * f(norm(part.norm, x))
    assert kind == "layer_scale"
    return x + part.output_scale * f(norm(part.norm, x))


def encoder_layer(kind: str, layer: Any, number: int, bottom: Tensor) -> Tensor:
    x = connect(kind, layer.self_residual, number, bottom, lambda h: attend(layer.self_attention, HEADS, h, h))
    return connect(kind, layer.feed_forward_residual, number, x, lambda h: network(layer.feed_forward, h), bottom)


def decoder_layer(kind: str, layer: Any, number: int, bottom: Tensor, memory: Tensor) -> Tensor:
    own = lambda h: attend(layer.self_attention, HEADS, h, h, causal=True)  # noqa: E731
    y = connect(kind, layer.self_residual, number, bottom, own)
    y = connect(kind, layer.cross_residual, number, y, lambda h: attend(layer.cross_attention, HEADS, h, memory))
    return connect(kind, layer.feed_forward_residual, number, y, lambda h: network(layer.feed_forward, h), bottom)


def states(kind: str, model: Any) -> Tensor:
    """Compute the decoder's states."""
    x, y = embed(model.source_embedding.weight, SOURCE), embed(model.target_embedding.weight, TARGET)
    is_post = kind in ("b2t", "admin")
    for number, layer in enumerate(model.encoder.layers, 1):
        x = encoder_layer(kind, layer, number, x)
    memory = x if is_post else norm(model.encoder.final_norm, x)
    for number, layer in enumerate(model.decoder.layers, 1):
        y = decoder_layer(kind, layer, number, y, memory)
    return y if is_post else norm(model.decoder.final_norm, y)


@pytest.mark.parametrize("kind", NORMS)
def test_states_and_gradients_are_those_of_the_equations(kind: str) -> None:
    model = built(norm=kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    expected = states(kind, model)
    (computed,) = model.decode(torch.tensor([TARGET]), model.encode(torch.tensor([SOURCE])))
    torch.testing.assert_close(computed[0], expected, rtol=1e-6, atol=1e-6)  # positions are computed in fp32
    weights = torch.randn_like(expected)
    own = torch.autograd.grad((computed[0] * weights).sum(), list(model.parameters()), retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), list(model.parameters()))
    for (name, _), one, other in zip(model.named_parameters(), own, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
def test_admin_profiles_in_the_order_of_computation() -> None:
    model = built(norm="admin", encoder_layers=3)
    parts = [part for part in model.modules() if isinstance(part, Admin)]
    assert all(len(part.branch_scale.unique()) == 1 for part in parts)
    torch.manual_seed(5)
    profile(model, 40, 40)
    scales = [float(part.branch_scale.detach()[0]) for part in model.encoder.modules() if isinstance(part, Admin)]
    torch.manual_seed(5)
    x = model.source_embedding(torch.randint(40, (64, 32)))
    expected, variance = [], None
    for layer in model.encoder.layers:
        attention, feed_forward = layer.self_attention, layer.feed_forward
        for part, f in (
            (layer.self_residual, lambda h, a=attention: a(h, h, None).total()),
            (layer.feed_forward_residual, lambda h, n=feed_forward: n(h).total()),
        ):
            expected.append(1.0 if variance is None else math.sqrt(variance))
            branch, output = expected[-1] * x, f(x)
            variance = float(branch.var(correction=0)) + float(output.var(correction=0))
            x = part.norm(branch + output)
    assert scales == pytest.approx(expected)
    assert scales == sorted(scales) and scales[0] == 1.0 and scales[-1] > 1.5
    assert all(part.watch is None and not part._forward_pre_hooks for part in parts)


@pytest.mark.parametrize(("layers", "start"), [(18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
def test_layer_scale_begins_by_depth(layers: int, start: float) -> None:
    model = built(norm="layer_scale", encoder_layers=layers)
    scales = {
        float(part.output_scale.detach().max()) for part in model.encoder.modules() if hasattr(part, "output_scale")
    }
    assert list(scales) == [pytest.approx(start)]
    assert model.decoder.layers[0].self_residual.output_scale[0].item() == pytest.approx(0.1)


def test_completep_divides_by_the_depth_of_each_stack() -> None:
    model = built(norm="completep", encoder_layers=24, base_layers=6)
    scales = [
        {part.output_scale for part in stack.modules() if isinstance(part, CompleteP)}
        for stack in (model.encoder, model.decoder)
    ]
    assert scales == [{0.25}, {2.0}]


def moved(dim: int, base_dim: int | None = None) -> tuple[float, float]:
    """Return by how much (RMS) three steps of Adam move the decoder's states and the logits."""
    torch.manual_seed(1)
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    model = built(norm="completep", dim=dim, heads=dim // 8, ffn_dim=2 * dim, base_dim=base_dim, **layers)
    optimizer = AdamConfig(lr=1e-4).over(model)
    set_lr(optimizer, 1e-4)
    source, target = torch.randint(3, 40, (8, 6)), torch.randint(3, 40, (8, 7))

    def computed() -> tuple[Tensor, Tensor]:
        (states,) = model.decode(target[:, :-1], model.encode(source))
        return states / states.detach().std(), model.projection(states)

    before = computed()
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(computed()[1].transpose(1, 2), target[:, 1:]).backward()
        optimizer.step()
    states, logits = (float((new - old).detach().std()) for new, old in zip(computed(), before, strict=True))
    return states, logits


def test_with_the_width_of_its_base_a_wider_model_moves_as_far_in_each_update() -> None:
    narrow, wide, without = moved(32), moved(256, base_dim=32), moved(256)
    assert moved(32, base_dim=32) == narrow
    for base, ruled, free in zip(narrow, wide, without, strict=True):
        assert 0.5 < ruled / base < 1.3 and free / base > 5.0


def test_completep_gives_adam_the_rates_of_the_paper() -> None:
    model = built(norm="completep", dim=32, base_dim=8, encoder_layers=4, base_layers=2, share_embeddings="none")
    groups = AdamWConfig(lr=1.0, weight_decay=0.1, eps=1e-6).over(model).param_groups
    found = {p: (g["lr_scale"], g["weight_decay"], g["eps"]) for g in groups for p in g["params"]}
    layer = model.encoder.layers[0]
    matrix, bias = found[layer.feed_forward.up_proj.weight], found[layer.self_residual.norm.bias]
    assert matrix == pytest.approx((1 / 4, 0.4, 1e-6 / 8)) and bias == pytest.approx((1.0, 0.0, 1e-6 / 8))
    matrix = found[model.decoder.layers[2].cross_attention.q_proj.weight]
    assert matrix == pytest.approx((1 / 4, 0.4, 1e-6 / 4 * 2 / 3))
    for weight in (model.source_embedding.weight, model.target_embedding.weight, model.projection.weight):
        assert found[weight] == pytest.approx((1 / 2, 0.2, 1e-6 / 2))
    assert found[model.decoder.final_norm.weight] == pytest.approx((1 / 2, 0.0, 1e-6 / 2))
    assert found[model.encoder.final_norm.weight] == pytest.approx((1.0, 0.0, 1e-6 / 4))
    assert float(model.decoder.final_norm.weight.detach().mean()) == pytest.approx(1 / 2)
    for optimizer in (MuonConfig(), AdafactorConfig()):
        with pytest.raises(ConfigError, match="base_dim has rules for the learning rates of Adam"):
            optimizer.over(model)
    deep = built(norm="completep", encoder_layers=12)
    with pytest.raises(ConfigError, match="weight decay apart from the gradient"):
        AdamConfig(weight_decay=0.1).over(deep)
    AdamConfig().over(deep)


def test_completep_has_the_rates_of_biases_for_vectors_of_distances() -> None:
    """They are added to keys and values as biases are: as many for each unit whatever the width."""
    shape = {"dim": 32, "heads": 4, "base_dim": 8, "encoder_layers": 4, "base_layers": 2}
    model = built(name="relative_positions", norm="completep", **shape)
    rates, layer = model.rates(), model.encoder.layers[0]
    edges, bias = rates[layer.self_attention.key_edges], rates[layer.self_residual.norm.bias]
    assert edges == bias == (1.0, 1.0, 1 / 8) and rates[layer.self_attention.k_proj.weight] == (1 / 4, 4.0, 1 / 8)


def test_completep_trains_the_norms_of_added_exits_as_the_last_one() -> None:
    model = {"name": "transformer", **SHAPE, "norm": "completep", "dim": 32, "base_dim": 8}
    added: Any = build_model(validate({"model": model, "objective": {"added_exits": {"exits": [1]}}}), V)
    rates, last, own = added.rates(), added.decoder.final_norm, added.decoder.exits["1"]
    assert rates[own.weight] == rates[last.weight] != (1.0, 1.0, 1.0) and rates[own.bias] == rates[last.bias]


def test_at_zero_every_layer_begins_as_the_identity() -> None:
    model = built(norm="layer_scale", layer_scale=0.0)
    source = torch.tensor([SOURCE])
    memory = model.encode(source).states_BSD
    torch.testing.assert_close(memory, model.encoder.final_norm(model.source_embedding(source)))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"norm": "b2t", "decoder_norm": "pre"}, "norm=b2t is for both stacks"),
        ({"norm": "layernorm_scaling", "init": "depth_scaled"}, "scaling by depth of its own; set init=xavier"),
        ({"norm": "completep", "init": "depth_scaled"}, "scaling by depth of its own; set init=xavier"),
        ({"layer_scale": 0.1}, "layer_scale is a setting of norm=layer_scale only"),
        ({"norm": "post", "base_layers": 6}, "base_layers is a setting of norm=completep only"),
        ({"norm": "pre", "base_dim": 8}, "base_dim is a setting of norm=completep only"),
        ({"name": "dlcl", "norm": "peri"}, "norm is peri, which model.name=dlcl does not have; use pre or post"),
        ({"name": "recurrent", "norm": "admin"}, "use pre, post, deepnorm, b2t, peri or layer_scale"),
    ],
)
def test_settings_without_a_meaning_are_refused(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        validate({"model": {"name": "transformer", **model}})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("b2t", "add their input again before their last LayerNorm"),
        ("admin", "each unit of its residual branches has a weight"),
        ("peri", "have a LayerNorm at their end, too"),
    ],
)
def test_other_programs_cannot_express_some(kind: str, reason: str) -> None:
    with pytest.raises(NotStandardError, match=reason):
        built(norm=kind).described()


@pytest.mark.parametrize("kind", ["deepnorm", "pre", *NORMS])
def test_a_warm_start_names_constants_that_are_for_another_depth(kind: str) -> None:
    """Layers of a shallower model in a deeper one compute something else if constants follow the depth."""
    shallow, deeper = (validate({"model": {**SHAPE, "norm": kind, "decoder_layers": m}}).model for m in (3, 5))
    phrase = f"constants of model.norm={kind} are for 2+3 layers there and 2+5 here"
    assert deeper.composition_differences(shallow) == [phrase] * (kind in ("deepnorm", "completep"))
    assert not deeper.composition_differences(deeper)


def test_a_warm_start_takes_what_settings_mean() -> None:
    for unset, given in (
        ({"norm": "completep"}, {"norm": "completep", "base_layers": 6}),
        ({"norm": "pre"}, {"norm": "pre", "decoder_norm": "pre"}),
    ):
        one, other = (validate({"model": {**SHAPE, **model}}).model for model in (unset, given))
        one.check_shape_of(other, "RUN")
    with pytest.raises(ConfigError, match="base_layers is 6 there and 3 here"):
        validate({"model": {**SHAPE, "norm": "completep", "base_layers": 3}}).model.check_shape_of(
            validate({"model": {**SHAPE, "norm": "completep"}}).model, "RUN"
        )
