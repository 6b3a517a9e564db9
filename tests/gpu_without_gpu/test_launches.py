"""The code that a GPU would run: what training launches, and what it is compiled to. Tests neither results nor speed.

Triton's JIT runs under a stub driver, so that variants are those of real launches: with the alignment of their
arguments. Another version of Triton than the installed one is tested so:

    pip install --target DIR --no-deps triton==3.6.0
    PYTHONPATH=DIR python -m pytest tests/gpu_without_gpu/test_launches.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

pytest.importorskip("triton", reason="needs triton")
WORKER = Path(__file__).with_name("launches_worker.py")
CAPABILITIES = {70: "fp16", 80: "bf16", 90: "bf16"}
"""Compute capabilities, each with the precision that runs on it."""
VARIANTS = {
    "pointwise_forward": 6, "pointwise_backward": 6, "norm_forward": 6, "norm_backward": 10, "column_sums": 1,
    "row_sums": 1, "row_divergences": 1, "row_gradients": 2, "softmax_forward": 18, "softmax_backward": 9,
}  # fmt: skip
"""Most variants of each kernel that a model of one size has: each takes seconds to compile at the start of a run.

Vocabularies of any size need the same. The softmax is that of attention in steps, over 5 to 128 keys.
"""
WIDTHS = {
    "pointwise_forward": (64, 64), "pointwise_backward": (64, 64), "norm_forward": (128, 128),
    "norm_backward": (64, 64), "column_sums": (128, 16), "row_sums": (128, 32), "row_divergences": (128, 32),
    "row_gradients": (128, 128), "softmax_forward": (16, 128), "softmax_backward": (128, 128),
}  # fmt: skip
"""Bits of the widest loads and stores of a thread, where rows are aligned.

A thread of `column_sums` stores one number; `row_sums` and `row_divergences` store one for each row. The mask of
`softmax_forward` makes the compiler load element by element.
"""
NARROW = {"row_sums": 1, "softmax_forward": 99}
"""Loads of 16 bits or fewer that a kernel has though rows are aligned: the target's logit, and see above."""
MOST_REGISTERS = 128
"""Registers of a thread with which 16 warps fit a multiprocessor."""
LAUNCHES = {
    ("pre", "encoder layer"): (2, 3, 3, 2, 5),
    ("pre", "decoder layer"): (3, 4, 4, 3, 7),
    ("post", "encoder layer"): (2, 1, 1, 2, 3),
    ("post", "decoder layer"): (3, 1, 1, 3, 4),
}
"""Launches of a layer: forward norm and pointwise, backward pointwise and norm, and sums of columns."""
CALLED_BY_KERNELS = {"row_of_uniforms"}


def rows_of(scratch: Path, *words: str) -> list[dict[str, Any]]:
    """Return what the worker describes."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(scratch)}
    done = subprocess.run([sys.executable, str(WORKER), *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What training launches, and the code of the variants that represent all."""
    targets = [f"{precision}:{capability}" for capability, precision in CAPABILITIES.items()]
    return rows_of(tmp_path_factory.mktemp("triton"), *targets)


def check(codes: list[dict[str, Any]]) -> None:
    """Check the code of variants: registers, and no operation that a GPU would lack."""
    assert codes
    for code in codes:
        assert 0 < code["registers"] <= MOST_REGISTERS and code["spilled_bytes"] == 0, code
        assert code["mma"] == 0, f"no kernel is a matrix product: {code}"
        assert code["capability"] != 70 or code["async"] == 0, code


def test_numbers_of_rows_need_few_variants(rows: list[dict[str, Any]]) -> None:
    harvested = [row for row in rows if "variants" in row]
    assert {row["kernel"] for row in harvested} == set(VARIANTS)
    for row in harvested:
        assert row["variants"] <= VARIANTS[row["kernel"]], row
        assert row["alignments"] <= 2, row
    defined = (ROOT / "deepspeed_nmt/kernels/triton_kernels.py").read_text(encoding="utf-8").count("@triton.jit")
    assert defined == len(VARIANTS.keys() | CALLED_BY_KERNELS)


def test_launches_of_a_layer(rows: list[dict[str, Any]]) -> None:
    order = ("norm_forward", "pointwise_forward", "pointwise_backward", "norm_backward", "column_sums")
    counted = {(row["norm"], row["layer"]): row["launches"] for row in rows if "layer" in row}
    assert {key: tuple(counts.get(name, 0) for name in order) for key, counts in counted.items()} == {
        **LAUNCHES, ("pre", "rest"): (0,) * 5, ("post", "rest"): (0,) * 5,
    }  # fmt: skip
    assert all(
        counts == {"row_sums": 1, "row_gradients": 1} for (_, part), counts in counted.items() if part == "rest"
    )
    assert [row["not_compiled"] for row in rows if "not_compiled" in row] == [[], []]


def test_code_of_every_kernel_for_every_gpu(rows: list[dict[str, Any]]) -> None:
    codes = [row["code"] for row in rows if "code" in row]
    assert {(code["kernel"], code["capability"]) for code in codes} == {
        (kernel, capability) for kernel in VARIANTS for capability in CAPABILITIES
    }
    check(codes)


def test_threads_access_memory_in_wide_pieces(rows: list[dict[str, Any]]) -> None:
    codes = [row["code"] for row in rows if "code" in row and row["code"]["rows_are_aligned"]]
    assert {code["kernel"] for code in codes} == set(VARIANTS)
    for code in codes:
        loads, stores = WIDTHS[code["kernel"]]
        assert max(code["loads"]) >= loads and max(code["stores"]) >= stores, code
        assert sum(bits <= 16 for bits in code["loads"]) <= NARROW.get(code["kernel"], 0), code


def test_the_page_has_the_code_of_each_kernel(rows: list[dict[str, Any]]) -> None:
    version = pytest.importorskip("triton").__version__
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    if f"Triton {version}" not in page:
        pytest.skip("the page has the code of another version of Triton")
    codes = [row["code"] for row in rows if "code" in row]
    for kernel in VARIANTS:
        mine = [code for code in codes if code["kernel"] == kernel]
        registers = [max(code["registers"] for code in mine if code["capability"] == each) for each in CAPABILITIES]
        spilled = sum(code["spilled_bytes"] for code in mine)
        widths = [
            min(max(code[access]) for code in mine if code["rows_are_aligned"]) for access in ("loads", "stores")
        ]
        assert f"| `{kernel}` | {' | '.join(map(str, [*registers, spilled, *widths]))} |" in page


@pytest.mark.slow
def test_code_of_every_variant(tmp_path: Path) -> None:
    targets = ["fp32:70", "fp32:90", "fp16:70", "fp16:80", "bf16:80", "bf16:90"]
    check([row["code"] for row in rows_of(tmp_path, "--all", *targets) if "code" in row])
