"""Updates: every sentence once an epoch, found window by window; mixtures of corpora; random numbers."""

from pathlib import Path

import numpy as np
import pytest

from deepspeed_nmt import randomness
from deepspeed_nmt.data.corpus import Corpora, CorpusPart, Indices
from deepspeed_nmt.data.mixture import MixtureOrder, Phase, Stream, Weight, next_phase, rolled_back, taken
from deepspeed_nmt.data.training import DataOption
from deepspeed_nmt.data.update_order import Cursor, EpochOrder, UpdateOrder
from deepspeed_nmt.errors import ConfigError
from tests.support import LengthsOnly, epoch_window

ALWAYS = (Weight(value=1.0),)


def lengths(count: int, seed: int = 0, mean: float = 24.0) -> tuple[np.ndarray, np.ndarray]:
    """Return lengths like those of news: gamma-distributed, with source and target correlated."""
    rng = np.random.default_rng(seed)
    target = np.clip(rng.gamma(3.0, mean / 3.0, count), 1, 200).astype(np.int32) + 1
    source = np.clip(target * rng.normal(0.95, 0.15, count), 1, 220).astype(np.int32) + 1
    return source, target


def rows_of(order: UpdateOrder, number: int, cursor: Cursor | None = None) -> Indices:
    """Return the rows of an update."""
    place = order.place(cursor or Cursor(0, number - 1), number)
    window = order.window(place.window)
    rows: Indices = window.rows[window[place.index]]
    return rows


@pytest.mark.parametrize("count", [1, 2, 7, 1000, 65537])
def test_a_permutation_without_a_table_is_one(count: int) -> None:
    found = randomness.permuted(np.arange(count), count, 7, 1)
    assert sorted(found) == list(range(count))
    some = np.arange(0, count, 3)
    assert np.array_equal(randomness.permuted(some, count, 7, 1), found[::3])
    if count > 6:
        assert not np.array_equal(found, randomness.permuted(np.arange(count), count, 7, 2))


def test_a_permutation_is_spread_evenly() -> None:
    """Of 100,000 numbers, the tenths of the positions and of the values meet equally often; chi-squared of 81."""
    found = randomness.permuted(np.arange(100_000), 100_000, 3)
    counts = np.histogram2d(np.arange(100_000), found, bins=10)[0]
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 81 + 4 * np.sqrt(2 * 81)
    steps = np.diff(found)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.02 and len(np.unique(steps)) > 50_000


def test_permutation_and_plan_are_pinned() -> None:
    """A change of these values changes every resumed run. It must be deliberate."""
    assert randomness.permuted(np.arange(10), 10, 5, 6).tolist() == PINNED_PERMUTATION
    source = np.arange(2, 42, dtype=np.int32)
    order = epoch_window(source, source[::-1].copy(), 100, seed=3, epoch=2)
    assert order.rows[order[0]].tolist() == PINNED_FIRST and order.bounds.tolist() == PINNED_BOUNDS


PINNED_PERMUTATION = [4, 9, 7, 8, 1, 6, 3, 5, 2, 0]
PINNED_FIRST = [4, 3]
PINNED_BOUNDS = [0, 2, 6, 10, 13, 25, 28, 31, 34, 40]


@pytest.mark.parametrize(("count", "update_tokens"), [(1, 4096), (40, 4096), (5000, 4096), (60000, 1000), (3, 2)])
def test_every_sentence_is_in_one_update_of_an_epoch(count: int, update_tokens: int) -> None:
    source, target = lengths(count)
    for epoch in (0, 5):
        order = epoch_window(source, target, update_tokens, epoch=epoch)
        assert sorted(order.rows) == list(range(count)) and np.diff(order.bounds).min() > 0


def test_updates_far_below_a_sentence_have_one_each() -> None:
    """Each of 3 sentences of 1,000 tokens is as long as a window of the smallest updates, and more."""
    sides = np.full(3, 1000, dtype=np.int32)
    order = epoch_window(sides, sides, 3)
    assert sorted(order.rows) == [0, 1, 2] and len(order) == 3


@pytest.mark.parametrize("update_tokens", [1000, 8192, 100_000])
def test_updates_of_an_epoch_have_the_requested_size(update_tokens: int) -> None:
    source, target = lengths(60000)
    order = epoch_window(source, target, update_tokens)
    sizes = np.add.reduceat(order.target, order.bounds[:-1])
    assert abs(sizes.mean() / update_tokens - 1) < 0.03
    assert sizes.min() > 0.8 * update_tokens and sizes.max() < 1.2 * update_tokens
    means = np.add.reduceat(order.source, order.bounds[:-1]) / np.diff(order.bounds)
    if update_tokens > 1000:  # two grains
        assert means.std() < 0.5 * source.std(), "updates mix lengths"


def test_segmentations_follow_one_another_with_their_own_lengths() -> None:
    source, target = lengths(500)
    ways = tuple(LengthsOnly(source + k, target + 2 * k) for k in range(3))
    order = EpochOrder(Corpora([CorpusPart("train", ways)]), 1, 1000)
    for epoch in (0, 1, 2, 3):
        cursor, seen = Cursor(epoch), []
        while cursor.epoch == epoch:
            seen.append(rows_of(order, 1, cursor))
            cursor = order.after(cursor)
        rows = np.concatenate(seen)
        assert sorted(rows) == list(range(500 * (epoch % 3), 500 * (epoch % 3) + 500))
        sides = order.corpora.lengths(rows)
        assert np.array_equal(sides[1], target[rows % 500] + 2 * (epoch % 3))
    assert order.updates_in(2) > order.updates_in(0), "longer segmentations make more updates"


def mixture(weights: list[tuple[Weight, ...]], temperature: float = 0.0, tokens: int = 2000) -> MixtureOrder:
    """Return the order of corpora of 4,000, 1,000, 16,000, ... pairs."""
    sizes, means = (4000, 1000, 16000), (24.0, 12.0, 30.0)
    parts = [
        CorpusPart(f"part{i}", (LengthsOnly(*lengths(sizes[i], i, means[i])),), key=i) for i in range(len(weights))
    ]
    streams = tuple(
        Stream(corpus=part.name, pairs=len(part), tokens=part.mean_target_tokens, weights=each)
        for part, each in zip(parts, weights, strict=True)
    )
    phase = Phase(first=1, temperature=temperature, streams=streams)
    return MixtureOrder(Corpora(parts), 1, tokens, phase, 10_000)


def shares_of(order: MixtureOrder, numbers: range) -> np.ndarray:
    """Return the shares of the target tokens of some updates that the corpora have."""
    tokens = np.zeros(len(order.corpora.parts))
    for number in numbers:
        rows = rows_of(order, number)
        tokens += np.bincount(order.corpora.part_of(rows), order.corpora.lengths(rows)[1], minlength=len(tokens))
    return tokens / tokens.sum()


def test_shares_hold_within_a_percent_and_updates_have_the_requested_size() -> None:
    order = mixture([(Weight(value=4.0),), (Weight(value=1.0),), (Weight(value=3.0),)])
    size = order.shares.window_updates(order.shares.segments[0])
    windows = [order.window((0, number)) for number in range(1000 // size + 1)]
    tokens = np.zeros(3)
    for window in windows:
        sizes = np.add.reduceat(window.target, window.bounds[:-1])
        assert len(window) == size and sizes.min() > 0.8 * 2000 and sizes.max() < 1.2 * 2000
        tokens += np.bincount(order.corpora.part_of(window.rows), window.target, minlength=3)
    assert np.abs(tokens / tokens.sum() - np.array([0.5, 0.125, 0.375])).max() < 0.005
    inside = shares_of(order, range(300, 480, 3))
    assert np.abs(inside - np.array([0.5, 0.125, 0.375])).max() < 0.02, "shares hold within windows, too"


def test_a_corpus_that_runs_out_starts_again_reshuffled() -> None:
    order = mixture([ALWAYS, ALWAYS])
    seen = [np.empty(0, dtype=np.int64)]
    size = order.shares.window_updates(order.shares.segments[0])
    for number in range(50):
        window = order.window((0, number))
        small = window.rows[order.corpora.part_of(window.rows) == 1] - 4000
        seen.append(small)
        assert np.bincount(small).max() <= 2, "copies of a sentence are in different windows"
    taken_of_small = np.concatenate(seen)
    epochs = order.epochs(Cursor(), 50 * size + 1)
    assert epochs[1] == pytest.approx(len(taken_of_small) / 1000)
    counts = np.bincount(taken_of_small, minlength=1000)
    assert set(counts) == {int(epochs[1]), int(epochs[1]) + 1}, "each pair once an epoch"


def test_weights_follow_a_schedule() -> None:
    order = mixture([(Weight(value=1.0, last=300),), (Weight(value=1.0, first=201),)])
    assert shares_of(order, range(190, 201)).tolist() == [1.0, 0.0]
    assert shares_of(order, range(201, 301, 4))[0] == pytest.approx(0.5, abs=0.05)
    assert shares_of(order, range(301, 310)).tolist() == [0.0, 1.0]
    straight = order.shares.positions(250)
    assert straight[1] == pytest.approx(0.5 * 2000 * 49 / order.shares.phase.streams[1].mean, abs=1)


def test_an_update_is_a_function_of_its_number() -> None:
    order, other = mixture([ALWAYS, ALWAYS]), mixture([ALWAYS, ALWAYS])
    for number in (700, 3, 257, 256):
        assert np.array_equal(rows_of(order, number), rows_of(other, number, Cursor(3, 1)))


def test_a_changed_mixture_goes_on_where_its_corpora_were() -> None:
    order = mixture([ALWAYS, ALWAYS])
    phase = order.shares.phase
    assert next_phase([phase], phase.model_copy(update={"first": 500}), {}) == (phase,), "the same mixture goes on"
    assert len(next_phase([phase], phase.model_copy(update={"tag": "target"}), {})) == 2, "tags change sides"
    before = taken(phase, 500, 2000)
    assert list(before.values()) == order.shares.positions(500)
    heavier = phase.model_copy(
        update={"first": 500, "streams": (phase.streams[1].model_copy(update={"weights": (Weight(value=2.0),)}),)}
    )
    phases = next_phase([phase], heavier, before)
    assert phases[1].streams[0].start == order.shares.positions(500)[1]
    assert phases[1].absent[0].corpus == "part0" and phases[1].absent[0].start == order.shares.positions(500)[0]
    back = next_phase(phases, phase.model_copy(update={"first": 600}), taken(phases[1], 600, 2000))
    assert back[2].streams[0].start == order.shares.positions(500)[0], "a corpus that was left out goes on, too"
    assert back[2].streams[1].start > phases[1].streams[0].start


def test_after_a_rollback_updates_have_the_sentences_after_those_that_failed() -> None:
    order = mixture([ALWAYS, (Weight(value=1.0, first=25),)], tokens=400)
    for failed in (19, 30):  # in the first window of either segment
        phases = rolled_back([order.shares.phase], failed, 16, 400)
        again = MixtureOrder(order.corpora, 1, 400, phases[-1], 10_000)
        made, fresh = (
            np.concatenate([rows_of(of, number) for number in range(first, first + 12)])
            for of, first in ((order, failed - 11), (again, 16))
        )
        large = order.corpora.part_of(fresh) == 0  # windows have an epoch of the small one
        assert (len(phases), phases[-1].first) == (2, 16)
        assert large.any() and not np.isin(fresh[large], made).any(), failed
        assert shares_of(again, range(16, 25)).tolist() == [1.0, 0.0], "the schedule is that of the numbers"
        assert 0.3 < shares_of(again, range(25, 35))[1] < 0.7
    assert rolled_back([], 30, 16, 400) == ()


def test_an_update_without_a_corpus_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"from update 101 to 199 no --data has a weight"):
        mixture([(Weight(value=1.0, last=100),), (Weight(value=1.0, first=200),)])
    with pytest.raises(ConfigError, match=r"from update 101 on no --data has a weight"):
        mixture([(Weight(value=1.0, last=100),)])
    with pytest.raises(ConfigError, match="update_tokens is 60, but"):
        mixture([ALWAYS, ALWAYS], tokens=60)


@pytest.mark.parametrize(
    ("text", "path", "weights", "tag"),
    [
        ("data", "data", "1", None),
        ("a/b=0.5@<bt>", "a/b", "0.5", "<bt>"),
        ("a@<bt>", "a", "1", "<bt>"),
        ("x=3:1-100,0.5:101-", "x", "3:1-100,0.5:101-", None),
        ("some=dir/with@at", "some=dir/with", "1", "at"),
    ],
)
def test_data_options(text: str, path: str, weights: str, tag: str | None) -> None:
    option = DataOption.parse(text)
    assert (str(option.path), ",".join(map(str, option.weights)), option.tag) == (
        path,
        weights,
        tag,
    )
    assert DataOption.parse(str(option)) == option


def test_an_existing_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a=2@b").mkdir()
    assert DataOption.parse(str(tmp_path / "a=2@b")) == DataOption(tmp_path / "a=2@b")


def test_a_tag_may_have_a_slash_behind_a_directory_that_exists(tmp_path: Path) -> None:
    option = DataOption.parse(f"{tmp_path}=0.5@</bt>")
    assert (option.path, option.tag) == (tmp_path, "</bt>") and DataOption.parse(str(option)) == option
    assert DataOption.parse(f"{tmp_path}@a/b") == DataOption(tmp_path, tag="a/b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=0", "is no weight above 0"),
        ("a=1_0", "which is none of"),
        ("a=٣", "which is none of"),
        ("a@", "--data is "),
        ("a=1:5-3", "ends before it begins"),
        ("a=1:1-10,2:10-", "update 10 has both weights 1:1-10 and 2:10-"),
        ("a=1:0-5", "from an update of 1 or more on"),
    ],
)
def test_bad_data_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataOption.parse(text)


def test_values_are_pinned() -> None:
    assert randomness.key(1, 2, 3) == 7702586659592502839
    assert randomness.permutation(8, 5, 6).tolist() == [5, 0, 4, 1, 6, 2, 7, 3]


def test_an_array_of_keys_gives_the_values_of_its_keys() -> None:
    assert randomness.keys(100, 4, 2).tolist() == [randomness.key(4, 2, i) for i in range(100)]


def test_uniform_is_uniform() -> None:
    values = np.array([randomness.uniform(9, i) for i in range(20_000)])
    assert values.min() >= 0.0 and values.max() < 1.0
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert np.abs(counts - 2000).max() < 200
