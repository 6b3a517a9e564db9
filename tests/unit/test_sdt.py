"""SDT: states and gradients are those of the equations, and what a deeper encoder begins with."""

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.dlcl import DLCLConfig
from deepspeed_nmt.methods.sdt import SDTConfig, build_sdt
from deepspeed_nmt.methods.transformer import Transformer
from tests import transformer_equations as equations
from tests.models import add_noise, assert_as_transcribed, two_pairs

V = Vocabulary(40)
SHAPE = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 4, "decoder_layers": 2, "dropout": 0.0}


def sdt(**settings: object) -> Transformer:
    torch.manual_seed(1)
    model = build_sdt(SDTConfig.model_validate({**SHAPE, "stack_layers": 2, **settings}), V).double()
    add_noise(model)  # biases and LayerNorms start at 0 and 1, which would hide mistakes
    return model


def encoded(model: Transformer, x: Tensor, h: int) -> Tensor:
    """Compute the top of the encoder: x_s of each stack of h layers, then the final LayerNorm."""
    layers, links, outputs, below = list(model.encoder.layers), model.encoder.links, [x], x * 0.0
    for stack in range(len(layers) // h + 1):
        below = sum(w * y for w, y in zip(links.sums[stack].weight, outputs, strict=True))
        for layer in layers[stack * h : (stack + 1) * h]:
            below = equations.encoder_layer(layer, "pre", 2, below)
        if stack < len(links.norms):
            outputs.append(equations.norm(links.norms[stack], below))
    return equations.norm(model.encoder.final_norm, below)


@pytest.mark.parametrize("h", [1, 2, 4])
def test_states_and_gradients_are_those_of_the_equations(h: int) -> None:
    model, data = sdt(stack_layers=h).train(), two_pairs()
    states, links = [], model.decoder.links
    for source_S, input_T in zip(data.source_BS, data.target_input_BT, strict=True):
        memory = encoded(model, model.source_embedding(source_S[source_S.ne(0)][None])[0], h)
        outputs = [model.target_embedding(input_T[input_T.ne(0)][None])[0]]
        for layer, total, norm in zip(model.decoder.layers, links.sums, links.norms, strict=False):
            below = sum(w * y for w, y in zip(total.weight, outputs, strict=True))
            outputs.append(equations.norm(norm, equations.decoder_layer(layer, "pre", 2, below, memory)))
        top = sum(w * y for w, y in zip(links.sums[-1].weight, outputs, strict=True))
        states.append(equations.norm(model.decoder.final_norm, top))
    assert_as_transcribed(model, data, states)


@pytest.mark.parametrize(("layers", "vocabulary", "millions"), [(24, 33_000, 118), (48, 36_000, 194)])
def test_parameters_are_those_of_the_papers_table(layers: int, vocabulary: int, millions: float) -> None:
    with torch.device("meta"):
        model = build_sdt(SDTConfig(encoder_layers=layers), Vocabulary(vocabulary))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layers.12.feed_forward.up_proj.bias", "encoder.layers.6.feed_forward.up_proj.bias"),
        ("encoder.layers.17.self_residual.norm.weight", "encoder.layers.11.self_residual.norm.weight"),
        ("encoder.layers.23.self_residual.norm.weight", "encoder.layers.11.self_residual.norm.weight"),
        ("encoder.links.norms.3.weight", "encoder.links.norms.1.weight"),
        ("encoder.links.sums.3.weight", None),
        ("encoder.layers.3.self_residual.norm.weight", None),
        ("decoder.layers.7.cross_attention.q_proj.weight", None),
    ],
)
def test_layers_above_begin_as_those_a_stack_below(name: str, expected: str | None) -> None:
    assert SDTConfig(encoder_layers=24).begins_as(name, SDTConfig(encoder_layers=12)) == expected


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"encoder_layers is 20, no multiple of stack_layers 6; use .*18 or 24"):
        validate({"model": {"name": "sdt", "encoder_layers": 20}})
    with pytest.raises(ConfigError, match="deepnorm"):
        validate({"model": {"name": "sdt", "norm": "deepnorm"}})
    with pytest.raises(ConfigError, match=r"model\.name is dlcl there and sdt here"):
        SDTConfig().check_shape_of(DLCLConfig(), "RUN")
    with pytest.raises(ConfigError, match="less than the 12 of RUN"):
        SDTConfig().check_shape_of(SDTConfig(encoder_layers=12), "RUN")
