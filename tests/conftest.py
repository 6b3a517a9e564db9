"""Fixtures that all tests share."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's kernels are then run by its interpreter; it has to be known before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory with real text. It is no part of the repository: without it the test is skipped."""
    parent = os.environ.get("DEEPSPEED_NMT_SHARED")
    path = (Path(parent) if parent else REPOSITORY.parent / "shared") / "data"
    if not path.is_dir():
        pytest.skip(f"needs real text in {path}; set DEEPSPEED_NMT_SHARED to the directory that has data/ in it")
    return path


@pytest.fixture(autouse=True)
def _fresh_logger() -> Iterator[None]:
    """What one test's command line does to the package's logger does not reach the next test."""
    logger = logging.getLogger("deepspeed_nmt")
    yield
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that finds a TCP port nobody listens on, another one at each call."""
    given: set[int] = set()

    def find() -> int:
        while True:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port: int = probe.getsockname()[1]
            if port not in given:
                given.add(port)
                return port

    return find


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu is skipped where there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
