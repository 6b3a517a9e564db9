"""Where kernels are tested: on the GPU if there is one, else on the CPU, Triton's by its interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deepspeed_nmt.kernels import attention, dispatch


@pytest.fixture
def device() -> torch.device:
    """The device to run kernels on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _automatic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts and leaves with nothing chosen."""
    monkeypatch.delenv(dispatch.ENVIRONMENT, raising=False)
    dispatch.use("auto")
    yield
    dispatch.use("auto")
    attention.use("auto")
