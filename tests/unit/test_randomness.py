"""Counter-based random numbers: their values are pinned, so that no library can change a run."""

import numpy as np

from deepspeed_nmt import randomness


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
