"""The GPU benchmark, rehearsed without a GPU: time on one is too short for typing errors."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from tests.commands import shell_environment
from tests.support import ROOT

BENCHMARK = ROOT / "benchmarks" / "gpu"
PARTS = ("smoke", "kernels", "attention", "training", "marian", "decoding")
STUB = """#!/usr/bin/env bash
# A Python that records its arguments, and fails at one part.
printf '%s ' "$@" >>"$STUB_LOG"
echo >>"$STUB_LOG"
case "$*" in *"run.py kernels"*) exit 3 ;; esac
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a record, without cells that are empty."""
    (table,) = json.loads(path.read_text(encoding="utf-8"))["tables"].values()
    named = ([*zip(table["columns"], row, strict=True)] for row in table["rows"])
    return [{title: cell for title, cell in row if cell is not None} for row in named]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A function that imports a file of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARK))
    return importlib.import_module


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the results of all parts."""
    out = tmp_path_factory.mktemp("gpu")
    words = ["run.py", *PARTS, "--device", "cpu", "--tiny", "--out", str(out / "results")]
    environment = {"TORCH_EXTENSIONS_DIR": str(out / "extensions"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *words], env=shell_environment(**environment), cwd=BENCHMARK, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return out / "results"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_writes_its_rows(part: str, results: Path) -> None:
    content = json.loads((results / f"{part}.json").read_text(encoding="utf-8"))
    assert content["name"] == part and content["settings"]["tiny"] and content["settings"]["device"] == "cpu"
    assert (
        content["commit"] and content["machine"]["cores"] and list(content["tables"][part]["columns"])[-1] == "status"
    )
    rows = rows_of(results / f"{part}.json")
    statuses = [row["status"] for row in rows]
    assert "ok" in statuses and not [status for status in statuses if status.startswith("failed")]
    if part == "decoding":
        ran = {(row["program"], row["lengths"]) for row in rows}
        assert ran == {("deepspeed_nmt", "equal"), ("deepspeed_nmt", "mixed"), ("HF generate", "equal")}


def test_training_measures_each_variant(results: Path) -> None:
    rows = rows_of(results / "training.json")
    for row in rows:
        assert "idle" not in row, "a CPU has no launches to wait for"
        assert row["tokens_per_s"] > 0 and row["kernel_ms"] > 0 and row["planned_gib"] > 0, row
        assert 0 <= row["padding"] < 0.5 and row["shapes"] > 1 and 0 <= row["data_wait"] < 1
        assert row["layout"] == ("packed" if "layout=packed" in row["settings"] else "padded")
        groups = sum(row[name] for name in ("attention", "optimizer", "products", "copies", "other"))
        assert groups == pytest.approx(1.0)
    names = [row["row"] for row in rows]
    assert len(set(names)) == len(names) and all("compiled" in name for name in names[-2:])
    assert {"bf16", "fp16"} == {row["precision"] for row in rows}
    assert {"BIG 6+6", "BIG 27+27", "BIG 27+27, CAD DDR ALD", "BASE 6+6"} == {row["model"] for row in rows}


def test_ours_also_trains_on_the_batches_of_the_fastest_marian(results: Path) -> None:
    rows = rows_of(results / "marian.json")
    *theirs, default, same = rows
    assert {(row["program"], row["max_padding"]) for row in theirs} == {
        ("HF Marian", padding) for padding in (0.1, 0.25, 0.5)
    }
    assert {row["settings"] for row in theirs} == {"autocast", "16-bit weights"}
    assert {row["program"] for row in (default, same)} == {"deepspeed_nmt"}
    fastest = max(theirs, key=lambda row: float(row["tokens_per_s"]))
    for column in ("max_padding", "layout", "updates", "micro_batches", "shapes", "padding"):
        assert same[column] == fastest[column], column
    assert len({row["padding"] for row in theirs}) > 1, "the bounds on padding make no difference"
    for row in (default, same):
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / fastest["tokens_per_s"])


def test_a_failing_measurement_is_a_row(tmp_path: Path, program: Callable[[str], ModuleType]) -> None:
    harness = program("harness")

    def fail() -> dict[str, object]:
        raise RuntimeError("out of memory\ndetails")

    def skip() -> dict[str, object]:
        raise harness.Skipped("no such kernel")

    bench = harness.Bench("part", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0)
    bench.measure(fail, name="first")
    bench.measure(skip, name="second")
    bench.measure(lambda: {"ms": 1.5}, name="third")
    rows = rows_of(tmp_path / "part.json")
    assert rows == [
        {"name": "first", "status": "failed: RuntimeError: out of memory"},
        {"name": "second", "status": "skipped: no such kernel"},
        {"name": "third", "ms": 1.5, "status": "ok"},
    ]
    late = harness.Bench("late", tmp_path, torch.device("cpu"), tiny=True, limit_s=0.0)
    late.measure(fail, name="never")
    assert rows_of(tmp_path / "late.json") == [{"name": "never", "status": "skipped: no time left"}]
    assert bench.failed and not late.failed


def test_the_clock_starts_when_all_shapes_have_run_twice(
    tmp_path: Path, program: Callable[[str], ModuleType]
) -> None:
    harness, training = program("harness"), program("training")
    bench = harness.Bench("part", tmp_path, torch.device("cpu"), tiny=False, limit_s=60.0)
    corpus = harness.write_corpus(tmp_path, 400, harness.TINY_VOCABULARY)
    batch = BatchConfig(update_tokens=300, micro_tokens=200, layout="packed")
    loader = TrainLoader.of_corpus(corpus, batch, 1, 0, 1, harness.TINY_VOCABULARY)
    made: list[Update] = []
    speed = training.timed(made.append, loader, bench, 0.0)
    assert speed.updates == training.LEAST_TIMED, "too few updates say nothing, even if the time is over"
    assert len(made) - speed.updates == training.LEAST_WARMUP
    made.clear()
    speed = training.timed(made.append, loader, bench, 60.0)
    warmup = made[: -speed.updates]
    seen = Counter(
        (*each.source_BS.shape, *each.target_input_BT.shape) for update in warmup for each in update.micro_batches
    )
    assert speed.updates == training.TIMED and len(warmup) >= training.WARMUP and min(seen.values()) > 1


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


def test_the_script_runs_all_parts_and_hands_on_its_options(stub: dict[str, str], tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(BENCHMARK / "run.sh"), *words]
        return subprocess.run(command, env=stub, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = run("smoke", "--out", "results", "--tiny")
    assert done.returncode == 0 and f"--out {tmp_path}/results" in calls(stub)[-1], done.stderr
    Path(stub["STUB_LOG"]).unlink()
    done = run("all", "--out", "out", "--tiny", "--device", "cpu")
    started = [line for line in calls(stub) if "run.py" in line]
    assert [line.split()[1] for line in started] == list(PARTS), "no part ends another"
    assert all(line.endswith(f"--out {tmp_path / 'out'} --tiny --device cpu ") for line in started)
    assert done.returncode == 1 and "kernels failed with status 3" in done.stderr
    run("training", "--only", "big", "padded", "--out", "out")
    assert calls(stub)[-1].endswith(f"--out {tmp_path / 'out'} --only big padded ")
    for words in (["speed"], ["training", "--only"], ["training", "--only", "--tiny"]):
        assert run(*words).returncode == 2, words


def test_what_a_gpu_machine_lacks_is_packed(stub: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "requirements", copy / "requirements")
    (copy / "benchmarks" / "gpu").mkdir(parents=True)
    script = shutil.copy(BENCHMARK / "pack.sh", copy / "benchmarks" / "gpu")
    subprocess.run(["bash", script], env=stub, capture_output=True)
    download, build = calls(stub)
    names = {word.partition("==")[0] for word in download.split() if "==" in word}
    assert {"pydantic", "pydantic-core", "hjson", "sacremoses", "joblib", "pytest-timeout"} <= names
    assert not names & {"torch", "numpy", "transformers", "deepspeed"}
    assert "--python-version 3.12" in download and "--abi cp312" in download
    assert build.startswith("-m pip wheel") and "deepspeed==" in build
