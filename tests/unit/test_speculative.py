"""Self-speculative decoding: the tokens of greedy decoding, whatever is drafted, by a cache that both parts share."""

import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError, ConfigError
from deepspeed_nmt.native import library as native
from deepspeed_nmt.native.decoder import NativeSplit
from deepspeed_nmt.nn.layers import LayerNorm, LowRank
from deepspeed_nmt.nn.linear import pack_weights
from deepspeed_nmt.search.base import Hypothesis, Request
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.lines import SourceCounts
from deepspeed_nmt.search.models import Ensemble
from deepspeed_nmt.search.speculative import Speculative, SpeculativeConfig, rows_for_one
from deepspeed_nmt.search.streams import translate_lines
from tests.models import Letters, padded, random_sources, sharp_transformer, sharpened

V = Vocabulary(40)
LENGTHS = [4, 3, 5, 6, 2, 7]
SIZES = {"dim": 24, "ffn_dim": 40, "heads": 3, "encoder_layers": 1, "decoder_layers": 4, "share_embeddings": "none"}
RECURRENT = {"name": "recurrent", "decoder_layers": 2, "encoder_loops": 1, "decoder_loops": 3}
FAMILIES: Mapping[str, tuple[Mapping[str, Any], int, float]] = {
    "pre": ({}, 1, 0.0),
    "post": ({"model": {"norm": "post"}}, 3, 3.0),
    "drop": ({"layer": {"name": "cross_attention_drop", "drop_depth": 1, "beyond": 0.5}}, 2, 6.0),
    "stacked": ({"model": {**RECURRENT, "loop_rank": 4}}, 1, -4.0),
    "chain": ({"model": {**RECURRENT, "decoder_layers": 4, "sharing": "closed_chain"}}, 2, -2.0),
    "DLCL": ({"model": {"name": "dlcl"}}, 2, 0.0),
    "relative": ({"model": {"name": "relative_positions"}}, 2, 4.0),
    "added": ({"model": {"norm": "post"}}, 2, 3.0),
    "grown": ({"model": {"name": "depth_growing"}}, 4, -2.0),
}
"""Settings of models, their layers or loops that draft, and a bias by which sentences end early and late."""
RULES = {"min_length": 4, "max_length": 9, "no_repeat_ngram": 2, "suppress_unknown": True}


def model_of(name: str) -> TranslationModel:
    """Return a random model whose exits agree now and then."""
    settings, _, end = FAMILIES[name]
    sections = {**settings, "model": {"name": "transformer", **SIZES, **settings.get("model", {})}}
    model = sharpened(build_model(validate(sections), V), 3.0, end)
    for module in model.modules():
        if isinstance(module, LowRank):  # which would do nothing
            torch.nn.init.normal_(module.up_DR, std=0.2)
    if name == "added":
        model.stacks[1][0].exits["2"] = LayerNorm(24)
    return model


def greedy(model: TranslationModel, rows: list[list[int]], requests: Any = None, **rules: Any) -> list[Hypothesis]:
    found = BeamSearch(BeamConfig(beam=1, **rules), model, Vocabulary(model.vocab_size)).search(
        padded(rows), True, requests
    )
    return [best[0] for best in found]


def search_of(model: TranslationModel, layers: int, k: int | None = None, **rules: Any) -> Speculative:
    """Return a search that drafts k tokens at once, as far as there is room; None: as many as pay."""
    config = SpeculativeConfig(draft_layers=layers, **rules)
    search = Speculative(config, model, Vocabulary(model.vocab_size))
    if k is not None:
        search.draft_length = lambda alpha, sentences, most, free_rows: min(k, most)  # type: ignore[method-assign]
    return search


def assert_same(ours: list[list[Hypothesis]], expected: list[Hypothesis]) -> None:
    assert [best[0].tokens for best in ours] == [one.tokens for one in expected]
    for (one,), other in zip(ours, expected, strict=True):
        assert (one.score, one.log_prob) == pytest.approx((other.score, other.log_prob), abs=1e-4)


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Decode in one thread, in which projections are native in fp32, too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("natively", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_change_no_token(name: str, natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, take = [], NativeSplit.take_passes
    monkeypatch.setattr(NativeSplit, "take_passes", lambda *args: calls.append(args[3]) or take(*args))
    if natively and native.obstacle() is not None:
        pytest.skip(f"{native.obstacle()}")
    model, layers, rows = model_of(name), FAMILIES[name][1], random_sources(LENGTHS, V.size)
    expected = greedy(model, rows)
    pack_weights(model, native=native.library() if natively else None)
    assert len({len(one.tokens) for one in expected}) > 3, "sentences of one length would end together"
    search = search_of(model, layers, 3)
    assert_same(search.search(padded(rows)), expected)
    counts = search.counts
    assert 0 < counts["accepted"] < counts["drafted"] <= 3 * counts["passes"]
    assert counts["tokens"] == sum(len(one.tokens) + 1 for one in expected)
    # A pass gives what is accepted and one token more, unless the draft ends in EOS.
    assert counts["tokens"] <= counts["passes"] + counts["accepted"] <= counts["tokens"] + len(rows)
    assert not calls, "one sentence is decoded by native code alone, a batch is not"
    assert_same(search_of(model, layers).search(torch.tensor(rows[:1]), False), expected[:1])
    in_batches = search_of(model, layers, 0)  # greedy decoding, all of it native if that can be
    assert_same(in_batches.search(padded(rows)), expected)
    assert in_batches.counts["tokens"] == in_batches.counts["passes"] == sum(len(one.tokens) + 1 for one in expected)
    one_by_one = [search_of(model, layers, k) for k in (0, 1, 3, 9)]
    for search, row in itertools.product(one_by_one, range(len(rows))):
        assert_same(search.search(torch.tensor(rows[row : row + 1]), False), expected[row : row + 1])
    assert set(calls) >= ({0, 1, 3} if natively and name in ("pre", "post", "drop", "chain", "added") else set())
    for k, search in zip((0, 1, 3, 9), one_by_one, strict=True):
        counts = search.counts
        assert counts["tokens"] == sum(len(one.tokens) + 1 for one in expected)
        assert counts["drafted"] <= k * counts["passes"] and counts["accepted"] <= counts["drafted"]
        assert counts["tokens"] <= counts["passes"] + counts["accepted"] <= counts["tokens"] + len(rows)


def test_rules_prefixes_and_limits_hold() -> None:
    model, rows = model_of("pre"), random_sources(LENGTHS, V.size)
    prefixes = [(), (5, 7), (6,), (20, 20, 20), (), (4,) * 11]
    requests = [Request(line, prefix) for line, prefix in enumerate(prefixes)]
    limits = {"max_length_ratio": 0.0, "max_length_extra": 3}
    for rules in (RULES, {}, limits, {"max_length": 1}):
        search = search_of(model, 2, 5, **rules)
        assert_same(search.search(padded(rows), True, requests), greedy(model, rows, requests, **rules))


def test_a_model_that_cannot_end_is_damaged() -> None:
    model, rows = model_of("pre"), random_sources(LENGTHS, V.size)
    model.projection.bias = torch.nn.Parameter(torch.zeros(V.size))
    model.projection.bias.data[V.eos] = -torch.inf
    with pytest.raises(CheckpointError):
        search_of(model, 2, 3).search(padded(rows))


@torch.inference_mode()
def standing(search: Speculative, source: list[int], limit: int) -> tuple[list[int], float]:
    """Translate token by token: the exit's token if it is probable enough, else that of the whole decoder."""
    model, confidence, tokens, total = search.model, search.config.draft_confidence, [V.bos], 0.0
    assert isinstance(model, TranslationModel)
    shallow = model.at_exit(f"1-{search.config.draft_layers}")
    batch = padded([source])
    while len(tokens) <= limit and tokens[1:][-1:] != [V.eos]:
        target_1T = torch.tensor([tokens])
        early_V, whole_V = (
            one.projection(one.decode(target_1T, one.encode(batch))[0][0, -1]).float().log_softmax(0)
            for one in (shallow, model)
        )
        probable = early_V.max() >= math.log(confidence)
        token = int(early_V.argmax() if probable else whole_V.argmax())
        tokens.append(V.eos if len(tokens) == limit else token)
        total += float(whole_V[tokens[-1]])
    return tokens[1:-1], total


@pytest.mark.parametrize("confidence", [0.3, 0.6])
def test_drafted_tokens_stand_that_are_probable_at_the_exit(confidence: float) -> None:
    model, rows = model_of("pre"), random_sources(LENGTHS, V.size)
    config = {"draft_confidence": confidence, "max_length": 9, "max_length_extra": 20}
    search = search_of(model, 2, 3, **config)
    found, alone = search.search(padded(rows)), [search.search(torch.tensor([row]), False)[0] for row in rows]
    for one, same, row in zip(found, alone, rows, strict=True):
        tokens, log_prob = standing(search, row, 9)
        assert one[0].tokens == same[0].tokens == tokens
        assert one[0].log_prob == pytest.approx(log_prob, abs=1e-4)
    exact = greedy(model, rows, max_length=9, max_length_extra=20)
    changed = sum(one[0].tokens != other.tokens for one, other in zip(found, exact, strict=True))
    assert changed and search.counts["accepted"] > 0


def test_a_draft_by_all_that_predicts_is_right() -> None:
    """Layers above the exit that add nothing agree with it: a pass gives all tokens of its block."""
    model = model_of("pre")
    with torch.no_grad():
        for layer in list(model.stacks[1][0].layers)[2:]:
            for name, parameter in layer.named_parameters():
                if "out_proj" in name or "down_proj" in name:
                    parameter.zero_()
    rows = random_sources([9], V.size)
    expected = greedy(model, rows, min_length=22, max_length=22, max_length_extra=30)
    search = search_of(model, 2, 4, min_length=22, max_length=22, max_length_extra=30)
    assert_same(search.search(padded(rows)), expected)
    # Blocks of 5, and one of the last 2, in which EOS is forced.
    assert search.counts["passes"] == 5 and search.counts["tokens"] == 22
    assert search.counts["accepted"] >= search.counts["drafted"] - 1


def test_positions_that_are_dropped_are_cleared_rarely() -> None:
    """The cache of a long translation holds few more positions than tokens, although drafts are wrong."""
    model, rows = sharpened(model_of("post"), 1.0, -100.0), random_sources([5, 6], V.size)
    rules = {"max_length": 80, "max_length_extra": 100}
    search, caches = search_of(model, 1, 6, **rules), []
    begin = model.begin
    model.begin = lambda: caches.append(begin()) or caches[-1]  # type: ignore[method-assign, func-returns-value]
    found = search.search(padded(rows))
    del model.begin
    assert_same(found, greedy(model, rows, **rules))
    assert caches[0]._ancestry.positions <= 80 / 0.75 + 7


def test_the_length_of_drafts_follows_acceptance_and_cost() -> None:
    search = search_of(model_of("pre"), 1)

    def cost(k: int, sentences: int, free: float) -> float:
        lower, upper, projection = search._parts.weights
        whole = lower + upper + projection
        draft = ((k + 1) * lower + k * projection) / whole * max(1.0, sentences / free)
        return draft + (upper + projection) / whole * max(1.0, sentences * (k + 1) / free)

    for alpha in (0.1, 0.5, 0.8, 0.95):
        for sentences, free in ((1, 6.0), (3, 6.0), (32, 6.0), (4, float("inf"))):
            rates = [(1 - alpha ** (k + 1)) / (1 - alpha) / cost(k, sentences, free) for k in range(9)]
            assert search.draft_length(alpha, sentences, 8, free) == rates.index(max(rates))
    chosen = [search.draft_length(alpha, 1, 8, 6.0) for alpha in (0.0, 0.5, 0.9)]
    assert chosen == sorted(chosen) and chosen[0] == 0 and chosen[-1] >= 4
    assert search.draft_length(0.9, 256, 8, 6.0) == 0, "a large batch is decoded as it is"
    assert rows_for_one(search.model) == 12.0


def test_models_without_such_an_exit_are_refused() -> None:
    plain = sharp_transformer(1)
    for model, layers in (
        (plain, 2),
        (plain.at_exit("2-1"), 1),
        (Ensemble([plain, plain]), 1),
        (model_of("grown"), 1),
    ):
        with pytest.raises(ConfigError, match=r"`draft_layers` is \d"):
            search_of(model, layers)
    top = {"top_encoder_layers": 1, "top_decoder_layers": 1}
    for own, layers in (({"name": "transformer", **SIZES}, 1), ({"name": "depth_growing", **SIZES, **top}, 4)):
        merged = {"model": own, "layer": {"name": "merged_attention"}}
        search = search_of(build_model(validate(merged), V).eval(), layers, max_length=1)
        with pytest.raises(ConfigError, match="keep a state"):
            search.search(padded(random_sources([3])))
    with pytest.raises(ConfigError, match=r"search\.name=speculative .* model\.name=gnmt"):
        validate({"model": {"name": "gnmt"}, "search": {"name": "speculative"}})
    with pytest.raises(ConfigError, match=r"model\.decoder_layers is 4"):
        validate({"model": {"name": "transformer", **SIZES}, "search": {"name": "speculative", "draft_layers": 4}})


def test_translations_say_how_much_of_their_drafts_was_accepted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, lines = sharp_transformer(1, Letters.vocabulary.size), ["hello", "", "ab", "deep"]

    def translated(config: SearchConfig, counts: SourceCounts | None = None) -> list[list[int]]:
        return [best[0].tokens for best in translate_lines(model, Letters(), lines, config, counts=counts)]

    counts = SourceCounts()
    assert translated(SpeculativeConfig(), counts) == translated(BeamConfig(beam=1))
    assert counts.drafts["tokens"] >= counts.drafts["passes"] > 0 and not caplog.text
    read = TypeAdapter(SourceCounts).validate_json(json.dumps(asdict(counts)))
    read.warn_of(counts)
    assert read.drafts == {name: 2 * count for name, count in counts.drafts.items()}
    translated(SpeculativeConfig())
    accepted, drafted = (counts.drafts.get(name, 0) for name in ("accepted", "drafted"))
    assert f"{accepted} of {drafted} drafted tokens were accepted" in caplog.text


def test_layers_that_draft_choose_the_search() -> None:
    assert DecodeOptions.of({"draft_layers": 2}).settings["name"] == "speculative"
    with pytest.raises(ConfigError, match="`search` decodes by the search beam, `draft_layers` by speculative"):
        DecodeOptions.of({"draft_layers": 2, "search": "beam"})
