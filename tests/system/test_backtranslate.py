"""launch/backtranslate.sh: its steps end to end, killed and resumed, what it skips, and distillation."""

from __future__ import annotations

import contextlib
import gzip
import signal
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import EXIT_STOPPED
from tests.commands import await_until, pair_words, shell_environment
from tests.support import ROOT

LINES = 60


def script(*words: object) -> list[str]:
    return [str(ROOT / "launch/backtranslate.sh"), *map(str, words)]


def run(*words: object, status: int = 0) -> str:
    """Run the script and return what it prints, errors included."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(script(*words), env=shell_environment(PART_LINES="16"), stdout=pipe, stderr=both, text=True)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def tagged(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory whose vocabulary has a tag; it is another than that of the run that translates."""
    out, text = tmp_path_factory.mktemp("tagged") / "data", data.parent / "text"
    words = ["prepare", "--out", str(out), "--vocab-size", "300", "--symbols", "<bt>"]
    assert main([*words, *pair_words(text, train="train", valid="valid")]) == 0
    return out


@pytest.fixture(scope="module")
def texts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Monolingual text in two files: compressed without a suffix, and without a last line end."""
    place = tmp_path_factory.mktemp("texts")
    lines = (data.parent / "text/train.de").read_bytes().split(b"\n")[:LINES]
    (place / "a").write_bytes(gzip.compress(b"\n".join([*lines[:35], b""])))
    (place / "b").write_bytes(b"\n".join(lines[35:]))
    return [place / "a", place / "b"]


def interrupted(words: list[str], log: Path, ready: Callable[[], bool], signal_number: signal.Signals) -> int:
    """Start the script, send a signal to it and all its descendants once it is ready, and return its status."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            words, env=shell_environment(PART_LINES="16"), stdout=stream, stderr=stream, start_new_session=True
        )
    await_until(ready, process, log)
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal_number)
    if signal_number == signal.SIGKILL:
        for descendant in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendant.kill()
    return process.wait(timeout=200)


def test_it_resumes_in_each_step_and_skips_what_is_finished(
    trained: Path, tagged: Path, texts: list[Path], tmp_path: Path
) -> None:
    out, whole, log = tmp_path / "out", tmp_path / "as a whole", tmp_path / "log"
    # The run that scores has another vocabulary than DATA, too.
    words = ["--run", trained, "--score-run", trained, "--text", *texts, "--data", tagged, "--cpu"]
    sampling = ["--", "--search", "sampling", "--max-tokens", "64"]
    said = run(*words, "--workers", "1", "--out", whole, "--min-score", "-99", *sampling)
    assert said.endswith(f"--data '{tagged}' --data '{whole}/data=1@<bt>'\n"), said
    scores = [float(line) for line in (whole / "scores").read_text().splitlines()]
    assert len(scores) == LINES and len((whole / "translations").read_bytes().splitlines()) == LINES
    before = (whole / "translations").stat().st_mtime_ns

    # Another bound: only the last step is done again. It counts what it removes.
    bound = statistics.median(scores)
    words += ["--min-score", f"{bound:.9g}"]
    said = run(*words, "--workers", "1", "--out", whole, *sampling)
    assert [step for step in ("text", "translate", "score", "prepare") if f"{step}: finished before" in said] == [
        "text", "translate", "score",
    ]  # fmt: skip
    meta = DataDirectory.open(whole / "data").meta
    empty = meta.removed["empty"]
    assert empty < 5 and meta.removed["score"] == pytest.approx(sum(score < bound for score in scores), abs=empty)
    assert meta.pairs_read == LINES
    assert before == (whole / "translations").stat().st_mtime_ns
    (whole / "data/notes").write_text("mine\n")
    said = run(*words, "--workers", "1", "--out", whole, "--filters", "html", *sampling, status=2)
    assert "notes" in said and (whole / "data/notes").read_text() == "mine\n", said
    (whole / "data/notes").unlink()

    # Stopped, then killed, by two processes, and completed by one: the same files.
    command = script(*words, "--workers", "2", "--out", out, *sampling)
    pieces = lambda: len(list(out.glob("translations.pieces/piece-*"))) >= 2  # noqa: E731
    assert interrupted(command, log, pieces, signal.SIGINT) == EXIT_STOPPED, log.read_text()
    assert "start the same command again to resume" in log.read_text() and not (out / "translations").exists()
    assert interrupted(command, log, lambda: any(out.glob("scores.parts/0*")), signal.SIGKILL) == -signal.SIGKILL
    assert "resumes: " in log.read_text() and not (out / "scores").exists()
    assert "translate: finished before" in run(*words, "--workers", "1", "--out", out, *sampling)
    names = ["text", "translations", "scores", *(f"data/{name}" for name in meta.files)]
    assert all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)


def test_distillation_translates_sources(trained: Path, data: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    lines = (data.parent / "text/train.en").read_text(encoding="utf-8").splitlines()[:12]
    text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    words = ["--distill", "--run", trained, "--text", text, "--data", data, "--out", out, "--cpu", "--workers", "1"]
    said = run(*words, "--", "--max-length", "8")
    assert said.endswith(f"--run RUN --data '{out}/data'\n"), "without a tag and without the parallel text"
    directory = DataDirectory.open(out / "data")
    corpus, tokenizer = directory.corpus("train"), directory.tokenizer()
    sources = [tokenizer.decode(corpus.source(number)) for number in range(len(corpus))]
    assert len(sources) > 6 and set(sources) <= set(lines)
    translations = (out / "translations").read_text(encoding="utf-8").splitlines()
    assert tokenizer.decode(corpus.target(0)) == translations[lines.index(sources[0])]


def test_mistakes_are_named_before_anything_is_translated(
    trained: Path, data: Path, tagged: Path, texts: list[Path], tmp_path: Path
) -> None:
    words = ["--run", trained, "--text", *texts, "--out", tmp_path / "out", "--cpu", "--workers", "1"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/text").write_text("mine\n")
    (tmp_path / "empty").write_text(" \n")
    for more, name in (
        (["--data", data, "--score-run", trained], "--score-run"),
        (["--data", data, "--", "--nbest", "2"], "--nbest"),
        (["--data", data, "--tag", "<bt>"], "'<bt>'"),
        (["--data", tagged, "--out", tmp_path / "mine"], "--out"),
    ):
        said = run(*words, *more, status=2)
        assert name in said, said
    words = ["--text", tmp_path / "empty", "--data", tagged, "--out", tmp_path / "other", "--run", trained]
    assert "--text" in run(*words, status=2)
    assert not (tmp_path / "out").exists() and (tmp_path / "mine/text").read_text() == "mine\n"
    assert not list(tmp_path.glob("*/translations*"))
