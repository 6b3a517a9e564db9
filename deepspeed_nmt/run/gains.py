"""Significance of a gain between two validations, from the translations that the run keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_nmt.console import logger
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, read_sentence_scores
from deepspeed_nmt.evaluate.metrics import Metric, TextMetric
from deepspeed_nmt.run.validation_texts import ValidationTexts, plain_kind
from deepspeed_nmt.text import TextForm, tokenise


@dataclass(frozen=True)
class Compared:
    """A validation set whose translations are compared.

    Attributes:
        texts: its translations.
        form: form of its text.
    """

    texts: ValidationTexts
    form: TextForm

    def lines(self, lines: Sequence[str], metric: Metric) -> list[str]:
        """Return lines as they are kept, in the kind that a metric scores."""
        if metric.kind == plain_kind(self.form) or self.form.target_lang is None:
            return list(lines)
        return list(tokenise(lines, self.form.target_lang))


def is_significant(metric: Metric, sets: Sequence[Compared], update: int, over: int, level: float) -> bool:
    """Return True if a gain is significant by paired bootstrap, or cannot be tested.

    Args:
        metric: the metric that chooses the best checkpoint.
        sets: sets whose mean it is; their sentences are resampled together.
        update: update of the better translations.
        over: update of those that they are compared with.
        level: level of significance.
    """
    found = _p_value(metric, sets, update, over)
    if found is None:
        logger.warning(
            "the gain of update %d over update %d counts as significant, because %s cannot be tested",
            update,
            over,
            metric.name,
        )
        return True
    logger.info(
        "%s of update %d against update %d: p = %.4f, %s",
        metric.name,
        update,
        over,
        found,
        "a significant gain" if found < level else "no significant gain (validation.significant)",
    )
    return found < level


def _p_value(metric: Metric, sets: Sequence[Compared], update: int, over: int) -> float | None:
    """Return the p-value of a difference; None if translations or scores of sentences are missing."""
    from deepspeed_nmt.evaluate.significance import p_value_of_scores

    sides: list[list[float]] = [[], []]
    texts: list[list[str]] = [[], [], []]
    for each in sets:
        for number, side in enumerate((update, over)):
            if isinstance(metric, CommandMetric):
                path = each.texts.sentences(side, metric.name)
                scores = read_sentence_scores(path, len(each.texts.references))
                if scores is None:
                    return None
                sides[number] += scores
            elif (lines := each.texts.read(side)) is None:
                return None
            else:
                texts[number] += each.lines(lines, metric)
        texts[2] += each.lines(each.texts.references, metric)
    if isinstance(metric, TextMetric):
        return metric.p_value(*texts)
    return p_value_of_scores(*sides)
