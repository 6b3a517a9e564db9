"""Exits added to a trained model: their loss against its equation, what is frozen, and where they begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.core.description import NotStandardError
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.nn.layers import LayerNorm
from tests.models import two_pairs

V = Vocabulary(40)
SHAPE = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.5}


def settings(added: dict[str, Any] | None, **model: Any) -> RunConfig:
    objective = {} if added is None else {"objective": {"added_exits": added}}
    return validate({"model": {**SHAPE, **model}, **objective})


def model_of(config: RunConfig) -> TranslationModel:
    """Return a model in float64 whose added exits are not at their beginning."""
    model = build_model(config, V).double()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.exits."):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def log_probs(model: nn.Module, exit: str) -> Tensor:
    assert isinstance(model, TranslationModel)
    logits: Tensor = model.projection(model.at_exit(exit)(two_pairs()))
    return torch.log_softmax(logits, dim=2)


@pytest.mark.parametrize(("rank", "norm"), [(0, "pre"), (3, "pre"), (2, "post")])
def test_the_loss_is_that_of_its_equation(rank: int, norm: str) -> None:
    config = settings({"exits": [1, 2], "rank": rank, "teacher": 0.7, "smoothing": 0.1}, norm=norm)
    model, batch = model_of(config).train(), two_pairs()
    output = build_objective(config, V)(model, batch)
    counted = batch.target_output_BT.ne(V.pad)
    model.eval()
    deep = log_probs(model, "2-3")
    loss = nll = torch.zeros((), dtype=torch.float64)
    for name in ("2-1", "2-2"):
        exit = log_probs(model, name)
        own = -exit.gather(2, batch.target_output_BT.unsqueeze(2)).squeeze(2)
        kl = 0.5 * ((exit.exp() - deep.exp()) * (exit - deep)).sum(2)
        loss = loss + ((0.9 * own - 0.1 * exit.mean(2) + 0.7 * kl) * counted).sum() / 2
        nll = nll + (own * counted).sum() / 2
    torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.nll, nll, rtol=1e-6, atol=1e-6)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trained) == {name for name, _ in model.named_parameters() if name.startswith("decoder.exits.")}
    gradients = (torch.autograd.grad(one, list(trained.values()), retain_graph=True) for one in (output.loss, loss))
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(build_objective(config, V)(model, batch).loss, output.loss)


def test_the_deep_exit_is_that_of_the_model_without_added_ones() -> None:
    plain, model = build_model(settings(None), V).eval(), build_model(settings({"exits": [1], "rank": 2}), V).train()
    assert torch.equal(plain(two_pairs()), model(two_pairs())), "frozen layers have no dropout in training"
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in plain.state_dict().items())


def test_an_exit_is_described_as_a_transformer_of_its_layers_unless_it_has_a_map() -> None:
    for rank in (0, 2):
        model = model_of(settings({"exits": [1], "rank": rank}, norm="pre")).eval()
        if rank:
            with pytest.raises(NotStandardError, match="LayerNorm"):
                model.at_exit("2-1").described()  # type: ignore[attr-defined]
        else:
            weights = model.at_exit("2-1").described().weights  # type: ignore[attr-defined]
            own = model.stacks[1][0].exits["1"]
            assert isinstance(own, LayerNorm) and torch.equal(weights["decoder.final_norm.weight"], own.weight)
        assert "decoder.final_norm.weight" in model.described().weights
    with pytest.raises(NotStandardError, match="a LayerNorm behind layers that end in one"):
        model_of(settings({"exits": [1]}, norm="post")).at_exit("2-1").described()  # type: ignore[attr-defined]


def test_an_exit_of_a_model_that_is_cut_above_it_is_the_same() -> None:
    model = model_of(settings({"exits": [1, 2]})).eval()
    cut = model.at_exit("2-2")
    for exit in ("2-1", "2-2"):
        assert torch.equal(log_probs(cut, exit), log_probs(model, exit)), exit


def test_loops_are_exits_too() -> None:
    config = settings({"exits": [1]}, name="recurrent", decoder_loops=2, encoder_loops=2, decoder_layers=2)
    model = model_of(config).eval()
    assert not torch.equal(log_probs(model, "2-1"), log_probs(model, "2-2"))
    build_objective(config, V)(model.train(), two_pairs()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.stacks[1][0].exits.parameters())


@pytest.mark.parametrize(
    ("added", "more", "words"),
    [
        ({"exits": [3]}, {}, ("exits has 3", "decoder_layers is 3")),
        ({"exits": [2, 1]}, {}, ("[2, 1]",)),
        ({"exits": [1, 1]}, {}, ("[1, 1]",)),
        ({"exits": [0]}, {}, ("[0]",)),
        ({"exits": []}, {}, ("added_exits.exits",)),
        ({"exits": "1-2"}, {}, ("added_exits.exits",)),
        ({"exits": [1], "teacher": -1.0}, {}, ("added_exits.teacher",)),
        ({"exits": [1], "rank": 1 << 40}, {}, ("added_exits.rank",)),
        ({"exits": [1]}, {"model": {"name": "gnmt"}}, ("model.name=gnmt",)),
        ({"exits": [1]}, {"objective": {"ddr": {}}}, ("objective.ddr",)),
        (
            {"exits": [1]},
            {"layer": {"name": "cross_attention_drop", "drop_depth": 2, "drop_ratio": 1.0}},
            ("layer.name=cross_attention_drop",),
        ),
    ],
)
def test_exits_without_a_meaning_are_refused(
    added: dict[str, Any], more: dict[str, dict[str, Any]], words: tuple[str, ...]
) -> None:
    content = {
        "model": {"decoder_layers": 3},
        **more,
        "objective": {"added_exits": added, **more.get("objective", {})},
    }
    with pytest.raises(ConfigError) as caught:
        validate(content)
    assert all(word in str(caught.value) for word in words)
