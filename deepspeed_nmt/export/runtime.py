"""Translation by CTranslate2 with an export. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from deepspeed_nmt.data.directory import open_tokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.export.certificate import Certificate
from deepspeed_nmt.export.ctranslate2_search import RULES, CTranslate2Search, ExportBeamSettings
from deepspeed_nmt.export.info import ExportInfo
from deepspeed_nmt.registry import problem_of
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.buffers import Found, check_numbers, translated
from deepspeed_nmt.search.source_form import warn_of_form
from deepspeed_nmt.search.source_lines import SourceCounts, SourceLines
from deepspeed_nmt.text import Tags, TextForm, plain_form

PRECISIONS = ("fp32", "int8")
"""Precisions of exports that are translated with."""


class Device(NamedTuple):
    """The device that translates.

    Attributes:
        type: cpu or cuda.
    """

    type: str


class Model(NamedTuple):
    """The exported model.

    Attributes:
        longest_source: most tokens of a source that it reads, EOS included.
    """

    longest_source: int


@dataclass(frozen=True)
class Owner:
    """The run of an export, as far as a translation depends on it.

    Attributes:
        path: directory of the run or the export, for messages.
        search_name: name of the search that decodes the run if the user names no other.
        search: its settings that CTranslate2's search has.
        rules: its rules of the next token, which CTranslate2 lacks.
        text: form of its text.
        tags: symbols in front of the sentences of its text.
    """

    path: Path
    search_name: str
    search: ExportBeamSettings
    rules: Mapping[str, Any]
    text: TextForm
    tags: Tags


@dataclass(frozen=True)
class Asked:
    """Options of a user for a translation with an export.

    Attributes:
        search: name of the search; None for that of the run.
        changes: settings of the search; None where those of the run are to be taken.
        nbest: translations of each line.
        detokenise: see ``Translator.open``.
        tag: see ``Translator.open``.
        tag_target: see ``Translator.open``.
    """

    search: str | None
    changes: Mapping[str, Any]
    nbest: int = 1
    detokenise: str | None = None
    tag: str | None = None
    tag_target: str | None = None

    def check(self) -> None:
        """Check what holds for any run.

        Raises:
            ConfigError: if CTranslate2 does not have what is asked for.
        """
        if self.search not in (None, "beam"):
            raise ConfigError(
                f"{option('runtime')} ctranslate2 decodes by beam search, but {option('search')} is {self.search}; "
                "give one of them"
            )
        any_run = ExportBeamSettings(beam=1, length_penalty="none", max_length_ratio=1.0, max_length_extra=0)
        changed_settings(any_run, self.changes)

    def settings(self, run: Owner) -> ExportBeamSettings:
        """Return the settings of the search, which is as that of the run.

        Raises:
            ConfigError: if CTranslate2 does not have what the run's search has, or an option is wrong.
        """
        if self.search is None and run.search_name != "beam":
            raise ConfigError(
                f"{option('runtime')} ctranslate2 decodes by beam search, but {run.path} has search.name="
                f"{run.search_name}; give {option('search')} beam, or translate by the run with torch"
            )
        rules = [name for name in run.rules if self.changes.get(name) is None]
        if rules:
            none = RULES[rules[0]]
            remedy = f"give {option(rules[0])} {none}, or " if rules[0] in self.changes and none is not False else ""
            raise ConfigError(
                f"{option('runtime')} ctranslate2 has no rules of the next token, but {run.path} has "
                f"search.{rules[0]}={run.rules[rules[0]]}; {remedy}translate by the run with torch"
            )
        settings = changed_settings(run.search, self.changes)
        check_numbers({"nbest": self.nbest}, self.nbest, settings)
        return settings

    def tags(self, run: Owner) -> Tags:
        """Return the symbols in front of source lines.

        Raises:
            ConfigError: if translations are to begin with one.
        """
        given = {"source": self.tag, "target": self.tag_target}
        tags = replace(run.tags, **{side: tag or None for side, tag in given.items() if tag is not None})
        if tags.target is not None:
            raise ConfigError(
                f"{option('runtime')} ctranslate2 does not let translations begin with a tag, but "
                f"{option('tag_target')} is {tags.target}{' in the data of the run' * (self.tag_target is None)}; "
                f"give {option('tag_target')} none, or translate by the run with torch"
            )
        return tags

    def plain(self, run: Owner) -> TextForm | None:
        """Return the form of the text that is made plain; None if it stays as it is.

        Raises:
            ConfigError: if it cannot be made plain.
        """
        return None if self.detokenise is None else plain_form(run.text, self.detokenise, run.path)


class ExportedTranslator:
    """Translator of sentences by CTranslate2; it is used as ``Translator``.

    Args:
        place: directory of the export.
        certificate: of the export.
        device: auto, cpu or cuda.
        asked: options of the user.

    Attributes:
        tokenizer: of the run.
        search: settings of the search.
        text: form of the text that the model was trained on.
        digests: hash of the export's files.
        precision: of its matrices.
        device: that translates.
        max_source_tokens: default of :meth:`stream`.
        model: the exported model.

    Raises:
        ConfigError: if an option is wrong, or CTranslate2 is not installed.
        DataError: if the tag is no symbol of the vocabulary.
    """

    def __init__(self, place: Path, certificate: Certificate, device: str, asked: Asked) -> None:
        info = ExportInfo.read(place)
        run = Owner(place, info.search_name, info.search, info.rules, info.text_form, info.tags)
        self.tokenizer: Tokenizer = open_tokenizer(place)
        self.search = asked.settings(run)
        self.text = info.text_form
        self.digests = (certificate.hashes["weights"], *(each.sha256 for each in certificate.files.values()))
        self.precision = info.precision
        self.max_source_tokens, self.model = info.max_source_tokens, Model(info.longest)
        self._tags = asked.tags(run)
        self._plain = asked.plain(run)
        if self._tags.source is not None:
            self.tokenizer.symbol("source", self._tags.source)
        pieces = self.tokenizer.all_pieces("source"), self.tokenizer.all_pieces("target")
        self._search = CTranslate2Search(
            place, self.tokenizer.vocabulary, pieces, info.longest, info.precision, device
        )
        self.device = Device(self._search.device)

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long.

        Raises:
            DataError: if one is.
        """
        reader = self._reader(max_source_tokens, strict=True)
        for sentence in self._tags.tagged(sentences):
            reader.encode(sentence)

    def stream(
        self,
        sentences: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        nbest: int = 1,
        advance: Callable[[int], object] = lambda more: None,
        max_source_tokens: int | None = None,
        strict: bool = False,
        counts: SourceCounts | None = None,
        first_line: int = 0,
    ) -> Iterator[list[Translation]]:
        """Yield the ``nbest`` best translations of each sentence; see ``Translator.stream``.

        Raises:
            ConfigError: if a number is out of range.
            DataError: if a sentence is too long, and ``strict`` is True.
        """
        numbers = {"max_tokens": max_tokens, "buffer_lines": buffer_lines, "nbest": nbest}
        check_numbers(numbers, nbest, self.search)
        reader = self._reader(max_source_tokens, strict, counts, first_line)
        lines = iter(self._tags.tagged(warn_of_form(sentences, self.text) if counts is None else sentences))

        def search(_: list[str], sources: list[list[int]]) -> Iterator[list[Found]]:
            for number, hypotheses in self._search.search(sources, self.search, max_tokens):
                yield [(number, self._translations(hypotheses[:nbest]))]

        return translated(
            lambda count: list(islice(lines, count)),
            lambda buffer: [reader.encode(line) for line in buffer],
            search,
            reader,
            Translation("", 0.0, []),
            max_tokens,
            buffer_lines,
            advance,
        )

    def _reader(
        self, max_source_tokens: int | None, strict: bool, counts: SourceCounts | None = None, before: int = 0
    ) -> SourceLines:
        longest = self.max_source_tokens if max_source_tokens is None else max_source_tokens
        return SourceLines(self.tokenizer, longest, self.model.longest_source, strict, counts=counts, before=before)

    def _translations(self, hypotheses: Sequence[Any]) -> list[Translation]:
        texts = [self.tokenizer.decode(each.tokens) for each in hypotheses]
        if self._plain is not None:
            texts = self._plain.convert("plain", texts)
        return [
            Translation(text, each.score, each.tokens, each.log_prob)
            for text, each in zip(texts, hypotheses, strict=True)
        ]


def changed_settings(settings: ExportBeamSettings, changes: Mapping[str, Any]) -> ExportBeamSettings:
    """Return settings of a search with the user's changes.

    Raises:
        ConfigError: if one is out of range, or none that CTranslate2's search has.
    """
    given = {
        name: value
        for name, value in changes.items()
        if value is not None and not (name in RULES and RULES[name] == value)  # forbids nothing
    }
    if unknown := sorted(given.keys() - ExportBeamSettings.model_fields.keys()):
        raise ConfigError(
            f"{option(unknown[0])} is no option of the beam search of CTranslate2; leave it out, or translate by the "
            "run with torch"
        )
    try:
        return ExportBeamSettings.model_validate({**settings.model_dump(), **given})
    except ValidationError as error:
        raise ConfigError([problem_of(each, option(str(each["loc"][0]))) for each in error.errors()]) from error
