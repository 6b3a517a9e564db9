"""Every benchmark runs, with models and data so small that its figures mean nothing."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch.multiprocessing as processes

from deepspeed_nmt.cli import main
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.transformer import TransformerConfig
from tests.support import ROOT

SMALL = {"dim": 16, "ffn_dim": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
STEP = dict(zip(("DIM", "FFN", "HEADS", "LAYERS", "VOCABULARY", "TOKENS"), (16, 32, 2, 1, 100, 120), strict=True))
SIZES = ["--dim", "16", "--layers", "2", "--tokens", "64", "--vocab", "100", "--rounds", "1", "--device", "cpu"]
MODEL_54 = ["model.dim=16", "model.ffn_dim=32", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"]
OPTIONS: dict[str, list[str]] = {
    "step": ["--rounds", "1"],
    "watching": ["--rounds", "1"],
    "layouts": ["--rounds", "1"],
    "family_cost": SIZES,
    "objectives": [*SIZES, "--variants", "plain", "cad+ddr+ald", "r_drop", "2x2"],
    "saving": SIZES,
    "prepare": ["--pairs", "300", "--workers", "1", "--rounds", "1"],
    "first_update": ["--pairs", "20000", "--rounds", "1", "--step", "0.001"],
    "launches": ["--norm", "pre", "--layout", "packed", "--tokens", "64"],
    "host_time": ["--rounds", "1", "--bound", "inf"],
    "decode": ["--layers", "1", "--beams", "2", "--batches", "1", "--rounds", "1"],
    "flips": ["--flips", "2"],
    "golden": ["--family", "vanilla"],
    "big_54": ["--ranks", "1", "--updates", "1", "--settings", "layer.drop_depth=1", *MODEL_54],
}
"""Options with which a benchmark takes seconds."""
ELSEWHERE = {"kills": "tests/system/test_kills.py"}
LONG = {
    "planted": "runs the unit tests again and again",
    "poisson": "runs a job of `kills` for minutes",
    "hosts": "needs root and SLURM",
    "peers": "trains by command for minutes, other programs too",
}
"""Benchmarks that only start, see tests/docs/test_results.py, like the experiments, which train for hours."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """benchmarks/run.py; its neighbours are imported anew, and forgotten."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # the driver adds to it
    monkeypatch.delitem(sys.modules, "run", raising=False)
    yield importlib.import_module("run")
    for name in set(sys.modules) - modules:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def small_transformer(**settings: Any) -> TransformerConfig:
    """Return the settings of a small model in place of others."""
    return TransformerConfig.model_validate({**settings, **SMALL})


def replacements(name: str, module: ModuleType) -> Mapping[str, Any]:
    """Return what takes the place of constants and functions of a benchmark, for sizes that are no options."""
    if name == "step":
        return STEP
    if name == "watching":
        step = importlib.import_module("step")
        for constant, value in STEP.items():
            setattr(step, constant, value)
        return {"TransformerConfig": small_transformer, "V": Vocabulary(100)}
    if name == "layouts":
        write: Callable[..., Any] = module.write_corpus
        few = lambda directory, pairs, vocabulary: write(directory, 3000, vocabulary)  # noqa: E731
        return {"TransformerConfig": small_transformer, "VOCABULARY": Vocabulary(100), "write_corpus": few}
    if name == "prepare":
        return {"VOCABULARY_PAIRS": 2000, "_prepared": partial(with_few_tokens, module._prepared)}
    if name == "host_time":  # the JIT is Triton's interpreter here
        ops = importlib.import_module("deepspeed_nmt.kernels.triton_ops")
        return {"launching_nothing": lambda: mock.patch.object(ops, "_launch", lambda *_, **__: None)}
    if name == "decode":
        return {"DIM": 16, "FFN": 32, "HEADS": 2, "ENCODER_LAYERS": 1, "STEPS": 4, "V": Vocabulary(100)}
    return {}


def with_few_tokens(prepared: Callable[..., Path], *arguments: Any, **options: Any) -> Path:
    """Prepare text with a small vocabulary."""
    return prepared(*arguments, **{**options, **({"vocab_size": 300} if "vocab_size" in options else {})})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_benchmark_runs(name: str, driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"launches": "triton", "host_time": "triton", "decode": "ctranslate2"}
    pytest.importorskip(needed.get(name, "torch"))
    module = importlib.import_module(name)
    for attribute, value in replacements(name, module).items():
        monkeypatch.setattr(module, attribute, value)
    if name == "first_update":  # in this process, which has torch
        monkeypatch.setattr(module.subprocess, "check_output", lambda words: json.dumps(module._report(*words[2:])))
    if name == "flips":
        forked = partial(processes.start_processes, start_method="fork")
        monkeypatch.setattr(module.processes, "spawn", forked)
    driver.measure(name, ["--results", str(tmp_path), *OPTIONS[name]])
    (record,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json"))
    assert record["name"] == name and all(table["rows"] for table in record["tables"].values())


def test_the_experiment_of_loops_goes_on_where_it_ended(
    driver: ModuleType, data: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collapse, loops = (importlib.import_module(name) for name in ("collapse", "loops"))
    for language in ("en", "de"):
        shutil.copyfile(data.parent / "text" / f"test.{language}", tmp_path / f"val.{language}")
    trained: list[list[str]] = []
    monkeypatch.setattr(loops, "prepare", lambda text, out: {"data": data})
    monkeypatch.setattr(collapse, "_run", lambda words, run, limit_s: trained.append(words) or main(words))
    settings = [word for word in small if "_layers" not in word]
    words = ["--results", str(tmp_path), "--text", str(tmp_path), "--out", str(tmp_path), "--updates", "2"]
    for jobs in (["loops_any:1"], ["loops_any:1", "exits_taught:2"]):
        driver.measure("loops", [*words, "--jobs", *jobs, "--set", *settings])
    record = json.loads((tmp_path / "loops.json").read_text(encoding="utf-8"))
    assert [(row["arm"], row["status"], row["update"]) for row in record["rounds"]] == [
        ("loops_any", 0, 2), ("exits_taught", 0, 2),
    ] and len(trained) == 2  # fmt: skip
    measured = [[one["depth"] for one in row["depths"]] for row in record["rounds"]]
    assert measured == [list(loops.DEPTHS), [1, 2, 3, 4]]


def test_every_benchmark_is_known(driver: ModuleType) -> None:
    names = {name for name, path in driver.NAMES.items() if path.parent.name != "experiments"}
    assert names == {*OPTIONS, *ELSEWHERE, *LONG}
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
