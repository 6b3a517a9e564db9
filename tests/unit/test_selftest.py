"""The table of `selftest`. tests/parity compares the engines themselves."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import psutil
import pytest
import torch

from deepspeed_nmt import parity
from deepspeed_nmt.cli import main
from deepspeed_nmt.commands.selftest import _line
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import Row, build, rows

ALONE = World(0, 1, 0, torch.device("cpu"))


@pytest.mark.long
def test_an_engine_with_other_results_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(method: str, engine: str, world: World, directory: Path, **options: object) -> Engine:
        found = build(method, engine, world, directory, **options)  # type: ignore[arg-type]
        if engine == "plain+recompute":
            found._method = found._method.model_copy(update={"clip_norm": 0.4})
        return found

    monkeypatch.setattr(parity, "engines", lambda world, method: [("plain+recompute", 1), ("plain", 1)])
    monkeypatch.setattr(parity, "build", wrong)
    first, second = rows(ALONE, ["vanilla"])
    assert not first.passed and first.weights > 1e-5 and "FAIL" in _line(first)
    assert second.passed and second.resumed == 0.0 and "pass" in _line(second)


def test_methods_take_turns_with_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"engine {number}" for number in range(14)]
    monkeypatch.setattr(parity, "engines", lambda world, method: [(name, 1) for name in names])
    monkeypatch.setattr(parity, "build", lambda *arguments, **options: None)
    monkeypatch.setattr(parity, "_trained", lambda *arguments: ({}, {}, None))
    monkeypatch.setattr(parity, "_compare", lambda method, engine, *rest: Row(method, engine, 1, 1, 1e-5))
    cases = parity.methods()
    met = {case: [row.engine for row in rows(ALONE, cases) if row.method == case] for case in cases}
    assert met.pop("deep_decoder") == names, "the quick one meets all"
    assert {len(engines) for engines in met.values()} <= {2, 3}
    assert {engine for engines in met.values() for engine in engines} == set(names)
    assert [row.engine for row in rows(ALONE, ["abnet"])] == names, "as does the only one"


def test_nan_does_not_pass() -> None:
    assert not Row("vanilla", "plain", 1, 1, 1e-5, float("nan"), 0.0, 0.0, 0.0).passed
    assert Row("vanilla", "plain", 1, 1, 1e-5, 1e-5, 0.0, 0.0, 0.0).passed


def test_one_nan_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever it is: a maximum leaves out what is not comparable."""
    whole = ([2.0] * parity.UPDATES, [1.0] * parity.UPDATES, {"a": torch.ones(2), "b": torch.ones(2)})
    half = parity.UPDATES // 2

    def row(loss: list[float], norm: list[float], weights: dict[str, torch.Tensor], rest: list[float]) -> Row:
        state = SimpleNamespace(weights={}), None, None
        monkeypatch.setattr(parity, "loader_of", lambda *arguments: None)
        monkeypatch.setattr(parity, "build", lambda *arguments, **options: MagicMock())
        monkeypatch.setattr(parity, "_trained", lambda *arguments: ({"loss": loss, "norm": norm}, weights, state))
        monkeypatch.setattr(parity, "train", lambda *arguments: {"loss": rest})
        reference = {"loss": whole[0], "norm": whole[1]}
        return parity._compare("vanilla", "plain", ALONE, tmp_path, reference, whole[2])

    assert row(*whole, whole[0][half:]).passed
    late = [*[2.0] * (parity.UPDATES - 1), math.nan]
    assert not row(late, whole[1], whole[2], whole[0][half:]).passed
    assert not row(whole[0], late, whole[2], whole[0][half:]).passed
    assert not row(*whole, late[half:]).passed
    assert not row(*whole[:2], {**whole[2], "b": torch.tensor([1.0, math.nan])}, whole[0][half:]).passed


def test_packed_batches_in_16_bit_are_close_to_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "engines", lambda world, method: [("plain:bf16+packed", 1)])
    (row,) = rows(ALONE, ["vanilla"])
    assert row.passed and max(row.loss, row.norm, row.weights) > 1e-5


def test_a_busy_comparison_has_loaded_cores_and_filled_memory() -> None:
    children = psutil.Process().children
    before = len(children())
    with parity.busy(ALONE):
        assert torch.empty(3).isnan().all()
        assert len(children()) == before + (os.cpu_count() or 1)
    assert len(children()) == before
    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.slow
def test_the_command_over_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--ranks", "2", "--device", "cpu", "--quick", "--json", "--busy"]) == 0
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert len(found) > 16 and all(row["passed"] for row in found)
    assert sum(row["busy"] for row in found) == len(found) // 2


def test_an_engine_leaves_no_tensor_parallelism_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of two ranks goes from engines with tensor parallelism to those without it."""
    groups = pytest.importorskip("deepspeed.utils.groups")
    from deepspeed_nmt.engine.deepspeed import DeepSpeedEngine

    monkeypatch.setattr(groups, "mpu", object())
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    engine._engine = SimpleNamespace(destroy=lambda: None)
    engine.close()
    assert groups.mpu is None
