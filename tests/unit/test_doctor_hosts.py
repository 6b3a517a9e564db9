"""Checks of several hosts together; ranks are threads with a common store."""

import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_nmt import doctor
from deepspeed_nmt.doctor import group_checks as hosts
from deepspeed_nmt.doctor.examination import TOGETHER, begin_to_connect, meet
from deepspeed_nmt.doctor.findings import Finding, JobContext, Output
from deepspeed_nmt.doctor.group_checks import Exchange, Group, judge, missing_hosts
from deepspeed_nmt.doctor.trial import Outcome
from deepspeed_nmt.errors import ConfigError, TrainingError
from deepspeed_nmt.parallel.launched import RankPlace

VERSIONS = {"torch": "2.13.0", "Python": "3.11.7"}


def groups(directories: list[Path], *versions: dict[str, Any], limit_s: float = 8.0) -> list[Group]:
    """Return the groups of ranks, each on a host of its own."""
    store, ranks = dist.HashStore(), len(directories)
    given = [*versions, *[VERSIONS] * (ranks - len(versions))]
    facts = {
        rank: {"host": f"node{rank}", "first": True, "gpu": -1, "versions": given[rank]} for rank in range(ranks)
    }
    return [
        Group(
            JobContext(RankPlace(rank, ranks, 0), f"node{rank}", directory, limit_s, {}),
            Exchange(RankPlace(rank, ranks, 0), store),
            facts,
        )
        for rank, directory in enumerate(directories)
    ]


def together(check: Callable[[Group], Iterable[Finding]], made: list[Group]) -> list[Finding]:
    """Make a check on all ranks, and return their findings."""
    with ThreadPoolExecutor(len(made)) as pool:
        return [finding for findings in pool.map(lambda group: list(check(group)), made) for finding in findings]


def test_versions_are_compared(tmp_path: Path) -> None:
    (finding,) = together(hosts.versions, groups([tmp_path] * 3))
    assert finding == ("ok", "equal on all hosts: torch, Python")
    other = {"torch": "2.12.0", "Python": None}
    first, second = together(hosts.versions, groups([tmp_path] * 3, VERSIONS, other))
    assert (
        first.level == "fault" and "torch" in first.text and "2.13.0 on node0, node2; 2.12.0 on node1" in first.text
    )
    assert second.level == "warning" and "3.11.7 on node0, node2; none on node1" in second.text


def test_clocks_are_compared(tmp_path: Path) -> None:
    (finding,) = together(hosts.clocks, groups([tmp_path] * 3))
    assert finding.level == "ok" and finding.text.startswith("clocks agree within ")

    def answer(group: Group) -> Iterable[Finding]:
        if group.context.host == "node1":
            group.exchange.get("time for 1", 0, 5.0)
            group.exchange.put("time", time.time() - 7.0)
            return []
        return hosts.clocks(group)

    (finding,) = together(answer, groups([tmp_path] * 3))
    assert finding.level == "fault"
    assert "clock of node1 is 7.0 s behind that of node0" in finding.text


def test_a_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    first = groups([tmp_path] * 2, limit_s=0.2)[0]
    finding = next(iter(hosts.clocks(first)))
    assert finding.text == "the clock of node1 could not be compared (rank 1 did not answer within 0 s)"


def test_the_run_directory_is_shared(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    shared.mkdir()
    other.mkdir()
    (finding,) = together(hosts.directory, groups([shared] * 3))
    assert finding == ("ok", f"{shared} is the same on node1, node2 and node0")
    (finding,) = together(hosts.directory, groups([shared, shared, other], limit_s=2.0))
    assert finding.level == "fault" and f"node2 does not see in {other} what node0 writes to {shared}" in finding.text
    assert not list(shared.iterdir()) and not list(other.iterdir())


def test_locks_must_hold_on_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "can_lock", lambda path: True)
    (finding,) = together(hosts.directory, groups([tmp_path] * 2))
    assert finding.level == "warning" and "node1 can lock what node0 has locked" in finding.text


def test_a_trial_names_the_first_cause() -> None:
    names = {rank: f"rank {rank} on node{rank}" for rank in range(3)}
    outcomes = {0: Outcome(problem="no end within 9 s"), 1: Outcome(problem="no route to host")}
    (finding,) = judge("nccl", outcomes, names, 2)
    assert finding.level == "fault" and finding.text.startswith(
        "rank 1 on node1 cannot add numbers by nccl (no route to"
    )
    assert "and 2 more cannot" in finding.text and "NCCL_SOCKET_IFNAME" in finding.text
    (finding,) = judge("gloo", {0: Outcome()}, {0: "rank 0", 1: "rank 1"}, 2)
    assert "rank 1 cannot" in finding.text and "(no answer)" in finding.text


def test_hosts_of_missing_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "run_program", lambda words, limit_s: Output(0, "a\nb\nc\n", ""))
    step = {"SLURM_STEP_NODELIST": "[a-c]", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}
    context = JobContext(RankPlace(0, 6, 0), "a", tmp_path, environment=step, local_ranks=2)
    assert missing_hosts(context, {0: "a.cluster", 1: "a", 2: "b", 4: "c"}, [3, 5]) == ["b", "c"]
    cyclic = {0: "a", 1: "b", 3: "a", 4: "b"}
    assert missing_hosts(context, cyclic, [2, 5]) == ["c"], "ranks are not in the order of nodes"


def test_torch_is_imported_before_a_second_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose threads import torch at the same time is aborted, but not every time."""
    name = Exchange.__module__
    monkeypatch.setattr(doctor, "group_checks", sys.modules[name])  # restored at the end, as the module is
    monkeypatch.delitem(sys.modules, name)
    imported = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *call: Any) -> Any:
            imported.append(name in sys.modules)

    context = JobContext(RankPlace(1, 2, 1), "here", tmp_path, environment={})
    begin_to_connect(context, Pool(1))
    assert imported == [True]
    monkeypatch.setitem(sys.modules, name, None)  # a torch that is broken
    assert isinstance(begin_to_connect(context, Pool(1)).exception(), ImportError) and len(imported) == 1


def test_a_host_that_cannot_connect_reports_alone(tmp_path: Path) -> None:
    for local_rank, error, text in (
        (0, ConfigError("MASTER_PORT must be free"), "MASTER_PORT must be free"),
        (0, TrainingError("for rank 0 at a:1"), "here has waited 9 s for rank 0 at a:1"),
        (0, RuntimeError("odd\nx"), "here cannot connect (RuntimeError: odd)"),
        (1, RuntimeError("odd"), None),
    ):
        context = JobContext(RankPlace(1, 2, local_rank), "here", tmp_path, limit_s=9.0, environment={})
        joining: Future[Any] = Future()
        joining.set_exception(error)
        result = meet(context, [], 0.0, joining)
        if text is None:
            assert result is None
        else:
            assert result is not None and result.count("fault") == 1 and result.hosts == ["here"]
            (line,) = result.lines
            assert line.text.startswith(text) and line.host != TOGETHER
