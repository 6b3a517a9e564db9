"""DLCL: states and gradients are those of the equations, exits are shallower models, and what is refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from deepspeed_nmt.config import validate
from deepspeed_nmt.core.description import NotStandardError
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.dlcl import DLCLConfig, build_dlcl
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import Transformer
from tests import transformer_equations as equations
from tests.models import add_noise, assert_as_transcribed, two_pairs

V = Vocabulary(40)
SHAPE = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 3, "decoder_layers": 2, "dropout": 0.0}


def dlcl(**settings: object) -> Transformer:
    torch.manual_seed(1)
    model = build_dlcl(DLCLConfig.model_validate({**SHAPE, **settings}), V).double()
    add_noise(model)  # biases and LayerNorms start at 0 and 1, which would hide mistakes
    return model


def combined(stack: nn.Module, layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor, norm: str) -> Tensor:
    """Compute x_L, in pre-norm with the stack's final LayerNorm; ``layers`` are F_1 .. F_L."""
    sums, norms = [each.weight for each in stack.links.sums], list(stack.links.norms)
    states, below = [x], sums[0][0] * x
    for number, layer in enumerate(layers, 1):
        y = layer(below)
        states.append(equations.norm(norms[number - 1], y) if norm == "pre" else y)
        below = sum(weight * state for weight, state in zip(sums[number], states, strict=True))
        below = equations.norm(norms[number - 1], below) if norm == "post" else below
    return equations.norm(stack.final_norm, below) if norm == "pre" else below


@pytest.mark.parametrize(("norm", "decoder_norm"), [("pre", "pre"), ("pre", "post"), ("post", "post")])
def test_states_and_gradients_are_those_of_the_equations(norm: str, decoder_norm: str) -> None:
    model, data = dlcl(norm=norm, decoder_norm=decoder_norm).train(), two_pairs()
    expected = []
    for source_S, input_T in zip(data.source_BS, data.target_input_BT, strict=True):
        x = model.source_embedding(source_S[source_S.ne(0)][None])[0]
        y = model.target_embedding(input_T[input_T.ne(0)][None])[0]
        encode = [lambda h, f=f: equations.encoder_layer(f, norm, 2, h) for f in model.encoder.layers]
        memory = combined(model.encoder, encode, x, norm)
        decode = [
            lambda h, f=f, m=memory: equations.decoder_layer(f, decoder_norm, 2, h, m) for f in model.decoder.layers
        ]
        expected.append(combined(model.decoder, decode, y, decoder_norm))
    assert_as_transcribed(model, data, expected)


def test_combinations_begin_as_means_and_exits_are_shallower_models() -> None:
    torch.manual_seed(1)
    model = build_dlcl(DLCLConfig.model_validate(SHAPE), V).eval()
    assert [each.weight.tolist() for each in model.decoder.links.sums] == [
        pytest.approx([1 / n] * n) for n in (1, 2, 3)
    ]
    model, data = dlcl().eval(), two_pairs()
    shallow = dlcl(encoder_layers=2, decoder_layers=1).eval()
    shallow.load_state_dict(model.at_exit("2-1").state_dict())
    torch.testing.assert_close(model.at_exit("2-1")(data), shallow(data), rtol=0, atol=0)


def test_the_base_model_of_30_and_6_layers_has_the_printed_parameters() -> None:
    with torch.device("meta"):
        model = build_dlcl(DLCLConfig(encoder_layers=30), Vocabulary(32_768))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(137e6, rel=0.01)
    assert sum(each.numel() for name, each in model.named_parameters() if "links.sums" in name) == 31 * 16 + 7 * 4


def test_one_layer_with_one_head_trains() -> None:
    model = dlcl(heads=1, encoder_layers=1, decoder_layers=1, dim=5).train()
    Objective(LabelSmoothed(0.1, V.pad))(model, two_pairs()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_deepnorm_and_exports_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"deepnorm.*model\.name=dlcl"):
        validate({"model": {"name": "dlcl", "norm": "deepnorm"}})
    with pytest.raises(NotStandardError, match="encoder do not read the state below"):
        dlcl().described()
