"""Kernels compiled ahead of time for GPUs that this machine lacks. Tests neither results nor speed.

Another version of Triton than the installed one is tested so:

    pip install --target DIR --no-deps triton==3.6.0
    PYTHONPATH=DIR python -m pytest tests/kernels/test_compile.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

triton = pytest.importorskip("triton", reason="needs triton")
KERNELS = {
    "pointwise_forward", "pointwise_backward", "norm_forward", "norm_backward", "softmax_forward", "softmax_backward",
    "row_sums", "row_divergences", "row_gradients", "column_sums",
}  # fmt: skip
CALLED_BY_KERNELS = {"row_of_uniforms"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Properties of the compiled code of each kernel, for each capability."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, str(ROOT / "tests/kernels/compile_worker.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_every_gpu(compiled: list[dict[str, Any]]) -> None:
    assert {(row["kernel"], row["capability"]) for row in compiled} == {
        (kernel, capability) for kernel in KERNELS for capability in (70, 80, 90)
    }
    defined = Path(ROOT, "deepspeed_nmt/kernels/triton_kernels.py").read_text(encoding="utf-8").count("@triton.jit")
    assert defined == len(KERNELS | CALLED_BY_KERNELS)
    assert {row["triton"] for row in compiled} == {triton.__version__}


def test_no_registers_are_spilled_and_a_v100_gets_no_asynchronous_copies(compiled: list[dict[str, Any]]) -> None:
    assert [row for row in compiled if row["spilled_bytes"]] == []
    assert not [row for row in compiled if row["mma"]], "no kernel is a matrix product"
    assert not [row for row in compiled if row["capability"] == 70 and row["async"]]
