"""Checks of Python, the packages, compilers and kernels."""

from __future__ import annotations

import json
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path

from deepspeed_nmt import __version__
from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, ok, run_python, warning
from deepspeed_nmt.parallel.builds import lock_for

_IMPORT_S, _KERNELS_S = 180.0, 300.0
"""Time limits in seconds of importing a package, perhaps from a network file system, and of compiling kernels."""
_KERNELS = """
import json, sys, torch
from deepspeed_nmt.kernels.backends import OPERATIONS, failure, is_installed
device, found = torch.device("cuda", 0), {}
for backend in ("triton", "apex"):
    names = [name for name, backends in OPERATIONS.items() if backend in backends and is_installed(name, backend)]
    found[backend] = {name: failure(name, backend, device, torch.float16) for name in names}
sys.stdout.write(json.dumps(found))
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

        wanted = [Requirement(text) for text in metadata.requires("deepspeed_nmt") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return [ok("the program runs from its source tree, so versions of packages are not checked")]
    found = []
    for requirement in wanted:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            state = "is missing" if version is None else f"is {version}"
            found.append(fault(f"{requirement} must be installed, but {state}; `pip install -r {_lock(context)}`"))
    return found or [ok(f"all {len(wanted)} required packages are installed, in versions that are known to work")]


def version_of(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed; it is not imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch(context: JobContext) -> list[Finding]:
    """Import torch, in this process: the exchange with other ranks needs it."""
    try:
        import torch
    except Exception as error:  # a library of it may be missing or damaged
        reason = str(error).partition("\n")[0]
        return [fault(f"torch must be importable, but is not ({reason}); `pip install -r {_lock(context)}`")]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    return [ok(f"torch {torch.__version__}, built {built}")]


def deepspeed(context: JobContext) -> list[Finding]:
    """Import DeepSpeed, in a process of its own: it may end its process."""
    done = run_python("import deepspeed; print(deepspeed.__version__)", _IMPORT_S)
    if done.status:
        return [
            fault(
                f"deepspeed must be importable for training on several ranks, but is not ({done.problem}); `pip "
                "install -r requirements/common.txt`, or train with engine.name=plain"
            )
        ]
    return [ok(f"DeepSpeed {done.text.split()[-1]} can be imported")]


def compiler(context: JobContext) -> list[Finding]:
    """Look for the C compiler that Triton, torch.compile and DeepSpeed's operations call."""
    named = context.environment.get("CC", "")
    path = context.environment.get("PATH")
    if named and shutil.which(named.split()[0], path=path) is None:
        return [fault(f"CC must name a C compiler, but is {named}, which is not on PATH; unset it or correct it")]
    for name in filter(None, (named.split()[0] if named else "", "gcc", "clang")):
        if found := shutil.which(name, path=path):
            return [ok(f"C compiler {found}")]
    users = "Triton's kernels" if context.has_gpus else "engine.compile=layers and ZeRO's offload"
    text = f"a C compiler is required for {users}, but neither gcc nor clang is on PATH; install gcc, or set CC"
    return [fault(text) if context.has_gpus else warning(text)]


def kernels(context: JobContext) -> list[Finding]:
    """Compile and run the kernels of Triton and apex on a GPU, and compare them with torch."""
    missing = [name for name in ("triton",) if version_of(name) is None]
    if not context.has_gpus:
        return [ok("no GPU, so Triton and apex are not tried")]
    found = []
    if missing:
        found.append(
            warning(
                "triton must be installed for fused operations on a GPU, but is not; they fall back to torch; `pip "
                f"install -r {_lock(context)}`"
            )
        )
    done = run_python(_KERNELS, _KERNELS_S)
    if done.status:
        return [*found, fault(f"kernels must run on the GPU, but the trial ends with an error ({done.problem})")]
    for backend, failures in json.loads(done.text.splitlines()[-1]).items():
        reasons = {name: reason for name, reason in failures.items() if reason}
        if reasons:
            name, reason = next(iter(reasons.items()))
            found.append(
                fault(
                    f"{backend} must compute as torch does, but {', '.join(reasons)} cannot be used ({name}: "
                    f"{reason.partition(chr(10))[0]}); without a remedy these fall back to torch"
                )
            )
        elif failures:
            found.append(ok(f"{backend} runs, and agrees with torch: {', '.join(failures)}"))
        elif backend == "apex":
            found.append(ok("apex is not installed; it is not needed"))
    return found


def _lock(context: JobContext) -> str:
    """Return the lock to install on this host."""
    if not context.gpus:
        return "requirements/cpu.txt"
    return lock_for(context.gpus[0].capability, context.gpus[0].driver)
