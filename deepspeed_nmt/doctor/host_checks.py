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
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from deepspeed_nmt import __version__
from deepspeed_nmt.doctor.findings import NO_END, Finding, HostGpu, JobContext, fault, ok, run_program, warning
from deepspeed_nmt.doctor.trial import Outcome, trial_on_this_host
from deepspeed_nmt.errors import ConfigError, counted, shown, shown_bytes
from deepspeed_nmt.files import system_lines
from deepspeed_nmt.parallel.hardware import UNKNOWN, driver_problem, host_memory, kernel_problem, lock_for

PREFIX = ".doctor-"
"""Beginning of the names of all files that the examination writes."""
_SHM, _INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")
_IMPORT_S, _KERNELS_S, _SMI_S, _SCONTROL_S = 180.0, 300.0, 60.0, 30.0
"""Time limits in seconds of importing a package, perhaps from a network file system, of compiling kernels, of
``nvidia-smi``, which may load the driver first, and of ``scontrol``."""
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
_REQUIRED = ("name", "driver_version", "memory.total", "memory.used")
_STATES = {
    "mig.mode.current": ("Enabled", "MIG mode is on, and NCCL joins no two instances; `nvidia-smi -mig 0`"),
    "persistence_mode": ("Disabled", "persistence mode is off, so each start is slow; `nvidia-smi -pm 1`"),
    "ecc.errors.uncorrected.volatile.total": (
        r"[1-9]\d*", "uncorrected memory errors since the driver was loaded; have it reset, or leave its host out",
    ),
    "clocks_throttle_reasons.hw_slowdown": ("Active", "the clock is slowed down; check cooling and power"),
}  # fmt: skip
"""Fields of ``nvidia-smi`` that some drivers do not know, with bad values; memory errors are a fault."""
_USED_GIB = 1.0
"""Memory (GiB) in use on a GPU that is more than the driver's own."""
_LEAST_BYTES, _FEW_BYTES = 2**30, 20 * 2**30
"""Free bytes below which a run cannot save any model, and below which it cannot save many large ones."""
_WRITTEN_BYTES, _SLOW = 64 * 2**20, 50e6
"""Bytes that are written to measure the speed, and bytes a second below which checkpoints take minutes."""
_MEMORY_OF_A_RANK, _SHM_OF_A_RANK = 3 * 2**30, 64 * 2**20
"""Bytes of host memory that a rank needs for its libraries and buffers, and of shared memory that NCCL takes."""
_FILES, _FILES_OF_A_RANK = 768, 8
"""Open files that a rank needs for itself, and for each other rank."""
_SIGNAL_LEAD_S, _SHORT_S = 300, 1800
"""Seconds before the time limit at which launch/train.sbatch is signalled, and of a job that hardly trains."""
_SIGNAL = re.compile(r"^#SBATCH\s+(?:.*\s)?--signal[=\s]\s*(\S+)", re.MULTILINE)


def packages(context: JobContext) -> Iterator[Finding]:
    """Report Python, and compare the installed packages with the ranges that this package works with."""
    place = Path(__file__).parents[1]
    yield ok(f"Python {platform.python_version()} ({sys.executable}), deepspeed_nmt {__version__} ({place})")
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires("deepspeed_nmt") or ()]
    except metadata.PackageNotFoundError:
        yield ok("the program runs from its source tree, so versions of packages are not checked")
        return
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            state = "missing" if version is None else f"{version} is installed"
            yield fault(f"{requirement} is required, but {state}; `pip install -r {_lock(context)}`")


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _lock(context: JobContext) -> str:
    gpus = context.gpus
    return lock_for(gpus[0].capability, gpus[0].driver) if gpus else "requirements/cpu.txt"


def torch(context: JobContext) -> Iterator[Finding]:
    """Import torch, in this process: the exchange with other ranks needs it."""
    try:
        import torch
    except Exception as error:  # a library of it may be missing or damaged
        reason = str(error).partition("\n")[0]
        yield fault(f"torch cannot be imported ({reason}); `pip install -r {_lock(context)}`")
    else:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
        yield ok(f"torch {torch.__version__}, built {built}")


def deepspeed(context: JobContext) -> Iterator[Finding]:
    """Import DeepSpeed, in a process of its own: it may end its process."""
    done = run_program([sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"], _IMPORT_S)
    if done.status == 0:
        yield ok(f"DeepSpeed {done.text.split()[-1]} can be imported")
    else:
        text = f"deepspeed, by which several ranks train, cannot be imported ({done.problem})"
        yield fault(f"{text}; `pip install -r requirements/common.txt`, or train with engine.name=plain")


def compiler(context: JobContext) -> Iterator[Finding]:
    """Look for the C compiler that Triton, torch.compile and DeepSpeed's operations call."""
    given, path = context.environment.get("CC", ""), context.environment.get("PATH")
    programs = [shutil.which(name, path=path) for name in (given.split()[:1] or ("gcc", "clang"))]
    if any(programs):
        yield ok(f"C compiler {next(filter(None, programs))}")
    elif given:
        yield fault(f"CC is {given}, which is not on PATH; unset it or correct it")
    else:
        users = "Triton's kernels" if context.gpus else "engine.compile=layers and ZeRO's offload"
        text = f"no C compiler (gcc or clang) is on PATH, which {users} require; install gcc, or set CC"
        yield fault(text) if context.gpus else warning(text)


def kernels(context: JobContext) -> Iterator[Finding]:
    """Compile and run the kernels of Triton and apex on a GPU, and compare them with torch."""
    if not context.gpus:
        return
    done = run_program([sys.executable, "-c", _KERNELS], _KERNELS_S)
    if done.status:
        yield fault(f"the trial of kernels on the GPU ended with an error ({done.problem})")
        return
    for backend, failures in json.loads(done.text.splitlines()[-1]).items():
        reasons = {name: reason.partition("\n")[0] for name, reason in failures.items() if reason}
        if reasons:
            name, reason = next(iter(reasons.items()))
            yield fault(f"{backend} fails in {', '.join(reasons)}, for which torch is used ({name}: {reason})")
        elif failures:
            yield ok(f"{backend} runs, and agrees with torch: {', '.join(failures)}")
        elif backend == "triton":
            remedy = f"`pip install -r {_lock(context)}`"
            yield warning(f"triton is not installed, so fused operations fall back to torch; {remedy}")


def query_gpus(path: str | None) -> tuple[list[HostGpu] | None, str]:
    """Return the GPUs of this host, None without ``nvidia-smi`` on ``path``; and the reason if it fails, else ""."""
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return None, ""
    for fields in ((*_REQUIRED, "compute_cap", *_STATES), _REQUIRED):
        done = run_program([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], _SMI_S)
        if done.status == 0:
            rows = csv.reader(done.text.splitlines(), skipinitialspace=True)
            return [_gpu(dict(zip(fields, row, strict=False))) for row in rows if len(row) >= len(_REQUIRED)], ""
    return [], (done.text.strip().splitlines() or [done.problem])[-1]


def _gpu(row: dict[str, str]) -> HostGpu:
    capability = re.fullmatch(r"(\d+)\.(\d+)", row.get("compute_cap", "")) or ("0.0", "0", "0")
    total, used = (float(row[name]) / 1024 if row[name].isdecimal() else 0.0 for name in _REQUIRED[2:])
    return HostGpu(row["name"], row["driver_version"], total, used, (int(capability[1]), int(capability[2])), row)


def gpus(context: JobContext) -> Iterator[Finding]:
    """Report the GPUs, and states of theirs that slow a training down or stop it."""
    if context.gpus is None:
        yield ok("no nvidia-smi, so no NVIDIA GPU here")
    elif reason := context.driver_problem:
        yield fault(f"nvidia-smi fails ({reason}); load the driver, or restart the host after an update of it")
    elif not context.gpus:
        yield warning("nvidia-smi lists no GPU; ask for GPUs when you start the job")
    else:
        kinds = Counter((gpu.name, gpu.gib) for gpu in context.gpus)
        listed = ", ".join(f"{count} x {name} ({size:.0f} GiB)" for (name, size), count in kinds.items())
        yield ok(f"{listed}, driver {context.gpus[0].driver}")
        if len(kinds) > 1:
            yield warning(f"the GPUs are of several kinds, {listed}: the slowest sets the pace")
    gpus = list(enumerate(context.gpus or ()))
    for state, (bad, text) in _STATES.items():
        if numbers := [str(number) for number, gpu in gpus if re.fullmatch(bad, gpu.states.get(state, ""))]:
            yield (fault if state.startswith("ecc") else warning)(f"GPU {', '.join(numbers)}: {text}")
    for number, gpu in gpus:
        if gpu.used_gib > _USED_GIB:
            text = f"GPU {number} has {gpu.used_gib:.1f} of {gpu.gib:.0f} GiB in use"
            yield warning(f"{text}; end the process that nvidia-smi names, or lower batch.micro_tokens")


def torch_build(context: JobContext) -> Iterator[Finding]:
    """Compare torch's build with the GPUs and the driver."""
    import torch

    if torch.cuda.is_available():
        devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        yield ok(f"torch sees {counted(len(devices), 'GPUs')}")
        yield from (fault(problem) for device in devices if (problem := kernel_problem(device)))
        return
    if not context.gpus:
        return
    gpu, visible = context.gpus[0], context.environment.get("CUDA_VISIBLE_DEVICES")
    if torch.version.cuda is None:
        text = f"torch {torch.__version__} is built for CPUs and cannot use the {gpu.name} here"
        yield fault(f"{text}; `pip uninstall -y torch && pip install -r {_lock(context)}`")
    elif problem := driver_problem(gpu.driver, gpu.capability, torch.__version__, torch.version.cuda):
        yield fault(problem)
    elif visible is not None:
        text = f"CUDA_VISIBLE_DEVICES is '{visible}', so torch sees none of {len(context.gpus)} GPUs"
        yield fault(f"{text}; unset it, or ask for GPUs when you start the job")
    else:
        text = f"torch does not see the {gpu.name} that nvidia-smi lists; start the container or the job with its"
        yield fault(f"{text} GPUs, and check that /dev/nvidia* are readable")


def gpu_of_rank(context: JobContext) -> Iterator[Finding]:
    """Check that this rank has a GPU of its own, if there are GPUs."""
    import torch

    from deepspeed_nmt.parallel.world import gpu_of

    if context.gpus and context.place.ranks > 1 and torch.cuda.is_available():
        try:
            gpu_of(context.place.local_rank)
        except ConfigError as error:
            yield fault(str(error))


def names(context: JobContext) -> Iterator[Finding]:
    """Check that this host's name and that of rank 0's host can be resolved."""
    own, master = _addresses(context.host), context.environment.get("MASTER_ADDR")
    several = context.place.ranks > max(1, context.local_ranks)
    if not own and several and not context.environment.get("GLOO_SOCKET_IFNAME"):
        text = f"{context.host} cannot resolve its own name, so gloo would listen on 127.0.0.1 only"
        yield fault(f"{text}; add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to a network interface")
    if master and not _addresses(master):
        text = f"{context.host} cannot resolve MASTER_ADDR {shown(master)}"
        yield fault(f"{text}; give the address of the first host")
    first = f", rank 0 at {master}" if master else ""
    yield ok(f"{context.host} is {', '.join(own) or 'known by no address'}{first}")


def _addresses(name: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(address[4][0]) for address in answers))


def interfaces(context: JobContext) -> Iterator[Finding]:
    """Check that the network interfaces that are named exist, and report what is set for NCCL and gloo."""
    present, devices = [name for _, name in socket.if_nameindex()], infiniband()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        given = context.environment.get(variable, "")
        exact = variable.startswith("GLOO") or given.startswith("=")
        choices = [choice for choice in given.lstrip("=").split(",") if choice]
        fits = any(name == choice if exact else name.startswith(choice) for name in present for choice in choices)
        if choices and not given.startswith("^") and not fits:
            text = f"{variable} is {given}, which is no network interface here ({', '.join(present)})"
            yield fault(f"{text}; correct it, or unset it")
    if devices and context.environment.get("NCCL_IB_DISABLE") == "1" and context.gpus:
        text = f"NCCL_IB_DISABLE is 1, so NCCL does not use InfiniBand ({devices}) but sockets"
        yield warning(f"{text}, which are many times slower; unset it")
    prefixes = ("NCCL_", "GLOO_", "UCX_", "FI_")
    settings = sorted(f"{name}={value}" for name, value in context.environment.items() if name.startswith(prefixes))
    parts = [f"interfaces {', '.join(present)}", f"InfiniBand {devices}" if devices else "", " ".join(settings)]
    yield ok("; ".join(filter(None, parts)))


def infiniband() -> str:
    """Return the names of this host's InfiniBand devices; "" if there are none."""
    with contextlib.suppress(OSError):
        return ", ".join(sorted(path.name for path in _INFINIBAND.iterdir()))
    return ""


@contextlib.contextmanager
def scratch(directory: Path, name: str) -> Iterator[Path]:
    """Yield the path of a file to write in a directory, which is removed at the end."""
    path = directory / f"{PREFIX}{name}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def lock_problem(file: IO[Any]) -> str:
    """Lock a file, and return "", or the reason why it cannot: another host holds it, or there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def directory(context: JobContext) -> Iterator[Finding]:
    """Check that the run directory can be written and locked, has room, and is fast."""
    place, kind, state = context.directory, _file_system(context.directory), os.statvfs(context.directory)
    free = state.f_bavail * state.f_frsize
    block = os.urandom(max(1, min(_WRITTEN_BYTES, free // 4)))
    with scratch(place, f"{context.host}-{os.getpid()}") as path:
        try:
            with path.open("xb") as file:  # a link that lies there is not followed
                began = time.perf_counter()
                file.write(block)
                file.flush()
                os.fsync(file.fileno())
                rate = len(block) / (time.perf_counter() - began)
                no_lock = lock_problem(file)
        except OSError as error:
            remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "change its permissions"
            text = f"the run directory {place} is not writable ({error.strerror}); {remedy}"
            yield fault(f"{text}, or give another --run")
            return
    room, least = shown_bytes(free), _LEAST_BYTES if free < _LEAST_BYTES else _FEW_BYTES
    yield ok(f"{place} is writable ({kind or 'unknown file system'}), {room} free, {rate / 1e6:,.0f} MB/s")
    if free < least:
        text = f"{place} has {room} free; checkpoints need {shown_bytes(least)} or more (see `deepspeed-nmt plan`)"
        yield (fault if free < _LEAST_BYTES else warning)(f"{text}; free some space, or give another --run")
    if no_lock:
        text = f"{place} has no locks ({no_lock}), so nothing prevents a second training of a run"
        yield warning(f"{text}; mount it with locks (Lustre: -o flock)")
    if len(block) >= 2**20 and rate < _SLOW:
        text = f"{place} takes {rate / 1e6:.0f} MB/s, {12e9 / rate / 60:.0f} minutes for a checkpoint of 12 GB"
        yield warning(f"{text}; use a faster file system, or save less often (training.save_every)")
    if kind in ("tmpfs", "ramfs"):
        yield warning(f"{place} is in memory ({kind}), which a restart of the host clears; give another --run")


def _file_system(place: Path) -> str:
    mounts = map(str.split, system_lines("/proc/self/mounts"))
    kinds = {mount.replace("\\040", " "): kind for _, mount, kind, *_ in mounts}
    place = place.resolve()
    return next((kinds[str(path)] for path in (place, *place.parents) if str(path) in kinds), "")


def collectives(context: JobContext) -> Iterator[Finding]:
    """Let ranks on a host that is examined alone add numbers: one for each GPU that torch sees, or two on the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if context.place.ranks == 1 and gpus != 1:
        backend, ranks = ("nccl", gpus) if gpus else ("gloo", 2)
        outcomes = dict(enumerate(trial_on_this_host(backend, ranks, context.limit_s)))
        yield from judge(backend, outcomes, {rank: f"rank {rank}" for rank in outcomes}, 1)


def judge(backend: str, outcomes: Mapping[int, Outcome], names: Mapping[int, str], hosts: int) -> Iterator[Finding]:
    """Yield the findings of the trial of a process group: ``outcomes`` of ranks that answered, ``names`` of all."""
    problems = {name: outcomes[rank].problem if rank in outcomes else "no answer" for rank, name in names.items()}
    problems = {name: problem for name, problem in problems.items() if problem}
    if problems:
        # A rank that waited is no cause.
        who, reason = min(problems.items(), key=lambda item: item[1].startswith(NO_END))
        more = f", and {len(problems) - 1} more cannot" if len(problems) > 1 else ""
        text = f"{who} cannot add numbers by {backend} ({reason}){more}; check the network and firewalls between"
        yield fault(f"{text} the hosts, and name the interface by {backend.upper()}_SOCKET_IFNAME")
        return
    slowest = min(outcome.gigabytes_per_s for outcome in outcomes.values())
    version = next((f"NCCL {outcome.nccl}" for outcome in outcomes.values() if outcome.nccl), backend)
    transports = sorted({name for outcome in outcomes.values() for name in outcome.transports})
    over = f" over {', '.join(transports)}" if transports else ""
    where = f"{len(outcomes)} ranks on {counted(hosts, 'hosts')}"
    yield ok(f"{where} add numbers by {version}{over}: {slowest:.2f} GB/s")
    if hosts > 1 and "NET/Socket" in transports and (devices := infiniband()):
        text = f"NCCL uses sockets between hosts, which are many times slower than InfiniBand ({devices})"
        yield warning(f"{text}; check NCCL_IB_DISABLE, NCCL_IB_HCA, and the limit of locked memory")


def memory(context: JobContext) -> Iterator[Finding]:
    """Compare the memory of the host, or of its control group, with the number of ranks."""
    size, ranks = host_memory(), max(1, context.local_ranks)
    bounded = " (limit of the job or container)" if size.is_limited else ""
    state = f"memory: {shown_bytes(size.available)} of {shown_bytes(size.total)}{bounded} are free"
    state += f" for {counted(ranks, 'ranks')}"
    if size.available < ranks * _MEMORY_OF_A_RANK:
        need = f"each needs {shown_bytes(_MEMORY_OF_A_RANK)} before the model"
        yield fault(f"{state}, but {need}; ask for more (SLURM: --mem), or start fewer ranks")
    elif size.available < UNKNOWN:
        yield ok(state)


def shared_memory(context: JobContext) -> Iterator[Finding]:
    """Check the size of /dev/shm, over which NCCL joins GPUs of a host that cannot reach each other directly."""
    state, ranks = os.statvfs(_SHM), max(1, context.local_ranks)
    free = state.f_bavail * state.f_frsize
    if free >= ranks * _SHM_OF_A_RANK:
        yield ok(f"{shown_bytes(free)} free in {_SHM}")
    else:
        need = f"{counted(ranks, 'ranks')}, each of which needs {_SHM_OF_A_RANK >> 20} MiB"
        text = f"{_SHM} has {free >> 20} MiB free for {need}; give the container more (`docker run --ipc=host` or"
        yield fault(f"{text} `--shm-size 8g`), or remove files of dead processes")


def limits(context: JobContext) -> Iterator[Finding]:
    """Check the limits of open files and, for InfiniBand, of locked memory."""
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    needed, unlimited = _FILES + _FILES_OF_A_RANK * context.place.ranks, resource.RLIM_INFINITY
    if unlimited != files < needed:
        text = f"the limit of open files is {files:,}, but {counted(context.place.ranks, 'ranks')} need {needed:,}"
        yield fault(f"{text}; `ulimit -n 65536` before the start, or ask the administrator")
    else:
        yield ok(f"open files: {'unlimited' if files == unlimited else f'{files:,}'}")
    if locked != unlimited and (devices := infiniband()):
        text = f"locked memory is limited to {shown_bytes(locked)}, but InfiniBand ({devices}) needs it unlimited"
        yield fault(f"{text}; `ulimit -l unlimited` in slurmd's unit (LimitMEMLOCK=infinity) or the container")


def threads(context: JobContext) -> Iterator[Finding]:
    """Compare the threads of all ranks of this host with its CPUs."""
    allowed, ranks = len(os.sched_getaffinity(0)), max(1, context.local_ranks)
    # Ranks that are bound have CPUs of their own, otherwise they share those of the host.
    bound = ranks > 1 and allowed * ranks <= (os.cpu_count() or 1)
    cpus = max(1, allowed if bound else allowed // ranks)
    given = context.environment.get("OMP_NUM_THREADS", "")
    if given and not given.replace(",", "").isdecimal():
        yield fault(f"OMP_NUM_THREADS is '{given}', which is no number; correct it")
    elif not given and ranks > 1:
        text = f"OMP_NUM_THREADS is not set, so each of {ranks} ranks may start as many threads as there are CPUs"
        yield warning(f"{text}; export OMP_NUM_THREADS={cpus}")
    elif (count := int(given.partition(",")[0]) if given else allowed) > cpus:
        text = f"OMP_NUM_THREADS is {count}, but a rank has {counted(cpus, 'CPUs')}: threads wait for one another"
        yield fault(f"{text}, which is many times slower; lower it, or ask for more CPUs (SLURM: --cpus-per-task)")
    else:
        of_each = f" for each of {ranks} ranks" if ranks > 1 else ""
        yield ok(f"{counted(count, 'threads')}{of_each}, on {allowed} CPUs{' of its own' if bound else ''}")


def job(context: JobContext) -> Iterator[Finding]:
    """Check time limit, signal and requeueing of the job that this process belongs to."""
    number = context.environment.get("SLURM_JOB_ID")
    if context.place.rank or number is None:
        return
    done = run_program(["scontrol", "show", "job", number, "--oneliner"], _SCONTROL_S)
    if done.status:
        yield warning(f"scontrol cannot show job {number} ({done.problem}), so the job cannot requeue itself")
        return
    record = dict(word.split("=", 1) for word in done.text.split() if "=" in word)
    with contextlib.suppress(KeyError, ValueError):  # without a time limit
        left = (datetime.fromisoformat(record["EndTime"]) - datetime.now()) // timedelta(seconds=1)
        text = f"job {number} has {left // 60:,} minutes left (--time {record.get('TimeLimit')})"
        if left < _SIGNAL_LEAD_S + 60:
            yield fault(f"{text}, but is told {_SIGNAL_LEAD_S} s before its end to save; raise --time")
        elif left < _SHORT_S:
            yield warning(f"{text}, and each start takes minutes; raise --time to an hour or more")
        else:
            yield ok(text)
    lost = "queued again after preemption or the loss of a node"
    if record.get("Requeue") == "1":
        yield ok(f"job {number} is {lost}")
    else:
        yield warning(f"job {number} is not {lost} (--no-requeue); submit it with --requeue")
    if record.get("BatchFlag") != "1":
        text = f"job {number} is interactive, so it is neither signalled before its time limit nor queued again"
        yield warning(f"{text}; for a long training `sbatch launch/train.sbatch`")
        return
    script = run_program(["scontrol", "write", "batch_script", number, "-"], _SCONTROL_S)
    match = _SIGNAL.search(script.text)
    signal = context.environment.get("SBATCH_SIGNAL") or (match.group(1) if match else "none")
    fits = re.fullmatch(r"\w*B\w*:(?:SIG)?(?:USR1|10)(?:@(\d+))?", signal, re.IGNORECASE)
    if fits and int(fits.group(1) or 60) >= 60:
        yield ok(f"the batch shell is signalled before the time limit (--signal {signal})")
    else:  # one on the command line of sbatch is not visible here
        text = f"--signal in the script of job {number} is {signal}, but it expects USR1 a minute before the end"
        yield warning(f"{text}; `#SBATCH --signal=B:USR1@300`, as in launch/train.sbatch")


def tasks(context: JobContext) -> Iterator[Finding]:
    """Compare the tasks on this host with its GPUs."""
    environment, ranks = context.environment, context.local_ranks
    if "SLURM_STEP_ID" not in environment or not ranks:
        return
    own = environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = len(context.gpus or ()) if visible is None else len([gpu for gpu in visible.split(",") if gpu])
    text = f"this node has {counted(ranks, 'tasks')} and {counted(gpus, 'GPUs')}"
    if not context.gpus or own or ranks == gpus:
        yield ok(text)
    else:
        yield (fault if ranks > gpus else warning)(f"{text}; `--ntasks-per-node {max(1, gpus)}`")


Check = Callable[[JobContext], Iterable[Finding]]


def _by_name(*checks: Check) -> dict[str, Check]:
    return {check.__name__.replace("_", " "): check for check in checks}


OF_A_HOST = _by_name(
    packages, torch, gpus, deepspeed, compiler, kernels, names, interfaces, directory, memory, shared_memory, limits,
    job, tasks, collectives,
)  # fmt: skip
"""Checks that the first rank of each host makes, by name."""
OF_A_RANK = _by_name(torch_build, gpu_of_rank, threads)
"""Checks that every rank makes, by name."""
