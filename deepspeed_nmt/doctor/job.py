"""Checks of a SLURM job: its time, its signals, its tasks."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from datetime import datetime, timedelta

from deepspeed_nmt.doctor.findings import Finding, JobContext, fault, ok, run_program, warning
from deepspeed_nmt.errors import counted
from deepspeed_nmt.parallel.launched import expanded

_QUERY_S = 30.0
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
        return [warning("scontrol should be on PATH in a SLURM job, which requeues itself by it, but is not")]
    done = run_program(["scontrol", "show", "job", number, "--oneliner"], _QUERY_S)
    if done.status:
        return [
            warning(
                f"scontrol should show job {number}, but cannot ({done.problem}), so the job cannot requeue itself"
            )
        ]
    record = dict(word.split("=", 1) for word in done.text.split() if "=" in word)
    found = [*_time(record, number), *_requeue(record, number)]
    if record.get("BatchFlag") == "1":
        found += _signal(context, number)
    else:
        found.append(
            warning(
                f"job {number} should be a batch job for a long training, but is interactive, and so is neither "
                "signalled before its time limit nor queued again; `sbatch launch/train.sbatch`"
            )
        )
    return found


def _time(record: Mapping[str, str], number: str) -> list[Finding]:
    """Return what is wrong with the time that is left to a job."""
    try:
        left = datetime.fromisoformat(record["EndTime"]) - datetime.now()
    except (KeyError, ValueError):
        return [ok(f"job {number} has no time limit")]
    text = f"{left // timedelta(minutes=1):,} minutes"
    limit = record.get("TimeLimit", "unknown")
    if left.total_seconds() < _SIGNAL_LEAD_S + 60:
        return [
            fault(
                f"a job must be longer than the {_SIGNAL_LEAD_S} s before its end at which it is told to save, but "
                f"job {number} has {text} left (--time {limit}); raise --time"
            )
        ]
    if left.total_seconds() < _SHORT_S:
        return [
            warning(
                f"a job should run for an hour or more, because each start takes minutes, but job {number} has "
                f"{text} left (--time {limit}); raise --time"
            )
        ]
    return [ok(f"job {number} has {text} left (--time {limit})")]


def _requeue(record: Mapping[str, str], number: str) -> list[Finding]:
    """Return a warning if SLURM may not queue a job again."""
    if record.get("Requeue") == "1":
        return [ok(f"job {number} is queued again after preemption or the loss of a node")]
    return [
        warning(
            f"job {number} should be queued again after preemption or the loss of a node, but --no-requeue holds; "
            "submit it with --requeue"
        )
    ]


def _signal(context: JobContext, number: str) -> list[Finding]:
    """Return what is wrong with the signal that announces a job's time limit."""
    script = run_program(["scontrol", "write", "batch_script", number, "-"], _QUERY_S)
    match = _SIGNAL.search(script.text)
    signal = context.environment.get("SBATCH_SIGNAL") or (match.group(1) if match else "")
    if not signal:
        return [
            warning(
                f"job {number} should be signalled before its time limit, but its script has no --signal (one on "
                "sbatch's command line is not visible here); `#SBATCH --signal=B:USR1@300`, as in launch/train.sbatch"
            )
        ]
    kinds, _, seconds = signal.partition("@")
    name = kinds.rpartition(":")[2].upper().removeprefix("SIG")
    if name not in ("USR1", "10") or "B" not in kinds.partition(":")[0].upper():
        return [
            warning(
                f"the batch shell of job {number} should get USR1 before the time limit, but --signal is {signal}; "
                "`--signal=B:USR1@300`"
            )
        ]
    if seconds.isdecimal() and int(seconds) < 60:
        return [
            warning(
                f"job {number} should be signalled a minute or more before its time limit, but --signal is {signal}; "
                "an update and a checkpoint must fit into that time"
            )
        ]
    return [ok(f"the batch shell is signalled before the time limit (--signal {signal})")]


def tasks(context: JobContext) -> list[Finding]:
    """Compare the tasks on this host with its GPUs."""
    if "SLURM_STEP_ID" not in context.environment or not context.local_ranks:
        return []
    ranks, found = context.local_ranks, []
    counts = expanded(context.environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if len(set(counts)) > 1:
        found.append(
            warning(
                f"all nodes should have as many tasks, but have {', '.join(map(str, counts))}; `--ntasks-per-node`"
            )
        )
    own = context.environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1"
    visible = context.environment.get("CUDA_VISIBLE_DEVICES")
    gpus = len(context.gpus or ()) if visible is None else len([each for each in visible.split(",") if each])
    if context.gpus and not own and ranks != gpus:
        more = fault if ranks > gpus else warning
        found.append(
            more(
                f"a node must have one task for each GPU, but has {counted(ranks, 'tasks')} and "
                f"{counted(gpus, 'GPUs')}; `--ntasks-per-node {max(1, gpus)}`"
            )
        )
    return found or [ok(f"{counted(ranks, 'tasks')} on a node")]
