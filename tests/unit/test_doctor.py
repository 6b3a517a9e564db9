"""Checks of `doctor`, alone and of several hosts together: each planted fault is found, with its values."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_nmt.cli import main
from deepspeed_nmt.doctor import examination
from deepspeed_nmt.doctor import group_checks as hosts
from deepspeed_nmt.doctor import host_checks as checks
from deepspeed_nmt.doctor.examination import TOGETHER, Line, Result
from deepspeed_nmt.doctor.findings import Finding, HostGpu, JobContext, Output, fault, ok
from deepspeed_nmt.doctor.group_checks import Exchange, Group
from deepspeed_nmt.errors import ConfigError, TrainingError
from deepspeed_nmt.parallel.hardware import HostMemory
from deepspeed_nmt.parallel.launched import RankPlace, expanded, local_ranks

V100 = HostGpu("Tesla V100", "580.65", 16.0, 0.1, (7, 0))


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    """One rank on a host without GPUs."""
    return JobContext(RankPlace(0, 1, 0), "here", tmp_path, environment={"PATH": os.environ["PATH"]}, local_ranks=1)


def with_environment(context: JobContext, **environment: str) -> JobContext:
    return replace(context, environment={**context.environment, **environment})


def assert_finds(findings: Iterable[Finding], level: str, *words: str) -> None:
    """Assert that one finding is not ok, has this level, and contains these words; or that all are ok."""
    problems = [finding for finding in findings if finding.level != "ok"]
    if level == "ok":
        assert not problems
        return
    (problem,) = problems
    assert problem.level == level and not [word for word in words if word not in problem.text], problem


# The command.


def test_the_status_is_1_after_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for levels, status in ((("ok", "warning"), 0), (("ok", "fault"), 1)):
        result = Result([Line("here", "a check", level, "text") for level in levels], ["here"], 1)
        monkeypatch.setattr(examination, "examine", lambda context, result=result: result)
        assert main(["doctor", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["faults"] == status
    monkeypatch.setattr(examination, "examine", lambda context: None)
    assert main(["doctor"]) == 0 and capsys.readouterr().out == "", "another rank reports"


def test_a_check_that_fails_is_a_warning(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: JobContext) -> list[Finding]:
        raise ZeroDivisionError("why\nnot")

    monkeypatch.setattr(examination, "OF_A_HOST", {"one": fail, "two": lambda context: [ok("fine")]})
    monkeypatch.setattr(examination, "OF_A_RANK", {"three": lambda context: [fault("bad")]})
    first, *rest = examination.examine_alone(context)
    assert first[:3] == ("here", "one", "warning") and "(ZeroDivisionError: why)" in first.text
    assert rest == [Line("here", "two", "ok", "fine"), Line("here", "three", "fault", "bad")]
    second = replace(context, place=RankPlace(1, 2, 1))
    assert [line.check for line in examination.examine_alone(second)] == ["three"]


def test_ranks_of_a_host() -> None:
    assert expanded("8(x2),4") == [8, 8, 4]
    assert local_ranks({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == 2
    assert local_ranks({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "3"}) == 3, "as `deepspeed` tells it"
    assert local_ranks({"RANK": "0", "WORLD_SIZE": "4"}) == 0
    assert local_ranks({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}) == 4


# Software.


def test_software_that_is_missing_or_wrong(
    context: JobContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requirements = ["torch>=99", "no-such-package>=1", 'zstandard; extra == "zstd"', "tqdm"]
    monkeypatch.setattr(checks.metadata, "requires", lambda name: requirements)
    _, first, second = checks.packages(context)
    assert_finds([first], "fault", "torch>=99", torch.__version__)
    assert_finds([second], "fault", "no-such-package>=1", "missing", "requirements/cpu.txt")
    monkeypatch.setattr(checks, "run_program", lambda *words: Output(-1, "", "no end within 180 s"))
    assert_finds(checks.deepspeed(context), "fault", "deepspeed", "no end within 180 s")
    bare = with_environment(context, PATH=str(tmp_path))
    assert_finds(checks.compiler(bare), "warning", "gcc or clang", "engine.compile=layers")
    assert_finds(checks.compiler(replace(bare, gpus=[V100])), "fault", "Triton's kernels")
    failures = {"triton": {"softmax": "triton is wrong by 3 on V100\nx", "layer_norm": None}, "apex": {}}
    monkeypatch.setattr(checks, "run_program", lambda *words: Output(0, f"noise\n{json.dumps(failures)}\n", ""))
    monkeypatch.setattr(checks, "version_of", lambda name: "3.0")
    text = "(softmax: triton is wrong by 3 on V100)"
    assert_finds(checks.kernels(replace(context, gpus=[V100])), "fault", text)


# GPUs.


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, context: JobContext) -> None:
    def smi(script: str) -> str:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return f"{tmp_path}:{os.environ['PATH']}"

    assert checks.query_gpus(str(tmp_path)) == (None, "")
    gpus, problem = checks.query_gpus(smi("echo NVIDIA-SMI has failed; exit 9"))
    broken = replace(context, gpus=gpus, driver_problem=problem)
    assert_finds(checks.gpus(broken), "fault", "nvidia-smi", "(NVIDIA-SMI has failed)")
    assert_finds(checks.gpus(replace(context, gpus=[])), "warning", "no GPU")
    two_kinds = replace(context, gpus=[V100, replace(V100, name="A100", gib=80.0)])
    assert_finds(checks.gpus(two_kinds), "warning", "1 x Tesla V100 (16 GiB), 1 x A100 (80 GiB)")


def test_a_torch_that_does_not_fit_the_gpus(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(capability=(7, 0), available=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: state.available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "compute_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    volta = replace(context, gpus=[V100])
    assert_finds(
        checks.torch_build(volta), "fault", "Tesla V100 (sm_70)", "sm_75, sm_80, compute_90", "requirements/v100.txt"
    )
    state.capability = (8, 6)
    assert_finds(checks.torch_build(volta), "ok")
    second = replace(volta, place=RankPlace(1, 2, 1))
    assert_finds(checks.gpu_of_rank(second), "fault", "local rank 1", "sees 1")
    assert_finds(checks.gpu_of_rank(replace(second, place=RankPlace(0, 2, 0))), "ok")
    state.available = False
    driver = replace(context, gpus=[replace(V100, driver="535.104.05")])
    assert_finds(checks.torch_build(driver), "fault", "535.104.05", "CUDA 13.0", "580", "requirements/v100.txt")
    hidden = replace(with_environment(context, CUDA_VISIBLE_DEVICES=""), gpus=[V100, V100])
    assert_finds(checks.torch_build(hidden), "fault", "CUDA_VISIBLE_DEVICES is ''", "none of 2")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert_finds(checks.torch_build(volta), "fault", "built for CPUs", "requirements/v100.txt")


# Network.


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "l", "fault"),
        ("NCCL_SOCKET_IFNAME", "l", "ok"),
        ("NCCL_SOCKET_IFNAME", "=l", "fault"),
        ("NCCL_SOCKET_IFNAME", "none,lo", "ok"),
    ],
)
def test_interfaces(context: JobContext, name: str, value: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = list(checks.interfaces(with_environment(context, **{name: value})))
    assert_finds(findings, level, f"{name} is {value}")
    assert level == "fault" or f"{name}={value}" in findings[0].text
    monkeypatch.setattr(checks, "infiniband", lambda: "mlx5_0")
    off = replace(with_environment(context, NCCL_IB_DISABLE="1"), gpus=[V100])
    assert_finds(checks.interfaces(off), "warning", "NCCL_IB_DISABLE is 1", "mlx5_0")


# Files.


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the free bytes of all disks."""
    monkeypatch.setattr(checks, "_WRITTEN_BYTES", 2**20)

    def has(free: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_bavail=free, f_frsize=1))

    return has


def test_room(context: JobContext, disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SLOW", 0.0)
    monkeypatch.setattr(checks, "_file_system", lambda place: "ext4")
    disk(2**29)
    assert_finds(checks.directory(context), "fault", "512.0 MiB free", "1.0 GiB")
    disk(2**31)
    assert_finds(checks.directory(context), "warning", "2.0 GiB free", "20.0 GiB")
    assert not list(context.directory.iterdir())


def test_a_link_in_the_run_directory_is_not_followed(context: JobContext, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("whole")
    (context.directory / f"{checks.PREFIX}here-{os.getpid()}").symlink_to(other)
    assert_finds(checks.directory(context), "fault", "is not writable")
    assert other.read_text() == "whole"


# Limits.


def test_memory(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "host_memory", lambda: HostMemory(8 * 2**30, 2 * 2**30, True))
    assert_finds(checks.memory(context), "fault", "2.0 GiB of 8.0 GiB (limit of the job", "1 rank", "3.0 GiB")
    monkeypatch.setattr(checks, "host_memory", lambda: HostMemory(8 * 2**30, 4 * 2**30, False))
    assert_finds(checks.memory(context), "ok")
    assert_finds(checks.memory(replace(context, local_ranks=2)), "fault", "2 ranks")


def test_limits_of_a_host(context: JobContext, disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    disk(64 * 2**20)
    assert_finds(checks.shared_memory(context), "ok")
    assert_finds(checks.shared_memory(replace(context, local_ranks=8)), "fault", "64 MiB free for 8 ranks")
    values = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: 65536}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr(checks, "infiniband", lambda: "mlx5_0")
    many = replace(context, place=RankPlace(0, 64, 0))
    files, locked = checks.limits(many)
    assert_finds([files], "fault", "open files is 1,024", "64 ranks need 1,280")
    assert_finds([locked], "fault", "locked memory", "mlx5_0")
    values.update(dict.fromkeys(values, resource.RLIM_INFINITY))
    assert_finds(checks.limits(many), "ok")


@pytest.mark.parametrize(
    ("given", "ranks", "host", "level", "text"),
    [
        ("9", 1, 8, "fault", "OMP_NUM_THREADS is 9, but a rank has 8 CPUs"),
        ("8", 2, 8, "fault", "OMP_NUM_THREADS is 8, but a rank has 4 CPUs"),
        ("8", 2, 16, "ok", "8 threads for each of 2 ranks, on 8 CPUs of its own"),
        ("", 2, 8, "warning", "OMP_NUM_THREADS is not set"),
    ],
)
def test_threads(
    context: JobContext, given: str, ranks: int, host: int, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: host)
    (finding,) = checks.threads(replace(with_environment(context, OMP_NUM_THREADS=given), local_ranks=ranks))
    assert finding.level == level and finding.text.startswith(text)


# The job.

GOOD = "Requeue=1 BatchFlag=1 TimeLimit=1-00:00:00 EndTime=2999-01-01T00:00:00"
SIGNAL = "#SBATCH --signal=B:USR1@300\n"


@pytest.mark.parametrize(
    ("record", "script", "level", "text"),
    [
        (GOOD.replace("Requeue=1", "Requeue=0"), SIGNAL, "warning", "--no-requeue"),
        (GOOD.replace("2999", "2020"), SIGNAL, "fault", "300 s before its end"),
        (GOOD.replace("BatchFlag=1", "BatchFlag=0"), "", "warning", "job 7 is interactive"),
        (GOOD, "#SBATCH --time 5\n", "warning", "script of job 7 is none"),
        (GOOD, "#SBATCH --signal=USR1@300", "warning", "job 7 is USR1@300"),
        (GOOD, SIGNAL, "ok", ""),
    ],
)
def test_jobs(
    context: JobContext, record: str, script: str, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = {"show": record, "write": script}
    monkeypatch.setattr(checks, "run_program", lambda words, limit_s: Output(0, shown[words[1]], ""))
    assert_finds(checks.job(with_environment(context, SLURM_JOB_ID="7")), level, text)


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
            for number in range(3):
                group.exchange.get(f"time {number} for 1", 0, 5.0)
                group.exchange.put(f"time {number}", time.time() - 7.0)
                time.sleep(0.4 if number == 0 else 0.0)  # the second answer is late, and does not count
            return []
        return hosts.clocks(group)

    (finding,) = together(answer, groups([tmp_path] * 3))
    assert finding.level == "fault"
    assert "clock of node1 is 7.0 s behind that of node0" in finding.text


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


def test_a_host_that_does_not_answer_is_not_said_to_agree(tmp_path: Path) -> None:
    main, _ = groups([tmp_path] * 2, limit_s=0.2)
    for check in (hosts.clocks, hosts.directory):
        (finding,) = check(main)
        assert finding.level == "warning" and "node1" in finding.text and "within 0 s" in finding.text


def test_a_host_that_cannot_connect_reports_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "examine_alone", lambda context: [])

    for local_rank, error, text in (
        (0, ConfigError("MASTER_PORT must be free"), "MASTER_PORT must be free"),
        (0, TrainingError("for rank 0 at a:1"), "here has waited 9 s for rank 0 at a:1"),
        (0, RuntimeError("odd\nx"), "here cannot connect (RuntimeError: odd)"),
        (1, RuntimeError("odd"), None),
    ):
        context = JobContext(RankPlace(1, 2, local_rank), "here", tmp_path, limit_s=9.0, environment={})
        monkeypatch.setattr(Exchange, "join", Mock(side_effect=error))
        result = examination.examine(context)
        if text is None:
            assert result is None
        else:
            assert result is not None and result.count("fault") == 1 and result.hosts == ["here"]
            (line,) = result.lines
            assert line.text.startswith(text) and line.host != TOGETHER
