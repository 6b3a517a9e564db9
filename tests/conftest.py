"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Programs that tests start would inherit ignored signals, and run on when they are interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background by a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # started by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if not torch.cuda.is_available():
    # Run Triton's kernels in its interpreter. The variable must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The secret by which a run knows its user is not that of whoever runs the tests.
CONFIG_HOME = tempfile.TemporaryDirectory(prefix="deepspeed_nmt-")
os.environ["XDG_CONFIG_HOME"] = CONFIG_HOME.name

REPOSITORY = Path(__file__).resolve().parents[1]

SHARED_DATA = Path(os.environ.get("DEEPSPEED_NMT_SHARED", REPOSITORY.parent / "shared"), "data")
"""Real text, which is not part of the repository."""
FAST_FILES = ("test_architecture.py", "test_readme.py", "test_troubleshooting.py")
"""Files of `launch/test.sh --fast` other than the unit tests and a run from raw text to BLEU.

Tests marked long are left out of it.
"""
LONGEST_FIRST = ("test_slurm.py", "test_engines.py", "slurm", "parity", "system", "kernels", "distributed")
"""Files and directories in the order in which they start, so that two workers end at about the same time.

Tests under SLURM mostly wait. So one worker has them, with one cluster, while the others compute.
"""


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory with real text. Tests that use it are skipped without it."""
    if not SHARED_DATA.is_dir():
        pytest.skip(
            f"needs real text in {SHARED_DATA}; set DEEPSPEED_NMT_SHARED to the directory that has data/ in it"
        )
    return SHARED_DATA


@pytest.fixture(autouse=True)
def _fresh_logger() -> Iterator[None]:
    """Reset the package's logger after each test, since command lines configure it."""
    logger = logging.getLogger("deepspeed_nmt")
    yield
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked gpu if there is no GPU."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `launch/test.sh --fast`, and sort the longest files first."""
    for item in items:
        is_quick = item.path.parent.name == "unit" or item.path.name in FAST_FILES
        if is_quick and item.get_closest_marker("long") is None:
            item.add_marker("fast")
    items.sort(key=_start)


def pytest_collection_finish() -> None:
    """Spare the collector the modules and tests, which live to the end."""
    gc.freeze()


def _start(item: pytest.Item) -> int:
    names = (item.path.name, item.path.parent.name)
    return next((place for place, name in enumerate(LONGEST_FIRST) if name in names), len(LONGEST_FIRST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the numbers of random examples that passed."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid}: {name} {value}")
