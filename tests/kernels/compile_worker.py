"""Compile every kernel ahead of time, for GPUs that this machine lacks, and describe the code in JSON lines.

Run in a process of its own: Triton's interpreter must be off when the kernels are defined.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepspeed_nmt.kernels import triton_kernels as kernels

CAPABILITIES = (70, 80, 90)
WIDTH = {"BLOCK": 1024}
FLAGS = (True, False)


def variants() -> Iterator[tuple[Any, dict[str, Any], int]]:
    """Yield kernels with constants and numbers of warps: those that a model uses, and the widest."""
    for dropout, activation in itertools.product(FLAGS, (0, 1, 2)):
        point = {"HAS_BIAS": True, "HAS_RESIDUAL": activation == 0, "DROPOUT": dropout, "ACTIVATION": activation}
        for kernel in (kernels.pointwise_forward, kernels.pointwise_backward):
            yield kernel, {**point, "BLOCK": 512}, 4
    for block, warps, joined, dropout in ((1024, 4, False, False), (1024, 4, True, True), (4096, 16, True, True)):
        norm = {"HAS_BIAS": joined, "HAS_RESIDUAL": joined, "DROPOUT": dropout, "BLOCK": block}
        yield kernels.norm_forward, norm, warps
        for summed in (False, joined):
            yield kernels.norm_backward, {**norm, "HAS_D_TOTAL": summed}, min(16, 2 * warps)
    yield kernels.column_sums, {"ROWS": 64, "BLOCK": 32}, 4
    for rows, block in ((32, 64), (1, 2048)):
        yield kernels.softmax_backward, {"ROWS": rows, "BLOCK": block}, 8
        for causal in FLAGS:
            seen = {"HAS_MASK": not causal, "CAUSAL": causal, "ROWS": rows, "BLOCK": block}
            yield kernels.softmax_forward, seen, 8
    yield kernels.row_sums, {"BLOCK": 4096}, 16
    yield kernels.row_divergences, {"BLOCK": 4096}, 16
    for pair in FLAGS:
        yield kernels.row_gradients, {"PAIR": pair, "BLOCK": 4096}, 16


FP32 = {
    "means", "inverse_deviations", "d_bias", "d_weight", "d_norm_bias", "sums", "log_totals_p", "log_totals_q",
    "divergences", "row_weights", "partial",
}  # fmt: skip
INTEGERS = {
    "rows", "width", "groups", "count", "programs", "seed", "keys", "queries", "heads", "stride_b", "stride_h",
    "stride_t",
}  # fmt: skip
NUMBERS = {"alpha", "p", "eps", "scale", "on_target", "on_all", "pull"}


def kind(name: str, narrow: str) -> str:
    """Return a parameter's type in Triton's notation."""
    if name in INTEGERS:
        return "i32"
    if name in NUMBERS:
        return "fp32"
    if name == "places":
        return "*i32"
    if name == "mask":
        return "*i1"
    return "*fp32" if name in FP32 else f"*{narrow}"


def spilled(code: str, capability: int) -> int:
    """Return the bytes of spilled registers, as reported by NVIDIA's assembler, which Triton contains."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(code)
        command = [assembler, "-v", f"--gpu-name={architecture}", source, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", said)))


def main() -> None:
    for capability in map(int, sys.argv[1:] or CAPABILITIES):
        narrow = "fp16" if capability < 80 else "bf16"
        for kernel, constants, warps in variants():
            signature = {name: "constexpr" if name in constants else kind(name, narrow) for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
            code = compiled.asm["ptx"]
            row = {
                "kernel": kernel.fn.__name__,
                "triton": triton.__version__,
                "capability": capability,
                "constants": constants,
                "spilled_bytes": spilled(code, capability),
                "mma": len(re.findall(r"\b(mma|wgmma|wmma)\.", code)),
                "async": len(re.findall(r"\bcp\.async", code)),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
