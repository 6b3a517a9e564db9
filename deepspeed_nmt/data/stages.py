"""The two stages of `prepare` that worker processes share: cleaning of text and encoding of clean text.

What a worker computes of a piece depends on nothing else. What depends on all pairs before (duplicates, counts,
places in the files) is decided by this process, in the order of the text. So the result is the same for any number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing, nullcontext
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepspeed_nmt.console import counting
from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.clean import CheckedPairs, CleaningConfig, PairChecker, PairCleaner, normalise_whitespace
from deepspeed_nmt.data.corpus import CorpusWriter, SplitStats, Tokens
from deepspeed_nmt.data.directory import open_tokenizer
from deepspeed_nmt.data.encoding import PairEncoder, longest
from deepspeed_nmt.data.reading import PIECE_BYTES, Piece, TextLayout
from deepspeed_nmt.data.removals import Removals
from deepspeed_nmt.data.round_trip import RoundTrip, RoundTrips
from deepspeed_nmt.data.segmentation import split_name
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.data.worker_pool import ordered_map

Weights = npt.NDArray[np.float32]


class Span(NamedTuple):
    """A piece of text in two aligned files, one line a pair.

    Attributes:
        first: place of the first pair, from 0.
        pairs: number of pairs.
        source: bytes of the source's file: first, and end.
        target: bytes of the target's file.
        weights: weights of the pairs, if they have any. Shape: (pairs,)
    """

    first: int
    pairs: int
    source: tuple[int, int]
    target: tuple[int, int]
    weights: Weights | None = None

    @property
    def size(self) -> int:
        """Bytes of text on both sides."""
        return self.source[1] - self.source[0] + self.target[1] - self.target[0]


class PairFiles(NamedTuple):
    """Text of both sides in aligned files, one line a pair, and its pieces in order."""

    source: Path
    target: Path
    spans: list[Span]

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return sum(span.pairs for span in self.spans)

    def read(self, span: Span) -> list[list[bytes]]:
        """Return the lines of a piece without line feeds. Shape: -> (2, pairs)."""
        sides = []
        for path, (start, end) in ((self.source, span.source), (self.target, span.target)):
            with path.open("rb") as file:
                file.seek(start)
                sides.append(file.read(end - start).split(b"\n")[: span.pairs])
        return sides

    @classmethod
    def of(cls, source: Path, target: Path) -> PairFiles:
        """Divide two aligned files into pieces."""
        spans: list[Span] = []
        first = place = other_place = 0
        with source.open("rb") as file, target.open("rb") as other:
            while lines := file.readlines(PIECE_BYTES):
                end = place + sum(map(len, lines))
                other_end = other_place + sum(len(other.readline()) for _ in lines)
                spans.append(Span(first, len(lines), (place, end), (other_place, other_end)))
                first, place, other_place = first + len(lines), end, other_end
        return cls(source, target, spans)


class _Checked(NamedTuple):
    """Pairs of a piece whose text is acceptable, duplicates included.

    Attributes:
        pairs: counts and hashes; without the texts, since few long strings are quickly handed to another process.
        source: the sources, with line feeds.
        target: the targets, with line feeds.
        weights: weights of the pairs, if they have any. Shape: (N,)
    """

    pairs: CheckedPairs
    source: bytes
    target: bytes
    weights: Weights | None

    def text(self, number: int) -> tuple[str, str]:
        """Return one of the pairs."""
        source, target = (side.split(b"\n", number + 1)[number].decode() for side in (self.source, self.target))
        return source, target


class _Checking:
    """The work of the first stage on a piece.

    Args:
        checker: the checks.
        layout: places of the pairs in a piece.
    """

    def __init__(self, checker: PairChecker, layout: TextLayout) -> None:
        self._checker, self._layout = checker, layout

    def __call__(self, piece: Piece) -> _Checked:
        """Check the pairs of a piece."""
        pairs, weights, scores = self._layout.pairs(piece)
        checked = self._checker.check(pairs, scores)
        source, target = ("".join(f"{text[side]}\n" for text in checked.texts).encode() for side in (0, 1))
        weights = None if weights is None else weights[checked.places]
        return _Checked(checked._replace(texts=[]), source, target, weights)


def clean_text(
    pieces: Iterable[Piece],
    layout: TextLayout,
    cleaner: PairCleaner,
    files: tuple[Path, Path],
    workers: int,
    total: int | None,
) -> PairFiles:
    """Write the clean pairs of the training text to two files.

    Args:
        pieces: the text.
        layout: places of the pairs in a piece.
        cleaner: receives the counts, and decides on duplicates.
        files: paths of the clean text of both sides.
        workers: number of processes.
        total: estimate of the number of pairs, to show the progress; None if there is none.

    Raises:
        DataError: if the text cannot be read.
    """
    work = _Checking(cleaner.checker, layout)
    spans: list[Span] = []
    kept = 0
    with (
        files[0].open("wb") as source,
        files[1].open("wb") as target,
        closing(ordered_map(work, pieces, workers, lambda piece: sum(map(len, piece.columns)))) as checked_pieces,
        counting("cleaning", "pairs", total) as advance,
    ):
        for checked in checked_pieces:
            new = cleaner.accept(checked.pairs, checked.text)
            pairs = int(new.sum())
            starts = source.tell(), target.tell()
            source.write(_chosen(checked.source, new))
            target.write(_chosen(checked.target, new))
            if pairs:
                ends = source.tell(), target.tell()
                weights = None if checked.weights is None else checked.weights[new]
                spans.append(Span(kept, pairs, (starts[0], ends[0]), (starts[1], ends[1]), weights))
            kept += pairs
            advance(checked.pairs.read)
    return PairFiles(*files, spans)


def _chosen(text: bytes, keep: npt.NDArray[np.bool_]) -> bytes:
    """Return the lines to keep of a text."""
    return text if keep.all() else b"".join(compress((line + b"\n" for line in text.split(b"\n")), keep))


class _Encoded(NamedTuple):
    """Encoded pairs of a piece.

    Attributes:
        segmentations: tokens of the sources and of the targets of pairs that fit, in each segmentation.
        keep: True for pairs of the piece that fit. Shape: (N,)
        removals: others, by reason.
        round_trips: lines that encoding and decoding changes, by side.
    """

    segmentations: list[tuple[Tokens, Tokens]]
    keep: npt.NDArray[np.bool_]
    removals: Removals
    round_trips: dict[Side, RoundTrip]


class _Encoding:
    """The work of the second stage on a piece. A worker opens the vocabulary for itself.

    Args:
        vocabulary: directory of the vocabulary.
        files: the text.
        encoder: tags and segmentations of the pairs.
        cleaning: lengths to keep; None keeps all pairs.
    """

    def __init__(
        self, vocabulary: Path, files: PairFiles, encoder: PairEncoder, cleaning: CleaningConfig | None
    ) -> None:
        self._vocabulary, self._cleaning = vocabulary, cleaning
        self._tags, self._sampling = encoder.tags, encoder.sampling
        self._files, self._pairs = PairFiles(files.source, files.target, []), files.pairs

    @cached_property
    def _encoder(self) -> PairEncoder:
        return PairEncoder(open_tokenizer(self._vocabulary), self._tags, self._sampling)

    def __call__(self, span: Span) -> _Encoded:
        """Encode the pairs of a piece."""
        encoder, tokenizer = self._encoder, self._encoder.tokenizer
        lines = self._files.read(span)
        if self._cleaning is None:  # broken lines as well as possible: line numbers must stay those of the text
            texts = [[_lenient(line, tokenizer.segmented) for line in side] for side in lines]
        else:
            texts = [[line.decode() for line in side] for side in lines]
        found = encoder.encode(list(zip(*texts, strict=True)), span.first)
        keep: npt.NDArray[np.bool_] = np.ones(span.pairs, np.bool_)
        removals = Removals()
        if self._cleaning is not None:
            cleaner = PairCleaner(self._cleaning, tokenizer.segmented)
            keep = cleaner.fits(longest(found, "source"), longest(found, "target"), list(zip(*texts, strict=True)))
            removals = cleaner.removals
        places = (span.first + np.flatnonzero(keep)).tolist()
        texts = [list(compress(side, keep)) for side in texts]
        kept = [{side: list(compress(each[side], keep)) for side in SIDES} for each in found]
        size = vocabulary_size(tokenizer)
        tried = {
            side: RoundTrips(tokenizer, side, self._pairs).check(places, encoder.texts(text, side), kept[0][side])
            for side, text in zip(SIDES, texts, strict=True)
        }
        segmentations = [(Tokens.of(each["source"], size), Tokens.of(each["target"], size)) for each in kept]
        return _Encoded(segmentations, keep, removals, tried)


def encode_split(
    files: PairFiles,
    encoder: PairEncoder,
    directory: Path,
    split: str,
    workers: int,
    cleaner: PairCleaner | None = None,
    weighted: bool = False,
) -> dict[str, tuple[SplitStats, dict[Side, RoundTrip]]]:
    """Write the tokens of a split, in all its segmentations.

    Args:
        files: its text.
        encoder: the vocabulary, tags and segmentations.
        directory: which has the files of the vocabulary, and receives those of the split.
        split: ``train`` or ``valid``.
        workers: number of processes.
        cleaner: lengths to keep; receives the counts of others. None keeps all pairs, and reads any bytes as text.
        weighted: True if the pairs have weights.

    Returns:
        Statistics of the split and of its other segmentations, and lines that encoding and decoding changes, of the
        first segmentation.
    """
    vocabulary, size = encoder.tokenizer.vocabulary, vocabulary_size(encoder.tokenizer)
    names = [split] if encoder.sampling is None else [split_name(number) for number in range(encoder.sampling.count)]
    work = _Encoding(directory, files, encoder, None if cleaner is None else cleaner.config)
    tried: dict[Side, RoundTrip] = {side: RoundTrip() for side in SIDES}
    unknown = (vocabulary.source.unk, vocabulary.unk)
    spans = [span._replace(weights=None) for span in files.spans]  # workers do not need them
    with (
        ExitStack() as opened,
        closing(ordered_map(work, spans, workers, lambda span: span.size)) as encoded_pieces,
        counting("encoding", "pairs", files.pairs) if split == "train" else nullcontext(_ignore) as advance,
    ):
        writers = [
            opened.enter_context(CorpusWriter(directory, name, size, unknown, weighted and name == split))
            for name in names
        ]
        for span, encoded in zip(files.spans, encoded_pieces, strict=True):
            if cleaner is not None:
                cleaner.removals.merge(encoded.removals)
            weights = None if span.weights is None else span.weights[encoded.keep]
            for name, writer, each in zip(names, writers, encoded.segmentations, strict=True):
                writer.append_tokens(*each, weights if name == split else None)
            tried = {side: each.followed_by(encoded.round_trips[side]) for side, each in tried.items()}
            advance(span.pairs)
        stats = [writer.stats for writer in writers]
    others: dict[str, tuple[SplitStats, dict[Side, RoundTrip]]] = {
        name: (each, {}) for name, each in zip(names[1:], stats[1:], strict=True)
    }
    return {split: (stats[0], tried), **others}


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the number of tokens of the larger vocabulary, which decides the bytes of a token."""
    return max(tokenizer.vocabulary.size, tokenizer.vocabulary.source.size)


def _ignore(count: int) -> None:
    """Show no progress."""


def _lenient(line: bytes, segmented: bool) -> str:
    return normalise_whitespace(line.decode("utf-8", errors="replace"), segmented)
