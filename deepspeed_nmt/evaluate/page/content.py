"""Content of a run's page besides its curves, gathered by :mod:`deepspeed_nmt.run.page`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["running", "finished", "stopped", "collapsed", "failed", "silent", "new"]


@dataclass(frozen=True)
class Status:
    """State of a run.

    Attributes:
        state: of training; ``collapsed`` if the decoder ignores its source, whatever became of training; ``silent``
            if nothing was written for a while and nothing says why.
        sentence: what is known of it.
    """

    state: State
    sentence: str


@dataclass(frozen=True)
class Tile:
    """A figure at the head of the page.

    Attributes:
        label: what it is.
        value: with its unit.
        note: a few words below it.
    """

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        title: caption.
        head: titles of the columns.
        rows: a cell for each column; the first cell names the row.
        folded: True if it is shown only on request.
        note: a sentence above it.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    note: str = ""


@dataclass(frozen=True)
class Best:
    """The best validation.

    Attributes:
        update: number of the update before it.
        tag: tag of the value that chose it.
        value: that value.
    """

    update: int
    tag: str
    value: float | None


@dataclass(frozen=True)
class Content:
    """A run in words.

    Attributes:
        name: name of the run.
        subtitle: what is trained on what, in a line.
        status: state of training.
        share: share of the updates that are made, 0 to 1.
        tiles: figures at the head.
        settings: tables of settings.
        data: tables of data.
        environment: tables of environment and versions.
        restarts: tables of starts.
        validation: tables of validation sets and test scores.
        best: the best validation; None before the first.
        missing: names of the run's files that are missing or cannot be read.
        threshold: source reliance below which a decoder counts as collapsed.
        guessing: loss of guessing, in nats a token; None if the vocabulary's size is not known.
        made_by: version of the program.
    """

    name: str
    subtitle: str
    status: Status
    share: float
    tiles: Sequence[Tile]
    settings: Sequence[Table]
    data: Sequence[Table]
    environment: Sequence[Table]
    restarts: Sequence[Table]
    validation: Sequence[Table]
    best: Best | None
    missing: Sequence[str]
    threshold: float
    guessing: float | None
    made_by: str
