"""The memory-mapped corpus, batches and their order, and batches of the validation set."""

import hashlib
import itertools
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from mmap import PAGESIZE
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from deepspeed_nmt import randomness
from deepspeed_nmt.core.batch import UpdateInfo
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data import corpus as corpus_module
from deepspeed_nmt.data import update_order
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpora, Corpus, CorpusPart, CorpusWriter, Indices, Lengths
from deepspeed_nmt.data.loader import Prefetcher, TrainLoader, ValidationSet, check_lengths, collate
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.parallel.world import World
from tests.support import parity_loader, random_corpus, write_mixture

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = Vocabulary(50)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return random_corpus(tmp_path, pairs=200, vocab=50, seed=2)


def loader(corpus: Corpus, rank: int = 0, ranks: int = 1, micro: int = 200) -> TrainLoader:
    return TrainLoader.of_corpus(
        corpus, BatchConfig(update_tokens=600, micro_tokens=micro), 3, rank, ranks, VOCABULARY
    )


def test_a_batch_is_padded_and_shifted(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, "train", 50) as writer:
        writer.append([[7, 8, 9], [10]], [[11], [12, 13]])
    batch = collate(Corpus(tmp_path, "train"), np.array([0, 1]), VOCABULARY)
    assert batch.source_BS.tolist() == [[7, 8, 9, EOS], [10, EOS, PAD, PAD]]
    assert batch.target_input_BT.tolist() == [[BOS, 11, PAD], [BOS, 12, 13]]
    assert batch.target_output_BT.tolist() == [[11, EOS, PAD], [12, 13, EOS]]
    assert (batch.source_tokens, batch.target_tokens, batch.padded_tokens) == (6, 5, 8)
    assert batch.source_padded and batch.sentence_ids_B.tolist() == [0, 1]


def test_an_empty_batch_can_be_run_and_has_no_weight(corpus: Corpus) -> None:
    batch = collate(corpus, np.array([], dtype=np.int64), VOCABULARY)
    assert batch.source_BS.tolist() == [[EOS]] and batch.target_output_BT.tolist() == [[PAD]]
    assert batch.target_tokens == 0


def test_updates_continue_from_any_position(corpus: Corpus) -> None:
    straight = list(itertools.islice(loader(corpus).updates(Cursor(), 1), 12))
    assert {update.after.epoch for update in straight} >= {0, 1}, "the updates span two epochs"
    for start in (3, 7):
        resumed = next(loader(corpus).updates(straight[start - 1].after, start + 1))
        assert resumed.number == straight[start].number and resumed.after == straight[start].after
        for ours, theirs in zip(resumed.micro_batches, straight[start].micro_batches, strict=True):
            assert ours.source_BS.equal(theirs.source_BS) and ours.update == theirs.update


def test_prefetching_keeps_order_raises_errors_and_closes() -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)
        raise RuntimeError("broken disk")

    ahead = Prefetcher(numbers(), depth=2)
    assert [ahead.next() for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="broken disk"):
        ahead.next()
    endless = Prefetcher((number for number in itertools.count()), depth=2)
    assert endless.next() == 0
    endless.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        endless.next()


def test_no_thread_of_the_loader_stays_when_training_builds_another(corpus: Corpus) -> None:
    others = threading.enumerate()
    updates = Prefetcher(loader(corpus).updates(Cursor(), 1))
    assert updates.next().number == 1
    updates.close()
    assert threading.enumerate() == others


class CountedFile:
    """A mapped file that counts the values that are read of it; all, if numpy is given the whole."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.dtype, self.itemsize, self.read = values, values.dtype, values.itemsize, 0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, places: np.ndarray | int) -> np.ndarray:
        self.read += np.size(self.values[places])
        return self.values[places]

    def __array__(self, *arguments: object, **options: object) -> np.ndarray:
        self.read += len(self.values)
        return self.values


def even_corpus(directory: Path, pairs: int) -> None:
    """Write a corpus of sentences of 8 to 24 tokens, all of which are 0."""
    directory.mkdir()
    for number, side in enumerate(("source", "target")):
        lengths = 8 + (randomness.keys(pairs, number) % np.uint64(17)).astype(np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        ends.astype("<i8").tofile(directory / f"train.{side}.offsets.bin")
        with (directory / f"train.{side}.uint16.bin").open("wb") as tokens:
            tokens.truncate(2 * int(ends[-1]))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_start_reads_as_much_of_any_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Literal["padded", "packed"]
) -> None:
    """Offsets and tokens up to a run's largest micro-batch and the first update after a resume."""
    files: list[CountedFile] = []
    open_file = corpus_module._map
    monkeypatch.setattr(
        corpus_module, "_map", lambda *arguments: files.append(CountedFile(open_file(*arguments))) or files[-1]
    )
    config, counts = BatchConfig(update_tokens=256, micro_tokens=128, layout=layout), []
    for pairs in (400_000, 1_600_000):
        even_corpus(tmp_path / str(pairs), pairs)
        files.clear()
        corpus = Corpus(tmp_path / str(pairs), "train", (62, 24))
        start = TrainLoader.of_corpus(corpus, config, 3, 0, 1, VOCABULARY)
        largest = start.largest()
        if layout == "padded":
            assert (largest.source_BS.shape[1], largest.target_output_BT.shape[1]) == (63, 25), "as recorded"
        start.update(Cursor(1, start.order.updates_in(1) // 2), 500)
        counts.append(sum(file.read for file in files))
    assert counts[1] < 1.3 * counts[0] and counts[1] < 400_000


def test_the_order_of_updates_is_pinned(tmp_path: Path) -> None:
    """A change of this value changes every resumed run. It must be deliberate."""
    even_corpus(tmp_path / "data", 6000)
    config = BatchConfig(update_tokens=256, micro_tokens=128)
    order = TrainLoader.of_corpus(Corpus(tmp_path / "data", "train"), config, 3, 1, 2, VOCABULARY)
    digest = hashlib.sha256()
    for start in (0, 195, 390):  # of two windows with 199 updates each
        for update in itertools.islice(order.updates(Cursor(0, start), start + 1), 12):
            for batch in update.micro_batches:
                digest.update(batch.sentence_ids_B.numpy().tobytes())
    assert digest.hexdigest()[:16] == PINNED_ORDER


PINNED_ORDER = "affd47732f91be2d"


def test_the_next_window_and_four_updates_are_read_while_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a step hides a file system's delays that are shorter than it is. A window has 16 updates here."""
    begun, allowed, four = threading.Event(), threading.Event(), threading.Event()
    windows: list[int] = []
    updates_read: list[int] = []

    class SlowCorpus(Corpus):
        def lengths(self, indices: Indices) -> tuple[Lengths, Lengths]:
            windows.append(len(indices))
            if len(windows) == 2:
                begun.set()
                assert allowed.wait(60.0)
            return super().lengths(indices)

        def read_tokens(self, indices: Indices) -> list[Future[object]]:
            updates_read.append(len(indices))
            if len(updates_read) == 5:
                four.set()
            return super().read_tokens(indices)

    monkeypatch.setattr(update_order, "_WINDOW_UPDATES", 16)
    even_corpus(tmp_path / "data", 3000)
    with closing(Prefetcher(loader(SlowCorpus(tmp_path / "data", "train")).updates(Cursor(), 1))) as updates:
        updates.next()
        assert begun.wait(60.0), "while the first window is used"
        assert four.wait(60.0), "beside the one that was taken"
        for _ in range(15):
            updates.next()
        allowed.set()
        assert updates.next().number == 17


def test_pairs_of_an_update_do_not_wait_for_the_lengths_of_a_window(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "_LARGE_BYTES", 0)
    ready = threading.Event()
    for _ in range(corpus_module._THREADS):
        corpus_module._threads("lengths").submit(ready.wait, 30.0)
    reading = threading.Thread(target=Corpora.of(corpus).read_ahead, args=(np.arange(200),))
    reading.start()
    reading.join(10.0)
    ready.set()
    assert not reading.is_alive()


def test_a_forked_process_reads_by_threads_of_its_own(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_LARGE_BYTES", 0)
    Corpora.of(corpus).read_ahead(np.arange(200))
    child = multiprocessing.get_context("fork").Process(target=Corpora.of(corpus).read_ahead, args=(np.arange(200),))
    child.start()
    child.join(60.0)
    ended = child.exitcode
    child.kill()
    assert ended == 0


def test_pages_are_read_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "_LARGE_BYTES", 0)

    class SlowFile(CountedFile):
        def __getitem__(self, places: np.ndarray | int) -> np.ndarray:
            together.wait()
            return super().__getitem__(places)

    together = threading.Barrier(16, timeout=10.0)
    slow = SlowFile(np.zeros(1 << 16, dtype=np.int64))
    wait(corpus_module._reads("pairs", slow, np.arange(0, 1 << 16, 64), np.arange(1, 1 << 16, 64)))  # type: ignore[arg-type]
    assert slow.read == (1 << 16) * 8 // PAGESIZE, "each page once"


@pytest.mark.parametrize("layout", ["plain", "plain+packed"])
def test_a_mixture_is_the_same_for_any_ranks_and_resumes_anywhere(tmp_path: Path, layout: str) -> None:
    """A mixture with a schedule, a tag, two segmentations, and a corpus that is repeated."""
    write_mixture(tmp_path)

    def sentences(rank: int, ranks: int, start: int = 0, number: int = 60) -> list[list[tuple[int, int, int]]]:
        """Return the number, and the sums of source and target tokens, of each sentence of each update."""
        world = World(rank, ranks, 0, torch.device("cpu"))
        updates = parity_loader(tmp_path, world, layout, mixture=True).updates(Cursor(0, start), start + 1)
        found = []
        for update in itertools.islice(updates, number - start):
            batches = [batch for batch in update.micro_batches if batch.target_tokens]
            rows = [
                (int(i), int(s[s != b.pad].sum()), int(t[mask].sum()))
                for b in batches
                for i, s, t, mask in zip(
                    b.sentence_ids_B, b.source_rows(), b.target_rows(b.target_output_BT), b.target_mask, strict=True
                )
            ]
            found.append(rows)
        return found

    alone = sentences(0, 1)
    assert alone[17:] == sentences(0, 1, start=17), "an update does not depend on where the run resumed"
    for ranks in (2, 4):
        shares = [sentences(rank, ranks) for rank in range(ranks)]
        for number, rows in enumerate(alone):
            assert sorted(row for share in shares for row in share[number]) == sorted(rows)
    rows = [row for update in alone for row in update]
    ids = {row[0] for row in rows}
    assert any(i < 300 for i in ids) and any(300 <= i < 600 for i in ids), "both segmentations are trained on"
    assert len([row for row in rows if row[0] >= 600]) > 160, "the second corpus of 40 pairs is repeated"


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


def test_the_length_that_would_fit_leaves_room_for_a_tag(corpus: Corpus) -> None:
    bound = max(corpus.longest)
    config = BatchConfig(micro_tokens=bound)
    assert check_lengths(Corpora.of(corpus), config) == bound
    for micro, tag, fits in ((bound - 1, None, bound - 2), (bound, 5, bound - 2)):
        tagged = Corpora([CorpusPart("news", (corpus,), source_tag=tag, target_tag=tag)])
        with pytest.raises(ConfigError, match=rf"or prepare the data with --max-length {fits}$"):
            check_lengths(tagged, BatchConfig(micro_tokens=micro))


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.source\.offsets\.bin is missing"):
        Corpus(tmp_path, "train")
    _write(tmp_path, [([4, 5], [5]), ([6, 7], [8])], 10)
    for target, source, lacking in ((9, 7, 7), (8, 8, 8)):
        vocabulary = Vocabulary(target, own_source=Vocabulary(source))
        with pytest.raises(DataError, match=f"a token beyond the {lacking} of its vocabulary"):
            collate(Corpus(tmp_path, "train"), np.arange(2), vocabulary)
    collate(Corpus(tmp_path, "train"), np.arange(2), Vocabulary(9))
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


@pytest.mark.parametrize("offsets", [[0, 3, 1, 4], [0, -1, 2, 4], [0, 1, 9, 4], [0, 0, 4, 4]])
def test_damaged_offsets_are_named_when_they_are_read(tmp_path: Path, offsets: list[int]) -> None:
    """They rise, are within the tokens, and give no sentence longer than was recorded."""
    _write(tmp_path, [([4], [5]), ([6, 7], [8]), ([9], [5])], 10)
    np.array(offsets, dtype="<i8").tofile(tmp_path / "train.source.offsets.bin")
    corpus = Corpus(tmp_path, "train", (3, 1))
    for read in (corpus.lengths, corpus.sources, corpus.read_tokens):
        with pytest.raises(DataError, match=r"train.source.offsets.bin has offsets that are not those of sentences"):
            read(np.arange(3))


@pytest.fixture
def validation_corpus(tmp_path: Path) -> Corpus:
    return random_corpus(tmp_path, pairs=50, vocab=50, seed=3, split="valid")


def of_rank(validation_corpus: Corpus, rank: int = 0, ranks: int = 1, micro: int = 200) -> ValidationSet:
    return ValidationSet(validation_corpus, Vocabulary(50), BatchConfig(micro_tokens=micro), rank, ranks)


def test_ranks_share_all_sentences_or_a_slice(validation_corpus: Corpus) -> None:
    for sentences in (None, np.array([3, 8, 11, 30])):
        shares = [list(of_rank(validation_corpus, rank, 3).batches(sentences)) for rank in range(3)]
        assert len({len(share) for share in shares}) == 1
        ids = sorted(int(i) for share in shares for batch in share for i in batch.sentence_ids_B if i >= 0)
        chosen = range(50) if sentences is None else sentences.tolist()
        assert ids == list(chosen)
        tokens = int(validation_corpus.target_lengths[ids].sum())
        assert {batch.update for share in shares for batch in share} == {
            UpdateInfo(tokens=tokens, sentences=len(ids))
        }
        assert sum(batch.target_tokens for share in shares for batch in share) == tokens


def test_sources_of_other_sentences_keep_the_targets(validation_corpus: Corpus) -> None:
    sentences = np.arange(0, 50, 2)
    other = {int(i): (int(i) + 2) % 50 for i in sentences}
    valid = of_rank(validation_corpus)
    pairs = list(zip(valid.batches(sentences), valid.batches(sentences, other), strict=True))
    for own, swapped in pairs:
        assert own.target_output_BT.equal(swapped.target_output_BT)
        assert own.sentence_ids_B.equal(swapped.sentence_ids_B)
        for row, sentence in enumerate(own.sentence_ids_B.tolist()):
            source = validation_corpus.source(other[sentence]).tolist()
            assert swapped.source_BS[row, : len(source) + 1].tolist() == [*source, 2]
