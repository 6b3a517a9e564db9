"""Metrics by name: what they score, which one chooses the best checkpoint, and the settings of older runs."""

from typing import Any

import pytest
import sacrebleu

from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.metrics import METRICS, Scorer, TextMetric, in_language, warn_of_spaces
from deepspeed_nmt.text import TextForm, warn_of_missing_rules
from deepspeed_nmt.train.configuration import ValidationConfig

RAW, TOKENISED, UNKNOWN = TextForm(form="raw"), TextForm(form="tokenised"), TextForm()
MOSES = TextForm(form="moses", source_lang="de", target_lang="en")
REFERENCES = [
    "&quot; It costs 3.50 &amp; more , &quot; said Ms. Well @-@ Known - she didn &apos;t laugh .",
    "The house ( built in 1990 ) is red , isn &apos;t it ?",
    "They are 20 % cheaper : that &apos;s good .",
    "He came , he saw , he &apos;s gone .",
]
HYPOTHESES = [
    "&quot; It costs 3.50 &amp; more , &quot; said Mrs. Well @-@ Known - she did not laugh .",
    "The house ( built in 1991 ) is red , isn &apos;t it ?",
    "They are 20 % cheaper : that is nice .",
    "He came , he saw and he &apos;s gone .",
]
PLAIN_REFERENCES = [
    '"It costs 3.50 & more," said Ms. Well-Known - she didn\'t laugh.',
    "The house (built in 1990) is red, isn't it?",
    "They are 20% cheaper: that's good.",
    "He came, he saw, he's gone.",
]
PLAIN_HYPOTHESES = [
    '"It costs 3.50 & more," said Mrs. Well-Known - she did not laugh.',
    "The house (built in 1991) is red, isn't it?",
    "They are 20% cheaper: that is nice.",
    "He came, he saw and he's gone.",
]


def chosen(text: TextForm, **settings: Any) -> tuple[list[str], str]:
    """The names of the metrics for a form of text, and the name of the measure that chooses the best checkpoint."""
    metrics, best = ValidationConfig(**settings).chosen(text)
    return [metric.name for metric in metrics], "loss" if best is None else best.name


def test_auto_takes_the_metrics_that_the_text_allows() -> None:
    assert chosen(RAW) == chosen(UNKNOWN) == (["bleu"], "bleu")
    assert chosen(MOSES) == (["bleu", "bleu_tokenised"], "bleu")
    assert chosen(TOKENISED) == (["bleu_tokenised"], "bleu_tokenised")
    assert chosen(MOSES, best_by="bleu_tokenised") == (["bleu", "bleu_tokenised"], "bleu_tokenised")
    assert chosen(RAW, best_by="chrf") == (["bleu", "chrf"], "chrf")


def test_named_metrics_are_those_and_the_first_chooses() -> None:
    assert chosen(RAW, metrics=["ter", "bleu", "ter"]) == (["ter", "bleu"], "ter")
    assert chosen(RAW, metrics=["ter", "bleu"], best_by="bleu") == (["ter", "bleu"], "bleu")
    assert chosen(RAW, metrics=["bleu"], best_by="loss") == (["bleu"], "loss")
    assert chosen(TOKENISED, metrics=[]) == ([], "loss")


def test_a_metric_that_the_text_does_not_allow_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(TOKENISED, metrics=["bleu", "bleu_tokenised", "chrf"])
    first, second = caught.value.problems
    assert first.startswith("the metric bleu needs plain text, but the text is tokenised by unknown rules; set ")
    assert second.startswith("the metric chrf needs plain text")
    with pytest.raises(
        ConfigError, match="needs tokenised text, but the text is raw, and its target language is not"
    ):
        chosen(RAW, metrics=["bleu_tokenised"])


def test_bleu_has_the_tokenizer_of_the_language(caplog: pytest.LogCaptureFixture) -> None:
    chinese = ["这是一个很长的中文句子。", "他昨天去了北京。"]
    bleu = METRICS["bleu"]
    assert isinstance(bleu, TextMetric) and bleu.score(chinese, chinese) == 0.0
    for code, tokenizer in (("zh", "zh"), ("zh-cn", "zh"), ("th", "char"), ("de", "13a"), (None, "13a")):
        metric = in_language(bleu, code)
        assert isinstance(metric, TextMetric) and f"tok:{tokenizer}|" in metric.signature() and metric.name == "bleu"
        assert metric.score(chinese, chinese) == (0.0 if tokenizer == "13a" else pytest.approx(100.0))
    text = TextForm("raw", target_lang="zh")
    metrics, best = ValidationConfig().chosen(text)
    assert Scorer(metrics, text, chinese)(chinese) == {"bleu": pytest.approx(100.0)} and best == metrics[0]
    warn_of_spaces("references", chinese, metrics)
    warn_of_spaces("references", ["Das ist ein Satz mit 北京."], [bleu])
    assert not caplog.messages
    warn_of_spaces("references", chinese, [bleu])
    assert "2 of 2 lines" in caplog.text and "--language" in caplog.text


def test_bleu_of_moses_text_is_that_of_detokenised_text_and_13a_over_tokens_overstates_it() -> None:
    names = ("bleu", "bleu_tokenised", "chrf", "ter")
    scores = Scorer([METRICS[name] for name in names], MOSES, REFERENCES)(HYPOTHESES)
    expected = sacrebleu.corpus_bleu(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score
    overstated = Scorer([METRICS["bleu"]], UNKNOWN, REFERENCES)(HYPOTHESES)["bleu"]
    assert scores["bleu"] == pytest.approx(expected, abs=1e-9)
    assert overstated == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], force=True).score, abs=1e-9)
    assert overstated - scores["bleu"] > 1.0
    multi = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    assert scores["bleu_tokenised"] == pytest.approx(multi.corpus_score(HYPOTHESES, [REFERENCES]).score, abs=1e-9)
    assert scores["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score, abs=1e-9
    )
    assert scores["ter"] == pytest.approx(sacrebleu.corpus_ter(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score, abs=1e-9)


def test_raw_text_is_tokenised_for_multi_bleu() -> None:
    raw = TextForm(form="raw", target_lang="en")
    scores = Scorer([METRICS["bleu_tokenised"], METRICS["bleu"]], raw, PLAIN_REFERENCES)(PLAIN_HYPOTHESES)
    # Without option -a the tokenizer does not split Well-Known.
    sides = [[line.replace(" @-@ ", "-") for line in side] for side in (HYPOTHESES, REFERENCES)]
    tokens = Scorer([METRICS["bleu_tokenised"]], TOKENISED, sides[1])(sides[0])
    assert scores["bleu_tokenised"] == pytest.approx(tokens["bleu_tokenised"], abs=1e-9)
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(PLAIN_HYPOTHESES, [PLAIN_REFERENCES]).score)


def test_languages_without_rules_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for language in ("de", "en", "ja", "xx"):
        warn_of_missing_rules(language, "--target-lang")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("--target-lang xx: sacremoses has no rules for this language, so the rules ")
