"""Examination of this host, and of all hosts that a launcher has started ranks on.

Each rank makes the checks that need no other rank, and meanwhile connects. Then rank 0 collects the findings, and the
checks of several hosts follow. If ranks cannot connect, the first rank of each host reports what it has found alone.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed_nmt import __version__
from deepspeed_nmt.console import logger
from deepspeed_nmt.doctor.files import existing
from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, run_program, warning
from deepspeed_nmt.doctor.gpu import query
from deepspeed_nmt.doctor.software import version_of
from deepspeed_nmt.doctor.table import OF_A_GROUP, OF_A_HOST, OF_A_RANK, Check
from deepspeed_nmt.errors import ConfigError, TrainingError
from deepspeed_nmt.parallel.launched import RankPlace, local_ranks

TOGETHER = "all hosts"
"""In place of a host's name in findings about several hosts."""
_CHECKS_S = 900.0
"""Time limit in seconds of the checks that a rank makes alone: packages come slowly over some file systems."""


class Line(NamedTuple):
    """A finding of a check on a host.

    Attributes:
        host: name of the host, or ``TOGETHER``.
        check: name of the check.
        level: of the finding.
        text: of the finding.
    """

    host: str
    check: str
    level: str
    text: str


@dataclass(frozen=True)
class Result:
    """Findings to be printed.

    Attributes:
        lines: of one or more hosts.
        hosts: names of the hosts that were examined.
        ranks: number of ranks that were.
    """

    lines: list[Line]
    hosts: list[str]
    ranks: int

    @property
    def has_fault(self) -> bool:
        """True if there is a fault."""
        return any(line.level == "fault" for line in self.lines)


def context_of(place: RankPlace, run: Path | None, limit_s: float) -> JobContext:
    """Return the facts that the checks of this process start from.

    Under SLURM, ranks that were started without a rendezvous get one: the first node of the step, and a port that
    follows from the job's number, as launch/train.sbatch chooses it.

    Args:
        place: of this process.
        run: run directory, which need not exist; None for the working directory.
        limit_s: seconds after which a rank stops waiting for another.
    """
    if place.ranks > 1 and "SLURM_STEP_ID" in os.environ and "RANK" not in os.environ:
        nodes = run_program(["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")], 30.0)
        job = os.environ.get("SLURM_JOB_ID", "0")
        if nodes.status == 0 and nodes.text and job.isdecimal():
            os.environ.setdefault("MASTER_ADDR", nodes.text.split()[0])
            os.environ.setdefault("MASTER_PORT", str(20000 + int(job) * 7 % 10000))
    found, problem = query(os.environ.get("PATH"))
    environment = dict(os.environ)
    return JobContext(
        place=place,
        host=platform.node(),
        directory=existing(run or Path.cwd()),
        limit_s=limit_s,
        environment=environment,
        local_ranks=local_ranks(environment) if place.ranks > 1 else 1,
        gpus=found,
        driver_problem=problem,
    )


def examine(context: JobContext) -> Result | None:
    """Make all checks; None on ranks whose findings another rank reports."""
    if context.place.ranks > 1:
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            joining = _begin_to_join(context, pool)
            return _Meeting(context, examine_alone(context), began).result(joining)
    mine = examine_alone(context)
    mine += _stamped(context.host, "collectives", lambda: _alone(context))
    return Result(mine, [context.host], 1)


def _begin_to_join(context: JobContext, pool: ThreadPoolExecutor) -> Future[Any]:
    """Connect to the other ranks in another thread, and tell rank 0 that this one is there.

    torch is imported in this thread before: a process in which two threads import it at once is aborted.
    """
    try:
        from deepspeed_nmt.parallel.exchange import Exchange
        from deepspeed_nmt.parallel.world import check_launcher
    except Exception as error:  # the check of torch reports it
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed

    def join() -> Exchange:
        check_launcher(context.place.ranks)
        exchange = Exchange.join(context.place, context.limit_s)
        exchange.put("here", 0)
        return exchange

    return pool.submit(join)


def examine_alone(context: JobContext) -> list[Line]:
    """Make the checks that need no other rank: those of the host on its first rank, those of a rank on each."""
    tables = [OF_A_HOST, OF_A_RANK] if context.is_first_of_host else [OF_A_RANK]
    lines: list[Line] = []
    for name, check in [each for table in tables for each in table.items()]:
        lines += _stamped(context.host, name, _bound(check, context))
    return lines


def _bound(check: Check, context: JobContext) -> Callable[[], list[Finding]]:
    return lambda: check(context)


def _stamped(host: str, name: str, check: Callable[[], Iterable[Finding]]) -> list[Line]:
    """Make a check, and return its findings with its name. A check that fails is a warning."""
    try:
        return [Line(host, name, *finding) for finding in check()]
    except Exception as error:  # of a library, a driver or a file system that is in the state to be examined
        text = f"this check could not be made ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        return [Line(host, name, *warning(text))]


def _alone(context: JobContext) -> list[Finding]:
    """Try a process group on this host."""
    try:
        import torch

        from deepspeed_nmt.doctor.hosts import collectives_of_this_host
    except Exception:  # the check of torch reports it
        return []
    return collectives_of_this_host(context, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def facts_of(context: JobContext) -> dict[str, Any]:
    """Return what is compared with other ranks."""
    import torch

    gpu, kind = -1, "none"
    if torch.cuda.is_available():
        from deepspeed_nmt.parallel.world import gpu_of

        try:
            gpu = gpu_of(context.place.local_rank)
            kind = torch.cuda.get_device_name(gpu)
        except ConfigError:  # the check of this rank's GPU reports it
            kind = "fewer than ranks"
    versions = {
        "deepspeed_nmt": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version_of("deepspeed"),
        "triton": version_of("triton"),
        "CUDA": torch.version.cuda,
        "NCCL": _nccl(),
        "driver": context.gpus[0].driver if context.gpus else None,
        "GPU": kind,
    }
    return {"host": context.host, "first": context.is_first_of_host, "gpu": gpu, "versions": versions}


def _nccl() -> str | None:
    """Return the version of NCCL in torch, None if it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except Exception:  # a build without NCCL
        return None


class _Meeting:
    """This rank's part in the checks of several hosts.

    Args:
        context: of this rank.
        mine: lines that this rank has found alone.
        began: time at which this rank began to connect.
    """

    def __init__(self, context: JobContext, mine: list[Line], began: float) -> None:
        self._context, self._mine, self._began = context, mine, began

    def result(self, joining: Future[Any]) -> Result | None:
        """Return the result that this rank is to report, None if rank 0 does.

        Args:
            joining: the connection to the other ranks.
        """
        context = self._context
        try:
            exchange = joining.result()
            exchange.put("alone", [facts_of(context), self._mine])
        except ConfigError as error:
            return self._unconnected(str(error))
        except TrainingError as error:
            return self._unconnected(
                f"{context.host} must reach rank 0, but has waited for {context.limit_s:.0f} s ({error}); check "
                "MASTER_ADDR, MASTER_PORT and firewalls, and that rank 0 has started"
            )
        except Exception as error:  # torch, which other checks report, or the store
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return self._unconnected(f"{context.host} must be able to connect, but cannot ({reason})")
        try:
            return self._lead(exchange) if context.place.rank == 0 else self._follow(exchange)
        except Exception as error:  # rank 0 or its host is lost
            return self._unconnected(
                f"all ranks must stay connected, but the connection of {context.host} to rank 0 was lost "
                f"({str(error).partition(chr(10))[0]}); look at what rank 0 has printed"
            )

    def _unconnected(self, text: str) -> Result | None:
        """Return what this host has found alone, on its first rank."""
        context = self._context
        if not context.is_first_of_host:
            return None
        return Result([*self._mine, Line(context.host, "connection", *fault(text))], [context.host], 1)

    def _lead(self, exchange: Any) -> Result:
        """Collect the findings of all ranks, and take part in the checks of several hosts."""
        context = self._context
        logger.info("rank 0 waits for the others, %.0f s at most", context.limit_s)
        here = exchange.gather("here", range(context.place.ranks), self._began + context.limit_s - time.monotonic())
        found = exchange.gather("alone", here, _CHECKS_S)
        facts = {rank: answer[0] for rank, answer in found.items()}
        lines = [Line(*line) for answer in found.values() for line in answer[1]]
        exchange.put("members", facts)
        lines += self._missing(facts)
        if len(facts) > 1:
            lines += self._together(exchange, facts)
        hosts = list(dict.fromkeys(each["host"] for each in facts.values()))
        # The lines about several hosts that other ranks have found.
        for theirs in exchange.gather("together", sorted(set(facts) - {0}), context.limit_s).values():
            lines += [Line(*line) for line in theirs]
        exchange.put("end", 0)
        exchange.gather("left", sorted(set(facts) - {0}), 10.0)  # this process hosts the store
        return Result(lines, hosts, len(facts))

    def _follow(self, exchange: Any) -> Result | None:
        """Take part in the checks of several hosts; rank 0 reports."""
        limit_s, rank = self._context.limit_s, self._context.place.rank
        members = {int(number): each for number, each in exchange.get("members", 0, limit_s + 2 * _CHECKS_S).items()}
        if rank not in members:
            return self._unconnected(
                f"{self._context.host} must connect within {limit_s:.0f} s, but came too late; start again with a "
                "longer --timeout"
            )
        exchange.put("together", self._together(exchange, members))
        exchange.get("end", 0, 4 * limit_s + 60.0)
        exchange.put("left", 0)
        return None

    def _together(self, exchange: Any, facts: Mapping[int, Mapping[str, Any]]) -> list[Line]:
        """Make the checks of several hosts with the ranks that have connected."""
        from deepspeed_nmt.doctor import hosts

        group = hosts.Group(self._context, exchange, facts)
        checks = (hosts.equal, hosts.clocks, hosts.directory, hosts.collectives)
        lines: list[Line] = []
        for name, check in zip(OF_A_GROUP, checks, strict=True):
            logger.info("all hosts together: %s", name)
            lines += _stamped(TOGETHER, name, lambda check=check: check(group))  # type: ignore[misc]
        return lines

    def _missing(self, facts: Mapping[int, Mapping[str, Any]]) -> list[Line]:
        """Return a fault if ranks have not connected."""
        from deepspeed_nmt.doctor.hosts import missing_hosts

        context = self._context
        missing = [rank for rank in range(context.place.ranks) if rank not in facts]
        if not missing:
            return []
        listed = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        where = missing_hosts(context, {rank: each["host"] for rank, each in facts.items()}, missing)
        hosts = f" ({', '.join(where)})" if where else ""
        text = (
            f"all {context.place.ranks} ranks must connect within {context.limit_s:.0f} s, but "
            f"{'rank' if len(missing) == 1 else 'ranks'} {listed} did not{hosts}; "
            "look there for a message, and check that the host reaches rank 0"
        )
        return [Line(TOGETHER, "connection", *fault(text))]
