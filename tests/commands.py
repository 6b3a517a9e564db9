"""Commands as tests run them: command lines, and their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed_nmt.cli import main
from deepspeed_nmt.data.directory import Meta
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.prepare import prepare


def train_words(data: Path, run: Path, *more: str) -> list[str]:
    """Return the command line of a training."""
    return ["train", "--data", str(data), "--run", str(run), *more]


def translate(run: Path, source: Path, output: Path, *options: str) -> list[str]:
    """Translate a file, and return the lines written."""
    assert main(["translate", "--run", str(run), "--input", str(source), "--output", str(output), *options]) == 0
    return output.read_text(encoding="utf-8").splitlines()


def prepare_with(options: dict[str, Any], **changes: Any) -> Meta:
    """Prepare data by changed options."""
    return prepare(PrepareOptions.model_validate({**options, **changes}))
