"""Checks of GPUs, their driver, and torch's build for them."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from collections.abc import Mapping

from deepspeed_nmt.doctor.findings import Finding, HostGpu, JobContext, fault, ok, run_program, warning
from deepspeed_nmt.errors import ConfigError, counted
from deepspeed_nmt.parallel.builds import driver_problem, lock_for

_QUERY_S = 60.0
"""Time limit of ``nvidia-smi`` in seconds; without the persistence mode it loads the driver first."""
_REQUIRED = ("name", "driver_version", "memory.total", "memory.used")
_OPTIONAL = (
    *("compute_cap", "mig.mode.current", "persistence_mode", "ecc.errors.uncorrected.volatile.total"),
    *("clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"),
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
"""Fields of ``nvidia-smi`` that some drivers do not know."""
_SLOW = {field: field.rpartition(".")[2] for field in _OPTIONAL if "throttle" in field}
_USED_GIB = 1.0
"""Memory (GiB) in use on a GPU that is more than the driver's own."""


def query(path: str | None) -> tuple[list[HostGpu] | None, str]:
    """Return the GPUs of this host, None without ``nvidia-smi``; and the reason if it fails, else "".

    Args:
        path: directories of programs.
    """
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return None, ""
    for fields in ((*_REQUIRED, *_OPTIONAL), (*_REQUIRED, "compute_cap"), _REQUIRED):
        done = run_program([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"], _QUERY_S)
        if done.status == 0:
            rows = csv.reader(done.text.splitlines(), skipinitialspace=True)
            return [_gpu(dict(zip(fields, row, strict=False))) for row in rows if len(row) >= len(_REQUIRED)], ""
    return [], (done.text.strip().splitlines() or [done.problem])[-1]


def _gpu(row: Mapping[str, str]) -> HostGpu:
    """Return the GPU of a row of ``nvidia-smi``."""
    major, _, minor = row.get("compute_cap", "").partition(".")
    capability = (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)
    sizes = [float(row[name]) / 1024 if row[name].isdecimal() else 0.0 for name in ("memory.total", "memory.used")]
    return HostGpu(row["name"], row["driver_version"], sizes[0], sizes[1], capability, dict(row))


def gpus(context: JobContext) -> list[Finding]:
    """Report the GPUs, and states of theirs that slow a training down or stop it."""
    if context.gpus is None:
        return [ok("no nvidia-smi, so no NVIDIA GPU here")]
    if context.driver_problem:
        return [
            fault(
                f"nvidia-smi must list the GPUs, but fails ({context.driver_problem}); load the driver, or restart "
                "the host after an update of it"
            )
        ]
    if not context.gpus:
        return [warning("nvidia-smi should list a GPU, but lists none; ask for GPUs when you start the job")]
    kinds = Counter((gpu.name, gpu.gib) for gpu in context.gpus)
    listed = ", ".join(f"{count} x {name} ({size:.0f} GiB)" for (name, size), count in kinds.items())
    found = [ok(f"{listed}, driver {context.gpus[0].driver}")]
    if len(kinds) > 1:
        found.append(
            warning(f"the GPUs of a host should be of one kind, but are {listed}: the slowest sets the pace")
        )
    for number, gpu in enumerate(context.gpus):
        found += _states(number, gpu)
    if any(gpu.states.get("persistence_mode") == "Disabled" for gpu in context.gpus):
        found.append(
            warning(
                "the persistence mode of GPUs should be on, but is off, so each start loads the driver anew; "
                "`nvidia-smi -pm 1` as root"
            )
        )
    return found


def _states(number: int, gpu: HostGpu) -> list[Finding]:
    """Return what is wrong with a GPU."""
    found, name = [], f"GPU {number} ({gpu.name})"
    if gpu.states.get("mig.mode.current") == "Enabled":
        found.append(
            warning(
                f"{name} should not be divided for training on several ranks, but its MIG mode is on, and NCCL joins "
                f"no two instances of a GPU; `nvidia-smi -i {number} -mig 0` as root"
            )
        )
    errors = gpu.states.get("ecc.errors.uncorrected.volatile.total", "")
    if errors.isdecimal() and int(errors):
        found.append(
            fault(
                f"{name} must have no uncorrected memory errors, but has {errors} since the driver was loaded; have "
                f"it reset (`nvidia-smi -i {number} -r`), or leave its host out"
            )
        )
    slow = [reason for field, reason in _SLOW.items() if gpu.states.get(field) == "Active"]
    if slow:
        found.append(
            warning(f"{name} should run at its full clock, but is slowed down ({', '.join(slow)}); check its cooling")
        )
    if gpu.used_gib > _USED_GIB:
        found.append(
            warning(
                f"{name} should be free, but {gpu.used_gib:.1f} of {gpu.gib:.0f} GiB are in use; end the process "
                "that nvidia-smi names, or lower batch.micro_tokens"
            )
        )
    return found


def torch_build(context: JobContext) -> list[Finding]:
    """Compare torch's build with the GPUs and the driver."""
    try:
        import torch

        from deepspeed_nmt.parallel.device import kernel_problem
    except Exception:  # the check of torch reports it
        return []
    if not torch.cuda.is_available():
        return [_invisible(context)] if context.gpus else []
    found = []
    for number in range(torch.cuda.device_count()):
        if problem := kernel_problem(torch.device("cuda", number)):
            found.append(fault(problem))
    return found or [ok(f"torch sees {counted(torch.cuda.device_count(), 'GPUs')}, and has kernels for all it sees")]


def _invisible(context: JobContext) -> Finding:
    """Return the reason for which torch sees no GPU although the driver does."""
    import torch

    assert context.gpus
    gpu = context.gpus[0]
    if torch.version.cuda is None:
        return fault(
            f"torch must be built for CUDA to use the {gpu.name} here, but {torch.__version__} is built for CPUs; "
            f"`pip install -r {lock_for(gpu.capability, gpu.driver)}`"
        )
    if problem := driver_problem(gpu.driver, gpu.capability, torch.__version__, torch.version.cuda):
        return fault(problem)
    if (visible := context.environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return fault(
            f"CUDA_VISIBLE_DEVICES must name a GPU, but is '{visible}', so torch sees none of {len(context.gpus)}; "
            "unset it, or ask for GPUs when you start the job"
        )
    return fault(
        f"torch must see the {gpu.name} that nvidia-smi lists, but sees no GPU; start the container or the job with "
        "its GPUs, and check that /dev/nvidia* are readable"
    )


def gpu_of_rank(context: JobContext) -> list[Finding]:
    """Check that this rank has a GPU of its own, if there are GPUs."""
    if not context.has_gpus or context.place.ranks == 1:
        return []
    try:
        import torch

        from deepspeed_nmt.parallel.world import gpu_of
    except Exception:  # the check of torch reports it
        return []
    if not torch.cuda.is_available():  # the check of torch's build reports it
        return []
    try:
        gpu_of(context.place.local_rank)
    except ConfigError as error:
        return [fault(str(error))]
    return []
