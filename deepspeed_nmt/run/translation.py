"""Translation of a text: of a file in pieces, on any number of ranks and resumed where it stopped; of a pipe at once.

A file is cut into pieces of equally many lines, and each is translated by itself. Where it is cut depends on the
text and on the batch size only, so that the translation is the same for any number of ranks. Each rank claims pieces
one by one and writes their translations; rank 0 logs warnings and progress for all, and joins the pieces in order.

    OUTPUT.pieces/job.json        what is translated, with what: another translation does not resume this one
                  piece-0000000   a hash of the rest; a line of JSON with counts; translations; alignments; reliance

Nothing here imports torch for a single rank.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from io import BufferedReader
from itertools import accumulate, combinations, islice, pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import BaseModel, Field

from deepspeed_nmt import __version__
from deepspeed_nmt.console import counting, logger
from deepspeed_nmt.errors import EXIT_STOPPED, ConfigError, DataError, ReportedError, shown, typed
from deepspeed_nmt.evaluate.nbest import Candidate
from deepspeed_nmt.files import (
    atomic_write_bytes,
    atomic_writer,
    exclusive,
    hidden,
    is_replaceable,
    open_text,
    parse_json,
    raw_lines,
    read_regular,
    remove_orphans,
    replaces,
    resolved,
    text_lines,
)
from deepspeed_nmt.interruption import Interrupted
from deepspeed_nmt.manifest import recorded_directory
from deepspeed_nmt.parallel.launched import place, requeued
from deepspeed_nmt.parallel.shared_work import SharedWork
from deepspeed_nmt.search.base import MisalignedError, Translation
from deepspeed_nmt.search.decode_options import STREAM, DecodeOptions
from deepspeed_nmt.search.lines import LINES_OF_A_FORM, SourceCounts, refuse_damaged, warn_of_form
from deepspeed_nmt.text import TextForm

if TYPE_CHECKING:
    from deepspeed_nmt.data.tokenizer import Tokenizer

SILENT_S = 300.0
"""Seconds without any progress after which an idle rank translates a piece that another one has claimed."""
_VISIBLE_S = 60.0
"""Seconds that a rank waits until it sees what rank 0 has written: network file systems show it late."""
_LOCK_S = 60.0
"""Seconds that a requeued job waits for the lock of a lost host."""
MAX_LINES = 4096
"""Bound of the lines of a piece, which are in memory at once."""
MAX_LINES_OF_LARGE_BATCHES = 16384
"""The same bound if a batch has so many tokens that it needs more lines."""
_TOKENS_PER_LINE = 8
"""Tokens of a batch for each line that a piece has at least. Thus it fills several batches, most of them wholly."""
_PIECES = 64
"""Number of pieces of a text of middling length."""
_WORKERS_A_CORE = 4
"""Most workers for each CPU core: each takes the memory of a process with torch and the model."""
_JOB_FILE = "job.json"
_OWN = re.compile(rf"{re.escape(_JOB_FILE)}|piece-\d{{7,}}|\..*\.tmp|\.nfs.*")
"""Names of the files in a directory of pieces; NFS keeps removed files that are open as .nfs*."""
_INPUTS, _OUTPUTS = ("input", "prefix", "constraints"), ("output", "alignment", "reliance")
"""Options that name files."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError)
"""Errors of reading what is no piece."""


class LineTranslator(Protocol):
    """A program that translates lines: torch's ``Translator``, or CTranslate2's ``ExportedTranslator``."""

    text: TextForm
    tokenizer: Tokenizer

    @property
    def aligning(self) -> dict[str, list[int]]:
        """Layers that align best, by exit. ``stream`` uses those that are in it, and adds what it chooses."""

    def identity(self) -> dict[str, Any]:
        """Return all that translations depend on besides the options and the text: settings, weights, device."""

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long."""

    @property
    def stream(self) -> Callable[..., Iterator[list[Translation]]]:
        """Function that yields the best translations of each sentence; see ``Translator.stream``."""


def piece_lines(lines: int, max_tokens: int) -> int:
    """Return the lines of a piece of a text, for batches of ``max_tokens``."""
    least = min(MAX_LINES_OF_LARGE_BATCHES, max_tokens // _TOKENS_PER_LINE)
    return max(1, least, min(MAX_LINES, -(-lines // _PIECES)))


@dataclass(frozen=True)
class Texts:
    """The source, and texts that have a line for each line of it, each at its beginning."""

    options: DecodeOptions
    streams: Mapping[str, BufferedReader[Any]]
    """By option: input, prefix, constraints."""
    outputs: Mapping[str, Path | None]
    """By option: output, alignment, reliance; None for standard output."""
    lines: int | None
    """Number of lines; None if it is not known."""

    def read(self, from_start: bool = False) -> dict[str, Iterator[Any]]:
        """Read the lines of all texts from where they stand, or from their beginnings; constraints as phrases."""
        readers: dict[str, Iterator[Any]] = {}
        for option, stream in self.streams.items():
            if from_start:
                stream.seek(0)
            lines = text_lines(stream, self.name(option))
            phrases = ([type(line)(phrase) for phrase in line.split("\t")] for line in lines)
            readers[option] = phrases if option == "constraints" else lines
        return readers

    def check(self, translator: LineTranslator) -> None:
        """Check the lines, if any are to be refused, of texts that can be read again: pipes are checked as read."""
        for option, stream in self.streams.items() if self.options.strict else ():
            if stream.seekable():
                start, lines = stream.tell(), text_lines(stream, self.name(option))
                if option == "input":
                    translator.check(lines, self.options.max_source_tokens)
                else:
                    for number, line in enumerate(lines, 1):
                        refuse_damaged(number, option, line)
                stream.seek(start)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of the texts."""
        digests = {}
        for option, stream in self.streams.items():
            stream.seek(0)
            name = "the source text" if option == "input" else f"the text of {typed(option)}"
            digest = hashlib.sha256()
            while block := stream.read(1 << 20):
                digest.update(block)
            digests[name] = digest.hexdigest()
        return digests

    @property
    def piece_lines(self) -> int:
        """Number of lines of a piece."""
        return MAX_LINES if self.lines is None else piece_lines(self.lines, self.options.max_tokens)

    def in_pieces(self) -> bool:
        """Return True if the text is translated in pieces, which can be resumed; False if as a stream."""
        several = max(place().ranks, self.options.workers) > 1
        wrong = [name for name, stream in self.streams.items() if not is_file(self.name(name), stream)]
        wrong += [name for name, path in self.outputs.items() if path is None or not is_replaceable(path)]
        if several and wrong:
            raise ConfigError(
                f"{typed(wrong[0])} is {self.name(wrong[0])}, which is no file, and several processes are to "
                "translate; give a file, or start one process"
            )
        if wrong or self.lines is None:
            return False
        return several or pieces_directory(self.options).exists() or self.lines > self.piece_lines

    def name(self, option: str) -> str:
        """Return the path that an option names."""
        return str(getattr(self.options, option))


def is_file(name: str, stream: BufferedReader[Any]) -> bool:
    """Return True if a text is a file, which can be read again."""
    return name != "-" and stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _count_lines(stream: BufferedReader[Any], name: str) -> int | None:
    """Return the number of lines of a text from where it stands; None if it can be read only once."""
    if not stream.seekable():
        return None
    start = stream.tell()
    count = sum(1 for _ in raw_lines(stream, name))
    stream.seek(start)
    return count


def open_aligned(
    stack: ExitStack, names: Mapping[str, str], outputs: Mapping[str, Path | None]
) -> tuple[dict[str, BufferedReader[Any]], int | None]:
    """Open the texts that options name, the source first, and return them, and the number of their lines, if known.

    They must have equally many lines, and no output may replace one of them.
    """
    if list(names.values()).count("-") > 1:
        raise ConfigError("standard input (`-`) is given more than once; give paths")
    streams = {name: stack.enter_context(open_text(path)) for name, path in names.items()}
    for output, path in outputs.items():
        for name, stream in streams.items():
            if path is not None and replaces(path, stream):
                raise ConfigError(f"{typed(output)} is {path}, the text of {typed(name)}; give another path")
    lines, *counts = (_count_lines(stream, names[name]) for name, stream in streams.items())
    for name, count in zip(list(names)[1:], counts, strict=True):
        if None not in (count, lines) and count != lines:
            raise DataError(
                f"{typed(name)} has {count:,} lines, and the source has {lines:,}; give a text of the same lines"
            )
    return streams, lines


@contextmanager
def open_texts(options: DecodeOptions) -> Iterator[Texts]:
    """Open the source and the texts beside it, see :func:`open_aligned`, and check the outputs."""
    given = {name: path for name in _OUTPUTS if (path := getattr(options, name)) is not None}
    outputs = {name: output_path(str(path), typed(name)) for name, path in given.items()}
    for (first, one), (second, other) in combinations(outputs.items(), 2):
        if (one and resolved(one)) == (other and resolved(other)):
            raise ConfigError(f"{typed(second)} and {typed(first)} are the same file; give another")
    names = {name: path for name in _INPUTS if (path := getattr(options, name)) is not None}
    with ExitStack() as stack:
        streams, lines = open_aligned(stack, names, outputs)
        yield Texts(options, streams, outputs, lines if is_file(names["input"], streams["input"]) else None)


def check_workers(options: DecodeOptions) -> None:
    """Check the number of workers."""
    cores, ranks = len(os.sched_getaffinity(0)), place().ranks
    if options.workers > _WORKERS_A_CORE * cores:
        raise ConfigError(
            f"--workers is {options.workers}, for {cores} CPU cores; as many as these are usually fastest"
        )
    if options.workers > 1 and ranks > 1:
        raise ConfigError(
            f"--workers is {options.workers}, but a launcher has started {ranks} processes; leave it out"
        )
    if options.is_exported and max(options.workers, ranks) > 1:
        raise ConfigError(
            "--runtime ctranslate2 translates in one process, but several are to start; leave out --workers or the "
            "launcher, and set OMP_NUM_THREADS for more threads"
        )


def output_path(name: str, option: str) -> Path | None:
    """Return the path of an output file; None for standard output."""
    if name == "-":
        return None
    target, problem = Path(name), ""
    try:
        if target.is_dir():
            problem = "is a directory"
        elif (inside := recorded_directory(target)) is not None:
            problem = f"lies in {inside}, which other commands read"
        elif is_replaceable(target):
            TemporaryFile(dir=resolved(target).parent).close()  # permissions do not tell what file systems refuse
        elif not os.access(target, os.W_OK):
            problem = f"cannot be written ({os.strerror(errno.EACCES)})"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        problem = f"cannot be written ({error.strerror or error})"
    if problem:
        raise ConfigError(f"{option}: {target} {problem}; give another path")
    return target


def written(options: DecodeOptions, number: int, best: Sequence[Translation]) -> str:
    """Return the translations of a line, best first, as they are written; lines are numbered from 0."""
    if options.nbest == 1 and not options.token_scores:
        return best[0].text + "\n"
    lines = []
    for one in best:
        features = {**one.features, "log_prob": one.log_prob, "tokens": len(one.tokens)}
        lines.append(f"{Candidate(number, one.text, features, one.score, one.token_scores or ())}\n")
    return "".join(lines)


def contents(
    translator: LineTranslator, options: DecodeOptions, number: int, best: Sequence[Translation]
) -> Iterator[str]:
    """Yield what the translations of a line add to each output, in the order of the outputs."""
    yield written(options, number, best)
    if options.alignment is not None:
        pairs = (" ".join(f"{source}-{target}" for source, target in one.alignment or ()) for one in best)
        yield "".join(f"{line}\n" for line in pairs)  # in Pharaoh's format, 0-0 1-2
    if options.reliance is not None:
        relying = (one.reliance for one in best if one.reliance is not None)
        yield "".join(f"{number}\t{one.fields(translator.tokenizer.pieces(one.tokens))}\n" for one in relying)


def stream_keywords(options: DecodeOptions, **changes: Any) -> dict[str, Any]:
    """Return the arguments of ``LineTranslator.stream``."""
    return {**options.given_values(*STREAM), **_details(options), **changes}


def _details(options: DecodeOptions) -> dict[str, bool]:
    return {name: getattr(options, name) is not None for name in ("alignment", "reliance")}


def translate_stream(translator: LineTranslator, texts: Texts) -> None:
    """Translate a text in the order of its lines; it is written as it is translated."""
    options = texts.options
    texts.check(translator)
    flushed = options.buffer_lines or (1 if texts.streams["input"].isatty() else None)
    problem: MisalignedError | None = None
    number = -1
    with ExitStack() as stack:
        outputs = []
        for path in texts.outputs.values():
            outputs.append(stack.enter_context(nullcontext(sys.stdout) if path is None else atomic_writer(path, "w")))
        advance = stack.enter_context(counting("translate", "sentences", texts.lines))
        readers = texts.read()
        keywords = stream_keywords(options, buffer_lines=flushed or texts.piece_lines)
        try:
            for number, best in enumerate(
                translator.stream(readers.pop("input"), advance=advance, **readers, **keywords)
            ):
                for output, text in zip(outputs, contents(translator, options, number, best), strict=True):
                    output.write(text)
                    if flushed is not None and (number + 1) % flushed == 0:  # another program may wait for it
                        output.flush()
        except MisalignedError as error:  # what was translated is kept
            problem = error
        outputs[0].flush()
    if problem is not None:
        raise DataError(f"{problem}; lines translated: {number + 1:,}") from problem


def pieces_directory(options: DecodeOptions) -> Path:
    """Return the directory of the pieces of an output file."""
    target = resolved(Path(str(options.output)))
    return target.with_name(f"{target.name}.pieces")


def translate_in_pieces(translator: LineTranslator, texts: Texts) -> int:
    """Translate a file with the other ranks of this start, and return the exit status.

    Pieces that an earlier start has finished are used. If this one is interrupted, those that it has finished stay.
    """
    pieces = Pieces(translator, texts)
    here, work = place(), None
    try:
        with SharedWork.join(here) as work:
            pieces.lead(work) if here.rank == 0 else pieces.follow(work)
    except (Interrupted, ReportedError) as end:
        if not isinstance(end, Interrupted) and end.status != EXIT_STOPPED:
            raise
        if here.rank == 0:
            by = end.signal.name if isinstance(end, Interrupted) else work.stopped_by if work else ""
            reason = by or "the loss of its launcher"
            logger.info("stopped by %s; %s; start the same command again to resume", reason, pieces)
        # A launcher kills rank 0 if another rank fails first, and its message with it.
        return 0 if here.rank and work and work.ended_together else EXIT_STOPPED
    except OSError:
        if pieces.path.exists():
            logger.info("%s; the same command resumes there", pieces)
        raise
    return 0


class _PieceHeader(BaseModel):
    job: str
    sizes: list[Annotated[int, Field(ge=0, lt=1 << 53)]]
    counts: SourceCounts


class Pieces:
    """The pieces of a translation, in a directory, and the part of one rank in it."""

    def __init__(self, translator: LineTranslator, texts: Texts) -> None:
        assert texts.lines is not None
        self.path = pieces_directory(texts.options)
        self._translator, self._texts, self._options = translator, texts, texts.options
        self._lines, self._piece_lines = texts.lines, texts.piece_lines
        self._count = -(-self._lines // self._piece_lines)
        self._keywords = stream_keywords(self._options, strict=False, buffer_lines=self._piece_lines)
        self._sources = texts.digests()
        job = {
            **self._options.resumed(),
            **{typed(name): value for name, value in _details(self._options).items()},
            **self._sources,
            **translator.identity(),
            "the version of the program": __version__,
            "lines of a piece": self._piece_lines,
        }
        self._job: dict[str, Any] = json.loads(json.dumps(job, default=str))
        self._digest = hashlib.sha256(json.dumps(self._job, sort_keys=True).encode()).hexdigest()
        self._first_missing = 0
        """Number of a piece before which all are finished."""
        self._progress: Callable[[int], object] | None = None
        self._reported = 0
        self._warnings: SourceCounts | None = None
        self._restart()

    def _restart(self) -> None:
        """Read the texts from their beginnings from now on."""
        self._reading = 0, self._texts.read(from_start=True)

    def __str__(self) -> str:
        """Return how much of a translation is kept, and where."""
        return f"{len(self._finished())} of {self._count} pieces are finished, in {self.path}"

    def lead(self, work: SharedWork) -> None:
        """Prepare the pieces, translate with the other ranks, and join what all have translated."""
        self._work = work
        target = Path(str(self._options.output))
        refusal = f"{target} is in use: {{holder}} is translating to it; wait for it"
        with exclusive(
            hidden(resolved(target), "translate.lock"), refusal, patience_s=_LOCK_S if requeued() else 0.0
        ):
            texts = self._texts
            texts.check(self._translator)
            beginning = islice(texts.read(from_start=True)["input"], LINES_OF_A_FORM)
            deque(warn_of_form(beginning, self._translator.text), maxlen=0)
            self._warnings = SourceCounts()
            # What the model or its search cannot do is refused before anything is written.
            beside: dict[str, list[bytes]] = {name: [] for name in texts.streams if name != "input"}
            deque(self._translator.stream([], **beside, **self._keywords), maxlen=0)
            if self._options.alignment:
                self._job["the layer of alignments"] = self._translator.aligning
            self._restart()
            before = self._prepare()
            work.announce([self._digest, self._translator.aligning])
            with counting("translate", "sentences", texts.lines, before) as self._progress:
                self._translate_all()
                self._report()
            self._warnings.warn_at_end()
            digests = texts.digests().values(), self._sources.values()
            for name, now, then in zip(texts.streams, *digests, strict=True):
                if now != then:
                    raise self._changed(name)
            self._restart()
            self._join()
            work.complete()
            self.remove()

    def follow(self, work: SharedWork) -> None:
        """Translate with the other ranks, until all is translated."""
        self._work = work
        rank = work.place.rank
        digest, aligning = work.announced()
        if digest != self._digest:
            raise ConfigError(
                f"rank {rank} translates another text, run or options than rank 0; if the run is being trained, name "
                "the checkpoint; if GPUs differ, give --precision; if only some hosts have a compiler, --native off"
            )
        self._translator.aligning.update(aligning)  # measured: on other devices others may seem best
        deadline = time.monotonic() + _VISIBLE_S
        while not (self.path / _JOB_FILE).exists() and not work.is_complete():
            if time.monotonic() > deadline:
                raise DataError(f"rank {rank} does not see {self.path}; write to a file system that all hosts share")
            work.pause()
        self._translate_all()
        while not work.is_complete():  # a launcher may end all ranks some time after the first
            work.pause()

    def _prepare(self) -> int:
        """Make the directory or resume in it, and return the number of translated lines."""
        files = self.path.iterdir() if self.path.is_dir() else [self.path] if self.path.exists() else []
        if foreign := [file for file in files if not _OWN.fullmatch(file.name) or file.is_dir()]:
            raise DataError(
                f"{foreign[0]} is in the way of the pieces of the translation, and not written by `translate`; move "
                "it away, or give another output"
            )
        self.path.mkdir(exist_ok=True)
        remove_orphans(self.path)
        file = self.path / _JOB_FILE
        if file.exists():
            self._check_job(file)
        atomic_write_bytes(file, json.dumps(self._job, indent=1).encode())
        if finished := self._finished():
            logger.info("resumes: %d of %d pieces are in %s", len(finished), self._count, self.path)
        return sum(map(self._lines_of, finished))

    def _check_job(self, file: Path) -> None:
        try:
            before = dict(parse_json(read_regular(file)))
        except _DAMAGED:
            logger.warning("%s is damaged; pieces of this translation are used, others translated again", file)
            return
        now = self._job
        keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        differences = [
            f"{key} was another one"
            if key.startswith("the ")
            else f"{key} was {shown(before.get(key))} and is {shown(now.get(key))}"
            for key in keys[:3]
        ]
        if differences:
            raise DataError(
                f"{self.path} is of another translation: {', '.join(differences)}; start with what it was begun "
                f"with, or remove {self.path} to begin anew"
            )

    def _lines_of(self, number: int) -> int:
        return min(self._piece_lines, self._lines - number * self._piece_lines)

    def file(self, number: int) -> Path:
        """Return the path of a piece, which is there if it is finished."""
        return self.path / f"piece-{number:07d}"

    def _finished(self) -> list[int]:
        return [number for number in range(self._count) if self.file(number).exists()]

    def _translate_all(self) -> None:
        while (number := self._work.claim()) < self._count:
            if not self.file(number).exists():
                self._translate(number)
            self._look()
        done, since = self._work.done(), time.monotonic()
        while not self._look() and not self._work.is_complete():
            self._work.pause()
            if (now := self._work.done()) != done:
                done, since = now, time.monotonic()
            elif time.monotonic() - since > SILENT_S:
                logger.warning("no progress for %.0f s: piece %d is taken over", SILENT_S, self._first_missing)
                with suppress(FileNotFoundError):  # the silent rank has finished it, and the directory was removed
                    self._translate(self._first_missing)  # if both ranks do, they write the same
                since = time.monotonic()

    def _look(self) -> bool:
        """Return True if all pieces are finished by now. Rank 0 warns of their source lines."""
        self._report()
        while self._first_missing < self._count and self.file(self._first_missing).exists():
            if self._warnings is not None:
                self._warnings.warn_of(self._read_or_repair(self._first_missing)[1])
            self._first_missing += 1
        return self._first_missing == self._count

    def _translate(self, number: int) -> None:
        counts, before, lines = SourceCounts(), number * self._piece_lines, self._source(number)
        translations = self._translator.stream(
            lines.pop("input"), advance=self._advance, counts=counts, first_line=before, **lines, **self._keywords
        )
        lines_of = [
            contents(self._translator, self._options, line, best) for line, best in enumerate(translations, before)
        ]
        self.write(number, ["".join(texts).encode() for texts in zip(*lines_of, strict=True)], counts)

    def _source(self, number: int) -> dict[str, list[Any]]:
        """Read the lines of a piece in all texts, which must not have become shorter."""
        if number < self._reading[0]:
            self._restart()
        at, readers = self._reading
        first = (number - at) * self._piece_lines
        sources = {name: list(islice(lines, first, first + self._piece_lines)) for name, lines in readers.items()}
        self._reading = number + 1, readers
        for name, lines in sources.items():
            if len(lines) != self._lines_of(number):
                raise self._changed(name)
        return sources

    def _changed(self, name: str) -> DataError:
        return DataError(f"{self._texts.name(name)} changed while it was translated; start again")

    def write(self, number: int, texts: Sequence[bytes], counts: SourceCounts) -> None:
        """Write a piece: its part of each output, and counts of its source lines."""
        header = {"job": self._digest, "sizes": list(map(len, texts)), "counts": asdict(counts)}
        content = b"".join((json.dumps(header).encode(), b"\n", *texts))
        atomic_write_bytes(self.file(number), hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

    def _read(self, number: int) -> tuple[list[bytes], SourceCounts] | None:
        """Return what was written as a piece; None if it is damaged or of another translation."""
        with suppress(*_DAMAGED):
            digest, _, content = read_regular(self.file(number)).partition(b"\n")
            line, _, texts = content.partition(b"\n")
            header = _PieceHeader.model_validate_json(line)
            ends = list(accumulate(header.sizes, initial=0))
            is_whole = len(header.sizes) == len(self._texts.outputs) and ends[-1] == len(texts)
            if is_whole and hashlib.sha256(content).hexdigest().encode() == digest and header.job == self._digest:
                return [texts[start:end] for start, end in pairwise(ends)], header.counts
        return None

    def _read_or_repair(self, number: int) -> tuple[list[bytes], SourceCounts]:
        """Read a piece, after it is translated again if it is damaged."""
        if (piece := self._read(number)) is None:
            logger.warning("%s is damaged; it is translated again", self.file(number))
            self._translate(number)
            piece = self._read(number)
        if piece is None:
            raise DataError(f"{self.file(number)} is not as it was written; check the disk")
        return piece

    def _advance(self, more: int) -> None:
        self._work.advance(more)
        self._report()

    def _report(self) -> None:
        """Report on rank 0 how much more all ranks have done."""
        if self._progress is not None:
            before, self._reported = self._reported, self._work.done()
            self._progress(self._reported - before)

    def _join(self) -> None:
        """Write the pieces in order to the outputs, which are replaced when they are complete."""
        with ExitStack() as stack:
            paths = self._texts.outputs.values()
            outputs = [stack.enter_context(atomic_writer(path)) for path in paths if path is not None]
            for number in range(self._count):
                for output, content in zip(outputs, self._read_or_repair(number)[0], strict=True):
                    output.write(content)

    def remove(self) -> None:
        """Remove the directory and its files, or warn that it cannot be removed."""
        try:
            for file in self.path.iterdir():
                file.unlink(missing_ok=True)
            self.path.rmdir()
        except OSError as error:  # such as files that NFS keeps because another rank has them open
            logger.warning("%s could not be removed (%s); remove it", self.path, error.strerror or error)
