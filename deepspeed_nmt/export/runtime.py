"""Translation by CTranslate2 with an export. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, DataError, check_installed, option
from deepspeed_nmt.export.certificate import MAX_POSITIONS, Certificate, ExportInfo
from deepspeed_nmt.export.ctranslate2_search import (
    EXTRA,
    RULES,
    CTranslate2Search,
    ExportBeamSettings,
    import_ctranslate2,
)
from deepspeed_nmt.registry import validated
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.decode_options import DecodeOptions, identity_of, marked
from deepspeed_nmt.search.lines import (
    Found,
    Line,
    LineInputs,
    SourceCounts,
    SourceLines,
    check_nbest,
    in_plain_text,
    translated,
    warn_of_form,
)
from deepspeed_nmt.text import Tags, TextForm, plain_form

PRECISIONS = ("fp32", "int8")
"""Precisions of exports that are translated with."""


def check_options(options: DecodeOptions) -> None:
    """Check the options that do not depend on the run, and that CTranslate2 is installed."""
    check_installed("ctranslate2", f"{option('runtime')} ctranslate2", EXTRA)
    if options.precision not in ("auto", *PRECISIONS):
        raise ConfigError(
            f"{option('precision')} is {options.precision}, which {option('runtime')} ctranslate2 lacks; give "
            f"{' or '.join(PRECISIONS)}"
        )
    if name := next(iter(options.given(sorted(marked("torch")))), None):
        raise ConfigError(f"{option(name)} is not for CTranslate2; leave it out, or translate by the run with torch")
    if (options.encoder_layers is None) != (options.decoder_layers is None):
        raise ConfigError(
            f"{option('runtime')} ctranslate2 needs both {option('encoder_layers')} and {option('decoder_layers')}, "
            f"or {option('exit')} N-M; give the other"
        )
    if options.export is not None and (name := next(iter(options.given(marked("exported"))), None)):
        raise ConfigError(f"{option(name)} is decided when a run is exported; leave it out, or give {option('run')}")
    if options.settings["name"] not in (None, "beam"):
        raise ConfigError(
            f"{option('runtime')} ctranslate2 decodes by beam search, but {option('search')} is "
            f"{options.settings['name']}; give one of them"
        )
    any_run = ExportBeamSettings(beam=1, length_penalty="none", max_length_ratio=1.0, max_length_extra=0)
    changed_settings(any_run, options.settings)
    if options.device == "cuda" and not import_ctranslate2().get_cuda_device_count():
        raise ConfigError(f"{option('device')} is cuda, but CTranslate2 finds no GPU; use cpu")


def choose(options: DecodeOptions, info: ExportInfo, place: Path) -> tuple[ExportBeamSettings, Tags, TextForm | None]:
    """Return what the options make of a run's settings: search, tags, form of plain text if any.

    The run or the export is in the directory `place`. What CTranslate2 does not have is a ConfigError.
    """
    runtime, changes = f"{option('runtime')} ctranslate2", options.settings
    if changes["name"] is None and info.search_name != "beam":
        raise ConfigError(
            f"{place} has search.name={info.search_name}, and {runtime} decodes by beam search; give "
            f"{option('search')} beam, or translate by the run with torch"
        )
    if rule := next((name for name in info.rules if changes.get(name) is None), None):
        none = RULES[rule]
        remedy = f"give {option(rule)} {none}, or " if rule in changes and none is not False else ""
        raise ConfigError(
            f"{place} has search.{rule}={info.rules[rule]}, and {runtime} has no rules of the next token; {remedy}"
            "translate by the run with torch"
        )
    settings = changed_settings(info.search, changes)
    check_nbest(options.nbest, settings)
    source = min(options.longest_line(info.longest_line) + 1, info.longest)
    if (most := settings.limit(source, MAX_POSITIONS)) > info.longest:
        raise ConfigError(
            f"{option('max_length_ratio')} and {option('max_length_extra')} allow a translation {most:,} tokens, but "
            f"the export has {info.longest:,} positions, after which it would end; give {option('max_length')} "
            f"{info.longest}, or translate by the run with torch"
        )
    tags = info.tags.changed(options.tag, options.tag_target)
    if tags.target is not None:
        raise ConfigError(
            f"{option('tag_target')} is {tags.target}{' in the data of the run' * (options.tag_target is None)}, and "
            f"{runtime} does not let translations begin with a tag; give {option('tag_target')} none, or translate "
            "by the run with torch"
        )
    form = None if options.detokenise is None else plain_form(info.text, options.detokenise, place)
    return settings, tags, form


class ExportedTranslator:
    """Translator of sentences by CTranslate2 with the export in a directory; it is used as ``Translator``."""

    def __init__(self, place: Path, certificate: Certificate, options: DecodeOptions) -> None:
        info = ExportInfo.read(place)
        self.search, self._tags, self._plain = choose(options, info, place)
        self.tokenizer: Tokenizer = open_tokenizer(place)
        if self.tokenizer.digest != certificate.hashes["vocabulary"]:
            raise DataError(f"{place} has another vocabulary than its certificate records; export again")
        self.text = info.text
        self.aligning: dict[str, list[int]] = {}
        self.digests = (certificate.hashes["weights"], *(file.sha256 for file in certificate.files.values()))
        self.precision = info.precision
        self.longest_line, self._longest_source = info.longest_line, info.longest
        if self._tags.source is not None:
            self.tokenizer.symbol("source", self._tags.source)
        self._search = CTranslate2Search(place, self.tokenizer, info.longest, info.precision, options.device)

    def identity(self) -> dict[str, Any]:
        """Return all that translations depend on besides the options and the text."""
        identity = {"the vocabulary": self.tokenizer.digest, "the weights": self.digests}
        return {**identity, **identity_of(self.search, self._search.device, self.precision)}

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long, or raise a DataError."""
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
        """Yield the ``nbest`` best translations of each sentence; see ``Translator.stream``."""
        chosen = DecodeOptions.of(options)
        check_nbest(chosen.nbest, self.search)
        reader = self._reader(chosen, counts, first_line)
        lines = warn_of_form(sentences, self.text) if counts is None else sentences

        def search(_: list[Line], sources: list[list[int]]) -> Iterator[list[Found]]:
            for number, hypotheses in self._search.search(sources, self.search, chosen.max_tokens):
                best = [
                    Translation(self.tokenizer.decode(one.tokens), one.score, one.tokens, one.log_prob)
                    for one in hypotheses[: chosen.nbest]
                ]
                yield [(number, best)]

        requests = LineInputs(first=first_line, tags=self._tags).requests(lines, reader, None)
        nothing = Translation("", 0.0, [])
        translations = translated(requests, search, reader, nothing, chosen, advance, self._tags)
        return translations if self._plain is None else in_plain_text(translations, self._plain)

    def _reader(self, options: DecodeOptions, counts: SourceCounts | None = None, before: int = 0) -> SourceLines:
        longest = options.longest_line(self.longest_line)
        return SourceLines(self.tokenizer, longest, self._longest_source, options.strict, counts, before)


def changed_settings(settings: ExportBeamSettings, changes: Mapping[str, Any]) -> ExportBeamSettings:
    """Return settings of a search with the user's changes, which must be among those of CTranslate2's search."""
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
    return validated(ExportBeamSettings, {**settings.model_dump(), **given}, option)
