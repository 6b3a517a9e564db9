"""Verification of a run whose vocabulary is used by commands that need nothing else of it."""

from __future__ import annotations

from pathlib import Path


def verify_vocabulary(path: Path) -> None:
    """Verify the files of a run, and restore what is lost. A data directory is verified when it is opened.

    Args:
        path: run or data directory.

    Raises:
        DataError: if a file of a run is lost or damaged and cannot be restored.
    """
    if (path / "checkpoints").is_dir():
        from deepspeed_nmt.run.manifest import verify_run  # takes seconds

        verify_run(path)
