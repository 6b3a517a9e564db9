"""Runs that are made of another program's model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.engine.base import EngineScalars, ParameterState
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.files import atomic_write_text, check_utf8_name
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.run.directory import ENVIRONMENT_FILE
from deepspeed_nmt.run.environment import environment
from deepspeed_nmt.run.manifest import CHECKPOINTS, CONFIG_FILE, DATA_FILE, DataRecord, replace_files
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.checkpoint import RunRecord
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.store import CheckpointStore


def check_new(out: Path) -> None:
    """Check that a run directory can be made.

    Raises:
        ConfigError: if it exists and has files.
    """
    check_utf8_name(out, "--run")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--run must be a new directory, but {out} has files; give another path")


def write_run(
    out: Path,
    config: RunConfig,
    tokenizer: Tokenizer,
    states: Sequence[ParameterState],
    origin: str,
    text: TextForm,
) -> None:
    """Write a run with one checkpoint, which is its best and its last.

    Args:
        out: directory of the run, which :func:`check_new` has accepted.
        config: settings of the run.
        tokenizer: its vocabulary.
        states: parameters of its model.
        origin: name of the other program's model, recorded in place of the data.
        text: form of the text that the model translates.

    Raises:
        OSError: if a file cannot be written; then nothing is left in the directory.
    """
    vocabulary = tokenizer.files()
    records = {file: FileRecord.of(content) for file, content in vocabulary.items()}
    data = DataRecord(path=origin, fingerprint=tokenizer.digest, text=text)
    out.mkdir(parents=True, exist_ok=True)
    try:
        contents = {CONFIG_FILE: config.to_yaml().encode(), DATA_FILE: data.content(), **vocabulary}
        replace_files(out, contents)
        atomic_write_text(out / ENVIRONMENT_FILE, json.dumps(environment(), indent=1))
        record = RunRecord(
            config=config.model_dump(mode="json"),
            data=data.path,
            fingerprint=data.fingerprint,
            text=data.text,
            vocabulary=records,
        )
        store = CheckpointStore(out / CHECKPOINTS, record=record)
        store.save(Progress(best_score=0.0, best_by="import"), EngineScalars(), states)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(out)
        raise
