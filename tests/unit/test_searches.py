"""All searches from left to right: batches and the cache change nothing, and every rule of the next token holds."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of
from deepspeed_nmt.search.base import Hypothesis, Request, RequestSearch
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.searches import SEARCHES
from tests.models import BOS, EOS, PAD, padded, random_sources, sharp_transformer, sharpened

UNK = 3
SEARCHED: dict[str, dict[str, Any]] = {
    "beam": {"beam": 3},
    "diverse_beam": {"beam": 4, "groups": 2, "diversity": 0.7},
    "constrained_beam": {"beam": 4},
    "sampling": {"samples": 4, "temperature": 1.2, "top_k": 40, "top_p": 0.95},
    "mbr": {"samples": 8, "temperature": 1.5},
}
RULES = {"min_length": 4, "max_length": 9, "no_repeat_ngram": 2, "suppress_unknown": True, "suppress_tokens": (7, 8)}


def searcher(name: str, model: TranslationModel, **settings: Any) -> RequestSearch:
    entry = SEARCHES[name]
    search: RequestSearch = entry.build(entry.config.model_validate(settings), model, Vocabulary(model.vocab_size))
    return search


def assert_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-4)


def contains(tokens: Sequence[int], phrase: Sequence[int]) -> bool:
    return any(list(tokens[at : at + len(phrase)]) == list(phrase) for at in range(len(tokens)))


CONSTRAINTS = ((), ((9, 10), (11,)), ((12,),), ((13, 13),), ())
REQUESTS = [
    Request(line, prefix, constraints)
    for line, prefix, constraints in zip(
        (5, 0, 7, 2, 90), ((), (5, 7), (6,), (), (20, 20, 20)), CONSTRAINTS, strict=True
    )
]
LEFT_TO_RIGHT = [method for method in methods() if settings_of(method).model.left_to_right]
RULED = [method for method in LEFT_TO_RIGHT if method == "vanilla" or settings_of(method).model.named_exits]
"""Rules are about log-probabilities, whatever the model; one with named exits has a search of its own."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "rules"),
    [*((method, {}) for method in LEFT_TO_RIGHT), *((method, RULES) for method in RULED)],
    ids=[*(f"{method}-free" for method in LEFT_TO_RIGHT), *(f"{method}-ruled" for method in RULED)],
)
def test_batches_and_the_cache_change_nothing(method: str, rules: dict[str, Any]) -> None:
    torch.manual_seed(3)
    model = sharpened(build_model(settings_of(method), VOCABULARY), end=7.0)
    rows = random_sources([9, 3, 6, 6, 2], VOCABULARY.size)
    different, lengths = set(), defaultdict[str, set[tuple[int, int]]](set)
    grown = {"deep_shallow": {"beam": 3}} if settings_of(method).model.named_exits else {}
    for name, settings in {**SEARCHED, **grown}.items():
        search = searcher(name, model, **settings, **rules)
        together = search.search(padded(rows), True, REQUESTS)
        forced = token_log_probs(
            model, VOCABULARY, padded(rows), True, [[each.tokens for each in found] for found in together]
        )
        for row, request, found, log_probs in zip(rows, REQUESTS, together, forced, strict=True):
            (alone,) = search.search(torch.tensor([row]), False, [request])
            assert_same(alone, found)
            for hypothesis, expected in zip(found, log_probs, strict=True):
                assert hypothesis.log_prob == pytest.approx(math.fsum(expected), abs=1e-3)
                assert tuple(hypothesis.tokens[: len(request.prefix)]) == request.prefix
                if name == "constrained_beam":
                    assert all(contains(hypothesis.tokens, phrase) for phrase in request.constraints)
                if rules:
                    check_rules(hypothesis.tokens, request)
            different |= {tuple(each.tokens) for each in found}
            lengths[name] |= {(request.line, len(each.tokens)) for each in found}
    assert len(different) > 20, "equal translations would show nothing"
    assert rules or len(lengths["mbr"]) > 6, "samples of one length would end together"


def check_rules(tokens: Sequence[int], request: Request) -> None:
    needed = len(request.prefix) + sum(map(len, request.constraints)) + 1
    assert 4 <= len(tokens) + 1 <= max(9, needed)
    chosen = tokens[len(request.prefix) :]
    constrained = {token for phrase in request.constraints for token in phrase}
    assert not {PAD, BOS, EOS} & set(tokens)
    assert not {UNK, 7, 8} & set(chosen) - constrained
    if not request.prefix and not request.constraints:
        pairs = list(pairwise(tokens))
        assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("rules", [{}, {"min_length": 5, "suppress_unknown": True}], ids=["free", "ruled"])
@pytest.mark.parametrize("name", list(SEARCHED))
def test_a_sentence_at_its_limit_lifts_no_rule_of_another(name: str, rules: dict[str, Any]) -> None:
    model, rows = sharp_transformer(2), random_sources([4, 4, 4])
    requests = [Request(0), Request(1, (9, 10, 9, 10, 11, 12, 9)), Request(2, (5, 6, 7))]
    search = searcher(name, model, **SEARCHED[name], max_length_ratio=0.0, max_length_extra=2, **rules)
    together = search.search(padded(rows), False, requests)
    for row, request, found in zip(rows, requests, together, strict=True):
        (alone,) = search.search(torch.tensor([row]), False, [request])
        assert_same(found, alone)
        for each in found:
            assert tuple(each.tokens[: len(request.prefix)]) == request.prefix
            assert len(each.tokens) + 1 >= max(len(request.prefix) + 1, rules.get("min_length", 1))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_search_without_constraints_is_beam_search(seed: int) -> None:
    model, rows = sharp_transformer(seed), random_sources([4, 11, 7, 2, 5], seed=seed)
    expected = searcher("beam", model, beam=4).search(padded(rows))
    for found, one in zip(searcher("constrained_beam", model, beam=4).search(padded(rows)), expected, strict=True):
        assert_same(found, one)


def test_groups_without_diversity_are_equal_and_with_it_differ() -> None:
    model, rows = sharp_transformer(2), random_sources([6, 9, 4])
    same = searcher("diverse_beam", model, beam=4, groups=2, diversity=0.0).search(padded(rows))
    half = searcher("beam", model, beam=2).search(padded(rows))
    for found, expected in zip(same, half, strict=True):
        assert_same(found, expected[:2])
    apart = searcher("diverse_beam", model, beam=4, diversity=5.0).search(padded(rows))
    for found in apart:
        first = Counter(each.tokens[0] for each in found if each.tokens)
        assert max(first.values()) == 1, "at a high cost no two groups begin alike"
        assert len({tuple(each.tokens) for each in found}) == 4


@pytest.mark.parametrize("phrases", [((4, 5), (6,)), ((4, 5), (4, 6)), ((4, 4, 5),)])
def test_a_wide_constrained_beam_equals_exhaustive_search(phrases: tuple[tuple[int, ...], ...]) -> None:
    model, (source,), limit = sharp_transformer(4, vocab_size=7), random_sources([5], vocab_size=7), 5
    every = [list(words) for length in range(limit) for words in product(range(3, 7), repeat=length)]
    every = [tokens for tokens in every if all(contains(tokens, phrase) for phrase in phrases)]
    (scores,) = token_log_probs(model, Vocabulary(7), torch.tensor([source]), False, [every])
    totals = sorted(zip(map(math.fsum, scores), every, strict=True), reverse=True)
    settings = {"beam": 600, "length_penalty": "none", "max_length_ratio": 0.0, "max_length_extra": limit}
    search = searcher("constrained_beam", model, **settings)
    (found,) = search.search(torch.tensor([source]), False, [Request(constraints=phrases)])
    assert [each.tokens for each in found] == [tokens for _, tokens in totals]
    assert [each.score for each in found] == pytest.approx([total for total, _ in totals], abs=1e-4)


def exact(model: TranslationModel, source: list[int], tokens: list[int]) -> Tensor:
    """Return p(next token | source, tokens). Shape: -> (V,)"""
    with torch.no_grad():
        states = model.decode(torch.tensor([[BOS, *tokens]]), model.encode(torch.tensor([source])))[0]
        logits = model.projection(states[0, -1])
    logits[[PAD, BOS]] = -torch.inf
    return logits.softmax(dim=0)


def frequencies(model: TranslationModel, source: list[int], **settings: Any) -> Tensor:
    """Return the frequencies of the first tokens of samples, on four lines. Shape: -> (V,)"""
    search = searcher("sampling", model, samples=1000, max_length=2, max_length_extra=2, **settings)
    found = search.search(torch.tensor([source] * 4), False)
    first = [each.tokens[0] if each.tokens else EOS for line in found for each in line]
    return torch.tensor(first).bincount(minlength=model.vocab_size) / 4000


def test_samples_follow_the_distribution_of_the_model() -> None:
    model, (source,) = sharp_transformer(3, factor=2.0), random_sources([5])
    p = exact(model, source, [])
    assert p.max() < 0.9, "a distribution of one token shows nothing"

    def apart(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).abs().sum()) / 2

    assert apart(frequencies(model, source), p) < 0.03
    warm = (p.clamp(min=1e-30).log() / 2.0).softmax(dim=0) * (p > 0)
    assert apart(frequencies(model, source, temperature=2.0), warm / warm.sum()) < 0.04
    assert apart(frequencies(model, source, temperature=2.0), p) > 0.05
    best = p.topk(3)
    three = torch.zeros_like(p).scatter(0, best.indices, best.values / best.values.sum())
    assert apart(frequencies(model, source, top_k=3), three) < 0.03
    nucleus = float(best.values[:2].sum()) + 1e-4
    assert apart(frequencies(model, source, top_p=nucleus), three) < 0.03
    assert apart(frequencies(model, source, top_k=1), p) > 0.1
    greedy = searcher("beam", model, beam=1).search(torch.tensor([source]))[0]
    coldest = searcher("sampling", model, temperature=1e-3).search(torch.tensor([source]))[0]
    assert_same(coldest, [Hypothesis(greedy[0].tokens, greedy[0].log_prob, greedy[0].log_prob)])


def test_samples_depend_on_seed_and_line_alone() -> None:
    model, (source,) = sharp_transformer(3), random_sources([6])
    rows = padded([source] * 3)

    def samples(seed: int, *lines: int) -> list[list[list[int]]]:
        search = searcher("sampling", model, samples=3, seed=seed)
        return [[each.tokens for each in found] for found in search.search(rows, False, list(map(Request, lines)))]

    first = samples(1, 0, 8, 3)
    assert samples(1, 3, 0, 8) == [first[2], first[0], first[1]]
    assert first[0] != first[1] != first[2]
    assert samples(2, 0, 8, 3) != first
    # A line's samples stay when there are more of them.
    (more,) = searcher("sampling", model, samples=6).search(rows[:1], False, [Request(8)])
    assert all(tokens in [each.tokens for each in more] for tokens in first[1])
    # The next token is drawn afresh at each position.
    assert len({tuple(tokens) for found in first for tokens in found}) > 6


def test_a_hypothesis_after_which_no_token_is_allowed_ends() -> None:
    model, (source,) = sharp_transformer(1, vocab_size=7), random_sources([8], vocab_size=7)
    for name, settings in SEARCHED.items():
        search = searcher(name, model, **settings, no_repeat_ngram=1, min_length=30)
        (found,) = search.search(torch.tensor([source]), False)
        for each in found:
            assert sorted(each.tokens) == [3, 4, 5, 6], name


@pytest.mark.parametrize("name", list(SEARCHED))
def test_a_model_that_predicts_nan_is_refused(name: str) -> None:
    model, (source,) = sharp_transformer(1), random_sources([4])
    search = searcher(name, model, **SEARCHED[name])
    assert search.search(torch.empty(0, 3, dtype=torch.long)) == []
    with torch.no_grad():
        model.projection.weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="predicts NaN"):
        search.search(torch.tensor([source]), False)
