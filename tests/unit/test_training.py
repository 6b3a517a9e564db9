"""Agreement of ranks before training."""

from contextlib import nullcontext

import pytest
import torch

from deepspeed_nmt.kernels import choice
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run import resolve

CPU = torch.device("cpu")


def test_if_a_rank_lacks_a_kernel_all_ranks_fall_back_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = {"softmax": "triton", "layer_norm": "triton"}
    kernels = Kernels("linear=torch," + ",".join(f"{name}={backend}" for name, backend in asked.items()))
    monkeypatch.setattr(resolve, "fail_together", lambda world: nullcontext())

    def other_lacks(operation: str) -> None:
        """Fake a second rank with the same settings that fell back to torch for one operation."""

        def total(own: dict[str, float], world: World) -> dict[str, float]:
            other = {name: float(name == operation or name not in asked) for name in own}
            return {name: own[name] + other[name] for name in own}

        monkeypatch.setattr(resolve, "sum_over_ranks", total)

    other_lacks("none of them")
    assert resolve.agree_on_kernels(kernels, World(0, 2, 0, CPU), [torch.float32]) is kernels
    assert kernels.choices(CPU, torch.float32)["softmax"] == "triton"
    other_lacks("softmax")
    kernels = resolve.agree_on_kernels(kernels, World(0, 2, 0, CPU), [torch.float32])
    chosen = kernels.choices(CPU, torch.float32)
    assert chosen["softmax"] == "torch" and chosen["layer_norm"] == "triton"


@pytest.mark.parametrize(
    ("setting", "recorded", "library", "message"),
    [
        ("auto", "torch", "torch", "by torch, as so far; a new run on this CPU would take onednn"),
        ("auto", "onednn", "onednn", ""),
        ("auto", None, "onednn", ""),
        ("auto", ["x"], "onednn", ""),
        ("linear=onednn", "torch", "onednn", ""),
    ],
)
def test_a_resumed_run_keeps_its_library_for_products(
    setting: str, recorded: object, library: str, message: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(choice, "preferred_on_cpu", lambda operation, dtype: "onednn")
    with caplog.at_level("INFO", logger="deepspeed_nmt"):
        kernels = resolve.keep_products(Kernels(setting), recorded, World(0, 1, 0, CPU))
    assert kernels.backend("linear", torch.empty(0)) == library
    assert message in caplog.text and bool(message) == bool(caplog.text)
