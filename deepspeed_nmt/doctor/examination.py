"""Examination of this host, and of all hosts that a launcher has started ranks on.

Each rank connects, and makes the checks that need no other rank. Then rank 0 collects the findings, and the checks of
several hosts follow. If ranks cannot connect, the first rank of each host reports what it has found alone.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from deepspeed_nmt import __version__
from deepspeed_nmt.console import logger, table
from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, run_program, warning
from deepspeed_nmt.doctor.host_checks import OF_A_HOST, OF_A_RANK, query_gpus, version_of
from deepspeed_nmt.errors import ConfigError, TrainingError, counted, first_line, listed
from deepspeed_nmt.parallel.launched import RankPlace, local_ranks

if TYPE_CHECKING:
    from deepspeed_nmt.doctor.group_checks import Exchange

TOGETHER = "all hosts"
"""In place of a host's name in findings about several hosts."""
_CHECKS_S = 900.0
"""Time limit in seconds of the checks that a rank makes alone: packages come slowly over some file systems."""
_SHOWN_HOSTS = 8


class Line(NamedTuple):
    """A finding of a check on a host, or on all of them: then ``host`` is ``TOGETHER``."""

    host: str
    check: str
    level: str
    text: str


@dataclass(frozen=True)
class Result:
    """Findings to be printed, the hosts that were examined, and their number of ranks."""

    lines: list[Line]
    hosts: list[str]
    ranks: int

    def count(self, level: str) -> int:
        """Count the findings of a level, those that several hosts have once."""
        return len({line[1:] for line in self.lines if line.level == level})

    def _groups(self) -> dict[tuple[str, ...], list[tuple[str, str, str]]]:
        """Return the lines by the hosts that have them: those of more hosts first, those about all hosts last."""
        hosts_of: dict[tuple[str, str, str], dict[str, None]] = {}
        for line in self.lines:
            hosts_of.setdefault(line[1:], {})[line.host] = None
        groups: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
        for finding, hosts in hosts_of.items():
            groups.setdefault(tuple(sorted(hosts)), []).append(finding)
        return dict(sorted(groups.items(), key=lambda item: (item[0] == (TOGETHER,), -len(item[0]), item[0])))

    def as_text(self) -> Iterator[str]:
        """Yield the lines of a report: those of all hosts first, and equal ones of several hosts once."""
        groups = self._groups()
        rows = [[level, check, text] for lines in groups.values() for check, level, text in lines]
        printed = iter(table(rows, left=3).split("\n") if rows else ())
        for hosts, lines in groups.items():
            yield listed(hosts, _SHOWN_HOSTS)
            yield from (f"  {next(printed)}" for _ in lines)
        faults, warnings = self.count("fault"), self.count("warning")
        verdict = f"{counted(faults, 'faults')}, {counted(warnings, 'warnings')}" if faults + warnings else "no fault"
        yield f"{counted(len(self.hosts), 'hosts')}, {counted(self.ranks, 'ranks')}: {verdict}"

    def as_json(self) -> dict[str, Any]:
        """Return an object for JSON."""
        findings = [
            {"level": level, "check": check, "hosts": [] if hosts == (TOGETHER,) else list(hosts), "text": text}
            for hosts, lines in self._groups().items()
            for check, level, text in lines
        ]
        counts = {f"{level}s": self.count(level) for level in ("fault", "warning")}
        return {"hosts": self.hosts, "ranks": self.ranks, **counts, "findings": findings}


def context_of(place: RankPlace, run: Path | None, limit_s: float) -> JobContext:
    """Return the facts that the checks of this process start from.

    Under SLURM, ranks that were started without a rendezvous get one: the first node of the step, and a port that
    follows from the job's number, as launch/train.sbatch chooses it. ``run`` need not exist; None is the working
    directory.
    """
    if place.ranks > 1 and "SLURM_STEP_ID" in os.environ and "RANK" not in os.environ:
        nodes = run_program(["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")], 30.0)
        job = os.environ.get("SLURM_JOB_ID", "0")
        if nodes.status == 0 and nodes.text and job.isdecimal():
            os.environ.setdefault("MASTER_ADDR", nodes.text.split()[0])
            os.environ.setdefault("MASTER_PORT", str(20000 + int(job) * 7 % 10000))
    environment, path = dict(os.environ), (run or Path.cwd()).absolute()
    directory = next(parent for parent in (path, *path.parents) if parent.is_dir())
    ranks_here = local_ranks(environment) if place.ranks > 1 else 1
    smi = query_gpus(environment.get("PATH"))
    return JobContext(place, platform.node(), directory, limit_s, environment, ranks_here, *smi)


def examine(context: JobContext) -> Result | None:
    """Make all checks; None on ranks whose findings another rank reports."""
    host, place, limit_s = context.host, context.place, context.limit_s
    if place.ranks == 1:
        return Result(examine_alone(context), [host], 1)
    began, problem = time.monotonic(), ""
    exchange: Any = None
    try:
        from deepspeed_nmt.doctor.group_checks import Exchange

        exchange = Exchange.join(place, limit_s)
    except ConfigError as error:
        problem = str(error)
    except TrainingError as error:
        problem = f"{host} has waited {limit_s:.0f} s {error}; check MASTER_ADDR, MASTER_PORT and firewalls"
        problem += ", and that rank 0 has started"
    except Exception as error:  # torch, which other checks report, or the store
        problem = f"{host} cannot connect ({first_line(error)})"
    lines = examine_alone(context)
    if exchange is not None:
        try:
            exchange.put("alone", [facts_of(context), lines])
            if place.rank == 0:
                return _lead(context, exchange, began)
            members = exchange.get("members", 0, limit_s + 2 * _CHECKS_S)
            facts = {int(number): of_rank for number, of_rank in members.items()}
            if place.rank in facts:
                exchange.put("together", _together(context, exchange, facts))
                return None
            problem = f"{host} connected later than {limit_s:.0f} s; start again with a longer --timeout"
        except Exception as error:  # rank 0 or its host is lost
            problem = f"the connection of {host} to rank 0 was lost ({first_line(error)})"
            problem += "; look at what rank 0 has printed"
    if not context.is_first_of_host:
        return None
    return Result([*lines, Line(host, "connection", *fault(problem))], [host], 1)


def examine_alone(context: JobContext) -> list[Line]:
    """Make the checks that need no other rank: those of the host on its first rank, those of a rank on each."""
    checks = {**(OF_A_HOST if context.is_first_of_host else {}), **OF_A_RANK}
    return [line for name, check in checks.items() for line in _lines(context.host, name, partial(check, context))]


def _lines(host: str, name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Line]:
    """Yield the findings of a check with its name. A check that fails is a warning."""
    try:
        yield from (Line(host, name, *finding) for finding in check())
    except Exception as error:  # of a library, a driver or a file system that is in the state to be examined
        yield Line(host, name, *warning(f"this check could not be made ({first_line(error)})"))


def facts_of(context: JobContext) -> dict[str, Any]:
    """Return what is compared with other ranks."""
    import torch

    from deepspeed_nmt.parallel.world import gpu_of

    gpu, kind, nccl = -1, "none", None
    if torch.cuda.is_available():
        try:
            gpu = gpu_of(context.place.local_rank)
            kind = torch.cuda.get_device_name(gpu)
        except ConfigError:  # the check of this rank's GPU reports it
            kind = "fewer than ranks"
        if torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    versions = {
        "deepspeed_nmt": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": version_of("deepspeed"),
        "triton": version_of("triton"),
        "CUDA": torch.version.cuda,
        "NCCL": nccl,
        "driver": context.gpus[0].driver if context.gpus else None,
        "GPU": kind,
    }
    return {"host": context.host, "first": context.is_first_of_host, "gpu": gpu, "versions": versions}


def _lead(context: JobContext, exchange: Exchange, began: float) -> Result:
    """Collect the findings of all ranks, and take part in the checks of several hosts."""
    from deepspeed_nmt.doctor.group_checks import Group, connection

    logger.info("rank 0 waits for the others, %.0f s at most", context.limit_s)
    here = exchange.gather("here", range(context.place.ranks), began + context.limit_s - time.monotonic())
    answers = exchange.gather("alone", here, _CHECKS_S)
    facts = {rank: answer[0] for rank, answer in answers.items()}
    others = sorted(set(facts) - {0})
    lines = [Line(*line) for answer in answers.values() for line in answer[1]]
    exchange.put("members", facts)
    lines += _lines(TOGETHER, "connection", partial(connection, Group(context, exchange, facts)))
    if others:
        lines += _together(context, exchange, facts)
    # The lines about several hosts that other ranks have found.
    for theirs in exchange.gather("together", others, context.limit_s).values():
        lines += [Line(*line) for line in theirs]
    return Result(lines, list(dict.fromkeys(of_rank["host"] for of_rank in facts.values())), len(facts))


def _together(context: JobContext, exchange: Exchange, facts: Mapping[int, Mapping[str, Any]]) -> list[Line]:
    """Make the checks of several hosts with the ranks that have connected."""
    from deepspeed_nmt.doctor.group_checks import OF_A_GROUP, Group

    lines, group = list[Line](), Group(context, exchange, facts)
    for name, check in OF_A_GROUP.items():
        logger.info("all hosts together: %s", name)
        lines += _lines(TOGETHER, name, partial(check, group))
    return lines
