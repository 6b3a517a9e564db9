"""One of several ranks, which asserts the results of all collectives."""

from __future__ import annotations

import torch

from deepspeed_nmt.console import setup_logging
from deepspeed_nmt.errors import ConfigError, ReportedError, TrainingError
from deepspeed_nmt.parallel.collectives import (
    all_reduce_in_buckets,
    any_rank,
    fail_together,
    from_main,
    gather_lists,
    sum_over_ranks,
)
from deepspeed_nmt.parallel.world import World, join_world, leave_world


def fail(who: set[int], error: Exception, status: int, world: World) -> None:
    """Let some ranks fail, and assert that all stop with the same status."""
    try:
        with fail_together(world):
            if world.rank in who:
                raise error
    except ReportedError as reported:
        assert world.ranks > 1 and reported.status == status
    except type(error):
        assert world.ranks == 1
    else:
        raise AssertionError("every rank must fail")


def main() -> None:
    world = join_world("cpu", timeout_s=300)
    rank, ranks = world.rank, world.ranks
    limit = torch.distributed.distributed_c10d._get_default_timeout("nccl")
    assert limit.total_seconds() == 300, "of the groups that DeepSpeed makes, too"
    assert sum_over_ranks({"b": 1.0, "a": float(rank)}, world) == {"a": ranks * (ranks - 1) / 2, "b": float(ranks)}
    assert any_rank(rank == ranks - 1, world) and not any_rank(False, world)
    assert from_main({"text": "größer", "n": [1, None]} if rank == 0 else "ignored", world) == {
        "text": "größer",
        "n": [1, None],
    }
    mine = [[rank, "ä" * i] for i in range(rank * 2)]  # rank 0 has nothing
    everyone = gather_lists(mine, world)
    assert everyone == [[r, "ä" * i] for r in range(ranks) for i in range(r * 2)]
    tensors = [torch.full((3, 5), float(rank)), torch.full((7,), 1.0), torch.tensor(float(rank))]
    all_reduce_in_buckets(tensors, world)
    assert tensors[0].eq(ranks * (ranks - 1) / 2).all() and tensors[1].eq(ranks).all()
    assert float(tensors[2]) == ranks * (ranks - 1) / 2
    setup_logging(rank)
    with fail_together(world):
        pass
    fail({0}, ConfigError("only rank 0"), 2, world)
    fail({ranks - 1}, OSError("only the last rank"), 1, world)
    fail(set(range(ranks)), TrainingError("all alike"), 1, world)
    leave_world()


if __name__ == "__main__":
    main()
