"""The training loop: an update, its log, the collapse monitor, validation and checkpoints, as they are due."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.parts import LayerConfig
from deepspeed_nmt.data.loader import Prefetcher, TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import Engine, UpdateResult
from deepspeed_nmt.errors import ConfigError, TrainingError
from deepspeed_nmt.parallel.collectives import any_rank, fail_together, gather_lists
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.collapse import DROP_RATIO, NLL, PREFIX_RELIANCE, RELIANCE, CollapseMonitor
from deepspeed_nmt.train.configuration import TrainingConfig
from deepspeed_nmt.train.events import Events
from deepspeed_nmt.train.faults import attribute, check_replicas, has_replicas, is_exact
from deepspeed_nmt.train.goodput import Ledger
from deepspeed_nmt.train.growth import GrowthConfig
from deepspeed_nmt.train.log import LogWindow, Metrics, Workload, norms_by_layer
from deepspeed_nmt.train.out_of_memory import explained
from deepspeed_nmt.train.progress import LogState, Progress
from deepspeed_nmt.train.saving import Saver
from deepspeed_nmt.train.schedule import ScheduleConfig, learning_rate
from deepspeed_nmt.train.signals import StopRequest
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, report_spike, roll_back
from deepspeed_nmt.train.validation import Validator, record_best, update_best

_SEARCH_SKIPS = 5
"""Consecutive skips that are normal while fp16 searches its loss scale."""
_MAX_LEFT_S = 1e10
"""Bound on the time left, far above any training."""


@dataclass
class TrainingLoop:
    """Training from a start or a resume to the end, a stop, or a rollback. All ranks run it together.

    Attributes:
        peak_lr: learning rate at the end of the warm-up.
        layer: settings of the decoder layers, which may adapt to what the monitor measures.
        workload: cost of training, for perf/mfu; None if it is unknown.
        log: state of the log in the checkpoint that the run continues from, of each rank that wrote it.
        verified: result of comparing the training data with its hashes, while training has begun; None if another
            rank of the host does that. No checkpoint is written before it.
    """

    config: TrainingConfig
    growth: GrowthConfig
    peak_lr: float
    schedule: ScheduleConfig
    engine: Engine
    loader: TrainLoader
    validator: Validator
    monitor: CollapseMonitor
    store: CheckpointStore
    saver: Saver
    metrics: Metrics
    events: Events
    world: World
    stop: StopRequest
    watchdog: Watchdog
    ledger: Ledger
    layer: LayerConfig
    workload: Workload | None = None
    log: tuple[LogState, ...] = ()
    verified: Future[None] | None = None
    _start: tuple[float, int] = field(default=(0.0, 0), init=False)
    _skip_cause: str = field(default="", init=False)
    _validation_due: bool = field(default=False, init=False)
    _save_due: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.config.checksum_every > 0 and not has_replicas(self.engine.module):
            with fail_together(self.world):
                raise ConfigError("ZeRO-3 has no replicas for training.checksum_every to compare; set it to 0")
        corpora = [corpus.name for corpus in self.loader.corpora.parts]
        self._window = LogWindow(self.workload, corpora)
        self._window.restore(self.log, self.world, self.engine.device)
        self._spikes = SpikeWatch(self.config.spike_factor, self.config.norm_spike_factor, *self.log[:1])
        self._parameters = [name for name, _ in self.engine.module.model.named_parameters()]
        self._loss_scale = self.engine.scalars().loss_scale or 1.0

    def run(self, progress: Progress) -> Progress | None:
        """Train until the end or a requested stop, and save.

        Returns:
            The new progress; None after a rollback or before a growth, which require a new loop from the newest
            checkpoint.

        Raises:
            DataError: if the training data differs from its hashes.
            TrainingError: if rollbacks do not help, if memory runs out, or if the decoder ignores its source and
                ``collapse.action`` is "stop".
            OSError: if the last checkpoint cannot be written.
        """
        config, saver = self.config, self.saver
        self._start = time.monotonic(), progress.update
        if progress.drop_ratio is not None:
            self.engine.module.model.set_drop_ratio(progress.drop_ratio)
        if self._stop_requested():  # during set-up
            return progress
        self.ledger.write(progress.update, must=True)
        # A stop or a growth within a streak of skipped updates has left the validation that waited.
        self._validation_due = _due(config.validate_every, progress, progress.skipped)
        with closing(Prefetcher(self.loader.updates(_cursor(progress), progress.update + 1))) as updates:
            while not config.ends_at(progress):
                progress = self._update(progress, updates)
                if progress.skipped >= config.max_skipped:
                    saver.finish()
                    tokens, cause = self.loader.order.update_tokens, self._skip_cause
                    roll_back(self.store, progress, cause, config.max_rollbacks, tokens, self.world, self.events)
                    return None
                progress, fatal = self._measure_collapse(progress)
                self._validation_due |= _due(config.validate_every, progress)
                self._save_due |= _due(config.save_every or config.validate_every, progress)
                # In a streak of skipped updates validation and saving wait, because the weights may be ruined. At
                # the end of training they cannot wait.
                is_sound = progress.skipped == 0
                if (self._validation_due and is_sound) or config.ends_at(progress):
                    progress = self._validate(progress)
                self.watchdog.at(f"agreeing after update {progress.update}")
                stopping = self._stop_requested()
                growing = progress.update in self.growth.at and not config.ends_at(progress)
                if (self._save_due and is_sound) or stopping or fatal or growing:
                    self._save(progress, must=stopping or growing or config.ends_at(progress))
                if fatal:
                    saver.finish()
                    with fail_together(self.world):
                        raise TrainingError(f"{fatal}. The run was saved after update {saver.saved_at}")
                if stopping:
                    break
                if growing:
                    return None
        self.ledger.begin("saving")
        saver.finish()
        if saver.saved_at != progress.update:
            self._save(progress, must=True)
        self.ledger.write(progress.update, must=True)
        if config.stops_early(progress):
            logger.info("no better validation in %d in a row: stopped early", config.patience)
        return progress

    def _update(self, progress: Progress, updates: Prefetcher[Update]) -> Progress:
        """Make the next update, log it if that is due, and return the progress after it."""
        config, before = self.config, progress
        waiting = time.monotonic()
        self.ledger.begin("waiting for data")
        self.watchdog.at(f"update {progress.update + 1}, waiting for its data")
        update = updates.next()
        started = time.monotonic()
        self.ledger.begin("updates")
        lr = learning_rate(update.number, self.peak_lr, self.schedule, config.max_updates)
        count = len(update.micro_batches)
        explain = progress.skipped >= (1 if self._loss_scale == 1.0 else _SEARCH_SKIPS)
        with explained(f"update {update.number}", update.micro_batches, self.world.device):
            result = self.engine.update(
                update.micro_batches,
                update.target_tokens,
                lr,
                explain,
                lambda index: self.watchdog.at(f"update {update.number}, micro-batch {index + 1} of {count}"),
                measure=config.norms_every > 0 and update.number % config.norms_every == 0,
                on_gradient=lambda result: self._check_spike(before, update, result),
            )
        self._loss_scale = result.loss_scale
        is_past_failure = not result.skipped and update.number > progress.failed_at
        progress = replace(
            progress,
            update=update.number,
            epoch=update.after.epoch,
            epoch_update=update.after.update,
            target_tokens=progress.target_tokens + update.target_tokens,
            train_seconds=progress.train_seconds + time.monotonic() - started,
            skipped=progress.skipped + 1 if result.skipped else 0,
            retries=0 if is_past_failure else progress.retries,
        )
        self.events.at(progress.update)
        self._skip_cause = ""
        if result.skipped:
            # fp16 skips updates to find its loss scale.
            attributed = self._attribute(before, update, result) if explain or result.loss_scale == 1.0 else ""
            self._skip_cause = report_skip(
                update, result, progress.skipped, self._parameters, self.world, self.events, attributed
            )
        if config.checksum_every > 0 and update.number % config.checksum_every == 0:
            self.watchdog.at(f"comparing the weights of all ranks after update {progress.update}", slow=True)
            check_replicas(self.engine.module, self.world)
        self._window.add(update, result, waited=started - waiting, elapsed=time.monotonic() - waiting)
        if progress.skipped < config.max_skipped:  # otherwise the run is rolled back
            # A line of the log has updates of one depth.
            if update.number % config.log_every == 0 or update.number in self.growth.at:
                note = f" (epoch {progress.epoch + 1}){self._time_left(progress)}"
                self.metrics.log(progress, self._values(progress, lr), note)
            if result.squares is not None:
                self.metrics.log(progress, norms_by_layer(result.squares))
        self.ledger.write(progress.update)
        return progress

    def _check_spike(self, before: Progress, update: Update, result: UpdateResult) -> None:
        """Warn of an update that is a spike, before its step."""
        if (spike := self._spikes(update, result, self.world)) is not None:
            attributed = self._attribute(before, update, result)
            report_spike(spike, update, self.world, self.events, attributed)

    def _attribute(self, before: Progress, update: Update, result: UpdateResult) -> str:
        """Return the cause of a skipped update or a spike, as far as computing the update again can tell it."""
        if not (has_replicas(self.engine.module) and is_exact(self.world)):
            return ""
        why = "was skipped" if result.skipped else "is a spike"
        self.watchdog.at(f"computing update {update.number} again, which {why}", slow=True)

        def micro_batches_of(rank: int) -> list[Batch]:
            return self.loader.of_rank(rank).update(_cursor(before), update.number).micro_batches

        with explained(f"update {update.number}", update.micro_batches, self.world.device):
            return attribute(self.engine.module, micro_batches_of, result, self.world, self.loader.corpora)

    def _time_left(self, progress: Progress) -> str:
        """Return the words for the time left by the mean pace since this start, validations and checkpoints included.

        It is that up to the next growth, which changes the pace. The words also say when the job ends, if SLURM ends
        it earlier.
        """
        began, first = self._start
        left = self.config.updates_left(progress, self.loader.order.updates_in(progress.epoch))
        to_growth = min((at - progress.update for at in self.growth.at if at >= progress.update), default=left)
        left, what = min((left, "left"), (to_growth, "until the model grows"))
        if not left:
            return ""
        seconds = min(left * (time.monotonic() - began) / (progress.update - first), _MAX_LEFT_S)
        words = f", {timedelta(seconds=round(seconds))} {what}"
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        if end.isdecimal() and len(end) < 12 and (of_job := int(end) - time.time()) < seconds:
            words += f", {timedelta(seconds=max(0, round(of_job)))} until the job's time limit"
        return words

    def _values(self, progress: Progress, lr: float) -> dict[str, float]:
        """Return the values since the last line of the log by tag."""
        values = {
            **self._window.flush(lr, self.world),
            "train/spikes": float(self._spikes.count),
            "train/rollbacks": float(progress.rollbacks),
            "perf/hours": progress.train_seconds / 3600.0,
            "perf/goodput": self.ledger.account().goodput or 0.0,
        }
        corpora = self.loader.corpora.parts
        if len(corpora) > 1:
            epochs = self.loader.order.epochs(_cursor(progress), progress.update + 1)
            for corpus, count in zip(corpora, epochs, strict=True):
                values[f"data/{corpus.name}/epochs"] = count
                values[f"data/{corpus.name}/target_tokens"] = count * corpus.mean_target_tokens
        return values

    def _measure_collapse(self, progress: Progress) -> tuple[Progress, str]:
        """Measure and log source reliance if that is due, and return the reason to stop the run, or ""."""
        if not self.monitor.due(progress.update):
            return progress, ""
        self.ledger.begin("validation")
        self.watchdog.at(f"measuring collapse after update {progress.update}", slow=True)
        measured, ratio, before = self.monitor(progress.update), progress.drop_ratio, progress.monitored_nll
        lower = min(measured[tag] for tag in (RELIANCE, PREFIX_RELIANCE) if tag in measured)
        adapted = self.layer.adapted(ratio, lower)
        if adapted is not None and self.monitor.counts(progress.update, measured, before):
            self.engine.module.model.set_drop_ratio(adapted)
            measured[DROP_RATIO] = ratio = adapted
        self.metrics.log(progress, measured)
        bad, fatal = self.monitor.check(progress.update, measured, progress.bad_measurements, before)
        return replace(progress, bad_measurements=bad, monitored_nll=measured[NLL], drop_ratio=ratio), fatal

    def _validate(self, progress: Progress) -> Progress:
        """Validate and log; a checkpoint that is the best, or awaits its score, is due."""
        self.ledger.begin("validation")
        self.watchdog.at(f"validating after update {progress.update}", slow=True)
        validation = self.validator(progress)
        self.metrics.log(progress, validation.values)
        self.metrics.show(progress.update, validation.samples, validation.images)
        progress, is_best = update_best(progress, validation, self.validator.is_significantly_better)
        if is_best:
            record_best(self.events, progress.update, validation)
        self._validation_due, self._save_due = False, self._save_due or is_best or validation.awaits_score
        return progress

    def _save(self, progress: Progress, *, must: bool) -> None:
        self.ledger.begin("saving")
        step = f"comparing the training data with its hashes before saving update {progress.update}"
        self.watchdog.at(step, slow=True)
        with fail_together(self.world):
            if self.verified is not None:
                self.verified.result()
        own = self._window.state(self.world).model_copy(update=self._spikes.state())
        states = gather_lists([own.model_dump(mode="json")], self.world)
        self.saver.save(progress, tuple(map(LogState.model_validate, states)), must=must)
        self.ledger.begin("waiting for data")  # the next line's, as what writing this one takes
        self.ledger.write(progress.update, must=True)
        self._save_due = False

    def _stop_requested(self) -> bool:
        """Return True on all ranks if a stop is requested on any rank."""
        failure = self.verified.exception() if self.verified is not None and self.verified.done() else None
        requested = any_rank(bool(self.stop) or failure is not None, self.world)
        if requested:
            with fail_together(self.world):
                if failure is not None:
                    raise failure
            # A later request may have reached some ranks only.
            self.stop.agree(next(filter(None, gather_lists([self.stop.signal_name], self.world)), ""))
        return requested


def _due(every: int, progress: Progress, newest: int = 1) -> bool:
    """Return True if one of the ``newest`` updates is a k-th one or, with ``every`` 0, the last of an epoch."""
    return (progress.update % every if every else progress.epoch_update) < newest


def _cursor(progress: Progress) -> Cursor:
    return Cursor(progress.epoch, progress.epoch_update)
