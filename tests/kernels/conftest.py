"""Fixtures of the kernel tests. They run on the GPU if there is one, otherwise on the CPU in Triton's interpreter."""

import pytest
import torch

from deepspeed_nmt.kernels.choice import ENVIRONMENT


@pytest.fixture
def device() -> torch.device:
    """The device to run kernels on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove choices of kernels from the environment."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
