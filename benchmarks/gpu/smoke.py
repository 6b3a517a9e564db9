"""Do the tests pass on this GPU, which kernel of attention does torch take, and how fast is a matrix product?

The tests that need a GPU, the selftest over all engines, the SDPA backend that runs for each kind of attention, and
the speed of a large product in 16 bit, which bounds all others.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch
from attention import KINDS, micro_batches, padded_call
from harness import Bench, DeviceTimer, Skipped, Values
from torch.profiler import ProfilerActivity, profile

from deepspeed_nmt.engine.config import DTYPES, Precision

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("tests/gpu", "tests/kernels")


def suite(path: str, bench: Bench) -> Values:
    """Run a folder of tests, and return their numbers."""
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", path]
        status = start(command, bench)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {status} without a report")
        tests = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes = {
        kind: [each for each in tests if each.find(kind) is not None] for kind in ("failure", "error", "skipped")
    }
    broken = [*outcomes["failure"], *outcomes["error"]]
    counts = {"passed": len(tests) - len(broken) - len(outcomes["skipped"]), "failed": len(broken)}
    names = ", ".join(str(each.get("name")) for each in broken)
    return {**counts, "skipped": len(outcomes["skipped"]), "which": names}


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
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
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
    return {"operations": " ".join(operations) or "products and softmax", "kernels": "; ".join(on_device)[:400]}


def product(dtype: torch.dtype, bench: Bench) -> Values:
    """Measure a large product of square matrices."""
    width = 64 if bench.tiny else 8192
    a, b = (torch.randn(width, width, device=bench.device).to(dtype) for _ in range(2))
    spent = DeviceTimer(bench.device).milliseconds(lambda: a @ b, 3 if bench.tiny else 20)
    return {"ms": spent, "tflops": 2 * width**3 / spent / 1e9}


def run(bench: Bench) -> None:
    """Run all checks, the short ones first."""
    precisions: list[Precision] = ["bf16", "fp16"] if bench.half == "bf16" else ["fp16"]
    for name in precisions:
        dtype = DTYPES[name]
        bench.measure(lambda dtype=dtype: product(dtype, bench), check="product", of=name)
        for kind in KINDS:
            bench.measure(lambda d=dtype, k=kind: backend(k, d, bench), check="attention", of=f"{kind} {name}")
    for path in SUITES[: 1 if bench.tiny else None]:
        bench.measure(lambda path=path: suite(path, bench), check="tests", of=path)
    bench.measure(lambda: selftest(bench), check="selftest", of="all engines")
