"""Weights of replicas that differ name the ranks at fault."""

from __future__ import annotations

import pytest
import torch

from deepspeed_nmt.errors import DeviceError
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.replicas import check_replicas, compare_digests


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        ([5, 5, 5, 6], [3]),
        ([5, 6], [0, 1]),  # nobody knows which one is right
        ([5, 6, 6, 5], [0, 1, 2, 3]),
    ],
)
def test_replicas_that_differ_are_named(digests: list[int], named: list[int]) -> None:
    compare_digests([(f"rank {rank}", digests[0]) for rank in range(len(digests))])
    with pytest.raises(DeviceError) as error:
        compare_digests([(f"rank {rank}", digest) for rank, digest in enumerate(digests)])
    assert [rank for rank in range(len(digests)) if f"rank {rank}" in str(error.value)] == named
    assert error.value.status == 71


def test_a_single_rank_agrees_with_itself() -> None:
    check_replicas(torch.nn.Linear(2, 2), World(0, 1, 0, torch.device("cpu")))
