"""Growth in the course of a run: what layers and moments begin as, what it leaves as it was, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.contract import ParameterState
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parity import Saved
from deepspeed_nmt.train.growth import Grown, begins_as
from tests.models import two_pairs

V = Vocabulary(40)
SHAPE = ["model.dim=16", "model.ffn_dim=24", "model.heads=2", "model.dropout=0", "optimizer.lr=1e-3"]
GROWN = ["model.encoder_layers=5", "model.decoder_layers=4", "growth.encoder_layers=[2]", "growth.decoder_layers=[2]"]


def settings(by: str, *more: str) -> RunConfig:
    return load_config(settings=[*SHAPE, *GROWN, "growth.at=[10]", f"growth.by={by}", *more])


def disturbed(config: RunConfig) -> torch.nn.Module:
    """Build a model in float64 whose biases and LayerNorms are not those that would hide mistakes."""
    model = build_model(config, V).double().eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def grown(config: RunConfig) -> tuple[Saved, Grown, torch.nn.Module, torch.nn.Module]:
    """Return a shallow model's state, the grown one, and both models."""
    before, after = config.for_update(10), config.for_update(11)
    shallow, deep = disturbed(before), build_model(after, V).double().eval()
    saved = Saved(
        ParameterState(name, p.detach(), {"exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)[..., :1]})
        for name, p in shallow.named_parameters()
    )
    state = Grown(saved, saved.weights, deep, before=before.model, after=after.model, by=config.growth.by)
    state.load_into(deep)
    return saved, state, shallow, deep


@pytest.mark.parametrize(
    ("by", "before", "after", "expected"),
    [
        ("stack", 2, 5, [{0: 1}, {1: 1}, {0: 1}, {1: 1}, {0: 1}]),
        ("stack", 4, 6, [{0: 1}, {1: 1}, {2: 1}, {3: 1}, {2: 1}, {3: 1}]),
        ("adjacent", 2, 5, [{0: 1}, {0: 1}, {0: 1}, {1: 1}, {1: 1}]),
        ("interpolate", 2, 5, [{0: 1}, {0: 0.75, 1: 0.25}, {0: 0.5, 1: 0.5}, {0: 0.25, 1: 0.75}, {1: 1}]),
        ("interpolate", 1, 3, [{0: 1}] * 3),
        ("zero", 2, 4, [{0: 1}, {1: 1}, {}, {}]),
        *((by, 1, 1, [{0: 1}]) for by in ("stack", "adjacent", "interpolate", "zero")),
        *((by, 3, 3, [{0: 1}, {1: 1}, {2: 1}]) for by in ("stack", "adjacent", "interpolate", "zero")),
    ],
)
def test_layers_begin_as_the_formulas_say(by: Any, before: int, after: int, expected: list[dict[int, float]]) -> None:
    assert [begins_as(layer, before, after, by) for layer in range(after)] == expected


@pytest.mark.parametrize("by", ["stack", "adjacent", "interpolate"])
def test_weights_and_moments_are_the_same_sums(by: Any) -> None:
    saved, state, _, deep = grown(settings(by))
    names = [name for name, _ in deep.named_parameters()]
    assert any(name.startswith("encoder.layers.4.") for name in names)
    for name in names:
        side, _, rest = name.partition(".layers.")
        number, _, of = rest.partition(".")

        def by_hand(take: Any, side: str = side, number: str = number, of: str = of, name: str = name) -> Tensor:
            if not of:
                return take(name)
            sums = begins_as(int(number), 2, 5 if side == "encoder" else 4, by)
            return sum(factor * take(f"{side}.layers.{layer}.{of}") for layer, factor in sums.items())

        expected = by_hand(saved.weight)
        assert torch.equal(deep.get_parameter(name), expected) and torch.equal(state.weight(name), expected)
        for which in ("exp_avg", "exp_avg_sq"):
            moment = by_hand(lambda other, which=which: saved.optimizer_state(other, which))
            assert torch.equal(state.optimizer_state(name, which), moment), name


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["model.norm=layernorm_scaling"],
        ["model.norm=layer_scale"],
        ["model.norm=layer_scale", "model.layer_scale=0"],
        ["layer.name=merged_attention"],
        ["layer.name=cross_attention_drop", "layer.drop_depth=1", "layer.drop_ratio=0.5"],
    ],
    ids=lambda more: more[0] if more else "pre",
)
def test_layers_of_zero_leave_the_function_as_it_was(more: list[str]) -> None:
    saved, state, shallow, deep = grown(settings("zero", *more))
    data, scaled = two_pairs(), "model.layer_scale=0" in more
    zeros = (".output_scale",) if scaled else (".out_proj.", ".down_proj.")
    torch.testing.assert_close(deep(data), shallow(data), rtol=0, atol=1e-12)
    for name, parameter in deep.named_parameters():
        if name not in saved.weights:
            moment = state.optimizer_state(name, "exp_avg_sq")
            assert moment.tolist() == torch.zeros_like(parameter)[..., :1].tolist()
            assert bool(parameter.any()) != (any(part in name for part in zeros) or name.endswith("bias"))
    deep.train()(data).square().sum().backward()
    learning = "feed_forward_residual.output_scale" if scaled else "feed_forward.down_proj.weight"
    assert deep.get_parameter(f"encoder.layers.4.{learning}").grad.abs().max() > 0


def test_an_encoder_of_sdt_grows_by_its_own_rule() -> None:
    sdt = ["model.name=sdt", "model.stack_layers=2", "model.encoder_layers=6", "growth.decoder_layers=[4]"]
    saved, state, _, deep = grown(settings("stack", *sdt))
    for number in (2, 4):
        name = f"encoder.layers.{number}.self_attention.q_proj.weight"
        assert torch.equal(deep.get_parameter(name), saved.weight("encoder.layers.0.self_attention.q_proj.weight"))
    assert torch.equal(deep.get_parameter("encoder.links.norms.2.bias"), saved.weight("encoder.links.norms.0.bias"))
    assert deep.get_parameter("encoder.links.sums.3.weight").tolist() == [0.25] * 4
    assert state.optimizer_state("encoder.links.sums.3.weight", "exp_avg").tolist() == [0.0] * 4
    moment = state.optimizer_state("encoder.links.norms.2.bias", "exp_avg")
    assert torch.equal(moment, saved.optimizer_state("encoder.links.norms.0.bias", "exp_avg"))


def test_the_depth_follows_from_the_update() -> None:
    at = ["growth.at=[10,20]", "growth.encoder_layers=[1,3]", "growth.decoder_layers=[2,2]"]
    config = load_config(settings=[*SHAPE, *at, "model.encoder_layers=6", "model.decoder_layers=4"])
    depths = [config.for_update(update).model for update in (0, 1, 10, 11, 20, 21, 999)]
    assert [model.encoder_layers for model in depths] == [1, 1, 1, 3, 3, 6, 6]
    assert [model.decoder_layers for model in depths] == [2, 2, 2, 2, 2, 4, 4]
    assert RunConfig().for_update(5) == RunConfig()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["growth.at=[10,10]"], "growth: at is [10, 10]; give ascending"),
        (["growth.at=[0]"], "growth.at.0 is 0"),
        (["growth.at=[]"], "growth: encoder_layers has 1 depths, but at has 0"),
        (["growth.encoder_layers=[]", "growth.decoder_layers=[]"], "growth: at is [10], but no depths"),
        (["growth.at=[10,20]", "growth.encoder_layers=[3,2]"], "growth: encoder_layers is [3, 2]; a stack only"),
        (["growth.encoder_layers=[9]"], "growth.encoder_layers ends with 9, above model.encoder_layers=5"),
        (["growth.encoder_layers=[5]", "growth.decoder_layers=[4]"], "growth that adds no layer"),
        (["growth.by=double"], "growth.by is 'double'"),
        (
            ["growth.by=zero", "model.norm=post"],
            "a model.name=transformer of these settings cannot grow by zero; use growth.by=stack",
        ),
        (["growth.by=zero", "model.norm=completep"], "cannot grow by zero"),
        (["growth.by=zero", "model.norm=peri"], "cannot grow by zero; use growth.by=stack or"),
        (["model.name=recurrent"], "a model.name=recurrent of these settings cannot grow; remove growth.at"),
        (["model.name=depth_growing"], "a model.name=depth_growing of these settings cannot grow"),
        (["model.name=dlcl", "growth.by=adjacent"], "use growth.by=stack"),
        (["objective.label_smoothed=null", "objective.multi_softmax={}"], "the objective trains exits"),
        (
            ["layer.name=cross_attention_drop", "layer.drop_depth=3", "layer.drop_ratio=0.5"],
            "before update 10, layer.drop_depth is 3",
        ),
        (
            ["layer.name=cross_attention_drop", "layer.drop_depth=1", "layer.drop_ratio=1"],
            "some decoder layers have no cross-attention",
        ),
        (["model.name=sdt", "model.stack_layers=5"], "before update 10, encoder_layers is 2, no multiple of"),
        (
            [
                "model.name=sdt",
                "model.stack_layers=2",
                "model.encoder_layers=6",
                "growth.at=[10,20]",
                "growth.encoder_layers=[2,3]",
                "growth.decoder_layers=[2,4]",
            ],
            "before update 20, encoder_layers is 3, no multiple of",
        ),
    ],
    ids=lambda text: text[-1] if isinstance(text, list) else "",
)
def test_what_cannot_grow_is_refused_in_a_sentence(more: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings("stack", *more)
    (problem,) = caught.value.problems
    assert sentence in problem and len(problem) < 400


def test_a_decoder_that_does_not_grow_may_have_layers_without_cross_attention() -> None:
    drop = ["layer.name=cross_attention_drop", "layer.drop_depth=1", "layer.drop_ratio=1"]
    assert settings("stack", *drop, "growth.decoder_layers=[4]").growth.at == (10,)
