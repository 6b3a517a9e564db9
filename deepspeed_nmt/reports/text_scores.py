"""Scores of test sets, recorded in the directory of the run, so that no text is translated twice for a report."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deepspeed_nmt.api import Translator
from deepspeed_nmt.console import counting, logger
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import ConfigError, DataError, UserError
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.evaluate.scoring import read_sentences
from deepspeed_nmt.files import atomic_write_text, open_text, shown_name, text_lines
from deepspeed_nmt.registry import Config
from deepspeed_nmt.reports.run_log import read_file
from deepspeed_nmt.run.directory import SCORES_FILE, Run
from deepspeed_nmt.text import NO_TAGS, TextForm


@dataclass(frozen=True)
class ParallelText:
    """A test set: sources, and references as they stand in the file; ``data`` if it is that of a data directory."""

    name: str
    sources: list[str]
    references: list[str]
    data: DataDirectory | None = None

    @classmethod
    def of(cls, data: DataDirectory) -> ParallelText:
        """Read the test set of a data directory; see :meth:`read`."""
        return replace(cls.read(data.text("test", "source"), data.text("test", "target")), data=data)

    @classmethod
    def read(cls, source: Path, reference: Path) -> ParallelText:
        """Read a test set.

        Raises:
            DataError: if files cannot be read, are empty or not aligned, or if references are not UTF-8.
        """
        with open_text(source) as stream:
            sources = list(text_lines(stream, source))
        references = read_sentences(str(reference))
        if len(sources) != len(references) or not sources:
            names = f"{shown_name(source)} and {shown_name(reference)}"
            counts = f"{len(sources)} and {len(references)} lines"
            raise DataError(f"{names} have {counts}; give files of the same sentences")
        return cls(shown_name(source), sources, references)

    def form_of(self, run: Run) -> TextForm:
        """Return the form of the references and of a run's translations: that of the run, in the target language."""
        form, language = run.data.text, self.data and self.data.text_form.target_lang
        return replace(form, target_lang=language or form.target_lang)

    def tags_for(self, run: Run) -> dict[str, Any]:
        """Return the tags of the data, where a run has others, as options of :class:`Translator`."""
        tags = NO_TAGS if self.data is None else self.data.tags
        changed = {"tag": (tags.source, run.data.tags.source), "tag_target": (tags.target, run.data.tags.target)}
        return {name: tag for name, (tag, own) in changed.items() if tag not in (None, own)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of both sides."""
        return hashlib.sha256("\n".join([*self.sources, *self.references]).encode()).hexdigest()


def common_scorer(runs: Sequence[Run], text: ParallelText) -> Scorer:
    """Return the scorer of all runs (at least one) on a test set, by the BLEUs that they share.

    The text of a data directory is compared with the form of each run's text; another vocabulary causes a warning.

    Raises:
        ConfigError: if the runs translate into different forms of text, or the test set has another one.
    """
    if (data := text.data) is not None:
        for run in runs:
            if run.data.common_text.contradicts(data.text_form):
                raise ConfigError(
                    f"{run.path} was trained on text of the form {run.data.common_text}, and that of --data "
                    f"{data.path} is {data.text_form}; give the data of the run, or --input and --reference"
                )
        names = data.vocabulary
        if other := [str(run.path) for run in runs if {name: run.files.get(name) for name in names} != names]:
            question = "the vocabulary of %s is not that of %s: is it the right test set, and segmented alike?"
            logger.warning(question, data.path, ", ".join(other))
    forms = [text.form_of(run) for run in runs]
    bleus, *others = (run.bleus(form) for run, form in zip(runs, forms, strict=True))
    shared = [metric for metric in bleus if all(metric in other for other in others)]
    scorer = runs[0].scorer(text.references, forms[0], shared)
    for run, form in zip(runs[1:], forms[1:], strict=True):
        if form.contradicts(forms[0]) or not run.scorer(text.references, form, shared).scores_as(scorer):
            raise ConfigError(
                f"{run.path} and {runs[0].path} translate into text of different forms; compare them with `score`"
            )
    return scorer


class ScoreKey(Config):
    """Inputs of a score, of which equal ones give equal scores.

    They are digests of the sentences with references and of the checkpoint's weights, the metric's signature, and the
    settings of the search, with tags if they are not those of the run.
    """

    text: str
    signature: str
    weights: str
    search: dict[str, Any]


class RecordedScore(Config):
    """A score (0 to 100) of a test set, translated by the search of a run, with the signature to be published."""

    key: ScoreKey
    text: str
    lines: int
    checkpoint: str
    metric: str
    value: float
    signature: str


class _ScoreFile(Config):
    """The content of SCORES_FILE: scores in the order in which they were measured."""

    format: Literal[1] = 1
    scores: tuple[RecordedScore, ...] = ()


def recorded_scores(run: Path) -> tuple[RecordedScore, ...]:
    """Return the scores that are recorded in a run directory; none if their file cannot be read, with a warning."""
    if not (content := read_file(run, SCORES_FILE)):
        return ()
    try:
        return _ScoreFile.model_validate_json(content).scores
    except ValidationError:
        logger.warning("%s cannot be read; its scores are measured again when they are needed", run / SCORES_FILE)
        return ()


def score_text(
    run: Run, which: str, text: ParallelText, scorer: Scorer, max_tokens: int
) -> tuple[RecordedScore, ...]:
    """Return a score for each metric; the text is translated unless the run recorded all of them for these weights.

    A checkpoint that is missing or damaged is a CheckpointError.
    """
    checkpoint = run.checkpoints.open(which, verify=False)  # the translator verifies it
    tags = text.tags_for(run)
    search = run.config.search.model_dump(mode="json") | tags
    keys = {
        metric.name: ScoreKey(
            text=text.digest, signature=metric.signature(), weights=checkpoint.weights_digest, search=search
        )
        for metric in scorer.metrics
    }
    recorded = recorded_scores(run.path)
    known = {score.metric: score for score in recorded if score.key == keys.get(score.metric)}
    if known.keys() == keys.keys():
        return tuple(known[name] for name in keys)
    translator = Translator.open(run.path, checkpoint=checkpoint.path, **tags)
    with counting(f"{run.path}, {checkpoint.path.name}", "sentences", len(text.sources)) as advance:
        translated = translator.stream(text.sources, max_tokens=max_tokens, advance=advance)
        hypotheses = [best[0].text for best in translated]
    values = scorer(hypotheses)
    common: dict[str, Any] = {"text": text.name, "lines": len(text.sources), "checkpoint": checkpoint.path.name}
    measured = tuple(
        RecordedScore(key=key, metric=name, value=values[name], signature=key.signature, **common)
        for name, key in keys.items()
    )
    scores = (*recorded, *(score for score in measured if score.metric not in known))
    try:
        file = run.path / SCORES_FILE
        if file.is_symlink():  # it would be written to where the link leads
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
        atomic_write_text(file, _ScoreFile(scores=scores).model_dump_json(indent=1))
    except OSError as error:
        logger.warning("%s could not be written (%s)", run.path / SCORES_FILE, error.strerror or error)
    return measured


def score_runs(
    paths: Sequence[Path], which: str, text: ParallelText, max_tokens: int
) -> tuple[list[str], dict[Path, tuple[RecordedScore, ...]]]:
    """Return names of metrics, the same for all runs, and by run directory a score for each of them.

    A run that cannot translate the test set is left out with a warning.

    Raises:
        ConfigError: if the scores could not be compared; nothing is translated then.
        DataError: if no run can be opened.
    """
    runs: list[Run] = []
    for path in paths:
        with _warning_without_score(path):
            runs.append(Run.open(path))
    if not runs:
        raise DataError("no run can be opened to translate the test set; see above")
    scorer = common_scorer(runs, text)
    scores: dict[Path, tuple[RecordedScore, ...]] = {}
    for run in runs:
        with _warning_without_score(run.path):
            scores[run.path] = score_text(run, which, text, scorer, max_tokens)
            for score in scores[run.path]:
                label = f"{score.metric} {score.value:.2f} ({score.signature})"
                logger.info("%s, %s: %s", run.path, score.checkpoint, label)
    return [metric.name for metric in scorer.metrics], scores


def all_scores(
    paths: Sequence[Path], which: str, text: ParallelText | None, max_tokens: int
) -> dict[Path, list[RecordedScore]]:
    """Return the scores of each run: those of the test set, and of other texts those that it has recorded."""
    measured = {} if text is None else score_runs(paths, which, text, max_tokens)[1]
    others = {
        path: [score for score in recorded_scores(path) if text is None or score.key.text != text.digest]
        for path in paths
    }
    return {path: [*others[path], *measured.get(path, ())] for path in paths}


@contextmanager
def _warning_without_score(run: Path) -> Iterator[None]:
    """Log a mistake of the user, because of which a run has no score, as a warning."""
    try:
        yield
    except UserError as error:
        logger.warning("%s has no test score: %s", run, error)
