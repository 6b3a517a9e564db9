"""Checks of one host: software, GPUs, network, files, limits and the job.

A check is a function from a :class:`JobContext` to findings. It imports what it examines inside the function, in a
process of its own where a library may end the process or never return.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import json
import math
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path

from deepspeed_nmt import __version__
from deepspeed_nmt.doctor.findings import (
    Finding,
    HostGpu,
    JobContext,
    fault,
    gib,
    ok,
    run_program,
    run_python,
    warning,
)
from deepspeed_nmt.errors import ConfigError, counted, shown
from deepspeed_nmt.parallel.hardware import UNKNOWN, driver_problem, host_memory, kernel_problem, lock_for
from deepspeed_nmt.parallel.launched import expanded

_ROOT, _SHM = Path("/"), Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MOUNTS = Path("/proc/self/mounts")

# Software.

_IMPORT_S, _KERNELS_S = 180.0, 300.0
"""Time limits in seconds of importing a package, perhaps from a network file system, and of compiling kernels."""
_KERNELS = """
import json, sys, torch
from deepspeed_nmt.kernels.choice import OPERATIONS, failure, is_installed
device, failures = torch.device("cuda", 0), {}
for backend in ("triton", "apex"):
    names = [name for name, backends in OPERATIONS.items() if backend in backends and is_installed(name, backend)]
    failures[backend] = {name: failure(name, backend, device, torch.float16) for name in names}
sys.stdout.write(json.dumps(failures))
"""
"""Program that compiles every kernel, and compares it with torch on a few numbers."""


def python(context: JobContext) -> list[Finding]:
    """Report Python and this package."""
    place = Path(__file__).parents[1]
    return [ok(f"Python {platform.python_version()} ({sys.executable}), deepspeed_nmt {__version__} ({place})")]


def packages(context: JobContext) -> list[Finding]:
    """Compare the installed packages with the ranges that this package works with."""
    try:
        from packaging.requirements import Requirement

        requirements = [Requirement(text) for text in metadata.requires("deepspeed_nmt") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return [ok("the program runs from its source tree, so versions of packages are not checked")]
    problems = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            state = "missing" if version is None else f"{version} is installed"
            problems.append(fault(f"{requirement} is required, but {state}; `pip install -r {_lock(context)}`"))
    return problems or [
        ok(f"all {len(requirements)} required packages are installed, in versions that are known to work")
    ]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lock(context: JobContext) -> str:
    gpus = context.gpus
    return lock_for(gpus[0].capability, gpus[0].driver) if gpus else "requirements/cpu.txt"


def torch(context: JobContext) -> list[Finding]:
    """Import torch, in this process: the exchange with other ranks needs it."""
    try:
        import torch
    except Exception as error:  # a library of it may be missing or damaged
        reason = str(error).partition("\n")[0]
        return [fault(f"torch cannot be imported ({reason}); `pip install -r {_lock(context)}`")]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return [ok(f"torch {torch.__version__}, built {built}")]


def deepspeed(context: JobContext) -> list[Finding]:
    """Import DeepSpeed, in a process of its own: it may end its process."""
    done = run_python("import deepspeed; print(deepspeed.__version__)", _IMPORT_S)
    if done.status == 0:
        return [ok(f"DeepSpeed {done.text.split()[-1]} can be imported")]
    return [
        fault(
            f"deepspeed, by which several ranks train, cannot be imported ({done.problem}); `pip install -r "
            "requirements/common.txt`, or train with engine.name=plain"
        )
    ]


def compiler(context: JobContext) -> list[Finding]:
    """Look for the C compiler that Triton, torch.compile and DeepSpeed's operations call."""
    command, path = context.environment.get("CC", ""), context.environment.get("PATH")
    if command and shutil.which(command.split()[0], path=path) is None:
        return [fault(f"CC is {command}, which is not on PATH; unset it or correct it")]
    for name in filter(None, (*command.split()[:1], "gcc", "clang")):
        if program := shutil.which(name, path=path):
            return [ok(f"C compiler {program}")]
    users = "Triton's kernels" if context.gpus else "engine.compile=layers and ZeRO's offload"
    text = f"no C compiler (gcc or clang) is on PATH, which {users} require; install gcc, or set CC"
    return [fault(text) if context.gpus else warning(text)]


def kernels(context: JobContext) -> list[Finding]:
    """Compile and run the kernels of Triton and apex on a GPU, and compare them with torch."""
    if not context.gpus:
        return [ok("no GPU, so Triton and apex are not tried")]
    findings = []
    if version_of("triton") is None:
        findings.append(
            warning(
                f"triton is not installed, so fused operations fall back to torch; `pip install -r {_lock(context)}`"
            )
        )
    done = run_python(_KERNELS, _KERNELS_S)
    if done.status:
        return [*findings, fault(f"the trial of kernels on the GPU ended with an error ({done.problem})")]
    for backend, failures in json.loads(done.text.splitlines()[-1]).items():
        reasons = {name: reason.partition("\n")[0] for name, reason in failures.items() if reason}
        if reasons:
            name, reason = next(iter(reasons.items()))
            findings.append(
                fault(f"{backend} fails in {', '.join(reasons)}, for which torch is used ({name}: {reason})")
            )
        elif failures:
            findings.append(ok(f"{backend} runs, and agrees with torch: {', '.join(failures)}"))
        elif backend == "apex":
            findings.append(ok("apex is not installed; it is not needed"))
    return findings


# GPUs.

_SMI_S = 60.0
"""Time limit of ``nvidia-smi`` in seconds; without the persistence mode it loads the driver first."""
_REQUIRED = ("name", "driver_version", "memory.total", "memory.used")
_OPTIONAL = (
    *("compute_cap", "mig.mode.current", "persistence_mode", "ecc.errors.uncorrected.volatile.total"),
    *("clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"),
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
"""Fields of ``nvidia-smi`` that some drivers do not know."""
_USED_GIB = 1.0
"""Memory (GiB) in use on a GPU that is more than the driver's own."""


def query_gpus(path: str | None) -> tuple[list[HostGpu] | None, str]:
    """Return the GPUs of this host, None without ``nvidia-smi``; and the reason if it fails, else "".

    Args:
        path: directories of programs.
    """
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return None, ""
    for fields in ((*_REQUIRED, *_OPTIONAL), (*_REQUIRED, "compute_cap"), _REQUIRED):
        done = run_program([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], _SMI_S)
        if done.status == 0:
            rows = csv.reader(done.text.splitlines(), skipinitialspace=True)
            return [_gpu(dict(zip(fields, row, strict=False))) for row in rows if len(row) >= len(_REQUIRED)], ""
    return [], (done.text.strip().splitlines() or [done.problem])[-1]


def _gpu(row: Mapping[str, str]) -> HostGpu:
    major, _, minor = row.get("compute_cap", "").partition(".")
    capability = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    sizes = [float(row[name]) / 1024 if row[name].isdecimal() else 0.0 for name in ("memory.total", "memory.used")]
    return HostGpu(row["name"], row["driver_version"], sizes[0], sizes[1], capability, dict(row))


def gpus(context: JobContext) -> list[Finding]:
    """Report the GPUs, and states of theirs that slow a training down or stop it."""
    if context.gpus is None:
        return [ok("no nvidia-smi, so no NVIDIA GPU here")]
    if reason := context.driver_problem:
        return [fault(f"nvidia-smi fails ({reason}); load the driver, or restart the host after an update of it")]
    if not context.gpus:
        return [warning("nvidia-smi lists no GPU; ask for GPUs when you start the job")]
    kinds = Counter((gpu.name, gpu.gib) for gpu in context.gpus)
    listed = ", ".join(f"{count} x {name} ({size:.0f} GiB)" for (name, size), count in kinds.items())
    findings = [ok(f"{listed}, driver {context.gpus[0].driver}")]
    if len(kinds) > 1:
        findings.append(warning(f"the GPUs are of several kinds, {listed}: the slowest sets the pace"))
    for number, gpu in enumerate(context.gpus):
        findings += _states(f"GPU {number} ({gpu.name})", f"nvidia-smi -i {number}", gpu)
    if any(gpu.states.get("persistence_mode") == "Disabled" for gpu in context.gpus):
        findings.append(
            warning(
                "the persistence mode of GPUs is off, so each start loads the driver anew; `nvidia-smi -pm 1` as root"
            )
        )
    return findings


def _states(name: str, command: str, gpu: HostGpu) -> Iterator[Finding]:
    if gpu.states.get("mig.mode.current") == "Enabled":
        yield warning(
            f"{name} is in MIG mode, and NCCL joins no two instances of a GPU; to train on several ranks, "
            f"`{command} -mig 0` as root"
        )
    errors = gpu.states.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        yield fault(
            f"{name} has {errors} uncorrected memory errors since the driver was loaded; have it reset "
            f"(`{command} -r`), or leave its host out"
        )
    reasons = [
        field.rpartition(".")[2] for field in _OPTIONAL if "throttle" in field and gpu.states.get(field) == "Active"
    ]
    if reasons:
        yield warning(f"{name} is slowed down ({', '.join(reasons)}); check its cooling")
    if gpu.used_gib > _USED_GIB:
        yield warning(
            f"{name} has {gpu.used_gib:.1f} of {gpu.gib:.0f} GiB in use; end the process that nvidia-smi names, or "
            "lower batch.micro_tokens"
        )


def torch_build(context: JobContext) -> list[Finding]:
    """Compare torch's build with the GPUs and the driver."""
    try:
        import torch
    except Exception:  # the check of torch reports it
        return []
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        problems = [fault(text) for n in range(count) if (text := kernel_problem(torch.device("cuda", n)))]
        return problems or [ok(f"torch sees {counted(count, 'GPUs')}, and has kernels for all it sees")]
    if not context.gpus:
        return []
    gpu, visible = context.gpus[0], context.environment.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        text = (
            f"torch {torch.__version__} is built for CPUs and cannot use the {gpu.name} here; `pip install -r "
            f"{lock_for(gpu.capability, gpu.driver)}`"
        )
    elif problem := driver_problem(gpu.driver, gpu.capability, torch.__version__, torch.version.cuda):
        text = problem
    elif visible is not None:
        text = (
            f"CUDA_VISIBLE_DEVICES is '{visible}', so torch sees none of {len(context.gpus)} GPUs; unset it, or ask "
            "for GPUs when you start the job"
        )
    else:
        text = (
            f"torch does not see the {gpu.name} that nvidia-smi lists; start the container or the job with its GPUs, "
            "and check that /dev/nvidia* are readable"
        )
    return [fault(text)]


def gpu_of_rank(context: JobContext) -> list[Finding]:
    """Check that this rank has a GPU of its own, if there are GPUs."""
    if not context.gpus or context.place.ranks == 1:
        return []
    try:
        import torch

        from deepspeed_nmt.parallel.world import gpu_of
    except Exception:  # the check of torch reports it
        return []
    if torch.cuda.is_available():  # else the check of torch's build reports it
        try:
            gpu_of(context.place.local_rank)
        except ConfigError as error:
            return [fault(str(error))]
    return []


# Network.

_DEFAULT_PORT = 29500
"""Port of `deepspeed` and `torchrun`, unless another one is given."""
_LAUNCHER_PORTS = (20000, 30000)
"""Range of the ports that launch/*.sbatch choose."""


def names(context: JobContext) -> list[Finding]:
    """Check that this host's name and that of rank 0's host can be resolved."""
    problems, own = [], _addresses(context.host)
    several = context.place.ranks > max(1, context.local_ranks)
    if not own and several and not context.environment.get("GLOO_SOCKET_IFNAME"):
        problems.append(
            fault(
                f"{context.host} cannot resolve its own name, so gloo would listen on 127.0.0.1 only; add it to "
                "/etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface"
            )
        )
    master = context.environment.get("MASTER_ADDR")
    if master and not _addresses(master):
        problems.append(
            fault(f"{context.host} cannot resolve MASTER_ADDR {shown(master)}; give the address of the first host")
        )
    first = f", rank 0 at {master}" if master else ""
    return problems or [ok(f"{context.host} is {', '.join(own) or 'known by no address'}{first}")]


def _addresses(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[4][0]) for address in answers))


def interfaces(context: JobContext) -> list[Finding]:
    """Check that the network interfaces that are named exist, and report what is set for NCCL and gloo."""
    present, problems = [name for _, name in socket.if_nameindex()], []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = context.environment.get(variable, "")
        exact = variable.startswith("GLOO") or given.startswith("=")
        choices = [choice for choice in given.lstrip("=").split(",") if choice]
        fits = any(name == choice if exact else name.startswith(choice) for name in present for choice in choices)
        if choices and not given.startswith("^") and not fits:
            problems.append(
                fault(
                    f"{variable} is {given}, which is no network interface here ({', '.join(present)}); correct it, "
                    "or unset it"
                )
            )
    devices = ", ".join(infiniband())
    if devices and context.environment.get("NCCL_IB_DISABLE") == "1" and context.gpus:
        problems.append(
            warning(
                f"NCCL_IB_DISABLE is 1, so NCCL does not use InfiniBand ({devices}) but sockets, which are many "
                "times slower; unset it"
            )
        )
    prefixes = ("NCCL_", "GLOO_", "UCX_", "FI_")
    settings = sorted(f"{name}={value}" for name, value in context.environment.items() if name.startswith(prefixes))
    parts = [f"interfaces {', '.join(present)}", f"InfiniBand {devices}" if devices else "", " ".join(settings)]
    return problems or [ok("; ".join(filter(None, parts)))]


def infiniband() -> list[str]:
    """Return the names of this host's InfiniBand devices."""
    try:
        return sorted(path.name for path in _INFINIBAND.iterdir())
    except OSError:
        return []


def port(context: JobContext) -> list[Finding]:
    """Check the port of the rendezvous, and the range from which launchers choose it."""
    problems, (least, most) = [], _LAUNCHER_PORTS
    try:
        low, high = map(int, _text(_EPHEMERAL).split())
    except ValueError:  # not known
        low, high = 65536, 0
    if low < most and high > least:
        problems.append(
            warning(
                f"this system gives ports {low} to {high} to outgoing connections, also those of rank 0, {least} to "
                f"{most}; `sysctl net.ipv4.ip_local_port_range='32768 60999'` as root"
            )
        )
    if context.place.ranks > 1:  # rank 0 listens there itself
        return problems
    given = context.environment.get("MASTER_PORT", "")
    if given and not (given.isdecimal() and 0 < int(given) < 65536):
        return [*problems, fault(f"MASTER_PORT is {shown(given)}, which is no port; set a number from 1024 to 65535")]
    number = int(given or _DEFAULT_PORT)
    if _is_free(number):
        return problems or [ok(f"port {number} is free")]
    if given:
        return [*problems, fault(f"something listens on MASTER_PORT {number}; choose another")]
    text = f"something listens on port {number}, the default of `deepspeed` and `torchrun`"
    return [*problems, warning(f"{text}; start them with --master_port and another number")]


def _is_free(number: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", number))
        except OSError:
            return False
    return True


# Files.

PREFIX = ".doctor-"
"""Beginning of the names of all files that the examination writes."""
_LEAST_BYTES, _FEW_BYTES = 2**30, 20 * 2**30
"""Free bytes below which a run cannot save any model, and below which it cannot save many large ones."""
_LEAST_FILES = 1000
_WRITTEN_BYTES = 64 * 2**20
"""Bytes that are written to measure the speed."""
_SLOW = 50e6
"""Bytes a second below which checkpoints take minutes."""
_VOLATILE = ("tmpfs", "ramfs")


@contextlib.contextmanager
def scratch(directory: Path, name: str) -> Iterator[Path]:
    """Yield the path of a file to write in a directory; it is removed at the end.

    Args:
        directory: where to write.
        name: of the file, after the prefix that all of the examination have.
    """
    path = directory / f"{PREFIX}{name}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def directory(context: JobContext) -> list[Finding]:
    """Check that the run directory can be written and locked, has room, and is fast."""
    place, kind = context.directory, _file_system(context.directory)
    with scratch(place, f"{context.host}-{os.getpid()}") as path:
        try:
            with path.open("xb") as file:  # a link that lies there is not followed
                file.write(b"x")
        except OSError as error:
            remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "change its permissions"
            text = f"the run directory {place} is not writable ({error.strerror}); {remedy}, or give another --run"
            return [fault(text)]
        findings = [_room(place), *_locks(path), *_speed(path)]
    if kind in _VOLATILE:
        findings.append(
            warning(f"{place} is in memory ({kind}), which a restart of the host clears; give another --run")
        )
    return [ok(f"{place} is writable ({kind or 'unknown file system'})"), *findings]


def _room(place: Path) -> Finding:
    state = os.statvfs(place)
    free = state.f_bavail * state.f_frsize
    if state.f_files and state.f_favail < _LEAST_FILES:
        return fault(f"{place} has room for {state.f_favail:,} files, but a run has {_LEAST_FILES:,}; remove some")
    if free < _LEAST_BYTES:
        return fault(
            f"{place} has {gib(free)} free, but checkpoints need {gib(_LEAST_BYTES)} or more; free some space, or "
            "give another --run"
        )
    if free < _FEW_BYTES:
        return warning(
            f"{place} has {gib(free)} free, and large models need {gib(_FEW_BYTES)}; `deepspeed-nmt plan` counts "
            "what a run needs"
        )
    return ok(f"{gib(free)} free")


def _locks(path: Path) -> list[Finding]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"{path.parent} has no locks ({error.strerror}), so nothing prevents a second training of a run"
            return [warning(f"{text}; mount it with locks (Lustre: -o flock)")]
    return []


def _speed(path: Path) -> list[Finding]:
    state = os.statvfs(path.parent)
    size = min(_WRITTEN_BYTES, state.f_bavail * state.f_frsize // 4)
    block = os.urandom(2**20)
    try:
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        path.write_bytes(b"")
    except OSError as error:
        return [fault(f"{path.parent} does not take what is written ({error.strerror}); check quota and disk")]
    if size < 2**20:
        return []
    rate = size / seconds
    if rate < _SLOW:
        return [
            warning(
                f"{path.parent} takes {rate / 1e6:.0f} MB/s, {12e9 / rate / 60:.0f} minutes for a checkpoint of 12 "
                "GB; use a faster file system, or save less often (training.save_every)"
            )
        ]
    return [ok(f"{rate / 1e6:,.0f} MB/s written and synchronised")]


def _file_system(place: Path) -> str:
    best, kind, real = "", "", str(place.resolve())
    for line in _text(_MOUNTS).splitlines():
        words = line.split()
        mount = words[1].replace("\\040", " ")
        if len(mount) >= len(best) and f"{real}/".startswith(f"{mount.rstrip('/')}/"):
            best, kind = mount, words[2]
    return kind


def temporary(context: JobContext) -> list[Finding]:
    """Check the directories in which torch, Triton and DeepSpeed compile."""
    home = Path(context.environment.get("HOME", "/"))
    triton = Path(context.environment.get("TRITON_CACHE_DIR", home / ".triton/cache"))
    places = {"TMPDIR": Path(tempfile.gettempdir()), "TRITON_CACHE_DIR": triton}
    problems = [
        fault(f"{existing(place)}, in which kernels are compiled, is not writable; set {variable}")
        for variable, place in places.items()
        if not os.access(existing(place), os.W_OK)
    ]
    return problems or [ok(f"temporary files in {places['TMPDIR']}")]


def existing(path: Path) -> Path:
    """Return a directory, or the nearest parent of it that exists."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# Limits.

_MEMORY_OF_A_RANK = 3 * 2**30
"""Bytes of host memory that a rank needs for its libraries and buffers."""
_SHM_OF_A_RANK = 64 * 2**20
"""Bytes of shared memory that NCCL takes for a rank."""
_FILES, _FILES_OF_A_RANK = 768, 8
"""Open files that a rank needs for itself, and for each other rank."""


def memory(context: JobContext) -> list[Finding]:
    """Compare the memory of the host, or of its control group, with the number of ranks."""
    size, ranks = host_memory(_ROOT), max(1, context.local_ranks)
    if size.available >= UNKNOWN:
        return [ok("the memory of this host is not known")]
    bounded = " (limit of the job or container)" if size.is_limited else ""
    state = f"{gib(size.available)} of {gib(size.total)}{bounded} are free for {counted(ranks, 'ranks')}"
    if size.available < ranks * _MEMORY_OF_A_RANK:
        need = f"each needs {gib(_MEMORY_OF_A_RANK)} before the model"
        return [fault(f"memory: {state}, but {need}; ask for more (SLURM: --mem), or start fewer ranks")]
    findings = [ok(f"memory: {state}")]
    if _text(_ROOT / "proc/sys/vm/overcommit_memory").strip() == "2":
        findings.append(
            warning(
                "vm.overcommit_memory is 2, so CUDA may be refused the addresses that it reserves; `sysctl "
                "vm.overcommit_memory=0` as root"
            )
        )
    return findings


def shared_memory(context: JobContext) -> list[Finding]:
    """Check the size of /dev/shm, over which NCCL joins GPUs of a host that cannot reach each other directly."""
    try:
        state = os.statvfs(_SHM)
    except OSError as error:
        return [warning(f"{_SHM}, which NCCL uses, cannot be read ({error.strerror}); mount it")]
    free, ranks = state.f_bavail * state.f_frsize, max(1, context.local_ranks)
    if free >= ranks * _SHM_OF_A_RANK:
        return [ok(f"{gib(free)} of {gib(state.f_blocks * state.f_frsize)} free in {_SHM}")]
    return [
        fault(
            f"{_SHM} has {free / 2**20:.0f} MiB free for {counted(ranks, 'ranks')}, each of which needs "
            f"{_SHM_OF_A_RANK >> 20} MiB; give the container more (`docker run --ipc=host` or `--shm-size 8g`), or "
            "remove files that dead processes left there"
        )
    ]


def limits(context: JobContext) -> list[Finding]:
    """Check the limits of open files, locked memory and processes."""
    problems, unlimited = [], resource.RLIM_INFINITY
    files, locked, processes = (
        resource.getrlimit(kind)[0]
        for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_NPROC)
    )
    needed = _FILES + _FILES_OF_A_RANK * context.place.ranks
    if files != unlimited and files < needed:
        problems.append(
            fault(
                f"the limit of open files is {files:,}, but {counted(context.place.ranks, 'ranks')} need {needed:,}; "
                "`ulimit -n 65536` before the start, or ask the administrator"
            )
        )
    if locked != unlimited and infiniband():
        problems.append(
            fault(
                f"locked memory is limited to {gib(locked)}, but InfiniBand ({', '.join(infiniband())}) needs it "
                "unlimited; `ulimit -l unlimited` in slurmd's unit (LimitMEMLOCK=infinity) or the container"
            )
        )
    if processes != unlimited and processes < 1024:
        problems.append(
            warning(f"the limit of processes and threads is {processes:,}; `ulimit -u 4096` before the start")
        )
    values = {"open files": files, "locked memory": locked, "processes": processes}
    texts = (f"{name} {'unlimited' if value == unlimited else f'{value:,}'}" for name, value in values.items())
    return problems or [ok(f"limits: {', '.join(texts)}")]


def threads(context: JobContext) -> list[Finding]:
    """Compare the threads of all ranks of this host with its CPUs."""
    allowed, ranks = len(os.sched_getaffinity(0)), max(1, context.local_ranks)
    # Ranks that are bound have CPUs of their own, otherwise they share those of the host.
    bound = ranks > 1 and allowed * ranks <= (os.cpu_count() or 1)
    cpus = max(1, allowed if bound else allowed // ranks)
    given = context.environment.get("OMP_NUM_THREADS", "")
    if given and not given.replace(",", "").isdecimal():
        return [fault(f"OMP_NUM_THREADS is '{given}', which is no number; correct it")]
    if not given and ranks > 1:
        text = f"OMP_NUM_THREADS is not set, so each of {ranks} ranks may start as many threads as there are CPUs"
        return [warning(f"{text}; export OMP_NUM_THREADS={cpus}")]
    count = int(given.partition(",")[0]) if given else allowed
    state = counted(count, "threads") + (f" for each of {ranks} ranks" if ranks > 1 else "")
    if count > cpus:
        return [
            fault(
                f"OMP_NUM_THREADS is {count}, but a rank has {counted(cpus, 'CPUs')}: threads wait for one another, "
                "which is many times slower; lower it, or ask for more CPUs (SLURM: --cpus-per-task)"
            )
        ]
    quota = _cpu_quota()
    if quota < count * (1 if bound else ranks):
        text = f"the job or container may use {quota:.1f} CPUs for {state}"
        return [warning(f"{text}; raise its limit, or lower OMP_NUM_THREADS")]
    return [ok(f"{state}, on {allowed} CPUs{' of its own' if bound else ''}")]


def _cpu_quota() -> float:
    """Return the number of CPUs that the control group may use; inf without a limit."""
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        words = _text(_ROOT / "sys/fs/cgroup" / path.lstrip("/") / "cpu.max").split()
        if controllers == "" and len(words) == 2 and words[0].isdecimal():
            return int(words[0]) / int(words[1])
    return math.inf


# The job.

_SCONTROL_S = 30.0
_SIGNAL_LEAD_S, _SHORT_S = 300, 1800
"""Seconds before the time limit at which launch/train.sbatch is signalled, and of a job that hardly trains."""
_SIGNAL = re.compile(r"^#SBATCH\s+(?:.*\s)?--signal[=\s]\s*(\S+)", re.MULTILINE)


def job(context: JobContext) -> list[Finding]:
    """Check time limit, signal and requeueing of the job that this process belongs to."""
    number = context.environment.get("SLURM_JOB_ID")
    if context.place.rank:
        return []
    if number is None:
        return [ok("no SLURM job")]
    if shutil.which("scontrol", path=context.environment.get("PATH")) is None:
        return [warning(f"scontrol is not on PATH, so job {number} cannot requeue itself")]
    done = run_program(["scontrol", "show", "job", number, "--oneliner"], _SCONTROL_S)
    if done.status:
        return [warning(f"scontrol cannot show job {number} ({done.problem}), so the job cannot requeue itself")]
    record = dict(word.split("=", 1) for word in done.text.split() if "=" in word)
    if record.get("Requeue") == "1":
        requeue = ok(f"job {number} is queued again after preemption or the loss of a node")
    else:
        text = f"job {number} is not queued again after preemption or the loss of a node (--no-requeue)"
        requeue = warning(f"{text}; submit it with --requeue")
    return [_time(record, number), requeue, _signal(context, record, number)]


def _time(record: Mapping[str, str], number: str) -> Finding:
    try:
        left = datetime.fromisoformat(record["EndTime"]) - datetime.now()
    except (KeyError, ValueError):
        return ok(f"job {number} has no time limit")
    text = f"job {number} has {left // timedelta(minutes=1):,} minutes left (--time {record.get('TimeLimit')})"
    if left.total_seconds() < _SIGNAL_LEAD_S + 60:
        return fault(f"{text}, but is told {_SIGNAL_LEAD_S} s before its end to save; raise --time")
    if left.total_seconds() < _SHORT_S:
        return warning(f"{text}, and each start takes minutes; raise --time to an hour or more")
    return ok(text)


def _signal(context: JobContext, record: Mapping[str, str], number: str) -> Finding:
    if record.get("BatchFlag") != "1":
        return warning(
            f"job {number} is interactive, so it is neither signalled before its time limit nor queued again; for a "
            "long training `sbatch launch/train.sbatch`"
        )
    script = run_program(["scontrol", "write", "batch_script", number, "-"], _SCONTROL_S)
    match = _SIGNAL.search(script.text)
    signal = context.environment.get("SBATCH_SIGNAL") or (match.group(1) if match else "")
    if not signal:
        return warning(
            f"the script of job {number} has no --signal before its time limit (one on sbatch's command line is not "
            "visible here); `#SBATCH --signal=B:USR1@300`, as in launch/train.sbatch"
        )
    kinds, _, seconds = signal.partition("@")
    name = kinds.rpartition(":")[2].upper().removeprefix("SIG")
    if name not in ("USR1", "10") or "B" not in kinds.partition(":")[0].upper():
        text = f"--signal of job {number} is {signal}, but its batch shell expects USR1"
        return warning(f"{text}; `--signal=B:USR1@300`")
    if seconds.isdecimal() and int(seconds) < 60:
        text = f"--signal of job {number} is {signal}, which leaves too little time for an update and a checkpoint"
        return warning(f"{text}; `--signal=B:USR1@300`")
    return ok(f"the batch shell is signalled before the time limit (--signal {signal})")


def tasks(context: JobContext) -> list[Finding]:
    """Compare the tasks on this host with its GPUs."""
    environment, ranks, problems = context.environment, context.local_ranks, []
    if "SLURM_STEP_ID" not in environment or not ranks:
        return []
    counts = expanded(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(set(counts)) > 1:
        problems.append(
            warning(f"the nodes have different numbers of tasks, {', '.join(map(str, counts))}; `--ntasks-per-node`")
        )
    own = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = len(context.gpus or ()) if visible is None else len([gpu for gpu in visible.split(",") if gpu])
    if context.gpus and not own and ranks != gpus:
        text = f"this node has {counted(ranks, 'tasks')} and {counted(gpus, 'GPUs')}"
        text += f"; `--ntasks-per-node {max(1, gpus)}`"
        problems.append(fault(text) if ranks > gpus else warning(text))
    return problems or [ok(f"{counted(ranks, 'tasks')} on a node")]


Check = Callable[[JobContext], list[Finding]]
OF_A_HOST: dict[str, Check] = {
    "python": python,
    "packages": packages,
    "torch": torch,
    "gpu": gpus,
    "deepspeed": deepspeed,
    "compiler": compiler,
    "kernels": kernels,
    "names": names,
    "interfaces": interfaces,
    "port": port,
    "directory": directory,
    "temporary": temporary,
    "memory": memory,
    "shm": shared_memory,
    "limits": limits,
    "job": job,
    "tasks": tasks,
}
"""Checks that the first rank of each host makes, by name."""
OF_A_RANK: dict[str, Check] = {"torch build": torch_build, "gpu of rank": gpu_of_rank, "threads": threads}
"""Checks that every rank makes, by name."""
