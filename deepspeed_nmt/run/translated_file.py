"""A file to translate in pieces, and what its translation depends on. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

from deepspeed_nmt import __version__
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.run.divided_text import Text, source_digest
from deepspeed_nmt.run.pieces import SOURCE
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.text import TextForm


class Digested(Protocol):
    """A vocabulary, of which the hash is needed."""

    @property
    def digest(self) -> str:
        """Hash of its files."""
        ...


class Located(Protocol):
    """A device."""

    @property
    def type(self) -> str:
        """Its kind: cpu or cuda."""
        ...


class Bounded(Protocol):
    """A model."""

    @property
    def longest_source(self) -> int | None:
        """Most tokens of a source that it reads, EOS included; None if unlimited."""
        ...


class FileTranslator(Protocol):
    """A translator of either program; see ``deepspeed_nmt.api.Translator``."""

    text: TextForm
    max_source_tokens: int

    @property
    def search(self) -> SearchConfig:
        """The search and its settings."""
        ...

    @property
    def precision(self) -> str:
        """Precision of the weights."""
        ...

    @property
    def device(self) -> Located:
        """Device that translates."""
        ...

    @property
    def model(self) -> Bounded:
        """The model."""
        ...

    @property
    def tokenizer(self) -> Digested:
        """Tokenizer of the run."""
        ...

    @property
    def digests(self) -> tuple[str, ...]:
        """Hashes of the weights."""
        ...

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long."""
        ...

    @property
    def stream(self) -> Callable[..., Iterator[list[Translation]]]:
        """Function that yields the best translations of each sentence."""
        ...


@dataclass(frozen=True)
class FileToTranslate:
    """A file to translate, and how.

    Attributes:
        source: the text, at its beginning.
        name: of the text.
        target: file to write.
        lines: number of lines of the text.
        piece_lines: number of lines of a piece.
        max_tokens: batch size: sentences x longest source.
        max_source_tokens: bound of a line; None for that of the run.
        strict: True to refuse longer lines.
        nbest: number of translations of each line.
        token_scores: True for the log-probability of each token.
        options: options on which the translation depends, as they are typed.
        beside: texts that have a line for each line of the source, by the names of arguments of
            ``Translator.stream``, each at its beginning.
        alignment: file to write alignments to; None for no alignments.
        alignment_layer: decoder layer that aligns; None for the best.
    """

    source: BufferedReader
    name: str
    target: Path
    lines: int
    piece_lines: int
    max_tokens: int
    max_source_tokens: int | None = None
    strict: bool = False
    nbest: int = 1
    token_scores: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Text] = field(default_factory=dict)
    alignment: Path | None = None
    alignment_layer: int | None = None

    @property
    def texts(self) -> dict[str, Text]:
        """All texts by name, the source first."""
        return {SOURCE: Text(self.source, self.name), **self.beside}

    @property
    def details(self) -> dict[str, Any]:
        """Arguments of ``Translator.stream`` for what is asked for beside the text."""
        aligned = {"alignment": True, "alignment_layer": self.alignment_layer} if self.alignment is not None else {}
        return {**({"token_scores": True} if self.token_scores else {}), **aligned}


def description_of(file: FileToTranslate, search: SearchConfig, device: str, precision: str) -> dict[str, Any]:
    """Return all that the translation depends on, but for the models.

    A setting of the search has the name of its option, and the value that decodes.
    """
    settings = search.model_dump(mode="json")
    typed = {key: f"--{'search' if key == 'name' else key.replace('_', '-')}" for key in settings}
    return {
        **file.options,
        "the source text": source_digest(file.source),
        **{f"the text of --{name}": source_digest(text.stream) for name, text in file.beside.items()},
        "--alignment": file.alignment is not None,
        "--precision": precision,  # auto differs from one GPU to another
        **{typed[key] if typed[key] in file.options else f"search.{key}": settings[key] for key in settings},
        "the device": device,
        "the version of the program": __version__,
    }
