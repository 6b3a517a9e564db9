"""Preparation of a data directory: clean, train the vocabulary, encode, record hashes.

Each input is read once, and hashed meanwhile. Worker processes clean and encode it in pieces. What a worker makes of
a piece depends on nothing else; duplicates, counts and places are decided by this process, in the order of the text.
So the result is the same for any number of workers. Memory holds the vocabulary's sample and 8 bytes for each pair,
12 if pairs have weights, but never the text. Files are written into a hidden directory beside the result, renamed at
the end.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from deepspeed_nmt import __version__
from deepspeed_nmt.console import counting, logger, progress
from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.bert_tokenizer import PREFIX, BertTokenizer
from deepspeed_nmt.data.clean import (
    CheckedPairs,
    CleaningConfig,
    PairChecker,
    PairCleaner,
    fits,
    read_lines,
)
from deepspeed_nmt.data.corpus import CorpusWriter, SplitStats, Tokens
from deepspeed_nmt.data.data_directory import FORMAT, META_FILE, DataDirectory, Meta, RoundTrip, open_tokenizer
from deepspeed_nmt.data.filters import Removals
from deepspeed_nmt.data.inputs import (
    PIECE_BYTES,
    STANDARD_INPUT,
    InputRecord,
    Paths,
    Piece,
    TextLayout,
    check_aligned,
    check_inputs,
    copy_text,
    inspect_inputs,
    lines_of,
    read_pieces,
)
from deepspeed_nmt.data.options import DEFAULT_VOCAB_SIZE, PrepareOptions, input_option
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.tokenizer import SampledSegmentations, Tokenizer, TokenLists, split_name
from deepspeed_nmt.data.vocabulary_training import (
    DEFAULT_NORMALIZATION,
    adopt_models,
    train_subwords,
    train_words,
    type_of,
)
from deepspeed_nmt.data.word_alignments import token_links, tokens_of_words
from deepspeed_nmt.errors import DataError, shown_bytes
from deepspeed_nmt.files import replacing, resolved, staged
from deepspeed_nmt.manifest import FileRecord, check_own, write_record
from deepspeed_nmt.text import NO_TAGS, Tags, looks_tokenised, normalise_whitespace, warn_of_missing_rules

SAMPLE_PAIRS = 1_000_000
"""Pairs that a BPE vocabulary is trained on if there are more: two million lines."""
SAMPLE_LINES = 10_000
"""Lines of each side of a split that are encoded and decoded to see if they change."""
ALONE_BYTES = 1 << 23
"""Bytes of pieces that this process works on itself before it starts workers, which take half a second to import."""
_AHEAD = 2
"""Pieces in work or waiting, or results waiting, for each worker: the bound on memory."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")
R = TypeVar("R")
Weights = npt.NDArray[np.float32]
EncodedPairs = dict[Side, TokenLists]
"""Tokens of several pairs by side, without EOS."""

_work: Callable[[Any], Any] | None = None


def prepare(options: PrepareOptions) -> Meta:
    """Make a data directory, unless the same one exists already. A failed call leaves nothing behind.

    Raises:
        DataError: if files are missing or not aligned, no pairs are left after cleaning, the vocabulary does not fit
            the text or the options, another directory is in the way, or the disk is full.
    """
    out = resolved(options.out)  # renaming onto a link would replace the link
    if options.overwrite or not (out / META_FILE).is_file():
        check_own(out, META_FILE, "--out")
    check_inputs({input_option(name): paths for name, paths in options.inputs.items()})
    paths = (path for paths in options.inputs.values() for path in paths if path != STANDARD_INPUT)
    if inside := [path for path in paths if resolved(path).is_relative_to(out)]:
        raise DataError(f"--out {out} holds the text {inside[0]}, which would be replaced; choose another --out")
    vocabulary = _existing_vocabulary(options)
    models = None if vocabulary is None else vocabulary.sentencepiece_models()
    sampling = options.sampling(options.vocabulary_type or ("bpe" if models is None else type_of(models[1])))
    if vocabulary is not None:
        PairEncoder(vocabulary, options.tags, sampling).check()
    try:
        with replacing(out, _is_whole):
            if (out / META_FILE).exists() and not options.overwrite:  # another process may have made it
                return _same_or_refuse(out, options.recorded(vocabulary, sampling), inspect_inputs(options.inputs))
            with staged(out, partial(check_own, out, META_FILE, "--out", verify=False)) as staging:
                return _fill(staging, options, vocabulary, sampling)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"--out {out} could not be written ({error.strerror or error}), and is as it was before; "
            f"{'free disk space, or ' if full else ''}choose another --out"
        ) from error


def _is_whole(out: Path) -> bool:
    try:
        DataDirectory.open(out)
    except DataError:
        return False
    return True


def _fill(
    staging: Path, options: PrepareOptions, existing: Tokenizer | None, sampling: SampledSegmentations | None
) -> Meta:
    _check_room(staging, options)
    inputs = _copy_held_out(staging, options)

    cleaner = PairCleaner(PairChecker(options.cleaning, options.segmented, options.pair_filters(), options.unicode))
    records: dict[str, list[InputRecord]] = {}
    names = ("source", "target", *(["links"] if options.train_alignments else []))
    files = tuple(staging / f"clean.{name}" for name in names)
    pieces = read_pieces(options.training_sets, records)
    weights = clean_text(pieces, options.layout, cleaner, files, options.workers)
    inputs |= {name: tuple(of_name) for name, of_name in records.items()}
    _check_some_left(cleaner)

    tokenizer = existing or _train_vocabulary(options, files[:2], cleaner.kept)
    tokenizer.save(staging)
    encoder = PairEncoder(tokenizer, options.tags, sampling)
    encoded = encode_split(files, cleaner.kept, encoder, staging, "train", options.workers, cleaner, weights)
    _check_some_left(cleaner)
    for path in files:
        path.unlink()
    # Every line of valid is encoded, broken ones as well as possible: line numbers must stay those of the text.
    lines = sum(record.lines for record in inputs["valid.source"])
    valid = (staging / "valid.source", staging / "valid.target")
    encoded |= encode_split(valid, lines, PairEncoder(tokenizer, options.tags), staging, "valid", options.workers)

    if options.text == "moses" and options.target_lang is not None:
        warn_of_missing_rules(options.target_lang, "--target-lang")
    if options.text_form.form == "raw":
        _warn_of_tokens(valid[1])

    written = {path.name: FileRecord.of(path) for path in sorted(staging.iterdir())}
    removals = cleaner.removals
    meta = Meta(
        format=FORMAT,
        version=__version__,
        options=options.recorded(existing, sampling),
        inputs={name: inputs[name] for name in options.inputs},
        segmented=tokenizer.segmented,
        text=options.text_form,
        tags=options.tags,
        vocabulary_size=tokenizer.size,
        source_vocabulary_size=tokenizer.vocabulary.source.size,
        pairs_read=cleaner.read,
        removed={reason: removals.counts[reason] for reason in cleaner.reasons},
        removed_examples={reason: tuple(removals.examples.get(reason, ())) for reason in cleaner.reasons},
        repaired={rule: {side: cleaner.repaired[rule, side] for side in SIDES} for rule in options.unicode},
        splits={split: stats for split, (stats, _) in encoded.items()},
        round_trips={
            f"{split}.{side}": trip for split, (_, trips) in encoded.items() for side, trip in trips.items()
        },
        files=written,
    )
    write_record(staging / META_FILE, f"{meta.model_dump_json(indent=2)}\n".encode())
    return meta


def _copy_held_out(staging: Path, options: PrepareOptions) -> dict[str, tuple[InputRecord, ...]]:
    """Copy the text of validation and test set, and return records of its files."""
    records: dict[str, tuple[InputRecord, ...]] = {}
    pairs: list[list[tuple[str, int]]] = []
    for split in ("valid", "test") if options.test_source else ("valid",):
        for side, paths in zip(SIDES, options.paths(split), strict=True):
            records[f"{split}.{side}"] = copy_text(paths, staging / f"{split}.{side}")
        files = zip(*(records[f"{split}.{side}"] for side in SIDES), strict=True)
        pairs += [[(record.path, record.lines) for record in pair] for pair in files]
    check_aligned(pairs)
    for side, paths in zip(SIDES, options.paths("valid"), strict=True):
        with (staging / f"valid.{side}").open("rb") as text:
            if not any(map(bytes.strip, text)):
                raise DataError(
                    f"no sentence in the validation set {', '.join(map(str, paths))}; hold out some hundreds of "
                    "sentence pairs of the training text"
                )
    return records


def _warn_of_tokens(path: Path) -> None:
    """Warn of raw text that looks tokenised."""
    lines = [line.decode("utf-8", errors="replace").rstrip() for line in read_lines((path,))]
    if count := looks_tokenised(lines):
        logger.warning(
            f"{path.name}: {count:,} of {len(lines):,} lines end in ' .' and look tokenised, so BLEU would not be "
            "comparable; give --text moses and the languages, or --text tokenised"
        )


def _check_room(directory: Path, options: PrepareOptions) -> None:
    """Check that the disk has room for the clean text, as if nothing were removed. Pipes do not count."""
    paths = [path for name, paths in options.inputs.items() if name.startswith("train.") for path in paths]
    needed = sum(path.stat().st_size for path in paths if path.is_file())
    if needed > (free := shutil.disk_usage(directory).free):
        raise DataError(
            f"the disk of --out has {shown_bytes(free)} free, but the training text has {shown_bytes(needed)}; free "
            "disk space, or choose another --out"
        )


def _train_vocabulary(options: PrepareOptions, files: Paths, pairs: int) -> Tokenizer:
    if options.separate_vocabularies:
        source, target = (_trained(options, (path,), pairs) for path in files)
        return SentencePieceTokenizer(target.model, target.segmented, source.model, options.symbols)
    return _trained(options, files, pairs)


def _trained(options: PrepareOptions, files: Paths, pairs: int) -> SentencePieceTokenizer:
    """Train one vocabulary on the clean text in ``files``, or on a sample of it."""
    if options.segmented:
        total = len(files) * pairs
        lines = (line.decode() for line in progress(read_lines(files), "vocabulary", "lines", total=total))
        return train_words(lines, options.vocab_size, options.symbols)
    chosen = np.ones(pairs, dtype=np.bool_)
    if pairs > SAMPLE_PAIRS:
        chosen[:] = False
        chosen[np.random.default_rng(options.seed).choice(pairs, SAMPLE_PAIRS, replace=False, shuffle=False)] = True
    size = options.vocab_size or DEFAULT_VOCAB_SIZE
    logger.info("vocabulary: training %s tokens on %s pairs", f"{size:,}", f"{int(chosen.sum()):,}")
    return train_subwords(
        (line.decode() for path in files for line in compress(read_lines((path,)), chosen)),
        size,
        options.character_coverage,
        options.normalization or DEFAULT_NORMALIZATION,
        options.vocabulary_type or "bpe",
        options.byte_fallback,
        options.symbols,
    )


def _check_some_left(cleaner: PairCleaner) -> None:
    if cleaner.kept == 0:
        counts = cleaner.removals.counts
        reasons = "; ".join(f"{counts[name]}: {text}" for name, text in cleaner.reasons.items() if counts[name])
        raise DataError(
            f"no training pair is left after cleaning of {cleaner.read} ({reasons or 'the files are empty'}); check "
            "that the files are the right ones, or loosen the cleaning"
        )


def _existing_vocabulary(options: PrepareOptions) -> Tokenizer | None:
    if options.tokenizer is not None:
        return BertTokenizer.from_berts(options.tokenizer.removeprefix(PREFIX))
    if options.sentencepiece:
        return adopt_models(options.sentencepiece, options.symbols)
    if options.vocab_from is None:
        return None
    tokenizer = open_tokenizer(options.vocab_from)
    if tokenizer.segmented != options.segmented:
        kind = "segmented" if tokenizer.segmented else "raw"
        raise DataError(
            f"the vocabulary of {options.vocab_from} is for {kind} text; take another, or "
            f"{'leave out' if options.segmented else 'add'} --segmented and give {kind} text"
        )
    if options.vocab_size not in (None, tokenizer.size):
        raise DataError(
            f"--vocab-size is {options.vocab_size}, but the vocabulary of {options.vocab_from} has {tokenizer.size} "
            "tokens; leave it out"
        )
    return tokenizer


def _same_or_refuse(out: Path, recorded: dict[str, Any], inputs: dict[str, tuple[InputRecord, ...]]) -> Meta:
    """Open an existing data directory if it was made from the same text with the same options; refuse others."""
    directory = DataDirectory.open(out)
    meta = directory.meta
    differing = [name for name in sorted({*recorded, *meta.options}) if recorded.get(name) != meta.options.get(name)]
    for name in sorted({*inputs, *meta.inputs}):
        new, old = (tuple(record.sha256 for record in records.get(name, ())) for records in (inputs, meta.inputs))
        if new != old:
            differing.append(f"{name} text")
    if differing:
        raise DataError(
            f"--out {out} holds data that differs in {', '.join(differing)}; give --overwrite to replace it, or "
            "choose another --out"
        )
    directory.verify_hashes()
    logger.info("%s is already prepared from the same text with the same options: nothing to do", out)
    return meta


class _Checked(NamedTuple):
    """Pairs of a piece whose text is acceptable, duplicates included.

    ``pairs`` lacks the texts, since few long strings, ``sides``, are quickly handed to another process; these are
    followed by the links of words, if there are any.
    """

    pairs: CheckedPairs
    sides: tuple[bytes, ...]
    weights: Weights | None

    def text(self, number: int) -> tuple[str, str]:
        source, target = (side.split(b"\n", number + 1)[number].decode() for side in self.sides[:2])
        return source, target


def _check(checker: PairChecker, layout: TextLayout, piece: Piece) -> _Checked:
    pairs, weights, scores, links = layout.pairs(piece)
    checked = checker.check(pairs, scores)
    sides = ["".join(f"{text[side]}\n" for text in checked.texts).encode() for side in (0, 1)]
    if links is not None:
        rules = checker.unicode_rules  # they may leave nothing of a word, so that later ones have other numbers
        own = (
            links[place] if not rules or _have_same_words(pairs[place], text) else b""
            for place, text in zip(checked.places, checked.texts, strict=True)
        )
        sides.append(b"".join(line + b"\n" for line in own))
    weights = None if weights is None else weights[checked.places]
    return _Checked(checked._replace(texts=[]), tuple(sides), weights)


def _have_same_words(pair: tuple[bytes, bytes], text: tuple[str, str]) -> bool:
    return all(len(old.decode().split()) == len(new.split()) for old, new in zip(pair, text, strict=True))


def clean_text(
    pieces: Iterable[Piece],
    layout: TextLayout,
    cleaner: PairCleaner,
    files: Paths,
    workers: int,
) -> Weights | None:
    """Write the clean pairs of the training text, and links if there are any, to files, one line a pair.

    Returns their weights, if any.

    ``cleaner`` receives the counts, and decides on duplicates.
    """
    work = partial(_check, cleaner.checker, layout)
    weights: list[Weights] = []
    with (
        ExitStack() as stack,
        closing(ordered_map(work, pieces, workers, lambda piece: sum(map(len, piece.columns)))) as checked_pieces,
        counting("cleaning", "pairs") as advance,
    ):
        opened = [stack.enter_context(file.open("wb")) for file in files]
        for checked in checked_pieces:
            keep = cleaner.accept(checked.pairs, checked.text)
            for file, text in zip(opened, checked.sides, strict=True):
                file.write(
                    text if keep.all() else b"".join(compress((line + b"\n" for line in text.split(b"\n")), keep))
                )
            if checked.weights is not None:
                weights.append(checked.weights[keep])
            advance(checked.pairs.read)
    return np.concatenate(weights) if weights else None


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

    def check(self) -> None:
        """Raise a DataError if the vocabularies lack a tag, or several segmentations if they are to be drawn."""
        self.encode([])

    def encode(self, pairs: Sequence[tuple[str, str]], first: int = 0) -> list[EncodedPairs]:
        """Encode successive pairs (source, target), in each segmentation.

        ``first`` is the number of the first pair in the clean text, from 0, on which sampled segmentations depend.
        """
        texts = {side: [pair[place] for pair in pairs] for place, side in enumerate(SIDES)}
        return [
            {side: self._encoded(texts[side], side, number, first) for side in SIDES}
            for number in range(self.segmentations)
        ]

    def texts(self, texts: Iterable[str], side: Side) -> Iterable[str]:
        """Return lines of one side as encoding and decoding should keep them: with the tag in front."""
        tag = self.tags.of(side)
        return texts if tag is None else (f"{tag} {text}" if text else text for text in texts)

    def _encoded(self, texts: Sequence[str], side: Side, number: int, first: int) -> TokenLists:
        if self.sampling is None:
            sentences = self.tokenizer.encode_batch(texts, side)
        else:
            sentences = self.tokenizer.sample_batch(texts, side, self.sampling, number, first)
        if (tag := self.tags.of(side)) is None:
            return sentences
        symbol = self.tokenizer.symbol(side, tag)
        return [[symbol, *tokens] if tokens else tokens for tokens in sentences]


class _Encoded(NamedTuple):
    """Encoded pairs of a piece; sentences are those of pairs that fit, ``keep`` of shape (N,) says which.

    The links of tokens follow source and target, if there are any; ``unlinked`` pairs lost theirs.
    """

    segmentations: list[tuple[Tokens, ...]]
    unlinked: int
    keep: npt.NDArray[np.bool_]
    removals: Removals
    round_trips: dict[Side, RoundTrip]


@dataclass(frozen=True)
class _Encoding:
    """The encoding of a piece by a worker, which opens the vocabulary for itself.

    ``cleaning`` has the lengths to keep; None keeps all pairs, and reads any bytes as text. One of ``every`` so many
    lines is decoded again.
    """

    vocabulary: Path
    tags: Tags
    sampling: SampledSegmentations | None
    cleaning: CleaningConfig | None
    every: int

    @cached_property
    def _encoder(self) -> PairEncoder:
        return PairEncoder(open_tokenizer(self.vocabulary), self.tags, self.sampling)

    def __call__(self, piece: tuple[int, list[bytes]]) -> _Encoded:
        """Encode pairs: the place of the first, and the lines of both sides, and of links if there are any."""
        encoder, tokenizer, first = self._encoder, self._encoder.tokenizer, piece[0]
        sides, links = [lines_of(text) for text in piece[1][:2]], [lines_of(text) for text in piece[1][2:]]
        texts = [[line.decode(errors="replace") for line in side] for side in sides]
        if self.cleaning is None:
            texts = [[normalise_whitespace(line, tokenizer.segmented) for line in side] for side in texts]
        pairs = list(zip(*texts, strict=True))
        encoded = encoder.encode(pairs, first)
        keep: npt.NDArray[np.bool_] = np.ones(len(pairs), np.bool_)
        removals = Removals()
        if self.cleaning is not None:  # a sentence must fit in all its segmentations
            lengths = np.array([[list(map(len, tokens[side])) for side in SIDES] for tokens in encoded], np.int64)
            keep = fits(self.cleaning, lengths.max(axis=0), removals, pairs)
        kept = [{side: list(compress(tokens[side], keep)) for side in SIDES} for tokens in encoded]
        places, size = (first + np.flatnonzero(keep)).tolist(), vocabulary_size(tokenizer)
        round_trips = {
            side: self._round_trip(side, places, encoder.texts(compress(text, keep), side), kept[0][side])
            for side, text in zip(SIDES, texts, strict=True)
        }
        segmentations: list[tuple[Tokens, ...]] = [tuple(Tokens.of(of[side], size) for side in SIDES) for of in kept]
        unlinked = 0
        for lines in links:
            lines, own = list(compress(lines, keep)), list(compress(pairs, keep))
            linked = [self._linked(lines, own, of) for of in kept]
            unlinked = sum(bool(line) and not of for line, of in zip(lines, linked[0], strict=True))
            of_tokens = (Tokens.of(of, self.positions) for of in linked)
            segmentations = [(*sides_of, of) for sides_of, of in zip(segmentations, of_tokens, strict=True)]
        return _Encoded(segmentations, unlinked, keep, removals, round_trips)

    @property
    def positions(self) -> int:
        """Bound on the positions of tokens."""
        return 0 if self.cleaning is None else self.cleaning.max_length + 2

    def _linked(self, lines: list[bytes], pairs: list[tuple[str, str]], encoded: EncodedPairs) -> TokenLists:
        """Return the links of the tokens of pairs, from those of their words on ``lines``."""
        source, target = (
            [
                tokens_of_words(tokens, pair[place], self._encoder.tokenizer, side, self.tags.of(side) is not None)
                for tokens, pair in zip(encoded[side], pairs, strict=True)
            ]
            for place, side in enumerate(SIDES)
        )
        return [
            [] if of_source is None or of_target is None else token_links(line, of_source, of_target)
            for line, of_source, of_target in zip(lines, source, target, strict=True)
        ]

    def _round_trip(self, side: Side, places: list[int], texts: Iterable[str], encoded: TokenLists) -> RoundTrip:
        """Compare some lines with what their tokens decode to."""
        tokenizer, changed, lines = self._encoder.tokenizer, [], 0
        for place, text, tokens in zip(places, texts, encoded, strict=True):
            if (place + 1) % self.every:
                continue
            # Decoding joins segmented text, which loses nothing.
            original = tokenizer.reference(text) if tokenizer.segmented else text
            decoded = tokenizer.decode(tokens, side)
            lines += 1
            if normalise_whitespace(decoded) != normalise_whitespace(original):
                changed.append((original, decoded))
        return RoundTrip.of(lines, changed)


def _pieces_of(files: Paths) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the place of the first pair, and the lines of each file, of pieces of aligned files."""
    first = 0
    with ExitStack() as stack:
        source, *others = (stack.enter_context(file.open("rb")) for file in files)
        while lines := source.readlines(PIECE_BYTES):
            yield first, [b"".join(lines), *(b"".join(file.readline() for _ in lines) for file in others)]
            first += len(lines)


def encode_split(
    files: Paths,
    pairs: int,
    encoder: PairEncoder,
    directory: Path,
    split: str,
    workers: int,
    cleaner: PairCleaner | None = None,
    weights: Weights | None = None,
) -> dict[str, tuple[SplitStats, dict[Side, RoundTrip]]]:
    """Write the tokens of a split, in all its segmentations, into a directory that has the files of the vocabulary.

    ``files`` are of source and target, and of links if there are any. Without a ``cleaner`` all pairs are kept, and
    any bytes are read as text.

    Returns:
        For each segmentation its statistics, and lines that encoding and decoding changes (of the first one).
    """
    vocabulary, size = encoder.tokenizer.vocabulary, vocabulary_size(encoder.tokenizer)
    names = [split, *map(split_name, range(1, encoder.segmentations))]
    cleaning = None if cleaner is None else cleaner.checker.config
    work = _Encoding(directory, encoder.tags, encoder.sampling, cleaning, max(1, -(-pairs // SAMPLE_LINES)))
    round_trips: dict[Side, RoundTrip] = {side: RoundTrip() for side in SIDES}
    unknown, done = (vocabulary.source.unk, vocabulary.unk), 0
    pieces = ordered_map(work, _pieces_of(files), workers, lambda piece: sum(map(len, piece[1])))
    positions = work.positions if len(files) > 2 else None
    unlinked = 0
    with (
        ExitStack() as opened,
        closing(pieces) as encoded_pieces,
        counting("encoding", "pairs", pairs) if split == "train" else nullcontext(lambda _: None) as advance,
    ):
        writers = [
            opened.enter_context(
                CorpusWriter(directory, name, size, unknown, weights is not None and name == split, positions)
            )
            for name in names
        ]
        for encoded in encoded_pieces:
            count = len(encoded.keep)
            if cleaner is not None:
                cleaner.removals.merge(encoded.removals)
            own = None if weights is None else weights[done : done + count][encoded.keep]
            for name, writer, tokens in zip(names, writers, encoded.segmentations, strict=True):
                writer.append_tokens(tokens[0], tokens[1], own if name == split else None, *tokens[2:])
            unlinked += encoded.unlinked
            round_trips = {side: trip.followed_by(encoded.round_trips[side]) for side, trip in round_trips.items()}
            done += count
            advance(count)
        if unlinked:
            logger.warning(
                f"{unlinked:,} of {writers[0].stats.pairs:,} pairs lose their word alignments, because "
                "the vocabulary divides their text into other words"
            )
        return {
            name: (writer.stats, round_trips if name == split else {})
            for name, writer in zip(names, writers, strict=True)
        }


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the number of tokens of the larger vocabulary, which decides the bytes of a token."""
    return max(tokenizer.vocabulary.size, tokenizer.vocabulary.source.size)


def ordered_map(
    work: Callable[[T], R], pieces: Iterable[T], workers: int, size_of: Callable[[T], int]
) -> Generator[R, None, None]:
    """Yield ``work(piece)`` for each piece, in the order of the pieces. Workers live until the generator is closed.

    ``work`` depends on the piece only, and can be pickled. Pieces, of ``size_of`` bytes, are read as they are needed.
    One worker works in this process, as do few pieces.

    Raises:
        DataError: if a worker ends before its work.
    """
    iterator = iter(pieces)
    done = 0
    for piece in iterator:
        if workers > 1 and done + size_of(piece) > ALONE_BYTES:
            iterator = chain([piece], iterator)
            break
        done += size_of(piece)
        yield work(piece)
    else:
        return
    context = multiprocessing.get_context("spawn")  # a forked process could not use threads that its parent has
    with _signals_blocked():  # the process that cleans up after semaphores starts here, and must outlive SIGHUP
        pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(work,))
    waiting: deque[Future[R]] = deque()
    try:
        for piece in iterator:
            with _signals_blocked():
                waiting.append(pool.submit(_run, piece))
            if len(waiting) > _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker of `prepare` was killed, probably out of memory; start again, with fewer --workers if so"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals during the block, and for good in processes that start in it: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(work: Callable[[Any], Any]) -> None:
    """Prepare a new worker, which ends when its parent has ended, however it has."""
    global _work
    _work = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library of BERTs' tokenizers would start threads
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _run(piece: Any) -> Any:
    assert _work is not None
    return _work(piece)
