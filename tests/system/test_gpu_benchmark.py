"""The GPU benchmark, rehearsed without a GPU: time on one is too short for typing errors."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

BENCHMARK = ROOT / "benchmarks" / "gpu"
PARTS = ("smoke", "kernels", "attention", "training", "marian", "decoding")
STUB = """#!/usr/bin/env bash
# A Python that records its arguments, and fails at one part.
printf '%s ' "$@" >>"$STUB_LOG"
echo >>"$STUB_LOG"
case "$*" in *"run.py kernels"*) exit 3 ;; esac
"""


def python_of_the_gpu_machine() -> str:
    """Return a Python 3.12 that has the packages, as GPU machines have; this one if there is none."""
    found = shutil.which("python3.12")
    if sys.version_info[:2] != (3, 12) and found is not None:
        done = subprocess.run([found, "-c", "import pydantic, torch, transformers"], capture_output=True, check=False)
        if done.returncode == 0:
            return found
    return sys.executable


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the directory of the results of all parts."""
    out = tmp_path_factory.mktemp("gpu")
    command = [python_of_the_gpu_machine(), str(BENCHMARK / "run.py"), *PARTS, "--device", "cpu", "--tiny"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(out / "extensions"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [*command, "--out", str(out / "results")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    yield out / "results"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_writes_its_rows(part: str, results: Path) -> None:
    content = json.loads((results / f"{part}.json").read_text(encoding="utf-8"))
    assert content["part"] == part and content["tiny"] and content["device"] == "cpu"
    statuses = [row["status"] for row in content["rows"]]
    assert "ok" in statuses and not [status for status in statuses if status.startswith("failed")]
    table = (results / f"{part}.md").read_text(encoding="utf-8").splitlines()
    assert table[0].startswith(f"**{part}**") and len(table) == 4 + len(statuses)
    assert {line.count("|") for line in table[2:]} == {table[2].count("|")}


def test_training_measures_each_variant(results: Path) -> None:
    rows = json.loads((results / "training.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert "idle" not in row, "a CPU has no launches to wait for"
        assert row["tokens_per_s"] > 0 and row["kernel_ms"] > 0 and row["planned_gib"] > 0, row
        assert 0 <= row["padding"] < 0.5 and row["shapes"] > 1
        groups = sum(row[name] for name in ("attention", "optimizer", "products", "copies", "other"))
        assert groups == pytest.approx(1.0)
    ran = {row["settings"] for row in rows}
    assert {"engine.compile=off (engine.compile=layers is not rehearsed)"} == {s for s in ran if "compile" in s}
    assert "batch.layout=packed (batch.layout=padded is not rehearsed)" in ran
    assert {"bf16", "fp16"} == {row["precision"] for row in rows}
    assert {"BIG 6+6", "BIG 27+27", "BIG 27+27, CAD DDR ALD", "BASE 6+6"} == {row["model"] for row in rows}


def test_both_programs_train_on_the_same_batches(results: Path) -> None:
    rows = json.loads((results / "marian.json").read_text(encoding="utf-8"))["rows"]
    assert {row["program"] for row in rows} == {"HF Marian", "deepspeed_nmt"}
    batches = {(row["updates"], row["micro_batches"], row["shapes"], row["padding"]) for row in rows}
    assert len(batches) == 1 and rows[-1]["speedup"] > 0


def test_decoding_measures_each_way_to_take_steps(results: Path) -> None:
    rows = json.loads((results / "decoding.json").read_text(encoding="utf-8"))["rows"]
    ran = {(row["steps"], row["lengths"]): row["status"] for row in rows}
    assert ran == {
        **{("graphs", lengths): "skipped: CUDA graphs need a GPU" for lengths in ("equal", "mixed")},
        **{(steps, lengths): "ok" for steps in ("static", "growing") for lengths in ("equal", "mixed")},
        ("-", "equal"): "ok",
    }


def test_a_failing_measurement_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    harness = importlib.import_module("harness")

    def fail() -> dict[str, object]:
        raise RuntimeError("out of memory\ndetails")

    def skip() -> dict[str, object]:
        raise harness.Skipped("no such kernel")

    bench = harness.Bench("part", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0)
    bench.measure(fail, name="first")
    bench.measure(skip, name="second")
    bench.measure(lambda: {"ms": 1.5}, name="third")
    rows = json.loads((tmp_path / "part.json").read_text(encoding="utf-8"))["rows"]
    assert rows == [
        {"name": "first", "status": "failed: RuntimeError: out of memory"},
        {"name": "second", "status": "skipped: no such kernel"},
        {"name": "third", "ms": 1.5, "status": "ok"},
    ]
    late = harness.Bench("late", tmp_path, torch.device("cpu"), tiny=True, limit_s=0.0)
    late.measure(fail, name="never")
    assert "skipped: no time left" in (tmp_path / "late.md").read_text(encoding="utf-8")
    assert bench.failed and not late.failed


def test_synthetic_sentences_have_the_lengths_of_news_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK))
    harness = importlib.import_module("harness")
    assert sum(percent for _, percent in harness.LENGTHS) == 100
    source, target = harness.sentence_lengths(20_000)
    assert 24.0 < source.mean() < 28.0 and 1.03 < target.mean() / source.mean() < 1.1
    assert source.min() == 1 and source.max() == 96


@pytest.fixture
def stub(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which $PYTHON records its arguments."""
    program = tmp_path / "python"
    program.write_text(STUB, encoding="utf-8")
    program.chmod(0o755)
    return {**os.environ, "PYTHON": str(program), "STUB_LOG": str(tmp_path / "log")}


def calls(stub: dict[str, str]) -> list[str]:
    """Return the command lines that the stub has recorded."""
    return Path(stub["STUB_LOG"]).read_text(encoding="utf-8").splitlines()


def test_results_are_in_the_callers_folder(stub: dict[str, str], tmp_path: Path) -> None:
    command = [str(BENCHMARK / "run.sh"), "smoke", "--out", "results", "--tiny"]
    done = subprocess.run(command, env=stub, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"--out {tmp_path}/results" in calls(stub)[-1], done.stderr


def test_no_part_ends_another(stub: dict[str, str], tmp_path: Path) -> None:
    command = [str(BENCHMARK / "run.sh"), "all", "--out", str(tmp_path / "out"), "--tiny", "--device", "cpu"]
    done = subprocess.run(command, env=stub, capture_output=True, text=True, check=False)
    started = [line for line in calls(stub) if "run.py" in line]
    assert [line.split()[1] for line in started] == list(PARTS)
    assert all(line.endswith(f"--out {tmp_path / 'out'} --tiny --device cpu ") for line in started)
    assert done.returncode == 1 and "kernels failed with status 3" in done.stderr

    done = subprocess.run([str(BENCHMARK / "run.sh"), "speed"], env=stub, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "PART must be smoke, " in done.stderr


def test_what_a_gpu_machine_lacks_is_packed(stub: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "requirements", copy / "requirements")
    (copy / "benchmarks" / "gpu").mkdir(parents=True)
    script = shutil.copy(BENCHMARK / "pack.sh", copy / "benchmarks" / "gpu")

    def pack() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", script], env=stub, capture_output=True, text=True, check=False)

    pack()
    download, build = calls(stub)
    names = {word.partition("==")[0] for word in download.split() if "==" in word}
    assert {"pydantic", "pydantic-core", "hjson", "sacremoses", "pytest-timeout"} <= names
    assert not names & {"torch", "numpy", "transformers", "deepspeed"}
    assert "--python-version 3.12" in download and "--abi cp312" in download
    assert build.startswith("-m pip wheel") and "deepspeed==" in build

    lock = copy / "requirements" / "test.txt"
    lock.write_text(
        lock.read_text(encoding="utf-8").replace("pytest-timeout==", "pytest-time-out=="), encoding="utf-8"
    )
    done = pack()
    assert done.returncode == 1 and "requirements/ must pin pytest-timeout, but does not" in done.stderr
    assert len(calls(stub)) == 2
