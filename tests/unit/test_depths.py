"""Pareto front of depths, the cheapest sufficient depth, and the oracle over sentences."""

from __future__ import annotations

from deepspeed_nmt.evaluate.depths import Depth, cheapest, oracle, pareto_front

DEPTHS = [Depth(1, 1, 20.0, 1.0), Depth(1, 2, 24.0, 2.0), Depth(2, 1, 23.0, 1.5), Depth(2, 2, 24.3, 3.0)]


def test_the_front_has_the_depths_that_none_dominates() -> None:
    assert [depth.name for depth in pareto_front(DEPTHS)] == ["1-1", "2-1", "1-2", "2-2"]
    slow = Depth(3, 1, 22.0, 9.0)
    assert slow not in pareto_front([*DEPTHS, slow])


def test_the_cheapest_loses_at_most_the_given_bleu() -> None:
    assert cheapest(DEPTHS, 0.0).name == "2-2"
    assert cheapest(DEPTHS, 0.5).name == "1-2"
    assert cheapest(DEPTHS, 1.5).name == "2-1"
    assert cheapest(DEPTHS, 99.0).name == "1-1"


def test_the_oracle_chooses_the_best_depth_or_the_first_of_equals() -> None:
    assert oracle([[1.0, 5.0, 2.0], [1.0, 6.0, 0.0]]) == [0, 1, 0]
