"""Updates on the path of a GPU, with CPU tensors: its waits for the device, and its losses against plain torch's.

Triton's kernels run in its interpreter, attention in kernels for CPUs behind torch's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import RunConfig, load_config, validate
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine import plain
from deepspeed_nmt.engine.deepspeed import GradientOrder
from deepspeed_nmt.engine.plain import COLLECTED_BYTES, GradientSums, PlainEngine
from deepspeed_nmt.kernels.choice import EXPECTED, OPERATIONS, Kernels
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.parallel.world import World
from tests.host_waits import HostCopies, HostWaits
from tests.varlen import use_varlen_on_a_cpu

triton_ops = pytest.importorskip("deepspeed_nmt.kernels.triton_ops", reason="needs triton")
V = Vocabulary(50)
SHAPE = {"dim": 16, "ffn_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 2}


def plain_transformer() -> RunConfig:
    return validate({"model": {"name": "transformer", **SHAPE, "dropout": 0.0}})


def all_methods() -> RunConfig:
    """CAD, DDR and ALD, each in every update."""
    settings = [*(f"model.{name}={value}" for name, value in SHAPE.items()), "model.dropout=0"]
    return load_config(
        "deep_decoder_big_54_stabilised", settings=[*settings, "layer.drop_depth=1", "objective.ald.every=1"]
    )


def batch(seed: int) -> Batch:
    """Return packed sentences of 3 and 5 tokens, with a tail."""
    generator = torch.Generator().manual_seed(seed)
    source, target_input, target_output = (
        torch.randint(V.unk + 1, V.size, (1, 10), generator=generator) for _ in range(3)
    )
    target_output[0, 8:] = V.pad
    segments = Segments.of([3, 5], 10)
    return Batch(
        source_BS=source,
        target_input_BT=target_input,
        target_output_BT=target_output,
        sentence_ids_B=torch.arange(2),
        source_tokens=8,
        target_tokens=8,
        pad=V.pad,
        update=UpdateInfo(seed=1, number=1, tokens=16, sentences=4),
        source_segments=segments,
        target_segments=segments,
    )


def engine_of(config: RunConfig, kernels: Kernels) -> PlainEngine:
    module = TrainModule(build_model(config, V, kernels), build_objective(config, V))
    return PlainEngine(module, config.optimizer, "bf16", World(0, 1, 0, torch.device("cpu")))


def loss_of_update(engine: PlainEngine) -> float:
    """Make an update of two micro-batches; return its loss."""
    return float(engine.update([batch(1), batch(2)], 16, 1e-2).sums["loss"].detach())


def take_gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU: sums of gradients, packed attention, joined products, padded logits."""
    monkeypatch.setattr(plain, "GradientSums", lambda masters, _: GradientSums(masters, COLLECTED_BYTES))
    monkeypatch.setattr(Kernels, "device_type", lambda self, x: "cuda")
    use_varlen_on_a_cpu(monkeypatch)


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_a_norm_on_the_host_is_read_with_the_order_of_gradients_on_the_gpu(device: str) -> None:
    """DeepSpeed has it on the host if it offloads the optimizer."""
    with FakeTensorMode():
        order = GradientOrder({}, World(0, 1, 0, torch.device("cpu")))
        order._extremes = torch.zeros(2, dtype=torch.float64, device="cuda:0")
        assert order.read(torch.zeros((), device=device)).device.type == "cpu"


@pytest.mark.parametrize("configure", [plain_transformer, all_methods])
def test_updates_wait_once_and_have_the_losses_of_plain_torch(
    configure: Callable[[], RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "DTYPES", {"bf16": torch.float32})  # masters, but numbers that can be compared
    reference = engine_of(configure(), Kernels(fixed=dict.fromkeys(OPERATIONS, "torch")))
    expected = [loss_of_update(reference) for _ in range(2)]
    take_gpu_path(monkeypatch)
    engine = engine_of(configure(), Kernels(fixed=EXPECTED))
    losses = [loss_of_update(engine)]
    waits, launch = HostWaits(), triton_ops._launch

    def uncounted(*arguments: Any, **options: Any) -> None:
        with waits.paused():  # the interpreter
            launch(*arguments, **options)

    monkeypatch.setattr(triton_ops, "_launch", uncounted)
    with HostCopies(waits), waits:
        result = engine.update([batch(1), batch(2)], 16, 1e-2)
    losses.append(float(result.sums["loss"].detach()))
    assert len(waits.places) == 1 and "engine/plain.py" in waits.places[0], waits.places
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != losses[1]
