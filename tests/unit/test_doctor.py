"""Checks of `doctor` that need no other rank: each planted fault has its sentence."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.commands import doctor as command
from deepspeed_nmt.doctor import examination, files, gpu, job, limits, network, software, table
from deepspeed_nmt.doctor.examination import TOGETHER, Line, Result
from deepspeed_nmt.doctor.findings import Finding, HostGpu, JobContext, Output, fault, ok, run_program
from deepspeed_nmt.doctor.report import json_of, text_of
from deepspeed_nmt.parallel.launched import RankPlace, expanded, local_ranks

V100 = HostGpu("Tesla V100", "580.65", 16.0, 0.1, (7, 0))


@pytest.fixture
def context(tmp_path: Path) -> JobContext:
    """One rank on a host without GPUs."""
    return JobContext(RankPlace(0, 1, 0), "here", tmp_path, environment={"PATH": os.environ["PATH"]}, local_ranks=1)


def with_environment(context: JobContext, **environment: str) -> JobContext:
    return replace(context, environment={**context.environment, **environment})


def only(findings: list[Finding], level: str) -> str:
    """Return the text of the single finding that is not ok, which has this level."""
    (found,) = (finding for finding in findings if finding.level != "ok")
    assert found.level == level
    return found.text


def lines(*levels: str) -> list[Line]:
    return [Line("here", "a check", level, f"text {level}") for level in levels]


# The command.


def test_the_status_is_1_after_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for levels, status in ((("ok", "warning"), 0), (("ok", "fault"), 1)):
        result = Result(lines(*levels), ["here"], 1)
        monkeypatch.setattr(examination, "examine", lambda context, result=result: result)
        assert main(["doctor", "--json"]) == status
        assert json.loads(capsys.readouterr().out)["faults"] == status
    monkeypatch.setattr(examination, "examine", lambda context: None)
    assert main(["doctor"]) == 0 and capsys.readouterr().out == "", "another rank reports"


@pytest.mark.parametrize("seconds", ["0", "nan", "1e9"])
def test_the_time_limit_is_checked(
    seconds: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_examine", lambda arguments: 0)
    assert main(["doctor", "--timeout", seconds]) == 2
    assert "--timeout must be from 1 to 3600 seconds, but is" in capsys.readouterr().err


def test_equal_lines_of_hosts_are_printed_once() -> None:
    found = [Line(host, "shm", "ok", "enough") for host in ("b", "a")]
    found += [Line("b", "limits", "fault", "few"), Line(TOGETHER, "clocks", "ok", "agree")]
    result = Result(found, ["a", "b"], 2)
    assert list(text_of(result)) == [
        *("a, b", "  ok     shm     enough", "b", "  fault  limits  few"),
        *("all hosts", "  ok     clocks  agree", "2 hosts, 2 ranks: 1 fault, 0 warnings"),
    ]
    assert [each["hosts"] for each in json_of(result)["findings"]] == [["a", "b"], ["b"], []]
    assert list(text_of(Result([], ["a"], 1)))[-1] == "1 host, 1 rank: no fault"


def test_a_check_that_fails_is_a_warning(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(context: JobContext) -> list[Finding]:
        raise ZeroDivisionError("why\nnot")

    monkeypatch.setattr(examination, "OF_A_HOST", {"one": fail, "two": lambda context: [ok("fine")]})
    monkeypatch.setattr(examination, "OF_A_RANK", {"three": lambda context: [fault("bad")]})
    assert examination.examine_alone(context) == [
        Line("here", "one", "warning", "this check could not be made (ZeroDivisionError: why)"),
        Line("here", "two", "ok", "fine"),
        Line("here", "three", "fault", "bad"),
    ]
    second = replace(context, place=RankPlace(1, 2, 1))
    assert [line.check for line in examination.examine_alone(second)] == ["three"]


def test_every_check_has_a_name_and_a_sentence_about_it() -> None:
    assert all(check.__doc__ for check in [*table.OF_A_HOST.values(), *table.OF_A_RANK.values()])


def test_a_program_that_hangs_or_is_missing_is_an_output() -> None:
    assert run_program(["sleep", "9"], 0.1) == Output(-1, "", "no end within 0 s")
    assert run_program(["no-such-program"], 1.0) == Output(-1, "", "No such file or directory")
    assert run_program(["sh", "-c", "echo out; echo one >&2; echo two >&2; exit 3"], 9.0) == Output(3, "out\n", "two")


def test_ranks_of_a_host() -> None:
    assert expanded("8(x2),4") == [8, 8, 4]
    assert local_ranks({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}) == 2
    assert local_ranks({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "3"}) == 3, "as `deepspeed` tells it"
    assert local_ranks({"RANK": "0", "WORLD_SIZE": "4"}) == 0
    assert local_ranks({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}) == 4


def test_ranks_of_a_step_get_a_rendezvous(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examination, "run_program", lambda words, limit_s: Output(0, "node7\nnode8\n", ""))
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is removed at the end
        monkeypatch.delenv(name)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1001", "SLURM_STEP_NODELIST": "node[7-8]"}.items():
        monkeypatch.setenv(name, value)
    found = examination.context_of(RankPlace(1, 2, 0), tmp_path / "run/of/mine", 9.0)
    assert (found.environment["MASTER_ADDR"], found.environment["MASTER_PORT"]) == ("node7", "27007")
    assert found.directory == tmp_path, "nothing is made"


# Software.


def test_a_torch_that_cannot_be_imported(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    text = only(software.torch(replace(context, gpus=[V100])), "fault")
    assert text.startswith("torch must be importable, but is not (") and "requirements/v100.txt" in text
    assert gpu.torch_build(context) == [] and examination._alone(context) == []


def test_wrong_packages(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "no-such-package>=1", 'zstandard; extra == "zstd"', "tqdm"]
    monkeypatch.setattr(software.metadata, "requires", lambda name: wanted)
    first, second = (finding.text for finding in software.packages(context))
    assert first.startswith(f"torch>=99 must be installed, but is {torch.__version__}; `pip install -r ")
    assert second == "no-such-package>=1 must be installed, but is missing; `pip install -r requirements/cpu.txt`"


def test_a_deepspeed_that_does_not_end(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "run_python", lambda *words: Output(-1, "", "no end within 180 s"))
    assert "must be importable for training on several ranks, but is not (no end within 180 s)" in only(
        software.deepspeed(context), "fault"
    )


def test_a_missing_compiler(context: JobContext, tmp_path: Path) -> None:
    bare = with_environment(context, PATH=str(tmp_path))
    assert "engine.compile=layers and ZeRO's offload, but neither gcc nor clang" in only(
        software.compiler(bare), "warning"
    )
    assert "required for Triton's kernels" in only(software.compiler(replace(bare, gpus=[V100])), "fault")
    named = with_environment(context, CC="no-such-cc -m64")
    assert only(software.compiler(named), "fault").startswith("CC must name a C compiler, but is no-such-cc -m64")


def test_kernels_that_fail(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = {"triton": {"softmax": "triton is wrong by 3 on V100\nx", "layer_norm": None}, "apex": {}}
    monkeypatch.setattr(software, "run_python", lambda *words: Output(0, f"noise\n{json.dumps(failures)}\n", ""))
    text = only(software.kernels(replace(context, gpus=[V100])), "fault")
    assert (
        "triton must compute as torch does, but softmax cannot be used (softmax: triton is wrong by 3 on V100)"
        in text
    )


# GPUs.


def smi(tmp_path: Path, script: str) -> str:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, context: JobContext) -> None:
    assert gpu.query(str(tmp_path)) == (None, "")
    old = smi(tmp_path, 'case "$1" in *compute_cap*) echo unknown field; exit 2;; esac; echo "K80, 418.1, 11441, 5"')
    assert gpu.query(old)[0] == [HostGpu("K80", "418.1", 11441 / 1024, 5 / 1024, (0, 0), gpu.query(old)[0][0].states)]
    found, problem = gpu.query(smi(tmp_path, "echo NVIDIA-SMI has failed; exit 9"))
    broken = replace(context, gpus=found, driver_problem=problem)
    assert "nvidia-smi must list the GPUs, but fails (NVIDIA-SMI has failed)" in only(gpu.gpus(broken), "fault")
    assert only(gpu.gpus(replace(context, gpus=[])), "warning").startswith(
        "nvidia-smi should list a GPU, but lists none"
    )
    assert gpu.gpus(context)[0].level == "ok"


def test_gpus_of_two_kinds(context: JobContext) -> None:
    text = only(gpu.gpus(replace(context, gpus=[V100, replace(V100, name="A100", gib=80.0)])), "warning")
    assert "should be of one kind, but are 1 x Tesla V100 (16 GiB), 1 x A100 (80 GiB)" in text


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch that is built for CUDA, with a GPU whose facts tests change."""
    found = SimpleNamespace(
        capability=(7, 0), architectures=["sm_75", "sm_80", "sm_90", "compute_90"], available=True
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found.available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: found.architectures)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return found


def test_a_torch_without_kernels_for_the_gpu(context: JobContext, cuda: SimpleNamespace) -> None:
    volta = replace(context, gpus=[V100])
    text = only(gpu.torch_build(volta), "fault")
    assert text.startswith("torch must have kernels for its GPU, the Tesla V100 (sm_70), but ")
    assert text.endswith("has them for sm_75, sm_80, sm_90, compute_90; `pip install -r requirements/v100.txt`")
    cuda.capability = (8, 6)
    assert gpu.torch_build(volta)[0].level == "ok"


def test_a_driver_that_is_too_old(context: JobContext, cuda: SimpleNamespace) -> None:
    cuda.available = False
    text = only(gpu.torch_build(replace(context, gpus=[replace(V100, driver="535.104.05")])), "fault")
    assert "the NVIDIA driver must be 580 or newer for torch " in text and "(CUDA 13.0), but is 535.104.05" in text
    assert text.endswith("update the driver, or `pip install -r requirements/v100.txt`")
    text = only(gpu.torch_build(replace(context, gpus=[replace(V100, driver="470.1")])), "fault")
    assert text.endswith("but is 470.1; update the driver"), "no lock would help"


def test_gpus_that_torch_does_not_see(context: JobContext, cuda: SimpleNamespace) -> None:
    cuda.available = False
    hidden = replace(with_environment(context, CUDA_VISIBLE_DEVICES=""), gpus=[V100, V100])
    assert "CUDA_VISIBLE_DEVICES must name a GPU, but is '', so torch sees none of 2" in only(
        gpu.torch_build(hidden), "fault"
    )
    text = only(gpu.torch_build(replace(context, gpus=[V100])), "fault")
    assert text.startswith("torch must see the Tesla V100 that nvidia-smi lists, but sees no GPU")
    assert gpu.torch_build(context) == [], "no GPU, no check"


def test_a_rank_without_a_gpu(context: JobContext, cuda: SimpleNamespace) -> None:
    second = replace(context, gpus=[V100], place=RankPlace(1, 2, 1))
    assert only(gpu.gpu_of_rank(second), "fault").startswith("local rank 1 needs a GPU of its own, but sees 1")
    assert gpu.gpu_of_rank(replace(second, place=RankPlace(0, 2, 0))) == []


# Network.


def test_names_that_do_not_resolve(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_addresses", lambda name: [])
    several = replace(context, place=RankPlace(0, 2, 0))
    text = only(network.names(several), "fault")
    assert text.startswith("the name of each host must resolve, but here does not know its own")
    assert network.names(context)[0].level == "ok", "a single host needs no name"
    assert network.names(with_environment(several, GLOO_SOCKET_IFNAME="lo"))[0].level == "ok"
    text = only(network.names(with_environment(context, MASTER_ADDR="nowhere")), "fault")
    assert text.startswith("MASTER_ADDR must be a name or address that every host resolves, but here cannot")


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", True),
        ("GLOO_SOCKET_IFNAME", "l", False),
        ("NCCL_SOCKET_IFNAME", "l", True),
        ("NCCL_SOCKET_IFNAME", "=l", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "none,lo", True),
    ],
)
def test_interfaces(context: JobContext, name: str, value: str, fits: bool) -> None:
    findings = network.interfaces(with_environment(context, **{name: value}))
    if fits:
        assert [finding.level for finding in findings] == ["ok"] and f"{name}={value}" in findings[0].text
    else:
        assert only(findings, "fault").startswith(
            f"{name} must name a network interface of each host, but is {value}"
        )


def test_infiniband_that_is_switched_off(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "infiniband", lambda: ["mlx5_0"])
    off = replace(with_environment(context, NCCL_IB_DISABLE="1"), gpus=[V100])
    text = only(network.interfaces(off), "warning")
    assert text.startswith("NCCL should use InfiniBand (mlx5_0), but NCCL_IB_DISABLE is 1")


def test_ports(context: JobContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(network, "_is_free", lambda number: number != 29500)
    monkeypatch.setattr(network, "_EPHEMERAL", tmp_path / "range")
    assert only(network.port(context), "warning").startswith("port 29500, the default of `deepspeed` and `torchrun`")
    assert network.port(with_environment(context, MASTER_PORT="29501"))[0].level == "ok"
    assert "but is 'x'" in only(network.port(with_environment(context, MASTER_PORT="x")), "fault")
    (tmp_path / "range").write_text("1024\t65535\n")
    text = only(network.port(replace(context, place=RankPlace(0, 2, 0))), "warning")
    assert text.startswith(
        "ports 20000 to 30000 should be free for rank 0, but this system gives ports 1024 to 65535"
    )


def test_transports_of_nccl() -> None:
    log = """
h:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
h:1:2 [0] NCCL INFO Channel 00/08 :    0   1   2   3
h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
h:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA
h:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 2[0] [receive] via NET/Socket/1
h:1:2 [0] NCCL INFO Channel 01 : 1[1] -> 0[0] via SHM/direct/direct
"""
    used, devices = network.transports(log.splitlines())
    assert used == {"P2P/CUMEM", "NET/IB with GPUDirect", "NET/Socket", "SHM"}
    assert devices == {"IB: [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"}


# Files.


def statvfs(monkeypatch: pytest.MonkeyPatch, free: int, nodes: int = 10**6) -> None:
    state = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=free, f_files=nodes, f_favail=nodes)
    monkeypatch.setattr(os, "statvfs", lambda place: state)


@pytest.mark.parametrize(
    ("free", "nodes", "level", "text"),
    [
        (2**29, 10**6, "fault", "the run directory must have 1.0 GiB free for checkpoints, but "),
        (2**31, 10**6, "warning", "the run directory should have 20.0 GiB free, but "),
        (2**40, 7, "fault", " must have room for 1,000 files, but has for 7"),
    ],
)
def test_room(
    context: JobContext, free: int, nodes: int, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WRITTEN_BYTES", 2**20)
    monkeypatch.setattr(files, "_SLOW", 0.0)
    monkeypatch.setattr(files, "_VOLATILE", ())
    statvfs(monkeypatch, free, nodes)
    assert text in only(files.directory(context), level)
    assert not list(context.directory.iterdir())


def test_a_file_system_that_is_slow_volatile_and_without_locks(
    context: JobContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(files, "_WRITTEN_BYTES", 2**20)
    monkeypatch.setattr(files, "_SLOW", 1e15)
    monkeypatch.setattr(files, "_file_system", lambda place: "tmpfs")
    monkeypatch.setattr(fcntl, "flock", refuse)
    statvfs(monkeypatch, 2**40)
    found = [finding.text for finding in files.directory(context) if finding.level == "warning"]
    assert [text.partition(", but ")[0] for text in found] == [
        "the run directory should be on a file system with locks",
        "the run directory should take 1000000000 MB/s",
        "the run directory should outlast a restart of the host",
    ]
    assert "has none (Function not implemented)" in found[0] and "is in memory (tmpfs)" in found[2]


def test_the_file_system_is_the_one_mounted_last_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nx {tmp_path} lustre rw 0 0\ny {tmp_path}x nfs rw 0 0\n")
    monkeypatch.setattr(files, "_MOUNTS", mounts)
    assert files._file_system(tmp_path) == "lustre" and files._file_system(Path("/")) == "ext4"


def test_a_cache_that_cannot_be_written(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: not str(place).startswith("/proc"))
    text = only(files.temporary(with_environment(context, TRITON_CACHE_DIR="/proc/none")), "fault")
    assert text == "kernels are compiled in /proc, which must be writable, but is not; set TRITON_CACHE_DIR"


# Limits.


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that writes a file of /proc, or with a path that begins with cgroup/ of the control groups."""
    monkeypatch.setattr(limits, "_ROOT", tmp_path)

    def write(path: str, text: str) -> None:
        place = tmp_path / (f"sys/fs/{path}" if path.startswith("cgroup/") else f"proc/{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    write("meminfo", "MemTotal: 134217728 kB\nMemAvailable: 100000000 kB\n")
    return write


def test_little_memory(context: JobContext, system: Callable[[str, str], None]) -> None:
    assert [finding.level for finding in limits.memory(context)] == ["ok"]
    system("self/cgroup", "0::/job/step\n")
    system("cgroup/job/memory.max", f"{8 * 2**30}\n")
    system("cgroup/job/memory.current", f"{6 * 2**30}\n")
    system("cgroup/job/step/memory.max", "max\n")
    text = only(limits.memory(context), "fault")
    assert text.startswith("each rank needs 3.0 GiB of this host's memory before the model, but 2.0 GiB of 8.0 GiB")
    assert "(limit of the job or container) are free for 1 rank" in text
    system("cgroup/job/memory.stat", f"inactive_file {2 * 2**30}\n")
    assert limits.memory(context)[0].text.startswith("memory: 4.0 GiB of 8.0 GiB"), "the cache of files is no use"
    system("self/cgroup", "4:memory:/old\n")
    system("cgroup/memory/old/memory.limit_in_bytes", f"{2**30}\n")
    assert "of 1.0 GiB" in only(limits.memory(context), "fault")


def test_memory_that_is_not_overcommitted(context: JobContext, system: Callable[[str, str], None]) -> None:
    system("sys/vm/overcommit_memory", "2\n")
    assert only(limits.memory(context), "warning").startswith("vm.overcommit_memory should be 0 or 1, but is 2")


def test_little_shared_memory(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    statvfs(monkeypatch, 64 * 2**20)
    assert limits.shared_memory(context)[0].level == "ok"
    text = only(limits.shared_memory(replace(context, local_ranks=8)), "fault")
    assert text.startswith("/dev/shm must have 64 MiB free for each rank of this host, but has 64 MiB for 8")


def test_limits_of_a_process(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: 65536, resource.RLIMIT_NPROC: 100}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (values[kind], resource.RLIM_INFINITY))
    monkeypatch.setattr(limits, "infiniband", lambda: ["mlx5_0"])
    many = replace(context, place=RankPlace(0, 64, 0))
    assert [finding.text.partition(", but ")[0] for finding in limits.processes(many)] == [
        "the limit of open files must be at least 1,280 for 64 ranks",
        "locked memory must be unlimited for InfiniBand (mlx5_0)",
        "the limit of processes and threads should be at least 1,024",
    ]
    values.update(dict.fromkeys(values, resource.RLIM_INFINITY))
    assert [finding.level for finding in limits.processes(many)] == ["ok"]


@pytest.mark.parametrize(
    ("given", "ranks", "cpus", "host", "level", "text"),
    [
        ("8", 1, 8, 8, "ok", "8 threads"),
        ("9", 1, 8, 8, "fault", "OMP_NUM_THREADS must not exceed the CPUs of a rank (8), but is 9"),
        ("4", 2, 8, 8, "ok", "4 threads for each of 2 ranks"),
        ("8", 2, 8, 8, "fault", "OMP_NUM_THREADS must not exceed the CPUs of a rank (4), but is 8"),
        ("8", 2, 8, 16, "ok", "8 threads for each of 2 ranks, on 8 CPUs of its own"),
        ("", 2, 8, 8, "warning", "OMP_NUM_THREADS should be set for 2 ranks on a host, but is not"),
        ("many", 1, 8, 8, "fault", "OMP_NUM_THREADS must be a number, but is 'many'"),
    ],
)
def test_threads(
    context: JobContext,
    given: str,
    ranks: int,
    cpus: int,
    host: int,
    level: str,
    text: str,
    system: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cpus)))
    monkeypatch.setattr(os, "cpu_count", lambda: host)
    (found,) = limits.threads(replace(with_environment(context, OMP_NUM_THREADS=given), local_ranks=ranks))
    assert found.level == level and found.text.startswith(text)
    system("self/cgroup", "0::/\n")
    system("cgroup/cpu.max", "50000 100000\n")
    if level == "ok":
        text = only(
            limits.threads(replace(with_environment(context, OMP_NUM_THREADS=given), local_ranks=ranks)), "warning"
        )
        assert text.startswith("the job or container should have a CPU for each thread, but may use 0.5 for ")


# The job.


def job_of(monkeypatch: pytest.MonkeyPatch, record: str, script: str = "#SBATCH --signal=B:USR1@300\n") -> None:
    """Let scontrol show this record, and this batch script."""
    monkeypatch.setattr(job.shutil, "which", lambda name, path: name)
    monkeypatch.setattr(
        job, "run_program", lambda words, limit_s: Output(0, record if words[1] == "show" else script, "")
    )


GOOD = "Requeue=1 BatchFlag=1 TimeLimit=1-00:00:00 EndTime=2999-01-01T00:00:00"


@pytest.mark.parametrize(
    ("record", "script", "level", "text"),
    [
        (GOOD.replace("Requeue=1", "Requeue=0"), None, "warning", "job 7 should be queued again after preemption"),
        (GOOD.replace("2999", "2020"), None, "fault", "a job must be longer than the 300 s before its end"),
        (
            GOOD.replace("BatchFlag=1", "BatchFlag=0"),
            "",
            "warning",
            "job 7 should be a batch job for a long training",
        ),
        (
            GOOD,
            "#SBATCH --time 5\n",
            "warning",
            "job 7 should be signalled before its time limit, but its script has no",
        ),
        (
            GOOD,
            "#SBATCH --signal=USR1@300",
            "warning",
            "the batch shell of job 7 should get USR1 before the time limit",
        ),
        (GOOD, "#SBATCH -N 2 --signal B:USR1@9", "warning", "job 7 should be signalled a minute or more before"),
        (GOOD, None, "ok", ""),
        (GOOD.replace("EndTime=2999-01-01T00:00:00", "EndTime=Unknown"), None, "ok", ""),
    ],
)
def test_jobs(
    context: JobContext, record: str, script: str | None, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_of(monkeypatch, record) if script is None else job_of(monkeypatch, record, script)
    findings = job.job(with_environment(context, SLURM_JOB_ID="7"))
    if level == "ok":
        assert {finding.level for finding in findings} == {"ok"}
    else:
        assert only(findings, level).startswith(text)


def test_a_job_without_its_controller(context: JobContext, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = with_environment(context, SLURM_JOB_ID="7")
    monkeypatch.setattr(job.shutil, "which", lambda name, path: None)
    assert only(job.job(inside), "warning").startswith("scontrol should be on PATH in a SLURM job")
    monkeypatch.setattr(job.shutil, "which", lambda name, path: name)
    monkeypatch.setattr(job, "run_program", lambda words, limit_s: Output(1, "", "refused"))
    assert "scontrol should show job 7, but cannot (refused)" in only(job.job(inside), "warning")
    assert job.job(context)[0].level == "ok" and job.job(replace(inside, place=RankPlace(1, 2, 0))) == []


def test_tasks_and_gpus(context: JobContext) -> None:
    step = with_environment(context, SLURM_STEP_ID="0", SLURM_STEP_TASKS_PER_NODE="2(x2)")
    four, two = replace(step, gpus=[V100] * 4, local_ranks=2), replace(step, gpus=[V100], local_ranks=2)
    assert "must have one task for each GPU, but has 2 tasks and 4 GPUs; `--ntasks-per-node 4`" in only(
        job.tasks(four), "warning"
    )
    assert "but has 2 tasks and 1 GPU; `--ntasks-per-node 1`" in only(job.tasks(two), "fault")
    assert job.tasks(with_environment(four, CUDA_VISIBLE_DEVICES="2,3"))[0].level == "ok"
    assert job.tasks(with_environment(two, SLURM_GPUS_PER_TASK="v100:1"))[0].level == "ok"
    uneven = with_environment(step, SLURM_STEP_TASKS_PER_NODE="2,1")
    text = only(job.tasks(replace(uneven, local_ranks=2)), "warning")
    assert text.startswith("all nodes should have as many tasks, but have 2, 1")
