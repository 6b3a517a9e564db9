"""A run's training: everything it takes, put together from the newest checkpoint or from the start."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deepspeed_nmt import huggingface
from deepspeed_nmt.commands.planner import recomputation
from deepspeed_nmt.commands.validation import ModelValidator
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.bert_tokenizer import SIDES, BertTokenizer
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.loader import TrainLoader, collate
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.base import DTYPES, Precision, choose_precision
from deepspeed_nmt.engine.ds_config import precision_asked_for
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.inherit import inherit, write_origin
from deepspeed_nmt.kernels import dispatch
from deepspeed_nmt.methods.bert import BertPair
from deepspeed_nmt.methods.parallel_decoder import BertDecoderConfig
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import from_main, sum_over_ranks
from deepspeed_nmt.parallel.launched import once_per_host
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.gpus import kind_of
from deepspeed_nmt.planning.memory import count_rates
from deepspeed_nmt.runs import CHECKPOINTS, build_model, build_objective, load_weights, use_kernels
from deepspeed_nmt.search import SearchConfig
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore
from deepspeed_nmt.train.collapse import CollapseMonitor
from deepspeed_nmt.train.loop import Workload, train
from deepspeed_nmt.train.memory import probe
from deepspeed_nmt.train.metrics import Metrics
from deepspeed_nmt.train.optimizer import build_optimizer
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.replica import Replica
from deepspeed_nmt.train.signals import StopRequest


@dataclass(frozen=True)
class Origin:
    """Another run that this one starts from.

    Attributes:
        run: its directory.
        checkpoint: best, last, average, or a path.
        grow: whether it is grown on top of; otherwise all its weights are trained on.
    """

    run: Path
    checkpoint: str
    grow: bool


@dataclass(frozen=True)
class Job:
    """A run to be trained by these ranks.

    Attributes:
        path: the run directory, begun.
        origin: another run that its first weights come from, or None.
        stop: asks for it to end.
        watchdog: is told what this rank is at.
    """

    path: Path
    config: RunConfig
    data: DataDirectory
    origin: Origin | None
    world: World
    stop: StopRequest
    watchdog: Watchdog


def train_run(job: Job) -> Progress:
    """Train until the end, or until asked to stop. A run that was rolled back is taken up again at once."""
    config, world = job.config, job.world
    with fail_together(world):
        use_kernels(config)
        precision = choose_precision(precision_asked_for(config.engine, world.ranks), world.device)
    agree_on_kernels(world, {DTYPES[precision], torch.float32})  # fp32: under autocast, and in validation
    logger.info("%s; kernels: %s", precision, dispatch.describe(world.device, DTYPES[precision]))
    while (progress := _take_up(job, precision)) is None:
        job.watchdog.at("going back to a checkpoint", slow=True)
        gc.collect()  # the engine and all it held
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return progress


def agree_on_kernels(world: World, dtypes: Iterable[torch.dtype]) -> None:
    """What one rank has to leave to torch, all do: ranks that share a model would draw different masks otherwise.

    Raises:
        ConfigError: on all ranks, if one cannot have what is asked for.
    """
    with fail_together(world):
        chosen = [dispatch.choices(world.device, dtype) for dtype in dtypes]
        plain = {name: float(any(each[name] == "torch" for each in chosen)) for name in dispatch.OPERATIONS}
    counts = sum_over_ranks(plain, world)
    differing = [operation for operation, count in counts.items() if 0.0 < count < world.ranks]
    if differing:
        logger.warning("%s: torch is used on all ranks, because some can use nothing else", ", ".join(differing))
        dispatch.fall_back_to_torch(differing)


def _take_up(job: Job, precision: Precision) -> Progress | None:
    """Train from the newest checkpoint, or from the start; None if the run was rolled back."""
    path, config, data, world = job.path, job.config, job.data, job.world
    vocabulary = data.tokenizer().vocabulary
    store = CheckpointStore(path / CHECKPOINTS, config.training.keep_last, config.training.keep_best)
    checkpoint = _newest(store, world)
    progress = checkpoint.progress if checkpoint is not None else Progress()
    with fail_together(world):
        corpus = data.corpus("train")
        seed = config.training.seed
        loader = TrainLoader(corpus, config.batch, seed, world.data_rank, world.data_ranks, vocabulary)
        model = build_model(config, vocabulary)
        model.recompute(*recomputation(config, vocabulary, precision, world))
        _check_lengths(model, data)
        if checkpoint is None:
            _check_vocabularies(config, data)
        copy = build_model(config, vocabulary)
        _initialise(model, job, checkpoint)
        parallelize(model, world)
    objective = build_objective(config, vocabulary)
    module = TrainModule(model, objective)
    optimizer = build_optimizer(config.optimizer, module.to(world.device))
    dummy = collate(corpus, np.empty(0, dtype=np.int64), vocabulary)
    with once_per_host():
        engine = build_engine(config.engine, module, optimizer, config.optimizer.clip_norm, world, dummy)
    trained = sum(p.numel() for p in copy.parameters() if p.requires_grad)
    count = sum(p.numel() for p in copy.parameters())
    logger.info(
        "%s parameters%s; %s pairs, %d updates an epoch; %d x %s; %s",
        f"{count:,}",
        "" if trained == count else f", {trained:,} of them trained",
        f"{len(corpus):,}",
        loader.updates_per_epoch(),
        world.ranks,
        world.device.type,
        type(engine).__name__,
    )
    replica = Replica(copy, engine)
    probe(config.training.probe, engine, loader)
    if checkpoint is not None:
        engine.restore(checkpoint, checkpoint.scalars)
        logger.info("resuming after update %d (%s)", progress.update, checkpoint.path)
    workload = _workload(config, vocabulary, objective, world)
    assert isinstance(config.search, SearchConfig)
    validator = ModelValidator(replica, objective, data, config.validation, config.search, config.batch, world)
    monitor = CollapseMonitor(
        config.collapse,
        2 * config.schedule.warmup_updates,
        data.corpus("valid"),
        replica,
        objective,
        vocabulary,
        config.batch,
        world,
    )
    with Metrics(path, world.is_main, progress.update, config.training.max_updates) as metrics:
        after = train(
            config.training,
            config.optimizer,
            config.schedule,
            engine,
            loader,
            validator,
            monitor,
            store,
            metrics,
            world,
            job.stop,
            job.watchdog,
            progress,
            workload,
        )
    engine.close()
    return after


def _newest(store: CheckpointStore, world: World) -> Checkpoint | None:
    """The newest good checkpoint. Rank 0 looks for it, which takes hashing it; the others open what it found."""
    found = None
    with fail_together(world):
        if world.is_main:
            if store.names():
                logger.info("checking and reading the newest checkpoint in %s", store.directory)
            found = store.newest()
    name = from_main(found.path.name if found is not None else "", world)
    with fail_together(world):
        return Checkpoint(store.directory / name, verify=False) if name and found is None else found


def _workload(config: RunConfig, vocabulary: Vocabulary, objective: Objective, world: World) -> Workload | None:
    """What training costs; None on a CPU, on GPUs whose best is not known, and on ranks that do not log."""
    if world.device.type != "cuda" or not world.is_main:
        return None
    name = torch.cuda.get_device_name(world.device)
    kind = kind_of(name)
    if kind is None:
        logger.info("perf/mfu is not logged: it is not known what %s can do at best", name)
        return None
    with torch.device("meta"):
        model = build_model(config, vocabulary)
    rates = count_rates(model, objective, vocabulary)
    return Workload(rates.source, rates.target, kind.tflops * 1e12)


def _check_lengths(model: TranslationModel, data: DataDirectory) -> None:
    """Refuse sentences longer than the model can read, before training rather than in the middle of it.

    Raises:
        DataError: naming the longest sentence.
    """
    bounds = {"source": model.longest_source, "target": model.longest_target}
    for split in ("train", "valid"):
        corpus = data.corpus(split)
        for (side, bound), lengths in zip(
            bounds.items(), (corpus.source_lengths, corpus.target_lengths), strict=True
        ):
            if bound is not None and int(lengths.max()) > bound:
                remedy = f"prepare the data with --max-length {bound - 1}" if split == "train" else "shorten it"
                raise DataError(
                    f"sentences must have {bound} {side} tokens at most, which is what the BERT reads, but pair "
                    f"{int(lengths.argmax()) + 1} of {split} has {int(lengths.max())}; {remedy}"
                )


def _check_vocabularies(config: RunConfig, data: DataDirectory) -> None:
    """Refuse weights of BERTs whose tokens are not the data's: that would train, and badly.

    Raises:
        ConfigError: naming the BERT.
    """
    model, tokenizer = config.model, data.tokenizer()
    if not isinstance(model, BertPair) or (isinstance(model, BertDecoderConfig) and not model.pretrained):
        return
    for side, name in zip(SIDES, (model.source_encoder, model.target_encoder), strict=True):
        option = f"model.{side}_encoder"
        if not name:
            continue  # said where they are loaded
        if not isinstance(tokenizer, BertTokenizer) or not tokenizer.is_of(
            huggingface.load_vocabulary(name, option), side
        ):
            raise ConfigError(
                f"{option} must have the vocabulary of the data's {side} side, but {name} has another; prepare the "
                f"data with --tokenizer hf:{model.source_encoder},{model.target_encoder}, or name the BERTs it was "
                "prepared with"
            )


def _initialise(model: TranslationModel, job: Job, checkpoint: Checkpoint | None) -> None:
    """Give the model the weights that the run goes on or starts with."""
    origin = job.origin
    if checkpoint is not None:
        load_weights(model, checkpoint)
    elif origin is not None:
        inherited = inherit(model, job.config, origin.run, origin.checkpoint, job.data, grow=origin.grow)
        if job.world.is_main:
            write_origin(job.path, inherited)
    elif not model.load_pretrained() and any(not parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("this model has frozen parts that were trained before; give their run by --grow-from RUN")
