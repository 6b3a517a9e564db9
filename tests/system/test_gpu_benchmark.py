"""The GPU benchmark, rehearsed without a GPU: time on one is too short for typing errors."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
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
    command = [sys.executable, str(BENCHMARK / "run.py"), *PARTS, "--device", "cpu", "--tiny"]
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
    return out / "results"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_writes_its_rows(part: str, results: Path) -> None:
    content = json.loads((results / f"{part}.json").read_text(encoding="utf-8"))
    assert content["name"] == part and content["settings"]["tiny"] and content["settings"]["device"] == "cpu"
    assert (
        content["commit"] and content["machine"]["cores"] and list(content["tables"][part]["columns"])[-1] == "status"
    )
    statuses = [row["status"] for row in rows_of(results / f"{part}.json")]
    assert "ok" in statuses and not [status for status in statuses if status.startswith("failed")]


def test_training_measures_each_variant(results: Path) -> None:
    rows = rows_of(results / "training.json")
    for row in rows:
        assert "idle" not in row, "a CPU has no launches to wait for"
        assert row["tokens_per_s"] > 0 and row["kernel_ms"] > 0 and row["planned_gib"] > 0, row
        assert 0 <= row["padding"] < 0.5 and row["shapes"] > 1
        assert 0 <= row["data_wait"] < 1 and row["compiled"] == 0
        assert row["kernels"].endswith("torch"), "the kernels of a CPU"
        assert row["layout"] == ("packed" if "layout=packed" in row["settings"] else "padded")
        groups = sum(row[name] for name in ("attention", "optimizer", "products", "copies", "other"))
        assert groups == pytest.approx(1.0)
    names = [row["row"] for row in rows]
    assert len(set(names)) == len(names) and all("compiled" in name for name in names[-2:])
    ran = {row["settings"] for row in rows}
    assert {"engine.compile=off (engine.compile=layers is not rehearsed)"} == {s for s in ran if "compile" in s}
    assert "batch.layout=packed (batch.layout=padded is not rehearsed)" in ran
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


def test_decoding_measures_both_programs(results: Path) -> None:
    rows = rows_of(results / "decoding.json")
    ran = {(row["program"], row["lengths"]) for row in rows}
    assert ran == {("deepspeed_nmt", "equal"), ("deepspeed_nmt", "mixed"), ("HF generate", "equal")}
    assert {row["status"] for row in rows} == {"ok"}


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


def test_rows_are_chosen_by_their_labels(
    tmp_path: Path,
    program: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harness, run = program("harness"), program("run")
    bench = harness.Bench("part", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0, only=["a", "2", "c"])
    for name, layers in (("a", 6), ("b", 2), ("d", 4)):
        bench.measure(lambda: {"ms": 1.0}, name=name, layers=layers)
    assert [row["name"] for row in bench.rows] == ["a", "b"]
    assert bench.unknown == ["c"] and bench.known == ["2", "4", "6", "a", "b", "d"]

    command = ["run.py", "training", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", "padding"]
    monkeypatch.setattr(sys, "argv", command)
    assert run.main() == 1
    error = capsys.readouterr().err
    assert "training" in error and "padding" in error and " padded, " in error
    assert not (tmp_path / "training.json").exists()


def test_results_are_written_value_by_value_and_never_over_others(
    tmp_path: Path, program: Callable[[str], ModuleType]
) -> None:
    harness = program("harness")

    def values(file: str) -> Iterator[dict[str, object]]:
        yield {"tokens_per_s": 5.0}
        assert rows_of(tmp_path / file) == [{"name": "a", "status": "not finished", "tokens_per_s": 5.0}]
        yield {"mfu": 0.5}

    for file in ("part.json", "part-2.json"):
        bench = harness.Bench("part", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0)
        bench.measure(lambda file=file: values(file), name="a")
    for file in ("part.json", "part-2.json"):
        assert rows_of(tmp_path / file) == [{"name": "a", "tokens_per_s": 5.0, "mfu": 0.5, "status": "ok"}]


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
    shapes = [tuple(each.source_BS.shape) for update in made[: -speed.updates] for each in update.micro_batches]
    assert speed.updates == training.LEAST_TIMED, "too few updates say nothing, even if the time is over"
    assert len(made) - speed.updates == training.LEAST_WARMUP and shapes
    made.clear()
    speed = training.timed(made.append, loader, bench, 60.0)
    warmup = made[: -speed.updates]
    seen = Counter(
        (*each.source_BS.shape, *each.target_input_BT.shape) for update in warmup for each in update.micro_batches
    )
    assert speed.updates == training.TIMED and len(warmup) >= training.WARMUP and min(seen.values()) > 1


def test_synthetic_sentences_have_the_lengths_of_news_text(program: Callable[[str], ModuleType]) -> None:
    harness = program("harness")
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


def test_programs_that_a_part_starts_find_the_packed_packages(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BENCHMARK, copy / "benchmarks" / "gpu")
    (copy / "deepspeed_nmt").symlink_to(ROOT / "deepspeed_nmt")
    for name in ("records.py", "timing.py"):
        shutil.copy(ROOT / "benchmarks" / name, copy / "benchmarks")
    (copy / "tests" / "gpu").mkdir(parents=True)
    test = copy / "tests" / "gpu" / "test_gpu_varlen.py"
    test.write_text("import lacking\n\n\ndef test_it() -> None:\n    assert lacking.FOUND\n", encoding="utf-8")
    (copy / ".gpu").mkdir()
    with zipfile.ZipFile(copy / ".gpu" / "lacking-1.0-py3-none-any.whl", "w") as wheel:
        metadata = "Metadata-Version: 2.1\nName: lacking\nVersion: 1.0\n"
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for name, text in (("METADATA", metadata), ("WHEEL", tags), ("RECORD", "")):
            wheel.writestr(f"lacking-1.0.dist-info/{name}", text)
        wheel.writestr("lacking.py", "FOUND = True\n")
    command = [str(copy / "benchmarks" / "gpu" / "run.sh"), "smoke", "--device", "cpu", "--tiny"]
    done = subprocess.run(
        [*command, "--only", test.name, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(tmp_path / "out" / "smoke.json")
    assert (row["of"], row["passed"], row["failed"]) == (test.name, 1, 0)


def test_files_of_tests_that_need_a_gpu_come_first(program: Callable[[str], ModuleType]) -> None:
    smoke = program("smoke")
    names = [*smoke.FIRST, *smoke.files()]
    assert all((ROOT / name).exists() for name in names) and len(set(names)) == len(names)
    folders = [name.rpartition("/")[0] for name in names]
    assert folders == sorted(folders) and set(folders) == {"tests/gpu", "tests/kernels"}
    assert "tests/kernels/test_triton.py" in names and "tests/kernels/test_compile.py" not in names


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
    assert {"pydantic", "pydantic-core", "hjson", "sacremoses", "joblib", "pytest-timeout"} <= names
    assert not names & {"torch", "numpy", "transformers", "deepspeed"}
    assert "--python-version 3.12" in download and "--abi cp312" in download
    assert build.startswith("-m pip wheel") and "deepspeed==" in build

    lock = copy / "requirements" / "test.txt"
    lock.write_text(
        lock.read_text(encoding="utf-8").replace("pytest-timeout==", "pytest-time-out=="), encoding="utf-8"
    )
    done = pack()
    assert done.returncode == 1 and "pytest-timeout" in done.stderr
    assert len(calls(stub)) == 2
