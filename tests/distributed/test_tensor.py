"""Tensor parallelism: slices of weights, dropout masks, and cross-entropy over a sliced vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.tensor import parallelize, total_norm
from deepspeed_nmt.parallel.world import World
from tests.support import ROOT, random_corpus, run_ranks


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("tensor")
    random_corpus(directory, pairs=200, vocab=60, seed=1)
    out = directory / "report.json"
    run_ranks([str(ROOT / "tests/distributed/tensor_worker.py"), str(directory), str(out)], 2, directory)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_masks_are_equal_between_sublayers_and_differ_inside_them(report: dict[str, Any]) -> None:
    drawn = report["training"]["drawn"]
    assert len(drawn["between"]) > 10 and all(drawn["between"])
    assert len(drawn["inside"]) > 3 and not any(drawn["inside"])


def test_replicated_weights_stay_equal_to_the_bit(report: dict[str, Any]) -> None:
    training = report["training"]
    assert training["loss_equal"] and training["common_equal"]
    assert all("norm" in name or name.endswith(("out_proj.bias", "down_proj.bias")) for name in training["common"])


def test_sliced_matrices_keep_their_names(report: dict[str, Any]) -> None:
    training = report["training"]
    assert training["names_kept"]
    assert {round(share, 1) for share in training["held"].values()} == {0.5}


@pytest.mark.parametrize("states", ["1", "2", "kl"])
def test_sliced_cross_entropy_equals_that_of_all_logits(report: dict[str, Any], states: str) -> None:
    assert all(difference < 1e-12 for difference in report["cross_entropy"][states])


def test_an_attention_of_ones_own_is_sliced_by_heads_if_it_has_no_weights_of_its_own(report: dict[str, Any]) -> None:
    assert all(difference < 1e-12 for difference in report["own_attention"]["differences"])
    assert "0.gate cannot be sliced" in report["own_attention"]["refusal"]


def test_attention_weights_are_the_mean_of_the_heads_of_all_ranks(report: dict[str, Any]) -> None:
    assert [difference < 1e-12 for difference in report["attention_weights"]] == [True] * 5


def test_the_norm_is_reduced_on_the_device_also_without_a_trained_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor on the CPU, where torch has the norm of no gradients."""
    places: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: places.append(x.device.type))
    world, weight = World(0, 2, 0, torch.device("meta"), 2), nn.Parameter(torch.ones(3, device="meta"))
    total_norm([weight], [torch.ones(3, device="meta")], world)
    assert places == ["meta"]


def test_indivisible_dimensions_are_refused() -> None:
    for shape, ranks, said in (
        ({"heads": 4, "ffn_dim": 64}, 3, "3, .* 4 heads"),
        ({"heads": 2, "ffn_dim": 31}, 2, "2, .* ffn_dim 31"),
    ):
        model = build_transformer(TransformerConfig(dim=32, **shape), Vocabulary(60))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"engine.tensor_parallel is {said}"):
            parallelize(model, World(0, ranks, 0, torch.device("cpu"), ranks))
