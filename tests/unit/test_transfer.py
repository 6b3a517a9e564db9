"""Copies of micro-batches to a device: one ahead, and before the computation that needs it."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.engine import transfer
from deepspeed_nmt.engine.transfer import on_device, tensors_of
from tests.support import batch_of

BATCHES = [
    replace(batch_of(*torch.full((3, 2, 2), number)), update=UpdateInfo(micro_batch=number)) for number in range(3)
]


def test_on_a_cpu_batches_stay_where_they_are() -> None:
    for ours, theirs in zip(on_device(BATCHES, torch.device("cpu")), BATCHES, strict=True):
        assert ours.update == theirs.update
        assert [t.data_ptr() for t in tensors_of(ours)] == [t.data_ptr() for t in tensors_of(theirs)]


def test_on_a_gpu_the_next_batch_is_copied_before_this_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls of CUDA by notes of their order."""
    done: list[str] = []

    def to(batch: Batch, device: torch.device) -> Batch:
        assert device.type == "cuda"
        done.append(f"copy {batch.update.micro_batch}")
        return batch

    computing = SimpleNamespace(wait_stream=lambda stream: done.append("wait"))
    monkeypatch.setattr(Batch, "to", to)
    monkeypatch.setattr(transfer, "_copy_stream", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: done.append("held"))
    for batch in on_device(BATCHES, torch.device("cuda")):
        done.append(f"use {batch.update.micro_batch}")
    assert done.count("held") == 3 * 4, "the caching allocator must know of the second stream"
    assert [each for each in done if each != "held"] == [
        *("copy 0", "wait", "copy 1", "use 0"),
        *("wait", "copy 2", "use 1"),
        *("wait", "use 2"),
    ]
