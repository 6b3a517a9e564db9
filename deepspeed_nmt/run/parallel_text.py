"""Test sets: source sentences and their references."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import open_text, shown_name, text_lines


@dataclass(frozen=True)
class ParallelText:
    """A test set.

    Attributes:
        name: of the source text, for people.
        sources: source sentences.
        references: reference translations as they stand in the file.
        data: data directory that the test set is from; None if it is from files.
    """

    name: str
    sources: list[str]
    references: list[str]
    data: DataDirectory | None = None

    @classmethod
    def of(cls, data: DataDirectory) -> ParallelText:
        """Read the test set of a data directory.

        Raises:
            DataError: if it has none, or the files cannot be read, or are empty or not aligned.
        """
        return replace(cls.read(data.text("test", "source"), data.text("test", "target")), data=data)

    @classmethod
    def read(cls, source: Path, reference: Path) -> ParallelText:
        """Read a test set.

        Raises:
            DataError: if a file cannot be read, or they are empty or not aligned.
        """
        sides = []
        for path in (source, reference):
            with open_text(path) as stream:
                sides.append(list(text_lines(stream, path)))
        sources, references = sides
        if len(sources) != len(references) or not sources:
            raise DataError(
                f"{shown_name(source)} and {shown_name(reference)} must have equally many lines, at least one, but "
                f"have {len(sources)} and {len(references)}; give files of the same sentences"
            )
        return cls(shown_name(source), sources, references)

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of both sides."""
        return hashlib.sha256("\n".join([*self.sources, *self.references]).encode()).hexdigest()
