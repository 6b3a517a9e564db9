"""The memory-mapped corpus: round trip and detection of damage; helpers for files."""

from pathlib import Path

import numpy as np
import pytest

from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.errors import DataError

Pairs = list[tuple[list[int], list[int]]]


def _write(directory: Path, pairs: Pairs, vocab_size: int, batch: int = 3) -> CorpusWriter:
    with CorpusWriter(directory, "train", vocab_size) as writer:
        for start in range(0, len(pairs), batch):
            part = pairs[start : start + batch]
            writer.append([source for source, _ in part], [target for _, target in part])
    return writer


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(65_535, 2), (65_536, 4), (200_000, 4)])
def test_round_trip(tmp_path: Path, vocab_size: int, itemsize: int) -> None:
    rng = np.random.default_rng(1)
    pairs: Pairs = [
        (rng.integers(0, vocab_size, length).tolist(), rng.integers(0, vocab_size, 12 - length).tolist())
        for length in rng.integers(0, 12, 20)
    ]
    pairs[3] = ([vocab_size - 1], [])
    _write(tmp_path, pairs, vocab_size)
    corpus = Corpus(tmp_path, "train")
    assert len(corpus) == 20
    assert [(corpus.source(i).tolist(), corpus.target(i).tolist()) for i in range(20)] == pairs
    assert corpus.source(0).dtype.itemsize == itemsize
    assert corpus.source_lengths.dtype == corpus.target_lengths.dtype == np.int32
    assert corpus.source_lengths.tolist() == [len(source) + 1 for source, _ in pairs]
    assert corpus.target_lengths.tolist() == [len(target) + 1 for _, target in pairs]


def test_stats_count_tokens_unknown_and_longest(tmp_path: Path) -> None:
    stats = _write(tmp_path, [([5, 3, 3], [4]), ([7], [3, 4, 4, 4, 4])], 10, batch=1).stats
    assert stats.model_dump() == {
        "pairs": 2,
        "source": {"tokens": 4, "unknown": 2, "longest": 3},
        "target": {"tokens": 6, "unknown": 1, "longest": 5},
    }


def test_empty_corpus_and_empty_sentences(tmp_path: Path) -> None:
    _write(tmp_path, [], 10)
    assert len(Corpus(tmp_path, "train")) == 0
    _write(tmp_path, [([], []), ([], [])], 10)
    corpus = Corpus(tmp_path, "train")
    assert corpus.source_lengths.tolist() == [1, 1]
    assert corpus.target(1).tolist() == []


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.source\.offsets\.bin is missing"):
        Corpus(tmp_path, "train")
    _write(tmp_path, [([4, 5], [5]), ([6, 7], [8])], 10)
    tokens = tmp_path / "train.source.uint16.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"holds 3 tokens instead of the 4"):
        Corpus(tmp_path, "train")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has 5 bytes, which are no whole number of 2-byte"):
        Corpus(tmp_path, "train")
    tokens.unlink()
    with pytest.raises(DataError, match=r"train\.source\.uint16\.bin is missing"):
        Corpus(tmp_path, "train")


def test_sides_of_different_length(tmp_path: Path) -> None:
    _write(tmp_path, [([4], [5]), ([6], [7])], 10)
    (tmp_path / "train.target.offsets.bin").write_bytes(np.array([0, 2], dtype="<i8").tobytes())
    with pytest.raises(DataError, match="2 sources and 1 targets"):
        Corpus(tmp_path, "train")
