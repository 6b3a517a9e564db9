"""Choice of the best checkpoint by scores that are late or missing, and patience that only real gains reset."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
from tensorboard.plugin_util import markdown_to_safe_html

from deepspeed_nmt.engine.base import EngineScalars
from deepspeed_nmt.evaluate.bleu import paired_bootstrap
from deepspeed_nmt.evaluate.curves import RunCurves, validation_measures
from deepspeed_nmt.evaluate.metrics import METRICS
from deepspeed_nmt.evaluate.significance import p_value_of_scores
from deepspeed_nmt.run.gains import Compared, is_significant
from deepspeed_nmt.run.late_results import LateMetrics, choice_by
from deepspeed_nmt.run.validation import MEAN, ValidationConfig
from deepspeed_nmt.run.validation_texts import ValidationTexts, plain_sources
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.checkpoint import State, write_state
from deepspeed_nmt.train.choosing import record_best, update_best, update_best_late, with_pending_score
from deepspeed_nmt.train.events import EVENTS_FILE, Events
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.validation import Choice, LateResult, Validation
from tests.unit.test_program_metrics import program

UNKNOWN = -math.inf
BY_A = Choice("valid/a")


def judged(*scores: tuple[float, float], significant: bool = True) -> list[tuple[int, int, int]]:
    """Best update, validations that count for patience, and update that reset them, after each (score, loss)."""
    progress, found = Progress(), []
    for update, (score, loss) in enumerate(scores, 1):
        validation = Validation({}, BY_A, score, loss)
        progress, _ = update_best(progress, update, validation, lambda new, old: significant)
        found.append((progress.best_update, progress.validations_since_best, progress.patience_update))
    return found


def test_a_validation_without_a_score_is_the_best_only_while_no_score_is_known() -> None:
    assert judged((UNKNOWN, 3.0), (UNKNOWN, 2.0), (0.1, 9.0), (UNKNOWN, 1.0), (0.05, 1.0), (0.2, 1.0)) == [
        *((1, 0, 1), (2, 0, 2), (3, 0, 3), (3, 0, 3), (3, 1, 3), (6, 0, 6))
    ]


def test_events_have_the_measure_that_chose_and_its_value_with_its_sign(tmp_path: Path) -> None:
    events = Events(tmp_path, active=True)
    for score, sign in ((-53.5, 1), (-2.0, -1), (0.2, 1)):
        choice = Choice("valid/news/len of ab", least=1.0 if score > 0 else -math.inf, sign=sign)
        found = Validation({}, choice, score, 3.25)
        record_best(events, update_best(Progress(update=8), 8, found, lambda update, than: True)[0], found)
    lines = [json.loads(line) for line in (tmp_path / EVENTS_FILE).read_text().splitlines()]
    assert [(line["measure"], line["score"]) for line in lines] == [
        ("valid/news/len", -53.5), ("valid/news/len", 2.0), ("valid/news/loss", 3.25),
    ]  # fmt: skip
    assert lines[0]["text"] == "update 8 is the best so far: valid/news/len -53.50"


def test_only_a_significant_gain_resets_patience_and_the_best_is_by_score() -> None:
    scores = [(0.1, 9.0), (0.2, 9.0), (0.15, 9.0), (0.3, 9.0)]
    assert judged(*scores) == [(1, 0, 1), (2, 0, 2), (2, 1, 2), (4, 0, 4)]
    assert judged(*scores, significant=False) == [(1, 0, 1), (2, 1, 1), (2, 2, 1), (4, 3, 1)]


def test_gains_add_up_since_patience_was_reset() -> None:
    asked: list[tuple[int, int]] = []
    progress = Progress()
    for update, score in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        found = Validation({}, BY_A, score, 1.0)
        progress, _ = update_best(progress, update, found, lambda new, old: asked.append((new, old)) or new == 3)
    assert asked == [(2, 1), (3, 1), (4, 3)] and progress.patience_update == 3
    older = Progress(best_score=1.0, best_loss=1.0, best_by="valid/a", best_update=7)
    update_best(older, 9, Validation({}, BY_A, 2.0, 1.0), lambda new, old: asked.append((new, old)) or True)
    assert asked[-1] == (9, 7), "a checkpoint of before"
    near_chance = Validation({}, replace(BY_A, least=1.0), 0.5, 0.5)
    before = replace(older, best_score=0.5)
    assert update_best(before, 9, near_chance, lambda new, old: False)[0].validations_since_best == 0


def test_late_scores_choose_among_checkpoints_that_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    def late(update: int, score: float | None, by: str = "valid/a") -> LateResult:
        return LateResult(update, 0, {}, None if score is None else Validation({}, Choice(by), score, 1.0))

    before = Progress(
        update=9, best_score=0.5, best_loss=1.0, best_by="valid/a", best_update=3, awaited=(4, 5, 6, 7, 8)
    )
    found = [late(2, 9.0), late(4, 0.6), late(5, 0.9), late(6, None), late(7, 0.1), late(8, 8.0, "valid/b")]
    after, best = update_best_late(before, found, [3, 4, 6, 9], lambda new, old: True, warn=True)
    assert best and (after.best_update, after.best_score, after.awaited) == (4, 0.6, (6,))
    assert after.validations_since_best == 1, "of update 7; that of 5 has no checkpoint"
    assert caplog.messages == [
        "valid/a of update 5 is the best so far, but its checkpoint was not kept; raise validation.late_keep"
    ]
    assert update_best_late(after, found, [3, 4, 6, 9], lambda new, old: True, warn=True) == (after, False)
    awaiting = Validation({}, BY_A, UNKNOWN, 1.0, pending_limit=2)
    assert with_pending_score(replace(before, awaited=(7, 8)), awaiting, warn=True).awaited == (8, 9)
    assert "valid/a of update 7 has not come, and its checkpoint is no longer kept" in caplog.messages[-1]
    assert with_pending_score(before, replace(awaiting, pending_limit=0), warn=True) == before


def test_progress_with_an_unknown_score_and_awaited_ones_is_read_as_it_was_written(tmp_path: Path) -> None:
    progress = Progress(update=9, best_score=UNKNOWN, best_loss=2.0, best_update=4, awaited=(4, 8))
    write_state(tmp_path / "state.json", progress, EngineScalars())
    assert State.model_validate_json((tmp_path / "state.json").read_bytes()).progress == progress


def test_late_results_reach_other_ranks_as_they_are(tmp_path: Path) -> None:
    choice = choice_by(METRICS["ter"], MEAN, ["", "n"], " of x")
    validation = choice.validation({"valid/loss": 1.0, "valid/n/loss": 3.0})
    for result in (LateResult(4, 70, {"valid/ter": 40.0}, validation), LateResult(5, 0, {}, None)):
        assert LateResult.read(json.loads(json.dumps(asdict(result)))) == result


def test_the_mean_is_known_when_all_its_values_are() -> None:
    choice = choice_by(METRICS["ter"], MEAN, ["", "n"], " of x")
    losses = {"valid/loss": 1.0, "valid/n/loss": 3.0}
    found = choice.validation({**losses, "valid/ter": 40.0})
    assert found.score == UNKNOWN and found.values["valid/mean/loss"] == found.loss == 2.0
    found = choice.validation({**losses, "valid/ter": 40.0, "valid/n/ter": 50.0})
    assert (found.choice.by, found.score, found.values["valid/mean/ter"]) == ("valid/mean/ter of x", -45.0, 45.0)
    loss = choice_by(None, "n", ["", "n"], "").validation(losses)
    assert (loss.score, loss.choice.least, "valid/mean/loss" in loss.values) == (-3.0, math.inf, False)


def test_results_of_late_programs_are_taken_in_once_and_failures_end_the_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = program(tmp_path / "a.sh", 'case "$1" in *0002.txt) exit 3 ;; esac')
    config = ValidationConfig(metrics=(f"late:{path}",), sets={"n": "x"})
    for name in ("", "n"):
        ValidationTexts(tmp_path, name).begin(["x"], ["y"], [], 0)
    late = LateMetrics(tmp_path, config)
    choice = choice_by(config.commands["a"], "", ["", "n"], "")
    for update in (1, 2, 10_000_000):
        late.start(update, 100 * update, {"valid/loss": 1.0 * update}, choice)
    for process in late._processes.values():
        process.wait(20)
    assert late.pending_updates() == [1, 2, 10_000_000] and late.has_pending_score(1)
    main, other = (ValidationTexts(tmp_path, name) for name in ("", "n"))
    main.result(1, "a").write_text("Loading\n")
    found = {each.update: each for each in late.collect((1, 2, 3))}
    assert found[1].validation is None and not late.has_pending_score(2) and late.pending_updates() == [1, 10_000_000]
    unknown = found[2].validation
    assert unknown is not None and (unknown.choice.by, unknown.score, unknown.loss) == ("valid/a", UNKNOWN, 2.0)
    assert found[3].validation is not None and found[3].validation.choice.by == "", (
        "its record is lost, so it never comes"
    )
    assert sum("a.sh ended with status 3, so valid/" in message for message in caplog.messages) == 2
    main.result(1, "a").write_text("0.25\n")
    (first,) = late.collect(())
    assert (first.update, first.values, first.target_tokens) == (1, {"valid/a": 0.25}, 100)
    assert first.validation is not None and first.validation.score == 0.25
    other.result(1, "a").write_text("0.5\n")
    resumed = LateMetrics(tmp_path, config)
    (first,) = resumed.collect(())
    assert first.values == {"valid/n/a": 0.5}
    assert resumed.collect(()) == [] and [each.update for each in resumed.collect((1,))] == [1]
    assert sum("/main/update-0000001.a.result has 'Loading'; it is" in message for message in caplog.messages) == 1
    main.path(1, "json").write_text('{"update": 1}')
    assert [each.validation and each.validation.choice.by for each in resumed.collect((1,))] == [""], (
        "a damaged record"
    )


def test_translations_are_dropped_after_the_checkpoint_of_other_sentences_and_beyond_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ValidationTexts(tmp_path, "", keep=2)
    texts.begin(["s\u2028", "t"], ["r", "q"], [], 0)
    assert texts.directory == tmp_path / "validation" / "main"
    for update in (1, 2, 3, 4):
        texts.write(update, [f"a\r\n{update}", ""], besides={1})
        texts.result(update, "x").touch()
    assert sorted(path.name for path in texts.directory.glob("update-*")) == [
        *("update-0000001.txt", "update-0000001.x.result", "update-0000003.txt", "update-0000003.x.result"),
        *("update-0000004.txt", "update-0000004.x.result"),
    ]
    assert texts.read(4) == ["a  4", ""] and texts.read(2) is None
    assert (texts.directory / "source.txt").read_bytes() == "s\u2028\nt\n".encode()
    texts.begin(["s\u2028", "t"], ["r", "q"], [], 3)
    assert texts.read(4) is None and texts.read(3) == ["a  3", ""] and not texts.result(4, "x").exists()
    assert not caplog.messages
    texts.begin(["s\u2028"], ["r"], [], 3)
    assert texts.read(3) is None and "2 translations of other sentences than now are removed" in caplog.text
    assert plain_sources(["it &apos;s"], TextForm("moses", "en", "de")) == ["it's"]
    assert plain_sources(["it &apos;s"], TextForm("moses")) == ["it &apos;s"]


def test_samples_are_the_same_sentences_and_show_markup_as_text(tmp_path: Path) -> None:
    texts = ValidationTexts(tmp_path, "n")
    sources = ["short", *(f"{number} b c d e f *g*" for number in range(6))]
    texts.begin(sources, [f"<b>{each}</b> |" for each in sources], [], 0)
    rows = texts.table(["`x` [y](z) \\ _w_ &amp;"] * 7).splitlines()
    assert len(rows) == 2 + 5 and rows[2].startswith("| 0 b")
    html = markdown_to_safe_html("\n".join(rows))
    assert html.count("<tr>") == 6 and "&lt;b&gt;0 b c d e f *g*&lt;/b&gt; |" in html
    assert "`x` [y](z) \\ _w_ &amp;amp;" in html and not {"<b>", "<em>", "<code>", "<a"} & set(html.split())


def test_the_test_of_a_gain_is_sacrebleus_and_of_sentences_the_same_by_their_means() -> None:
    rng = np.random.default_rng(5)
    words = [f"w{number}" for number in range(9)]
    references = [" ".join(rng.choice(words, 12)) for _ in range(60)]

    def damaged(share: float) -> list[str]:
        return [" ".join("x" if rng.random() < share else word for word in line.split()) for line in references]

    good, bad = damaged(0.2), damaged(0.5)
    alike = [good[0], "x " * 12, *bad[2:]]
    metric = METRICS["bleu"]
    assert metric.p_value(good, bad, references) == paired_bootstrap([bad, good], [references])[0].p_value < 0.01
    assert metric.p_value(alike, bad, references) > 0.05
    assert metric.p_value(bad, bad, references) == p_value_of_scores([1.0, 2.0], [2.0, 1.0]) == 1.0
    scores = [[sacrebleu.sentence_chrf(line, [ref]).score for line, ref in zip(side, references, strict=True)]
              for side in (good, bad, alike)]  # fmt: skip
    assert p_value_of_scores(scores[0], scores[1]) < 0.01 < 0.05 < p_value_of_scores(scores[2], scores[1])
    assert METRICS["ter"].p_value(good, bad, references) < 0.01


def test_a_gain_is_tested_on_the_translations_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    references = [f"a b c d e f {number}" for number in range(40)]
    texts = ValidationTexts(tmp_path, "")
    texts.begin(references, references, [], 0)
    texts.write(1, ["a b c x e f"] * 40, ())
    texts.write(2, references, ())
    compared = [Compared(texts, TextForm("raw"))]
    metric = METRICS["bleu"]
    assert is_significant(metric, compared, 2, 1, 0.05) and not is_significant(metric, compared, 2, 1, 0.0005)
    assert is_significant(metric, compared, 2, 3, 0.0005), "of translations that are lost"
    assert caplog.messages == [
        "the gain of update 2 over update 3 counts as significant, because bleu cannot be tested"
    ]
    command = ValidationConfig(metrics=("a=command:/a",)).commands["a"]
    assert is_significant(command, compared, 2, 1, 0.0005)
    for update, score in ((1, 0.5), (2, 0.6)):
        lines = (f"{score + 0.01 * (number % 2)}\n" for number in range(40))
        texts.sentences(update, "a").write_text("".join(lines))
    assert is_significant(command, compared, 2, 1, 0.05) and not is_significant(command, compared, 1, 1, 0.05)
    tokens = Compared(texts, TextForm("raw", target_lang="en"))
    assert tokens.lines(["a, b"], METRICS["bleu_tokenised"]) == ["a , b"] and tokens.lines(["a, b"], metric) == [
        "a, b"
    ]


def test_late_values_have_their_place_in_curves_and_reports(tmp_path: Path) -> None:
    entries = [
        {"update": 4, "train/target_tokens": 40.0, "valid/bleu": 1.0, "valid/loss": 2.0, "valid/n/loss": 2.0},
        {"update": 8, "train/target_tokens": 80.0, "valid/bleu": 2.0, "valid/rated": 0.7},
        {"update": 4, "train/target_tokens": 40.0, "valid/rated": 0.9, "valid/n/rated": 0.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    curves = RunCurves(tmp_path)
    assert (curves.updates, curves.tokens, curves.curve("valid/rated").values) == (8, 80.0, [0.9, 0.7])
    assert validation_measures([curves]) == ["bleu", "rated", "n/loss", "n/rated"]
