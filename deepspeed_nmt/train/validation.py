"""Validations, as the training loop sees them: values for the log, and a score that chooses the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from deepspeed_nmt.train.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Choice:
    """Choice of the best checkpoint among validations.

    Attributes:
        by: description of the measure that chooses; scores by equal ones can be compared.
        tags: tags of its values, whose mean is the score.
        losses: tags of the losses, whose mean decides between equal scores.
        mean: tags under which these two means are logged; "" if they are those of one set.
        sign: -1 if smaller values are better.
        least: score below which only losses are compared.
        decimals: number of decimals in which scores are compared.
    """

    by: str
    tags: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    mean: tuple[str, str] = ("", "")
    sign: int = 1
    least: float = -math.inf
    decimals: int = 2

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Choice:
        """Read a choice from JSON.

        Raises:
            KeyError: if a key is missing.
            TypeError: if there are other keys, or values of another type.
        """
        return cls(**{**content, **{name: tuple(content[name]) for name in ("tags", "losses", "mean")}})

    def validation(self, values: Mapping[str, float], pending_limit: int = 0) -> Validation:
        """Return the validation with these values, the means that choose among them.

        Args:
            values: by tag. One that is missing leaves the score unknown.
            pending_limit: number of newest validations whose scores may be pending, if that of this one is.
        """
        values, score = dict(values), -math.inf
        loss = fmean(values[tag] for tag in self.losses)
        if self.mean[1]:
            values[self.mean[1]] = loss
        if all(tag in values for tag in self.tags):
            value = fmean(values[tag] for tag in self.tags)
            score = self.sign * value
            if self.mean[0]:
                values[self.mean[0]] = value
        return Validation(values, self, score, loss, pending_limit)


@dataclass(frozen=True)
class Validation:
    """Result of a validation.

    Attributes:
        values: values for the log, by tag.
        choice: choice of the best checkpoint.
        score: value that chooses, with its sign changed if smaller ones are better; -inf if it is not known.
        loss: validation loss, which decides between equal scores.
        pending_limit: number of newest validations whose scores may be pending, if that of this one is; otherwise 0.
        samples: translations of a few sentences, in Markdown, by tag.
        images: grey images for the log, by tag, on rank 0. Shape: (height,width) each
    """

    values: dict[str, float]
    choice: Choice
    score: float
    loss: float
    pending_limit: int = 0
    samples: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, NDArray[np.uint8]] = field(default_factory=dict)

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Validation:
        """Read a validation without samples and images from JSON; errors as of :meth:`Choice.read`."""
        return cls(**{**content, "choice": Choice.read(content["choice"])})

    @property
    def is_near_chance(self) -> bool:
        """True if the score is so low that only losses are compared."""
        return self.score < self.choice.least

    def improves_on(self, progress: Progress) -> bool:
        """Return True if this validation is better than the best so far: by its score, at equal scores by its loss.

        Scores by different measures are not compared: the first one by a new measure is the best.
        """
        if progress.best_score is None or progress.best_by not in (None, self.choice.by):
            return True
        best_loss = math.inf if progress.best_loss is None else progress.best_loss
        return self._rank(self.score, self.loss) > self._rank(progress.best_score, best_loss)

    def _rank(self, score: float, loss: float) -> tuple[float, float]:
        """Return a key that sorts validations, the best last; NaN is worse than any number."""
        shown = round(score, self.choice.decimals) if score >= self.choice.least else -math.inf
        return shown, -math.inf if math.isnan(loss) else -loss


@dataclass(frozen=True)
class LateResult:
    """Late values of a validation.

    Attributes:
        update: update after which the model was validated.
        target_tokens: target tokens that the run had seen.
        values: values that have come since the last question, by tag.
        validation: the validation with all values that choose; None while one of them is pending.
    """

    update: int
    target_tokens: int
    values: dict[str, float]
    validation: Validation | None

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> LateResult:
        """Read a late result from JSON; errors as of :meth:`Choice.read`."""
        validation = content["validation"]
        return cls(**{**content, "validation": None if validation is None else Validation.read(validation)})


class Validator(Protocol):
    """Validator of the model after the newest update. All ranks call it together and get the same result."""

    def __call__(self, progress: Progress) -> Validation:
        """Validate after the newest update."""
        ...

    def late_results(self, pending: Sequence[int]) -> Sequence[LateResult]:
        """Return the late values that have come, and what is known of validations with pending scores, oldest first.

        Args:
            pending: updates of validations whose scores are pending.
        """
        ...

    def is_significantly_better(self, update: int, than: int) -> bool:
        """Return True if translations are significantly better than others, or significance does not matter.

        Args:
            update: update after which the translations were made.
            than: update of the others.
        """
        ...
