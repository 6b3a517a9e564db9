"""Exits that choose, against plain transcriptions of their rules; their fit, and files of rules."""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.reports.depths import climb, fastest, rules
from deepspeed_nmt.search.base import Hypothesis, Translation
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.choosing_exits import ChoosingExits, ChoosingExitsConfig
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.models import Ensemble
from tests.models import padded, random_sources, sharp_transformer

V = Vocabulary(24)
MODEL = sharp_transformer(decoder_layers=4, factor=1.5)
SOURCES = random_sources([7, 4, 9, 5, 3, 8])
EXITS = (1, 2, 4)
SETTINGS: dict[str, Any] = {"beam": 3, "length_penalty": "gnmt:0.6"}


def chosen(sources: list[list[int]] = SOURCES, **settings: Any) -> list[list[Hypothesis]]:
    config = ChoosingExitsConfig.model_validate({**SETTINGS, "exits": EXITS, **settings})
    return ChoosingExits(config, MODEL, V).search(padded(sources))


def of_exits() -> list[list[Hypothesis]]:
    """Return the best hypothesis of each exit, by sentence."""
    searches = [BeamSearch(BeamConfig(**SETTINGS), MODEL.at_exit(f"2-{number}"), V) for number in EXITS]
    best = [[beam[0] for beam in search.search(padded(SOURCES))] for search in searches]
    return [list(exits) for exits in zip(*best, strict=True)]


def share(a: Hypothesis, b: Hypothesis) -> float:
    return SequenceMatcher(None, a.tokens, b.tokens, autojunk=False).ratio()


def assert_best(found: list[list[Hypothesis]], expected: list[Hypothesis]) -> None:
    assert [beam[0].tokens for beam in found] == [one.tokens for one in expected]


def test_confidence_stops_at_the_first_sure_exit() -> None:
    exits = of_exits()
    means = sorted(one.log_prob / (len(one.tokens) + 1) for of in exits for one in of)
    stages = set()
    for threshold in (-1e6, means[len(means) // 3], means[2 * len(means) // 3], 1.0):
        places = [
            next((i for i, one in enumerate(of) if one.log_prob / (len(one.tokens) + 1) >= threshold), 2)
            for of in exits
        ]
        found = chosen(threshold=threshold)
        assert_best(found, [of[place] for of, place in zip(exits, places, strict=True)])
        assert [beam[0].features["exit"] for beam in found] == [EXITS[place] for place in places]
        stages |= set(places)
        if threshold in (-1e6, 1.0):
            assert len(set(places)) == 1
            whole = BeamSearch(BeamConfig(**SETTINGS), MODEL.at_exit(f"2-{EXITS[places[0]]}"), V).search(
                padded(SOURCES)
            )
            assert [[one.score for one in beam] for beam in found] == [[one.score for one in beam] for beam in whole]
    assert stages == {0, 1, 2}, "the thresholds must reach all exits"
    (alone,) = chosen(SOURCES[2:3], threshold=means[len(means) // 3])
    assert alone[0].tokens == chosen(threshold=means[len(means) // 3])[2][0].tokens


def test_agreement_stops_where_two_exits_agree() -> None:
    exits, stages = of_exits(), set()
    shares = sorted(share(of[1], of[0]) for of in exits)
    for threshold in (0.0, shares[len(shares) // 2], 1.0):
        places = [1 if share(of[1], of[0]) >= threshold else 2 for of in exits]
        assert_best(
            chosen(rule="agreement", threshold=threshold), [of[p] for of, p in zip(exits, places, strict=True)]
        )
        stages |= set(places)
    assert stages == {1, 2}


def test_reranking_and_consensus_choose_among_all_exits() -> None:
    exits = of_exits()
    texts = [[one.tokens for one in of] for of in exits]
    scores = token_log_probs(MODEL, V, padded(SOURCES), True, texts)
    penalised = [[sum(p) / ((5 + len(p)) / 6) ** 0.6 for p in of] for of in scores]
    reranked = chosen(rule="rerank")
    assert_best(reranked, [of[values.index(max(values))] for of, values in zip(exits, penalised, strict=True)])
    assert [beam[0].score for beam in reranked] == pytest.approx([max(values) for values in penalised], abs=1e-5)
    assert any(of[2].tokens != beam[0].tokens for of, beam in zip(exits, chosen(rule="consensus"), strict=True))
    means = [[sum(share(one, other) for other in of) for one in of] for of in exits]
    best = [max(range(3), key=lambda place, values=values: (round(values[place], 9), place)) for values in means]
    assert_best(chosen(rule="consensus"), [of[place] for of, place in zip(exits, best, strict=True)])


def translation(text: str, mean: float) -> Translation:
    tokens = [ord(word) for word in text.split()]
    return Translation(text, 0.0, tokens, mean * (len(tokens) + 1))


def test_rules_are_fitted_to_bleu_and_time() -> None:
    """The shallow exit is right where it is sure; of three exits the middle one only repeats it there."""
    sure, unsure = translation("a b c", -0.1), translation("x y", -2.0)
    right = translation("d e f g", -0.3)
    proposed = {1: [sure, unsure, sure], 2: [sure, translation("x z", -1.0), sure], 4: [sure, right, sure]}
    assert climb("confidence", -0.5, (1, 4), proposed) == [1, 4, 1]
    assert climb("agreement", 0.9, (1, 2, 4), proposed) == [2, 4, 2]
    tried = list(rules(proposed, {1: 3.0, 2: 6.0, 4: 12.0}, lambda texts: float(texts[1] == right.text)))
    best = fastest(tried, 1.0)
    assert (best.rule, best.exits, best.bleu, best.seconds) == ("confidence", (1, 4), 1.0, (3 + 15 + 3) / 3)
    assert -2.0 < best.threshold <= -0.1 and best.sentences == {1: 2, 4: 1}
    assert fastest(tried, 0.0).seconds == min(rule.seconds for rule in tried) < 7.0
    assert fastest(tried, 2.0).bleu == 1.0


def test_a_rule_is_fitted_to_one_sentence() -> None:
    (rule,) = rules({1: [translation("a", -0.5)], 3: [translation("b", -0.1)]}, {1: 1.0, 3: 3.0}, lambda texts: 1.0)
    assert (rule.rule, rule.exits, rule.sentences) == ("confidence", (1, 3), {1: 1, 3: 0})


def test_a_file_of_a_rule_gives_the_settings_of_the_search(tmp_path: Path) -> None:
    same = [translation("a", -1.0)] * 2
    (rule,) = rules({1: same, 3: same}, {1: 1.0, 3: 3.0}, lambda texts: 1.0)
    rule.write(tmp_path / "rule.json", "digest")
    options = DecodeOptions.of({"choose_exits": tmp_path / "rule.json", "beam": 2})
    given = {name: options.settings[name] for name in ("name", "exits", "rule", "threshold", "beam")}
    config = ChoosingExitsConfig.model_validate(given)
    assert (config.exits, config.rule, config.threshold, config.beam) == ((1, 3), "confidence", -1.0, 2)
    for content in ("", "[]", '"exits"', "{}", json.dumps({"exits": [1], "rule": "confidence"}), "[" * 100_000):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            _ = DecodeOptions.of({"choose_exits": tmp_path / "bad.json"}).settings
    with pytest.raises(ConfigError, match="nope"):
        _ = DecodeOptions.of({"choose_exits": tmp_path / "nope"}).settings


def test_an_ensemble_is_refused() -> None:
    with pytest.raises(ConfigError, match="chooses among the exits of one model; give one run"):
        ChoosingExits(ChoosingExitsConfig(), Ensemble([MODEL, MODEL]), V)


@pytest.mark.parametrize(
    ("search", "model", "words"),
    [
        ({"exits": [1]}, {}, ("search.exits is [1]", "chooses among several", "--choose-exits")),
        ({"exits": [1, 7]}, {}, ("search.exits has 7", "decoder_layers is 6")),
        ({"exits": [2, 1]}, {}, ("[2, 1]",)),
        ({"exits": []}, {}, ("search.exits",)),
        ({"rule": "oracle"}, {}, ("search.rule",)),
        ({"threshold": float("nan")}, {}, ("search.threshold",)),
        ({"exits": [1]}, {"name": "gnmt"}, ("model.name=gnmt",)),
    ],
)
def test_rules_without_a_meaning_are_refused(
    search: dict[str, Any], model: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        validate({"model": model, "search": {"name": "choosing_exits", **search}})
    assert all(word in str(caught.value) for word in words)
