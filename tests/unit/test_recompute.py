"""Recomputation changes memory and time, but not the results."""

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.parity import methods, settings_of
from tests.models import two_pairs

V = Vocabulary(40)


def built(method: str) -> tuple[TranslationModel, Objective]:
    """Return model and objective of a case of `selftest`, with dropout."""
    config = settings_of(method, dropout=0.2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention_dropout": 0.1})})
    torch.manual_seed(1)
    return build_model(config, V), build_objective(config, V)


def gradients(method: str, every: tuple[int, int], update: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    model, objective = built(method)
    model.recompute(*every)
    torch.manual_seed(2)
    loss = objective(model.train(), two_pairs(update)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize(("every", "update"), [((1, 1), 1), ((1, 1), 2), ((2, 0), 2), ((0, 2), 2)])
def test_loss_and_gradients_are_the_same_bits(method: str, every: tuple[int, int], update: int) -> None:
    loss, plain = gradients(method, (0, 0), update)
    again, recomputed = gradients(method, every, update)
    assert torch.equal(loss, again)
    for name, gradient in plain.items():
        if gradient is None:
            assert recomputed[name] is None
        else:
            assert recomputed[name] is not None and torch.equal(gradient, recomputed[name]), name


def test_recomputation_saves_fewer_tensors() -> None:
    def kept(every: int) -> int:
        model, objective = built("vanilla")
        model.recompute(every, every)
        seen: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective(model.train(), two_pairs(1))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for pointer, size in seen.items() if pointer not in parameters)

    assert kept(1) < 0.5 * kept(2) < 0.5 * kept(0)
