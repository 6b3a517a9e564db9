"""Errors that end all ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_nmt.console import report
from deepspeed_nmt.errors import ReportedError, TrainingError, UserError
from deepspeed_nmt.parallel.collectives import gather_lists
from deepspeed_nmt.parallel.world import World


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """Fail on all ranks if the block fails on any of them.

    All ranks must enter the block, and nothing inside it may wait for other ranks. If several ranks fail with the
    same message, the first of them reports it.

    Args:
        world: the ranks that enter the block.

    Raises:
        UserError: the error of the block, if there is only one rank.
        TrainingError: the same.
        OSError: the same.
        ReportedError: on every rank, if there are several ranks and the block failed on any of them.
    """
    problem: Exception | None = None
    try:
        yield
    except (UserError, TrainingError, OSError) as error:
        if world.ranks == 1:
            raise
        problem = error
    found = gather_lists([] if problem is None else [[world.rank, str(problem)]], world)
    if not found:
        return
    first = {message: rank for rank, message in reversed(found)}
    status = 0
    if problem is not None and first[str(problem)] == world.rank:
        status = report(problem)
    # Wait until every message is written: a launcher ends all ranks as soon as one exits.
    statuses = gather_lists([status], world)
    raise ReportedError(next(filter(None, statuses)), found[0][1]) from problem
