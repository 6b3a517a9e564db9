"""The GPU benchmark, rehearsed without a GPU: time on one is too short for typing errors."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.engine.settings import resolve_engine_for
from deepspeed_nmt.kernels import choice
from deepspeed_nmt.planning.gpus import usable_gib
from tests.support import ROOT

BENCHMARK = ROOT / "benchmarks" / "gpu"
PARTS = ("smoke", "journey", "host", "kernels", "attention", "training", "ranks", "marian", "decoding")
ROWS = {
    "smoke": ("trial", "product", "attention"),
    "journey": ("score-pairs",),
    "host": ("product", "forward"),
    "training": ("padded", "deep-methods"),
    "ranks": ("all_reduce", "plain"),
}
"""Rows that are rehearsed here; `run.sh all --device cpu --tiny` rehearses all."""
Program = Callable[[str], ModuleType]
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


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    """A function that imports a file of the benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK))
        # As without the tests, in which Triton's interpreter would run on a CPU, for seconds. The kernels are defined
        # before, because later tests run them in the interpreter.
        with suppress(ImportError):
            importlib.import_module("deepspeed_nmt.kernels.triton_ops")
        patch.setenv("TRITON_INTERPRET", "0")
        yield importlib.import_module


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, program: Program) -> Path:
    """The directory of the results of all parts, some of which have only some of their rows."""
    out, harness = tmp_path_factory.mktemp("gpu"), program("harness")
    for part in PARTS:
        bench = harness.Bench(part, out, torch.device("cpu"), True, 400.0, ROWS.get(part, ()))
        with torch.random.fork_rng():
            program(part).run(bench)
        assert not bench.failed and not bench.unknown, bench.rows
    return out


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


def test_training_measures_variants(results: Path) -> None:
    rows = rows_of(results / "training.json")
    assert [row["row"] for row in rows] == list(ROWS["training"])
    for row in rows:
        assert "idle" not in row, "a CPU has no launches to wait for"
        assert row["tokens_per_s"] > 0 and row["kernel_ms"] > 0 and row["planned_gib"] > 0, row
        assert 0 <= row["padding"] < 0.5 and row["shapes"] > 1 and 0 <= row["data_wait"] < 1
        assert row["layout"] == ("packed" if "layout=packed" in row["settings"] else "padded")
        groups = sum(row[name] for name in ("attention", "optimizer", "products", "copies", "other"))
        assert groups == pytest.approx(1.0)
        assert row["vocabulary"] == row["micro_tokens"] == 200


def test_variants_of_training(program: Program) -> None:
    variants = program("training").VARIANTS
    names = [each.row for each in variants]
    assert len(set(names)) == len(names) and all("compiled" in name for name in names[-2:])
    assert {"bf16", "fp16"} == {each.precision for each in variants}
    assert {"BIG 6+6", "BIG 27+27", "BIG 27+27, CAD DDR ALD", "BASE 6+6"} == {each.name for each in variants}
    assert {"base-4096", "big-4096", "deep-4096", "deep-methods-4096", "odd-vocabulary"} <= set(names)
    for each in variants:
        assert each.config(tiny=False).batch.micro_tokens == (4096 if each.row.endswith("-4096") else 65536)
        assert each.config(tiny=True).model.model_dump()["encoder_layers"] == 2


@pytest.mark.parametrize(
    ("row", "gib", "tokens"), [("big", 9.5, 8192), pytest.param("deep-methods", 80.0, 8192, marks=pytest.mark.slow)]
)
def test_micro_batches_fit_the_memory(row: str, gib: float, tokens: int, program: Program) -> None:
    """54 layers with two passes take 93.6 GiB with micro-batches of 16,384 tokens."""
    training, harness = program("training"), program("harness")
    (config,) = (each.config(tiny=False) for each in training.VARIANTS if each.row == row)
    settings = resolve_engine_for(config.engine, config.optimizer, ranks=1, data_ranks=1, native="bf16")
    memory = training.Memory(gib, (8, 0))
    assert memory.fitting_tokens(config, harness.VOCABULARY, settings) == tokens
    sizes = [memory.planned_gib(config, harness.VOCABULARY, settings, size) for size in (2 * tokens, tokens)]
    assert sizes[0] > usable_gib(gib) >= sizes[1]
    memory._gib = 3.0
    with pytest.raises(harness.Skipped, match=r"1,024 .* 3\.0 GiB"):
        memory.fitting_tokens(config, harness.VOCABULARY, settings)


def test_a_profile_without_kernels_fails(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    training = program("training")
    monkeypatch.setattr(training, "synchronise", lambda device: None)
    monkeypatch.setattr(training, "wall_seconds", lambda make, device: 1.0)
    monkeypatch.setattr(training, "profile", lambda activities: nullcontext(SimpleNamespace(events=list)))
    with pytest.raises(RuntimeError, match="CUPTI"):
        training.profiled(lambda: None, torch.device("cuda"))
    assert training.profiled(lambda: None, torch.device("cpu"))["launches"] == 0


def test_the_fastest_kernels_are_kept_when_the_time_is_over(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, on which the time is over after two operations."""
    harness, kernels = program("harness"), program("kernels")
    monkeypatch.setattr(harness.Bench, "on_gpu", True)
    monkeypatch.setattr(harness.Bench, "half", "fp16")
    monkeypatch.setattr(harness.Bench, "seconds_left", property(lambda bench: 3.5 - len(bench.rows)))
    monkeypatch.setattr(kernels, "others", lambda *_: {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    kernels.run(harness.Bench("kernels", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0))
    *rows, last = rows_of(tmp_path / "kernels.json")
    assert [row["status"] for row in rows][1:4] == ["ok", "ok", "skipped: no time left"] and last["status"] == "ok"
    measured = eval(f"{{{last['measured']}}}", {"torch": torch})
    assert measured == {(8, 6): {torch.float16: {"layer_norm": "torch", "branch_layer_norm": "torch"}}}
    monkeypatch.setattr(choice, "MEASURED", measured)
    monkeypatch.setattr(choice, "is_installed", lambda operation, name: name != "apex")
    preferred = {each: choice.preferred_on_gpu(each, (8, 6), torch.float16) for each in choice.OPERATIONS}
    assert preferred == {**choice.EXPECTED, "branch_layer_norm": "torch"}, "the others are chosen by expectation"


@pytest.mark.parametrize(
    ("tests", "counts", "status"),
    [
        ("def test_a(): pass", (1, 0, 0), "ok"),
        ("def test_a(): pass\ndef test_b(): assert False", (1, 1, 0), "failed: RuntimeError: 1 of 2 tests failed"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass", (0, 0, 1), "failed: RuntimeError: no test ran"),
    ],
)
def test_failing_and_missing_tests_fail(
    tests: str, counts: tuple[int, ...], status: str, program: Program, tmp_path: Path
) -> None:
    file = tmp_path / "test_toy.py"
    file.write_text(tests, encoding="utf-8")
    bench = program("harness").Bench("smoke", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0)
    bench.measure(lambda: program("smoke").suite(str(file), bench), check="tests", of="toy")
    (row,) = rows_of(tmp_path / "smoke.json")
    assert (row["passed"], row["failed"], row["skipped"], row["status"]) == (*counts, status)


def test_a_record_names_driver_clocks_and_commit(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("harness")
    records = importlib.import_module("records")
    smi = tmp_path / "smi"
    smi.write_text("#!/bin/sh\necho 580.1, 210 MHz, 1980 MHz, 1593 MHz, 2619 MHz, 700.00 W, 700.00 W\n")
    smi.chmod(0o755)
    state = records.gpu_state(str(smi))
    assert list(state) == list(records.GPU_STATE)
    assert (state["driver_version"], state["clocks.max.sm"], state["power.limit"]) == (
        "580.1",
        "1980 MHz",
        "700.00 W",
    )
    assert "FileNotFoundError" in records.gpu_state(str(tmp_path / "none"))["unknown"]
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.commit.__wrapped__() == "unknown"
    (tmp_path / ".gpu").mkdir()
    (tmp_path / ".gpu" / "commit").write_text("0123456789\n")
    assert records.commit.__wrapped__() == "0123456789", "that of pack.sh, without a repository"


def test_a_rank_that_fails_is_a_row(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = program("ranks")
    found = [("all_reduce", {"ms": 1.0}), ("plain", {"problem": "no result: the ranks ended with status 1"})]
    monkeypatch.setattr(ranks, "start", lambda bench, directory, names: iter(found))
    bench = program("harness").Bench("ranks", tmp_path, torch.device("cpu"), tiny=True, limit_s=60.0)
    ranks.run(bench)
    assert [row["status"][:6] for row in rows_of(tmp_path / "ranks.json")] == ["ok", "failed"] and bench.failed


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


def test_a_failing_measurement_is_a_row(tmp_path: Path, program: Program) -> None:
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


def test_the_clock_starts_when_all_shapes_have_run_twice(tmp_path: Path, program: Program) -> None:
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


def test_the_script_runs_a_part(tmp_path: Path) -> None:
    words = ["kernels", "--only", "copy", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([str(BENCHMARK / "run.sh"), *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["operation"] for row in rows_of(tmp_path / "kernels.json")] == ["copy"]


def test_what_a_gpu_machine_lacks_is_packed(stub: dict[str, str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "requirements", copy / "requirements")
    (copy / "benchmarks" / "gpu").mkdir(parents=True)
    script = shutil.copy(BENCHMARK / "pack.sh", copy / "benchmarks" / "gpu")
    subprocess.run(["bash", script], env=stub, capture_output=True)
    download, build = calls(stub)
    names = {word.partition("==")[0] for word in download.split() if "==" in word}
    assert {"pydantic", "pydantic-core", "hjson", "sacremoses", "joblib"} <= names
    assert {"pytest", "iniconfig", "pluggy", "pygments", "pytest-timeout"} <= names
    assert not names & {"torch", "numpy", "transformers", "deepspeed"}
    assert "--python-version 3.12" in download and "--abi cp312" in download
    assert build.startswith("-m pip wheel") and "deepspeed==" in build
