"""Transparent attention: equations, gradients, decoding, and the exits that it lacks."""

import pytest
import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.methods.transparent_attention import (
    TransparentAttentionConfig,
    TransparentTransformer,
    build_transparent_attention,
)
from tests import transformer_equations as equations
from tests.support import batch_of

V = Vocabulary(40)
SHAPE = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 3, "decoder_layers": 2, "dropout": 0.0}


def transparent(norm: str = "post", mixture_dropout: float = 0.0) -> TransparentTransformer:
    torch.manual_seed(1)
    settings = {**SHAPE, **equations.norms(norm), "mixture_dropout": mixture_dropout}
    model = build_transparent_attention(TransparentAttentionConfig.model_validate(settings), V).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.mixtures.logits.mul_(10.0)
    return model


def batch() -> Batch:
    source = torch.tensor([[7, 8, 9, 10, 11, 2], [12, 13, 14, 2, 0, 0]])
    output = torch.tensor([[17, 18, 19, 2], [22, 2, 0, 0]])
    return batch_of(source, torch.tensor([[1, 17, 18, 19], [1, 22, 0, 0]]), output)


@pytest.mark.parametrize("norm", ["pre", "post", "pre/post"])
def test_loss_and_gradients_are_those_of_the_equations(norm: str) -> None:
    model, data = transparent(norm).train(), batch()
    weight, expected = model.projection.weight, torch.zeros((), dtype=torch.float64)
    for row, (source, target) in enumerate([([7, 8, 9, 10, 11, 2], [17, 18, 19]), ([12, 13, 14, 2], [22])]):
        states = equations.transparent(model, norm, 2, source, [V.bos, *target])
        torch.testing.assert_close(model(data)[row, : len(states)], states, rtol=1e-6, atol=1e-6)
        expected = expected + equations.smoothed_loss(equations.log_probs(states, weight), [*target, V.eos], 0.1)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(expected, list(parameters.values()))
    TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))(data).loss.backward()
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: n + text)
    assert float(parameters["mixtures.logits"].grad.abs().min()) > 1e-6


def test_a_mixture_of_the_last_state_alone_is_a_transformer() -> None:
    torch.manual_seed(1)
    plain = build_transformer(TransformerConfig.model_validate(SHAPE), V).double().eval()
    torch.manual_seed(1)
    mixed = build_transparent_attention(TransparentAttentionConfig.model_validate(SHAPE), V).double().eval()
    assert torch.equal(mixed.mixtures.logits, torch.zeros(4, 2, dtype=torch.float64))
    assert not torch.allclose(mixed(batch()), plain(batch()))
    with torch.no_grad():
        mixed.mixtures.logits[-1] = 100.0
    torch.testing.assert_close(mixed(batch()), plain(batch()), rtol=1e-12, atol=1e-12)
