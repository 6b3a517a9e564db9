"""Agreement of ranks before training."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run import agreement

CPU = torch.device("cpu")


def test_if_a_rank_lacks_a_kernel_all_ranks_fall_back_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = {"softmax": "triton", "layer_norm": "triton"}
    kernels = Kernels(",".join(f"{name}={backend}" for name, backend in asked.items()))
    monkeypatch.setattr(agreement, "fail_together", lambda world: nullcontext())

    def other_lacks(operation: str) -> None:
        """Fake a second rank with the same settings that fell back to torch for one operation."""

        def total(own: dict[str, float], world: World) -> dict[str, float]:
            other = {name: float(name == operation or name not in asked) for name in own}
            return {name: own[name] + other[name] for name in own}

        monkeypatch.setattr(agreement, "sum_over_ranks", total)

    other_lacks("none of them")
    assert agreement.agree_on_kernels(kernels, World(0, 2, 0, CPU), [torch.float32]) is kernels
    assert kernels.choices(CPU, torch.float32)["softmax"] == "triton"
    other_lacks("softmax")
    kernels = agreement.agree_on_kernels(kernels, World(0, 2, 0, CPU), [torch.float32])
    chosen = kernels.choices(CPU, torch.float32)
    assert chosen["softmax"] == "torch" and chosen["layer_norm"] == "triton"
