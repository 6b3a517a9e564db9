"""Checks of several hosts together: what must be equal or shared, and whether ranks reach one another.

All ranks that have connected take part in each check, in the same order. They exchange values over the TCP store of
rank 0, where each wait has a time limit, so that a rank that is lost or slow is named instead of waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, ok, run_program, warning
from deepspeed_nmt.doctor.host_checks import judge, lock_problem, scratch
from deepspeed_nmt.doctor.trial import Outcome, run_trial
from deepspeed_nmt.errors import TrainingError, listed
from deepspeed_nmt.parallel.launched import RankPlace, expanded, restarts
from deepspeed_nmt.parallel.world import check_launcher, connect, listed_ranks

_CLOCK_S = 1.0
"""Difference of clocks in seconds from which on logs and files are confusing."""
_CLOCK_READINGS = 3
"""Times that a clock is read; the reading that was answered fastest counts, since a busy host answers late."""
_VISIBLE_S = 60.0
"""Seconds in which a file of one host must appear on another."""
_TRIAL_SKEW_S = 30.0
"""Seconds by which the trials of ranks may begin apart."""
_MUST_AGREE = ("deepspeed_nmt", "torch", "deepspeed", "CUDA", "GPU")
"""Facts that must be equal on all ranks; Python and the driver should."""


class Exchange:
    """Named values of the ranks of a start, some of which may be missing: JSON in a TCP store that all share."""

    def __init__(self, place: RankPlace, store: Any) -> None:
        self.place, self.store = place, store
        self._prefix = f"exchange/{restarts()}"

    @classmethod
    def join(cls, place: RankPlace, timeout_s: float) -> Exchange:
        """Connect to the store of rank 0, which need not know of any other rank, and say there that this one is here.

        Raises:
            ConfigError: if the launcher gave no place to connect at, or rank 0 cannot listen there.
            TrainingError: if rank 0 does not answer within ``timeout_s``.
        """
        check_launcher(place.ranks)
        deadline = time.monotonic() + timeout_s

        def pause(what: str) -> None:
            if time.monotonic() > deadline:
                raise TrainingError(what)
            time.sleep(0.1)

        exchange = cls(place, connect(place, pause, timeout_s))
        exchange.put("here", 0)
        return exchange

    def put(self, name: str, value: Any) -> None:
        """Publish a value of this rank once."""
        self.store.set(f"{self._prefix}/{name}/{self.place.rank}", json.dumps(value))

    def get(self, name: str, rank: int, within_s: float) -> Any:
        """Wait for a value of another rank and return it; raise a TimeoutError if it is not there in time."""
        key, began = f"{self._prefix}/{name}/{rank}", time.monotonic()
        while not self.store.check([key]):
            waited = time.monotonic() - began
            if waited > within_s:
                raise TimeoutError(f"rank {rank} did not answer within {within_s:.0f} s")
            time.sleep(min(0.2, 0.002 + waited / 20))
        return json.loads(self.store.get(key))

    def gather(self, name: str, ranks: Iterable[int], within_s: float) -> dict[int, Any]:
        """Return the values of these ranks by rank, without those that are not there in time."""
        deadline, values = time.monotonic() + within_s, dict[int, Any]()
        for rank in ranks:
            with contextlib.suppress(TimeoutError):
                values[rank] = self.get(name, rank, max(0.0, deadline - time.monotonic()))
        return values


@dataclass(frozen=True)
class Group:
    """Ranks that have connected, and facts of each: its host, and what must agree."""

    context: JobContext
    exchange: Exchange
    facts: Mapping[int, Mapping[str, Any]]

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each host, rank 0 first."""
        return [rank for rank in sorted(self.facts) if rank == 0 or self.facts[rank]["first"]]

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.context.place.rank == 0

    def host(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return str(self.facts[rank]["host"])


def versions(group: Group) -> Iterator[Finding]:
    """Compare the versions and GPUs of all ranks."""
    if not group.is_main:
        return
    equal = []
    for name in group.facts[0]["versions"]:
        hosts: defaultdict[str, list[str]] = defaultdict(list)
        for _, facts in sorted(group.facts.items()):
            hosts[facts["versions"].get(name) or "none"].append(facts["host"])
        if len(hosts) == 1:
            equal.append(name)
            continue
        listed = "; ".join(f"{value} on {_some(where)}" for value, where in hosts.items())
        text = f"{name} differs among hosts: {listed}"
        yield fault(f"{text}; install the same lock everywhere") if name in _MUST_AGREE else warning(text)
    if equal:
        yield ok(f"equal on all hosts: {', '.join(equal)}")


def clocks(group: Group) -> Iterator[Finding]:
    """Compare the clocks of all hosts with that of rank 0."""
    exchange, rank, limit_s = group.exchange, group.context.place.rank, group.context.limit_s
    others, largest, compared = group.first_ranks[1:], 0.0, False
    if rank in others:
        for number in range(_CLOCK_READINGS):
            exchange.get(f"time {number} for {rank}", 0, limit_s)
            exchange.put(f"time {number}", time.time())
    if not others or not group.is_main:
        return
    for rank in others:
        readings = []
        try:
            for number in range(_CLOCK_READINGS):
                began = time.time()
                exchange.put(f"time {number} for {rank}", 0)
                theirs = exchange.get(f"time {number}", rank, limit_s)
                half = (time.time() - began) / 2
                readings.append((half, theirs - (began + half)))
        except TimeoutError as error:
            yield warning(f"the clock of {group.host(rank)} could not be compared ({error})")
            continue
        compared = True
        uncertainty, offset = min(readings)
        largest = max(largest, abs(offset) + uncertainty)
        if abs(offset) - uncertainty > _CLOCK_S:
            side = "ahead of" if offset > 0 else "behind"
            text = f"the clock of {group.host(rank)} is {abs(offset):.1f} s {side} that of {group.host(0)}"
            yield fault(f"{text}; start a time service (chrony) on both")
    if compared and largest <= _CLOCK_S:
        yield ok(f"clocks agree within {1e3 * largest:.0f} ms")


def directory(group: Group) -> Iterator[Finding]:
    """Check that all hosts see the same run directory, and that a lock of one holds on the others."""
    exchange, others, limit_s = group.exchange, group.first_ranks[1:], group.context.limit_s
    place, main = group.context.directory, group.host(0)
    if group.context.place.rank in others:
        name, token, patience_s = exchange.get("token", 0, limit_s)
        sees = bool(token) and _sees(place / name, token, patience_s)
        exchange.put("sees", [str(place), sees, sees and can_lock(place / name)])
    if not others or not group.is_main:
        return
    token = str(time.time_ns())
    with scratch(place, f"token-{token}") as path:
        try:
            file = path.open("x")
            file.write(token)
            file.flush()
        except OSError:  # reported by the check of this host's directory
            exchange.put("token", [path.name, "", 0.0])
            return
        with file:
            os.fsync(file.fileno())
            locked = not lock_problem(file)
            exchange.put("token", [path.name, token, min(_VISIBLE_S, limit_s / 8)])
            answers = exchange.gather("sees", others, limit_s)
    for rank, (theirs, sees, _) in answers.items():
        if not sees:
            text = f"{group.host(rank)} does not see in {theirs} what {main} writes to {place}"
            yield fault(f"{text}; use a run directory that all hosts share")
    if silent := [group.host(rank) for rank in others if rank not in answers]:
        text = f"{_some(silent)} did not answer within {limit_s:.0f} s, so {place} could not be compared there"
        yield warning(f"{text}; look there for a message")
    unlocked = [group.host(rank) for rank, (_, _, can) in answers.items() if locked and can]
    if unlocked:
        text = f"{_some(unlocked)} can lock what {main} has locked, so nothing prevents a second training of a run"
        yield warning(f"{text}; mount {place} with locks across hosts (Lustre: -o flock; NFS: without nolock)")
    elif answers and all(sees for _, sees, _ in answers.values()):
        yield ok(f"{place} is the same on {_some([group.host(rank) for rank in answers])} and {main}")


def _sees(path: Path, token: str, within_s: float) -> bool:
    """Return True if another host's token appears in a file in time. Network file systems show it late."""
    deadline = time.monotonic() + within_s
    while time.monotonic() <= deadline:
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # has NFS look anew
            if path.read_text(encoding="utf-8") == token:
                return True
        time.sleep(0.2)
    return False


def can_lock(path: Path) -> bool:
    """Return True if a file that another host has locked can be locked here."""
    with contextlib.suppress(OSError), path.open("a") as file:
        return not lock_problem(file)
    return False


def collectives(group: Group) -> Iterator[Finding]:
    """Let all ranks add numbers, by NCCL on GPUs and by gloo on CPUs, and report bandwidth and transport."""
    exchange, place, limit_s = group.exchange, group.context.place, group.context.limit_s
    if len(group.facts) < place.ranks:
        return
    backend = "nccl" if all(facts["gpu"] >= 0 for facts in group.facts.values()) else "gloo"
    address, gpu = (exchange.store.host, exchange.store.port), int(group.facts[place.rank]["gpu"])
    own = run_trial(backend, address, "doctor/trial", place.rank, place.ranks, gpu, limit_s)
    exchange.put("trial", asdict(own))
    if group.is_main:
        answers = exchange.gather("trial", sorted(group.facts), limit_s + _TRIAL_SKEW_S)
        outcomes = {rank: Outcome(**answer) for rank, answer in answers.items()}
        names = {rank: f"rank {rank} on {group.host(rank)}" for rank in group.facts}
        yield from judge(backend, outcomes, names, len(group.first_ranks))


def connection(group: Group) -> Iterator[Finding]:
    """Name the ranks that have not connected, and their hosts."""
    ranks, limit_s = group.context.place.ranks, group.context.limit_s
    if missing := [rank for rank in range(ranks) if rank not in group.facts]:
        where = _missing_hosts(group.context, {rank: group.host(rank) for rank in group.facts}, missing)
        hosts = f" ({', '.join(where)})" if where else ""
        text = f"{listed_ranks(missing)} of {ranks} did not connect within {limit_s:.0f} s{hosts}"
        yield fault(f"{text}; look there for a message, and check that the host reaches rank 0")


def _missing_hosts(context: JobContext, group_hosts: Mapping[int, str], missing: Sequence[int]) -> list[str]:
    """Return the hosts of ranks that are missing, as far as the launcher and ``group_hosts``, by rank, tell them."""
    environment = context.environment
    if nodes := environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST"):
        listed = run_program(["scontrol", "show", "hostnames", nodes], 30.0).text.split()
        counts = expanded(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        hosts = [host for host, count in zip(listed, counts, strict=False) for _ in range(count)]
        short = {rank: host.partition(".")[0] for rank, host in group_hosts.items()}
        if len(hosts) == context.place.ranks and all(hosts[rank] == host for rank, host in short.items()):
            return sorted({hosts[rank] for rank in missing})  # SLURM gave each node consecutive ranks
        return [host for host in listed if host not in short.values()]
    if not (per_host := context.local_ranks):
        return []
    known = {rank // per_host: host for rank, host in group_hosts.items()}
    numbers = sorted({rank // per_host for rank in missing})
    return [known.get(number, f"host {number} of the launcher, counted from 0") for number in numbers]


def _some(names: Sequence[str]) -> str:
    return listed(list(dict.fromkeys(names)), 4)


OF_A_GROUP: dict[str, Callable[[Group], Iterable[Finding]]] = {
    check.__name__: check for check in (versions, clocks, directory, collectives)
}
"""Checks that all ranks make together, by name."""
