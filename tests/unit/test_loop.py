"""Speed metrics of the training loop."""

from __future__ import annotations

import pytest
import torch

from deepspeed_nmt.data.loader import Cursor, Update
from deepspeed_nmt.engine.base import UpdateResult
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.throughput import Window, Workload

ALONE = World(0, 1, 0, torch.device("cpu"))


def window(workload: Workload | None, skip_second: bool = False) -> dict[str, float]:
    found = Window(workload)
    for number in (1, 2):
        update = Update(
            number=number,
            micro_batches=[],
            target_tokens=300,
            padded_positions=1000,
            real_positions=800,
            after=Cursor(),
        )
        sums = {"loss": torch.tensor(900.0), "nll": torch.tensor(600.0)}
        skipped = skip_second and number == 2
        found.add(update, UpdateResult(sums, 1.0, skipped, 1.0), waited=0.5, elapsed=2.0)
    return found.flush(1e-3, ALONE)


def test_mfu_counts_real_source_and_target_tokens() -> None:
    values = window(Workload(source_flops=10.0, target_flops=20.0, peak_flops=5500.0))
    # 1000 source and 600 target tokens in 4 seconds.
    assert values["perf/mfu"] == pytest.approx((10.0 * 1000 + 20.0 * 600) / (4.0 * 5500.0))
    assert values["perf/padding"] == pytest.approx(0.2)
    assert values["perf/data_wait"] == pytest.approx(0.25)
    assert values["perf/target_tokens_per_s"] == pytest.approx(150.0)


def test_skipped_updates_count_as_work_but_not_as_trained_tokens() -> None:
    workload = Workload(source_flops=10.0, target_flops=20.0, peak_flops=5500.0)
    skipped, whole = window(workload, skip_second=True), window(workload)
    assert skipped["perf/mfu"] == whole["perf/mfu"]
    assert skipped["perf/target_tokens_per_s"] == whole["perf/target_tokens_per_s"] / 2
    assert skipped["train/loss"] == whole["train/loss"] == 3.0


def test_without_a_known_gpu_there_is_no_mfu() -> None:
    assert "perf/mfu" not in window(None)
