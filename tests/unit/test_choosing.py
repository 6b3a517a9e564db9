"""Choice of the best checkpoint among validation sets, by scores that are late or missing, and patience."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from sacrebleu.significance import PairedTest, Result

from deepspeed_nmt.config import load_config, validate
from deepspeed_nmt.data.data_directory import DataDirectory, Meta
from deepspeed_nmt.engine.contract import EngineScalars, ParameterState
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.evaluate.metrics import METRICS, in_language
from deepspeed_nmt.evaluate.scoring import bootstrap, paired_bootstrap
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run import resolve
from deepspeed_nmt.run.late_scores import LateScores, choose_best
from deepspeed_nmt.run.validation_sets import ValidationTexts, digest, given_sets
from deepspeed_nmt.run.validator import by_settings, choice_by, is_significant
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train import checkpoint
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.configuration import MEAN, ValidationConfig
from deepspeed_nmt.train.events import EVENTS_FILE
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.validation import Choice, Validation, update_best
from tests.unit.test_metrics import program

UNKNOWN = -math.inf
BY_A = Choice("valid/a")


def judged(*scores: tuple[float, float], significant: bool = True) -> list[tuple[int, int, int]]:
    """Best update, validations that count for patience, and update that reset them, after each (score, loss)."""
    progress, found = Progress(), []
    for update, (score, loss) in enumerate(scores, 1):
        validation = Validation({}, BY_A, score, loss)
        progress, _ = update_best(replace(progress, update=update), validation, lambda new, old: significant)
        found.append((progress.best_update, progress.validations_since_best, progress.patience_update))
    return found


def test_a_validation_without_a_score_is_the_best_only_while_no_score_is_known() -> None:
    assert judged((UNKNOWN, 3.0), (UNKNOWN, 2.0), (0.1, 9.0), (UNKNOWN, 1.0), (0.05, 1.0), (0.2, 1.0)) == [
        *((1, 0, 1), (2, 0, 2), (3, 0, 3), (3, 0, 3), (3, 1, 3), (6, 0, 6))
    ]


def test_only_a_significant_gain_resets_patience_and_the_best_is_by_score() -> None:
    scores = [(0.1, 9.0), (0.2, 9.0), (0.15, 9.0), (0.3, 9.0)]
    assert judged(*scores) == [(1, 0, 1), (2, 0, 2), (2, 1, 2), (4, 0, 4)]
    assert judged(*scores, significant=False) == [(1, 0, 1), (2, 1, 1), (2, 2, 1), (4, 3, 1)]


def test_gains_add_up_since_patience_was_reset() -> None:
    asked: list[tuple[int, int]] = []
    progress = Progress()
    for update, score in enumerate((1.0, 2.0, 3.0, 4.0), 1):
        found = Validation({}, BY_A, score, 1.0)
        progress, _ = update_best(
            replace(progress, update=update), found, lambda new, old: asked.append((new, old)) or new == 3
        )
    assert asked == [(2, 1), (3, 1), (4, 3)] and progress.patience_update == 3
    near_chance = Validation({}, replace(BY_A, least=1.0), 0.5, 0.5)
    before = Progress(update=9, best_score=0.5, best_loss=1.0, best_by="valid/a", best_update=7)
    assert update_best(before, near_chance, lambda new, old: False)[0].validations_since_best == 0


def test_the_mean_is_known_when_all_its_values_are() -> None:
    choice = choice_by(METRICS["ter"], MEAN, ["", "n"], " of x")
    losses = {"valid/loss": 1.0, "valid/n/loss": 3.0}
    found = choice.validation({**losses, "valid/ter": 40.0})
    assert found.score == UNKNOWN and found.values["valid/mean/loss"] == found.loss == 2.0
    found = choice.validation({**losses, "valid/ter": 40.0, "valid/n/ter": 50.0})
    assert (found.choice.by, found.score, found.values["valid/mean/ter"]) == ("valid/mean/ter of x", -45.0, 45.0)
    loss = choice_by(None, "n", ["", "n"], "").validation(losses)
    assert (loss.score, loss.choice.least, "valid/mean/loss" in loss.values) == (-3.0, math.inf, False)


@pytest.fixture
def late_run(tmp_path: Path) -> Any:
    """A run whose late metric chooses, with checkpoints of updates 1 to 4 and pending scores of 1 to 3."""
    path = program(tmp_path / "a.sh", 'case "$1" in *0002.txt) exit 3 ;; esac')
    config = ValidationConfig(metrics=(f"late:{path}",), sets={"n": "x"}, best_by="a", late_keep=2)
    for name in ("", "n"):
        ValidationTexts(tmp_path, name).begin(["x"], ["y"], [], 0)
    late = LateScores(tmp_path, config)
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, awaiting=late.awaiting)
    choice, progress = choice_by(config.commands["a"], "", ["", "n"], ""), Progress()
    for update in (1, 2, 3):
        validation = choice.validation({"valid/loss": float(update)})
        progress, _ = update_best(replace(progress, update=update), validation, lambda new, old: True)
        assert late.start(update, 100 * update, validation.values, choice)
        store.save(progress, EngineScalars(), [ParameterState("w", torch.zeros(2))])
        for _, _, process in late._processes:
            process.wait(20)
    store.save(replace(progress, update=4), EngineScalars(), [ParameterState("w", torch.zeros(2))])
    config = SimpleNamespace(validation=config)
    return SimpleNamespace(path=tmp_path, config=config, checkpoints=store, late=late, texts=ValidationTexts)


def result(run: Any, update: int, text: str, of: str = "") -> None:
    """Write the number of the late program."""
    ValidationTexts(run.path, of).path(update, "a.result").write_text(text)


def test_checkpoints_are_kept_while_their_scores_are_to_come_and_choose_best_chooses_among_them(
    late_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = late_run.checkpoints
    assert store.names() == [f"update-{update:07d}" for update in (1, 2, 3, 4)], "1 is the best by its loss"
    assert late_run.late.awaiting() == [2, 3] and store.best() == "update-0000001"
    messages = [record.getMessage() for record in caplog.get_records("setup")]
    assert sum("a.sh of update 2 ended with status 3; see " in message for message in messages) == 2, "of each set"
    assert "by its loss: no late score has come); 3 scores to come" in choose_best(late_run)
    result(late_run, 3, "0.25\n")
    result(late_run, 3, "0.5\n", "n")
    assert "update-0000003 (valid/a 0.2500); 2 scores" in choose_best(late_run)
    assert store.best() == "update-0000003" == (store.directory / "best").read_text().strip()
    result(late_run, 2, "Loading\n")
    assert "update-0000003" in choose_best(late_run) and "'Loading'" in caplog.text
    result(late_run, 2, "0.75\n")
    result(late_run, 1, "0.5\n")
    assert "update-0000002 (valid/a 0.7500)" in choose_best(late_run)
    lines = [json.loads(line) for line in (late_run.path / "metrics.jsonl").read_text().splitlines()]
    values = [(line["update"], line.get("valid/a"), line.get("valid/n/a")) for line in lines]
    assert values == [(3, 0.25, 0.5), (1, 0.5, None), (2, 0.75, None)], "each once, under its update"

    assert [line["train/target_tokens"] for line in lines] == [300.0, 100.0, 200.0]
    events = [json.loads(line) for line in (late_run.path / EVENTS_FILE).read_text().splitlines()]
    assert [(event["event"], event["best_update"], event["score"]) for event in events] == [
        *(("best", 3, 0.25), ("best", 2, 0.75))
    ]


def test_late_scores_that_do_not_choose_leave_the_choice_to_training(late_run: Any) -> None:
    metrics = (*late_run.config.validation.metrics, "bleu")
    late_run.config.validation = ValidationConfig(metrics=metrics, sets={"n": "x"}, best_by="bleu", late_keep=2)
    result(late_run, 3, "0.25\n")
    assert "update-0000001 (as training has chosen it)" in choose_best(late_run)
    assert '"valid/a": 0.25' in (late_run.path / "metrics.jsonl").read_text()
    assert late_run.checkpoints.chosen() is None


def test_a_validation_whose_late_program_was_not_started_is_not_chosen_by_its_loss(
    late_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other, better = (late_run.late._directory / f"update-000000{update}.json" for update in (2, 3))
    other.write_text(json.dumps({**json.loads(other.read_text()), "late": ["valid/n/a"]}))
    caplog.clear()
    assert "update-0000001 (by its loss: no late score has come); 2 scores to come" in choose_best(late_run)
    better.write_text(better.read_text().replace('"valid/loss": 3.0', '"valid/loss": NaN'))
    result(late_run, 3, "0.25\n")
    assert "update-0000003 (valid/a 0.2500)" in choose_best(late_run)
    assert late_run.checkpoints.best() == "update-0000003" and not caplog.messages


def test_late_scores_of_other_translations_are_not_compared(late_run: Any) -> None:
    """The program and the settings of the search are part of the description of the measure."""

    def described(*settings: str) -> str:
        config = load_config(settings=["validation.metrics=[late:/x/a]", "validation.best_by=a", *settings])
        return by_settings(config.validation.commands["a"], config, RAW)

    one, *others = described(), described("search.beam=1"), described("validation.max_sentences=9")
    others += [described("search.name=sampling"), described("validation.metrics=[late:/x/a:lower]")]
    assert described("validation.max_tokens=99") == one and len({one, *others}) == 5
    record, state = late_run.late._directory / "update-0000003.json", [ParameterState("w", torch.zeros(2))]
    record.write_text(record.read_text().replace('"by": "valid/a', f'"by": "valid/a{one}'))
    progress = replace(late_run.checkpoints.progress("update-0000004"), update=5, best_by=f"valid/a{one}")
    late_run.checkpoints.save(progress, EngineScalars(), state)
    result(late_run, 2, "0.75\n")
    result(late_run, 3, "0.5\n")
    assert "update-0000003 (valid/a 0.5000)" in choose_best(late_run), "although update 2 had a higher score"


def test_training_keeps_a_late_choice_until_it_goes_back_or_another_measure_chooses(
    late_run: Any,
) -> None:
    store, state = late_run.checkpoints, [ParameterState("w", torch.zeros(2))]
    result(late_run, 3, "0.25\n")
    choose_best(late_run)
    progress = store.progress("update-0000004")
    store.save(replace(progress, update=5), EngineScalars(), state)
    assert store.best() == "update-0000003" and "update-0000003" in store.names()
    store.save(replace(progress, update=6, best_by="valid/b", best_update=6), EngineScalars(), state)
    assert store.best() == "update-0000006", "by another measure"
    store.forget_choice_after(3)
    assert store.chosen() is not None
    store.forget_choice_after(2)
    assert store.chosen() is None


def test_choosing_waits_for_the_training_that_removes_checkpoints(
    late_run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "_LOCK_S", 0.1)
    store = late_run.checkpoints
    progress = replace(store.progress("update-0000004"), update=5)
    with store.choosing():
        with pytest.raises(DataError, match="locked by process"):
            choose_best(late_run)
        store.save(progress, EngineScalars(), [ParameterState("w", torch.zeros(2))])
        assert "old checkpoints stay until the next one is written" in caplog.text
        assert "update-0000004" in store.names()


def test_translations_are_dropped_after_the_checkpoint_of_other_sentences_and_beyond_the_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ValidationTexts(tmp_path, "", keep=2)
    texts.begin(["s\u2028", "t"], ["r", "q"], [], 0)
    assert texts.directory == tmp_path / "validation" / "main"
    for update in (1, 2, 3, 4):
        texts.write(update, [f"a\r\n{update}", ""], besides={1})
        texts.path(update, "x.result").touch()
    assert sorted(path.name for path in texts.directory.glob("update-*")) == [
        *("update-0000001.txt", "update-0000001.x.result", "update-0000003.txt", "update-0000003.x.result"),
        *("update-0000004.txt", "update-0000004.x.result"),
    ]
    assert texts.read(4) == ["a  4", ""] and texts.read(2) is None
    assert (texts.directory / "source.txt").read_bytes() == "s\u2028\nt\n".encode()
    texts.begin(["s\u2028", "t"], ["r", "q"], [], 3)
    assert texts.read(4) is None and texts.read(3) == ["a  3", ""] and not texts.path(4, "x.result").exists()
    assert not caplog.messages
    texts.begin(["s\u2028"], ["r"], [], 3)
    assert texts.read(3) is None and "2 translations of other sentences than now are removed" in caplog.text


def test_the_test_of_a_gain_is_sacrebleus_and_of_sentences_the_same_by_their_means() -> None:
    rng = np.random.default_rng(5)
    words = [f"w{number}" for number in range(9)]
    references = [" ".join(rng.choice(words, 12)) for _ in range(60)]

    def damaged(share: float) -> list[str]:
        return [" ".join("x" if rng.random() < share else word for word in line.split()) for line in references]

    good, bad = damaged(0.2), damaged(0.5)
    alike = [good[0], "x " * 12, *bad[2:]]
    for metric in (sacrebleu.BLEU(), sacrebleu.CHRF(), sacrebleu.TER()):
        better, other, same = paired_bootstrap([bad, good, alike, bad], [references], metric)
        assert better.p_value < 0.01 < 0.05 < other.p_value < same.p_value == 1.0
        systems = [("bad", bad), ("good", good), ("alike", alike)]
        signatures, table = PairedTest(systems, {"of": metric}, [references], test_type="bs")()
        (name,) = signatures
        results = [result for result in table[name][1:] if isinstance(result, Result)]
        assert [better.p_value, other.p_value] == [result.p_value for result in results]
        assert better.signature == str(signatures[name])
    scores = [[sacrebleu.sentence_chrf(line, [ref]).score for line, ref in zip(side, references, strict=True)]
              for side in (bad, good, alike)]  # fmt: skip
    better, other = bootstrap(scores, np.mean)
    assert better.p_value < 0.01 < 0.05 < other.p_value
    assert bootstrap([[1.0, 2.0], [2.0, 1.0]], np.mean)[0].p_value == 1.0, "of equal means"


def test_a_gain_is_tested_on_the_translations_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    references = [f"a b c d e f {number}" for number in range(40)]
    texts = ValidationTexts(tmp_path, "", form=TextForm("raw"))
    texts.begin(references, references, [], 0)
    texts.write(1, ["a b c x e f"] * 40, ())
    texts.write(2, references, ())
    compared = [(METRICS["bleu"], texts)]
    assert is_significant(compared, 2, 1, 0.05) and not is_significant(compared, 2, 1, 0.0005)
    assert not is_significant(compared, 1, 2, 0.05), "a loss, as of all sentences beside a gain of the mean"
    assert is_significant(compared, 2, 3, 0.0005), "of translations that are lost"
    assert caplog.messages == [
        "the gain of update 2 over update 3 counts as significant, because bleu cannot be tested"
    ]
    command = ValidationConfig(metrics=("a=command:/a",)).commands["a"]
    compared = [(command, texts)]
    assert is_significant(compared, 2, 1, 0.0005)
    for update, score in ((1, 0.5), (2, 0.6)):
        lines = (f"{score + 0.01 * (number % 2)}\n" for number in range(40))
        texts.path(update, "a.sentences").write_text("".join(lines))
    assert is_significant(compared, 2, 1, 0.05) and not is_significant(compared, 1, 1, 0.05)
    lower = [(replace(command, higher_is_better=False), texts)]
    assert is_significant(lower, 1, 2, 0.05) and not is_significant(lower, 2, 1, 0.05)


def test_sets_of_two_languages_are_tested_with_the_tokenizer_of_each(tmp_path: Path) -> None:
    """A gain in a text without spaces counts, where a tokenizer that divides at spaces sees none."""
    texts, metrics = {}, {}
    for language, reference in (("de", "a b c d e f"), ("zh", "一二三四五六七八")):
        form = TextForm("raw", "en", language)
        metrics[language] = in_language(METRICS["bleu"], language)
        texts[language] = ValidationTexts(tmp_path, language, form=form)
        texts[language].begin([reference] * 40, [reference] * 40, [], 0)
        texts[language].write(1, ["a b c d x f" if language == "de" else "一二三四五六人口"] * 40, ())
        texts[language].write(2, ["a b c d x f" if language == "de" else "一二三四五六七口"] * 40, ())
    assert is_significant([(metrics[language], texts[language]) for language in texts], 2, 1, 0.01)
    assert not is_significant([(metrics["de"], texts[language]) for language in texts], 2, 1, 0.01)


RAW, TOKENISED = TextForm(form="raw"), TextForm(form="tokenised")


def chosen(text: TextForm, of: str, **settings: Any) -> list[str]:
    """The names of the metrics of a set."""
    return [metric.name for metric in ValidationConfig(sets={"news": "x"}, **settings).chosen(text, of)[0]]


def problem_of(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({"validation": settings})
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("name", ["mean", "bleu"])
def test_a_set_is_not_called_as_a_measure(name: str) -> None:
    expected = f"has the name '{name}', which is that of a measure; give another one"
    assert problem_of(sets={name: "x"}) == f"validation.sets {expected}" == problem_of(sets=given_sets([f"{name}=x"]))


@pytest.mark.parametrize("name", ["a/b", "a.b", "-a", "", "x" * 51])
def test_names_of_sets_are_plain(name: str) -> None:
    assert "; use letters, digits, - and _, 50 at most" in problem_of(sets={name: "x"})


def test_settings_override_options_and_null_removes_a_set() -> None:
    options = {"validation": {"sets": {"a": "/x", "b": "/y"}}}
    settings = ["validation.sets.a=null", "validation.sets.b=/z", "validation.sets.c=d"]
    config = load_config(settings=settings, options=options)
    assert config.validation.sets == {"b": "/z", "c": "d"}
    located = config.resolved().validation.sets
    assert located["b"] == "/z" and located["c"].startswith("/") and located["c"].endswith("/d")
    assert config.flat()["validation.sets.b"] == "/z"
    assert problem_of(sets={"a": ""}) == "validation.sets has no data directory for a; give one"
    assert problem_of(sets=["a"]) == "validation.sets is ['a']; give a section with keys"


@pytest.mark.parametrize("best_by", ["other/bleu", "news/auto", "news/", "news"])
def test_a_measure_that_no_set_has_is_refused(best_by: str) -> None:
    problem = problem_of(sets={"news": "x"}, best_by=best_by)
    assert f"validation.best_by is '{best_by}', which is none of auto, loss, bleu" in problem
    assert "news/ followed by a measure, mean/ followed by a measure" in problem


def test_each_set_has_the_metrics_that_its_text_allows_and_the_one_that_chooses() -> None:
    assert chosen(TOKENISED, "news") == ["bleu_tokenised"] and chosen(RAW, "") == ["bleu"]
    assert chosen(RAW, "news", best_by="news/chrf") == ["bleu", "chrf"]
    assert chosen(RAW, "", best_by="news/chrf") == ["bleu"]
    assert chosen(RAW, "", best_by="chrf") == ["bleu", "chrf"] and chosen(RAW, "news", best_by="chrf") == ["bleu"]
    assert chosen(RAW, "", best_by="mean/ter") == chosen(RAW, "news", best_by="mean/ter") == ["bleu", "ter"]
    best = ValidationConfig(sets={"news": "x"}, best_by="mean/ter").chosen(RAW)[1]
    assert best is not None and best.name == "ter" and MEAN == "mean"
    with pytest.raises(ConfigError) as caught:
        chosen(TOKENISED, "news", best_by="mean/bleu")
    assert "bleu needs plain text, but in validation.sets.news the text is tokenised" in str(caught.value)
    with pytest.raises(ConfigError, match=r"metric chrf needs plain text, but in validation\.sets\.news the text is"):
        chosen(TOKENISED, "news", metrics=["chrf"])


def test_hosts_whose_validation_sets_differ_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def directory(content: str) -> DataDirectory:
        meta = Meta.model_construct(
            files={"valid.source": FileRecord.of(content.encode())}, text=RAW, segmented=False
        )
        return DataDirectory(tmp_path / content, meta)

    one = World(0, 1, 0, torch.device("cpu"))
    of_main: dict[str, Any] = {}
    monkeypatch.setattr(resolve, "from_main", lambda own, world: of_main.setdefault("own", own))
    sets = {"": directory("x"), "news": directory("y")}
    data: Any = SimpleNamespace(main=sets[""], parts=[])
    for same in (sets, {"": directory("x"), "news": directory("y")}):
        resolve.check_ranks_agree(load_config(), data, same, one)
    with pytest.raises(DataError, match=r"the validation set news in .*/z is not that of rank 0"):
        resolve.check_ranks_agree(load_config(), data, {**sets, "news": directory("z")}, one)
    assert digest(sets) != digest({"": directory("y"), "news": directory("x")}) != digest({"news": directory("y")})


def test_a_program_whose_name_ends_in_loss_is_no_loss() -> None:
    settings: dict[str, Any] = {"metrics": ("faithloss=command:/x/a",), "best_by": "faithloss", "significant": 0.05}
    assert validate({"validation": settings}).validation.significant == 0.05
    assert "a loss chooses" in problem_of(**{**settings, "best_by": "loss"})
