"""Settings of training: the sections ``training``, ``schedule``, ``collapse`` and ``validation`` of a run.

They are read by every command that opens a run, so this module imports nothing heavy.

The validation set of the training data is the main one. Others have names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from deepspeed_nmt.data.batching import MAX_TOKENS
from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.evaluate.command_metrics import CommandMetric
from deepspeed_nmt.evaluate.metrics import AUTO, METRICS, Metric, in_language
from deepspeed_nmt.registry import Section
from deepspeed_nmt.text import Kind, TextForm
from deepspeed_nmt.train.progress import Progress

Event = Literal[
    "start",
    "resume",
    "skip",
    "spike",
    "rollback",
    "growth",
    "collapse",
    "saved",
    "unsaved",
    "best",
    "stop",
    "end",
    "failure",
]

Probe = Literal["auto", "always", "never"]
Save = Literal["background", "blocking"]


class TrainingConfig(Section):
    """Length of training, and intervals of logging, validation and checkpoints."""

    seed: int = Field(default=1, ge=0, lt=1 << 63, description="seed of initial weights, data order, and dropout")
    max_updates: int = Field(default=100_000, ge=1, description="number of updates after which training ends")
    max_epochs: int = Field(default=0, ge=0, description="number of epochs after which training ends; 0: no limit")
    log_every: int = Field(default=100, ge=1, description="updates between lines of the log")
    validate_every: int = Field(default=0, ge=0, description="updates between validations; 0: once an epoch")
    save_every: int = Field(default=0, ge=0, description="updates between checkpoints; 0: with each validation")
    save: Save = Field(
        default="background",
        description="background: training waits only until a checkpoint is copied to host memory, if that has room; "
        "blocking: until it is written",
    )
    keep_last: int = Field(default=5, ge=1, description="number of newest checkpoints to keep")
    keep_best: bool = Field(default=True, description="also keep the best checkpoint")
    patience: int = Field(
        default=0,
        ge=0,
        description="early stopping: validations in a row that are no better than the best and end training; 0: off",
    )
    max_skipped: int = Field(
        default=20, ge=1, description="updates in a row without a finite gradient that cause a rollback"
    )
    max_rollbacks: int = Field(
        default=2, ge=0, description="rollbacks in a row that may fail to pass the same update; then the run stops"
    )
    checksum_every: int = Field(
        default=0,
        ge=0,
        description="updates between comparisons of all data-parallel ranks' weights, bit for bit; 0: never; under "
        "ZeRO-3 there are no replicas to compare",
    )
    spike_factor: float = Field(
        default=0.0, ge=0.0, description="warn of a loss above this multiple of the median of 100 updates; 0: off"
    )
    norm_spike_factor: float = Field(
        default=0.0,
        ge=0.0,
        description="the same for the norm of the gradient, which varies more: 10 is rare; 0: off",
    )
    probe: Probe = Field(
        default="auto",
        description="test that the largest micro-batch fits before the first update; auto: on GPUs only",
    )
    norms_every: int = Field(
        default=100, ge=0, description="updates between norms of gradient and weight change by layer; 0: never"
    )
    notify: str = Field(
        default="",
        description="command that runs in the background for some events, with the event in JSON on stdin; no shell "
        "runs it",
    )
    notify_on: tuple[Event, ...] = Field(
        default=("stop", "failure", "collapse", "unsaved", "best", "end"),
        description="events for which training.notify runs",
    )

    @field_validator("notify", mode="before")
    @classmethod
    def _is_split(cls, notify: object) -> object:
        if isinstance(notify, str):
            words_of(notify)
        return "" if notify is None else notify  # `training.notify=` on the command line

    def updates_left(self, progress: Progress, epoch_updates: int) -> int:
        """Return the updates until training is over by its length, with ``epoch_updates`` in each epoch."""
        left = self.max_updates - progress.update
        if self.max_epochs:
            left = min(left, (self.max_epochs - progress.epoch) * epoch_updates - progress.epoch_update)
        return max(0, left)

    def ends_at(self, progress: Progress) -> bool:
        """Return True if training is over at this progress, by its length or by early stopping."""
        return (
            progress.update >= self.max_updates
            or bool(self.max_epochs and progress.epoch >= self.max_epochs)
            or self.stops_early(progress)
        )

    def stops_early(self, progress: Progress) -> bool:
        """Return True if early stopping ends training at this progress."""
        return 0 < self.patience <= progress.validations_since_best


def words_of(command: str) -> list[str]:
    """Split a command into words as a shell does; raise a ValueError if a quotation is not closed."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"is {command!r}, whose quotations are not closed ({error})") from None


class CollapseConfig(Section):
    """Detection of decoders that ignore their source, or what they have written."""

    every: int = Field(default=500, ge=0, description="updates between measurements; 0: never")
    sentences: int = Field(default=128, ge=2, description="size of the slice of the validation set")
    threshold: float = Field(
        default=0.2, ge=0.0, description="source or prefix reliance, in nats per token, that is too low"
    )
    grace: int = Field(
        default=0,
        ge=0,
        description="updates before the first judgement; 0: twice the warm-up, and as long as the loss falls as at "
        "the start",
    )
    patience: int = Field(default=2, ge=1, description="measurements in a row that must be bad")
    action: Literal["warn", "stop"] = Field(
        default="warn", description="what to do then: warn, or save and stop the run"
    )


MAIN, MEAN = "", "mean"
"""Names for the validation set of the training data, and for the mean over all sets."""
LOSSES = ("loss", "nll", "ppl")
"""Values of every validation set besides metrics."""
MAIN_DIRECTORY = "main"
"""Name of the main set where a set needs one, such as its directory."""
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")


def _named_sets(value: object) -> object:
    """Check names of validation sets, which are parts of tags and of settings, and remove the sets that are null."""
    if not isinstance(value, dict):
        return value
    sets = {str(name): directory for name, directory in value.items() if directory is not None}
    for name, directory in sets.items():
        if not _SET_NAME.fullmatch(name):
            raise ValueError(f"has the name {shown(name)}; use letters, digits, - and _, 50 at most")
        if name in (MEAN, "auto", *LOSSES, *METRICS):
            raise ValueError(f"has the name {shown(name)}, which is that of a measure; give another one")
        if name == MAIN_DIRECTORY:
            raise ValueError(f"has the name {name}, which is that of the training data's set; give another one")
        if directory == "":
            raise ValueError(f"has no data directory for {name}; give one")
    return sets


def _known(value: object) -> object:
    """Check names of metrics, and programs among them."""
    known = f"{', '.join(METRICS)}, command:PATH, late:PATH"
    if value != "auto" and not isinstance(value, list | tuple):
        raise ValueError(f"is {shown(value)}; give auto or a list of {known}")
    programs: dict[str, str] = {}
    for name in () if isinstance(value, str) else value:
        if isinstance(name, str) and (program := CommandMetric.parse(name)) is not None:
            if programs.setdefault(program.name, name) != name:
                raise ValueError(
                    f"has {shown(programs[program.name])} and {shown(name)}, which are both {program.name}; put "
                    "NAME= in front of one"
                )
        elif not isinstance(name, str) or name not in METRICS:
            raise ValueError(f"has {shown(name)}, which is none of {known}")
    return value


class ValidationConfig(Section):
    """Validation during training."""

    metrics: Annotated[tuple[str, ...] | Literal["auto"], BeforeValidator(_known)] = Field(
        default="auto",
        description=f"metrics of the translated validation set, of {', '.join(METRICS)}, and programs: command:PATH, "
        "or late:PATH if the result comes later, NAME= in front of them for another name than the file's, :lower at "
        "the end if lower is better; []: it is not translated; auto: bleu, bleu_tokenised, or both, as the form of "
        "the text allows",
    )
    sets: Annotated[dict[str, str], BeforeValidator(_named_sets)] = Field(
        default={},
        description="further validation sets: the data directory of each by its name; null removes one",
    )
    best_by: str = Field(
        default="auto",
        description="measure that chooses the best checkpoint: loss or a metric; of a named set as NAME/METRIC, of "
        "the mean over all sets as mean/METRIC; auto: the first metric, without one the loss; of scores equal to two "
        "decimals, of programs to four, or BLEU below 1, the one of lower loss",
    )
    significant: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="level of significance: only a gain of the metric with a p-value below it, by paired bootstrap, "
        "resets training.patience; 0: any gain does",
    )
    command_s: float = Field(
        default=900.0, gt=0.0, le=1e8, description="time limit in seconds of a command:PATH metric"
    )
    late_keep: int = Field(
        default=5,
        ge=1,
        description="number of newest checkpoints to keep while their scores by a late:PATH metric that chooses the "
        "best are to come, for `choose-best`",
    )
    keep_translations: int = Field(
        default=0, ge=0, description="number of newest translations of each validation set to keep; 0: all"
    )
    max_sentences: int = Field(
        default=0, ge=0, description="number of sentences of each set to translate, the first ones; 0: all"
    )
    max_tokens: int = Field(
        default=4096, ge=1, le=MAX_TOKENS, description="batch size of the search: sentences x longest source"
    )
    attention_images: int = Field(
        default=3,
        ge=0,
        le=20,
        description="number of sentences whose cross-attention is drawn for TensorBoard at each validation",
    )

    @field_validator("best_by")
    @classmethod
    def _is_measured(cls, best_by: str, info: ValidationInfo) -> str:
        if not {"metrics", "sets"} <= info.data.keys():  # they are wrong themselves
            return best_by
        metrics, sets = info.data["metrics"], info.data["sets"]
        measures = ["loss", *(METRICS if metrics == "auto" else _names(metrics))]
        of, slash, name = best_by.rpartition("/")
        known, is_of_sets = ["auto", *measures], slash and name in measures and sets and of in (MEAN, *sets)
        if best_by not in known and not is_of_sets:
            places = "".join(f", {place}/ followed by a measure" for place in (*sets, MEAN) if sets)
            raise ValueError(
                f"is {shown(best_by)}, which is none of {', '.join(known)}{places}; give one, or add it to "
                "validation.metrics or validation.sets"
            )
        return best_by

    @field_validator("significant")
    @classmethod
    def _has_translations(cls, significant: float, info: ValidationInfo) -> float:
        metrics, best_by = info.data.get("metrics"), info.data.get("best_by", "auto")
        if significant and (best_by.rpartition("/")[2] == "loss" or (best_by == "auto" and metrics == ())):
            raise ValueError(
                f"is {significant}, but a loss chooses the best checkpoint, and only translations are compared; use "
                "0, or set validation.best_by to a metric"
            )
        return significant

    @property
    def commands(self) -> Mapping[str, CommandMetric]:
        """Metrics that are programs, by name."""
        metrics = () if isinstance(self.metrics, str) else map(CommandMetric.parse, self.metrics)
        return {metric.name: metric for metric in metrics if metric is not None}

    def knows(self, measure: str) -> bool:
        """Return True if a measure has a direction here; a program of other settings has none."""
        return measure.rpartition("/")[2] in {*LOSSES, *METRICS, *self.commands}

    def is_higher_better(self, measure: str) -> bool:
        """Return the direction of a measure, perhaps of a set as SET/METRIC."""
        metric = {**METRICS, **self.commands}.get(measure.rpartition("/")[2])
        return metric is not None and metric.higher_is_better

    def value_of(self, best_by: str | None, score: float) -> float:
        """Return the value of the measure ``best_by`` that progress has as this score, greater is better."""
        measure = (best_by or "").partition(" ")[0].removeprefix("valid/")
        if not self.knows(measure):
            return abs(score)
        return score if self.is_higher_better(measure) else -score

    @property
    def best_measure(self) -> str:
        """Name of the measure that chooses the best checkpoint; "" if the form of the text decides."""
        name = self.best_by.rpartition("/")[2]
        if name != "auto" or isinstance(self.metrics, str):
            return "" if name == "auto" else name
        return next(iter(_names(self.metrics)), "loss")

    @property
    def chooses(self) -> str:
        """Name of the validation set whose values choose the best checkpoint: MAIN, MEAN, or of a set."""
        return self.best_by.rpartition("/")[0]

    def located(self) -> ValidationConfig:
        """Return the settings with absolute paths, so that a run is resumed in any working directory."""
        sets = {name: str(Path(directory).absolute()) for name, directory in self.sets.items()}
        metrics = self.metrics
        if not isinstance(metrics, str):
            metrics = tuple(str(CommandMetric.parse(metric) or metric) for metric in metrics)
        return self.model_copy(update={"sets": sets, "metrics": metrics})

    def chosen(self, text: TextForm, of: str = MAIN) -> tuple[tuple[Metric, ...], Metric | None]:
        """Return the metrics of a validation set, and the one that chooses the best checkpoint; None for the loss.

        Raises:
            ConfigError: if the text cannot be brought into the form that a metric requires.
        """
        where = f"in validation.sets.{of} " if of else ""
        names = AUTO[text.form] if isinstance(self.metrics, str) else _names(self.metrics)
        # Programs score plain text where it can be made.
        kind: Kind = "tokenised" if text.problem("plain") else "plain"
        known: dict[str, Metric] = {**METRICS}
        known |= {name: replace(metric, kind=kind) for name, metric in self.commands.items()}
        best = self.best_by.rpartition("/")[2]
        if self.chooses in (of, MEAN) and best not in ("auto", "loss"):
            names = (*names, best)
        metrics = tuple(in_language(known[name], text.target_lang) for name in dict.fromkeys(names))
        problems = [
            f"the metric {metric.name} needs {metric.kind} text, but {where}{reason}; set validation.metrics and "
            "validation.best_by to others, or run `prepare` again with --text and --target-lang"
            for metric in metrics
            if (reason := text.problem(metric.kind))
        ]
        if problems:
            raise ConfigError(problems)
        return metrics, next((metric for metric in metrics if best in ("auto", metric.name)), None)


def _names(metrics: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of metrics, of a program that by which it is logged."""
    programs = map(CommandMetric.parse, metrics)
    return tuple(name if program is None else program.name for name, program in zip(metrics, programs, strict=True))
