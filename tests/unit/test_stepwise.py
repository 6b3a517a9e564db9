"""Decoding position by position gives the logits of teacher forcing, for every registered model and decoder layer.

A new one joins by being registered with a case of `selftest`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.kernels.segments import Mask
from deepspeed_nmt.methods import LAYERS, MODELS, self_tests
from deepspeed_nmt.native import library as native
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues
from deepspeed_nmt.nn.layers import FeedForward
from deepspeed_nmt.nn.linear import pack_weights
from deepspeed_nmt.registry import Entry
from tests.models import add_noise
from tests.toy import toy_attention, toy_layer, toy_model

SMALL: dict[str, Any] = {"dim": 32, "ffn_dim": 48, "heads": 4, "encoder_layers": 2, "decoder_layers": 3}
VOCABULARY = Vocabulary(40, mask=4)
SOURCE_BS = torch.tensor([[5, 9, 11, 4, 2], [7, 6, 2, 0, 0], [8, 2, 0, 0, 0]])
BEAM, STEPS = 3, 6
PATHS = {
    "fp32": 1e-4,
    "packed fp32": 1e-4,
    "native fp32": 1e-4,
    "packed bf16": 0.1,
    "native int8": 0.1,
}
"""Bounds on differences of logits, whose standard deviation is 1.

In bf16 and int8 the last digit of a number can decide how it is rounded.
"""
TOYS = [(MODELS, toy_model.ENTRY), (LAYERS, toy_layer.ENTRY), (LAYERS, toy_attention.ENTRY)]


def settings_of(kind: str, entry: Entry[Any]) -> dict[str, Any]:
    """Return the settings of a small run with a registered part."""
    cases = [entry.selftest, *self_tests().values()]
    for case in cases:
        if case is not None and case.settings.get(kind, {}).get("name", MODELS.default) == entry.name:
            return {**case.settings}
    return {"model": {"name": "transformer", **SMALL}, kind: {"name": entry.name}}


class OwnAttention(MultiHeadAttention):
    """Attention with values of its own."""

    def attend(self, query_BTD: Tensor, memory: KeysValues, mask: Mask, causal: bool) -> Tensor:
        return super().attend(1.5 * query_BTD, KeysValues(memory.keys, memory.values.sin()), mask, causal)


class OwnNetwork(FeedForward):
    """Network with a non-linearity of its own."""

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x).sin()


def own_part(old: type[torch.nn.Module], new: type[torch.nn.Module], name: str) -> Callable[[TranslationModel], None]:
    """Return a function that changes the class of the decoder's parts of a name."""

    def change(model: TranslationModel) -> None:
        changed = [part for path, part in model.decoder.named_modules() if path.endswith(name)]  # type: ignore[operator]
        assert changed and all(type(part) is old for part in changed)
        for part in changed:
            part.__class__ = new

    return change


def unchanged(model: TranslationModel) -> None:
    """Leave a model as it was built."""


def cases() -> dict[str, tuple[dict[str, Any], Callable[[TranslationModel], None]]]:
    """Return the settings of small runs, and what is changed in their models."""
    standard = {"model": {"name": "transformer", **SMALL}}
    found = {
        f"{registry.kind} {entry.name}": (settings_of(registry.kind, entry), unchanged)
        for registry, entry in [
            *((MODELS, e) for e in MODELS.values()),
            *((LAYERS, e) for e in LAYERS.values()),
            *TOYS,
        ]
        if registry is not MODELS or entry.config.left_to_right  # type: ignore[attr-defined]
    }
    for norm in ("post", "deepnorm", "b2t", "admin", "layernorm_scaling", "peri", "layer_scale", "completep"):
        found[norm] = {"model": {**standard["model"], "norm": norm, "activation": "gelu"}}, unchanged
    found["pre and post"] = {"model": {**standard["model"], "decoder_norm": "post"}}, unchanged
    for decoder in ("serial", "transformer", "coordinator"):
        bert = {**self_tests()["berts"].settings["model"], "decoder": decoder, "fusion_scale": 1.0}
        found[f"bert {decoder}"] = {"model": {**bert, "freeze": [], "coordinator_layers": 2}}, unchanged
    found["own self-attention"] = standard, own_part(MultiHeadAttention, OwnAttention, "self_attention")
    found["own cross-attention"] = standard, own_part(MultiHeadAttention, OwnAttention, "cross_attention")
    found["own network"] = standard, own_part(FeedForward, OwnNetwork, "feed_forward")
    return found


def make_model(name: str, monkeypatch: pytest.MonkeyPatch) -> TranslationModel:
    """Return a random model whose parameters all matter."""
    for registry, entry in TOYS:
        monkeypatch.setitem(registry, entry.name, entry)
    settings, change = cases()[name]
    model = build_model(validate(settings), VOCABULARY).eval()
    change(model)
    add_noise(model)
    return model


def teacher_forced(model: TranslationModel, tokens_RT: Tensor) -> Tensor:
    """Return the logits at the last position of each hypothesis. Shape: (R,T) -> (R,V)"""
    memory = model.encode(SOURCE_BS)
    sentences = torch.arange(len(SOURCE_BS)).repeat_interleave(len(tokens_RT) // len(SOURCE_BS))
    logits: Tensor = model.projection(model.decode(tokens_RT, memory.select(sentences))[0][:, -1])
    return logits.float()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", cases())
@torch.inference_mode()
def test_stepwise_logits_are_those_of_teacher_forcing(name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packing, _, precision = path.rpartition(" ")
    if packing and (reason := native.obstacle() if packing == "native" else onednn_ops.obstacle(precision)):
        pytest.skip(reason)
    model = make_model(name, monkeypatch)
    if precision == "bf16":
        model.bfloat16()
    if packing:
        pack_weights(model, precision == "int8", native.library() if packing == "native" else None)
    memory, cache = model.encode(SOURCE_BS), model.begin()
    generator = torch.Generator().manual_seed(2)
    tokens_RT = torch.ones(len(SOURCE_BS), 1, dtype=torch.int64)
    for step in range(STEPS):
        logits_RV = model.step(tokens_RT[:, -1], memory, cache).float()
        expected_RV = teacher_forced(model, tokens_RT)
        difference = (logits_RV - expected_RV).abs().max() / expected_RV.std()
        assert difference < PATHS[path], f"step {step}"
        # Hypotheses are dropped, and continued several times.
        width = len(tokens_RT) // len(SOURCE_BS)
        parents_RB = torch.randint(width, (len(SOURCE_BS), BEAM), generator=generator)
        rows_R = (parents_RB + width * torch.arange(len(SOURCE_BS)).unsqueeze(1)).flatten()
        cache.select(rows_R, None)
        newest_R = torch.randint(5, 40, rows_R.shape, generator=generator)
        tokens_RT = torch.cat([tokens_RT[rows_R], newest_R.unsqueeze(1)], dim=1)
