"""Translation by CTranslate2 with an export. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, DataError, check_installed, option
from deepspeed_nmt.export.certificate import Certificate, ExportInfo
from deepspeed_nmt.export.ctranslate2_search import EXTRA, RULES, CTranslate2Search, ExportBeamSettings, check_device
from deepspeed_nmt.registry import problem_of
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.decode_options import DecodeOptions, flags, identity_of
from deepspeed_nmt.search.lines import (
    Found,
    Line,
    LineInputs,
    SourceCounts,
    SourceLines,
    check_nbest,
    translated,
    warn_of_form,
)
from deepspeed_nmt.text import Tags, TextForm, plain_form

PRECISIONS = ("fp32", "int8")
"""Precisions of exports that are translated with."""


@dataclass(frozen=True)
class RunDescription:
    """What a translation by CTranslate2 depends on in a run.

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


LACKS = frozenset(name for name, flag in flags().items() if flag.torch)
"""Options that CTranslate2 does not have."""


def check_options(options: DecodeOptions) -> None:
    """Check the options that do not depend on the run.

    Raises:
        ConfigError: if CTranslate2 is not installed, or does not have what they ask for.
    """
    check_installed("ctranslate2", f"{option('runtime')} ctranslate2", EXTRA)
    if options.precision not in ("auto", *PRECISIONS):
        raise ConfigError(
            f"{option('precision')} is {options.precision}, which {option('runtime')} ctranslate2 lacks; give "
            f"{' or '.join(PRECISIONS)}"
        )
    if name := next(options.given(sorted(LACKS)), None):
        raise ConfigError(f"{option(name)} is not for CTranslate2; leave it out, or translate by the run with torch")
    if (options.encoder_layers is None) != (options.decoder_layers is None):
        raise ConfigError(
            f"{option('runtime')} ctranslate2 needs both {option('encoder_layers')} and {option('decoder_layers')}, "
            f"or {option('exit')} N-M; give the other"
        )
    if options.export is not None and (
        name := next(options.given(name for name, flag in flags().items() if flag.exported), None)
    ):
        raise ConfigError(f"{option(name)} is decided when a run is exported; leave it out, or give {option('run')}")
    if options.settings["name"] not in (None, "beam"):
        raise ConfigError(
            f"{option('runtime')} ctranslate2 decodes by beam search, but {option('search')} is "
            f"{options.settings['name']}; give one of them"
        )
    any_run = ExportBeamSettings(beam=1, length_penalty="none", max_length_ratio=1.0, max_length_extra=0)
    changed_settings(any_run, options.settings)
    check_device(options.device)


def settings_with(options: DecodeOptions, run: RunDescription) -> ExportBeamSettings:
    """Return the settings of the search, which is as that of the run.

    Raises:
        ConfigError: if CTranslate2 does not have what the run's search has, or an option is wrong.
    """
    changes = options.settings
    if changes["name"] is None and run.search_name != "beam":
        raise ConfigError(
            f"{run.path} has search.name={run.search_name}, and {option('runtime')} ctranslate2 decodes by beam "
            f"search; give {option('search')} beam, or translate by the run with torch"
        )
    rules = [name for name in run.rules if changes.get(name) is None]
    if rules:
        none = RULES[rules[0]]
        remedy = f"give {option(rules[0])} {none}, or " if rules[0] in changes and none is not False else ""
        raise ConfigError(
            f"{run.path} has search.{rules[0]}={run.rules[rules[0]]}, and {option('runtime')} ctranslate2 has no "
            f"rules of the next token; {remedy}translate by the run with torch"
        )
    settings = changed_settings(run.search, changes)
    check_nbest(options.nbest, settings)
    return settings


def tags_with(options: DecodeOptions, run: RunDescription) -> Tags:
    """Return the symbols in front of source lines.

    Raises:
        ConfigError: if translations are to begin with one.
    """
    given = {"source": options.tag, "target": options.tag_target}
    tags = replace(run.tags, **{side: tag or None for side, tag in given.items() if tag is not None})
    if tags.target is not None:
        raise ConfigError(
            f"{option('tag_target')} is {tags.target}{' in the data of the run' * (options.tag_target is None)}, and "
            f"{option('runtime')} ctranslate2 does not let translations begin with a tag; give "
            f"{option('tag_target')} none, or translate by the run with torch"
        )
    return tags


def form_with(options: DecodeOptions, run: RunDescription) -> TextForm | None:
    """Return the form of the text that is made plain; None if it stays as it is.

    Raises:
        ConfigError: if it cannot be made plain.
    """
    return None if options.detokenise is None else plain_form(run.text, options.detokenise, run.path)


class ExportedTranslator:
    """Translator of sentences by CTranslate2; it is used as ``Translator``.

    Args:
        place: directory of the export.
        certificate: of the export.
        options: of the translation.

    Attributes:
        tokenizer: of the run.
        search: settings of the search.
        text: form of the text that the model was trained on.
        digests: hash of the export's files.
        precision: of its matrices.
        longest_line: default bound of a line, in tokens.

    Raises:
        ConfigError: if an option is wrong, or CTranslate2 is not installed.
        DataError: if the vocabulary is not that of the certificate, or the tag is no symbol of it.
    """

    def __init__(self, place: Path, certificate: Certificate, options: DecodeOptions) -> None:
        info = ExportInfo.read(place)
        run = RunDescription(place, info.search_name, info.search, info.rules, info.text, info.tags)
        self.tokenizer: Tokenizer = open_tokenizer(place)
        if self.tokenizer.digest != certificate.hashes["vocabulary"]:
            raise DataError(f"{place} has another vocabulary than its certificate records; export again")
        self.search = settings_with(options, run)
        self.text = info.text
        self.digests = (certificate.hashes["weights"], *(each.sha256 for each in certificate.files.values()))
        self.precision = info.precision
        self.longest_line, self._longest_source = info.longest_line, info.longest
        self._tags = tags_with(options, run)
        self._plain = form_with(options, run)
        if self._tags.source is not None:
            self.tokenizer.symbol("source", self._tags.source)
        pieces = self.tokenizer.all_pieces("source"), self.tokenizer.all_pieces("target")
        self._search = CTranslate2Search(
            place, self.tokenizer.vocabulary, pieces, info.longest, info.precision, options.device
        )

    def identity(self) -> dict[str, Any]:
        """Return all that translations depend on besides the options and the text."""
        identity = {"the vocabulary": self.tokenizer.digest, "the weights": self.digests}
        return {**identity, **identity_of(self.search, self._search.device, self.precision)}

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long.

        Raises:
            DataError: if one is.
        """
        reader = self._reader(DecodeOptions(max_source_tokens=max_source_tokens, strict=True))
        for sentence in self._tags.tagged(sentences):
            reader.encode(sentence)

    def stream(
        self,
        sentences: Iterable[str],
        *,
        advance: Callable[[int], object] = lambda more: None,
        counts: SourceCounts | None = None,
        first_line: int = 0,
        **options: Any,
    ) -> Iterator[list[Translation]]:
        """Yield the ``nbest`` best translations of each sentence; see ``Translator.stream``.

        Raises:
            ConfigError: if a number is out of range.
            DataError: if a sentence is too long, and ``strict`` is True.
        """
        chosen = DecodeOptions.of(options)
        check_nbest(chosen.nbest, self.search)
        reader = self._reader(chosen, counts, first_line)
        lines = warn_of_form(sentences, self.text) if counts is None else sentences

        def search(_: list[Line], sources: list[list[int]]) -> Iterator[list[Found]]:
            for number, hypotheses in self._search.search(sources, self.search, chosen.max_tokens):
                yield [(number, self._translations(hypotheses[: chosen.nbest]))]

        requests = LineInputs(first=first_line, tags=self._tags).requests(lines, reader, None)
        return translated(requests, search, reader, Translation("", 0.0, []), chosen, advance)

    def _reader(self, options: DecodeOptions, counts: SourceCounts | None = None, before: int = 0) -> SourceLines:
        longest = options.longest_line(self.longest_line)
        return SourceLines(self.tokenizer, longest, self._longest_source, options.strict, counts, before)

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
        if name != "name" and value is not None and not (name in RULES and RULES[name] == value)  # forbids nothing
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
