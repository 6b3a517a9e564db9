"""Gradients that are not finite, and spikes of loss or gradient.

A skipped update is logged with the losses and the layers that are not finite. After ``training.max_skipped``
consecutive ones the run is rolled back: it continues from its newest checkpoint from before them, with the data after
them. If rollbacks do not help, the run stops with an explanation. A spike is only logged, with its cause.

After a rollback, update numbers and learning rates are those of the checkpoint; the position in the data is the one
where the run failed. The checkpoint records both, so continuing from it is an ordinary resume.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.loader import Update
from deepspeed_nmt.data.mixture import rolled_back
from deepspeed_nmt.engine.contract import UpdateResult
from deepspeed_nmt.errors import CheckpointError, TrainingError, listed
from deepspeed_nmt.parallel.collectives import fail_together, gather_lists, sum_over_data_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.events import NO_EVENTS, Events
from deepspeed_nmt.train.log import layer_of
from deepspeed_nmt.train.progress import LogState, Progress

_NAMED_LAYERS = 4
_NO_LOG = LogState()
_SPIKE_WINDOW, _SPIKE_HISTORY = 100, 10
_ON_THE_SAME_RUN = (
    "Lower optimizer.lr, lengthen schedule.warmup_updates, or set optimizer.clip_norm, and start again on the same "
    "run (remove its newest checkpoints first to go further back). model.norm=pre helps, too, but needs a new --run "
    "directory"
)
_ON_A_NEW_RUN = (
    "Start in a new --run directory, from the beginning or from the weights of another run (--init-from), with a "
    "lower optimizer.lr, a longer schedule.warmup_updates, optimizer.clip_norm, or model.norm=pre"
)
_WITH_A_DISK = "Make the run directory writable, and start again"


def report_skip(
    update: Update,
    result: UpdateResult,
    in_a_row: int,
    parameters: Sequence[str],
    world: World,
    events: Events = NO_EVENTS,
    attributed: str = "",
) -> str:
    """Warn of a skipped update, once for all ranks, and return its cause. All ranks call it together.

    Of the named ``parameters``, culprits are listed from the last, as the backward pass reaches them. ``attributed``
    is the cause found by computing the update again.
    """
    sums = sum_over_data_ranks({name: float(value) for name, value in result.sums.items()}, world)
    losses = [name for name, value in sums.items() if not math.isfinite(value)]
    culprits = set(gather_lists(list(result.culprits), world))
    layers = list(dict.fromkeys(layer_of(name) for name in reversed(parameters) if name in culprits))
    cause = f"{' and '.join(losses)} {'are' if len(losses) > 1 else 'is'} not finite" if losses else ""
    if layers:
        where = f"the gradient of {listed(layers, _NAMED_LAYERS)} is not finite"
        cause = f"{cause}; {where}" if cause else where
    cause = "; ".join(filter(None, (cause or "the gradient is not finite", attributed)))
    text = f"update {update.number} skipped: {cause}"
    if world.is_main:
        logger.warning("%s (loss scale %g, %d in a row)", text, result.loss_scale, in_a_row)
    events.record("skip", update.number, text, cause=cause, loss_scale=result.loss_scale, in_a_row=in_a_row)
    return cause


def report_spike(
    spike: Spike, update: Update, world: World, events: Events = NO_EVENTS, attributed: str = ""
) -> None:
    """Warn of a spike. ``attributed`` is the cause found by computing the update again."""
    text = "; ".join(filter(None, (spike.text, attributed)))
    events.record("spike", update.number, text, cause=attributed, **spike.details)
    if world.is_main:
        logger.warning("%s", text)


def roll_back(
    store: CheckpointStore,
    progress: Progress,
    cause: str,
    max_rollbacks: int,
    update_tokens: int,
    world: World,
    events: Events = NO_EVENTS,
) -> None:
    """Roll back to the newest checkpoint from before the skipped updates, with the data after them.

    All ranks call it together. ``progress`` is that after the last skipped update. If there is no such checkpoint, or
    ``max_rollbacks`` is reached, the training has failed.
    """
    with fail_together(world):
        problem, remedies = "", ""
        if world.is_main:
            problem, remedies = _roll_back(store, progress, max_rollbacks, update_tokens, events)
        if problem:
            raise TrainingError(
                f"{progress.skipped} updates in a row, up to update {progress.update}, had no finite gradient "
                f"({cause}), and {problem}. The training has diverged. {remedies}"
            )


def _roll_back(
    store: CheckpointStore, progress: Progress, max_rollbacks: int, update_tokens: int, events: Events
) -> tuple[str, str]:
    """Roll back on rank 0, and return the problem and its remedies; both are empty on success."""
    if progress.retries >= max_rollbacks:
        limit = f"training.max_rollbacks is {max_rollbacks}. The last checkpoint is intact"
        return f"no more rollbacks are allowed: {limit}", _ON_THE_SAME_RUN
    try:
        checkpoint = store.newest(until=progress.update - progress.skipped)
        if checkpoint is None or not checkpoint.resumable:  # resumable: saved after Adam's first step
            return f"there is no checkpoint from before them in {store.directory} to go back to", _ON_A_NEW_RUN
        first = checkpoint.progress.update + 1
        store.rewind(
            checkpoint,
            replace(
                checkpoint.progress,
                epoch=progress.epoch,
                epoch_update=progress.epoch_update,
                train_seconds=progress.train_seconds,
                skipped=0,
                rollbacks=progress.rollbacks + 1,
                retries=progress.retries + 1,
                failed_at=max(progress.update, progress.failed_at),
                phases=rolled_back(progress.phases, progress.update, first, update_tokens),
            ),
        )
    except (CheckpointError, OSError) as error:
        remedies = _WITH_A_DISK if isinstance(error, OSError) else _ON_A_NEW_RUN
        return f"going back to a checkpoint failed ({error})", remedies
    back_to, retries = checkpoint.progress.update, checkpoint.progress.retries
    logger.warning(
        f"{progress.skipped} updates in a row skipped: rolling back from update {progress.update} to {back_to}, and "
        f"on with the data after them (rollback {retries} of {max_rollbacks} before update "
        f"{checkpoint.progress.failed_at} is passed)"
    )
    text = f"{progress.skipped} updates in a row skipped: rolled back from update {progress.update} to {back_to}"
    events.record("rollback", progress.update, text, to_update=back_to, rollbacks=progress.rollbacks + 1)
    return "", ""


@dataclass(frozen=True)
class Spike:
    """A spike: a sentence that says of what, and the values with their medians, by the names that an event has."""

    text: str
    details: dict[str, float]


class SpikeWatch:
    """Detector of spikes, and their count.

    A spike is an update whose loss, or whose norm of the gradient, is more than a factor times the median of those
    before (0 disables).
    """

    def __init__(self, loss_factor: float, norm_factor: float = 0.0, log: LogState = _NO_LOG) -> None:
        self.count = log.spikes
        self._factors = {"loss": loss_factor, "norm": norm_factor}
        self._past = {
            name: deque(values, maxlen=_SPIKE_WINDOW) for name, values in (("loss", log.losses), ("norm", log.norms))
        }

    def state(self) -> dict[str, Any]:
        """Return the part of LogState that it continues from."""
        return {"spikes": self.count, "losses": tuple(self._past["loss"]), "norms": tuple(self._past["norm"])}

    def __call__(self, update: Update, result: UpdateResult, world: World) -> Spike | None:
        """Return the spike that an update which is not skipped is; None if it is none. All ranks call it together."""
        watched = [name for name, factor in self._factors.items() if factor > 0.0]
        if not watched:
            return None
        known: dict[str, Tensor | float] = {"loss": result.sums["loss"], "norm": result.grad_norm}
        # Also of the norm, so that all ranks judge the same value even if a device has computed another one.
        sums = sum_over_data_ranks({name: float(known[name]) for name in watched}, world)
        values = {
            "loss": sums.get("loss", 0.0) / update.target_tokens,
            "norm": sums.get("norm", 0.0) / world.data_ranks,
        }
        texts: list[str] = []
        details: dict[str, float] = {}
        for name in watched:
            value, past = values[name], self._past[name]
            usual, count = median(past) if len(past) >= _SPIKE_HISTORY else math.inf, len(past)
            past.append(value)
            if value > self._factors[name] * usual and usual > 0.0:
                times = value / usual
                texts.append(
                    f"the loss of update {update.number}, {value:.3f} nats a token, is {times:.1f} times the median "
                    f"of the last {count} updates, {usual:.3g}"
                    if name == "loss"
                    else f"the norm of the gradient of update {update.number}, {value:.3g}, is {times:.1f} times the "
                    f"median of the last {count} updates, {usual:.3g}"
                )
                details |= {name: value, "median" if name == "loss" else "norm_median": usual}
        if not texts:
            return None
        self.count += 1
        return Spike("; ".join(texts), details)
