"""Stages of preparation: each consists of tasks, which any processes of any hosts may run.

A task is a function of the options and of the files that earlier stages have written. It writes a directory under a
hidden name, records the hashes of its files, and renames the directory. So a task that is killed, or runs twice,
changes nothing. Training text is divided between tasks by pieces of whole lines, and what is decided about all pairs
depends on their places only: the result is the same for any number of tasks.

| stage | tasks | files of a task |
|---|---|---|
| ``index`` | one for each set of aligned files | places of the pieces, copies of text that cannot be read again |
| ``clean`` | N | clean text, duplicates included, with hashes by which repetitions are recognised |
| ``duplicate``, ``near_duplicates`` | at most N | places of pairs that repeat an earlier one, for a range of hashes |
| ``vocabulary`` | 1 | the vocabulary |
| ``encode`` | N | a part of the corpus |
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, compress
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from deepspeed_nmt.console import logger, progress
from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.clean import CleaningConfig, PairChecker, fits
from deepspeed_nmt.data.corpus import CorpusWriter
from deepspeed_nmt.data.data_directory import EXAMPLES, RoundTrip, open_tokenizer
from deepspeed_nmt.data.filters import Hashes, Removals
from deepspeed_nmt.data.inputs import (
    PIECE_BYTES,
    IndexedText,
    InputRecord,
    Piece,
    count_pieces,
    index_text,
    lines_of,
    read_pairs,
    read_pieces,
)
from deepspeed_nmt.data.options import DEFAULT_VOCAB_SIZE, PrepareOptions
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.tokenizer import Count, SampledSegmentations, Tokenizer, TokenLists, split_name
from deepspeed_nmt.data.vocabulary_training import DEFAULT_NORMALIZATION, train_subwords, train_words
from deepspeed_nmt.data.word_alignments import token_links, tokens_of_words
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import hidden, remove
from deepspeed_nmt.manifest import DamagedRecordError, FileRecord, PlainName, read_record, write_record
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import NO_TAGS, Tags, normalise_whitespace

SAMPLE_PAIRS = 1_000_000
"""Pairs that a BPE vocabulary is trained on if there are more: two million lines."""
SAMPLE_LINES = 10_000
"""Lines of each side of a split that are encoded and decoded to see if they change."""
MAX_RANGES = 64
"""Ranges of hashes at most: every task reads a part of the hashes of every other one."""
_RECORD = "task.json"
_HASHES = "hashes.npy"
_PLACES = "places.npy"
_WEIGHTS = "weights.npy"
_REPEATED = "repeated.npy"

Weights = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
EncodedPairs = dict[Side, TokenLists]
"""Tokens of several pairs by side, without EOS."""


class TaskRecord(Config):
    """The record of a task that is done. Each stage has its own fields besides ``files``.

    Attributes:
        texts: the files of a set of training text, by name in :attr:`PrepareOptions.inputs`.
        read: pairs that the task has worked on.
        pairs: pairs that are left.
        removals: pairs that are not, by reason.
        repaired: lines that a Unicode rule changed, by ``<rule>.<side>``.
        starts: number of the first pair of each task in the clean text without repetitions, and finally of all pairs.
        round_trips: lines of a part of the corpus that encoding and decoding changes, by side.
        unlinked: pairs that lost their word alignments.
    """

    files: dict[PlainName, FileRecord] = Field(default_factory=dict)
    texts: dict[str, IndexedText] = Field(default_factory=dict)
    read: Count = 0
    pairs: Count = 0
    removals: Removals = Field(default_factory=Removals)
    repaired: Counter[str] = Field(default_factory=Counter)
    starts: tuple[Count, ...] = ()
    round_trips: dict[Side, RoundTrip] = Field(default_factory=dict)
    unlinked: Count = 0


class Work(Config):
    """The preparation of a data directory: ``tasks`` is N, ``directory`` receives the directories of the tasks.

    ``inputs`` are records of the text that is held out, ``recorded`` the options that decide the result, and
    ``versions`` those of packages that all hosts must have.
    """

    directory: Path
    options: PrepareOptions
    inputs: dict[str, tuple[InputRecord, ...]]
    sampling: SampledSegmentations | None
    recorded: dict[str, Any]
    versions: dict[str, str] = Field(default_factory=dict)
    tasks: int = 1

    @property
    def repetitions(self) -> tuple[str, ...]:
        """Reasons for which a pair is removed because of an earlier one, in order."""
        return self.options.cleaning.repetitions(self.options.filters)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the files of clean text, one line a pair."""
        return "source", "target", *(["links"] if self.options.train_alignments else [])

    @property
    def is_weighted(self) -> bool:
        """True if pairs have weights."""
        return bool(self.options.train_weights) or len(self.options.tsv_columns or ()) == 3

    @property
    def stages(self) -> dict[str, int]:
        """Names of the stages, in order, with their numbers of tasks."""
        return {
            "index": len(self.options.training_sets),
            "clean": self.tasks,
            **dict.fromkeys(self.repetitions, min(self.tasks, MAX_RANGES)),
            "vocabulary": 1,
            "encode": self.tasks,
        }

    def place(self, stage: str, task: int) -> Path:
        """Return the directory of a task."""
        return self.directory / stage / f"{task:05d}"

    def record(self, stage: str, task: int, verify: Iterable[str] = ()) -> TaskRecord:
        """Return the record of a task that is done; the files named ``verify`` are compared with their hashes."""
        place = self.place(stage, task)
        try:
            record = TaskRecord.model_validate_json(read_record(place / _RECORD))
            problems = (
                f"{name} {problem}"
                for name, file in record.files.items()
                if (problem := file.problem(place / name, name in verify))
            )
            if problem := next(problems, None):
                raise DamagedRecordError(problem)
        except (DamagedRecordError, ValidationError) as error:
            raise DataError(f"{place} is damaged ({error}); remove it, and run `prepare` again") from error
        return record

    def records(self, stage: str) -> list[TaskRecord]:
        """Return the records of all tasks of a stage."""
        return [self.record(stage, task) for task in range(self.stages[stage])]

    def pieces(self, task: int) -> Iterator[Piece]:
        """Yield the pieces of the training text of a task."""
        counts = [count_pieces(self.place("index", number)) for number in range(self.stages["index"])]
        first, last = (sum(counts) * number // self.tasks for number in (task, task + 1))
        for number, count in enumerate(counts):
            if first < count and last > 0:
                texts = self.record("index", number).texts
                yield from read_pieces(texts, self.place("index", number), max(first, 0), min(last, count))
            first, last = first - count, last - count

    def repeated(self, reasons: Iterable[str]) -> dict[str, list[Places]]:
        """Return tasks and places of repetitions, by reason and range of hashes. Shape of each: (2, N)."""
        return {
            reason: [
                np.load(self.place(reason, task) / _REPEATED, mmap_mode="r") for task in range(self.stages[reason])
            ]
            for reason in reasons
        }

    def kept(self, task: int, repeated: Mapping[str, list[Places]]) -> Mask:
        """Return True for pairs of the clean text of a task that repeat no others. Shape: -> (N,)."""
        keep = np.ones(self.record("clean", task).pairs, np.bool_)
        for ranges in repeated.values():
            keep[_places(ranges, task)] = False
        return keep


def _places(ranges: list[Places], task: int) -> Places:
    """Return the places of repetitions in the clean text of a task, in order."""
    own = (places[slice(*np.searchsorted(tasks, [task, task + 1]))] for tasks, places in ranges)
    return np.sort(np.concatenate([np.empty(0, np.int64), *own]))


def run_task(work: Work, stage: str, task: int) -> int:
    """Run a task, unless it is done, and return the number of pairs that it has worked on."""
    place = work.place(stage, task)
    if not place.is_dir():
        new = hidden(place, f"partial-{token_hex(4)}")
        new.mkdir(parents=True)
        try:
            remembering = stage in work.repetitions
            record = find_repetitions(work, task, new, stage) if remembering else _TASKS[stage](work, task, new)
            files = {path.name: FileRecord.of(path) for path in sorted(new.iterdir())}
            write_record(new / _RECORD, record.model_copy(update={"files": files}).model_dump_json().encode())
            try:
                new.replace(place)
            except OSError:
                if not place.is_dir():  # another process has done the same
                    raise
        finally:
            remove(new)
    return work.record(stage, task).read


def index(work: Work, task: int, new: Path) -> TaskRecord:
    """Hash a set of aligned files, and find their pieces."""
    texts = index_text(work.options.training_sets[task], new)
    return TaskRecord(texts=texts, read=next(iter(texts.values())).record.lines)


def clean(work: Work, task: int, new: Path) -> TaskRecord:
    """Write the pairs of a part of the text that can be kept by themselves, and the hashes of their keys, sorted."""
    options, kept = work.options, 0
    checker = PairChecker(options.cleaning, options.segmented, options.pair_filters(), options.unicode)
    hashes: dict[str, list[Hashes]] = {reason: [] for reason in work.repetitions}
    all_weights: list[Weights] = []
    with ExitStack() as stack:
        files = [stack.enter_context((new / name).open("wb")) for name in work.names]
        for piece in work.pieces(task):
            pairs, weights, scores, links = read_pairs(piece, options.tsv_columns)
            places, texts = checker.check(pairs, scores)
            for side in (0, 1):
                files[side].write("".join(f"{text[side]}\n" for text in texts).encode())
            if links is not None:
                rules = options.unicode  # they may leave nothing of a word, so that later ones change numbers
                own = (
                    links[place] if not rules or _have_same_words(pairs[place], text) else b""
                    for place, text in zip(places, texts, strict=True)
                )
                files[2].writelines(line + b"\n" for line in own)
            if weights is not None:
                all_weights.append(weights[places])
            for reason, batches in hashes.items():
                batches.append(checker.hashes(reason, texts))
            kept += len(texts)
    for reason, batches in hashes.items():
        all_hashes = np.concatenate([np.empty(0, np.uint64), *batches])
        order = np.argsort(all_hashes, kind="stable")
        np.save(new / f"{reason}.{_HASHES}", all_hashes[order])
        np.save(new / f"{reason}.{_PLACES}", order)
    if work.is_weighted:
        np.save(new / _WEIGHTS, np.concatenate([np.empty(0, np.float32), *all_weights]))
    return TaskRecord(read=checker.read, pairs=kept, removals=checker.removals, repaired=checker.repaired)


def _have_same_words(pair: tuple[bytes, bytes], text: tuple[str, str]) -> bool:
    return all(len(old.decode().split()) == len(new.split()) for old, new in zip(pair, text, strict=True))


def find_repetitions(work: Work, task: int, new: Path, reason: str) -> TaskRecord:
    """Write the places (task, pair) of pairs whose key an earlier pair has, for a range of the keys' hashes.

    A pair that was removed for an earlier reason is not remembered.
    """
    earlier = work.repeated(work.repetitions[: work.repetitions.index(reason)])
    bounds = [(number << 64) // work.stages[reason] for number in (task, task + 1)]
    work.records("clean")  # whose files are whole
    hashes: list[Hashes] = [np.empty(0, np.uint64)]
    rows: list[Places] = [np.empty((0, 2), np.int64)]
    for number in range(work.tasks):
        stem = work.place("clean", number) / reason
        sorted_hashes, places = (np.load(f"{stem}.{name}", mmap_mode="r") for name in (_HASHES, _PLACES))
        first, last = (
            len(sorted_hashes) if bound >> 64 else int(np.searchsorted(sorted_hashes, np.uint64(bound)))
            for bound in bounds
        )
        own = np.asarray(places[first:last])
        keep = work.kept(number, earlier)[own] if earlier else np.ones(len(own), np.bool_)
        hashes.append(sorted_hashes[first:last][keep])
        rows.append(np.stack([np.full(int(keep.sum()), number), own[keep]], axis=1))
    all_hashes, all_rows = np.concatenate(hashes), np.concatenate(rows)
    order = np.argsort(all_hashes, kind="stable")  # of equal hashes, the first pair comes first
    repeated = all_rows[order[1:][all_hashes[order[1:]] == all_hashes[order[:-1]]]]
    np.save(new / _REPEATED, repeated[np.lexsort((repeated[:, 1], repeated[:, 0]))].T.copy())
    return TaskRecord()


def make_vocabulary(work: Work, task: int, new: Path) -> TaskRecord:
    """Write the vocabulary, trained on all clean text or a sample of it unless it is given, and number the pairs."""
    records = work.records("clean")
    repeated = work.repeated(work.repetitions)
    kept = [int(work.kept(number, repeated).sum()) for number in range(work.tasks)]
    removals, read = Removals(), sum(record.read for record in records)
    for record in records:
        removals.merge(record.removals)
    check_some_left(work, removals, read, sum(kept))
    starts = (0, *np.cumsum(kept).tolist())
    if (given := work.directory / "given").is_dir():
        shutil.copytree(given, new, dirs_exist_ok=True)
    else:
        _train_vocabulary(work, starts).save(new)
    return TaskRecord(starts=starts, read=starts[-1])


def check_some_left(work: Work, removals: Removals, read: int, kept: int) -> None:
    """Raise a DataError, which has the reasons, if no pair is kept."""
    if kept == 0:
        counts, described = removals.counts, work.options.cleaning.reasons(work.options.filters)
        reasons = "; ".join(f"{counts[name]}: {text}" for name, text in described.items() if counts[name])
        raise DataError(
            f"no training pair is left after cleaning of {read} ({reasons or 'the files are empty'}); check "
            "that the files are the right ones, or loosen the cleaning"
        )


def _train_vocabulary(work: Work, starts: Sequence[int]) -> Tokenizer:
    if work.options.separate_vocabularies:
        source, target = (_trained(work, (side,), starts) for side in SIDES)
        return SentencePieceTokenizer(target.model, target.segmented, source.model, work.options.symbols)
    return _trained(work, SIDES, starts)


def _trained(work: Work, sides: Sequence[Side], starts: Sequence[int]) -> SentencePieceTokenizer:
    """Train one vocabulary on the clean text of some sides, or on a sample of it."""
    options, pairs = work.options, starts[-1]
    if options.segmented:
        all_lines = chain.from_iterable(_clean_lines(work, side) for side in sides)
        return train_words(
            progress(all_lines, "vocabulary", "lines", total=len(sides) * pairs), options.vocab_size, options.symbols
        )
    chosen = None
    if pairs > SAMPLE_PAIRS:
        rng = np.random.default_rng(options.seed)
        chosen = np.sort(rng.choice(pairs, SAMPLE_PAIRS, replace=False, shuffle=False))
    size = options.vocab_size or DEFAULT_VOCAB_SIZE
    trained_on = f"{min(pairs, SAMPLE_PAIRS):,}"
    logger.info("vocabulary: training %s tokens on %s pairs", f"{size:,}", trained_on)
    return train_subwords(
        chain.from_iterable(_clean_lines(work, side, starts, chosen) for side in sides),
        size,
        options.character_coverage,
        options.normalization or DEFAULT_NORMALIZATION,
        options.vocabulary_type or "bpe",
        options.byte_fallback,
        options.symbols,
    )


def _clean_lines(work: Work, side: Side, starts: Sequence[int] = (), chosen: Places | None = None) -> Iterator[str]:
    """Yield lines of the clean text of one side: all, or those with the ``chosen`` numbers, which are sorted."""
    repeated = work.repeated(work.repetitions)
    for number in range(work.tasks):
        keep = work.kept(number, repeated)
        if chosen is not None:
            first, last = np.searchsorted(chosen, starts[number : number + 2])
            numbers, keep = np.flatnonzero(keep), np.zeros_like(keep)
            keep[numbers[chosen[first:last] - starts[number]]] = True
        with (work.place("clean", number) / side).open("rb") as lines:
            yield from (line.rstrip(b"\r\n").decode() for line in compress(lines, keep))


@dataclass(frozen=True)
class PairEncoder:
    """Encoder of the pairs of a corpus: what it returns depends on its arguments only.

    Tags are in front of all sentences but empty ones. ``sampling`` is None for the segmentation of the vocabulary.
    """

    tokenizer: Tokenizer
    tags: Tags = NO_TAGS
    sampling: SampledSegmentations | None = None

    @property
    def segmentations(self) -> int:
        """Number of segmentations of each pair."""
        return 1 if self.sampling is None else self.sampling.count

    def encode(self, pairs: Sequence[tuple[str, str]], first: int = 0) -> list[EncodedPairs]:
        """Encode successive pairs (source, target), in each segmentation.

        ``first`` is the number of the first pair in the clean text, from 0, on which sampled segmentations depend.
        Vocabularies that lack a tag, or several segmentations if they are to be drawn, are a DataError.
        """
        texts = {side: [pair[place] for pair in pairs] for place, side in enumerate(SIDES)}
        return [
            {side: self._encoded(texts[side], side, number, first) for side in SIDES}
            for number in range(self.segmentations)
        ]

    def _encoded(self, texts: Sequence[str], side: Side, number: int, first: int) -> TokenLists:
        if self.sampling is None:
            sentences = self.tokenizer.encode_batch(texts, side)
        else:
            sentences = self.tokenizer.sample_batch(texts, side, self.sampling, number, first)
        if (tag := self.tags.of(side)) is None:
            return sentences
        symbol = self.tokenizer.symbol(side, tag)
        return [[symbol, *tokens] if tokens else tokens for tokens in sentences]

    def links(self, lines: Sequence[bytes], pairs: Sequence[tuple[str, str]], encoded: EncodedPairs) -> TokenLists:
        """Return the links of the tokens of pairs, from those of their words on ``lines``."""
        source, target = (
            [
                tokens_of_words(tokens, pair[place], self.tokenizer, side, self.tags.of(side) is not None)
                for tokens, pair in zip(encoded[side], pairs, strict=True)
            ]
            for place, side in enumerate(SIDES)
        )
        return [
            [] if of_source is None or of_target is None else token_links(line, of_source, of_target)
            for line, of_source, of_target in zip(lines, source, target, strict=True)
        ]

    def round_trip(self, side: Side, texts: Iterable[str], encoded: TokenLists) -> RoundTrip:
        """Compare lines with what their tokens decode to."""
        changed, tag = [], self.tags.of(side)
        for text, tokens in zip(texts, encoded, strict=True):
            # Decoding joins segmented text, which loses nothing, and keeps the tag in front.
            original = f"{tag} {text}" if tag is not None and text else text
            original = self.tokenizer.reference(original) if self.tokenizer.segmented else original
            decoded = self.tokenizer.decode(tokens, side)
            if normalise_whitespace(decoded) != normalise_whitespace(original):
                changed.append((original, decoded))
        return RoundTrip(lines=len(encoded), changed=len(changed), examples=tuple(changed[:EXAMPLES]))


def encode(work: Work, task: int, new: Path) -> TaskRecord:
    """Write a part of the corpus: the clean text of a task without repetitions, and without pairs that do not fit."""
    work.record("clean", task, verify=(*work.names, _WEIGHTS))
    starts, clean_text = work.record("vocabulary", 0).starts, work.place("clean", task)
    encoded = encode_split(
        [clean_text / name for name in work.names],
        PairEncoder(open_tokenizer(work.place("vocabulary", 0)), work.options.tags, work.sampling),
        new,
        "train",
        starts[-1],
        work.options.cleaning,
        {reason: _places(ranges, task) for reason, ranges in work.repeated(work.repetitions).items()},
        np.load(clean_text / _WEIGHTS) if work.is_weighted else None,
        starts[task],
    )
    return encoded.model_copy(update={"read": starts[task + 1] - starts[task]})


def encode_split(
    files: Sequence[Path],
    encoder: PairEncoder,
    directory: Path,
    split: str,
    pairs: int,
    cleaning: CleaningConfig | None = None,
    repeated: Mapping[str, Places] | None = None,
    weights: Weights | None = None,
    first: int = 0,
) -> TaskRecord:
    """Write the tokens of a split, or of a part of it, in all its segmentations.

    ``files`` are those of the source, the target, and links of words if there are any, ``weights`` those of their
    pairs. Pairs at the places ``repeated``, by reason, are removed. ``first`` is the number of the first other one in
    the split, which has ``pairs`` in all, some of which are decoded again to see if they change. Without ``cleaning``
    all pairs are kept, and any bytes are read as text.
    """
    tokenizer, vocabulary = encoder.tokenizer, encoder.tokenizer.vocabulary
    size, every = max(vocabulary.size, vocabulary.source.size), max(1, -(-pairs // SAMPLE_LINES))
    positions = cleaning.max_length + 2 if len(files) == 3 and cleaning is not None else None
    unlinked, removals = 0, Removals()
    round_trips: dict[Side, RoundTrip] = {side: RoundTrip() for side in SIDES}
    with ExitStack() as opened:
        writers = {
            name: opened.enter_context(
                CorpusWriter(directory, name, size, weights is not None and name == split, positions)
            )
            for name in (split, *map(split_name, range(1, encoder.segmentations)))
        }
        for columns, of_piece in _new_pairs(files, repeated or {}, weights, removals):
            texts = [[line.decode(errors="replace") for line in column] for column in columns[:2]]
            if cleaning is None:
                texts = [[normalise_whitespace(line, tokenizer.segmented) for line in side] for side in texts]
            own = list(zip(*texts, strict=True))
            encoded = encoder.encode(own, first)
            keep: Mask = np.ones(len(own), np.bool_)
            if cleaning is not None:  # a sentence must fit in all its segmentations
                lengths = np.array([[list(map(len, tokens[side])) for side in SIDES] for tokens in encoded], np.int64)
                keep = fits(cleaning, lengths.max(axis=0), own, removals)
            own = list(compress(own, keep))
            kept = [{side: list(compress(tokens[side], keep)) for side in SIDES} for tokens in encoded]
            tried = np.flatnonzero((first + np.flatnonzero(keep) + 1) % every == 0).tolist()
            for place, side in enumerate(SIDES):
                trip = encoder.round_trip(side, [own[n][place] for n in tried], [kept[0][side][n] for n in tried])
                round_trips[side] = round_trips[side].followed_by(trip)
            for (name, writer), tokens in zip(writers.items(), kept, strict=True):
                links = None
                if positions is not None:
                    of_words = list(compress(columns[2], keep))
                    links = encoder.links(of_words, own, tokens)
                    unlinked += name == split and sum(bool(a) and not b for a, b in zip(of_words, links, strict=True))
                factors = None if of_piece is None or name != split else of_piece[keep]
                writer.append(tokens["source"], tokens["target"], factors, links)
            first += len(columns[0])
    return TaskRecord(removals=removals, round_trips=round_trips, unlinked=unlinked)


def _new_pairs(
    files: Sequence[Path], repeated: Mapping[str, Places], weights: Weights | None, removals: Removals
) -> Iterator[tuple[list[list[bytes]], Weights | None]]:
    """Yield columns of aligned files, piece by piece, and their weights; repetitions are counted and left out."""
    read = 0
    with ExitStack() as opened:
        source, *others = (opened.enter_context(file.open("rb")) for file in files)
        while lines := source.readlines(PIECE_BYTES):
            columns = [lines, *([file.readline() for _ in lines] for file in others)]
            columns = [lines_of(b"".join(column)) for column in columns]
            new: Mask = np.ones(len(lines), np.bool_)
            for reason, all_places in repeated.items():
                places = all_places[slice(*np.searchsorted(all_places, [read, read + len(lines)]))] - read
                for number in places.tolist():
                    removals.add(reason, columns[0][number], columns[1][number])
                new[places] = False
            of_piece = None if weights is None else weights[read : read + len(lines)][new]
            yield [list(compress(column, new)) for column in columns], of_piece
            read += len(lines)


_TASKS: Mapping[str, Callable[[Work, int, Path], TaskRecord]] = {
    "index": index,
    "clean": clean,
    "vocabulary": make_vocabulary,
    "encode": encode,
}
