"""Batches: every sentence once, the same updates for any number of GPUs, bounded size and padding."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_nmt.data.batching import BatchConfig, divide_update, grain_tokens, shares
from deepspeed_nmt.data.corpora import Corpora
from deepspeed_nmt.data.largest import check_lengths, largest_micro_batch
from deepspeed_nmt.data.update_order import tabulated_epoch
from deepspeed_nmt.errors import ConfigError
from tests.support import LengthsOnly


def lengths(count: int, seed: int = 0, mean: float = 24.0) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths like those of news: gamma-distributed, with source and target correlated."""
    rng = np.random.default_rng(seed)
    target = np.clip(rng.gamma(3.0, mean / 3.0, count), 1, 200).astype(np.int32) + 1
    source = np.clip(target * rng.normal(0.95, 0.15, count), 1, 220).astype(np.int32) + 1
    return source, target


def test_every_sentence_is_in_exactly_one_update() -> None:
    source, target = lengths(5000)
    order = tabulated_epoch(source, target, seed=1, epoch=0, update_tokens=4096)
    assert sorted(order.rows) == list(range(5000))


def test_updates_have_the_requested_size() -> None:
    source, target = lengths(20000)
    order = tabulated_epoch(source, target, seed=1, epoch=0, update_tokens=8192)
    sizes = np.array([order.target[order[u]].sum() for u in range(len(order) - 1)])
    assert abs(sizes.mean() / 8192 - 1) < 0.02 and sizes.min() > 0.85 * 8192 and sizes.max() < 1.15 * 8192


def test_epochs_and_seeds_differ_and_repeat() -> None:
    source, target = lengths(2000)
    first = tabulated_epoch(source, target, 1, 0, 2048)
    assert np.array_equal(first.rows, tabulated_epoch(source, target, 1, 0, 2048).rows)
    assert not np.array_equal(first.rows, tabulated_epoch(source, target, 1, 1, 2048).rows)
    assert not np.array_equal(first.rows, tabulated_epoch(source, target, 2, 0, 2048).rows)


def test_epoch_is_pinned() -> None:
    """A change of these values changes every resumed run. It must be deliberate."""
    source = np.arange(2, 42, dtype=np.int32)
    order = tabulated_epoch(source, source[::-1].copy(), seed=3, epoch=2, update_tokens=100)
    assert order.rows[order[0]].tolist() == PINNED_FIRST and order.bounds.tolist() == PINNED_BOUNDS


PINNED_FIRST = [4, 3, 2]
PINNED_BOUNDS = [0, 3, 8, 11, 15, 27, 29, 31, 34, 40]


@pytest.mark.parametrize(("update", "micro", "ranks"), [(2048, 2048, 1), (8192, 4096, 2), (32768, 8192, 1)])
def test_padding_is_below_a_tenth_and_size_within_micro_tokens(update: int, micro: int, ranks: int) -> None:
    source, target = lengths(60000)
    order = tabulated_epoch(source, target, 1, 0, update)
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
    order = tabulated_epoch(source, target, 1, 0, 8192)
    update = order.rows[order[2]]
    for ranks in (1, 2, 3, 8, 64):
        divided = divide_update(update, source, target, ranks, BatchConfig(update_tokens=8192, micro_tokens=1024))
        assert len(divided) == ranks
        assert sorted(np.concatenate([g for groups in divided for g in groups])) == sorted(update)


def test_simultaneous_micro_batches_of_ranks_have_similar_sizes() -> None:
    source, target = lengths(60000)
    order = tabulated_epoch(source, target, 1, 0, 32768)
    update = order.rows[order[5]]
    divided = divide_update(update, source, target, 4, BatchConfig(update_tokens=32768, micro_tokens=4096))
    for step in zip(*divided, strict=True):
        sizes = [len(g) * max(source[g].max(), target[g].max()) if len(g) else 0 for g in step]
        assert min(sizes) > 0.6 * max(sizes)


def test_fewer_sentences_than_ranks_give_empty_micro_batches() -> None:
    source, target = lengths(3)
    divided = divide_update(np.arange(3), source, target, 8, BatchConfig(update_tokens=512, micro_tokens=512))
    assert sorted(len(g) for groups in divided for g in groups)[:5] == [0] * 5


def test_a_sentence_longer_than_micro_tokens_is_refused_by_name() -> None:
    source, target = lengths(100)
    target[41] = 300
    config = BatchConfig(update_tokens=1024, micro_tokens=256)
    with pytest.raises(ConfigError, match=r"micro_tokens must be at least .* pair 42 with 300 tokens, but is 256"):
        check_lengths(Corpora.of(LengthsOnly(source, target)), config)
    with pytest.raises(ConfigError, match="300 tokens"):
        divide_update(np.arange(100), source, target, 1, config)


def test_a_grain_is_at_most_an_update() -> None:
    assert grain_tokens(100) == 100 and grain_tokens(4096) == 512
    assert grain_tokens(8192) == 1024 and grain_tokens(100_000) == 2048


def test_shares_cover_all_items_once() -> None:
    assert [list(r) for r in shares(7, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [len(r) for r in shares(1, 4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("update_tokens", "micro_tokens", "ranks"), [(4096, 700, 1), (8192, 1500, 3), (4096, 16384, 1), (4096, 16384, 4)]
)
def test_no_micro_batch_is_larger_than_the_largest_expected(
    update_tokens: int, micro_tokens: int, ranks: int
) -> None:
    source, target = lengths(6000)
    config = BatchConfig(update_tokens=update_tokens, micro_tokens=micro_tokens)

    def size(group: np.ndarray) -> int:
        return len(group) * int(np.maximum(source[group], target[group]).max()) if len(group) else 0

    order = tabulated_epoch(source, target, 1, 0, update_tokens)
    largest = size(largest_micro_batch(order, Corpora.of(LengthsOnly(source, target)), ranks, config))
    seen = []
    for epoch in range(2):
        order = tabulated_epoch(source, target, 1, epoch, update_tokens)
        for update in range(len(order)):
            divided = divide_update(order.rows[order[update]], source, target, ranks, config)
            seen += [size(group) for groups in divided for group in groups]
    assert max(seen) <= 1.05 * largest and largest <= micro_tokens
    assert largest <= 1.15 * max(seen), "with small updates the expected size is not larger than theirs"


def test_the_longest_of_equally_large_micro_batches_is_expected() -> None:
    target = np.array([10] * 50 + [20] * 25, dtype=np.int32)
    order = tabulated_epoch(target, target, 1, 0, 400)
    config = BatchConfig(update_tokens=400, micro_tokens=200)
    assert largest_micro_batch(order, Corpora.of(LengthsOnly(target, target)), 1, config).tolist() == list(
        range(50, 60)
    )


@pytest.mark.parametrize("short", [125, 126, 167, 168, 251, 252])
def test_a_sentence_that_fills_a_micro_batch_is_cut(short: int) -> None:
    """The search for the smallest size may end above the bound: four sentences of 126 tokens are too many for 500."""
    lengths = np.array([500, *[short] * 12], dtype=np.int32)
    divided = divide_update(np.arange(13), lengths, lengths, 1, BatchConfig(update_tokens=4096, micro_tokens=500))
    assert sorted(np.concatenate(divided[0])) == list(range(13))
    assert max(len(group) * int(lengths[group].max()) for group in divided[0] if len(group)) == 500
