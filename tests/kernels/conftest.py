"""Kernels are tested on the GPU if there is one, else on the CPU, Triton's by its interpreter."""

from __future__ import annotations

import pytest
import torch

from deepspeed_nmt.kernels.choice import ENVIRONMENT


@pytest.fixture
def device() -> torch.device:
    """The device to run kernels on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test starts with nothing chosen by the environment."""
    monkeypatch.delenv(ENVIRONMENT, raising=False)
