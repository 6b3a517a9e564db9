"""Batches: every sentence once, the same updates for any number of GPUs, bounded size and padding."""

import numpy as np
import pytest

from deepspeed_nmt.data.batching import BatchConfig, divide_update
from deepspeed_nmt.data.corpus import Corpora
from deepspeed_nmt.data.loader import check_lengths, largest_micro_batch
from deepspeed_nmt.errors import ConfigError
from tests.support import LengthsOnly, epoch_window


def lengths(count: int, seed: int = 0, mean: float = 24.0) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths like those of news: gamma-distributed, with source and target correlated."""
    rng = np.random.default_rng(seed)
    target = np.clip(rng.gamma(3.0, mean / 3.0, count), 1, 200).astype(np.int32) + 1
    source = np.clip(target * rng.normal(0.95, 0.15, count), 1, 220).astype(np.int32) + 1
    return source, target


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


def test_a_sentence_longer_than_micro_tokens_is_refused_by_name() -> None:
    source, target = lengths(100)
    target[41] = 300
    config = BatchConfig(update_tokens=1024, micro_tokens=256)
    with pytest.raises(ConfigError, match=r"pair 42 has 300 tokens, but batch.micro_tokens is 256"):
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
    largest = size(largest_micro_batch(order, Corpora.of(LengthsOnly(source, target)), ranks, config))
    seen = []
    for epoch in range(2):
        order = epoch_window(source, target, update_tokens, epoch=epoch)
        for update in range(len(order)):
            divided = divide_update(order.rows[order[update]], source, target, ranks, config)
            seen += [size(group) for groups in divided for group in groups]
    assert max(seen) <= 1.05 * largest and largest <= micro_tokens
    assert largest <= 1.15 * max(seen), "with small updates the expected size is not larger than theirs"


def test_the_longest_of_equally_large_micro_batches_is_expected() -> None:
    target = np.array([10] * 40 + [20] * 20, dtype=np.int32)
    order = epoch_window(target, target, 800)
    config = BatchConfig(update_tokens=800, micro_tokens=200)
    assert largest_micro_batch(order, Corpora.of(LengthsOnly(target, target)), 1, config).tolist() == list(
        range(40, 50)
    )


@pytest.mark.parametrize("short", [126, 167, 252])
def test_a_sentence_that_fills_a_micro_batch_is_cut(short: int) -> None:
    """The search for the smallest size may end above the bound: four sentences of 126 tokens are too many for 500."""
    lengths = np.array([500, *[short] * 12], dtype=np.int32)
    divided = divide_update(np.arange(13), lengths, lengths, 1, BatchConfig(update_tokens=4096, micro_tokens=500))
    assert sorted(np.concatenate(divided[0])) == list(range(13))
    assert max(len(group) * int(lengths[group].max()) for group in divided[0] if len(group)) == 500
