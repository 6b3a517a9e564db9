"""DeepSpeed's configuration: reading, checks, and completion with the settings of a run.

The JSON file has the format that DeepSpeed documents. Keys that the run's settings determine (batch sizes, clipping,
precision) are "auto" or absent in it. A different value there is an error; it is never overridden silently.
"""

from __future__ import annotations

import copy
import difflib
from pathlib import Path
from typing import Any

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.files import parse_json
from deepspeed_nmt.kernels.precision import Precision

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KNOWN_KEYS = {
    *_BATCH_KEYS,
    *("gradient_clipping", "fp16", "bf16", "zero_optimization", "optimizer", "scheduler", "steps_per_print"),
    *("wall_clock_breakdown", "dump_state", "communication_data_type", "prescale_gradients", "aio", "comms_logger"),
    *("gradient_predivide_factor", "sparse_gradients", "zero_allow_untested_optimizer", "flops_profiler"),
    *("zero_force_ds_cpu_optimizer", "data_types", "seq_parallel_communication_data_type", "memory_breakdown"),
    *("disable_allgather", "activation_checkpointing", "tensorboard", "csv_monitor", "wandb", "checkpoint"),
    *("compile", "torch_autocast", "tensor_parallel", "elasticity", "autotuning", "data_efficiency"),
    *("gradient_allreduce_op", "disable_python_gc", "log_level", "timers", "hybrid_engine"),
    *("managed_gradient_accumulation", "bfloat16", "amp", "weight_quantization", "expert_parallel", "pipeline"),
    *("use_data_before_expert_parallelism", "datastates_ckpt", "curriculum_learning", "compression_training"),
}
"""Top-level keys of DeepSpeed's configuration. Other versions of DeepSpeed may have more."""
_ALIKE = 0.85
"""Similarity from which a key is a misspelling of a known one."""
_FORBIDDEN_KEYS = {
    "optimizer": "the optimizer.* settings",
    "scheduler": "the schedule.* settings",
    "torch_autocast": "engine.precision (DeepSpeed's autocast is wrong with clipping)",
    "bfloat16": "engine.precision (its name is 'bf16' today)",
    "amp": "engine.precision",
    "managed_gradient_accumulation": "the engine, which begins and ends each update,",
    "gradient_allreduce_op": "the engine, which divides the loss by the tokens of an update,",
    "activation_checkpointing": "engine.recompute_* (DeepSpeed's fails if layers share weights)",
    "tensorboard": "this program's own TensorBoard log",
    "elasticity": "batch.update_tokens, which does not depend on the number of GPUs",
}
"""Keys that must be absent, and the settings that replace them."""


def find_ds_config(name: str) -> Path:
    """Find the file that ``engine.ds_config`` names.

    Args:
        name: a path, or the name of a file in ds_configs/ without .json.

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
        f"engine.ds_config must be a JSON file or a known name, but is {shown(name)}{did_you_mean(name, known)}"
    )


def load_ds_config(name: str) -> dict[str, Any]:
    """Read the file that ``engine.ds_config`` names.

    Args:
        name: a path, or the name of a file in ds_configs/ without .json.

    Raises:
        ConfigError: if the file is missing, or does not contain a JSON object.
    """
    path = find_ds_config(name)
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be DeepSpeed's JSON, but cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a JSON object, but contains a {type(content).__name__}")
    return content


def zero_stage(content: dict[str, Any]) -> int:
    """Return the ZeRO stage of a DeepSpeed configuration; 0 if it has none.

    Raises:
        ConfigError: if the stage is not 0, 1, 2 or 3.
    """
    section = content.get("zero_optimization", {})
    if not isinstance(section, dict):
        raise ConfigError(f"'zero_optimization' must be an object in the DeepSpeed configuration, but is {section!r}")
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"'zero_optimization.stage' must be 0, 1, 2 or 3, but is {stage!r}")
    return int(stage)


def wanted_precision(content: dict[str, Any], setting: str) -> str:
    """Reconcile fp16 and bf16 of a DeepSpeed configuration with ``engine.precision``.

    Args:
        content: DeepSpeed's configuration.
        setting: ``engine.precision``: "auto", "fp32", "bf16" or "fp16".

    Returns:
        The precision that both allow: "auto", "fp32", "bf16" or "fp16".

    Raises:
        ConfigError: if they contradict each other.
    """
    enabled = {kind: content.get(kind, {}).get("enabled", "auto") for kind in ("fp16", "bf16")}
    requested = [kind for kind, value in enabled.items() if value is True]
    if len(requested) == 2:
        raise ConfigError("the DeepSpeed configuration enables both fp16 and bf16; enable one of them")
    if requested and setting not in ("auto", requested[0]):
        raise ConfigError(
            f"the DeepSpeed configuration enables {requested[0]}, but engine.precision is {setting}; "
            f'set "{requested[0]}": {{"enabled": "auto"}} there, or engine.precision={requested[0]}'
        )
    if setting in enabled and enabled[setting] is False:
        raise ConfigError(
            f"engine.precision is {setting}, but the DeepSpeed configuration disables it; "
            f'set "{setting}": {{"enabled": "auto"}} there'
        )
    return requested[0] if requested else setting


def complete_ds_config(
    content: dict[str, Any], *, ranks: int, clip_norm: float, precision: Precision
) -> dict[str, Any]:
    """Complete a DeepSpeed configuration with the settings of a run.

    gradient_accumulation_steps is always 1: the number of micro-batches varies from update to update, so the engine
    sets the gradient accumulation boundary itself.

    Args:
        content: DeepSpeed's configuration; not changed.
        ranks: data-parallel ranks.
        clip_norm: maximum norm of the gradient; 0 disables clipping.
        precision: of the forward and backward pass.

    Returns:
        A complete copy of the configuration.

    Raises:
        ConfigError: for every key that looks misspelt or contradicts the run's settings, and for 16-bit precision
            with ZeRO stage 0.
    """
    problems = []
    for key in content:
        if key in _FORBIDDEN_KEYS:
            problems.append(f"'{key}' must not be in the DeepSpeed configuration: {_FORBIDDEN_KEYS[key]} decides it")
        elif key not in _KNOWN_KEYS and (close := difflib.get_close_matches(key, _KNOWN_KEYS, 1, _ALIKE)):
            problems.append(f"'{key}' in the DeepSpeed configuration looks misspelt; did you mean '{close[0]}'?")
        elif key not in _KNOWN_KEYS:
            logger.warning("'%s' in the DeepSpeed configuration is not known here; DeepSpeed gets it unchanged", key)
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
            "use engine.ds_config=zero1, or engine.name=plain engine.ds_config=null"
        )
    if problems:
        raise ConfigError(problems)
    # Otherwise the gradients of an update's micro-batches are added in 16 bit.
    result["data_types"] = {"grad_accum_dtype": "fp32", **content.get("data_types", {})}
    if ranks == 1 and "zero_optimization" in content:
        # There is nothing to overlap, and DeepSpeed would wait for the device in each backward pass.
        result["zero_optimization"]["overlap_comm"] = False
    result.setdefault("steps_per_print", 10**9)
    # The engine passes torch's Adam, also if the optimizer is offloaded to the CPU.
    result["zero_force_ds_cpu_optimizer"] = False
    result["zero_allow_untested_optimizer"] = True
    return result
