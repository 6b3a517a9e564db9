"""Filter of pairs by a score that came with them, such as the likelihood of the target under a translation model.

The scores are made elsewhere, because a model is no part of `prepare`: `score-pairs` computes them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import override

from deepspeed_nmt.data.filters.base import FilterConfig, ScoreTest
from deepspeed_nmt.text import TextForm


class ScoreConfig(FilterConfig):
    """Settings of ``score``. It has no default: likelihoods depend on the model, the text and the vocabulary."""

    reads_scores: ClassVar[bool] = True

    min_score: float = Field(allow_inf_nan=False)
    """Smallest score of a pair that is kept; of `score-pairs`, the mean log-probability of a token (nats)."""

    @model_validator(mode="before")
    @classmethod
    def _has_bound(cls, given: Any) -> Any:
        if given == {}:
            raise ValueError(
                "must have the smallest score of a pair to keep, but has none; give it, for example score=-3"
            )
        return given

    @override
    def describe(self) -> str:
        return f"a score below {self.min_score:g}"


def score(config: ScoreConfig, text: TextForm) -> ScoreTest:
    """Build the filter ``score``."""
    return lambda value: value < config.min_score
