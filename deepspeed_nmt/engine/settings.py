"""Settings of the engine: those that the user gives, DeepSpeed's configuration, and both resolved for a run.

Keys of DeepSpeed's JSON file that the run's settings determine (batch sizes, clipping, precision) are "auto" or
absent in it. A different value there is an error; it is never overridden silently.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from deepspeed_nmt.console import logger
from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.files import parse_json
from deepspeed_nmt.kernels.choice import parse_setting
from deepspeed_nmt.kernels.precision import Precision, native_precision
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.registry import Section, number_or_auto


def _kernels(value: object) -> object:
    if isinstance(value, str):
        parse_setting(value, "it")
    return value


def _off(value: object) -> object:
    """Read `off` as YAML does, for which it is false."""
    if value is True:
        raise ValueError("is true, as YAML reads yes and on; use off or layers")
    return "off" if value is False else value


KernelsSetting = Annotated[str, BeforeValidator(_kernels)]
Recompute = Annotated[int | Literal["auto"], number_or_auto(0, 1 << 30)]
DEFAULT_DS_CONFIG = "zero2"
"""DeepSpeed's configuration where ``engine.ds_config`` is not set."""


class EngineConfig(Section):
    """Settings of the engine that carries out updates."""

    name: Literal["auto", "plain", "deepspeed"] = Field(
        default="auto",
        description="plain (torch alone) or deepspeed; auto: deepspeed on several ranks, or if `ds_config` is given, "
        "else plain",
    )
    ds_config: str | None = Field(
        default=None,
        description="DeepSpeed's JSON: a path, or the name of a file in ds_configs/ without .json; null: zero2, if "
        "the run uses DeepSpeed",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="auto: bf16 on a GPU that supports it, fp16 on an older GPU, fp32 on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if there is a GPU, else cpu"
    )
    deterministic: bool = Field(
        default=False, description="bit-identical results on a GPU too, at some cost in speed"
    )
    hash_gradients: bool = Field(
        default=False,
        description="write hashes of all gradients of each micro-batch, before and after they are reduced, into "
        "gradients/ of the run, to find where two runs part; slow",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        description="size of a tensor-parallel group, whose ranks hold slices of one copy of the model",
    )
    recompute_encoder: Recompute = Field(
        default=0,
        description="recompute the activations of every k-th encoder layer in the backward pass, to save memory: "
        "1: all layers; 0: none; auto: as few as fit",
    )
    recompute_decoder: Recompute = Field(default=0, description="as recompute_encoder, for decoder layers")
    memory_gib: float = Field(
        default=0.0, ge=0.0, description="memory per GPU that auto may use, in GiB; 0: all of it (required on a CPU)"
    )
    kernels: KernelsSetting = Field(
        default="auto",
        description="backends of fused operations: auto, torch, triton, apex, onednn, or operation=backend,... such "
        "as softmax=torch",
    )
    compile: Annotated[Literal["off", "layers"], BeforeValidator(_off)] = Field(
        default="off",
        description="layers: torch.compile each layer for training, which fuses operations instead of `kernels`; "
        "takes up to minutes at the start, and suits the packed layout, which has few shapes",
    )
    attention: Literal["auto", "sdpa", "fused"] = Field(
        default="auto",
        description="sdpa: torch's kernels that never store attention weights; fused: matrix products and a fused "
        "softmax; auto: sdpa if torch has such a kernel",
    )
    silent_s: float = Field(
        default=60.0,
        ge=0.0,
        description="seconds without a heartbeat after which a rank is considered lost and all ranks end; 0: never",
    )
    stuck_s: float = Field(
        default=600.0,
        gt=0.0,
        description="time limit of a micro-batch in seconds; a rank that exceeds it is considered stuck and all "
        "ranks end",
    )
    timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        le=1e8,
        description="time limit in seconds of waiting for another rank, and of saving or validating",
    )

    def chosen_by(self, given: Container[str]) -> EngineConfig:
        """Return the settings with DeepSpeed as the engine, if ``given``, those of the user, have ``ds_config``."""
        if "ds_config" not in given or self.ds_config is None or self.name == "deepspeed":
            return self
        if self.name == "plain":
            raise ConfigError(
                f"engine.ds_config is {shown(self.ds_config)}, which engine.name=plain ignores; use "
                "engine.name=deepspeed, or engine.ds_config=null"
            )
        return self.model_copy(update={"name": "deepspeed"})


def uses_deepspeed(config: EngineConfig, ranks: int) -> bool:
    """Return True if a run on ``ranks`` ranks uses DeepSpeed, False if it uses plain torch."""
    return config.name == "deepspeed" or (config.name == "auto" and ranks > 1)


_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OTHER_KEYS = """
aio autotuning bf16 checkpoint comms_logger communication_data_type compile compression_training csv_monitor
curriculum_learning data_efficiency data_types datastates_ckpt disable_allgather disable_python_gc dump_state
expert_parallel flops_profiler fp16 gradient_clipping hybrid_engine log_level memory_breakdown pipeline
prescale_gradients seq_parallel_communication_data_type sparse_gradients steps_per_print timers
use_data_before_expert_parallelism wall_clock_breakdown wandb
weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
"""Top-level keys of DeepSpeed's configuration besides those that the run decides. Other versions may have more."""
_ALIKE = 0.85
"""Similarity from which a key is a misspelling of a known one."""
_FORBIDDEN_KEYS = {
    "optimizer": "the optimizer.* settings",
    "scheduler": "the schedule.* settings",
    "torch_autocast": "engine.precision (DeepSpeed's autocast is wrong with clipping)",
    "bfloat16": "engine.precision (its name is 'bf16' today)",
    "amp": "engine.precision",
    "managed_gradient_accumulation": "the engine, which begins and ends each update",
    # By the number of ranks, ZeRO-3 divides without reduce_scatter, and does not multiply again (DeepSpeed 0.19).
    "gradient_predivide_factor": "the engine, which divides the loss by the tokens of an update",
    "gradient_allreduce_op": "the engine, which divides the loss by the tokens of an update",
    "activation_checkpointing": "engine.recompute_* (DeepSpeed's fails if layers share weights)",
    "tensorboard": "this program's own TensorBoard log",
    "tensor_parallel": "engine.tensor_parallel",
    "elasticity": "batch.update_tokens, which does not depend on the number of GPUs",
}
"""Keys that must be absent, and the settings that replace them."""


def load_ds_config(name: str) -> dict[str, Any]:
    """Read the file that ``engine.ds_config`` names: a path, or the name of a file in ds_configs/ without .json."""
    package = Path(__file__).resolve().parents[1]
    known = {path.stem: path for folder in (package.parent, package) for path in folder.glob("ds_configs/*.json")}
    path = Path(name) if Path(name).is_file() else known.get(name)
    if path is None:
        raise ConfigError(
            f"engine.ds_config is {shown(name)}, neither a file nor a known name{did_you_mean(name, sorted(known))}"
        )
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as DeepSpeed's JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__}; DeepSpeed's configuration is a JSON object")
    sections = {key: content.get(key, {}) for key in ("bf16", "data_types", "fp16", "zero_optimization")}
    if isinstance(zero := sections["zero_optimization"], dict):
        # Null is none of these two, as in DeepSpeed.
        sections |= {
            f"zero_optimization.{key}": zero.get(key) or {} for key in ("offload_optimizer", "offload_param")
        }
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"'{key}' is {section!r} in {path}; make it an object")
    return content


def zero_stage(content: dict[str, Any]) -> int:
    """Return the ZeRO stage of a DeepSpeed configuration; 0 if it has none. Raises :class:`ConfigError`."""
    stage = content.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"'zero_optimization.stage' is {stage!r}; use 0, 1, 2 or 3")
    return int(stage)


def reduction_type(stage: int | None) -> str | None:
    """Return the dtype in which 16-bit gradients are reduced over ranks; None for that of training.

    ZeRO-1 reduces the fp32 sums of an update's micro-batches, once. ZeRO-2 and 3 reduce the gradients of each
    micro-batch, which are in 16 bit, and add up the results in fp32; fp32 would double what they send.
    """
    return None if stage in (2, 3) else "fp32"


def reconcile_precision(content: dict[str, Any], setting: str) -> str:
    """Return the precision that a DeepSpeed configuration and ``engine.precision`` allow, or "auto"."""
    enabled = {kind: content.get(kind, {}).get("enabled", "auto") for kind in ("fp16", "bf16")}
    for kind, value in enabled.items():
        if not (isinstance(value, bool) or value == "auto"):  # DeepSpeed reads 1 and "true" as true
            raise ConfigError(
                f"'{kind}.enabled' is {value!r} in the DeepSpeed configuration; make it true, false or \"auto\" there"
            )
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
    """Return a copy of a DeepSpeed configuration, completed with the settings of a run on data-parallel ranks.

    gradient_accumulation_steps is always 1: the number of micro-batches varies from update to update, so the engine
    sets the gradient accumulation boundary itself.

    Raises:
        ConfigError: for every key that looks misspelt or contradicts the run's settings, and for 16-bit precision
            with ZeRO stage 0.
    """
    problems = []
    known = {*_BATCH_KEYS, *_FORBIDDEN_KEYS, *_OTHER_KEYS.split()}
    for key in content:
        if key in _FORBIDDEN_KEYS:
            problems.append(
                f"'{key}' is in the DeepSpeed configuration, but decided by {_FORBIDDEN_KEYS[key]}; remove it there"
            )
        elif key not in known and (close := difflib.get_close_matches(key, known, 1, _ALIKE)):
            problems.append(f"'{key}' in the DeepSpeed configuration looks misspelt; did you mean '{close[0]}'?")
        elif key not in known:
            logger.warning("'%s' in the DeepSpeed configuration is not known here; DeepSpeed gets it unchanged", key)
    owned: dict[str, tuple[Any, str]] = {
        "train_batch_size": (ranks, "batch.update_tokens"),
        "train_micro_batch_size_per_gpu": (1, "batch.micro_tokens"),
        "gradient_accumulation_steps": (1, "batch.update_tokens and batch.micro_tokens"),
        "gradient_clipping": (clip_norm, "optimizer.clip_norm"),
    }
    result = copy.deepcopy(content)
    for key, (value, owner) in owned.items():
        given = content.get(key, "auto")
        if given != "auto" and (key in _BATCH_KEYS or given != value):
            problems.append(
                f"'{key}' is {given} in the DeepSpeed configuration, but decided by {owner}; make it \"auto\" there"
            )
        result[key] = value
    for kind in ("fp16", "bf16"):
        result[kind] = {**content.get(kind, {}), "enabled": precision == kind}
    # Without either of them DeepSpeed takes steps with gradients that are not finite.
    for section, key in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if content.get(section, {}).get(key, True) is not True:
            problems.append(
                f"'{section}.{key}' is {content[section][key]!r} in the DeepSpeed configuration, so that updates "
                "without a finite gradient could not be skipped; remove it there"
            )
    if content.get("zero_optimization", {}).get("round_robin_gradients", False) is not False:
        problems.append(
            "'zero_optimization.round_robin_gradients' is set in the DeepSpeed configuration; with it DeepSpeed "
            "gives back the weights of other parameters for validation and checkpoints, so remove it there"
        )
    if precision != "fp32" and zero_stage(content) == 0:
        problems.append(
            f"{precision} needs ZeRO stage 1 or more: at stage 0 DeepSpeed takes a hidden first Adam step; "
            "use engine.ds_config=zero1, or engine.name=plain engine.ds_config=null"
        )
    if problems:
        raise ConfigError(problems)
    # Otherwise the gradients of an update's micro-batches are added in 16 bit.
    result["data_types"] = {"grad_accum_dtype": "fp32", **content.get("data_types", {})}
    if precision != "fp32" and (reduced := reduction_type(zero_stage(content))) is not None:
        result.setdefault("communication_data_type", reduced)
    if ranks == 1 and "zero_optimization" in content:
        # There is nothing to overlap, and DeepSpeed would wait for the device in each backward pass.
        result["zero_optimization"]["overlap_comm"] = False
    result.setdefault("steps_per_print", 10**9)
    # The engine passes torch's Adam, also if the optimizer is offloaded to the CPU.
    result["zero_force_ds_cpu_optimizer"] = False
    result["zero_allow_untested_optimizer"] = True
    return result


@dataclass(frozen=True)
class EngineSettings:
    """Resolved settings of an engine; ``ds_config`` is DeepSpeed's complete configuration, None for plain torch."""

    precision: Precision
    optimizer: OptimizerConfig
    ds_config: Mapping[str, Any] | None = None

    @property
    def zero_stage(self) -> int | None:
        """Stage of ZeRO; None for plain torch."""
        return None if self.ds_config is None else zero_stage(dict(self.ds_config))


def resolve_engine(config: EngineConfig, optimizer: OptimizerConfig, world: World) -> EngineSettings:
    """Resolve the settings of an engine on the ranks of this run; see :func:`resolve_engine_for`."""
    native = native_precision(world.device)
    return resolve_engine_for(config, optimizer, ranks=world.ranks, data_ranks=world.data_ranks, native=native)


def resolve_engine_for(
    config: EngineConfig, optimizer: OptimizerConfig, *, ranks: int, data_ranks: int, native: Precision
) -> EngineSettings:
    """Resolve the settings of an engine on ranks that need not exist; ``native`` is the precision of "auto".

    Raises:
        ConfigError: if the device does not support the precision, the ranks share what the optimizer needs whole, or
            the DeepSpeed configuration is missing or contradicts the run.
    """
    content = None
    if uses_deepspeed(config, ranks):
        content = load_ds_config(DEFAULT_DS_CONFIG if config.ds_config is None else config.ds_config)
    setting = config.precision if content is None else reconcile_precision(content, config.precision)
    precision: Precision = native if setting == "auto" else setting  # type: ignore[assignment]
    if precision == "bf16" and native == "fp16":
        raise ConfigError("engine.precision is bf16, which a GPU older than sm_80 lacks; use engine.precision=fp16")
    stage = 0 if content is None else zero_stage(content)
    if optimizer.needs_whole and (stage > 0 or config.tensor_parallel > 1):
        divided = f"ZeRO-{stage}" if stage else f"engine.tensor_parallel={config.tensor_parallel}"
        raise ConfigError(
            f"optimizer.name={optimizer.name} computes a step from whole matrices, which {divided} divides among "
            "ranks; use engine.name=plain engine.ds_config=null engine.tensor_parallel=1, or another optimizer"
        )
    if content is not None:
        content = complete_ds_config(content, ranks=data_ranks, clip_norm=optimizer.clip_norm, precision=precision)
    return EngineSettings(precision, optimizer, content)
