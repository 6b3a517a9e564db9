"""Settings of a run, resolved once before anything is built: values that depend on the machine or the data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt.build import build_kernels, build_meta_model, build_objective
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpora
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.engine.contract import checkpoint_bytes
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine
from deepspeed_nmt.errors import ConfigError, DataError, counted, shown_bytes
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.files import atomic_write_text, parse_json, read_regular
from deepspeed_nmt.kernels.choice import OPERATIONS, Kernels, obstacle
from deepspeed_nmt.kernels.precision import DTYPES, capability_of
from deepspeed_nmt.parallel.collectives import fail_together, from_main, max_over_ranks, sum_over_ranks
from deepspeed_nmt.parallel.hardware import host_memory
from deepspeed_nmt.parallel.launched import local_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.counting import RecomputedLayers, count_rates, sizes
from deepspeed_nmt.planning.gpus import kind_of, usable_gib
from deepspeed_nmt.planning.memory import GIB, cpu_bytes, host_bytes
from deepspeed_nmt.planning.planner import layout_of
from deepspeed_nmt.plugins import PLUGINS_VARIABLE
from deepspeed_nmt.run.batches import batch_on
from deepspeed_nmt.run.directory import CHECKPOINTS
from deepspeed_nmt.run.plans import make_planner
from deepspeed_nmt.run.validation_sets import SPLIT, digest, title
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.log import Workload
from deepspeed_nmt.train.saving import check_can_save

RESOLVED_FILE = "resolved.json"
"""File with the resolved settings of the last start."""


@dataclass(frozen=True)
class Resolved:
    """Values of a run that depend on the machine or the data.

    Attributes:
        recompute: every k-th layer application of encoder and decoder that is recomputed; 0 none.
        backends: description of the kernels chosen on this rank's device, for the log.
    """

    vocabulary: Vocabulary
    engine: EngineSettings
    batch: BatchConfig
    recompute: RecomputedLayers
    kernels: Kernels
    backends: str
    is_compiled: bool

    def __str__(self) -> str:
        stage = self.engine.zero_stage
        parts = [
            "plain torch" if stage is None else f"DeepSpeed ZeRO-{stage}",
            self.engine.precision,
            f"{self.batch.layout} batches",
            f"kernels: {self.backends}",
        ]
        if self.is_compiled:
            parts.append("compiled layers")
        if any(self.recompute):
            parts.append("recompute_encoder={}, recompute_decoder={}".format(*self.recompute))
        return "; ".join(parts)

    def validation_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of weights that are validated on a device: that of training on a GPU, fp32 on a CPU."""
        return DTYPES[self.engine.precision] if device.type == "cuda" else torch.float32

    def save(self, run: Path) -> None:
        """Write RESOLVED_FILE."""
        content = {
            "engine": "plain" if self.engine.ds_config is None else "deepspeed",
            "precision": self.engine.precision,
            "layout": self.batch.layout,
            "micro_tokens": self.batch.micro_tokens,
            "ds_config": self.engine.ds_config,
            "recompute_encoder": self.recompute[0],
            "recompute_decoder": self.recompute[1],
            "kernels": self.backends,
            "products": self.kernels.backend("linear", torch.empty(0)),
            "compile": "layers" if self.is_compiled else "off",
        }
        atomic_write_text(run / RESOLVED_FILE, json.dumps(content, indent=1))


def resolve(
    config: RunConfig,
    data: TrainingData,
    sets: Mapping[str, DataDirectory],
    world: World,
    resumed: Path | None,
) -> Resolved:
    """Resolve a run's settings on these ranks, and check them against the data. All ranks call it together.

    Args:
        sets: data directories of all validation sets by name.
        resumed: run directory, if the run has a checkpoint: no pretrained weights are loaded, matrices are multiplied
            by the library that it has recorded, and "auto" is the size of micro-batches that it has recorded.
    """
    with fail_together(world):
        vocabulary = data.main.tokenizer().vocabulary
        engine = resolve_engine(config.engine, config.optimizer, world)
        if resumed is None:
            config.model.check_data(data.main.tokenizer())
        model = build_meta_model(config, vocabulary)
        for of in (model, build_meta_model(config.for_update(0), vocabulary)):
            build_objective(config, vocabulary).check_model(of)
        check_size(model, engine, world)
        _check_alignments(config, data)
        _check_lengths(config, model, data, sets)
        for name, directory in sets.items():
            metrics, _ = config.validation.chosen(directory.text_form, name)
            Scorer(metrics, directory.text_form, [])  # imports what it needs
        kernels = build_kernels(config)
    products = micro_tokens = layout = None
    with suppress(OSError, ValueError, AttributeError, KeyError):
        recorded = parse_json(read_regular(resumed / RESOLVED_FILE)) if resumed else {}
        products = recorded.get("products")
        micro_tokens = BatchConfig(micro_tokens=recorded["micro_tokens"]).bound
        layout = recorded["layout"] if recorded["precision"] == engine.precision else None
    kernels = keep_products(kernels, products, world)
    # Validation on a CPU runs in fp32, too.
    kernels = agree_on_kernels(kernels, world, {DTYPES[engine.precision], torch.float32})
    micro_tokens, layout = from_main([micro_tokens, layout], world)
    with fail_together(world):
        longest = max(data.corpora(config.mixture).longest)
        recompute, micro_tokens = resolve_memory(config, vocabulary, engine, world, kernels, micro_tokens, longest)
    if config.batch.micro_tokens == "auto" and world.ranks > 1:  # GPUs may differ
        micro_tokens = -int(max_over_ranks([-float(micro_tokens)], world))
    with fail_together(world):
        trained = CheckpointStore(resumed / CHECKPOINTS).names() if resumed else []
        first = CheckpointStore.update_of(trained[-1]) + 1 if trained else 1
        batch = batch_on(config, micro_tokens, data, engine.precision, world, first, layout)
    backends = kernels.describe(world.device, DTYPES[engine.precision])
    is_compiled = config.engine.compile == "layers"
    return Resolved(vocabulary, engine, batch, recompute, kernels, backends, is_compiled)


def _check_alignments(config: RunConfig, data: TrainingData) -> None:
    reading = [name for name, part in config.parts.active_regularizers().items() if part.reads_links]
    if reading and not any(corpus.aligned for part in data.parts for corpus in part.directory.training_corpora()):
        raise ConfigError(
            f"objective.{reading[0]} needs word alignments, which {data} lacks; give prepare --train-alignments, or "
            f"set objective.{reading[0]}=null"
        )


def _check_lengths(
    config: RunConfig, model: TranslationModel, data: TrainingData, sets: Mapping[str, DataDirectory]
) -> None:
    bounds = {"source": model.longest_source, "target": model.longest_target}
    if not any(bounds.values()):
        return
    texts = {"train": data.corpora(config.mixture)}
    texts |= {f"valid of {title(name)}": Corpora.of(of.corpus(SPLIT)) for name, of in sets.items()}
    for split, corpora in texts.items():
        for (side, bound), longest in zip(bounds.items(), corpora.longest, strict=True):
            if bound is not None and longest > bound:
                remedy = f"prepare the data with --max-length {bound - 1}" if split == "train" else "shorten it"
                raise DataError(
                    f"the longest {side} of {split} has {longest} tokens, and the model reads {bound} at most; "
                    f"{remedy}"
                )


def check_size(model: TranslationModel, engine: EngineSettings, world: World) -> None:
    """Refuse a model that this host cannot hold; the system would kill the process while it is built."""
    local = max(1, local_ranks(os.environ)) if world.ranks > 1 else 1
    states = engine.optimizer.state_elements(model) / max(1, sizes(model)[0])
    trained, frozen = (-(-size // world.tensor_ranks) for size in sizes(model))
    # Where there is no room for the copy of a checkpoint, training waits while it is written.
    layout = layout_of(engine, world.ranks, world.tensor_ranks, copies=False, states=states)
    needed_by = cpu_bytes if world.device.type == "cpu" else host_bytes
    needed, memory = needed_by(trained, frozen, layout, local), host_memory()
    what = f"{sum(sizes(model)):,} parameters take {shown_bytes(needed)} in {counted(local, 'ranks')}"
    if needed > memory.total:
        raise ConfigError(
            f"the model's {what}, more than this host's memory of {shown_bytes(memory.total)}"
            f"{' (limit of the job or container)' if memory.is_limited else ''}; lower the model.* settings, start "
            "fewer ranks on a host, or ask for more memory (SLURM: --mem)"
        )
    if needed > memory.available:
        logger.warning(
            f"{shown_bytes(memory.available)} of this host's memory are available, but the model's {what}: the "
            "system may kill the run; free some, or start fewer ranks on a host"
        )


def resolve_memory(
    config: RunConfig,
    vocabulary: Vocabulary,
    engine: EngineSettings,
    world: World,
    kernels: Kernels,
    recorded: int | None = None,
    longest: int = 0,
) -> tuple[RecomputedLayers, int]:
    """Return every k-th encoder and decoder layer to recompute, and the tokens of a micro-batch.

    They are the settings, or for "auto" as few layers and as many tokens as fit, at least the ``longest`` sentence's.
    ``recorded`` are the tokens of an earlier start, which "auto" keeps. On a CPU without ``engine.memory_gib`` it is
    their default.
    """
    sides, batch = (config.engine.recompute_encoder, config.engine.recompute_decoder), config.batch
    gib = config.engine.memory_gib
    if not gib and world.device.type == "cuda":
        gib = usable_gib(torch.cuda.get_device_properties(world.device).total_memory / GIB)
    if batch.micro_tokens == "auto" and (recorded or not gib):
        batch = batch.model_copy(update={"micro_tokens": recorded or batch.bound})
    if "auto" not in (*sides, batch.micro_tokens):
        return sides, batch.bound  # type: ignore[return-value]
    if not gib:
        raise ConfigError(
            "engine.recompute_encoder or engine.recompute_decoder is auto, which needs the size of the memory; set "
            "engine.memory_gib, or give numbers"
        )
    planned = kernels.planned_for(capability_of(world.device))
    config = config.model_copy(update={"batch": batch})
    plan = make_planner(config, vocabulary, engine, world.ranks, planned).as_set(gib, longest)
    if world.is_main:
        logger.info(
            "engine.recompute_encoder={} engine.recompute_decoder={}".format(*plan.recompute)
            + f" batch.micro_tokens={plan.micro_tokens}: a micro-batch then takes {plan.total / GIB:.2f} of "
            + f"{gib:.2f} GiB{'' if plan.fits(gib) else ', which does not fit'}"
        )
    return plan.recompute, plan.micro_tokens


def check_ranks_agree(config: RunConfig, data: TrainingData, sets: Mapping[str, DataDirectory], world: World) -> None:
    """Check that all ranks have the settings and texts of rank 0, since each host may have files of its own."""
    own: dict[str, Any] = {
        "settings": config.model_dump(mode="json"),
        "data": [data.main.text_form.form, *(f"{part.identity} {part.weights}" for part in data.parts)],
        "sets": {name: [digest({name: of}), of.text_form.form] for name, of in sets.items()},
    }
    own["settings"]["validation"]["sets"] = list(config.validation.sets)  # at places of their own on each host
    own["settings"][PLUGINS_VARIABLE] = config.plugins
    main = from_main(own, world)
    with fail_together(world):
        if differing := [name for name, value in own["settings"].items() if value != main["settings"][name]]:
            raise ConfigError(
                f"this rank differs from rank 0 in the settings of {', '.join(differing)}; start all of them with "
                "the same command and files"
            )
        if own["data"] != main["data"]:
            raise DataError(f"{data} is not the data of rank 0 here; copy that to this host")
        for name, of in sets.items():
            if own["sets"][name] != main["sets"].get(name):
                raise DataError(f"{title(name)} in {of.path} is not that of rank 0 here; copy that to this host")


def keep_products(kernels: Kernels, recorded: object, world: World) -> Kernels:
    """Return kernels that multiply matrices by the library that a run has recorded, unless the settings name one."""
    library, number = from_main(recorded, world), torch.empty(0)
    here = kernels.backend("linear", number)
    known = isinstance(library, str) and library in OPERATIONS["linear"]
    if not known or library == here or kernels.names("linear"):
        return kernels
    if reason := obstacle("linear", library, number.device, number.dtype):
        logger.warning("matrix products by %s from now on, not by %s as so far: %s", here, library, reason)
        return kernels
    logger.info("matrix products by %s, as so far; a new run on this CPU would take %s", library, here)
    return kernels.fixing({"linear": library})


def agree_on_kernels(kernels: Kernels, world: World, dtypes: Iterable[torch.dtype]) -> Kernels:
    """Return kernels that all ranks have: if any rank lacks one, all ranks fall back to torch for its operation.

    Otherwise ranks that share a model would draw different dropout masks.
    """
    with fail_together(world):
        chosen = {dtype: kernels.choices(world.device, dtype) for dtype in sorted(dtypes, key=str)}
        by_torch = {
            f"{operation} {dtype}": float(choices[operation] == "torch")
            for dtype, choices in chosen.items()
            for operation in OPERATIONS
        }
    counts = sum_over_ranks(by_torch, world)
    differing = dict.fromkeys(key.partition(" ")[0] for key, count in counts.items() if 0.0 < count < world.ranks)
    if not differing:
        return kernels
    logger.warning("%s: all ranks fall back to torch, because some have no other kernel", ", ".join(differing))
    return kernels.fixing(dict.fromkeys(differing, "torch"))


def check_room(run: Path, config: RunConfig, data: TrainingData, restart: bool = False) -> None:
    """Check that a run's checkpoints have room, before anything is written, unless the run has ended.

    The run's lock is held. With ``restart`` its checkpoints are of another run, and keep their room.
    """
    store = CheckpointStore(run / CHECKPOINTS)
    store.restore(clear=True)  # a checkpoint that a killed process was writing takes the room of the next one
    names = [] if restart else store.names()
    progress = store.progress(names[-1]) if names else None
    if progress is not None and config.training.ends_at(progress):
        return
    tokenizer = data.main.tokenizer()
    if not names:
        config.model.check_data(tokenizer)
    model = build_meta_model(config, tokenizer.vocabulary)
    check_can_save(store.directory, checkpoint_size(model, config), config.training, len(names))


def checkpoint_size(model: TranslationModel, config: RunConfig) -> int:
    """Return the bytes of the tensors in a checkpoint."""
    return checkpoint_bytes(*sizes(model), config.optimizer.state_elements(model))


def workload_of(config: RunConfig, resolved: Resolved, objective: Objective, world: World) -> Workload | None:
    """Count the cost of training; return None on CPUs, on GPUs of unknown peak, and on ranks that do not log."""
    if world.device.type != "cuda" or not world.is_main:
        return None
    name = torch.cuda.get_device_name(world.device)
    kind = kind_of(name)
    if kind is None:
        logger.info("perf/mfu is not logged: the peak of %s is not known", name)
        return None
    model = build_meta_model(config, resolved.vocabulary, resolved.kernels)
    return Workload(*count_rates(model, objective, resolved.vocabulary), kind.tflops * 1e12)
