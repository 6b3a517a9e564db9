"""Record what training would launch on a GPU, compile some of it ahead of time, and describe both in JSON lines.

    python launches_worker.py [--all] PRECISION:CAPABILITY...        such as fp16:70 bf16:80

Of each kernel and its flags the widest variant with aligned rows is compiled, and if rows are not aligned in some the
narrowest of those; by --all every variant.

Run in a process of its own: Triton's interpreter must be off when the kernels are defined.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from stub_driver import Launches, Variant, record_launches
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels import triton_ops
from deepspeed_nmt.kernels.choice import EXPECTED, Kernels, use_kernels
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from tests.support import batch_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES = {"BASE": (512, 2048), "BIG": (1024, 4096), "widest": (4096, 16384)}
ROWS = [*random.Random(1).sample(range(1000, 4000), 37), 1, 8, 4096]
"""Numbers of rows of a micro-batch: 37 by chance, and the borders."""
VOCABULARIES = (32_000, 33_000, 33_001, 30_522)
KEYS = range(5, 129)
KERNELS = Kernels(fixed=EXPECTED)


def layers(dim: int, ffn: int, dtype: torch.dtype) -> None:
    """Run all that a layer launches, pre-norm or post-norm, forward and backward, for each number of rows."""

    def of(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype).requires_grad_()

    for rows in ROWS:
        x, residual, hidden = of(rows, dim), of(rows, dim), of(rows, ffn)
        bias, weight, norm_bias, wide_bias = of(dim), of(dim), of(dim), of(ffn)
        for p in (0.0, 0.1):
            _differentiate((x, bias, residual), triton_ops.bias_dropout_add(x, bias, residual, p, 1.0))
            for activate in (triton_ops.bias_relu_dropout, triton_ops.bias_gelu_dropout):
                _differentiate((hidden, wide_bias), activate(hidden, wide_bias, p))
            inputs = (x, bias, residual, weight, norm_bias)
            for used in (slice(None), slice(1, None)):  # the norm of the last sub-layer may be all that is used
                _differentiate(inputs, *triton_ops.bias_dropout_add_layer_norm(*inputs, p, 1.0, 1e-5)[used])
        _differentiate((x, weight, norm_bias), *triton_ops.branch_layer_norm(x, weight, norm_bias, 1e-5))


def _differentiate(inputs: tuple[Tensor, ...], *results: Tensor) -> None:
    torch.autograd.grad(results, inputs, [torch.empty_like(result) for result in results])


def losses(dtype: torch.dtype) -> None:
    """Run the loss of one and of two predictions, of some vocabularies and few rows."""
    for size in VOCABULARIES:
        weight = torch.zeros(size, 16, dtype=dtype, requires_grad=True)
        for rows in (1, 7, 16):
            states = [torch.zeros(rows, 16, dtype=dtype, requires_grad=True) for _ in range(2)]
            for count in (1, 2):
                targets = torch.ones(rows, dtype=torch.long)
                loss, *_ = projected_cross_entropy(states[:count], weight, targets, 0.1, 0, 0.5, kernels=KERNELS)
                _differentiate((weight, *states[:count]), loss)


def attention_weights(dtype: torch.dtype) -> None:
    """Run the softmax of attention in steps, for many numbers of keys."""
    for keys in KEYS:
        for mask in (torch.ones(2, 1, 1, keys, dtype=torch.bool), None):
            scores = torch.empty(2, 4, keys, keys, dtype=dtype).requires_grad_()
            _differentiate((scores,), triton_ops.softmax(scores, mask, mask is None, 1.0))


def updates(launches: Launches, norm: str, activation: str) -> Iterator[tuple[str, Counter[str]]]:
    """Run a model forward and backward; yield the launches of an encoder layer, a decoder layer and the rest."""
    counts = {}
    vocabulary = Vocabulary(50)
    for depths in ((1, 1), (2, 1), (1, 2)):
        shape: dict[str, Any] = {"dim": 16, "ffn_dim": 32, "heads": 2, "norm": norm, "activation": activation}
        config = TransformerConfig(**shape, encoder_layers=depths[0], decoder_layers=depths[1], dropout=0.1)
        model = build_transformer(config, vocabulary).to(torch.bfloat16)
        use_kernels(model, KERNELS)
        tokens = torch.full((2, 5), 9)
        before = Counter(launches.counts)
        TrainModule(model, Objective(LabelSmoothed(0.1, 0)))(batch_of(tokens, tokens, tokens)).loss.backward()
        counts[depths] = launches.counts - before
    encoder, decoder = counts[2, 1] - counts[1, 1], counts[1, 2] - counts[1, 1]
    yield "encoder layer", encoder
    yield "decoder layer", decoder
    yield "rest", counts[1, 1] - encoder - decoder


def compiled(variant: Variant, capability: int) -> dict[str, Any]:
    """Compile a variant, and describe its code."""
    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    target, said = GPUTarget("cuda", capability, 32), io.StringIO()
    with contextlib.redirect_stdout(said):  # of NVIDIA's assembler
        code = triton.compile(source, target=target, options={"num_warps": variant.num_warps}).asm["ptx"]

    def bits(access: str) -> list[int]:
        """Return the bits that each access of a thread has, in the order of the code."""
        widths = re.findall(rf"\b{access}\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\b", code)
        return [int(count or 1) * int(width) for count, width in widths]

    return {
        "kernel": variant.kernel.fn.__name__,
        "capability": capability,
        "flags": variant.flags,
        "types": [kind for kind in variant.signature.values() if kind != "constexpr"],
        "warps": variant.num_warps,
        "unaligned": variant.unaligned,
        "rows_are_aligned": variant.rows_are_aligned,
        "registers": sum(map(int, re.findall(r"Used (\d+) registers", said.getvalue()))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", said.getvalue()))),
        "loads": bits("ld"),
        "stores": bits("st"),
        "mma": len(re.findall(r"\b(?:mma|wgmma|wmma)\.", code)),
        "async": len(re.findall(r"\bcp\.async", code)),
    }


def show(**row: Any) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def representative(variants: Iterable[Variant]) -> list[Variant]:
    """Return the widest variant of each kernel and set of flags, and the narrowest whose rows are not aligned."""
    groups: dict[tuple[object, ...], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.kernel.fn.__name__, *variant.kinds), []).append(variant)
    chosen = []
    for group in groups.values():
        first, *_, last = sorted([*group, *group], key=lambda each: (each.rows_are_aligned, each.flags["BLOCK"]))
        chosen += [last] if first.rows_are_aligned else [first, last]
    return chosen


def main(words: list[str]) -> None:
    launches = record_launches()
    triton.knobs.nvidia.dump_ptxas_log = True
    chosen = [word.split(":") for word in words if word != "--all"]
    with mock.patch.object(Kernels, "device_type", lambda self, x: "cuda"):
        for precision in dict.fromkeys(name for name, _ in chosen):
            dtype = DTYPES[precision]
            parts = {size: partial(layers, *widths, dtype) for size, widths in SIZES.items()}
            parts |= {"loss": partial(losses, dtype), "softmax": partial(attention_weights, dtype)}
            recorded: dict[str, Variant] = {}
            for part, run in parts.items():
                launches.clear()
                run()
                for kernel, variants in launches.variants.items():
                    sources = Counter(variant.source for variant in variants.values())
                    show(part=part, kernel=kernel, variants=len(variants), alignments=max(sources.values()))
                    recorded |= {f"{kernel} {key}": variant for key, variant in variants.items()}
            flags = {(variant.kernel.fn.__name__, *variant.kinds) for variant in recorded.values()}
            variants = list(recorded.values())
            for capability in (capability for name, capability in chosen if name == precision):
                for variant in variants if "--all" in words else representative(variants):
                    show(precision=precision, code=compiled(variant, int(capability)))
        for norm, activation in (("pre", "relu"), ("post", "gelu")):
            launches.clear()
            for part, counts in updates(launches, norm, activation):
                show(norm=norm, layer=part, launches=counts)
            used = {(kernel, *each.kinds) for kernel, made in launches.variants.items() for each in made.values()}
            show(norm=norm, not_compiled=sorted(map(str, used - flags)))


if __name__ == "__main__":
    main(sys.argv[1:])
