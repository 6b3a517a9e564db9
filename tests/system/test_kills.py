"""A job that is killed at random moments, half of them while it writes a checkpoint, loses only time.

Checkpoints are written in the background to a slow disk, so that updates go on meanwhile.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_ends_equal_to_the_bit(
    count: int,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kills = importlib.import_module("kills")
    row = kills.batch(kills.LAYOUTS["plain"], "all", count, [data], tmp_path)
    caught = row["during a save"]
    record_property(f"of {count} kills hit a checkpoint that was being written:", caught)
    assert caught >= 0.4 * count, "too few kills hit a checkpoint that was being written"
