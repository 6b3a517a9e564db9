"""Train a model, or go on with a run that was stopped.

Runs under plain `python`, `torchrun`, `srun`, and the `deepspeed` launcher, on GPUs or CPU ranks:

    deepspeed-nmt train --recipe transformer_base --data DATA --run RUN
    deepspeed --num_gpus 8 --module deepspeed_nmt train --recipe transformer_big --data DATA --run RUN

Settings are given as section.key=value, for example batch.micro_tokens=8192 optimizer.lr=1e-3. Starting it again on
the same run directory resumes the run. It exits with 75 when a signal stopped it: start it again to go on.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from deepspeed_nmt.errors import EXIT_STOPPED

HELP = "train a model, or go on with a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--recipe", metavar="NAME", help="a named experiment to start from")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML with settings, on top of the recipe")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="made by `prepare`")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="where the run is kept")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--init-from", type=Path, metavar="RUN", help="start from another run's weights (fine-tuning)")
    start.add_argument("--grow-from", type=Path, metavar="RUN", help="grow on top of another run, which stays frozen")
    parser.add_argument("--from-checkpoint", metavar="C", help="of that run: best, last, average, or a path [best]")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, on top of everything")


def run(arguments: argparse.Namespace) -> int:
    """Train."""
    import torch

    from deepspeed_nmt.commands.validation import ModelValidator
    from deepspeed_nmt.config import load_config
    from deepspeed_nmt.console import logger, setup_logging
    from deepspeed_nmt.core.objective import TrainModule
    from deepspeed_nmt.data.directory import DataDirectory
    from deepspeed_nmt.data.loader import TrainLoader, collate
    from deepspeed_nmt.engine import build_engine
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.inherit import check_origin, inherit, write_origin
    from deepspeed_nmt.parallel.collectives import barrier
    from deepspeed_nmt.parallel.tensor import parallelize
    from deepspeed_nmt.parallel.world import join_world, leave_world
    from deepspeed_nmt.runs import (
        CHECKPOINTS,
        CONFIG_FILE,
        RunLock,
        begin,
        build_model,
        build_objective,
        has_begun,
        load_weights,
    )
    from deepspeed_nmt.search import SearchConfig
    from deepspeed_nmt.train.checkpoint import CheckpointStore, Progress
    from deepspeed_nmt.train.collapse import CollapseMonitor
    from deepspeed_nmt.train.loop import train
    from deepspeed_nmt.train.metrics import Metrics
    from deepspeed_nmt.train.optimizer import build_optimizer
    from deepspeed_nmt.train.replica import Replica
    from deepspeed_nmt.train.signals import StopRequest

    origin, grow = arguments.init_from or arguments.grow_from, arguments.grow_from is not None
    if arguments.from_checkpoint is not None and origin is None:
        raise ConfigError("--from-checkpoint is of the run of --init-from or --grow-from; give one of them, too")
    which = arguments.from_checkpoint or "best"
    base, begun = arguments.config, has_begun(arguments.run)
    if arguments.recipe is None and base is None and begun:
        base = arguments.run / CONFIG_FILE  # `train --run RUN` alone goes on as it was
    if begun and origin is not None:
        check_origin(arguments.run, origin, which, grow=grow)
    config = load_config(arguments.recipe, base, arguments.settings)
    data = DataDirectory.open(arguments.data)

    world = join_world(config.engine.device, config.engine.timeout_s, config.engine.tensor_parallel)
    setup_logging(world.rank)
    if config.engine.deterministic:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS is only repeatable with a fixed workspace
    torch.use_deterministic_algorithms(config.engine.deterministic)
    lock = None
    try:
        lock = RunLock(arguments.run) if world.is_main else None
        if world.is_main:
            data.verify_hashes()
            begin(arguments.run, config, data)
        barrier(world)
        with StopRequest() as stop:
            vocabulary = data.tokenizer().vocabulary
            store = CheckpointStore(arguments.run / CHECKPOINTS, config.training.keep_last, config.training.keep_best)
            checkpoint = store.newest()
            progress = checkpoint.progress if checkpoint is not None else Progress()
            corpus = data.corpus("train")
            loader = TrainLoader(
                corpus, config.batch, config.training.seed, world.data_rank, world.data_ranks, vocabulary
            )
            model = build_model(config, vocabulary)
            model.recompute(config.engine.recompute_encoder, config.engine.recompute_decoder)
            copy = build_model(config, vocabulary)
            if checkpoint is not None:
                load_weights(model, checkpoint)
            elif origin is not None:
                inherited = inherit(model, config, origin, which, data, grow=grow)
                if world.is_main:
                    write_origin(arguments.run, inherited)
            elif any(not parameter.requires_grad for parameter in model.parameters()):
                raise ConfigError(
                    "this model has frozen parts that were trained before; give their run by --grow-from RUN"
                )
            parallelize(model, world)
            objective = build_objective(config, vocabulary)
            module = TrainModule(model, objective)
            optimizer = build_optimizer(config.optimizer, module.to(world.device))
            dummy = collate(corpus, torch.empty(0, dtype=torch.int64).numpy(), vocabulary)
            engine = build_engine(config.engine, module, optimizer, config.optimizer.clip_norm, world, dummy)
            logger.info(
                "%s parameters; %s pairs, %d updates an epoch; %d x %s; %s",
                f"{sum(p.numel() for p in copy.parameters()):,}",
                f"{len(corpus):,}",
                loader.updates_per_epoch(),
                world.ranks,
                world.device.type,
                type(engine).__name__,
            )
            if checkpoint is not None:
                engine.restore(checkpoint, checkpoint.scalars)
                logger.info("resuming after update %d (%s)", progress.update, checkpoint.path)
            assert isinstance(config.search, SearchConfig)
            replica = Replica(copy, engine)
            validator = ModelValidator(
                replica, objective, data, config.validation, config.search, config.batch, world
            )
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
            with Metrics(arguments.run, world.is_main, progress.update, config.training.max_updates) as metrics:
                progress = train(
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
                    stop,
                    progress,
                )
            engine.close()
            if stop:
                logger.info(
                    "stopped by %s after update %d, saved; start the same command again to go on",
                    stop.signal_name,
                    progress.update,
                )
                return EXIT_STOPPED
            best = "" if progress.best_score is None else f", best validation score {progress.best_score:.2f}"
            logger.info(
                "done: %d updates, %s target tokens%s (update %d)",
                progress.update,
                f"{progress.target_tokens:,}",
                best,
                progress.best_update,
            )
            return 0
    finally:
        if lock is not None:
            lock.release()
        leave_world()
