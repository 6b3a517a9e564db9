"""Pareto front of depths, the cheapest sufficient depth, the oracle over sentences, and systems of several runs."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_nmt.api import Translator
from deepspeed_nmt.config import load_config
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.metrics import METRICS, Scorer
from deepspeed_nmt.reports.depths import (
    Depth,
    ExitRule,
    Members,
    System,
    cheapest,
    measure,
    oracle,
    systems_of,
)
from deepspeed_nmt.reports.text_scores import ParallelText, common_scorer
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.speculative import SpeculativeConfig
from deepspeed_nmt.text import NO_TAGS, TextForm
from tests.unit.test_translator import LINES, Letters, plain

DEPTHS = [Depth(1, 1, 20.0, 1.0), Depth(1, 2, 24.0, 2.0), Depth(2, 1, 23.0, 1.5), Depth(2, 2, 24.3, 3.0)]


def test_the_cheapest_loses_at_most_the_given_bleu() -> None:
    assert cheapest(DEPTHS, 0.0).name == "2-2"
    assert cheapest(DEPTHS, 0.5).name == "1-2"
    assert cheapest(DEPTHS, 1.5).name == "2-1"
    assert cheapest(DEPTHS, 99.0).name == "1-1"


def test_the_oracle_chooses_the_best_depth_and_of_equal_ones_the_fastest() -> None:
    good, bad = "a b c d e", "x y z"
    # 1-2 comes before 2-1 in the order of the depths, and is slower.
    translations = [[bad, bad, good], [good, good, good], [good, bad, good], [bad, good, bad]]
    bleus = [[100.0 * (each == good) for each in row] for row in translations]
    counts, chosen = oracle(DEPTHS, translations, bleus)
    assert counts == {"1-1": 1, "1-2": 1, "2-1": 1, "2-2": 0}
    assert chosen == [good] * 3


def test_a_rule_that_loses_more_is_not_called_one_that_loses_less() -> None:
    system = System("run", DEPTHS, rules=[ExitRule("confidence", (1, 2), -0.1, 24.0, 2.0, {1: 1, 2: 1})])
    assert "fastest rule within 0.5 BLEU: confidence" in system.text(0.5)
    assert "no rule within 0.1 BLEU, best one: confidence" in system.text(0.1)


def run(path: str, encoder: int, decoder: int, *settings: str) -> Run:
    """A run without files, of which only the settings are read."""
    layers = [f"model.encoder_layers={encoder}", f"model.decoder_layers={decoder}"]
    tokenizer: Any = SimpleNamespace()
    return Run(Path(path), load_config(settings=[*layers, *settings]), tokenizer, {})


MANY = ["objective.label_smoothed=null", "objective.multi_softmax={}"]


def test_runs_of_one_depth_are_one_system_beside_a_run_of_many() -> None:
    runs = [run("v/22", 2, 2), run("nxm", 2, 2, *MANY), run("v/12", 1, 2), run("v/11", 1, 1), run("v/21", 2, 1)]
    vanilla, many = systems_of(runs)
    assert vanilla.name == "4 models" and many.name == "nxm"
    assert [(each.path.name, pairs) for each, pairs in vanilla.pairs] == [
        *(("11", [(1, 1)]), ("12", [(1, 2)]), ("21", [(2, 1)]), ("22", [(2, 2)])),
    ]
    assert [pairs for _, pairs in many.pairs] == [[(1, 1), (1, 2), (2, 1), (2, 2)]]


@dataclass(frozen=True)
class FormRun(Run):
    """A run without files, of which the settings and the form of its text are read."""

    form: TextForm

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(text=self.form)


def scored(path: str, form: TextForm, *settings: str) -> Run:
    tokenizer: Any = SimpleNamespace(reference=str)
    return FormRun(Path(path), load_config(settings=settings), tokenizer, {}, form)


def test_depths_are_scored_by_the_bleu_that_validates_their_runs() -> None:
    """Recipes of the N x M paper are validated by sacreBLEU's tokenizer intl, which divides at symbols such as €."""
    text, form = ParallelText("text", ["a b"], ["a b c costs 9€ now"]), TextForm("raw", target_lang="de")
    intl, programs = (
        scored(name, form, f"validation.metrics=[{metrics}]")
        for name, metrics in (("i", "chrf, bleu_intl"), ("p", "bleurt=command:/bin/true"))
    )
    hypothesis = ["a b c costs 8€ now"]
    for runs, name in (([intl], "bleu_intl"), ([intl, intl], "bleu_intl"), ([intl, programs], "bleu")):
        scorer = common_scorer(runs, text)
        assert scorer.first(hypothesis) == METRICS[name].score(hypothesis, text.references)
        assert scorer.metrics[0].name == name
    (sentence,), (other,) = (common_scorer(runs, text).sentence_bleus(hypothesis) for runs in ([intl], [programs]))
    assert sentence != pytest.approx(other, abs=1.0), "13a takes the amount for one word"
    tokens = common_scorer([scored("t", TextForm("tokenised"))], ParallelText("text", ["a"], ["don't , stop it now"]))
    assert tokens.sentence_bleus(["don't, stop it now"])[0] < 60, "tokens are divided at spaces alone"


def test_runs_of_unlike_text_have_no_common_scorer() -> None:
    text = ParallelText("text", ["a b"], ["a b"])
    raw, tokens = (scored(form, TextForm(form)) for form in ("raw", "tokenised"))  # type: ignore[arg-type]
    german, french = (scored(code, TextForm("raw", target_lang=code)) for code in ("de", "fr"))
    assert common_scorer([raw, german], text).metrics == (METRICS["bleu"],)
    for runs in ([raw, tokens], [german, french]):
        with pytest.raises(ConfigError, match=f"{runs[1].path} and {runs[0].path} translate"):
            common_scorer(runs, text)


def test_depths_without_an_exit_below_that_could_draft_are_translated_greedily(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Translator(plain(1), Letters(), SpeculativeConfig(draft_layers=1), torch.device("cpu"))
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(Translator, "open", lambda *_, **options: opened.append(options) or whole)
    run: Any = SimpleNamespace(path=Path("one"), data=SimpleNamespace(tags=NO_TAGS))
    scorer = Scorer([METRICS["bleu"]], TextForm(), [one.text for one in whole.translate(LINES)])
    text, options = ParallelText("text", LINES, LINES), {"checkpoint": "last", "max_tokens": 99, "repeat": 1}
    pairs = [(2, 1), (2, 2)]
    found = measure(Members("one", [(run, pairs)]), text, scorer, **options, with_oracle=False, with_signs=True)
    shallow, deep = (depth.bleu for depth in found.depths)
    assert shallow < deep == pytest.approx(100.0)
    assert opened[-1]["draft_confidence"] == 1.0, (
        "of drafts that the whole decoder accepts, whatever the run's search"
    )
    run.trained_at = lambda *_: True
    measure(Members("one", [(run, pairs)]), text, scorer, **options, with_oracle=False, with_rules=True)
    assert opened[-1]["name"] == "beam", "rules are fitted with the search that uses them"
