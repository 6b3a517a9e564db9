"""Train a model, or resume a run that was stopped.

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
from typing import TYPE_CHECKING

from deepspeed_nmt.errors import EXIT_STOPPED

if TYPE_CHECKING:
    from deepspeed_nmt.config import RunConfig
    from deepspeed_nmt.data.directory import DataDirectory
    from deepspeed_nmt.run.warm_start import Origin
    from deepspeed_nmt.train.signals import StopRequest

HELP = "train a model, or resume a run"

_LOST_LOCK_S = 300.0
"""Seconds that a network file system may take to release the lock of a lost host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
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
    from deepspeed_nmt.train.signals import StopRequest, mark_done

    with StopRequest() as stop:
        status = _train(arguments, stop)
    if status == 0:
        mark_done()
    return status


def _train(arguments: argparse.Namespace, stop: StopRequest) -> int:
    import torch

    from deepspeed_nmt.console import log_to, logger, setup_logging
    from deepspeed_nmt.parallel.agreement import fail_together
    from deepspeed_nmt.parallel.launched import isolate_extension_builds, once_per_host, requeued
    from deepspeed_nmt.parallel.watchdog import Watchdog
    from deepspeed_nmt.parallel.world import join_world, leave_world
    from deepspeed_nmt.run.directory import LOGS, begin
    from deepspeed_nmt.run.environment import environment, summary
    from deepspeed_nmt.run.lock import RunLock
    from deepspeed_nmt.run.trainer import Job, train_run

    with once_per_host():
        isolate_extension_builds()
        config, data, origin = _read(arguments)
    if config.engine.silent_s > 0.0:
        # NCCL would abort the process before the watchdog can name the rank at fault.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    engine = config.engine
    world = join_world(engine.device, engine.timeout_s, engine.tensor_parallel, lambda: stop)
    setup_logging(world.rank)
    if config.engine.deterministic:
        # cuBLAS is only repeatable with a fixed workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.engine.deterministic)
    lock = None
    try:
        with fail_together(world):
            if world.is_main:
                lock = RunLock(arguments.run, _LOST_LOCK_S if requeued() else 0.0)
                data.verify_hashes()
                begin(arguments.run, config, data)
        with fail_together(world):
            log_to(arguments.run / LOGS / f"rank-{world.rank}.log")
        if world.is_main:
            logger.info("%s", summary(environment()))
        watchdog = Watchdog(world, engine.silent_s, engine.stuck_s, engine.timeout_s)
        with watchdog:
            progress = train_run(Job(arguments.run, config, data, origin, world, stop, watchdog))
        if stop.agreed:
            logger.info(
                "stopped by %s after update %d; start the same command again to go on",
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


def _read(arguments: argparse.Namespace) -> tuple[RunConfig, DataDirectory, Origin | None]:
    """Read what the command line asks for; nothing is written.

    Raises:
        UserError: if options contradict each other, or a file cannot be read.
    """
    from deepspeed_nmt.config import load_config
    from deepspeed_nmt.data.directory import DataDirectory
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.run.directory import CONFIG_FILE, has_begun
    from deepspeed_nmt.run.warm_start import Origin, check_origin

    source = arguments.init_from or arguments.grow_from
    if arguments.from_checkpoint is not None and source is None:
        raise ConfigError("--from-checkpoint is of the run of --init-from or --grow-from; give one of them, too")
    which = arguments.from_checkpoint or "best"
    origin = None if source is None else Origin(source, which, grow=arguments.grow_from is not None)
    base, begun = arguments.config, has_begun(arguments.run)
    if arguments.recipe is None and base is None and begun:
        base = arguments.run / CONFIG_FILE  # `train --run RUN` alone goes on with the run's own settings
    if begun and origin is not None:
        check_origin(arguments.run, origin)
    config = load_config(arguments.recipe, base, arguments.settings)
    before = load_config(file=arguments.run / CONFIG_FILE) if begun else None
    return config.resolved(before), DataDirectory.open(arguments.data), origin
