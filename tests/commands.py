"""Commands as tests run them: command lines, and their results."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.data.data_directory import Meta
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.preparation import prepare
from deepspeed_nmt.train.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[1]


def train_words(data: Path | str, run: Path, *more: str) -> list[str]:
    """Return the command line of a training."""
    return ["train", "--data", str(data), "--run", str(run), *more]


def pair_words(text: Path, **splits: str) -> list[str]:
    """Return the options of `prepare` for files ``text/NAME.en`` and ``text/NAME.de`` of some splits."""
    sides = (("source", "en"), ("target", "de"))
    return [
        word
        for split, name in splits.items()
        for side, language in sides
        for word in (f"--{split}-{side}", str(text / f"{name}.{language}"))
    ]


def translate(run: Path, source: Path, output: Path, *options: str) -> list[str]:
    """Translate a file, and return the lines written."""
    assert main(["translate", "--run", str(run), "--input", str(source), "--output", str(output), *options]) == 0
    return output.read_text(encoding="utf-8").splitlines()


def refused(words: list[str], capsys: pytest.CaptureFixture[str], *expected: str, status: int = 2) -> str:
    """Return the message with which a command is refused; it must have all ``expected``."""
    capsys.readouterr()
    assert main(words) == status
    error = capsys.readouterr().err
    assert "Traceback" not in error and all(text in error for text in expected), error
    return error


def prepare_with(options: dict[str, Any], **changes: Any) -> Meta:
    """Prepare data by changed options."""
    return prepare(PrepareOptions.model_validate({**options, **changes}))


def newest(run: Path) -> Checkpoint:
    """Return the checkpoint of the last update."""
    return Checkpoint(sorted(run.glob("checkpoints/update-*"))[-1])


def log_of(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl or events.jsonl."""
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text("utf-8").splitlines()]


def logged(run: Path, tag: str) -> dict[int, float]:
    """Return the values of a tag by update, in the order of the log."""
    return {line["update"]: line[tag] for line in log_of(run) if tag in line}


def await_until(condition: Callable[[], object], process: Any, log: Path, within: float = 200) -> None:
    """Wait until a condition holds while a process runs."""
    deadline = time.monotonic() + within
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def shell_environment(**more: str) -> dict[str, str]:
    """Return the environment of a shell in which launch scripts start, without the variables of a launcher."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "VENV": sys.prefix, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
