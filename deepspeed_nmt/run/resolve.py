"""Settings of a run, resolved once before anything is built: values that depend on the machine or the data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from deepspeed_nmt.build import build_kernels, build_meta_model, build_objective
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpora import Corpora
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.largest import check_lengths
from deepspeed_nmt.data.loader import epoch_plan
from deepspeed_nmt.data.mixture import MixturePlan
from deepspeed_nmt.data.plans import Plan
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.engine.config import DTYPES, Precision
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.kernels.backends import OPERATIONS
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import from_main, sum_over_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.advice import GIB
from deepspeed_nmt.planning.gpus import Gpu
from deepspeed_nmt.planning.layouts import prefers_padded, yields
from deepspeed_nmt.planning.memory import Recompute
from deepspeed_nmt.planning.planner import Counts, Planner, count_model
from deepspeed_nmt.run.validation_sets import SPLIT, title
from deepspeed_nmt.train.progress import Progress

RESOLVED_FILE = "resolved.json"
"""File with the resolved settings of the last start."""
_COMPARED_UPDATES = 12
"""Updates that are cut to compare layouts, so that a start takes no longer than a second or two for it."""


@dataclass(frozen=True)
class ResolvedRun:
    """Settings of a run with all automatic values decided.

    Attributes:
        config: settings of the user, completed from files that they name.
        vocabulary: vocabulary of the data.
        engine: precision, clipping and DeepSpeed's configuration.
        batch: sizes and layout of batches.
        recompute: every k-th layer application of encoder and decoder that is recomputed; 0 none.
        kernels: kernels of the fused operations.
        backends: description of the kernels chosen on this rank's device, for the log.
    """

    config: RunConfig
    vocabulary: Vocabulary
    engine: EngineSettings
    batch: BatchConfig
    recompute: Recompute
    kernels: Kernels
    backends: str

    def __str__(self) -> str:
        stage = self.engine.zero_stage
        parts = [
            "plain torch" if stage is None else f"DeepSpeed ZeRO-{stage}",
            self.engine.precision,
            f"{self.batch.layout} batches",
            f"kernels: {self.backends}",
        ]
        if self.config.engine.compile == "layers":
            parts.append("compiled layers")
        if any(self.recompute):
            parts.append("recompute_encoder={}, recompute_decoder={}".format(*self.recompute))
        return "; ".join(parts)

    def save(self, run: Path) -> None:
        """Write RESOLVED_FILE."""
        content = {
            "engine": "plain" if self.engine.ds_config is None else "deepspeed",
            "precision": self.engine.precision,
            "layout": self.batch.layout,
            "ds_config": self.engine.ds_config,
            "recompute_encoder": self.recompute[0],
            "recompute_decoder": self.recompute[1],
            "kernels": self.backends,
            "compile": self.config.engine.compile,
        }
        atomic_write_text(run / RESOLVED_FILE, json.dumps(content, indent=1))


def resolve_run(
    config: RunConfig, data: TrainingData, sets: Mapping[str, DataDirectory], world: World, *, resumed: bool
) -> ResolvedRun:
    """Resolve a run's settings on these ranks, and check them against the data. All ranks call it together.

    Args:
        config: settings of the user.
        data: data to train on.
        sets: data directories of all validation sets by name.
        world: the ranks.
        resumed: True if the run has a checkpoint, so that no pretrained weights are loaded.

    Raises:
        ConfigError: if a setting cannot be respected on this machine, or a metric not with this text.
        DataError: if the data does not fit the model.
    """
    with fail_together(world):
        vocabulary = data.main.tokenizer().vocabulary
        engine = resolve_engine(config.engine, config.optimizer.clip_norm, world)
        batch = resolve_layout(config, engine.precision, world.device)
        if config.batch.layout == "auto" and batch.layout == "packed":
            batch = less_empty(batch, plan_of(data.corpora(config.mixture), config, data), world)
        _check_data(config, vocabulary, data, sets, resumed=resumed)
        for name, each in sets.items():
            metrics, _ = config.validation.chosen(each.text_form, name)
            Scorer(metrics, each.text_form, [])  # imports what it needs
        kernels = build_kernels(config)
    # Validation on a CPU runs in fp32, too.
    kernels = agree_on_kernels(kernels, world, {DTYPES[engine.precision], torch.float32})
    with fail_together(world):
        recompute = resolve_recomputation(config, vocabulary, engine, world, kernels)
    backends = kernels.describe(world.device, DTYPES[engine.precision])
    return ResolvedRun(config, vocabulary, engine, batch, recompute, kernels, backends)


def resolve_layout(config: RunConfig, precision: Precision, device: torch.device) -> BatchConfig:
    """Return the sizes of batches with the layout decided for a device; see :func:`layout_on`.

    Raises:
        ConfigError: if the layout is packed, but the model cannot be trained in it.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return config.batch.model_copy(update={"layout": layout_on(config, precision, capability)})


def layout_on(
    config: RunConfig, precision: Precision, capability: tuple[int, int] | None
) -> Literal["padded", "packed"]:
    """Return the layout of batches on a device.

    "auto" is packed where attention within packed sentences has a fast kernel: on a GPU from sm_80 up in 16 bit,
    without dropout of attention weights.

    Args:
        config: settings of the user.
        precision: that the model is trained in.
        capability: CUDA's compute capability; None for a CPU.

    Raises:
        ConfigError: if the layout is packed, but the model cannot be trained in it.
    """
    model, layout = config.model, config.batch.layout
    if layout == "packed" and not model.packed:
        raise ConfigError(
            f"batch.layout must be padded for model.name={model.name}, which has one sentence in a row, but is "
            "packed; set batch.layout=auto"
        )
    if layout == "auto":
        fast = has_packed_kernel(precision, capability)
        drops_weights = getattr(model, "attention_dropout", 0.0) > 0.0
        layout = "packed" if fast and model.packed and not drops_weights else "padded"
    return layout


def has_packed_kernel(precision: Precision, capability: tuple[int, int] | None) -> bool:
    """Return True if attention within packed sentences has a fast kernel on a device; arguments as in `layout_on`."""
    return capability is not None and capability >= (8, 0) and precision != "fp32"


def plan_of(corpora: Corpora, config: RunConfig, data: TrainingData, progress: Progress | None = None) -> Plan:
    """Return which sentences make which update of a run.

    Args:
        corpora: the training text of ``data``.
        config: settings of the run.
        data: data to train on.
        progress: of the run, with the phases of its mixtures; None at its start.

    Raises:
        ConfigError: if some updates have no corpus, or updates are smaller than sentences.
    """
    phases = () if progress is None else progress.phases
    if not phases and not data.is_mixture:
        return epoch_plan(corpora, config.batch, config.training.seed)
    phase = phases[-1] if phases else data.phase(corpora, config.mixture, 1)
    training = config.training
    return MixturePlan(corpora, training.seed, config.batch.update_tokens, phase, training.max_updates)


def less_empty(batch: BatchConfig, plan: Plan, world: World) -> BatchConfig:
    """Return sizes of batches with the packed layout, or the padded one where that leaves clearly less empty.

    Raises:
        ConfigError: if a sentence does not fit into a micro-batch.
    """
    longest = check_lengths(plan.corpora, batch)
    padded, packed = yields(plan.sample(), longest, batch, world.data_ranks, updates_sampled=_COMPARED_UPDATES)
    if not prefers_padded(padded, packed):
        return batch
    if world.is_main:
        logger.info(
            "batch.layout=auto is padded: with these lengths %.1f%% of packed positions would be empty, and %.1f%% "
            "of padded ones are; batch.layout=packed packs all the same",
            100.0 * packed.empty,
            100.0 * padded.empty,
        )
    return batch.model_copy(update={"layout": "padded"})


def check_ranks_agree(config: RunConfig, data: TrainingData, world: World) -> None:
    """Check that all ranks have the settings and the data of rank 0, since each host may have files of its own.

    Args:
        config: settings that this rank has read.
        data: data that this rank has opened.
        world: the ranks, which call it together.

    Raises:
        ConfigError: if settings differ, naming their sections.
        DataError: if the data differs.
    """
    own: dict[str, Any] = {
        "settings": config.model_dump(mode="json"),
        "data": [data.main.text_form.form, *(f"{part.identity} {part.weights}" for part in data.parts)],
    }
    own["settings"]["validation"]["sets"] = list(config.validation.sets)  # at places of their own on each host
    main = from_main(own, world)
    with fail_together(world):
        if differing := [name for name, value in own["settings"].items() if value != main["settings"][name]]:
            raise ConfigError(
                f"all ranks must have the same settings, but this one differs from rank 0 in {', '.join(differing)}; "
                "start all of them with the same command and files"
            )
        if own["data"] != main["data"]:
            raise DataError(
                f"all ranks must have the same data, but {data} is not that of rank 0 here; copy that to this host"
            )


def check_tensor_ranks(config: RunConfig, ranks: int) -> None:
    """Refuse a number of GPUs to plan for that cannot be divided into tensor-parallel groups.

    Raises:
        ConfigError: if ``engine.tensor_parallel`` does not divide it.
    """
    tensor_ranks = config.engine.tensor_parallel
    if ranks % tensor_ranks:
        raise ConfigError(f"engine.tensor_parallel must divide --num-gpus, but is {tensor_ranks} with {ranks} GPUs")


def make_planner(
    config: RunConfig,
    vocabulary: Vocabulary,
    engine: EngineSettings,
    ranks: int,
    kernels: Kernels,
    counted: MutableMapping[str, Counts] | None = None,
) -> Planner:
    """Return a planner of a run.

    Args:
        config: of the run.
        vocabulary: of the data.
        engine: resolved settings.
        ranks: GPUs.
        kernels: planned for the GPUs' capability, see :meth:`Kernels.planned_for`.
        counted: counts of models for GPUs of this capability, which are used and added to; None for none.

    Raises:
        ConfigError: if ``engine.tensor_parallel`` does not divide the model or the ranks.
    """
    check_tensor_ranks(config, ranks)
    tensor_ranks = config.engine.tensor_parallel
    counted = {} if counted is None else counted
    choice = (config.engine.kernels, config.engine.attention, tensor_ranks, engine.precision)
    key = repr((config.model, config.layer, config.objective, vocabulary, choice))
    if key not in counted:
        model, objective = build_meta_model(config, vocabulary, kernels), build_objective(config, vocabulary)
        counted[key] = count_model(model, objective, vocabulary, engine.precision, tensor_ranks)
    return Planner(counted[key], config.engine, engine, config.batch, ranks, config.training.save == "background")


def agree_on_kernels(kernels: Kernels, world: World, dtypes: Iterable[torch.dtype]) -> Kernels:
    """Return kernels that all ranks have: if any rank lacks one, all ranks fall back to torch for its operation.

    Otherwise ranks that share a model would draw different dropout masks.

    Args:
        kernels: kernels of the run.
        world: the ranks.
        dtypes: dtypes to compute in.

    Raises:
        ConfigError: on all ranks, if a backend that the settings name is not available on one.
    """
    with fail_together(world):
        chosen = [kernels.choices(world.device, dtype) for dtype in dtypes]
        plain = {name: float(any(each[name] == "torch" for each in chosen)) for name in OPERATIONS}
    counts = sum_over_ranks(plain, world)
    differing = [operation for operation, count in counts.items() if 0.0 < count < world.ranks]
    if not differing:
        return kernels
    logger.warning("%s: all ranks fall back to torch, because some have no other kernel", ", ".join(differing))
    return kernels.fall_back_to_torch(differing)


def _check_data(
    config: RunConfig, vocabulary: Vocabulary, data: TrainingData, sets: Mapping[str, DataDirectory], *, resumed: bool
) -> None:
    """Check that the model can be trained on the data.

    Raises:
        ConfigError: if pretrained weights have another vocabulary, or the model does not fit into this host's memory.
        DataError: if a sentence is longer than the model can read.
    """
    if not resumed:
        config.model.check_data(data.main.tokenizer())
    model = build_meta_model(config, vocabulary)
    check_size(model)
    bounds = {"source": model.longest_source, "target": model.longest_target}
    if not any(bounds.values()):
        return
    texts = {"train": data.corpora(config.mixture)}
    texts |= {
        f"valid of {title(name)}" if name else "valid": Corpora.of(each.corpus(SPLIT)) for name, each in sets.items()
    }
    for split, corpora in texts.items():
        for first, *lengths in corpora.all_lengths():
            for (side, bound), found in zip(bounds.items(), lengths, strict=True):
                if bound is not None and int(found.max()) > bound:
                    remedy = f"prepare the data with --max-length {bound - 1}" if split == "train" else "shorten it"
                    raise DataError(
                        f"sentences must have {bound} {side} tokens at most, which is what the model reads, but pair "
                        f"{first + int(found.argmax()) + 1} of {split} has {int(found.max())}; {remedy}"
                    )


def check_size(model: TranslationModel) -> None:
    """Refuse a model that this host cannot hold; the system would kill the process while it is built.

    Raises:
        ConfigError: if its weights and their copy for validation are larger than the host's memory.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    needed = 2 * 4 * count / GIB
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    if needed > present:
        raise ConfigError(
            f"the model must fit twice into this host's memory of {present:,.1f} GiB, once for training and once for "
            f"validation, but its {count:,} parameters take {needed:,.1f} GiB; lower the model.* settings"
        )


def resolve_recomputation(
    config: RunConfig, vocabulary: Vocabulary, engine: EngineSettings, world: World, kernels: Kernels
) -> Recompute:
    """Return every k-th encoder and decoder layer to recompute: the settings, or for "auto" as few layers as fit.

    Raises:
        ConfigError: if a setting is "auto" on a CPU, and ``engine.memory_gib`` is not set.
    """
    sides = (config.engine.recompute_encoder, config.engine.recompute_decoder)
    if "auto" not in sides:
        return sides  # type: ignore[return-value]
    gib = config.engine.memory_gib
    if not gib and world.device.type == "cuda":
        gib = Gpu("this", torch.cuda.get_device_properties(world.device).total_memory / GIB, 0.0).usable_gib
    if not gib:
        raise ConfigError(
            "engine.recompute_encoder or engine.recompute_decoder is auto, which needs the size of the memory; set "
            "engine.memory_gib, or give numbers"
        )
    capability = torch.cuda.get_device_capability(world.device) if world.device.type == "cuda" else None
    planned = kernels.planned_for(capability)
    plan = make_planner(config, vocabulary, engine, world.ranks, planned).as_set(gib)
    if world.is_main:
        logger.info(
            "engine.recompute_encoder=%d engine.recompute_decoder=%d: a micro-batch of %d tokens then takes %.2f of "
            "%.2f usable GiB%s",
            *plan.recompute,
            plan.micro_tokens,
            plan.total / GIB,
            gib,
            "" if plan.fits(gib) else ", which does not fit",
        )
    return plan.recompute
