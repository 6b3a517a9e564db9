"""Checks of several hosts together: what must be equal or shared, and whether ranks reach one another.

All ranks that have connected take part in each check, in the same order; each wait has a time limit.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_nmt.doctor.files import can_lock, scratch, sees_token, write_token
from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, ok, run_program, warning
from deepspeed_nmt.doctor.limits import infiniband
from deepspeed_nmt.doctor.network import transports
from deepspeed_nmt.parallel.exchange import Exchange
from deepspeed_nmt.parallel.launched import expanded
from deepspeed_nmt.parallel.trial import WAITED, Outcome, Trial, trial_on_this_host

_CLOCK_S = 1.0
"""Difference of clocks in seconds from which on logs and files are confusing."""
_VISIBLE_S = 60.0
"""Seconds in which a file of one host must appear on another."""
_MUST_AGREE = ("deepspeed_nmt", "torch", "deepspeed", "CUDA", "GPU")
"""Facts that must be equal on all ranks; Python and the driver should."""


@dataclass(frozen=True)
class Group:
    """Ranks that have connected.

    Attributes:
        context: of this rank.
        exchange: with the others.
        facts: of each rank: its host, and what must agree.
    """

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


def equal(group: Group) -> list[Finding]:
    """Compare the versions and GPUs of all ranks."""
    if not group.is_main:
        return []
    names, found = list(group.facts[0]["versions"]), []
    for name in names:
        hosts: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for _, facts in sorted(group.facts.items()):
            hosts[facts["versions"].get(name) or "none"][facts["host"]] = None
        if len(hosts) == 1:
            continue
        listed = "; ".join(f"{value} on {_some(list(where))}" for value, where in hosts.items())
        if name in _MUST_AGREE:
            found.append(
                fault(f"all hosts must have the same {name}, but have {listed}; install the same lock everywhere")
            )
        else:
            found.append(warning(f"all hosts should have the same {name}, but have {listed}"))
    return found or [ok(f"equal on all hosts: {', '.join(names)}")]


def clocks(group: Group) -> list[Finding]:
    """Compare the clocks of all hosts with that of rank 0."""
    mine, limit_s = group.context.place.rank, group.context.limit_s
    others = group.first_ranks[1:]
    if not others or not (group.is_main or mine in others):
        return []
    if not group.is_main:
        group.exchange.answer_clock(0, time.time, limit_s)
        return []
    found, largest = [], 0.0
    for rank in others:
        try:
            offset, uncertainty = group.exchange.clock_offset(rank, time.time, limit_s)
        except TimeoutError as error:
            found.append(warning(f"the clock of {group.host(rank)} could not be compared ({error})"))
            continue
        largest = max(largest, abs(offset) + uncertainty)
        if abs(offset) - uncertainty > _CLOCK_S:
            found.append(
                fault(
                    f"the clocks of all hosts must agree within {_CLOCK_S:.0f} s, but that of {group.host(rank)} is "
                    f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of {group.host(0)}; start a "
                    "time service (chrony) on both"
                )
            )
    return found or [ok(f"clocks agree within {1e3 * largest:.0f} ms")]


def directory(group: Group) -> list[Finding]:
    """Check that all hosts see the same run directory, and that a lock of one holds on the others."""
    mine, others, place = group.context.place.rank, group.first_ranks[1:], group.context.directory
    if not others or not (group.is_main or mine in others):
        return []
    if group.is_main:
        return _lead(group, others)
    limit_s = group.context.limit_s
    name, token, patience_s = group.exchange.get("token", 0, limit_s)
    sees = bool(token) and sees_token(place, name, token, patience_s)
    group.exchange.put("sees", [str(place), sees, can_lock(place, name) if sees else None])
    return []


def _lead(group: Group, others: Sequence[int]) -> list[Finding]:
    """Write and lock a file, ask all hosts for it, and return what is wrong."""
    import fcntl

    place, limit_s = group.context.directory, group.context.limit_s
    token, patience_s = str(time.time_ns()), min(_VISIBLE_S, limit_s / 8)
    name = f"token-{token}"
    with scratch(place, name) as path:
        try:
            write_token(place, name, token)
            file = path.open("a")
        except OSError:  # reported by the check of this host's directory
            group.exchange.put("token", [name, "", 0.0])
            return []
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except OSError:
                locked = False
            group.exchange.put("token", [name, token, patience_s])
            answers = group.exchange.gather("sees", others, limit_s)
    unseen = {rank: answer[0] for rank, answer in answers.items() if not answer[1]}
    unlocked = [group.host(rank) for rank, answer in answers.items() if locked and answer[1] and answer[2]]
    found = []
    for rank, theirs in unseen.items():
        found.append(
            fault(
                f"the run directory must be the same on all hosts, but {group.host(rank)} does not see in {theirs} "
                f"what {group.host(0)} writes to {place}; use a directory that all hosts share"
            )
        )
    if unlocked:
        found.append(
            warning(
                f"locks in the run directory should hold on all hosts, but {_some(unlocked)} can lock what "
                f"{group.host(0)} has locked, so nothing prevents a second training of a run; mount {place} with "
                "locks across hosts (Lustre: -o flock; NFS: without nolock)"
            )
        )
    return found or [
        ok(f"{place} is the same on {_some([group.host(rank) for rank in answers])} and {group.host(0)}")
    ]


def collectives(group: Group) -> list[Finding]:
    """Let all ranks add numbers, by NCCL on GPUs and by gloo on CPUs, and report bandwidth and transport."""
    context, place = group.context, group.context.place
    if len(group.facts) < place.ranks:
        return []
    on_gpus = all(facts["gpu"] >= 0 for facts in group.facts.values())
    backend = "nccl" if on_gpus else "gloo"
    store = group.exchange.store
    trial = Trial(
        backend,
        (store.host, store.port),
        "doctor/trial",
        place.rank,
        place.ranks,
        int(group.facts[place.rank]["gpu"]),
        context.limit_s,
    )
    mine = trial.outcome(group.exchange.has_flag("trial/failed"))
    if mine.problem:
        group.exchange.raise_flag("trial/failed")
    group.exchange.put("trial", [mine.gigabytes_per_s, mine.problem, mine.nccl, *map(sorted, transports(mine.log))])
    if not group.is_main:
        return []
    answers = group.exchange.gather("trial", sorted(group.facts), context.limit_s)
    outcomes = {rank: Outcome(*answer[:3]) for rank, answer in answers.items()}
    used = {each for answer in answers.values() for each in answer[3]}
    devices = {each for answer in answers.values() for each in answer[4]}
    names = {rank: f"rank {rank} on {group.host(rank)}" for rank in group.facts}
    return judge(backend, outcomes, names, len(group.first_ranks), used, devices)


def collectives_of_this_host(context: JobContext, gpus: int) -> list[Finding]:
    """Let ranks on this host add numbers: one for each GPU, or two on the CPU.

    Args:
        context: of a single process.
        gpus: number of GPUs that torch sees.
    """
    if gpus == 1:
        return [ok("one GPU, so NCCL is not tried")]
    backend, ranks = ("nccl", gpus) if gpus else ("gloo", 2)
    outcomes = dict(enumerate(trial_on_this_host(backend, ranks, context.limit_s)))
    found = [transports(each.log) for each in outcomes.values()]
    used, devices = (set().union(*sets) for sets in zip(*found, strict=True))
    return judge(backend, outcomes, {rank: f"rank {rank}" for rank in outcomes}, 1, used, devices)


def judge(
    backend: str,
    outcomes: Mapping[int, Outcome],
    names: Mapping[int, str],
    hosts: int,
    used: set[str],
    devices: set[str],
) -> list[Finding]:
    """Return what the trial of a process group has found.

    Args:
        backend: "gloo" or "nccl".
        outcomes: of the ranks that have answered.
        names: of all ranks, for messages.
        hosts: number of hosts.
        used: NCCL's transports between ranks.
        devices: devices of NCCL's network.
    """
    problems = {names[rank]: outcome.problem for rank, outcome in outcomes.items() if outcome.problem}
    problems |= {names[rank]: "no answer" for rank in names if rank not in outcomes}
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    if problems:
        who, reason = min(problems.items(), key=lambda item: item[1] == WAITED)  # the first cause comes first
        more = f", and {len(problems) - 1} more cannot" * (len(problems) > 1)
        return [
            fault(
                f"all ranks must be able to add numbers by {backend}, but {who} cannot ({reason}){more}; check the "
                f"network and firewalls between the hosts, and name the interface by {variable}"
            )
        ]
    slowest = min(outcome.gigabytes_per_s for outcome in outcomes.values())
    version = next((outcome.nccl for outcome in outcomes.values() if outcome.nccl), "")
    over = f" over {', '.join(sorted(used))}" if used else ""
    # NCCL names the sockets that it starts with even if it uses InfiniBand.
    networks = {each.split()[0].partition("/")[2] for each in used if each.startswith("NET/")}
    through = "; ".join(sorted(each for each in devices if each.partition(":")[0] in networks))
    through = f" ({through})" if through else ""
    found = [
        ok(
            f"{len(outcomes)} ranks on {hosts} {'host' if hosts == 1 else 'hosts'} add numbers by "
            f"{f'NCCL {version}' if version else backend}{over}{through}: {slowest:.2f} GB/s"
        )
    ]
    if hosts > 1 and "NET/Socket" in used and infiniband():
        found.append(
            warning(
                f"NCCL should use InfiniBand between hosts ({', '.join(infiniband())}), but uses sockets, which are "
                "many times slower; check NCCL_IB_DISABLE, NCCL_IB_HCA, and the limit of locked memory"
            )
        )
    return found


def missing_hosts(context: JobContext, group_hosts: Mapping[int, str], missing: Sequence[int]) -> list[str]:
    """Return the hosts of ranks that have not connected, as far as the launcher tells them.

    Args:
        context: of this rank.
        group_hosts: host of each rank that has connected.
        missing: the ranks that have not.
    """
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
    """Return the first names, and the number of further ones, as text."""
    names = list(dict.fromkeys(names))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
