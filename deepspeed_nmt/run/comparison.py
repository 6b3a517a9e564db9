"""Checks of runs and a test set, before anything is translated, so that their scores can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.parallel_text import ParallelText


def common_scorer(runs: Sequence[Run], text: ParallelText) -> Scorer:
    """Return the scorer of all runs on a test set.

    Args:
        runs: at least one.
        text: the test set. That of a data directory is compared with the form of each run's text; another vocabulary
            causes a warning.

    Raises:
        ConfigError: if the runs translate into different forms of text, or the test set has another one.
    """
    if text.data is not None:
        _check_data(runs, text.data)
    first, *others = runs
    scorer = first.scorer(text.references)
    for run in others:
        conflict = run.text_form.contradicts(first.text_form)
        if conflict or not run.scorer(text.references).scores_as(scorer):
            raise ConfigError(
                f"the runs must translate into text of one form, but {run.path} and {first.path} do not; compare "
                "them with `score`"
            )
    return scorer


def _check_data(runs: Sequence[Run], data: DataDirectory) -> None:
    for run in runs:
        if run.text_form.contradicts(data.text_form):
            raise ConfigError(
                f"--data must have text of the form that {run.path} was trained on, which is {run.text_form}, but "
                f"that of {data.path} is {data.text_form}; give the data of the run, or --input and --reference"
            )
    other = [
        str(run.path) for run in runs if {name: run.files.get(name) for name in data.vocabulary} != data.vocabulary
    ]
    if other:
        logger.warning(
            "the vocabulary of %s is not that of %s: is it the right test set, and segmented alike?",
            data.path,
            ", ".join(other),
        )
