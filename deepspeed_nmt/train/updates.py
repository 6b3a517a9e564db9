"""Updates of a training, one after another, and what is logged of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from deepspeed_nmt.data.loader import Prefetcher, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.train.norms import norms_by_layer
from deepspeed_nmt.train.optimizer import learning_rate
from deepspeed_nmt.train.out_of_memory import explained
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.session import Session
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, worth_explaining
from deepspeed_nmt.train.throughput import LogWindow


class Updates:
    """Updates of a session, made from its data in order, and their log. All ranks call its methods together.

    A context manager, which stops the preparation of data at its end.

    Args:
        session: objects that the loop needs.
        progress: progress to continue from.

    Attributes:
        cause: reason for which the newest update was skipped; "" if it was not.
    """

    def __init__(self, session: Session, progress: Progress) -> None:
        self.cause = ""
        self._session = session
        self._corpora = session.loader.corpora.parts
        self._window = LogWindow(session.workload, [corpus.name for corpus in self._corpora])
        self._spikes = SpikeWatch(session.config.spike_factor, session.events)
        self._parameters = [name for name, _ in session.engine.module.model.named_parameters()]
        self._loss_scale = session.engine.scalars().loss_scale
        self._lr = 0.0
        self._squares: Squares | None = None
        self._prefetched = Prefetcher(session.loader.updates(_cursor(progress), progress.update + 1))

    def __enter__(self) -> Updates:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._prefetched.close()

    def make(self, progress: Progress) -> Progress:
        """Make the next update, and return the progress after it."""
        session, config = self._session, self._session.config
        waiting = time.monotonic()
        session.watchdog.at(f"update {progress.update + 1}, waiting for its data")
        update = self._prefetched.next()
        started = time.monotonic()
        self._lr = learning_rate(update.number, session.optimizer.lr, session.schedule, config.max_updates)
        with explained(f"update {update.number}", update.micro_batches, session.world.device):
            result = session.engine.update(
                update.micro_batches,
                update.target_tokens,
                self._lr,
                worth_explaining(progress.skipped, self._loss_scale),
                _micro_batch_callback(session.watchdog, update),
                measure=config.norms_every > 0 and update.number % config.norms_every == 0,
            )
        self._loss_scale, self._squares = result.loss_scale, result.squares
        progress = _advance(progress, update, result.skipped, time.monotonic() - started)
        session.events.at(progress.update)
        self.cause = ""
        if result.skipped:
            self.cause = report_skip(
                update, result, progress.skipped, self._parameters, session.world, session.events
            )
        self._spikes(update, result, session.world)
        self._window.add(update, result, waited=started - waiting, elapsed=time.monotonic() - waiting)
        return progress

    def log(self, progress: Progress) -> None:
        """Log the values since the last line, and the norms of the newest update, if they are due."""
        metrics = self._session.metrics
        if progress.update % self._session.config.log_every == 0:
            metrics.log(progress, self._values(progress), f" (epoch {progress.epoch + 1})")
        if self._squares is not None:
            metrics.log(progress, norms_by_layer(self._squares))

    def _values(self, progress: Progress) -> dict[str, float]:
        """Return the values since the last line by tag."""
        values = {
            **self._window.flush(self._lr, self._session.world),
            "train/spikes": float(self._spikes.count),
            "train/rollbacks": float(progress.rollbacks),
            "perf/hours": progress.train_seconds / 3600.0,
        }
        if len(self._corpora) > 1:
            epochs = self._session.loader.order.epochs(_cursor(progress), progress.update + 1)
            for corpus, count in zip(self._corpora, epochs, strict=True):
                values[f"data/{corpus.name}/epochs"] = count
                values[f"data/{corpus.name}/target_tokens"] = count * corpus.mean_target_tokens
        return values


def _advance(progress: Progress, update: Update, skipped: bool, seconds: float) -> Progress:
    passed = not skipped and update.number > progress.failed_at
    return replace(
        progress,
        update=update.number,
        epoch=update.after.epoch,
        epoch_update=update.after.update,
        target_tokens=progress.target_tokens + update.target_tokens,
        train_seconds=progress.train_seconds + seconds,
        skipped=progress.skipped + 1 if skipped else 0,
        retries=0 if passed else progress.retries,
    )


def _micro_batch_callback(watchdog: Watchdog, update: Update) -> Callable[[int], None]:
    """Return a callback that reports the index of the current micro-batch to the watchdog."""
    count = len(update.micro_batches)
    return lambda index: watchdog.at(f"update {update.number}, micro-batch {index + 1} of {count}")


def _cursor(progress: Progress) -> Cursor:
    return Cursor(progress.epoch, progress.epoch_update)
