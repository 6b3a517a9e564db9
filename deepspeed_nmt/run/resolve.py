"""Settings of a run, resolved once before anything is built: values that depend on the machine or the data."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed_nmt.build import build_kernels, build_meta_model
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpora import Corpora
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine
from deepspeed_nmt.errors import ConfigError, DataError, counted, shown_bytes
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.precision import DTYPES, capability_of
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.host_memory import host_memory
from deepspeed_nmt.parallel.launched import local_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.advice import GIB
from deepspeed_nmt.planning.gpus import usable_gib
from deepspeed_nmt.planning.memory import RecomputedLayers, cpu_bytes, host_bytes
from deepspeed_nmt.planning.planner import layout_of
from deepspeed_nmt.run.agreement import agree_on_kernels
from deepspeed_nmt.run.batches import layout_on, update_order_of, with_less_padding
from deepspeed_nmt.run.plans import make_planner
from deepspeed_nmt.run.validation_sets import SPLIT, title

RESOLVED_FILE = "resolved.json"
"""File with the resolved settings of the last start."""


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
    recompute: RecomputedLayers
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
        layout = layout_on(config, engine.precision, capability_of(world.device))
        batch = config.batch.model_copy(update={"layout": layout})
        if config.batch.layout == "auto" and batch.layout == "packed":
            batch = with_less_padding(batch, update_order_of(data.corpora(config.mixture), config, data), world)
        if not resumed:
            config.model.check_data(data.main.tokenizer())
        model = build_meta_model(config, vocabulary)
        check_size(model, engine, world)
        _check_lengths(config, model, data, sets)
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


def _check_lengths(
    config: RunConfig, model: TranslationModel, data: TrainingData, sets: Mapping[str, DataDirectory]
) -> None:
    """Check that the model can read all sentences.

    Raises:
        DataError: if one is too long.
    """
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


def check_size(model: TranslationModel, engine: EngineSettings, world: World) -> None:
    """Refuse a model that this host cannot hold; the system would kill the process while it is built.

    Args:
        model: the whole model, on the meta device.
        engine: resolved settings.
        world: the ranks.

    Raises:
        ConfigError: if the ranks of this host need more than its memory, or than the limit of the job or container.
    """
    local = max(1, local_ranks(os.environ)) if world.ranks > 1 else 1
    sizes = Counter[bool]()
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    trained, frozen = (-(-sizes[each] // world.tensor_ranks) for each in (True, False))
    # Where there is no room for the copy of a checkpoint, training waits while it is written.
    layout = layout_of(engine, world.ranks, world.tensor_ranks, copies=False)
    needed_by = cpu_bytes if world.device.type == "cpu" else host_bytes
    needed, found = needed_by(trained, frozen, layout, local), host_memory()
    what = f"{sizes.total():,} parameters take {shown_bytes(needed)} in {counted(local, 'ranks')}"
    if needed > found.total:
        raise ConfigError(
            f"the model must fit into this host's memory of {shown_bytes(found.total)}"
            f"{' (limit of the job or container)' if found.is_limited else ''}, but its {what}; lower the model.* "
            "settings, start fewer ranks on a host, or ask for more memory (SLURM: --mem)"
        )
    if needed > found.available:
        logger.warning(
            "%s of this host's memory are available, but the model's %s: the system may kill the run; free some, or "
            "start fewer ranks on a host",
            shown_bytes(found.available),
            what,
        )


def resolve_recomputation(
    config: RunConfig, vocabulary: Vocabulary, engine: EngineSettings, world: World, kernels: Kernels
) -> RecomputedLayers:
    """Return every k-th encoder and decoder layer to recompute: the settings, or for "auto" as few layers as fit.

    Raises:
        ConfigError: if a setting is "auto" on a CPU, and ``engine.memory_gib`` is not set.
    """
    sides = (config.engine.recompute_encoder, config.engine.recompute_decoder)
    if "auto" not in sides:
        return sides  # type: ignore[return-value]
    gib = config.engine.memory_gib
    if not gib and world.device.type == "cuda":
        gib = usable_gib(torch.cuda.get_device_properties(world.device).total_memory / GIB)
    if not gib:
        raise ConfigError(
            "engine.recompute_encoder or engine.recompute_decoder is auto, which needs the size of the memory; set "
            "engine.memory_gib, or give numbers"
        )
    planned = kernels.planned_for(capability_of(world.device))
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
