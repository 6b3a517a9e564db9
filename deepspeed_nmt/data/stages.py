"""Stages of preparation, in :mod:`deepspeed_nmt.data.tasks`, and the data directory that is joined of their files.

Training text is divided between tasks by pieces of whole lines, and what is decided about all pairs depends on their
places only: the result is the same for any number of tasks.

| stage | tasks | files of a task |
|---|---|---|
| ``index`` | one for each set of aligned files | places of the pieces, copies of text that cannot be read again |
| ``clean`` | N | clean text, duplicates included, with hashes by which repetitions are recognised |
| ``duplicate``, ``near_duplicates`` | at most N | places of pairs that repeat an earlier one, for a range of hashes |
| ``vocabulary`` | 1 | the vocabulary |
| ``encode`` | N | a part of the corpus |
"""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field
from typing_extensions import override

from deepspeed_nmt import __version__
from deepspeed_nmt.console import logger, progress
from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.clean import CleaningConfig, PairChecker, fits, repair
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter, join_files
from deepspeed_nmt.data.data_directory import FORMAT, META_FILE, DataDirectory, Meta, RoundTrip, open_tokenizer
from deepspeed_nmt.data.filters import EXAMPLES, Hashes, Removals
from deepspeed_nmt.data.inputs import (
    PIECE_BYTES,
    IndexedText,
    InputRecord,
    Piece,
    count_pieces,
    index_text,
    inspect_inputs,
    lines_of,
    read_pairs,
    read_pieces,
)
from deepspeed_nmt.data.options import DEFAULT_VOCAB_SIZE, FREE, PrepareOptions
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.tasks import TaskRecord, Work
from deepspeed_nmt.data.tokenizer import Count, SampledSegmentations, Tokenizer, TokenLists, split_name
from deepspeed_nmt.data.vocabulary_training import DEFAULT_NORMALIZATION, train_subwords, train_words
from deepspeed_nmt.data.word_alignments import token_links, tokens_of_words
from deepspeed_nmt.errors import DataError, typed
from deepspeed_nmt.files import open_text, replacing, resolved, staged, text_lines
from deepspeed_nmt.manifest import FileRecord, check_own, write_record
from deepspeed_nmt.text import NO_TAGS, Tags, looks_tokenised, normalise_whitespace, warn_of_missing_rules

SAMPLE_PAIRS = 1_000_000
"""Pairs that a BPE vocabulary is trained on if there are more: two million lines."""
SAMPLE_LINES = 10_000
"""Lines of each side of a split that are encoded and decoded to see if they change."""
MAX_RANGES = 64
"""Ranges of hashes at most: every task reads a part of the hashes of every other one."""
TASK_PIECES = 8
"""Pieces of text of a task: some seconds of encoding. Text of fewer is prepared without workers."""
MAX_TASKS = 256
"""Tasks of a host, each of which reads a part of the hashes of every other one."""
_HASHES = "hashes.npy"
_PLACES = "places.npy"
_WEIGHTS = "weights.npy"
_REPEATED = "repeated.npy"
_LOST = b"-"
"""Line in place of the word alignments that a pair loses."""

Weights = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
EncodedPairs = dict[Side, TokenLists]
"""Tokens of several pairs by side, without EOS."""


class PairsRecord(TaskRecord):
    """The record of a task of pairs. Each stage has its own fields.

    Attributes:
        texts: the files of a set of training text, by name in :attr:`PrepareOptions.inputs`.
        pairs: pairs that are left.
        removals: pairs that are not, by reason.
        repaired: lines that a Unicode rule changed, by ``<rule>.<side>``.
        starts: number of the first pair of each task in the clean text without repetitions, and finally of all pairs.
        round_trips: lines of a part of the corpus that encoding and decoding changes, by side.
        unlinked: pairs that lost their word alignments.
    """

    texts: dict[str, IndexedText] = Field(default_factory=dict)
    pairs: Count = 0
    removals: Removals = Field(default_factory=Removals)
    repaired: Counter[str] = Field(default_factory=Counter)
    starts: tuple[Count, ...] = ()
    round_trips: dict[Side, RoundTrip] = Field(default_factory=dict)
    unlinked: Count = 0


class Preparation(Work[PairsRecord]):
    """The preparation of a data directory: ``tasks`` is N.

    ``inputs`` are records of the text that is held out, ``recorded`` the options that decide the result.
    """

    command = "prepare"
    record_type: ClassVar[type[PairsRecord]] = PairsRecord
    packages: ClassVar[tuple[str, ...]] = ("deepspeed_nmt", "sentencepiece", "numpy")
    shown: ClassVar[dict[str, str]] = {"clean": "cleaning", "encode": "encoding"}
    memory_gib: ClassVar[dict[str, int]] = {"vocabulary": 4}  # SentencePiece holds the sample

    options: PrepareOptions
    inputs: dict[str, tuple[InputRecord, ...]]
    sampling: SampledSegmentations | None
    recorded: dict[str, Any]

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
    @override
    def stages(self) -> dict[str, int]:
        return {
            "index": len(self.options.training_sets),
            "clean": self.tasks,
            **dict.fromkeys(self.repetitions, min(self.tasks, MAX_RANGES)),
            "vocabulary": 1,
            "encode": self.tasks,
        }

    @override
    def run(self, stage: str, task: int, new: Path) -> PairsRecord:
        tasks = {"index": index, "clean": clean, "vocabulary": make_vocabulary, "encode": encode}
        return tasks[stage](self, task, new) if stage in tasks else find_repetitions(self, task, new, stage)

    @override
    def join(self) -> Meta:
        """Write the data directory, and return its record."""
        with replacing_data(out := resolved(self.options.out)), staged_data(out) as staging:
            return join(self, staging)

    @override
    def division(self) -> int:
        """Return as many tasks as the pieces need."""
        pieces = sum(count_pieces(self.place("index", number)) for number in range(self.stages["index"]))
        return max(1, min(-(-pieces // TASK_PIECES), MAX_TASKS))

    def check_same(self, options: PrepareOptions, recorded: Mapping[str, Any]) -> Preparation:
        """Return this work, or raise a DataError if its tasks are of other options, or the text has changed.

        ``recorded`` are the options that decide the result now.
        """
        own = {"overwrite", *FREE}
        old, new = (each.model_dump(exclude=own) for each in (self.options, options))
        if others := [typed(name) for name in old if old[name] != new[name]]:
            raise DataError(
                f"{self.directory} holds tasks of another {', '.join(others)}; remove it, or choose another --out"
            )
        for number in range(self.stages["index"]):
            for text in self.record("index", number).texts.values() if self.place("index", number).is_dir() else ():
                if text.is_changed():
                    raise DataError(
                        f"{text.record.path} has changed since its pieces were found; remove {self.directory}, and "
                        "start again"
                    )
        inputs = inspect_inputs({name: options.inputs[name] for name in self.inputs})
        if changed := differing((recorded, inputs), (self.recorded, self.inputs)):
            raise DataError(
                f"{self.directory} holds tasks that differ in {', '.join(changed)}; remove it, and start again"
            )
        return self

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


Content = tuple[Mapping[str, Any], Mapping[str, tuple[InputRecord, ...]]]
"""Options that decide the result, and records of files, by name."""


def differing(new: Content, old: Content) -> list[str]:
    """Return the names of the options and texts that differ."""
    now, before = (
        {**options, **{f"{name} text": [file.sha256 for file in files] for name, files in inputs.items()}}
        for options, inputs in (new, old)
    )
    names = sorted({*now, *before}, key=lambda name: (name.endswith(" text"), name))  # options first
    return [name for name in names if now.get(name) != before.get(name)]


def _places(ranges: list[Places], task: int) -> Places:
    """Return the places of repetitions in the clean text of a task, in order."""
    own = (places[slice(*np.searchsorted(tasks, [task, task + 1]))] for tasks, places in ranges)
    return np.sort(np.concatenate([np.empty(0, np.int64), *own]))


def index(work: Preparation, task: int, new: Path) -> PairsRecord:
    """Hash a set of aligned files, and find their pieces."""
    texts = index_text(work.options.training_sets[task], new)
    return PairsRecord(texts=texts, read=next(iter(texts.values())).record.lines)


def clean(work: Preparation, task: int, new: Path) -> PairsRecord:
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
                own = (
                    links[place] if _have_same_words(pairs[place], text, options.unicode) else _LOST
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
    return PairsRecord(read=checker.read, pairs=kept, removals=checker.removals, repaired=checker.repaired)


def _have_same_words(pair: tuple[bytes, bytes], text: tuple[str, str], rules: Sequence[str]) -> bool:
    """Return True if the words between ASCII white space, which fast_align counts, are those of the clean text.

    A Unicode rule may leave nothing of a word, and other white space divides words of the clean text only.
    """
    return all(
        [repair(word.decode(), rules)[0] for word in old.split()] == new.split()
        for old, new in zip(pair, text, strict=True)
    )


def find_repetitions(work: Preparation, task: int, new: Path, reason: str) -> PairsRecord:
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
    return PairsRecord()


def make_vocabulary(work: Preparation, task: int, new: Path) -> PairsRecord:
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
    return PairsRecord(starts=starts, read=starts[-1])


def check_some_left(work: Preparation, removals: Removals, read: int, kept: int) -> None:
    """Raise a DataError, which has the reasons, if no pair is kept."""
    if kept == 0:
        counts, described = removals.counts, work.options.cleaning.reasons(work.options.filters)
        reasons = "; ".join(f"{counts[name]}: {text}" for name, text in described.items() if counts[name])
        raise DataError(
            f"no training pair is left after cleaning of {read} ({reasons or 'the files are empty'}); check "
            "that the files are the right ones, or loosen the cleaning"
        )


def _train_vocabulary(work: Preparation, starts: Sequence[int]) -> Tokenizer:
    if work.options.separate_vocabularies:
        source, target = (_trained(work, (side,), starts) for side in SIDES)
        return SentencePieceTokenizer(target.model, target.segmented, source.model, work.options.symbols)
    return _trained(work, SIDES, starts)


def _trained(work: Preparation, sides: Sequence[Side], starts: Sequence[int]) -> SentencePieceTokenizer:
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


def _clean_lines(
    work: Preparation, side: Side, starts: Sequence[int] = (), chosen: Places | None = None
) -> Iterator[str]:
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


def encode(work: Preparation, task: int, new: Path) -> PairsRecord:
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
) -> PairsRecord:
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
    return PairsRecord(removals=removals, round_trips=round_trips, unlinked=unlinked)


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


@contextmanager
def replacing_data(out: Path) -> Iterator[None]:
    """Hold the right to replace a data directory; an error of the disk is a DataError."""
    try:
        with replacing(out, _is_whole):
            yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"--out {out} could not be written ({error.strerror or error}), and is as it was before; "
            f"{'free disk space, or ' if full else ''}choose another --out"
        ) from error


def staged_data(out: Path) -> AbstractContextManager[Path]:
    """Make a data directory that replaces ``out`` when the block ends."""
    return staged(out, partial(check_own, out, META_FILE, "--out", verify=False))


def _is_whole(out: Path) -> bool:
    try:
        DataDirectory.open(out)
    except DataError:
        return False
    return True


def join(work: Preparation, staging: Path) -> Meta:
    """Write a data directory, of the parts that the tasks have made, and return its record."""
    options, vocabulary, held_out = work.options, work.place("vocabulary", 0), work.directory / "held_out"
    for path in (*held_out.iterdir(), *vocabulary.glob("vocabulary.*")):
        shutil.copyfile(path, staging / path.name)
    indexed, cleaned, encoded = (work.records(stage) for stage in ("index", "clean", "encode"))
    removals, repaired = Removals(), Counter[str]()
    for record in (*cleaned, *encoded):
        removals.merge(record.removals)
        repaired.update(record.repaired)
    read = sum(record.read for record in cleaned)
    check_some_left(work, removals, read, read - removals.counts.total())
    for name in sorted(encoded[0].files):
        join_files([work.place("encode", task) / name for task in range(work.tasks)], staging / name)
    if unlinked := sum(record.unlinked for record in encoded):
        logger.warning(
            f"{unlinked:,} of {read - removals.counts.total():,} pairs lose their word alignments, because "
            "cleaning or the vocabulary divides their text into other words"
        )
    # Every line of valid is encoded, broken ones as well as possible: line numbers must stay those of the text.
    tokenizer, valid = open_tokenizer(vocabulary), (staging / "valid.source", staging / "valid.target")
    lines = sum(record.lines for record in work.inputs["valid.source"])
    encoder = PairEncoder(tokenizer, options.tags)
    of_valid = encode_split(valid, encoder, staging, "valid", lines)
    if options.text == "moses" and options.target_lang is not None:
        warn_of_missing_rules(options.target_lang, "--target-lang")
    if options.text_form.form == "raw":
        _warn_of_tokens(valid[1])

    unknown = (tokenizer.vocabulary.source.unk, tokenizer.vocabulary.unk)
    splits = [*map(split_name, range(options.segmentations)), "valid"]
    round_trips = {
        f"{split}.{side}": reduce(RoundTrip.followed_by, (record.round_trips[side] for record in records))
        for split, records in (("train", encoded), ("valid", [of_valid]))
        for side in SIDES
    }
    inputs = dict(work.inputs)
    for texts in (record.texts for record in indexed):
        inputs |= {name: (*inputs.get(name, ()), text.record) for name, text in texts.items()}
    reasons = options.cleaning.reasons(options.filters)
    meta = Meta(
        format=FORMAT,
        version=__version__,
        options=work.recorded,
        inputs={name: inputs[name] for name in options.inputs},
        segmented=tokenizer.segmented,
        text=options.text_form,
        tags=options.tags,
        vocabulary_size=tokenizer.size,
        source_vocabulary_size=tokenizer.vocabulary.source.size,
        pairs_read=read,
        removed={reason: removals.counts[reason] for reason in reasons},
        removed_examples={reason: tuple(removals.examples.get(reason, ())) for reason in reasons},
        repaired={rule: {side: repaired[f"{rule}.{side}"] for side in SIDES} for rule in options.unicode},
        splits={split: Corpus(staging, split).stats(unknown) for split in splits},
        round_trips=round_trips,
        files={path.name: FileRecord.of(path) for path in sorted(staging.iterdir()) if path.is_file()},
    )
    write_record(staging / META_FILE, f"{meta.model_dump_json(indent=2)}\n".encode())
    return meta


def _warn_of_tokens(path: Path) -> None:
    """Warn of raw text that looks tokenised."""
    with open_text(path) as text:
        lines = [line.rstrip() for line in text_lines(text)]
    if count := looks_tokenised(lines):
        logger.warning(
            f"{path.name}: {count:,} of {len(lines):,} lines end in ' .' and look tokenised, so BLEU would not be "
            "comparable; give --text moses and the languages, or --text tokenised"
        )
