"""Translation of a file in pieces, on any number of ranks, resumed where it stopped.

Each rank claims pieces one by one and writes their translations. Rank 0 prepares the directory of pieces, logs
warnings and progress for all ranks, and joins the pieces in order. Nothing here imports torch for a single rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed_nmt.console import counting, logger
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, DataError, ReportedError
from deepspeed_nmt.files import atomic_writer, hidden, resolved, text_lines
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.locks import exclusive
from deepspeed_nmt.parallel.launched import place, requeued
from deepspeed_nmt.parallel.shared_work import SharedWork
from deepspeed_nmt.run.pieces import SOURCE, SUFFIX, Pieces, Translated, TranslationJob
from deepspeed_nmt.run.translated_file import FileToTranslate, FileTranslator, description_of
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.source_form import LINES_OF_A_FORM, warn_of_form
from deepspeed_nmt.search.source_lines import (
    SourceCounts,
    SourceWarnings,
    longest_line,
)
from deepspeed_nmt.text import phrases_of, text_of

SILENT_S = 300.0
"""Seconds without any progress after which an idle rank takes a piece that another one has claimed."""
_VISIBLE_S = 60.0
"""Seconds that a rank waits until it sees what rank 0 has written: network file systems show it late."""
_LOCK_S = 60.0
"""Seconds that a requeued job waits for the lock of a lost host."""

Format = Callable[[int, Sequence[Translation]], str]
"""Function from the number of a line, from 0, and its translations to the text that is written."""


def pieces_directory(target: Path) -> Path:
    """Return the directory of the pieces of an output file."""
    target = resolved(target)
    return target.with_name(target.name + SUFFIX)


def translate_in_pieces(
    translator: FileTranslator, file: FileToTranslate, written: Format, aligned: Format | None = None
) -> int:
    """Translate a file with the other ranks of this start, and return the exit status.

    Pieces that an earlier start has finished are used. If this one is interrupted, those that it has finished stay.

    Args:
        translator: the same on all ranks.
        file: what to translate.
        written: text of the translations of a line.
        aligned: text of their alignments; None for none.

    Raises:
        ConfigError: if the ranks cannot meet.
        DataError: if another process translates to the same output, another translation was begun there, or a line is
            too long.
        OSError: if a file cannot be written; what was translated is kept.
    """
    models = {"the vocabulary": translator.tokenizer.digest, "the weights": translator.digests}
    description = description_of(file, translator.search, translator.device.type, translator.precision)
    job = TranslationJob({**description, **models}, file.lines, file.piece_lines, tuple(file.beside))
    pieces = Pieces(pieces_directory(file.target), job)
    try:
        with SharedWork.join(place()) as work:
            rank = _Rank(work, pieces, translator, file, (written, aligned))
            try:
                rank.lead() if work.is_main else rank.follow()
            except (Interrupted, ReportedError) as end:
                if work.is_main and _is_stop(end):  # before a launcher ends this rank because another one has ended
                    by = end.signal.name if isinstance(end, Interrupted) else "a request to another rank"
                    logger.info("stopped by %s; %s; start the same command again to resume", by, _kept(pieces))
                raise
    except (Interrupted, ReportedError) as end:
        if not _is_stop(end):
            raise
        return EXIT_STOPPED
    except OSError:
        if pieces.path.exists():
            logger.info("%s; the same command resumes there", _kept(pieces))
        raise
    return 0


def _is_stop(end: Interrupted | ReportedError) -> bool:
    """Return True if a translation has ended on request, on this rank or another."""
    return isinstance(end, Interrupted) or end.status == EXIT_STOPPED


def check_resumable(file: FileToTranslate, search: SearchConfig, device: str, precision: str) -> None:
    """Check that what is translated of a file already is of the same translation, without the model's weights.

    Args:
        file: what to translate.
        search: the search.
        device: type of the device.
        precision: of the weights on this device.

    Raises:
        DataError: if another translation was begun there.
    """
    path = pieces_directory(file.target)
    if path.exists():
        description = description_of(file, search, device, precision)
        Pieces(path, TranslationJob(description, file.lines, file.piece_lines)).check()


def _warnings(translator: FileTranslator, lines: Iterator[str], max_source_tokens: int | None) -> SourceWarnings:
    """Return the warnings of a text that is translated in pieces, and warn of the form of its beginning."""
    deque(warn_of_form(islice(lines, LINES_OF_A_FORM), translator.text), maxlen=0)
    longest = translator.max_source_tokens if max_source_tokens is None else max_source_tokens
    return SourceWarnings(*longest_line(longest, translator.model.longest_source))


def _kept(pieces: Pieces) -> str:
    """Return how much of a translation is kept, and where."""
    finished = sum(pieces.has(piece) for piece in range(pieces.job.pieces))
    return f"{finished} of {pieces.job.pieces} pieces are finished, in {pieces.path}"


class _Rank:
    """The part of one rank in a translation."""

    def __init__(
        self,
        work: SharedWork,
        pieces: Pieces,
        translator: FileTranslator,
        file: FileToTranslate,
        written: tuple[Format, Format | None],
    ) -> None:
        self._work, self._pieces, self._job = work, pieces, pieces.job
        self._translator, self._file = translator, file
        self._written, self._aligned = written
        self._first_missing = 0
        """Number of a piece before which all are finished."""
        self._report: Callable[[], object] = lambda: None
        self._warnings: SourceWarnings | None = None

    def lead(self) -> None:
        """Prepare the pieces, translate with the other ranks, and join what all have translated."""
        refusal = f"{self._file.target} must not be in use, but {{holder}} is translating to it; wait for it"
        patience_s = _LOCK_S if requeued() else 0.0
        with exclusive(hidden(resolved(self._file.target), "translate.lock"), refusal, patience_s):
            self._check_lines()
            self._warnings = _warnings(self._translator, self._source_lines(), self._file.max_source_tokens)
            self._file.source.seek(0)
            if self._file.alignment is not None:  # the layer is chosen and recorded before other ranks need it
                deque(self._translator.stream([], **self._file.details), maxlen=0)
            before = self._pieces.prepare(self._file.texts)
            self._work.announce(self._job.digest)
            with counting("translate", "sentences", self._file.lines, before) as advance:
                self._report = _difference_of(self._work.done, advance)
                self._translate_all()
                self._report()
            self._warnings.warn_at_end()
            self._join()
            self._work.complete()
            self._pieces.remove()

    def follow(self) -> None:
        """Translate with the other ranks, until all is translated."""
        if self._work.announced() != self._job.digest:
            raise ConfigError(
                f"all ranks must translate the same text with the same run and options, but rank "
                f"{self._work.place.rank} differs from rank 0; if the run is being trained, name the checkpoint; if "
                "GPUs differ, give --precision"
            )
        deadline = time.monotonic() + _VISIBLE_S
        while not self._pieces.is_visible() and not self._work.is_complete():
            if time.monotonic() > deadline:
                raise DataError(
                    f"{self._pieces.path} must be on a file system that all hosts share, but rank "
                    f"{self._work.place.rank} does not see it"
                )
            self._work.pause()
        self._translate_all()
        while not self._work.is_complete():  # a launcher may end all ranks some time after the first
            self._work.pause()

    def _check_lines(self) -> None:
        """Check all lines before any is translated, if the user has asked for it."""
        if self._file.strict:
            self._translator.check(self._source_lines(), self._file.max_source_tokens)

    def _source_lines(self) -> Iterator[str]:
        self._file.source.seek(0)
        return text_lines(self._file.source, self._file.name)

    def _translate_all(self) -> None:
        """Translate pieces as long as any is missing."""
        while (piece := self._work.claim()) < self._job.pieces:
            if not self._pieces.has(piece):
                self._translate(piece)
            self._look()
        done, since, take = self._work.done(), time.monotonic(), 0
        while not self._look() and not self._work.is_complete():
            self._work.pause()
            if (now := self._work.done()) != done:
                done, since = now, time.monotonic()
            elif time.monotonic() - since > SILENT_S:
                self._take_over(take)
                since, take = time.monotonic(), take + 1

    def _take_over(self, take: int) -> None:
        """Translate a piece that another rank has claimed and not finished. If both do, they write the same."""
        for piece in range(self._first_missing, self._job.pieces):
            if not self._pieces.has(piece) and self._work.claim(f"{piece}, take {take}") == 0:
                logger.warning("no progress for %.0f s: piece %d is translated by another rank", SILENT_S, piece)
                try:
                    self._translate(piece)
                except FileNotFoundError:  # the silent rank has finished it, and the directory was removed
                    if not self._work.is_complete():
                        raise
                return

    def _look(self) -> bool:
        """Look which pieces are finished by now, and return True if all are. Rank 0 warns of their source lines."""
        self._report()
        while self._first_missing < self._job.pieces and self._pieces.has(self._first_missing):
            counts = self._pieces.counts(self._first_missing)
            if self._warnings is not None and counts is not None:  # a damaged one is translated again in the end
                self._warnings.add(counts, self._file.max_tokens)
            self._first_missing += 1
        return self._first_missing == self._job.pieces

    def _translate(self, piece: int) -> None:
        """Translate a piece and write it."""
        counts, before = SourceCounts(), piece * self._job.piece_lines
        translations = self._translator.stream(
            self._lines(SOURCE, piece),
            max_tokens=self._file.max_tokens,
            buffer_lines=self._job.piece_lines,
            nbest=self._file.nbest,
            advance=self._advance,
            max_source_tokens=self._file.max_source_tokens,
            counts=counts,
            first_line=before,
            **self._beside(piece),
            **self._file.details,
        )
        text, links = [], []
        for number, best in enumerate(translations, before):
            text.append(self._written(number, best))
            if self._aligned is not None:
                links.append(self._aligned(number, best))
        self._pieces.write(piece, Translated("".join(text).encode(), "".join(links).encode()), counts)

    def _lines(self, name: str, piece: int) -> list[str]:
        """Return the lines of a piece of a text."""
        return [text_of(line) for line in self._pieces.lines(name, self._file.texts[name], piece)]

    def _beside(self, piece: int) -> dict[str, Any]:
        """Return the lines of a piece of the texts beside the source, as arguments of ``Translator.stream``."""
        found: dict[str, Any] = {name: self._lines(name, piece) for name in self._job.beside}
        if "constraints" in found:
            found["constraints"] = [phrases_of(line) for line in found["constraints"]]
        return found

    def _advance(self, more: int) -> None:
        self._work.advance(more)
        self._report()

    def _join(self) -> None:
        """Write the pieces in order to the outputs, which are replaced when they are complete."""
        with ExitStack() as stack:
            output = stack.enter_context(atomic_writer(self._file.target))
            links: BinaryIO | None = None
            if self._file.alignment is not None:
                links = stack.enter_context(atomic_writer(self._file.alignment))
            for piece in range(self._job.pieces):
                found = self._pieces.read(piece)
                if found is None:
                    logger.warning("%s is damaged; it is translated again", self._pieces.file(piece))
                    self._translate(piece)
                    found = self._pieces.read(piece)
                if found is None:
                    raise DataError(
                        f"{self._pieces.file(piece)} must be as it was written, but is not; check the disk"
                    )
                output.write(found.text)
                if links is not None:
                    links.write(found.alignment)


def _difference_of(total: Callable[[], int], advance: Callable[[int], object]) -> Callable[[], None]:
    """Return a function that passes on by how much a total has grown since it was called last."""
    before = 0

    def report() -> None:
        nonlocal before
        now = total()
        advance(now - before)
        before = now

    return report
