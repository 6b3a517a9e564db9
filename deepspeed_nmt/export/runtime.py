"""Translation by CTranslate2 with an export that a run keeps. Nothing here imports torch, unless the run is exported.

The export lies in the run's directory `exports`. It is trusted if its certificate is passed, its files are as the
certificate records them, and the run's checkpoints are those of its time. Otherwise the run is exported first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.directory import open_tokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, DataError, option
from deepspeed_nmt.export.certificate import Certificate
from deepspeed_nmt.export.ctranslate2_search import BeamSettings, CTranslate2Search
from deepspeed_nmt.export.info import ExportInfo
from deepspeed_nmt.files import atomic_write_text, parse_json, sha256_of
from deepspeed_nmt.manifest import MANIFEST_FILE
from deepspeed_nmt.registry import problem_of
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.length_penalty import LengthPenalty
from deepspeed_nmt.search.source_lines import SourceLines, warn_of_form
from deepspeed_nmt.text import TextForm, warn_of_missing_rules

EXPORTS = "exports"
"""Directory of a run with the exports that translation has made."""
STAMP_FILE = "stamp.json"
"""File beside an export with hashes of the run's manifests when it was last compared with the run."""
Make = Callable[[Path], Certificate]
"""Exports the run into a directory, and returns the certificate."""


def stamp_of(run: Path, checkpoint: str) -> dict[str, str]:
    """Return hashes from which follows that a run's checkpoint and settings are the same.

    Args:
        run: run directory.
        checkpoint: best, last, average, or a path.
    """
    places = [run, *sorted((run / "checkpoints").glob("*/")), Path(checkpoint)]
    manifests = [place / MANIFEST_FILE for place in places]
    return {str(file): sha256_of(file) for file in manifests if file.is_file()}


def place_of(run: Path, checkpoint: str, exit: str | None, precision: str) -> Path:
    """Return the directory of an export that a run keeps.

    Args:
        run: run directory.
        checkpoint: best, last, average, or a path.
        exit: of the model; None for the top.
        precision: of the matrices.
    """
    key = hashlib.sha256(json.dumps([checkpoint, exit]).encode()).hexdigest()[:8]
    return run / EXPORTS / f"ctranslate2-{precision}-{key}"


def trusted(place: Path, stamp: dict[str, str]) -> Certificate | None:
    """Return the certificate of an export that can be used as it is; None if the run must be looked at.

    Args:
        place: directory of the export.
        stamp: of the run now.

    Raises:
        DataError: if a file of the export was changed.
    """
    try:
        recorded = parse_json((_stamp_file(place)).read_bytes())
    except (OSError, ValueError):
        return None
    return Certificate.read(place) if recorded == stamp and place.is_dir() else None


def _stamp_file(place: Path) -> Path:
    return place.with_name(f"{place.name}.{STAMP_FILE}")


def ensure(place: Path, run: Path, checkpoint: str, make: Make, is_current: Callable[[Certificate], bool]) -> None:
    """Make sure that an export is there, current, as its certificate says, and that this is passed.

    Args:
        place: directory of the export.
        run: run directory.
        checkpoint: best, last, average, or a path.
        make: exports the run.
        is_current: returns True if a certificate is of the run's settings and weights of now.

    Raises:
        ConfigError: if the certificate is not passed.
    """
    certificate = None
    stamp = stamp_of(run, checkpoint)
    try:
        certificate = trusted(place, stamp)
        if certificate is None and place.is_dir():
            certificate = Certificate.read(place)
            certificate = certificate if is_current(certificate) else None
            if certificate is not None:
                _write_stamp(place, stamp)
    except DataError as error:
        logger.warning("%s: it is exported again", error)
    if certificate is None:
        logger.info("%s is exported for CTranslate2, once; later translations use %s", run, place)
        certificate = make(place)
        _write_stamp(place, stamp)
    if not certificate.passed:
        raise ConfigError(
            f"the export of {run} must translate as the run does, but {'; '.join(certificate.problems)}; translate "
            f"with --runtime torch (the certificate is in {place})"
        )


def _write_stamp(place: Path, stamp: dict[str, str]) -> None:
    with suppress(OSError):  # only costs time: the export is compared with the run again
        atomic_write_text(_stamp_file(place), json.dumps(stamp, indent=1))


def check_changes(changes: Mapping[str, Any]) -> None:
    """Check settings that a user has given for the beam search of CTranslate2, of whatever run.

    Args:
        changes: settings by name; None for those that are not given.

    Raises:
        ConfigError: if one is out of range, or none that CTranslate2's search has.
    """
    any_run = BeamSettings(beam=1, length_penalty="none", max_length_ratio=1.0, max_length_extra=0)
    changed_settings(any_run, changes)


def check_nbest(nbest: int, settings: BeamSettings) -> None:
    """Check that a search keeps as many translations as are wanted.

    Raises:
        ConfigError: if it does not.
    """
    if nbest > settings.beam:
        raise ConfigError(
            f"{option('nbest')} must be at most {option('beam')}, which is {settings.beam}, but is {nbest}; raise "
            f"{option('beam')} to {nbest}"
        )


class ExportedTranslator:
    """Translator of sentences by CTranslate2; :meth:`stream` and :meth:`check` are those of ``Translator``.

    Args:
        place: directory of the export.
        device: auto, cpu or cuda.
        changes: settings of the search that differ from those of the run.
        detokenise: see ``Translator.open``.
        tag: see ``Translator.open``.

    Raises:
        ConfigError: if a setting is out of range, or CTranslate2 is not installed.
        DataError: if the tag is no symbol of the vocabulary.
    """

    def __init__(
        self, place: Path, device: str, changes: dict[str, Any], detokenise: str | None = None, tag: str | None = None
    ) -> None:
        self._info = ExportInfo.read(place)
        self._tokenizer: Tokenizer = open_tokenizer(place)
        self._settings = changed_settings(self._info.search, changes)
        self._plain = None if detokenise is None else plain_form(self._info.text_form, detokenise)
        self._tags = self._info.tags if tag is None else replace(self._info.tags, source=tag or None)
        if self._tags.source is not None:
            self._tokenizer.symbol("source", self._tags.source)
        pieces = self._tokenizer.all_pieces("source"), self._tokenizer.all_pieces("target")
        info, vocabulary = self._info, self._tokenizer.vocabulary
        self._search = CTranslate2Search(place, vocabulary, pieces, info.longest, info.precision, device)

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
    ) -> Iterator[list[Translation]]:
        """Yield the ``nbest`` best translations of each sentence; see ``Translator.stream``.

        Raises:
            ConfigError: if a number is out of range.
            DataError: if a sentence is too long, and ``strict`` is True.
        """
        numbers = {"max_tokens": max_tokens, "buffer_lines": buffer_lines, "nbest": nbest}
        problems = [
            f"{option(name)} must be a whole number of at least 1, but is {value}"
            for name, value in numbers.items()
            if value < 1
        ]
        if problems:
            raise ConfigError(problems)
        check_nbest(nbest, self._settings)
        reader = self._reader(max_source_tokens, strict)
        return self._stream(reader, iter(sentences), max_tokens, buffer_lines, nbest, advance)

    def _reader(self, max_source_tokens: int | None, strict: bool) -> SourceLines:
        longest = self._info.max_source_tokens if max_source_tokens is None else max_source_tokens
        return SourceLines(self._tokenizer, longest, self._info.longest, strict)

    def _stream(
        self,
        reader: SourceLines,
        sentences: Iterator[str],
        max_tokens: int,
        buffer_lines: int,
        nbest: int,
        advance: Callable[[int], object],
    ) -> Iterator[list[Translation]]:
        lines = iter(self._tags.tagged(warn_of_form(sentences, self._info.text_form)))
        while buffer := list(islice(lines, buffer_lines)):
            sources = [reader.encode(line) for line in buffer]
            reader.warn_of_unknown()
            found: list[list[Translation]] = [[Translation("", 0.0, [])] for _ in buffer]
            filled = [number for number, source in enumerate(sources) if source]
            advance(len(buffer) - len(filled))
            searched = self._search.search([sources[number] for number in filled], self._settings, max_tokens)
            for place, hypotheses in searched:
                found[filled[place]] = [
                    Translation(
                        self._tags.untagged(self._tokenizer.decode(each.tokens)),
                        each.score,
                        each.tokens,
                        each.log_prob,
                    )
                    for each in hypotheses[:nbest]
                ]
                advance(1)
            yield from found if self._plain is None else self._detokenised(found, self._plain)
        reader.warn_at_end()

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tags.untagged(self._tokenizer.decode(tokens))

    def _detokenised(self, found: Sequence[list[Translation]], text: TextForm) -> Iterator[list[Translation]]:
        for best in found:
            lines = text.convert("plain", [each.text for each in best])
            yield [replace(each, text=line) for each, line in zip(best, lines, strict=True)]


def changed_settings(settings: BeamSettings, changes: Mapping[str, Any]) -> BeamSettings:
    """Return settings of a search with the user's changes.

    Raises:
        ConfigError: if one is out of range, or none that CTranslate2's search has.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if unknown := sorted(given.keys() - BeamSettings.model_fields.keys()):
        raise ConfigError(
            f"{option(unknown[0])} is no option of the beam search of CTranslate2; leave it out, or translate with "
            f"{option('runtime')} torch"
        )
    try:
        changed = BeamSettings.model_validate({**settings.model_dump(), **given})
    except ValidationError as error:
        raise ConfigError([problem_of(each, option(str(each["loc"][0]))) for each in error.errors()]) from error
    try:
        LengthPenalty.parse(changed.length_penalty)
    except ConfigError as error:
        raise ConfigError(f"{option('length_penalty')} {error}") from error
    return changed


def plain_form(text: TextForm, language: str) -> TextForm:
    """Return the form of the text that a run writes, to make it plain.

    Args:
        text: form that the run records.
        language: language code given by the user; "" to take that of the run.

    Raises:
        ConfigError: if the text cannot be made plain.
    """
    form = TextForm.moses(language, option("detokenise")) if language else text
    if form.form == "unknown":
        raise ConfigError(
            f"{option('detokenise')} needs a run that records the form of its text, but this one does not; give the "
            "language, for example de"
        )
    form.convert("plain", [])  # reports problems before anything is translated
    if language:
        warn_of_missing_rules(language, option("detokenise"))
    return form
