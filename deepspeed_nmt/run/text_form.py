"""Vocabulary and form of the text of a run or data directory, for commands that need nothing else of it."""

from __future__ import annotations

from pathlib import Path

from deepspeed_nmt.data.data_directory import META_FILE, DataDirectory
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.text import TextForm


def verify_vocabulary(path: Path) -> None:
    """Verify the files of a run. A data directory is verified when it is opened."""
    if (path / "checkpoints").is_dir():
        from deepspeed_nmt.run.directory import verify_run  # takes seconds

        verify_run(path)


def recorded_form(path: Path, tokenizer: Tokenizer) -> TextForm:
    """Return the form of the text of a run or data directory."""
    if (path / META_FILE).exists():
        return DataDirectory.open(path).text_form
    from deepspeed_nmt.run.directory import DATA_FILE, DataRecord  # takes seconds

    text = DataRecord.read(path).text if (path / DATA_FILE).exists() else None
    return text or TextForm.unrecorded(tokenizer.segmented)
