"""Do the tests pass on this GPU, which kernel of attention does torch take, and how fast is a matrix product?

First the trial of the kernels, which fails if any operation falls back to torch: all other figures depend on it. Then
the tests that need a GPU, one row for each file; the selftest over all engines; the SDPA backend that runs for each
kind of attention; and the speed of a large product in 16 bit, which bounds all others.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import torch
from attention import KINDS, micro_batches, padded_call
from harness import NO_KERNELS, Bench, DeviceTimer, Skipped, Values
from torch.profiler import ProfilerActivity, profile

from deepspeed_nmt.kernels import choice
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.kernels.precision import DTYPES, Precision

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("tests/gpu/test_gpu_varlen.py", "tests/gpu/test_gpu_decoding.py")
"""Tests of what has no other test: attention of packed sentences, and decoding on a GPU."""
REHEARSED = ("tests/kernels/test_references.py",)
"""Tests that run without a GPU."""


def files() -> list[str]:
    """Return the other files of tests, those of models first."""
    found = [path for folder in ("tests/gpu", "tests/kernels") for path in sorted(ROOT.glob(f"{folder}/test_*.py"))]
    names = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in names if name not in FIRST]


def trial(precision: Precision, bench: Bench) -> Iterator[Values]:
    """Choose the kernels as training does, and fail if one that is preferred here cannot be used."""
    kernels, dtype = Kernels(), DTYPES[precision]
    yield {"kernels": kernels.describe(bench.device, dtype)}
    if bench.on_gpu:
        capability = torch.cuda.get_device_capability(bench.device)
        lost = [
            operation
            for operation, name in kernels.choices(bench.device, dtype).items()
            if name != choice.preferred_on_gpu(operation, capability, dtype)
        ]
        if lost:
            raise RuntimeError(f"{', '.join(lost)} fell back to torch; the warning above says why")


def suite(path: str, bench: Bench) -> Iterator[Values]:
    """Run a file of tests, and yield their numbers; fail if one fails, or if none runs."""
    if importlib.util.find_spec("pytest") is None:
        raise RuntimeError("pytest is not installed; benchmarks/gpu/pack.sh collects it")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        options = ["-q", "-m", "", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, path]
        status = start(command, bench)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} without a report")
        tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = {
        kind: [each for each in tests if each.find(kind) is not None] for kind in ("failure", "error", "skipped")
    }
    broken = [*outcomes["failure"], *outcomes["error"]]
    ran = len(tests) - len(outcomes["skipped"])
    names = ", ".join(str(each.get("name")) for each in broken)
    yield {"passed": ran - len(broken), "failed": len(broken), "skipped": len(outcomes["skipped"]), "which": names}
    if broken or not ran:
        raise RuntimeError(f"{len(broken)} of {ran} tests failed" if ran else "no test ran")


def selftest(bench: Bench) -> Values:
    """Train small models under all engines, and compare them."""
    if bench.tiny:
        raise Skipped("takes minutes")
    status = start([sys.executable, "-m", "deepspeed_nmt", "selftest", "--quick"], bench)
    if status:
        raise RuntimeError(f"ended with status {status}")
    return {}


def start(command: list[str], bench: Bench) -> int:
    """Run a program in the root of the project within the time that is left, and return its exit status."""
    # run.sh has packages in the path that the machine lacks.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=max(1.0, bench.seconds_left), check=False
    ).returncode


def backend(kind: str, dtype: torch.dtype, bench: Bench) -> Values:
    """Return the operation and the kernels behind the attention of our models."""
    once = padded_call(kind, "ours", micro_batches(kind, 1, 200 if bench.tiny else 4096)[0], dtype, bench)
    once()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_gpu else [])]) as found:
        once()
        if bench.on_gpu:
            torch.cuda.synchronize(bench.device)
    names = dict.fromkeys(event.name for event in found.events())
    operations = [name for name in names if name.startswith("aten::_scaled_dot_product")]
    on_device = [event.name for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    if bench.on_gpu and not on_device:
        raise RuntimeError(NO_KERNELS)
    return {"operations": " ".join(operations) or "products and softmax", "kernels": "; ".join(on_device)[:400]}


def product(dtype: torch.dtype, bench: Bench) -> Values:
    """Measure a large product of square matrices."""
    width = 64 if bench.tiny else 8192
    a, b = (torch.randn(width, width, device=bench.device).to(dtype) for _ in range(2))
    spent = DeviceTimer(bench.device).milliseconds(lambda: a @ b, 3 if bench.tiny else 20)
    return {"ms": spent, "tflops": 2 * width**3 / spent / 1e9}


def run(bench: Bench) -> None:
    """Run all checks, those on which most depends first."""
    precisions: list[Precision] = ["bf16", "fp16"] if bench.half == "bf16" else ["fp16"]
    others = files()
    for name in ("fp32", *precisions):
        bench.measure(lambda name=name: trial(name, bench), check="trial", of=name)
    for path in FIRST if bench.on_gpu else REHEARSED:
        bench.measure(lambda path=path: suite(path, bench), check="tests", of=Path(path).name)
    for name in precisions:
        dtype = DTYPES[name]
        bench.measure(lambda dtype=dtype: product(dtype, bench), check="product", of=name)
        for kind in KINDS:
            bench.measure(lambda d=dtype, k=kind: backend(k, d, bench), check="attention", of=f"{kind} {name}")
    bench.measure(lambda: selftest(bench), check="selftest", of="all engines")
    for path in others if bench.on_gpu else ():
        bench.measure(lambda path=path: suite(path, bench), check="tests", of=Path(path).name)
