"""Validation, as the training loop sees it: values for the log, and a score that chooses the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.train.events import Detail, Events
from deepspeed_nmt.train.progress import Progress


@dataclass(frozen=True)
class Choice:
    """Choice of the best checkpoint among validations.

    Attributes:
        by: description of the measure that chooses; scores by equal ones can be compared.
        tags, losses: tags of its values, whose mean is the score, and of losses that decide between equal ones.
        mean: tags under which these two means are logged; "" if they are those of one set.
        sign: -1 if smaller values are better.
        least: score below which only losses are compared.
        decimals: number of decimals in which scores are compared.
    """

    by: str
    tags: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    mean: tuple[str, str] = ("", "")
    sign: Literal[-1, 1] = 1
    least: float = -math.inf
    decimals: Annotated[int, Field(ge=0, le=15)] = 2

    def validation(self, values: Mapping[str, float]) -> Validation:
        """Return the validation with values by tag, and means; one that is missing leaves the score unknown."""
        mean, score = {}, -math.inf
        loss = mean[self.mean[1]] = fmean(values[tag] for tag in self.losses)
        if all(tag in values for tag in self.tags):
            value = mean[self.mean[0]] = fmean(values[tag] for tag in self.tags)
            score = self.sign * value
        mean.pop("", None)
        return Validation({**values, **mean}, self, score, loss)

    def rank(self, score: float, loss: float) -> tuple[float, float]:
        """Return a key that sorts validations, the best last; NaN is worse than any number."""
        shown = round(score, self.decimals) if score >= self.least else -math.inf
        return shown, -math.inf if math.isnan(loss) else -loss


@dataclass(frozen=True)
class Validation:
    """Result of a validation.

    Attributes:
        values: values for the log, by tag.
        score: value that chooses, with its sign changed if smaller ones are better; -inf if it is not known.
        loss: validation loss, which decides between equal scores.
        awaits_score: True if the score comes later, for `choose-best`.
        samples: translations of a few sentences, in Markdown, by tag.
        images: grey images by tag, on rank 0. Shape: (height,width) each
    """

    values: dict[str, float]
    choice: Choice
    score: float
    loss: float
    awaits_score: bool = False
    samples: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)

    @property
    def is_near_chance(self) -> bool:
        """True if the score is so low that only losses are compared."""
        return self.score < self.choice.least

    def improves_on(self, progress: Progress) -> bool:
        """Return True if this validation is better than the best so far: by its score, at equal scores by its loss.

        Scores by different measures are not compared: the first one by a new measure is the best.
        """
        if progress.best_score is None or progress.best_loss is None or progress.best_by != self.choice.by:
            return True
        best = self.choice.rank(progress.best_score, progress.best_loss)
        return self.choice.rank(self.score, self.loss) > best


class Validator(Protocol):
    """Validator of the model after the newest update. All ranks call it together and get the same result."""

    def __call__(self, progress: Progress) -> Validation:
        """Validate after the newest update."""

    def is_significantly_better(self, update: int, than: int) -> bool:
        """Return True if an update's translations are significantly better, or significance does not matter."""


def update_best(
    progress: Progress, validation: Validation, is_significantly_better: Callable[[int, int], bool]
) -> tuple[Progress, bool]:
    """Return the progress after a validation, and True if it is the best so far.

    A validation without a score is no reason to stop early. It is the best one only as long as no score is known.
    """
    since, update = progress.validations_since_best, progress.update
    if not validation.improves_on(progress):
        return replace(progress, validations_since_best=since + (validation.score != -math.inf)), False
    by, before = validation.choice.by, progress.best_score
    if progress.best_update and progress.best_by != by:
        logger.info(
            "scores by %s are not compared with those up to update %d, by %s: the choice of the best checkpoint "
            "begins anew",
            by, update - 1, progress.best_by,
        )  # fmt: skip
    is_comparable = before is not None and math.isfinite(before) and progress.best_by == by
    resets_patience = (
        not is_comparable
        or validation.is_near_chance
        or is_significantly_better(update, progress.patience_update or progress.best_update)
    )
    return replace(
        progress,
        best_score=validation.score,
        best_loss=validation.loss,
        best_by=by,
        best_update=update,
        validations_since_best=0 if resets_patience else since + 1,
        patience_update=update if resets_patience else progress.patience_update,
    ), True


def record_best(events: Events, update: int, validation: Validation) -> None:
    """Record that a validation is the best so far: by its score, or by its loss while only losses are compared."""
    choice, loss = validation.choice, validation.loss
    measure, decimals, value = choice.by.partition(" ")[0], choice.decimals, choice.sign * validation.score
    if validation.is_near_chance:
        measure, value, decimals = f"{measure.rpartition('/')[0]}/loss", loss, 4
    if not math.isfinite(value):
        return
    text = f"update {update} is the best so far: {measure} {value:.{decimals}f}"
    details: dict[str, Detail] = {"measure": measure, "score": value, "loss": loss}
    events.record("best", update, text, **details, best_update=update)


class Replica:
    """Unsharded copy of the model in eval mode; it is on the engine's device only while it is in use."""

    def __init__(self, model: TranslationModel, engine: Engine, dtype: torch.dtype = torch.float32) -> None:
        assert not list(model.buffers()), "weights are all that the engine gives"
        self._model = model.to("cpu", dtype).eval()
        self._engine = engine
        self._update: int | None = None

    @contextmanager
    def at(self, update: int) -> Iterator[TranslationModel]:
        """Yield the model after ``update``, the engine's newest; weights are gathered once for each update.

        All ranks call it together.
        """
        device = self._engine.device
        try:
            if self._update != update:
                self._update = None
                if device.type != "cpu":  # old weights are not copied to a GPU, only to be overwritten there
                    self._model.to_empty(device=device)
                own = dict(self._model.named_parameters())
                with torch.no_grad():
                    for state in self._engine.parameters():
                        own[state.name].copy_(state.weight)
                self._update = update
            self._model.to(device)
            yield self._model
        finally:
            self._model.cpu()
            if device.type == "cuda":  # decoding had blocks of other sizes, which training cannot use
                torch.cuda.empty_cache()
