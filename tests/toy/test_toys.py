"""Toy methods, one file and one line of registration each, work with every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepspeed_nmt import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import load_config
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods import LAYERS, MODELS, REGULARIZERS
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.search import SEARCHES
from deepspeed_nmt.selftest import compare
from deepspeed_nmt.settings_reference import settings_reference
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.toy import toy_layer, toy_model, toy_regularizer, toy_search


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (MODELS, LAYERS, REGULARIZERS, SEARCHES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr("deepspeed_nmt.recipes.RECIPES", Path(__file__).parent)
    MODELS.add(toy_model.ENTRY)
    LAYERS.add(toy_layer.ENTRY)
    REGULARIZERS.add(toy_regularizer.ENTRY)
    SEARCHES.add(toy_search.ENTRY)


@pytest.mark.parametrize("recipe", ["toy", "toy_layers"])
def test_toys_are_trained_resumed_and_used_to_translate(recipe: str, data: Path, tmp_path: Path) -> None:
    words = ["train", "--recipe", recipe, "--data", str(data), "engine.device=cpu"]
    assert main([*words, "--run", str(tmp_path / "straight")]) == 0
    assert main([*words, "--run", str(tmp_path / "stopped"), "training.max_updates=3"]) == 0
    assert main([*words, "--run", str(tmp_path / "stopped")]) == 0
    straight, resumed = (
        Checkpoint(tmp_path / name / "checkpoints" / "update-0000006").weights() for name in ("straight", "stopped")
    )
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(weight, resumed[name]) for name, weight in straight.items())
    entries = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    logged = {tag: value for entry in entries for tag, value in entry.items()}
    assert logged["train/state_norm"] > 0.0 and logged["valid/loss"] < entries[0]["train/loss"]
    found = Translator.open(tmp_path / "straight", checkpoint="last").translate(["The dog sleeps.", ""])
    assert len(found[0].tokens) == 5 and found[1].text == ""


def test_toys_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "toy", "--vocab-size", "1000", "--gpu", "a100-40g", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"] == 1000 * 16 + 16 * 16 + 16
    assert planned["as_set"]["fits"] and planned["flops_per_token"] > 0


def test_toys_have_self_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "methods", lambda quick: ["toy", "gated"])
    monkeypatch.setattr(compare, "engines", lambda world, method: [("plain", 1), ("plain+recompute", 1)])
    rows = list(compare.rows(World(0, 1, 0, torch.device("cpu"))))
    assert [row.method for row in rows] == ["toy", "toy", "gated", "gated"]
    assert all(row.passed for row in rows), rows


def test_toys_are_in_the_reference_of_settings() -> None:
    reference = settings_reference()
    for setting in ("`model.dim` | `16`", "`layer.gate`", "`objective.state_norm.weight`", "`search.length`"):
        assert setting in reference
    assert "one of transformer, recurrent, depth_growing, bert, abnet, transparent_attention, toy" in reference


def test_mistakes_in_settings_of_toys_are_explained() -> None:
    with pytest.raises(ConfigError, match=r"search\.length is a setting of search\.name=fixed_length only"):
        load_config(settings=["search.length=3"])
    with pytest.raises(ConfigError, match=r"model\.dim must be greater than or equal to 2, but is 0"):
        load_config("toy", settings=["model.dim=0"])
