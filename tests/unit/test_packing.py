"""Micro-batches, padded and packed: every sentence once, for any ranks, of bounded size and padding."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_nmt import parity
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig, divide_update
from deepspeed_nmt.data.corpus import Corpora, Corpus, CorpusPart, CorpusWriter
from deepspeed_nmt.data.loader import TrainLoader, check_lengths, collate, collate_packed, largest_micro_batch
from deepspeed_nmt.data.packing import Ladder, PackedPart, divide, pack_update, row_sizes
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.data.update_order import Cursor, EpochOrder
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run import batches
from deepspeed_nmt.run.batches import LayoutEstimate, layout_on
from tests.support import LengthsOnly, epoch_window, random_corpus, write_mixture
from tests.unit.test_update_order import lengths

PAD, BOS, EOS = 0, 1, 2
PINNED_SIZES = {
    512: Ladder((144, 160, 176, 192, 216, 248), (160, 168, 176, 184, 192, 256)),
    1024: Ladder((296, 336, 376, 408, 456, 512), (336, 352, 360, 376, 488, 512)),
    4096: Ladder((1200, 1472), (1392,), two_shapes=True),
}
"""Sizes of rows by the tokens of an update."""
VOCABULARY = Vocabulary(50)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_sentence_that_fills_a_micro_batch_is_trained_on(tmp_path: Path, side: int, layout: str) -> None:
    """Packed, the row gets a tail; padded, the search for a division must not end above the bound for ever."""
    lengths = [[3, 6], [5, 2], [7, 7], *[[4, 4]] * 20]
    lengths[1][side] = 39
    with CorpusWriter(tmp_path, "train", 50) as writer:
        writer.append(*([[7] * pair[each] for pair in lengths] for each in (0, 1)))
    config = BatchConfig(update_tokens=1024, micro_tokens=40, layout=layout)  # type: ignore[arg-type]
    loader = TrainLoader.of_corpus(Corpus(tmp_path, "train"), config, 1, 0, 1, VOCABULARY)
    full = {"padded": 40, "packed": 48}[layout]
    assert loader.largest().padded_tokens == full
    update = next(loader.updates(Cursor(), 1))
    assert sum(len(batch.sentence_ids_B) for batch in update.micro_batches) == 23
    assert max(batch.padded_tokens for batch in update.micro_batches) == full


@pytest.mark.long
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 1000),
    mean=st.floats(5.0, 60.0),
    spread=st.floats(0.0, 1.3),
    ratio=st.floats(0.3, 3.0),
    noise=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.2]),
    longest=st.sampled_from([20, 100, 400]),
    update=st.integers(2000, 5000),  # in smaller ones a single long sentence decides
    room=st.floats(1.0, 8.0),
    ranks=st.sampled_from([1, 2, 3]),
)
def test_packed_rows_of_any_lengths_are_about_as_full_as_padded_ones(
    seed: int,
    mean: float,
    spread: float,
    ratio: float,
    noise: float,
    longest: int,
    update: int,
    room: float,
    ranks: int,
) -> None:
    rng = np.random.default_rng(seed)
    drawn = mean * np.exp(rng.normal(0.0, spread, 1500))
    drawn = np.stack([drawn, drawn * ratio * np.exp(rng.normal(0.0, noise, 1500))])
    source, target = np.clip(np.rint(drawn), 2, longest).astype(np.int32)
    micro = int(room * max(source.max(), target.max()))
    config = BatchConfig(update_tokens=update, micro_tokens=micro, layout="packed")
    order = epoch_window(source, target, update)
    source, target = order.source, order.target
    sizes = row_sizes(order, int(max(source.max(), target.max())), ranks, config)
    positions, counts = {"padded": 0, "packed": 0}, {"padded": 0, "packed": 0}
    for number in range(max(1, min(8, len(order) - 1))):
        packed = pack_update(order[number], source, target, ranks, config, sizes)
        assert len({len(parts) for parts in packed}) == 1, "every rank makes equally many micro-batches"
        parts = [part for rank in packed for part in rank]
        assert sorted(np.concatenate([part.sentences for part in parts])) == sorted(order[number])
        for part in parts:
            for side, size in ((source, part.source), (target, part.target)):
                tokens = int(side[part.sentences].sum())
                assert tokens < size <= micro or tokens == micro == size - 8, "a tail has one position at least"
        positions["packed"] += sum(part.source + part.target for part in parts)
        padded = [group for rank in divide_update(order[number], source, target, ranks, config) for group in rank]
        positions["padded"] += sum(len(g) * int(source[g].max() + target[g].max()) for g in padded if len(g))
        counts["packed"], counts["padded"] = counts["packed"] + len(parts), counts["padded"] + len(padded)
    # Sizes of rows are multiples of 8, on two sides.
    assert positions["packed"] - 2 * 8 * counts["packed"] <= 1.05 * positions["padded"], (sizes, counts)
    assert counts["packed"] <= 1.25 * counts["padded"] + 2 * ranks


def test_a_packed_batch(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, "train", 50) as writer:
        writer.append([[7, 8, 9], [10]], [[11], [12, 13]])
    corpus = Corpus(tmp_path, "train")
    batch = collate_packed(corpus, PackedPart(np.array([0, 1]), 8, 7), VOCABULARY)
    assert batch.source_BS.tolist() == [[7, 8, 9, EOS, 10, EOS, PAD, PAD]]
    assert batch.target_input_BT.tolist() == [[BOS, 11, BOS, 12, 13, PAD, PAD]]
    assert batch.target_output_BT.tolist() == [[11, EOS, 12, 13, EOS, PAD, PAD]]
    assert (batch.source_tokens, batch.target_tokens, batch.padded_tokens) == (6, 5, 8)
    assert batch.source_rows().tolist() == [[7, 8, 9, EOS], [10, EOS, PAD, PAD]]
    assert batch.laid_out_source(batch.source_rows())[0, :6].tolist() == batch.source_BS[0, :6].tolist()
    assert batch.target_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.sentence_ids_B.tolist() == [0, 1]
    empty = collate_packed(corpus, PackedPart(np.array([], dtype=np.int64), 8, 7), VOCABULARY)
    assert empty.source_tokens == empty.target_tokens == 0 and empty.sentence_ids_B.tolist() == [-1]
    assert not empty.target_mask.any() and empty.source_rows().tolist() == [[EOS]]


def test_packed_batches_of_tagged_and_segmented_corpora_have_the_tokens_of_their_rows(tmp_path: Path) -> None:
    write_mixture(tmp_path)
    for path in (tmp_path / "second").glob("train.links.*"):
        path.unlink()
    with CorpusWriter(tmp_path / "second", "train", 50) as writer:  # the second pair has no words
        writer.append([[7, 8], [], [9]], [[10], [], [11, 12, 13]])
    first = CorpusPart("first", (Corpus(tmp_path, "train"), Corpus(tmp_path / "again", "train")))
    second = CorpusPart("second", (Corpus(tmp_path / "second", "train"),), source_tag=6, target_tag=5)
    corpora = Corpora([first, second])
    rows = np.array([601, 2, 600, 310, 602, 599, 0])
    source, target = (int(lengths.sum()) for lengths in corpora.lengths(rows))
    batch = collate_packed(corpora, PackedPart(rows, source + 3, target), parity.VOCABULARY)
    assert batch.source_tokens == source and batch.target_tokens == target
    sources = [token for row in rows.tolist() for token in (*corpora.sources(np.array([row])).numbers, EOS)]
    assert batch.source_BS.tolist() == [[*sources, PAD, PAD, PAD]] and batch.source_BS[0, :2].tolist() == [6, EOS]
    targets = [corpora.targets(np.array([row])).numbers.tolist() for row in rows.tolist()]
    assert batch.target_input_BT.tolist() == [[token for each in targets for token in (BOS, *each)]]
    assert batch.target_output_BT.tolist() == [[token for each in targets for token in (*each, EOS)]]
    padded = collate(corpora, rows, parity.VOCABULARY)
    assert torch.equal(batch.source_rows(), padded.source_BS)
    longest = [int(side.max()) for side in Corpora([second]).lengths(np.arange(3))]
    assert [*second.longest] == longest, "with the tag of each side"
    with pytest.raises(IndexError, match="sentences -1 to 2 of 3"):
        second.segmentations[0].sources(np.array([2, -1]))


def test_updates_of_both_layouts_have_the_same_sentences(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, pairs=200, vocab=50, seed=2)
    found = []
    for layout in ("padded", "packed"):
        config = BatchConfig(update_tokens=600, micro_tokens=200, layout=layout)  # type: ignore[arg-type]
        loader = TrainLoader.of_corpus(corpus, config, 3, 0, 1, VOCABULARY)
        updates = zip(range(12), loader.updates(Cursor(), 1), strict=False)
        found.append(
            [
                (sorted(int(i) for batch in update.micro_batches for i in batch.sentence_ids_B), update.target_tokens)
                for _, update in updates
            ]
        )
        largest = loader.largest()
        assert largest.update.number == 0 and largest.padded_tokens <= 200
    assert found[0] == found[1]


def test_the_layout_is_decided_by_device_precision_and_model() -> None:
    plain = validate({})
    assert layout_on(plain, "bf16", (9, 0)) == layout_on(plain, "fp16", (8, 0)) == "packed"
    assert layout_on(plain, "fp32", (9, 0)) == "padded"
    assert layout_on(plain, "bf16", None) == "padded", "on a CPU"
    assert layout_on(validate({"model": {"attention_dropout": 0.1}}), "bf16", (9, 0)) == "packed"
    assert layout_on(plain, "fp16", (7, 0)) == "packed"
    assert layout_on(validate({"batch": {"layout": "packed"}}), "fp32", None) == "packed"


def test_models_of_one_sentence_a_row_are_not_packed() -> None:
    from deepspeed_nmt.parity import settings_of

    config = settings_of("abnet")
    packed = config.model_copy(update={"batch": config.batch.model_copy(update={"layout": "packed"})})
    with pytest.raises(ConfigError, match=r"batch\.layout is packed, but model\.name=abnet"):
        layout_on(packed, "bf16", None)


def test_auto_falls_back_to_padded_where_that_is_fuller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = random_corpus(tmp_path, pairs=3000, vocab=50, seed=2)
    batch = BatchConfig(update_tokens=2048, micro_tokens=1024, layout="packed")
    world, order = World(0, 1, 0, torch.device("cpu")), EpochOrder(Corpora.of(corpus), 1, 2048)
    for packed, expected in ((0.3, "padded"), (0.125, "packed")):
        found = [LayoutEstimate("padded", 2.0, 100.0, 0.1, 9), LayoutEstimate("packed", 1.0, 100.0, packed, 2)]
        monkeypatch.setattr(batches, "estimates", lambda *_, found=found, **__: found)
        caplog.clear()
        with caplog.at_level("INFO"):
            assert batches.with_less_padding(batch, order, world).layout == expected
        assert ("auto is padded: with these lengths 30.0% of packed" in caplog.text) == (expected == "padded")
    monkeypatch.undo()
    assert batches.with_less_padding(batch, order, world).layout == "packed", "of these lengths, really compared"


@pytest.mark.parametrize("so_far", ["padded", "packed"])
def test_a_resumed_run_keeps_its_layout(so_far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout masks follow the layout, which another place in a mixture would choose anew."""
    monkeypatch.setattr(batches, "layout_on", lambda *_: "packed")
    data, world = cast(TrainingData, None), World(0, 1, 0, torch.device("cpu"))
    assert batches.batch_on(validate({}), 512, data, "bf16", world, 51, so_far).layout == so_far


@pytest.mark.parametrize(("update", "micro", "ranks"), [(2048, 2048, 1), (8192, 4096, 2), (32768, 8192, 1)])
def test_padding_is_below_a_tenth_and_size_within_micro_tokens(update: int, micro: int, ranks: int) -> None:
    source, target = lengths(60000)
    order = epoch_window(source, target, update)
    config = BatchConfig(update_tokens=update, micro_tokens=micro)
    real = padded = 0
    for u in range(0, len(order) - 1, max(1, len(order) // 20)):
        divided = divide_update(order.rows[order[u]], source, target, ranks, config)
        assert len({len(groups) for groups in divided}) == 1, "every rank makes equally many micro-batches"
        for group in (g for groups in divided for g in groups if len(g)):
            s, t = source[group], target[group]
            assert len(group) * max(s.max(), t.max()) <= micro
            real += int(s.sum() + t.sum())
            padded += len(group) * int(s.max() + t.max())
    assert 1 - real / padded <= 0.1


def test_micro_batches_hold_the_sentences_of_the_update_for_any_number_of_ranks() -> None:
    source, target = lengths(3000)
    order = epoch_window(source, target, 8192)
    update = order.rows[order[2]]
    for ranks in (1, 2, 3, 8, 64):
        divided = divide_update(update, source, target, ranks, BatchConfig(update_tokens=8192, micro_tokens=1024))
        assert len(divided) == ranks
        assert sorted(np.concatenate([g for groups in divided for g in groups])) == sorted(update)


def test_simultaneous_micro_batches_of_ranks_have_similar_sizes() -> None:
    source, target = lengths(60000)
    order = epoch_window(source, target, 32768)
    update = order.rows[order[5]]
    divided = divide_update(update, source, target, 4, BatchConfig(update_tokens=32768, micro_tokens=4096))
    for step in zip(*divided, strict=True):
        sizes = [len(g) * max(source[g].max(), target[g].max()) if len(g) else 0 for g in step]
        assert min(sizes) > 0.6 * max(sizes)


def test_sizes_and_divisions_of_packed_rows_are_pinned() -> None:
    """They decide how well rows are filled, which no bound on padding is tight enough to notice."""
    sizes = {}
    for update in (512, 1024, 4096):
        source, target = lengths(1500)
        config = BatchConfig(update_tokens=update, micro_tokens=update // 2)
        longest = int(max(source.max(), target.max()))
        sizes[update] = row_sizes(epoch_window(source, target, update), longest, 1, config)
    assert sizes == PINNED_SIZES
    lengths_NS = np.random.default_rng(1).integers(2, 20, (30, 2))
    room = np.tile(-(-lengths_NS.sum(axis=0) // 3), (3, 1))
    row_of = divide(lengths_NS, room)
    assert row_of is not None, "with exchanges, though without any room to spare"
    assert [lengths_NS[row_of == row].sum(axis=0).tolist() for row in range(3)] == [
        [101, 107],
        [101, 107],
        [100, 108],
    ]
    # A row in which the source fits, but the target does not, and the other way round.
    for pairs, rows, expected in (
        ([[3, 3], [3, 1], [2, 2], [3, 3]], [[5, 10], [6, 7]], [1, 0, 0, 1]),
        ([[6, 6], [5, 3], [6, 2]], [[11, 9], [10, 9]], [0, 0, 1]),
    ):
        row_of = divide(np.array(pairs), np.array(rows))
        assert row_of is not None and row_of.tolist() == expected
    # All sentences fit into short rows, so none is long.
    threes = np.full(20, 3, dtype=np.int32)
    config = BatchConfig(update_tokens=64, micro_tokens=64, layout="packed")
    (parts,) = pack_update(np.arange(20), threes, threes, 1, config, Ladder((24, 48), (24,), two_shapes=True))
    assert [(part.source, part.target) for part in parts] == [(24, 24)] * 3


def test_a_sentence_longer_than_micro_tokens_is_refused_by_name() -> None:
    source, target = lengths(100)
    target[41] = 300
    config = BatchConfig(update_tokens=1024, micro_tokens=256)
    with pytest.raises(ConfigError, match=r"the longest sentence has 300 tokens, but batch.micro_tokens is 256"):
        check_lengths(Corpora.of(LengthsOnly(source, target)), config)
    with pytest.raises(ConfigError, match="300 tokens"):
        divide_update(np.arange(100), source, target, 1, config)


@pytest.mark.parametrize(("update_tokens", "micro_tokens", "ranks"), [(4096, 700, 1), (8192, 1500, 3)])
def test_no_micro_batch_is_larger_than_the_largest_expected(
    update_tokens: int, micro_tokens: int, ranks: int
) -> None:
    source, target = lengths(6000)
    config = BatchConfig(update_tokens=update_tokens, micro_tokens=micro_tokens)

    def size(group: np.ndarray) -> int:
        return len(group) * int(np.maximum(source[group], target[group]).max()) if len(group) else 0

    order = epoch_window(source, target, update_tokens)
    rows, longest = largest_micro_batch(order, int(max(source.max(), target.max())), ranks, config)
    largest = len(rows) * longest
    seen = []
    for epoch in range(2):
        order = epoch_window(source, target, update_tokens, epoch=epoch)
        for update in range(len(order)):
            divided = divide_update(order.rows[order[update]], source, target, ranks, config)
            seen += [size(group) for groups in divided for group in groups]
    assert max(seen) <= 1.05 * largest and largest <= micro_tokens
    assert largest <= 1.15 * max(seen), "with small updates the expected size is not larger than theirs"


@pytest.mark.parametrize("short", [126, 167, 252])
def test_a_sentence_that_fills_a_micro_batch_is_cut(short: int) -> None:
    """The search for the smallest size may end above the bound: four sentences of 126 tokens are too many for 500."""
    lengths = np.array([500, *[short] * 12], dtype=np.int32)
    divided = divide_update(np.arange(13), lengths, lengths, 1, BatchConfig(update_tokens=4096, micro_tokens=500))
    assert sorted(np.concatenate(divided[0])) == list(range(13))
    assert max(len(group) * int(lengths[group].max()) for group in divided[0] if len(group)) == 500
