"""DeepSpeed's JSON: found, checked, and completed with what this program decides.

The file stays what DeepSpeed's users know. Keys that the batch arithmetic, the optimizer settings or the precision
own are "auto" (or absent) in it; a number there that says something else is an error, not a silent override.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from deepspeed_nmt.engine.config import Precision
from deepspeed_nmt.errors import ConfigError, did_you_mean

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KNOWN = {
    *_BATCH_KEYS,
    *("gradient_clipping", "fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "steps_per_print"),
    *("wall_clock_breakdown", "dump_state", "communication_data_type", "prescale_gradients", "aio", "comms_logger"),
    *("gradient_predivide_factor", "sparse_gradients", "zero_allow_untested_optimizer", "flops_profiler"),
    *("zero_force_ds_cpu_optimizer", "data_types", "seq_parallel_communication_data_type", "memory_breakdown"),
    *("disable_allgather", "activation_checkpointing", "tensorboard", "csv_monitor", "wandb", "checkpoint"),
    *("compile", "torch_autocast", "tensor_parallel", "elasticity", "autotuning", "data_efficiency"),
}
_OWNED_ELSEWHERE = {
    "optimizer": "the optimizer.* settings",
    "scheduler": "the schedule.* settings",
    "torch_autocast": "engine.precision (DeepSpeed's autocast is wrong with clipping)",
    "activation_checkpointing": "the model (DeepSpeed's fails where layers share weights)",
    "tensorboard": "this program's own TensorBoard log",
    "elasticity": "batch.update_tokens, which does not depend on the number of GPUs",
}


def find_ds_config(name: str) -> Path:
    """The file meant by ``engine.ds_config``: a path, or the name of one that comes with the program.

    Raises:
        ConfigError: if there is no such file.
    """
    package = Path(__file__).resolve().parents[1]
    folders = [folder for folder in (package / "ds_configs", package.parent / "ds_configs") if folder.is_dir()]
    candidates = [Path(name), *(folder / f"{name}.json" for folder in folders)]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted({path.stem for folder in folders for path in folder.glob("*.json")})
    raise ConfigError(
        f"engine.ds_config must be a JSON file or a known name, but is '{name}'{did_you_mean(name, known)}"
    )


def load_ds_config(name: str) -> dict[str, Any]:
    """Read the JSON meant by ``engine.ds_config``.

    Raises:
        ConfigError: if it is missing or not a JSON object.
    """
    path = find_ds_config(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be DeepSpeed's JSON, but cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content


def zero_stage(content: dict[str, Any]) -> int:
    """The ZeRO stage a DeepSpeed configuration asks for.

    Raises:
        ConfigError: if it is not one that there is.
    """
    section = content.get("zero_optimization", {})
    if not isinstance(section, dict):
        raise ConfigError(f"'zero_optimization' must be an object in the DeepSpeed configuration, but is {section!r}")
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"'zero_optimization.stage' must be 0, 1, 2 or 3, but is {stage!r}")
    return int(stage)


def wanted_precision(content: dict[str, Any], setting: str) -> str:
    """Reconcile the JSON's fp16/bf16 with ``engine.precision``: "auto", "fp32", "bf16" or "fp16".

    Raises:
        ConfigError: if they contradict each other.
    """
    enabled = {kind: content.get(kind, {}).get("enabled", "auto") for kind in ("fp16", "bf16")}
    says = [kind for kind, value in enabled.items() if value is True]
    if len(says) == 2:
        raise ConfigError("the DeepSpeed configuration enables both fp16 and bf16; enable one of them")
    if says and setting not in ("auto", says[0]):
        raise ConfigError(
            f"the DeepSpeed configuration enables {says[0]}, but engine.precision is {setting}; "
            f'set "{says[0]}": {{"enabled": "auto"}} there, or engine.precision={says[0]}'
        )
    if setting in enabled and enabled[setting] is False:
        raise ConfigError(
            f"engine.precision is {setting}, but the DeepSpeed configuration disables it; "
            f'set "{setting}": {{"enabled": "auto"}} there'
        )
    return says[0] if says else setting


def complete_ds_config(
    content: dict[str, Any], *, ranks: int, clip_norm: float, precision: Precision
) -> dict[str, Any]:
    """Put this program's decisions into a DeepSpeed configuration.

    gradient_accumulation_steps is always 1: the number of micro-batches varies from update to update, and the
    engine marks the last one itself.

    Raises:
        ConfigError: listing every key that contradicts the run's settings, and 16 bit without ZeRO.
    """
    problems = []
    for key in content:
        if key not in _KNOWN:
            problems.append(f"DeepSpeed has no setting '{key}'{did_you_mean(key, _KNOWN)}")
        elif key in _OWNED_ELSEWHERE:
            problems.append(f"'{key}' must not be in the DeepSpeed configuration: {_OWNED_ELSEWHERE[key]} decides it")
    owned: dict[str, tuple[Any, str]] = {
        "train_batch_size": (ranks, "batch.update_tokens"),
        "train_micro_batch_size_per_gpu": (1, "batch.micro_tokens"),
        "gradient_accumulation_steps": (1, "batch.update_tokens and batch.micro_tokens"),
        "gradient_clipping": (clip_norm, "optimizer.clip_norm"),
    }
    result = copy.deepcopy(content)
    for key, (value, owner) in owned.items():
        found = content.get(key, "auto")
        if found != "auto" and (key in _BATCH_KEYS or float(found) != float(value)):
            problems.append(
                f"'{key}' must be \"auto\" in the DeepSpeed configuration, because {owner} decides it, but is {found}"
            )
        result[key] = value
    for kind in ("fp16", "bf16"):
        result[kind] = {**content.get(kind, {}), "enabled": precision == kind}
    if precision != "fp32" and zero_stage(content) == 0:
        problems.append(
            f"{precision} needs ZeRO stage 1 or more: at stage 0 DeepSpeed takes a hidden first Adam step; "
            "use engine.ds_config=zero1, or engine.name=plain"
        )
    if problems:
        raise ConfigError(problems)
    result.setdefault("steps_per_print", 10**9)
    # torch's Adam is handed in, also where the optimizer is offloaded to the CPU.
    result["zero_force_ds_cpu_optimizer"] = False
    result["zero_allow_untested_optimizer"] = True
    return result
