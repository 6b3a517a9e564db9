"""A SLURM of two nodes, and the small corpus of the system tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.system.conftest import data, trained  # noqa: F401  # fixtures


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two running nodes, shared by all tests."""
    lacking = missing()
    if lacking:
        pytest.skip(f"needs {lacking}: a SLURM of two nodes (launch/test.sh --system installs it)")
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    root.chmod(0o755)
    with Cluster(root) as made:
        yield made
    shutil.rmtree(root)
