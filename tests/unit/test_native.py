"""Native decoding: the arithmetic of torch's path, for exactly the layers that it knows, by code to be trusted."""

import copy
import os
import stat
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError, ConfigError
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.native import decoder
from deepspeed_nmt.native import library as native
from deepspeed_nmt.native.decoder import (
    AroundSublayer,
    BoundLayers,
    NativeDecoder,
    NativeLayer,
    NativeSplit,
    Past,
    Source,
    Steps,
)
from deepspeed_nmt.native.library import NativeError, Panels
from deepspeed_nmt.nn.embedding import TokenEmbedding
from deepspeed_nmt.nn.layers import DecoderLayer, NativeStep
from deepspeed_nmt.nn.linear import pack_weights
from deepspeed_nmt.search.alignment import watched
from deepspeed_nmt.search.base import Hypothesis
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.models import Ensemble, resolve_native, resolve_precision
from tests.models import add_noise

pytestmark = pytest.mark.skipif(native.obstacle() is not None, reason=f"{native.obstacle()}")
VOCABULARY = Vocabulary(70)
CPU = torch.device("cpu")
SIZES = {"dim": 24, "ffn_dim": 40, "heads": 3, "encoder_layers": 2, "decoder_layers": 3}
SOURCE_BS = torch.tensor([[5, 9, 11, 4, 2], [7, 6, 2, 0, 0], [8, 2, 0, 0, 0]])
ORDER = list(native.CAPABILITIES)
CAPABLE = ORDER[ORDER.index(native.capability()) :]
"""Kinds of vectors that this CPU has."""
FAMILIES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "pre": ({}, 3),
    "post, GELU": ({"model": {"norm": "post", "activation": "gelu"}}, 3),
    "DeepNorm, swish": ({"model": {"norm": "deepnorm", "activation": "swish"}}, 3),
    "pre and post": ({"model": {"decoder_norm": "post", "output_bias": True}}, 3),
    "drop": ({"layer": {"name": "cross_attention_drop", "drop_depth": 1, "beyond": 0.5}}, 3),
    "stacked": ({"model": {"name": "recurrent", "encoder_loops": 1, "decoder_loops": 2}}, 3),
    "chain": ({"model": {"name": "recurrent", "sharing": "closed_chain", "encoder_loops": 1, "norm": "deepnorm"}}, 3),
    "DLCL": ({"model": {"name": "dlcl"}}, 3),
    "grown": ({"model": {"name": "depth_growing", "top_decoder_layers": 2}}, 5),
    "relative": ({"model": {"name": "relative_positions"}}, 0),
    "merged": ({"layer": {"name": "merged_attention"}}, 0),
}
"""Settings of models, and the number of their decoder layers that native code serves."""


def model_of(name: str) -> TranslationModel:
    """Return a random model whose parameters all matter."""
    settings, _ = FAMILIES[name]
    sections = {**settings, "model": {"name": "transformer", **SIZES, **settings.get("model", {})}}
    model = build_model(validate(sections), VOCABULARY).eval()
    add_noise(model)
    return model


def translated(model: Any, beam: int, source_BS: torch.Tensor = SOURCE_BS) -> list[Hypothesis]:
    settings = BeamConfig(beam=beam, max_length_ratio=0.0, max_length_extra=12)
    return [one for best in BeamSearch(settings, model, VOCABULARY).search(source_BS) for one in best]


def both(model: TranslationModel, int8: bool = False) -> tuple[TranslationModel, TranslationModel]:
    """Return two copies of a model, the first of which decodes natively."""
    other = copy.deepcopy(model)
    pack_weights(model, int8, native.library())
    pack_weights(other)
    return model, other


def served(model: TranslationModel) -> int:
    """Return the number of layers that have made native steps."""
    layers = [part for part in model.modules() if isinstance(part, DecoderLayer)]
    return sum(layer.packed is not None and layer.packed.steps.get(layer) is not None for layer in layers)


def assert_same(ours: list[Hypothesis], theirs: list[Hypothesis]) -> None:
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-5 * (len(one.tokens) + 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_searches_find_the_same_as_by_torch(name: str) -> None:
    ours, theirs = both(model_of(name))
    for beam in (1, 4):
        assert_same(translated(ours, beam), translated(theirs, beam))
    assert served(ours) == FAMILIES[name][1] and served(theirs) == 0


def test_hooks_are_called_in_decoding() -> None:
    ours, theirs = both(model_of("pre"))
    assert_same(translated(ours, 2), translated(theirs, 2))
    calls: list[torch.Tensor] = []
    hooked = next(part for part in ours.modules() if isinstance(part, DecoderLayer))
    hooked.register_forward_hook(lambda module, inputs, output: calls.append(output))
    assert_same(translated(ours, 2), translated(theirs, 2))
    assert calls


def test_weights_that_change_their_dtype_leave_no_pointer_behind() -> None:
    model, _ = both(model_of("pre"))
    expected = translated(model, 2)
    model.double().float()
    _ = [torch.full((24,), torch.nan) for _ in range(1000)]
    assert_same(translated(model, 2), expected)


def test_exits_and_ensembles_decode_natively() -> None:
    ours, theirs = both(model_of("pre"))
    assert_same(translated(ours.at_exit("1-2"), 3), translated(theirs.at_exit("1-2"), 3))
    assert served(ours) == 2
    others = both(model_of("chain"))
    pairs = [Ensemble(list(pair), [0.3, 0.7]).eval() for pair in zip((ours, theirs), others, strict=True)]
    assert_same(translated(pairs[0], 3), translated(pairs[1], 3))


def sources(sentences: int) -> torch.Tensor:
    """Return random sentences of 1 to 8 tokens. Shape: -> (B,9)."""
    generator = torch.Generator().manual_seed(3)
    source_BS = torch.randint(4, 70, (sentences, 9), generator=generator)
    source_BS[:, -1] = 2
    for row, length in enumerate(torch.randint(1, 9, (sentences,), generator=generator).tolist()):
        source_BS[row, length:] = 0
        source_BS[row, length - 1] = 2
    return source_BS


def test_many_rows_are_as_by_torch() -> None:
    """More rows than pass through a layer together, of sentences that end one after another."""
    ours, theirs = both(model_of("pre"))
    assert_same(translated(ours, 4, sources(50)), translated(theirs, 4, sources(50)))


class Counted:
    """The steps that native code has taken in one call each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        self._take = NativeDecoder.take_steps
        monkeypatch.setattr(NativeDecoder, "take_steps", lambda *args: self._count(*args))

    def _count(self, *args: Any) -> Steps:
        found = self._take(*args)
        self.steps.append(found.taken)
        return found


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_in_one_call_are_those_one_by_one(name: str, int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, where a decoder is native as a whole; sentences end at different steps."""
    ours, _ = both(model_of(name), int8)
    counted = Counted(monkeypatch)
    for beam, count in ((1, 1), (1, 9), (4, 1), (4, 40), (36, 2)):
        settings = BeamConfig(beam=beam, max_length_ratio=0.0, max_length_extra=40)
        search = BeamSearch(settings, ours, VOCABULARY)
        counted.steps.clear()
        found = search.search(sources(count))
        is_whole = name not in ("DLCL", "grown", "relative", "merged")
        assert bool(counted.steps) == is_whole and (not is_whole or beam * count > 128 or max(counted.steps) > 1)
        assert max(counted.steps, default=0) <= 16
        with monkeypatch.context() as patch:
            patch.setattr(type(ours), "natively", TranslationModel.natively)
            taken = len(counted.steps)
            expected = search.search(sources(count))
            assert len(counted.steps) == taken
        assert found == expected


def test_steps_are_taken_one_by_one_for_hooks_and_rules_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = both(model_of("pre"))
    counted, calls = Counted(monkeypatch), []
    for settings, one_by_one in (
        ({}, 0),
        ({"min_length": 5}, 3),
        ({"suppress_tokens": (9, 8)}, 0),
        ({"no_repeat_ngram": 3}, 12),
    ):
        limits = {"max_length_ratio": 0.0, "max_length_extra": 12, "beam": 1}
        search = BeamSearch(BeamConfig.model_validate({**limits, **settings}), ours, VOCABULARY)
        counted.steps.clear()
        (found,), (best,) = (
            search.search(SOURCE_BS[:1]),
            BeamSearch(search.config, theirs, VOCABULARY).search(SOURCE_BS[:1]),
        )
        assert_same(found, best)
        assert sum(counted.steps) <= max(0, 12 - one_by_one) and bool(counted.steps) == (one_by_one < 12)
    for part in (ours.projection, ours.target_embedding, ours.decoder, ours.decoder.final_norm):
        handle = part.register_forward_hook(lambda module, inputs, output: calls.append(module))
        assert_same(translated(ours, 1), translated(theirs, 1))
        handle.remove()
        assert calls and set(calls) == {part}
        calls.clear()


def test_steps_that_do_not_fit_are_refused() -> None:
    code, table, positions = native.library(), torch.randn(9, 8), torch.zeros(4, 8)
    around = [AroundSublayer(torch.ones(8), torch.zeros(8), 1e-5, 1.0, True)] * 2
    joint, square = Panels(code, torch.eye(8).repeat(3, 1), None), Panels(code, torch.eye(8), None)
    layer = NativeLayer(code, 1, "relu", around, [joint, *[square] * 3])
    layers = BoundLayers([layer], [torch.zeros(2, 1, 1, 5, 8)], [None])
    lookup, output = native.Lookup(table, 1.0, positions), Panels(code, torch.randn(9, 8), None)
    tokens, log_probs, never = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2), torch.tensor([0])

    def decoder_of(positions: int, seen: torch.Tensor | None = None) -> NativeDecoder:
        return NativeDecoder(layers, lookup, output, Past(1, 1, positions, None, None, 1, 5), seen)

    good = decoder_of(2)
    found = good.take_steps(tokens, log_probs, never, [0], 1, 2)
    assert 1 <= found.taken <= 4 and found.tokens_BKT.shape == (1, 1, 2 + found.taken)
    for wrong in (decoder_of(3), decoder_of(2, torch.ones(1, 2, dtype=torch.bool))):
        with pytest.raises(ValueError):
            wrong.take_steps(tokens, log_probs, never, [0], 1, 2)
    for counts, beam in (([0], 0), ([0], 5), ([1], 1), ([-1], 1), ([0, 0], 1), ([0], 2)):
        with pytest.raises(ValueError):
            good.take_steps(tokens, log_probs, never, counts, beam, 2)
    none = NativeDecoder(
        layers, native.Lookup(table, 1.0, positions[:0]), output, Past(1, 1, 2, None, None, 1, 5), None
    )
    with pytest.raises(ValueError, match="0 steps"):
        none.take_steps(tokens, log_probs, never, [0], 1, 2)
    with pytest.raises(ValueError):
        narrow = native.Lookup(table, 1.0, torch.zeros(4, 7))
        NativeDecoder(layers, narrow, output, Past(1, 1, 2, None, None, 1, 5), None)
    for wrong_tokens in (torch.tensor([[1, 9]]), torch.tensor([[1, -1]])):
        with pytest.raises(IndexError):
            good.take_steps(wrong_tokens, log_probs, never, [0], 1, 2)
    with pytest.raises(IndexError):
        decoder_of(1).take_steps(torch.tensor([[9]]), torch.zeros(1, 1), never, [0], 1, 2)
    for pair in ((tokens.int(), log_probs), (tokens, log_probs.double()), (tokens[:, :1], log_probs)):
        with pytest.raises(ValueError):
            good.take_steps(*pair, never, [0], 1, 2)


def test_passes_that_do_not_fit_are_refused() -> None:
    code, never = native.library(), torch.tensor([0])
    around = [AroundSublayer(torch.ones(8), torch.zeros(8), 1e-5, 1.0, True)] * 2
    joint, square = Panels(code, torch.eye(8).repeat(3, 1), None), Panels(code, torch.eye(8), None)
    layer = NativeLayer(code, 1, "relu", around, [joint, *[square] * 3])
    lower, upper = (BoundLayers([layer], [torch.zeros(2, 1, 1, 6, 8)], [None]) for _ in range(2))
    torch.manual_seed(1)
    lookup, output = native.Lookup(torch.randn(9, 8), 1.0, torch.zeros(6, 8)), Panels(code, torch.randn(9, 8), None)

    def split(positions: int) -> NativeSplit:
        return NativeSplit(lower, upper, lookup, output, Past(1, 1, positions, None, None, 1, 6))

    found, log_prob, counts = split(1).take_passes([1], 5, 2, 2, never, 2)
    assert 1 <= len(found) == counts["tokens"] <= 5 and log_prob < 0.0 and counts["passes"] <= 2
    assert split(1).take_passes([1], 1, 2, 1, never, 2)[0] == [2], "at its limit a sentence ends"
    for tokens, limit, most, passes in (([1], 5, -1, 1), ([1, 3], 5, 2, 1), ([1], 0, 2, 1), ([1], 9, 6, 1)):
        with pytest.raises(ValueError):
            split(1).take_passes(tokens, limit, most, passes, never, 2)
    for token in (-1, 9):
        with pytest.raises(IndexError):
            split(1).take_passes([token], 5, 2, 1, never, 2)
        with pytest.raises(IndexError):
            split(1).take_passes([1], 5, 2, 1, torch.tensor([token]), 2)
        with pytest.raises(IndexError):
            split(1).take_passes([1], 5, 2, 1, never, token)
    with pytest.raises(ValueError):
        NativeSplit(lower, upper, lookup, Panels(code, torch.randn(9, 7), None), Past(1, 1, 1, None, None, 1, 6))


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_sentences_are_as_by_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced decoding, whose layers are native where nobody looks at their parts."""
    ours, theirs = both(model_of(name))
    calls, whole = [], NativeStep.whole
    monkeypatch.setattr(NativeStep, "whole", lambda *args: calls.append(1) or whole(*args))
    texts = [[[5, 6, 7], [8]], [], [[9, 10], [11, 12, 13, 14, 15]]]
    scores = [token_log_probs(model, VOCABULARY, SOURCE_BS, True, texts) for model in (ours, theirs)]
    for one, other in zip(*([each for of in side for each in of] for side in scores), strict=True):
        assert one == pytest.approx(other, abs=1e-5, rel=5e-6)
    assert served(ours) == FAMILIES[name][1]
    applications = len(calls)
    attention = next((part.cross_attention for part in ours.modules() if hasattr(part, "cross_attention")), None)
    if FAMILIES[name][1] and attention is not None:
        with watched([attention]) as seen:
            token_log_probs(ours, VOCABULARY, SOURCE_BS, True, texts)
        assert list(seen) == [attention] and applications <= len(calls) < 2 * applications


def test_long_sentences_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code lists what each position sees, in memory that grows with the square of the length."""
    ours, theirs = both(model_of("pre"))
    calls, whole = [], NativeStep.whole
    monkeypatch.setattr(NativeStep, "whole", lambda *args: calls.append(args[1].shape[1]) or whole(*args))
    source_BS = torch.tensor([[5] * 700 + [2]])
    scores = [token_log_probs(model, VOCABULARY, source_BS, False, [[[5, 6, 7]]]) for model in (ours, theirs)]
    assert scores[0][0][0] == pytest.approx(scores[1][0][0], abs=1e-5, rel=5e-6)
    assert calls == [4, 4, 4]


def test_int8_uses_threads() -> None:
    """Rows and sentences that several threads share; each computes the same as alone."""
    model = model_of("pre")
    pack_weights(model, True, native.library())
    source_BS = torch.randint(4, 70, (150, 6), generator=torch.Generator().manual_seed(3))
    source_BS[:, -1] = 2
    alone = translated(model, 2, source_BS)
    torch.set_num_threads(3)
    with torch.inference_mode():
        assert translated(model, 2, source_BS) == alone
        calls: list[tuple[int, int]] = []
        native.in_threads(lambda first, end: calls.append((first, end)) or 0, 200, 60)  # type: ignore[func-returns-value]
        assert sorted(calls) == [(0, 66), (66, 133), (133, 200)]


def test_threads_work_on_when_the_main_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor would refuse; of an error in one of them the caller learns."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    torch.set_num_threads(2)
    assert native.in_threads(lambda first, end: end, 40, 16) == 40
    with pytest.raises(ZeroDivisionError):
        native.in_threads(lambda first, end: end // first, 40, 16)


def test_threads_that_ctrl_c_leaves_at_work_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []

    def interrupted(call: Any, *_: int) -> int:
        left.append(call)
        raise KeyboardInterrupt

    panels = Panels(native.library(), torch.eye(8), None)
    around = [AroundSublayer(torch.ones(8), torch.zeros(8), 1e-5, 1.0, True)] * 2
    joint = Panels(native.library(), torch.eye(8).repeat(3, 1), None)
    layer = NativeLayer(native.library(), 1, "relu", around, [joint, *[panels] * 3])
    x, cache, seen = torch.ones(1, 1, 8), torch.zeros(2, 1, 1, 3, 8), torch.ones(1, 1, 1, 3, dtype=torch.bool)
    for module in (native, decoder):
        monkeypatch.setattr(module, "in_threads", interrupted)
    with pytest.raises(KeyboardInterrupt):
        panels(x)
    with pytest.raises(KeyboardInterrupt):
        BoundLayers([layer], [cache], [None]).decode(x.clone(), Past(1, 1, 3, seen, None, 1, 3))
    used = [weakref.ref(one) for one in (x, cache, seen)]
    del x, cache, seen
    assert all(one() is not None for one in used)
    left.clear()
    assert all(one() is None for one in used)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round each row to the integers from -127 to 127 times its scale."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127.0
    return (x / scale).round().double() * scale


def test_int8_rounds_weights_and_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as torch's products of what is rounded, and near the model's own; not dependent on the batch."""
    model, plain = model_of("pre"), model_of("pre")
    pack_weights(model, True, native.library())

    def product(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        exact = rounded(x) @ rounded(weight).t()
        return (exact if bias is None else exact + bias).float()

    monkeypatch.setattr(Kernels, "linear", product)
    with torch.inference_mode():
        tokens_R, differences = torch.tensor([1, 1, 1]), []
        memory, expected_memory = model.encode(SOURCE_BS), plain.encode(SOURCE_BS)
        cache, other = model.begin(), plain.begin()
        for _ in range(4):
            logits_RV = model.step(tokens_R, memory, cache)
            expected_RV = plain.step(tokens_R, expected_memory, other)
            differences.append(float((logits_RV - expected_RV).abs().max() / expected_RV.std()))
            tokens_R = expected_RV.argmax(dim=1)
    # Where a number is between two integers, its last digit decides, and a product can differ by a step.
    assert all(difference < 0.02 for difference in differences)  # without rounding: 0.05 to 0.09
    monkeypatch.undo()
    exact = translated(model_of("pre"), 1)
    assert sum(one.tokens[:2] == two.tokens[:2] for one, two in zip(translated(model, 1), exact, strict=True)) >= 2
    alone = [translated(model, 1, row_S[row_S != 0][None])[0] for row_S in SOURCE_BS]
    assert [one.tokens for one in alone] == [one.tokens for one in translated(model, 1)]


@pytest.mark.parametrize("capability", CAPABLE)
def test_products_of_any_size(capability: str) -> None:
    code = native.build(capability, native.kept_directory())
    torch.manual_seed(4)
    for rows, inputs, outputs in ((1, 1, 1), (2, 17, 33), (5, 8, 64), (7, 40, 129), (13, 24, 96), (35, 3, 7)):
        x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        exact = F.linear(x.double(), weight.double(), bias.double()).float()
        torch.testing.assert_close(Panels(code, weight, bias)(x), exact)
        scaled = torch.cat([x, 0.0 * x[:1], 1e-3 * x[:1], 1e-35 * x[:1]])
        expected = (rounded(scaled) @ rounded(weight).t()).float()
        expected[-1] = 0.0  # nearly nothing is nothing
        torch.testing.assert_close(Panels(code, weight, None, int8=True)(scaled), expected, atol=1e-5, rtol=1e-4)
    largest = torch.full((1, 1000), 3.0)
    assert torch.allclose(Panels(code, -largest, None, int8=True)(largest), torch.tensor(-9000.0))


@pytest.mark.parametrize("capability", CAPABLE)
@pytest.mark.parametrize("width", [5, 16, 24])
def test_a_layer_is_that_of_the_equations(capability: str, width: int) -> None:
    """Attention to what a mask shows, and all else, in float64; keys and values are where they were written."""
    code = native.build(capability, native.kept_directory())
    heads, sentences, hypotheses, positions, length, inner = 2, 3, 2, 7, 4, 11
    dim, rows = heads * width, sentences * hypotheses
    torch.manual_seed(5)
    weights = [torch.randn(outputs, inputs) * inputs**-0.5 for outputs, inputs in (
        (3 * dim, dim), (dim, dim), (dim, dim), (dim, dim), (inner, dim), (dim, inner)
    )]  # fmt: skip
    biases = [0.3 * torch.randn(len(weight)) for weight in weights]
    around = [AroundSublayer(torch.randn(dim), torch.randn(dim), 1e-5, 1.0 + n, n == 0) for n in range(3)]
    layer = NativeLayer(
        code, heads, "relu", around, [Panels(code, *both) for both in zip(weights, biases, strict=True)]
    )
    place = torch.tensor([4, 0, 2])  # of five
    cache = torch.randn(2, 5, heads, positions + 3, width)
    x = torch.randn(rows, 1, dim)
    seen = torch.rand(sentences, 1, hypotheses, positions) < 0.5
    seen[..., -hypotheses:] = torch.eye(hypotheses, dtype=torch.bool)
    keys, values = (torch.randn(5, length, heads, width).transpose(1, 2) for _ in range(2))
    source_seen = torch.rand(sentences, 1, 1, length) < 0.7
    source_seen[..., 0] = True
    expected = cache.clone()
    past = Past(sentences, rows, positions, seen, place, *cache.shape[1:4:2])
    source = Source(keys, values, source_seen)
    bound = BoundLayers([layer], [cache], [source])
    found = bound.decode(x, past)

    def attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = query.view(sentences, hypotheses, heads, width).transpose(1, 2)
        scores = (q @ keys.double().transpose(2, 3) / width**0.5).masked_fill(~mask, -torch.inf)
        return (scores.softmax(dim=3) @ values.double()).transpose(1, 2).reshape(rows, dim)

    def connected(state: torch.Tensor, one: AroundSublayer, sublayer: Any) -> torch.Tensor:
        norm = lambda y: F.layer_norm(y, (dim,), one.weight_D.double(), one.bias_D.double(), one.epsilon)  # noqa: E731
        return state + sublayer(norm(state)) if one.is_pre else norm(one.alpha * state + sublayer(state))

    def product(y: torch.Tensor, number: int) -> torch.Tensor:
        return F.linear(y, weights[number].double(), biases[number].double())

    def to_past(y: torch.Tensor) -> torch.Tensor:
        new_keys, new_values, query = product(y, 0).split(dim, dim=1)
        for part, new in enumerate((new_keys, new_values)):
            of_heads = new.view(sentences, hypotheses, heads, width).transpose(1, 2)
            expected[part, place, :, positions - hypotheses : positions] = of_heads.float()
        return product(attended(query, *expected[:, place, :, :positions], seen), 1)

    state = connected(x.double().squeeze(1), around[0], to_past)
    state = connected(
        state, around[1], lambda y: product(attended(product(y, 2), keys[place], values[place], source_seen), 3)
    )
    state = connected(state, around[2], lambda y: product(product(y, 4).relu(), 5))
    torch.testing.assert_close(found.squeeze(1), state.float(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(cache, expected, atol=2e-5, rtol=2e-5)
    sizes: dict[str, Any] = {"sentences": sentences, "rows": rows, "positions": positions, "seen_B1WP": seen}
    sizes |= {"places_B": place, "places": 5, "capacity": positions + 3}
    for wrong in (
        {"sentences": 4},
        {"positions": positions + 4},
        {"seen_B1WP": seen[..., :-1]},
        {"places": 2, "places_B": None},
        {"places_B": place.int()},
    ):
        with pytest.raises(ValueError):
            Past(**{**sizes, **wrong})
    with pytest.raises(IndexError):
        bound.decode(x, Past(**{**sizes, "places_B": torch.tensor([0, 1, 5])}))
    for state, buffer, of in (
        (x.double(), cache, source),
        (x[1:], cache, source),
        (x, cache[..., :-1], source),
        (x, cache, Source(keys[:, :1], values[:, :1], None)),
        (x, cache, Source(keys[:4], values[:4], source_seen)),
        (x, cache, Source(keys, values, source_seen[:2])),
    ):
        with pytest.raises(ValueError):
            BoundLayers([layer], [buffer], [of]).decode(state, past)
    for parts in ((keys, values[:, :, 1:], None), (keys, values, source_seen[..., 1:])):
        with pytest.raises(ValueError):
            Source(*parts)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
@pytest.mark.parametrize("capability", CAPABLE)
def test_activations(activation: str, capability: str) -> None:
    """Of a layer whose attention adds nothing to zeros, and whose network passes on its first bias."""
    code, dim = native.build(capability, native.kept_directory()), 53
    zeros, around = torch.zeros(dim, dim), [AroundSublayer(torch.ones(dim), torch.zeros(dim), 1e-5, 1.0, True)] * 2
    for inputs in torch.linspace(-100.0, 100.0, 53 * 30).view(-1, dim).contiguous():
        weights = (zeros.repeat(3, 1), None), (zeros, None), (zeros, inputs), (torch.eye(dim), None)
        layer = NativeLayer(code, 1, activation, around, [Panels(code, *pair) for pair in weights])
        past = Past(1, 1, 1, None, None, places=1, capacity=2)
        bound = BoundLayers([layer], [torch.zeros(2, 1, 1, 2, dim)], [None])
        found = bound.decode(torch.zeros(1, 1, dim), past).flatten()
        expected = {"relu": F.relu, "gelu": F.gelu, "swish": F.silu}[activation](inputs)
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


def test_integers_of_int8_are_those_of_all_vectors_and_fit() -> None:
    """Rounded once, also on a CPU whose products and sums are two operations."""
    x, weight = torch.randn(40, 16384, generator=torch.Generator().manual_seed(7)), torch.ones(1, 16384)
    found = [Panels(native.build(one, native.kept_directory()), weight, None, int8=True)(x) for one in CAPABLE]
    step_R1 = x.abs().amax(dim=1, keepdim=True) / 127.0
    assert all(((one - found[0]).abs() < 0.1 * step_R1).all() for one in found)
    with pytest.raises(ValueError, match="beyond the integers"):
        Panels(native.library(), torch.ones(1, 133145), None, int8=True)


def test_a_library_loads_whatever_tensors_a_program_makes_by_default() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        native.Library(native.library().file)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_extensions_are_the_largest_that_torch_finds() -> None:
    torch.manual_seed(6)
    code, eos = native.library(), 2
    # In the last EOS is among the first K, behind them, and beyond all that are looked at.
    sizes = (1, 1, 3, 1), (3, 2, 200, 4), (2, 1, 130, 65), (2, 4, 1000, 4), (30, 4, 20, 4)
    for sentences, hypotheses, entries, beam in sizes:
        x = torch.randn(sentences * hypotheses, entries).round(decimals=1 if beam == 4 else 6)  # with equal ones
        x[:, eos] += 1.5
        x[-1, eos] = -torch.inf
        log_probs = torch.randn(len(x), 3).round(decimals=1)
        tokens, log_sums, never = torch.randint(9, (len(x), 3)), torch.zeros(len(x)), torch.tensor([0, entries - 2])
        found = code.extend(x, log_sums, tokens, log_probs, never, sentences, beam, eos)
        assert x[:, never].isneginf().all() and x[:-1].isneginf().sum() == 2 * (len(x) - 1)
        ranked = (x + log_probs[:, 2:]).view(sentences, -1).sort(dim=1, descending=True, stable=True)
        ended, others = [], []
        for sentence, (numbers, places) in enumerate(zip(*(part.tolist() for part in ranked), strict=True)):
            every = [
                (sentence * hypotheses + at // entries, at % entries, x)
                for at, x in zip(places, numbers, strict=True)
            ]
            ended += [(row, number) for row, token, number in every[:beam] if token == eos and number > -torch.inf]
            others += [one for one in every[: 2 * beam] if one[1] != eos][:beam]
        assert list(zip(found.ended, found.ended_log_probs, strict=True)) == ended
        row_R, tokens_RT, log_prob_RT = (part.flatten(0, 1) for part in found[2:])
        assert list(zip(row_R.tolist(), tokens_RT[:, 3].tolist(), log_prob_RT[:, 3].tolist(), strict=True)) == others
        assert torch.equal(tokens_RT[:, :3], tokens[row_R]) and torch.equal(log_prob_RT[:, :3], log_probs[row_R])
        x[:, never] = 3.0
        torch.testing.assert_close(code.log_sums(30.0 * x), (30.0 * x).logsumexp(dim=1), rtol=1e-6, atol=1e-6)
        of_x = x.logsumexp(dim=1)
        given, of_itself = (
            code.extend(x.clone(), sums, tokens, log_probs, never, sentences, beam, eos) for sums in (of_x, None)
        )
        torch.testing.assert_close(given.log_prob_BKT, of_itself.log_prob_BKT)
    x = torch.full((2, 150), -torch.inf)
    x[0, 70], x[1, 100], x[1, eos] = torch.nan, 1.0, torch.nan
    none, so_far = torch.empty(0, dtype=torch.int64), (torch.zeros(2), torch.zeros(2, 1).long(), torch.zeros(2, 1))
    found = code.extend(x, *so_far, none, 1, 2, eos)
    assert (
        found.ended == [] and found.row_BK.tolist() == [[0, 1]] and found.tokens_BKT[..., 1].tolist() == [[70, 100]]
    )
    assert found.log_prob_BKT[0, 0, 1].isnan() and found.log_prob_BKT[0, 1, 1] == 1.0
    x[1, eos] = -torch.inf
    assert code.log_sums(x)[0].isnan() and code.log_sums(x)[1] == 1.0
    for token in (-1, 150):
        with pytest.raises(IndexError):
            code.extend(x, *so_far, torch.tensor([token]), 1, 2, eos)
    for log_sums, beam in ((torch.zeros(2), 151), (torch.zeros(2), 1), (torch.zeros(3), 2)):
        with pytest.raises(ValueError):
            code.extend(x, log_sums, *so_far[1:], none, 1, beam, eos)


def test_tokens_are_looked_up() -> None:
    code, table, position = native.library(), torch.randn(9, 37), torch.randn(1, 37)
    tokens = torch.tensor([[3, 8], [8, 0], [0, 5]])
    for each in (tokens[:, :1], tokens[:, 1:]):
        torch.testing.assert_close(
            code.embed(each, native.Lookup(table, 6.1, position)), table[each] * 6.1 + position
        )
    own = torch.randn(3, 37)
    torch.testing.assert_close(
        code.embed(tokens[:, 1:], native.Lookup(table, 6.1, own)), table[tokens[:, 1:]] * 6.1 + own.unsqueeze(1)
    )
    embedding = TokenEmbedding(torch.nn.Parameter(table), 0.0).eval()
    pack_weights(embedding, native=code)
    found = embedding(tokens[:, 1:], torch.tensor([4, 300, 4]))  # as a search by drafts embeds, a greedy one each
    assert all(torch.equal(found[row], embedding(tokens[row : row + 1, 1:], at)[0]) for row, at in ((0, 4), (1, 300)))
    with pytest.raises(ValueError):
        code.embed(tokens[:, 1:], native.Lookup(table, 1.0, own[:2]))
    for wrong in (-1, 9):
        with pytest.raises(IndexError):
            code.embed(torch.tensor([[3], [wrong]]), native.Lookup(table, 1.0, position))
    for parts in (
        (tokens, table, position),
        (tokens[:, :1], table.double(), position),
        (tokens[:, :1].int(), table, position),
    ):
        with pytest.raises(ValueError):
            code.embed(parts[0], native.Lookup(parts[1], 1.0, parts[2]))


class Raced(TokenEmbedding):
    """An embedding whose table of positions another thread replaces by a shorter one as soon as it is kept."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value[:3] if name == "_positions_TD" else value)


def test_positions_suffice_whatever_another_thread_keeps() -> None:
    embedding = Raced(torch.nn.Parameter(torch.randn(9, 8)), 0.0).eval()
    pack_weights(embedding, native=native.library())
    lookup = embedding.natively(290, 10)
    assert lookup is not None and torch.equal(lookup.positions_TD, embedding.table(300)[290:])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Decode in one thread, which native code is for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_nothing_hides_nan() -> None:
    panels = Panels(native.library(), torch.tensor([[1.0, torch.inf], [2.0, 3.0], [torch.nan, 0.0]]), None)
    assert panels(torch.ones(1, 2)).tolist()[0][:2] == [torch.inf, 5.0] and panels(torch.ones(1, 2))[0, 2].isnan()
    for name in ("self_attention.q_proj.weight", "self_residual.norm.weight", "feed_forward.up_proj.bias"):
        model = model_of("pre")
        model.get_parameter(f"decoder.layers.1.{name}").data.view(-1)[3] = torch.nan
        pack_weights(model, native=native.library())
        with pytest.raises(CheckpointError, match="NaN"):
            translated(model, 2)


class FakeCompiler:
    """A compiler that copies a library, and keeps its calls."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made_by, self.program, made = directory / "calls", directory / "compiler", directory / "made.so"
        made.write_bytes(native.library().file.read_bytes())
        self.program.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1; exit; fi\necho "$*" >>"{self.made_by}"\n'
            f'for last; do :; done\ncp "{made}" "$last"\n',
            encoding="utf-8",
        )
        self.program.chmod(0o755)
        monkeypatch.setenv("CXX", str(self.program))

    @property
    def calls(self) -> list[str]:
        return self.made_by.read_text().splitlines() if self.made_by.exists() else []


def test_a_library_is_compiled_once_and_again_if_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, kept = FakeCompiler(tmp_path, monkeypatch), tmp_path / "kept"
    for _ in range(2):
        native.build("DEFAULT", kept)
    assert len(compiler.calls) == 1 and stat.S_IMODE(kept.stat().st_mode) == 0o700
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    for content in (b"", b"no library", whole[:-40], b"\x7fELF" + whole[4:-1] + b"!"):
        file.unlink()  # a library that is loaded must not change
        file.write_bytes(content)
        native.build("DEFAULT", kept)
        assert file.read_bytes() == whole
    assert len(compiler.calls) == 5
    native.build("DEFAULT", tmp_path / "other")
    compiler.program.write_text(compiler.program.read_text().replace("fake 1", "clang version 2"))
    native.build("DEFAULT", kept)
    assert len(compiler.calls) == 7 and len(list(kept.iterdir())) == 2
    assert ["-fno-tree-pre" in call for call in compiler.calls] == [True] * 6 + [False]  # which clang refuses


def test_a_directory_of_somebody_else_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, kept = FakeCompiler(tmp_path, monkeypatch), tmp_path / "kept"
    native.build("DEFAULT", kept)
    kept.chmod(0o777)
    with pytest.raises(NativeError, match="others may write"):
        native.build("DEFAULT", kept)
    kept.chmod(0o700)
    (tmp_path / "link").symlink_to(kept)
    with pytest.raises(NativeError, match="link"):
        native.build("DEFAULT", tmp_path / "link")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(NativeError, match="another user's"):
            native.build("DEFAULT", kept)
    with pytest.raises(NativeError, match="XDG_CACHE_HOME"):
        native.build("DEFAULT", compiler.program / "below")
    with pytest.raises(NativeError, match="XDG_CACHE_HOME"):
        native.build("DEFAULT", Path("/proc/kept"))


def test_without_a_compiler_torch_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for compiler in (str(tmp_path / "none"), 'g++ "'):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(NativeError, match="CXX"):
            native.build("DEFAULT", tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeError, match=r"no C\+\+ compiler"):
        native.build("DEFAULT", tmp_path)
    (tmp_path / "g++").write_text('#!/bin/sh\necho "x.cpp:1: error: wrong" >&2\nexit 1\n')
    (tmp_path / "g++").chmod(0o755)
    with pytest.raises(NativeError, match="error: wrong"):
        native.build("DEFAULT", tmp_path)
    monkeypatch.setattr(native, "obstacle", lambda: "there is no C++ compiler; install g++")
    with caplog.at_level("INFO"):
        assert not resolve_native("auto", CPU, "fp32")
    assert "install g++" in caplog.text
    with pytest.raises(ConfigError, match=r"`native` is on, .*install g\+\+"):
        resolve_native("on", CPU, "fp32")
    with pytest.raises(ConfigError, match=r"`precision` is int8, but .*install g\+\+\); use fp32"):
        resolve_precision("int8", CPU)
    with pytest.raises(ConfigError, match="only native code decodes in int8"):
        resolve_native("off", CPU, "int8")
    caplog.clear()
    assert not resolve_native("off", CPU, "fp32") and not resolve_native("auto", CPU, "bf16") and not caplog.text
    with pytest.raises(ConfigError, match="bf16"):
        resolve_native("on", CPU, "bf16")
