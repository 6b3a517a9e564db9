"""Ranks that stop together, and with one voice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_nmt.console import report
from deepspeed_nmt.errors import ReportedError, TrainingError, UserError
from deepspeed_nmt.parallel.collectives import gather_lists
from deepspeed_nmt.parallel.world import World


@contextmanager
def fail_together(world: World) -> Iterator[None]:
    """A block that all ranks enter together, and that fails on all if it fails on one. What several find alike, the
    first of them reports. Nothing inside may wait for other ranks.

    Raises:
        UserError, TrainingError, OSError: the block's own, if this rank is alone.
        ReportedError: in its place, on every rank of several.
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
    # Nobody leaves before all is said: a launcher ends all ranks as soon as one is gone.
    statuses = gather_lists([status], world)
    raise ReportedError(next(filter(None, statuses))) from problem
