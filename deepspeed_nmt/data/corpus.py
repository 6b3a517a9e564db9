"""Token numbers of sentence pairs in memory-mapped files.

Opening them is instant, whatever their size, and processes share the pages. Offsets are checked as they are read. A
split (``train``, ``valid``) has raw little-endian files:

- ``<split>.<side>.<uint16|int32>.bin``: tokens of all sentences, one after another, without BOS and EOS;
- ``<split>.<side>.offsets.bin``: int64, the first token of each sentence, and finally the end of the last sentence;
- ``<split>.weights.bin``, if it has weights: float32, the factor of each pair's loss;
- ``<split>.links.<uint16|int32>.bin`` and ``<split>.links.offsets.bin``, if it has word alignments: source and target
  position of each link of tokens, in turn, in the form of the tokens' files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from mmap import ACCESS_READ, MADV_RANDOM, PAGESIZE, mmap
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt import randomness
from deepspeed_nmt.data.tokenizer import Count
from deepspeed_nmt.errors import DataError, listed
from deepspeed_nmt.registry import Config

Reading = Literal["lengths", "pairs"]
"""A window's lengths, which are many, or the pairs of updates, which do not wait for these."""
Lengths = NDArray[np.int32]
Indices = NDArray[np.int64]

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "int32": np.dtype("<i4")}
_OFFSET = np.dtype("<i8")
_WEIGHT = np.dtype("<f4")
_NAMED_PAIRS = 8
"""Pairs that a message names at most."""
_COPIED_BYTES = 1 << 20
_CHUNK = 1 << 20
"""Pairs that are counted at once."""
_LARGE_BYTES = 1 << 30
"""Size of a file from which on only pages that are needed are read, by threads. The kernel soon has all of others."""
_THREADS = 32
"""Threads that wait for pages which are not in memory."""


@cache
def _threads(what: Reading) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, f"read {what}")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has none of the threads


class SideStats(Config):
    """Statistics of one side of a split, in tokens without BOS and EOS."""

    tokens: Count
    unknown: Count
    longest: Count


class SplitStats(Config):
    """Statistics of a split."""

    pairs: Count
    source: SideStats
    target: SideStats


class Corpus:
    """Sentence pairs of a split in the order of the text; files that are missing or damaged are a DataError.

    ``longest`` has the tokens of the longest source and target, without EOS, as they were recorded. If they are not
    given, all lengths are read for them.
    """

    def __init__(self, directory: Path, split: str, longest: tuple[int | None, int | None] = (None, None)) -> None:
        self._source = _Side(directory, f"{split}.source", longest[0])
        self._target = _Side(directory, f"{split}.target", longest[1])
        if len(self._source) != len(self._target):
            raise DataError(
                f"'{split}' in {directory} has {len(self._source)} sources and {len(self._target)} targets; run "
                "`prepare` again"
            )
        path = directory / f"{split}.weights.bin"
        # Factors of the pairs' losses, a read-only view of the file; None if the split has none. Shape: (N,)
        self.weights: NDArray[Any] | None = _map(path, _WEIGHT) if path.is_file() else None
        if self.weights is not None and len(self.weights) != len(self):
            raise DataError(
                f"{path} holds {len(self.weights)} weights of {len(self)} pairs; it was damaged: run `prepare` again"
            )
        path = directory / f"{split}.links.offsets.bin"
        self._links = _Side(directory, f"{split}.links") if path.is_file() else None
        if self._links is not None and len(self._links) != len(self):
            raise DataError(
                f"{path} has links of {len(self._links)} of {len(self)} pairs; it was damaged: run `prepare` again"
            )

    def __len__(self) -> int:
        return len(self._source)

    def source(self, index: int) -> NDArray[np.integer]:
        """Return the source tokens of one pair, without EOS, as a read-only view of the file. Shape: -> (S-1,)."""
        return self._source[index]

    def target(self, index: int) -> NDArray[np.integer]:
        """Return the target tokens of one pair, without EOS, as a read-only view of the file. Shape: -> (T-1,)."""
        return self._target[index]

    def sources(self, indices: Indices) -> Tokens:
        """Copy the source tokens of some pairs, without EOS. Shape: indices (B,)."""
        return self._source.copy_of(indices)

    def targets(self, indices: Indices) -> Tokens:
        """Copy the target tokens of some pairs, without EOS. Shape: indices (B,)."""
        return self._target.copy_of(indices)

    @property
    def source_lengths(self) -> Lengths:
        """Source lengths in tokens, including the EOS that a batch adds. Shape: -> (N,)."""
        return self._source.lengths

    @property
    def target_lengths(self) -> Lengths:
        """Target lengths in tokens, including the EOS that a batch adds. Shape: -> (N,)."""
        return self._target.lengths

    def weights_of(self, indices: Indices) -> NDArray[np.float32] | None:
        """Return the weights of some pairs; None if the split has none. Shape: (B,) -> (B,)."""
        return None if self.weights is None else self.weights[indices]

    @property
    def aligned(self) -> bool:
        """True if the split has word alignments; a pair may have none."""
        return self._links is not None

    def links_of(self, indices: Indices) -> Indices | None:
        """Return the linked tokens of some pairs: place among ``indices``, target and source position, from 0.

        None if the split has no word alignments. Shape: (B,) -> (L,3)
        """
        if self._links is None:
            return None
        numbers, counts = self._links.copy_of(indices)
        of_pair = np.repeat(np.arange(len(indices)), counts // 2)
        if not (counts % 2).any():
            source, target = numbers.astype(np.int64).reshape(-1, 2).T
            ends = [side.places_of(indices)[1][of_pair] for side in (self._source, self._target)]
            if ((source >= 0) & (source < ends[0]) & (target >= 0) & (target < ends[1])).all():
                return np.stack([of_pair, target, source], axis=1)
        raise DataError(
            f"{self._links.path.parent} has links of tokens that its pairs lack; it was damaged: run `prepare` again"
        )

    def lengths(self, indices: Indices) -> tuple[Lengths, Lengths]:
        """Return source and target lengths of some pairs, EOS included. Shape: (B,) -> (B,), (B,)."""
        return self._source.lengths_of(indices), self._target.lengths_of(indices)

    def named(self, indices: Indices) -> str:
        """Return a phrase for messages about some pairs, with their numbers in the corpus, from 0. Shape: (B,)."""
        return f"the pairs {listed(sorted(indices.tolist()), _NAMED_PAIRS)}"

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and of the longest target, EOS included."""
        return self._source.longest + 1, self._target.longest + 1

    def read_offsets(self, indices: Indices) -> list[Future[Any]]:
        """Begin to read the offsets of some pairs into memory. Shape: (B,)."""
        sides = filter(None, (self._source, self._target, self._links))
        return [read for side in sides for read in side.read_offsets("pairs", indices)]

    def read_tokens(self, indices: Indices) -> list[Future[Any]]:
        """Begin to read what some pairs have besides offsets, which have been read. Shape: (B,)."""
        sides = filter(None, (self._source, self._target, self._links))
        reads = [read for side in sides for read in side.read_tokens(indices)]
        return reads if self.weights is None else reads + _reads("pairs", self.weights, indices)

    @property
    def target_tokens(self) -> int:
        """Target tokens of all pairs, EOS included."""
        return len(self._target.tokens) + len(self)

    def stats(self, unknown: tuple[int, int]) -> SplitStats:
        """Count pairs and tokens; ``unknown`` are the unknown tokens of source and target."""
        source, target = self._source.stats(unknown[0]), self._target.stats(unknown[1])
        return SplitStats(pairs=len(self), source=source, target=target)


class _Side:
    """Reader of one side of a split, whose longest sentence has ``longest`` tokens if that was recorded."""

    def __init__(self, directory: Path, stem: str, longest: int | None = None) -> None:
        self.path = directory / f"{stem}.offsets.bin"
        self._recorded = longest
        tokens_path = next(
            (path for name in _DTYPES if (path := directory / f"{stem}.{name}.bin").is_file()),
            directory / f"{stem}.uint16.bin",
        )
        for path in (self.path, tokens_path):
            if not path.is_file():
                raise DataError(f"{path} is missing; run `prepare` again")
        self._offsets = _map(self.path, _OFFSET)
        self._tokens_path = tokens_path
        self.tokens = _map(tokens_path, _DTYPES[tokens_path.name.split(".")[-2]])
        expected = int(self._offsets[-1]) if len(self._offsets) else -1
        if len(self.tokens) != expected:
            raise DataError(
                f"{tokens_path} holds {len(self.tokens)} tokens instead of the {max(expected, 0)} of "
                f"{self.path.name}; it was damaged: run `prepare` again"
            )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        if not 0 <= index < len(self):  # a negative index would silently give an empty sentence
            raise IndexError(f"sentence {index} of {len(self)}")
        return self.tokens[self._offsets[index] : self._offsets[index + 1]]

    def copy_of(self, indices: Indices) -> Tokens:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"sentences {indices.min()} to {indices.max()} of {len(self)}")
        starts, lengths = self.places_of(indices)
        return Tokens(self.tokens[places(starts, lengths)], lengths)

    def lengths_of(self, indices: Indices) -> Lengths:
        wait(self.read_offsets("lengths", indices))
        return (self.places_of(indices)[1] + 1).astype(np.int32)

    def read_offsets(self, what: Reading, indices: Indices) -> list[Future[Any]]:
        return _reads(what, self._offsets, indices, indices + 1)

    def read_tokens(self, indices: Indices) -> list[Future[Any]]:
        starts, lengths = self.places_of(indices)
        return _reads("pairs", self.tokens, starts[lengths > 0], (starts + lengths - 1)[lengths > 0])

    def places_of(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the first token, and the number of tokens, of some sentences. Shape: (B,) -> (B,), (B,)."""
        starts, ends = self._offsets[indices], self._offsets[indices + 1]
        lengths: Indices = ends - starts
        longest = len(self.tokens) if self._recorded is None else self._recorded
        if not ((starts >= 0) & (lengths >= 0) & (lengths <= longest) & (ends <= len(self.tokens))).all():
            raise DataError(
                f"{self.path} has offsets that are not those of sentences of at most {longest} tokens; it was "
                "damaged: run `prepare` again"
            )
        return starts, lengths

    @cached_property
    def lengths(self) -> Lengths:
        lengths = np.diff(self._offsets)
        lengths += 1
        return lengths.astype(np.int32)

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) - 1 if self._recorded is None else self._recorded

    def stats(self, unk: int) -> SideStats:
        unknown = longest = 0
        for start in range(0, len(self), _CHUNK):  # mapped pages of large files are not read in advance
            offsets = np.fromfile(self.path, _OFFSET, _CHUNK + 1, offset=start * _OFFSET.itemsize)
            first, dtype = int(offsets[0]), self.tokens.dtype
            tokens = np.fromfile(self._tokens_path, dtype, int(offsets[-1]) - first, offset=first * dtype.itemsize)
            unknown += int(np.count_nonzero(tokens == unk))
            longest = max(longest, int(np.diff(offsets).max()))
        return SideStats(tokens=len(self.tokens), unknown=unknown, longest=longest)


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which are no whole number of {dtype.itemsize}-byte numbers; it was damaged: "
            "run `prepare` again"
        )
    if size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    with path.open("rb") as file:
        pages = mmap(file.fileno(), 0, access=ACCESS_READ)
    if size >= _LARGE_BYTES:
        pages.madvise(MADV_RANDOM)
    return np.frombuffer(pages, dtype)


def _reads(what: Reading, values: NDArray[Any], *indices: Indices) -> list[Future[Any]]:
    """Begin to read the pages of a large file with some of its values into memory, many at a time.

    A thread that reads a page waits as long as the file system needs, and reads no other meanwhile. Shape: (B,) each.
    """
    if len(values) * values.itemsize < _LARGE_BYTES:
        return []
    step = PAGESIZE // values.itemsize
    pages = np.unique(np.concatenate(indices) // step) * step
    parts = np.array_split(pages, min(len(pages), _THREADS)) if len(pages) else []
    return [_threads(what).submit(values.__getitem__, part) for part in parts]


class Tokens(NamedTuple):
    """Sentences of one side, end to end, without BOS and EOS. Shape: numbers (tokens,), lengths (N,)."""

    numbers: NDArray[Any]
    lengths: Indices


def places(starts: Indices, lengths: Indices) -> Indices:
    """Return the places of the tokens of sentences that begin at ``starts``. Shape: (N,), (N,) -> (tokens,)."""
    before = np.cumsum(lengths) - lengths
    within: Indices = np.repeat(starts - before, lengths)
    within += np.arange(len(within))
    return within


class CorpusWriter:
    """Writer of a new split, for use in a ``with`` statement.

    ``vocab_size`` is that of the larger vocabulary. ``positions`` is a bound on the positions of linked tokens; None
    if pairs have no links.
    """

    def __init__(
        self, directory: Path, split: str, vocab_size: int, weighted: bool = False, positions: int | None = None
    ) -> None:
        self._source = _SideWriter(directory, f"{split}.source", vocab_size)
        self._target = _SideWriter(directory, f"{split}.target", vocab_size)
        self._weights = (directory / f"{split}.weights.bin").open("wb") if weighted else None
        self._links = None if positions is None else _SideWriter(directory, f"{split}.links", positions)

    def append(
        self,
        sources: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        weights: NDArray[np.floating] | None = None,
        links: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Append pairs of token numbers, without BOS and EOS. Shape of weights: (N,).

        ``links`` has source and target position of each link of a pair, in turn.
        """
        pairs = len(sources)
        assert pairs == len(targets), f"{pairs} sources for {len(targets)} targets"
        assert (weights is None) == (self._weights is None), "either all pairs have weights or none"
        self._source.append(sources)
        self._target.append(targets)
        if self._weights is not None and weights is not None:
            assert pairs == len(weights), f"{len(weights)} weights for {pairs} pairs"
            self._weights.write(weights.astype(_WEIGHT).tobytes())
        assert (links is None) == (self._links is None), "either all pairs have links or none"
        if self._links is not None and links is not None:
            assert pairs == len(links), f"links of {len(links)} pairs for {pairs}"
            self._links.append(links)

    def __enter__(self) -> CorpusWriter:
        return self

    def __exit__(self, *error: object) -> None:
        links = () if self._links is None else self._links.files
        for file in (*self._source.files, *self._target.files, *links, self._weights):
            if file is not None:
                with file:  # its content is to survive a power failure
                    file.flush()
                    os.fsync(file.fileno())


class _SideWriter:
    """Writer of one side of a split: below a ``bound`` of 65,536 a token takes two bytes, otherwise four."""

    def __init__(self, directory: Path, stem: str, bound: int) -> None:
        name = "uint16" if bound < 1 << 16 else "int32"
        self._dtype = _DTYPES[name]
        self._tokens = (directory / f"{stem}.{name}.bin").open("wb")
        self._offsets = (directory / f"{stem}.offsets.bin").open("wb")
        self._offsets.write(np.zeros(1, _OFFSET).tobytes())
        self.files: tuple[BinaryIO, BinaryIO] = self._tokens, self._offsets
        self._end = 0

    def append(self, sentences: Sequence[Sequence[int]]) -> None:
        lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
        self._offsets.write((self._end + np.cumsum(lengths)).astype(_OFFSET).tobytes())
        tokens = np.fromiter(chain.from_iterable(sentences), self._dtype, int(lengths.sum()))
        self._tokens.write(tokens.tobytes())
        self._end += len(tokens)


def join_files(parts: Sequence[Path], whole: Path) -> None:
    """Write the files of successive parts of a split as one; offsets continue where those of the part before end."""
    end = 0
    with whole.open("wb") as file:
        for number, part in enumerate(parts):
            if not whole.name.endswith(".offsets.bin"):
                with part.open("rb") as content:
                    shutil.copyfileobj(content, file, _COPIED_BYTES)
                continue
            offsets = np.fromfile(part, _OFFSET) + end
            end = int(offsets[-1])
            file.write(offsets[number > 0 :].astype(_OFFSET).tobytes())
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class CorpusPart:
    """A corpus of the training text, segmented in one or more ways, each of the same pairs.

    A tag is a token in front of each sentence. The key is part of the key of the shuffle.
    """

    name: str
    segmentations: tuple[Corpus, ...]
    source_tag: int | None = None
    target_tag: int | None = None
    key: int = 0

    def __len__(self) -> int:
        return len(self.segmentations[0])

    def segmentation(self, epoch: int) -> int:
        """Return the number of the segmentation that an epoch has: they follow one another."""
        return epoch % len(self.segmentations)

    def shuffled(self, positions: Indices, seed: int, epoch: int) -> Indices:
        """Return the indices of the pairs at some positions of a shuffled epoch. Shape: (B,) -> (B,)."""
        return randomness.permuted(positions, len(self), seed, randomness.Purpose.SHUFFLE, self.key, epoch)

    def target_tokens(self, segmentation: int) -> int:
        """Return the target tokens of a segmentation, tags and EOS included."""
        tagged = self.target_tag is not None
        return self.segmentations[segmentation].target_tokens + tagged * len(self)

    @property
    def mean_target_tokens(self) -> float:
        """Target tokens of all pairs, tags and EOS included, as the mean of the segmentations."""
        return sum(map(self.target_tokens, range(len(self.segmentations)))) / len(self.segmentations)

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and of the longest target in any segmentation, tags and EOS included."""
        source, target = zip(*(corpus.longest for corpus in self.segmentations), strict=True)
        return max(source) + (self.source_tag is not None), max(target) + (self.target_tag is not None)


class Corpora:
    """Sentence pairs of all corpora; each pair in each segmentation has a number, its row."""

    def __init__(self, parts: Sequence[CorpusPart]) -> None:
        self.parts = tuple(parts)
        self._corpora = [(number, corpus) for number, part in enumerate(parts) for corpus in part.segmentations]
        sizes = [len(corpus) for _, corpus in self._corpora]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._first = np.cumsum([0, *(len(part.segmentations) for part in parts)])

    @classmethod
    def of(cls, corpus: Corpus) -> Corpora:
        """Return the text of a single corpus; rows are its indices."""
        return cls([CorpusPart("train", (corpus,))])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def rows(self, part: int, segmentation: int, indices: Indices) -> Indices:
        """Return the rows of some pairs of a corpus. Shape: (B,) -> (B,)."""
        rows: Indices = indices + self._starts[self._first[part] + segmentation]
        return rows

    def sources(self, rows: Indices) -> Tokens:
        """Copy the source tokens of some rows, tags included, without EOS. Shape: rows (B,)."""
        return self._copy_of(rows, Corpus.sources, [part.source_tag for part in self.parts])

    def targets(self, rows: Indices) -> Tokens:
        """Copy the target tokens of some rows, tags included, without EOS. Shape: rows (B,)."""
        return self._copy_of(rows, Corpus.targets, [part.target_tag for part in self.parts])

    def lengths(self, rows: Indices) -> tuple[Lengths, Lengths]:
        """Return source and target lengths of some rows, tags and EOS included. Shape: (B,) -> (B,), (B,)."""
        source, target = np.empty(len(rows), dtype=np.int32), np.empty(len(rows), dtype=np.int32)
        for number, corpus, chosen, indices in self._by_corpus(rows):
            sources, targets = corpus.lengths(indices)
            source[chosen] = sources + np.int32(self.parts[number].source_tag is not None)
            target[chosen] = targets + np.int32(self.parts[number].target_tag is not None)
        return source, target

    def _by_corpus(self, rows: Indices) -> Iterator[tuple[int, Corpus, Indices, Indices]]:
        """Yield number of the part, corpus, places of its rows and their indices, of each corpus with some rows."""
        of_row = np.searchsorted(self._starts, rows, side="right") - 1
        for place in np.unique(of_row).tolist():
            chosen = np.flatnonzero(of_row == place)
            yield *self._corpora[place], chosen, rows[chosen] - self._starts[place]

    def weights_of(self, rows: Indices) -> NDArray[np.float32] | None:
        """Return the weights of some rows, 1 in corpora without; None if no corpus has weights. Shape: (B,) -> (B,).

        All segmentations of a pair have its weight.
        """
        of_part = [part.segmentations[0].weights for part in self.parts]
        if all(weights is None for weights in of_part):
            return None
        result = np.ones(len(rows), dtype=np.float32)
        for number, _, chosen, indices in self._by_corpus(rows):
            if (weights := of_part[number]) is not None:
                result[chosen] = weights[indices]
        return result

    def links_of(self, rows: Indices) -> Indices | None:
        """Return the linked tokens of some rows, as :meth:`Corpus.links_of`, tags included; None if none has any."""
        if not any(corpus.aligned for _, corpus in self._corpora):
            return None
        all_links: list[Indices] = [np.empty((0, 3), dtype=np.int64)]
        for number, corpus, chosen, indices in self._by_corpus(rows):
            if (links := corpus.links_of(indices)) is not None:
                part = self.parts[number]
                tags = [0, part.target_tag is not None, part.source_tag is not None]
                links[:, 0] = chosen[links[:, 0]]
                all_links.append(links + np.array(tags, dtype=np.int64))
        return np.concatenate(all_links)

    def part_of(self, rows: Indices) -> Indices:
        """Return the number of the corpus of each row. Shape: (B,) -> (B,)."""
        numbers: Indices = np.array([number for number, _ in self._corpora])
        return numbers[np.searchsorted(self._starts, rows, side="right") - 1]

    def named(self, rows: Indices) -> str:
        """Return a phrase for messages about some rows, as :meth:`Corpus.named`, and of which corpora they are."""
        texts = []
        for number, corpus, _, indices in self._by_corpus(rows[rows >= 0]):
            where = f" of {self.parts[number].name}" if len(self.parts) > 1 else ""
            texts.append(f"{corpus.named(indices)}{where}")
        return " and ".join(texts) or "no pairs"

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest source and of the longest target, tags and EOS included."""
        source, target = zip(*(part.longest for part in self.parts), strict=True)
        return max(source), max(target)

    def read_ahead(self, rows: Indices) -> None:
        """Read what some rows have in the files into memory, many pages at a time. Shape: (B,)."""
        corpora = [(corpus, indices) for _, corpus, _, indices in self._by_corpus(rows)]
        wait([read for corpus, indices in corpora for read in corpus.read_offsets(indices)])
        wait([read for corpus, indices in corpora for read in corpus.read_tokens(indices)])

    def _copy_of(
        self, rows: Indices, tokens_of: Callable[[Corpus, Indices], Tokens], tags: Sequence[int | None]
    ) -> Tokens:
        """Return the tokens of one side of some rows, with the tag of each row's corpus, or None."""
        if len(self._corpora) == 1 and tags[0] is None:
            return tokens_of(self._corpora[0][1], rows)
        copies, lengths = [], np.zeros(len(rows), dtype=np.int64)
        for number, corpus, chosen, indices in self._by_corpus(rows):
            tokens = tokens_of(corpus, indices)
            lengths[chosen] = tokens.lengths + (tags[number] is not None)
            copies.append((chosen, tags[number], tokens))
        starts, numbers = np.cumsum(lengths) - lengths, np.empty(int(lengths.sum()), dtype=np.int64)
        for chosen, tag, tokens in copies:
            if tag is not None:
                numbers[starts[chosen]] = tag
            numbers[places(starts[chosen] + (tag is not None), tokens.lengths)] = tokens.numbers
        return Tokens(numbers, lengths)
