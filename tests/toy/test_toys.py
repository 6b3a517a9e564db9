"""Toy methods, one file and one line of registration each, work with every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepspeed_nmt import Translator, parity
from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.plugins import registry_of
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.models import two_pairs
from tests.support import ZERO2, run_ranks
from tests.system.conftest import SMALL
from tests.toy import ENTRIES, toy_attention


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_nmt.recipes.RECIPES", Path(__file__).parent)
    for entry in ENTRIES:
        monkeypatch.setitem(registry_of(entry), entry.name, entry)


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
    first, empty = Translator.open(tmp_path / "straight", checkpoint="last").translate(["The dog sleeps.", ""])
    assert len(first.tokens) == 5 and empty.text == ""


def test_decoder_layers_of_others_are_refused_for_a_model_that_makes_its_own() -> None:
    message = r"layer.name=cross_attention_drop .* model.name=toy .* layer.name=standard"
    with pytest.raises(ConfigError, match=message):
        validate({"model": {"name": "toy"}, "layer": {"name": "cross_attention_drop", "drop_ratio": 0.5}})


@pytest.mark.parametrize("engine", ["plain", "zero2"])
def test_an_optimizer_of_one_state_is_trained_and_resumed_to_the_bit(engine: str, data: Path, tmp_path: Path) -> None:
    words = ["-m", "deepspeed_nmt", "train", "--data", str(data), *SMALL, "optimizer.name=lion"]
    words += ["optimizer.weight_decay=0.1", "optimizer.lr=1e-3", "training.norms_every=2", "validation.metrics=[]"]
    words += ["engine.name=plain"] if engine == "plain" else ["engine.name=deepspeed", ZERO2]
    for run, updates in (("straight", 6), ("stopped", 3), ("stopped", 6)):
        command = [*words, f"training.max_updates={updates}", "--run", str(tmp_path / run)]
        run_ranks(command, 1 if engine == "plain" else 2, tmp_path, DEEPSPEED_NMT_PLUGINS="tests.toy")
    straight, resumed = (
        Checkpoint(tmp_path / name / "checkpoints" / "update-0000006") for name in ("straight", "stopped")
    )
    for name, weight in straight.weights().items():
        assert torch.equal(weight, resumed.weight(name)), name
        states = straight.optimizer_state(name, "exp_avg"), resumed.optimizer_state(name, "exp_avg")
        assert torch.equal(*states) and states[0].any(), name
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("straight", "stopped")]
    entries = [[json.loads(line) for line in log] for log in logs]
    values = [[entry for entry in log if not {"valid/loss", "collapse/nll"} & entry.keys()] for log in entries]
    values = [
        [{tag: value for tag, value in entry.items() if not tag.startswith("perf/")} for entry in log]
        for log in values
    ]
    assert values[0] == values[1], "the sums of the log continue, too"
    tags = {tag for line in values[0] for tag in line}
    assert any(tag.startswith("norm/gradient/") for tag in tags), tags
    assert not any(tag.startswith("norm/update/") for tag in tags), "Lion does not say how weights change"


def test_toys_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "toy", "--vocab-size", "1000", "--gpu", "a100-40g", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"] == 1000 * 16 + 16 * 16 + 16
    assert planned["as_set"]["fits"] and planned["flops_per_token"] > 0


def test_toys_have_self_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "engines", lambda world, method: [("plain", 1), ("plain+recompute", 1)])
    # Of several cases at once, each is compared under some of the engines.
    rows = [row for case in ("toy", "gated") for row in parity.rows(World(0, 1, 0, torch.device("cpu")), [case])]
    assert [row.method for row in rows] == ["toy", "toy", "gated", "gated"]
    assert all(row.passed for row in rows), rows


def test_the_toy_loss_is_its_equation() -> None:
    settings = {"model": {"dim": 16, "ffn_dim": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}}
    config = validate({**settings, "objective": {"end_weighted": {"end_weight": 3.0}}})
    vocabulary, batch = Vocabulary(30), two_pairs()
    model, objective = build_model(config, vocabulary).double().eval(), build_objective(config, vocabulary)
    log_p_BTV = model.projection(model(batch)).log_softmax(dim=2)
    nll_BT = -log_p_BTV.gather(2, batch.target_output_BT.unsqueeze(2)).squeeze(2) * batch.target_mask
    weights_BT = 1.0 + 2.0 * (batch.target_output_BT == vocabulary.eos)
    torch.testing.assert_close(objective(model, batch).loss, (weights_BT * nll_BT).sum())


def test_the_toy_attention_is_its_equation() -> None:
    torch.manual_seed(1)
    attention = toy_attention.CosineAttention(8, 2).double()
    x_TD = torch.randn(5, 8, dtype=torch.float64)
    heads = []
    for part in range(2):
        rows = slice(4 * part, 4 * part + 4)
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        q_TK, k_TK, v_TK = (layer(x_TD)[:, rows] for layer in layers)
        cosines_TT = torch.nn.functional.cosine_similarity(q_TK.unsqueeze(1), k_TK.unsqueeze(0), dim=2)
        hidden_TT = torch.ones(5, 5).triu(1).bool()
        heads.append((10.0 * cosines_TT).masked_fill(hidden_TT, -torch.inf).softmax(dim=1) @ v_TK)
    expected_TD = attention.out_proj(torch.cat(heads, dim=1))
    x_1TD = x_TD.unsqueeze(0)
    torch.testing.assert_close(attention(x_1TD, x_1TD, causal=True).total()[0], expected_TD)
