"""`backtranslate`: the same files by any tasks and workers, stopped and resumed; what it does again; distillation."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import psutil
import pytest

from deepspeed_nmt import backtranslation
from deepspeed_nmt.api import Translator
from deepspeed_nmt.backtranslation import BacktranslateOptions, Backtranslation
from deepspeed_nmt.cli import main
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.inputs import IndexedText, inspect_inputs
from deepspeed_nmt.errors import EXIT_STOPPED, DataError
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.decode_options import DecodeOptions
from tests.commands import await_until, pair_words, refused, shell_environment, translate
from tests.unit.test_prepare_cluster import slurm  # noqa: F401  # a fixture

LINES = 60
SAMPLING = ["--search", "sampling", "--max-tokens", "64"]
"""Options of `translate`; pieces have 8 lines."""


def words(*more: object) -> list[str]:
    return ["backtranslate", "--workers", "1", *map(str, more)]


@pytest.fixture(scope="module")
def tagged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory whose vocabulary has a tag; it is another than that of the run that translates."""
    out, text = tmp_path_factory.mktemp("tagged") / "data", data.parent / "text"
    options = ["prepare", "--out", str(out), "--vocab-size", "300", "--symbols", "<bt>"]
    assert main([*options, *pair_words(text, train="train", valid="valid")]) == 0
    return out


@pytest.fixture(scope="module")
def texts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Monolingual text in two files: compressed without a suffix, and without a last line end."""
    place = tmp_path_factory.mktemp("texts")
    lines = (data.parent / "text/train.de").read_bytes().split(b"\n")[:LINES]
    (place / "a").write_bytes(gzip.compress(b"\n".join([*lines[:35], b""])))
    (place / "b").write_bytes(b"\n".join(lines[35:]))
    return [place / "a", place / "b"]


@pytest.fixture(scope="module")
def whole(trained: Path, tagged: Path, texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT, made of three tasks in this process. The run that scores has another vocabulary than DATA, too."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backtranslation, "MAX_TASKS", 3)
        given = ["--run", trained, "--text", *texts, "--data", tagged, "--out", out]
        assert main(words(*given, "--score-run", trained, "--min-score", -99, "--", *SAMPLING)) == 0
    return out


def test_tasks_stopped_killed_and_resumed_make_the_same_files(
    trained: Path, tagged: Path, texts: list[Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """They are killed in two workers, stopped in this process, and done by it."""
    out, log, tasks = tmp_path / "out", tmp_path / "log", tmp_path / ".out.tasks"
    given = ["--run", trained, "--text", *texts, "--data", tagged, "--out", out, "--score-run", trained]
    command = words(*given, "--min-score", -99, "--workers", 2, "--", *SAMPLING)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "deepspeed_nmt", *command], env=shell_environment(), stdout=stream, stderr=stream
        )
    await_until(lambda: len(list(tasks.glob("translate/0*"))) >= 2, process, log)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    psutil.wait_procs(workers, timeout=60)  # they follow
    done = {path: path.stat().st_ino for path in tasks.glob("translate/0*")}
    assert not out.exists() and len(done) < 8

    assert main(["backtranslate", "--status", str(out)]) == 0
    assert f"translate  8  {len(done)}  0".split() in [line.split() for line in capfd.readouterr().out.splitlines()]
    command = words(*given, "--min-score", -99, "--", *SAMPLING)
    assert main([*command, "--top-k", "3"]) == 2
    assert "holds tasks of another --top-k" in capfd.readouterr().err

    score = backtranslation._TASKS["score"]

    def stop(work: Any, task: int, new: Path) -> Any:
        if task == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return score(work, task, new)

    with monkeypatch.context() as patched:
        patched.setattr(backtranslation, "_TASKS", {**backtranslation._TASKS, "score": stop})
        assert main(command) == EXIT_STOPPED
    assert "start the same command again to resume" in capfd.readouterr().err
    assert {path.name for path in tasks.glob("score/*")} == {"00000", "00001"} and not out.exists()
    assert done.items() <= {path: path.stat().st_ino for path in tasks.glob("translate/0*")}.items(), "kept"
    assert main(command) == 0 and not tasks.exists()
    assert capfd.readouterr().out.endswith(f"--run RUN --data '{tagged}' --data '{out}/data=1@<bt>'\n")
    _same_files(out, whole)
    assert (out / "text").read_bytes() == gzip.decompress(texts[0].read_bytes()) + texts[1].read_bytes() + b"\n"
    translations = (out / "translations").read_text(encoding="utf-8").splitlines()
    assert translate(trained, out / "text", tmp_path / "hyp", *SAMPLING) == translations
    _check_scores(trained, out, "translations", "text")


def test_jobs_of_slurm_ask_for_gpus_and_make_the_same_files(
    trained: Path, tagged: Path, texts: list[Path], whole: Path, tmp_path: Path, slurm: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A task that fails is named with its log. SLURM is a stand-in; tests/slurm/ has a real one."""
    from deepspeed_nmt.data import cluster

    out, tasks = tmp_path / "out", tmp_path / ".out.tasks"
    given = ["--run", trained, "--text", *texts, "--data", tagged, "--out", out, "--score-run", trained]
    given += ["--min-score", -99, "--executor", "slurm", "--tasks", 2, "--gpus-per-task", 1, "--", *SAMPLING]
    assert main(words(*given)) == 0 and f"backtranslate --status {out}" in capsys.readouterr().out
    stages = {**Backtranslation.open(tasks).stages, "join": 1}
    assert list(stages) == [
        "text", "translate", "score", "collect", "index", "clean", "duplicate", "vocabulary", "encode", "join",
    ]  # fmt: skip
    scripts = (slurm / "scripts").read_text()
    assert scripts.count("#SBATCH --gpus=1\n") == 2 and scripts.count("#SBATCH --array=0-1\n") == 5
    cluster.run(Backtranslation, tasks, "text", None, 0, 1)
    with monkeypatch.context() as patched, pytest.raises(DataError, match=r"--run has another checkpoint"):
        patched.setattr(Translator, "digests", ("other",))
        cluster.run(Backtranslation, tasks, "translate", None, 1, 2)
    (log := tasks / "logs/translate/logs/task_00001.log").parent.mkdir()
    log.write_text("... | ERROR | ...\nDataError: the checkpoint\n")
    assert main(["backtranslate", "--status", str(out)]) == 0
    assert f"translate, task 1: DataError: the checkpoint ({log})" in capsys.readouterr().out
    (slurm / "queue").write_text("RUNNING\n")
    refused([*words("--filters", "html", *given)], capsys, "are in SLURM's queue")
    (slurm / "queue").write_text("")
    refused([*words(*given), "--top-k", "3"], capsys, "another --top-k")
    for stage, count in stages.items():
        for task in reversed(range(count)):
            cluster.run(Backtranslation, tasks, stage, None, task, count)
    assert main(words(*given)) == 0 and "to train:\n" in capsys.readouterr().out
    _same_files(out, whole)


def _check_scores(run: Path, out: Path, source: str, target: str) -> None:
    """Compare scores with those of `score-pairs`."""
    files = ["--source", str(out / source), "--target", str(out / target), "--output", str(out / "expected")]
    assert main(["score-pairs", "--run", str(run), *files]) == 0
    expected = [float(line.split("\t")[3]) for line in (out / "expected").read_text().splitlines()]
    assert [float(line) for line in (out / "scores").read_text().splitlines()] == pytest.approx(expected, abs=1e-4)


def _same_files(out: Path, expected: Path) -> None:
    """Compare the files of OUT, but for records, which have paths."""
    names = ["text", "translations", "scores", *(f"data/{path.name}" for path in (expected / "data").glob("train*"))]
    assert len(names) > 6 and all((out / name).read_bytes() == (expected / name).read_bytes() for name in names)


def test_other_options_repeat_only_what_depends_on_them(
    trained: Path, tagged: Path, texts: list[Path], whole: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = ["--run", trained, "--text", *texts, "--data", tagged, "--out", whole, "--score-run", trained]
    scores = [float(line) for line in (whole / "scores").read_text().splitlines()]
    before = {name: (whole / name).stat().st_mtime_ns for name in ("text", "translations", "scores")}
    bound = statistics.median(scores)
    assert len(scores) == LINES and main(words(*given, f"--min-score={bound:.9g}", "--", *SAMPLING)) == 0
    meta = DataDirectory.open(whole / "data").meta
    assert meta.removed["score"] == pytest.approx(sum(score < bound for score in scores), abs=meta.removed["empty"])
    assert meta.removed["empty"] < 5 and meta.pairs_read == LINES
    made = (whole / "data/meta.json").stat().st_mtime_ns
    assert main(words(*given, f"--min-score={bound:.9g}", "--", *SAMPLING)) == 0
    assert made == (whole / "data/meta.json").stat().st_mtime_ns, "nothing to do"
    assert {name: (whole / name).stat().st_mtime_ns for name in before} == before

    (whole / "data/notes").write_text("mine\n")
    refused(words(*given, "--min-score", -99, "--filters", "html", "--", *SAMPLING), capsys, "notes")
    assert (whole / "data/notes").read_text() == "mine\n"
    (whole / "data/notes").unlink()
    refused(words(*given, "--min-score", -99, "--", *SAMPLING, "--top-k", 5), capsys, "another --top-k")
    old = (whole / "scores").read_bytes()
    (whole / "scores").write_text("mine\n")
    refused(words(*given, "--min-score", -99, "--", *SAMPLING), capsys, "scores has", "move it away")
    (whole / "scores").unlink()  # they are made again, of translations that are kept
    with monkeypatch.context() as patched:
        patched.setattr(Translator, "stream", None)
        assert main(words(*given, f"--min-score={bound:.9g}", "--", *SAMPLING)) == 0
    tasks = whole.parent / ".out.tasks"
    assert (whole / "scores").read_bytes() == old and not tasks.exists()

    bounded = words(*given, f"--min-score={bound - 0.1:.9g}", "--", *SAMPLING)
    with monkeypatch.context() as patched, pytest.raises(SystemExit):  # as if killed at the end of the preparation
        patched.setattr(backtranslation, "remove", lambda path: None)
        patched.setattr(backtranslation.Preparation, "join", lambda self: sys.exit(9))
        main(bounded)
    assert (tasks / "clean").exists()
    (whole / "scores").unlink()  # those of another run, for example, take their place
    run_stages, prepared = backtranslation.run_stages, []
    with monkeypatch.context() as patched:
        patched.setattr(
            backtranslation,
            "run_stages",
            lambda *given: (prepared.append((tasks / "clean").exists()), run_stages(*given))[1],
        )
        assert main(bounded) == 0
    assert prepared == [False, False], "what was prepared by the scores before is forgotten"


def test_text_that_has_changed_behind_its_url_is_another() -> None:
    files, options = fsspec.filesystem("memory"), SimpleNamespace(text=("memory://mono/news.de",))
    files.pipe("/mono/news.de", b"eins\nzwei\n")
    (record,) = inspect_inputs({"text": options.text})["text"]
    read = [IndexedText(record=record, start=0, state=None)]
    assert backtranslation._is_same(cast(BacktranslateOptions, options), read)
    files.pipe("/mono/news.de", b"drei\nvier\n")
    assert not backtranslation._is_same(cast(BacktranslateOptions, options), read)


def test_targets_that_no_model_reads_cost_no_other_scores(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator.open(trained, device="cpu", precision="fp32")
    sources, targets = ["The dog sleeps."] * 4, ["Der Hund.", "Ein " * 99, "", "Hund" * 20_000]
    monkeypatch.setattr(translator.model, "longest_target", 64)
    found = list(backtranslation.scores(translator, sources, targets, warn=False))
    readable = translator.score(sources[:2], [targets[0], targets[2]])
    first, empty = (pair.mean_log_prob for pair in readable)
    assert found == pytest.approx([first, -math.inf, empty, -math.inf], abs=1e-5)


def test_another_rule_of_exits_or_search_of_the_run_is_another_translation(
    trained: Path, tagged: Path, texts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, rule, made = DataDirectory.open(tagged), tmp_path / "rule.json", []
    for threshold in (-1.0, -2.0):
        rule.write_text(json.dumps({"rule": "confidence", "exits": [1, 2], "threshold": threshold}))
        translation = DecodeOptions.of({"run": [trained], "choose_exits": rule})
        options = BacktranslateOptions(text=tuple(texts), data=tagged, out=tmp_path, translation=translation)
        made.append(backtranslation._checked(options, data)[1]["translations"])
    assert made[0] != made[1] and made[0].keys() == made[1].keys()
    options = options.model_copy(update={"translation": DecodeOptions.of({"run": [trained]})})
    own = Run.open(trained)
    for beam in (5, 3):
        search = own.config.search.model_copy(update={"beam": beam})
        changed = replace(own, config=own.config.model_copy(update={"search": search}))
        monkeypatch.setattr(Run, "open", lambda *_, changed=changed: changed)
        assert backtranslation._checked(options, data)[1]["translations"]["--beam"] == beam


def test_each_gpu_has_a_worker(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = backtranslation.BacktranslateOptions(
        text=(tmp_path / "text",), data=tmp_path, out=tmp_path, translation=DecodeOptions(run=[trained])
    )
    monkeypatch.setattr(backtranslation, "uses_cuda", lambda *_: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    gpus = [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]
    assert backtranslation._workers(options) == (2, gpus)
    assert backtranslation._workers(options.model_copy(update={"workers": 3})) == (3, gpus)


def test_distillation_translates_sources(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    lines = (data.parent / "text/train.en").read_text(encoding="utf-8").splitlines()[:12]
    text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    given = ["--distill", "--run", trained, "--text", text, "--data", data, "--out", out]
    given += ["--score-run", trained, "--min-score", -99]
    assert main(words(*given, "--", "--max-length", 8)) == 0
    end = f"--run RUN --data '{out}/data'\n"
    assert capsys.readouterr().out.endswith(end), "without a tag and without the parallel text"
    directory = DataDirectory.open(out / "data")
    corpus, tokenizer = directory.corpus("train"), directory.tokenizer()
    sources = [tokenizer.decode(corpus.source(number)) for number in range(len(corpus))]
    assert len(sources) > 6 and set(sources) <= set(lines)
    _check_scores(trained, out, "text", "translations")
    translations = (out / "translations").read_text(encoding="utf-8").splitlines()
    assert tokenizer.decode(corpus.target(0)) == translations[lines.index(sources[0])]


def test_mistakes_are_named_before_anything_is_translated(
    trained: Path, data: Path, tagged: Path, texts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/text").write_text("mine\n")
    (tmp_path / "empty").write_text(" \n")
    first = ["--run", trained, "--out", tmp_path / "out", "--data", tagged, "--text", *texts]
    for more, *names in (
        (["--score-run", trained], "--score-run", "--min-score"),
        (["--min-score", -3], "--min-score", "--score-run"),
        (["--filters", "web,score=-3"], "--filters", "--score-run"),
        (["--", "--nbest", 2], "--nbest", "after --"),
        (["--", "--no-option"], "--no-option"),
        (["--", "--detokenise", "de"], "--detokenise gives translations another form than their text"),
        (["--data", data], "'<bt>'"),
        (["--tag", "<no>"], "'<no>'"),
        (["--weight", "much"], "much"),
        (["--gpus-per-task", 1], "--gpus-per-task"),
        (["--out", tmp_path / "mine"], "--out", "mine"),
        (["--text", tmp_path / "empty"], "--text", "no sentence"),
        (["--text", tmp_path / "none"], "does not exist"),
    ):
        refused(words(*first, *more), capsys, *names)
    assert (tmp_path / "mine/text").read_text() == "mine\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine"]


def test_a_record_that_was_not_yet_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "corpus.json.sha256").write_text("0\n")
    (tmp_path / ".corpus.json.1.tmp").touch()
    assert backtranslation.CorpusRecord.read(tmp_path) is None
    (tmp_path / "text").touch()
    with pytest.raises(DataError, match="choose another --out"):
        backtranslation.CorpusRecord.read(tmp_path)
