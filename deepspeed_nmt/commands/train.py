"""Train a model, or resume a run.

    deepspeed-nmt train --recipe transformer_base --data DATA --run RUN
    deepspeed --num_gpus 8 --module deepspeed_nmt train --recipe transformer_big --data DATA --run RUN

Ranks are started by `torchrun`, `srun` or the `deepspeed` launcher, on GPUs or on CPUs; without a launcher there is
one. Settings have the form section.key=value, for example batch.micro_tokens=8192 optimizer.lr=1e-3. The same command
on the same run directory resumes the run. The exit status is 75 if a signal stopped it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.console import log_to, logger, setup_logging
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, ReportedError
from deepspeed_nmt.files import check_utf8_name, resolved
from deepspeed_nmt.parallel.launched import isolate_extension_builds, once_per_host, requeued, restarts

if TYPE_CHECKING:
    from deepspeed_nmt.config import RunConfig
    from deepspeed_nmt.data.training import TrainingData
    from deepspeed_nmt.run.start import Origin
    from deepspeed_nmt.train.signals import StopRequest

_LOST_LOCK_S = 300.0
"""Time limit in seconds for a network file system to release the lock of a lost host."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--recipe", metavar="NAME", help="named experiment to take settings from")
    parser.add_argument("--config", type=Path, metavar="F", help="YAML file of settings, which override the recipe")
    parser.add_argument(
        "--data", action="append", metavar="DIR[=WEIGHT][@TAG]",
        help="data directory, made by `prepare`; several are mixed, each with a weight (1 by default, or "
        "=WEIGHT:FIRST-LAST,... by update) and a tag in front of its sentences (default: that of the resumed run)",
    )  # fmt: skip
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory to make or resume")
    parser.add_argument(
        "--valid", action="append", default=[], metavar="NAME=DIR",
        help="validation set by this name: that of a data directory with the same vocabulary; may be repeated",
    )  # fmt: skip
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--init-from", type=Path, metavar="RUN", help="warm start: begin with this run's weights")
    start.add_argument("--grow-from", type=Path, metavar="RUN", help="depth growing: stack layers on this frozen run")
    parser.add_argument(
        "--from-checkpoint", metavar="C", help="checkpoint of RUN: best, last, average, or a path (default: best)"
    )
    parser.add_argument(
        "--add-exits", metavar="M,M",
        help="with --init-from: train only norms for exits after these decoder layers, taught by the full depth, "
        "which stays as it is; settings and data are those of RUN unless they are given",
    )  # fmt: skip
    parser.add_argument(
        "--restart", action="store_true",
        help="begin anew: what is in the run directory is set aside beside it (a job that SLURM or torchrun starts "
        "again resumes what it has begun)",
    )  # fmt: skip
    parser.add_argument(
        "--trust-run", action="store_true",
        help="start the programs that somebody else has recorded in the run (training.notify, command: and late: "
        "metrics)",
    )  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, which override all others")


def run(arguments: argparse.Namespace) -> int:
    """Train, and return the exit status."""
    from deepspeed_nmt.train.signals import StopRequest

    with StopRequest() as stop:
        try:
            status = _train(arguments, stop)
        except ReportedError as reported:
            status = reported.status
            if status == EXIT_STOPPED:  # while the ranks waited for one another
                stop.agree()
    return stop.hand_over(status)


def _train(arguments: argparse.Namespace, stop: StopRequest) -> int:
    from deepspeed_nmt.train.goodput import Ledger

    ledger = Ledger()
    import torch

    from deepspeed_nmt.engine.settings import load_ds_config
    from deepspeed_nmt.nn.compiled import check_compiler
    from deepspeed_nmt.parallel.collectives import fail_together
    from deepspeed_nmt.parallel.watchdog import Watchdog
    from deepspeed_nmt.parallel.world import join_world, leave_world
    from deepspeed_nmt.run.directory import LOGS
    from deepspeed_nmt.run.resolve import check_ranks_agree, check_room
    from deepspeed_nmt.run.start import begin, check_trusted, is_of_this_job, run_lock
    from deepspeed_nmt.run.trainer import Trainer
    from deepspeed_nmt.run.validation_sets import SPLIT, check_commands, open_sets
    from deepspeed_nmt.train.events import Events, Notifier, check_notify

    ledger.begin("data")
    with once_per_host():
        isolate_extension_builds()
        again = restarts() != "0" or (requeued() and is_of_this_job(arguments.run))
        restart = arguments.restart and not again
        config, data, origin, recorded = _read(arguments, restart)
        sets = open_sets(config.validation, data.main)
    if config.engine.silent_s > 0.0:
        # Otherwise NCCL aborts the process before the watchdog can name the rank at fault.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    engine = config.engine
    ledger.begin("rendezvous")
    world = join_world(engine.device, engine.timeout_s, engine.tensor_parallel, lambda: stop)
    setup_logging(world.rank)
    if config.engine.deterministic:
        # cuBLAS is deterministic only with a fixed workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")
        if config.engine.compile != "off":  # tells the compiler, too, whose import takes seconds
            torch.use_deterministic_algorithms(True)
    ledger.begin("data")
    with ExitStack() as stack:
        stack.callback(leave_world)
        check_ranks_agree(config, data, sets, world)
        with fail_together(world):  # before anything is written
            check_commands(config, world)
            if world.is_main:
                if recorded is not None and not arguments.trust_run:
                    check_trusted(arguments.run, config, recorded)
                check_notify(config.training.notify)
                if engine.ds_config is not None:
                    load_ds_config(engine.ds_config)
            if engine.compile == "layers":
                check_compiler(world.device)
        environment = verified = None
        with fail_together(world):
            if world.is_main:
                stack.enter_context(run_lock(arguments.run, _LOST_LOCK_S if requeued() else 0.0))
            if world.local_rank == 0:  # a host may have a copy of its own
                for directory in sets.values():
                    directory.verify_hashes(SPLIT)
                verified = data.verify_hashes()
            if world.is_main:
                check_room(arguments.run, config, data, restart)
                environment = begin(arguments.run, config, data, restart=restart)
        with fail_together(world):
            log_to(arguments.run / LOGS / f"rank-{world.rank}.log")
        if environment is not None:
            logger.info("%s", environment)
        notifier = Notifier(config.training.notify, config.training.notify_on)
        with Events(arguments.run, world.is_main, notifier) as events:
            # It names the rank at fault before the others leave a collective, which has the same time limit.
            slow_s = engine.timeout_s - min(engine.silent_s, engine.timeout_s / 2)
            watchdog = Watchdog(world, engine.silent_s, engine.stuck_s, slow_s, failed=events.fail)
            with watchdog:
                return Trainer(
                    path=arguments.run,
                    config=config,
                    data=data,
                    sets=sets,
                    origin=origin,
                    world=world,
                    stop=stop,
                    watchdog=watchdog,
                    ledger=ledger,
                    events=events,
                    verified=verified,
                ).train()


def _read(
    arguments: argparse.Namespace, restart: bool
) -> tuple[RunConfig, TrainingData, Origin | None, Sequence[Mapping[str, Any]] | None]:
    """Read configuration, data and origin of a run. Nothing is written.

    The last value has the settings that override those of a resumed run, by section; None if its own do not count.
    """
    from deepspeed_nmt.config import given_settings, load_config
    from deepspeed_nmt.data.training import DataOption, TrainingData
    from deepspeed_nmt.run.batches import update_order_of
    from deepspeed_nmt.run.directory import CHECKPOINTS, CONFIG_FILE, Run, recorded_config, verify_run
    from deepspeed_nmt.run.start import Origin, check_origin, exits_settings, has_begun, recorded_data
    from deepspeed_nmt.run.validation_sets import given_sets
    from deepspeed_nmt.train.checkpoint import CheckpointStore

    check_utf8_name(arguments.run, "--run")
    options = [DataOption.parse(text) for text in arguments.data or ()]
    source = arguments.init_from or arguments.grow_from
    if arguments.from_checkpoint is not None and source is None:
        raise ConfigError(
            "--from-checkpoint needs a run, but neither --init-from nor --grow-from is given; give one of them"
        )
    which = arguments.from_checkpoint or "best"
    origin = None if source is None else Origin(source, which, grow=arguments.grow_from is not None)
    CheckpointStore(arguments.run / CHECKPOINTS).restore()
    base, begun = arguments.config, not restart and has_begun(arguments.run)
    recorded = arguments.run / CONFIG_FILE
    before = None
    if begun:
        verify_run(arguments.run)
        before = recorded_config(arguments.run)
    elif origin is not None:  # before anything is written
        if resolved(origin.run) == resolved(arguments.run):
            raise ConfigError(f"{origin.option} is {origin.run}, and so is --run; give --run a new directory")
        Run.open(origin.run, origin.option)
    if arguments.recipe is None and base is None and begun:
        base = recorded  # without --recipe and --config, a resumed run keeps its settings
    settings, kept = list(arguments.settings), recorded if begun else None
    if arguments.add_exits is not None:
        if arguments.init_from is None:
            raise ConfigError("--add-exits needs a trained run, but --init-from is not given; give it")
        from_run = arguments.run if begun else arguments.init_from
        settings[:0] = exits_settings(from_run, which, arguments.add_exits)
        if not begun:
            options = options or list(recorded_data(from_run).options)
        if not begun and arguments.recipe is None and base is None:
            base = kept = from_run / CONFIG_FILE
    if begun and origin is not None:
        check_origin(arguments.run, origin)
    sets = {"validation": {"sets": given_sets(arguments.valid)}} if arguments.valid else {}
    config = load_config(arguments.recipe, base, settings, kept, sets)
    if not options and not begun:
        raise ConfigError(
            f"{arguments.run} has no checkpoint to resume from, and --data is not given; check --run, or give "
            "a directory made by `prepare` as --data"
        )
    data = TrainingData(options) if options else recorded_data(arguments.run)
    corpora = data.corpora(config.mixture)
    if not begun:
        update_order_of(corpora, config, data)  # so that a mistake in the weights is found before anything is written
    overriding = given_settings(settings, []) if base is recorded else None
    return config.resolved(before), data, origin, overriding
