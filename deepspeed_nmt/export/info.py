"""Description of an export for the programs that translate with it; nothing here imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.export.ctranslate2_search import ExportBeamSettings
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm

INFO_FILE = "deepspeed_nmt.json"


class ExportInfo(Config):
    """The content of ``deepspeed_nmt.json``.

    Attributes:
        format: version of this file.
        exporter: format of the export.
        precision: of its matrices.
        longest: positions of the longest sentence.
        max_source_tokens: default bound of a source line, in tokens without EOS.
        search_name: name of the search that decodes the run at this exit.
        search: its settings that a beam search has.
        rules: its rules of the next token, which other programs lack; empty without such.
        text: form of the text that the run was trained on.
        tags: symbols in front of all sentences of that text.
        model: shape of the model, for readers.
    """

    format: int = 1
    exporter: str
    precision: str
    longest: int
    max_source_tokens: int
    search_name: str
    search: ExportBeamSettings
    rules: Mapping[str, Any]
    text: dict[str, Any]
    tags: Tags = NO_TAGS
    model: Mapping[str, Any]

    @property
    def text_form(self) -> TextForm:
        """Form of the text that the run was trained on."""
        return TextForm(**self.text)

    def write(self, directory: Path) -> None:
        """Write the file into an export."""
        content = self.model_dump(mode="json")
        (directory / INFO_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> ExportInfo:
        """Read the file of an export.

        Raises:
            DataError: if it is missing or damaged.
        """
        try:
            return cls.model_validate_json((directory / INFO_FILE).read_bytes())
        except (OSError, ValidationError) as error:
            raise DataError(f"{directory} must be an export, but {INFO_FILE} cannot be read; export again") from error


def text_record(text: TextForm) -> dict[str, Any]:
    """Return the record of a form of text."""
    return asdict(text)
