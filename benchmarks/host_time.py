"""Host time of a layer in training on a GPU, without one, as a ratio to that of torch's own layer.

    OMP_NUM_THREADS=1 python benchmarks/run.py host_time [--rounds 40] [--bound 2.0]

It needs Triton. Both models train on 64 tokens, D=64, dropout 0.1, on a CPU: so small that arithmetic hardly counts.
Ours takes the path of a GPU (packed batches, joined products, Triton's kernels, collected gradients), but launches
nothing: Triton's JIT binds arguments and looks kernels up as ever under a stub driver, and attention only allocates
its results. The reference is a loop over torch.nn.Transformer, pre-norm, with the arithmetic that ours leaves out. So
the ratio is one between two programs, for comparison with itself in another version, not with a GPU.

Times are the least CPU time of a forward and a backward pass; a layer's is that of four layers more, divided by four.
The command fails if a ratio is above the bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from records import Results, Table
from timing import Work, add_rounds, in_turns
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine import plain
from deepspeed_nmt.engine.plain import COLLECTED_BYTES, GradientSums, PlainEngine
from deepspeed_nmt.kernels import choice, segments
from deepspeed_nmt.kernels.choice import EXPECTED, Kernels, is_installed, use_kernels
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests import varlen

DIM, FFN, HEADS, DROPOUT, SENTENCES, LENGTH = 64, 128, 4, 0.1, 4, 16
MORE_LAYERS = 4
DEPTHS = {"base": (1, 1), "encoder": (1 + MORE_LAYERS, 1), "decoder": (1, 1 + MORE_LAYERS)}


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Run Triton's JIT without a GPU: variants are looked up, and launched by an empty function."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from tests.gpu_without_gpu.stub_driver import StubDriver

    empty = SimpleNamespace(run=lambda *_: None, launch_metadata=lambda *_: None, function=0, packed_metadata=())

    def compiled(self: Any, key: str, signature: Any, device: int, *_: Any, **__: Any) -> Any:
        self.device_caches[device][0][key] = empty
        return empty

    driver.set_active(StubDriver())
    with mock.patch.object(JITFunction, "_do_compile", compiled):
        yield


@contextmanager
def path_of_a_gpu() -> Iterator[None]:
    """Take the path of a GPU on CPU tensors."""
    seed = torch.zeros(2, dtype=torch.int64)
    with ExitStack() as stack:
        for owner, name, value in (
            (Kernels, "device_type", lambda self, x: "cuda"),
            (segments, "is_flash", lambda device: True),
            (choice, "has_varlen", lambda x: True),
            (plain, "GradientSums", lambda masters, _: GradientSums(masters, COLLECTED_BYTES)),
            (plain, "DTYPES", {"bf16": torch.float32}),
            (varlen, "_forward", lambda q, *_: (torch.empty_like(q), seed)),
            (varlen, "_backward", lambda gradient, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v)))),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def ours(layers: tuple[int, int]) -> Callable[[], object]:
    """Return a function that runs a micro-batch of a Transformer forward and backward."""
    sides = dict(zip(("encoder_layers", "decoder_layers"), layers, strict=True))
    model = build_transformer(
        TransformerConfig(dim=DIM, ffn_dim=FFN, heads=HEADS, dropout=DROPOUT, **sides), Vocabulary(200)
    )
    use_kernels(model, Kernels(fixed=EXPECTED))
    module = TrainModule(model, Objective(LabelSmoothed(0.1, 0)))
    engine = PlainEngine(module, AdamConfig(), "bf16", World(0, 1, 0, torch.device("cpu")))
    count = SENTENCES * LENGTH
    tokens, packed = torch.full((1, count), 5), Segments.of([LENGTH] * SENTENCES, count)
    batch = Batch(
        source_BS=tokens,
        target_input_BT=tokens,
        target_output_BT=tokens,
        sentence_ids_B=torch.arange(SENTENCES),
        source_tokens=count,
        target_tokens=count,
        pad=0,
        update=UpdateInfo(seed=1, number=1, tokens=count, sentences=SENTENCES),
        source_segments=packed,
        target_segments=packed,
    )
    return lambda: engine._backward(batch, 1.0)


def torchs(layers: tuple[int, int]) -> Callable[[], object]:
    """Return a function that runs torch.nn.Transformer forward and backward."""
    model = nn.Transformer(DIM, HEADS, *layers, FFN, DROPOUT, batch_first=True, norm_first=True)
    states = torch.zeros(SENTENCES, LENGTH, DIM)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def run() -> None:
        model(states, states, tgt_mask=causal, tgt_is_causal=True).sum().backward()
        model.zero_grad(set_to_none=True)

    return run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 40)
    parser.add_argument("--bound", type=float, default=2.0, help="largest ratio of a layer (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Results:
    """Time a layer of each side in turns with torch's."""
    if not is_installed("softmax", "triton"):
        sys.exit("Triton is not installed; run `pip install triton`")
    torch.set_num_threads(1)
    with launching_nothing(), path_of_a_gpu():
        made = {
            f"{who} {what}": of(layers)
            for who, of in (("ours", ours), ("torch", torchs))
            for what, layers in DEPTHS.items()
        }
        works: dict[str, Work] = {name: lambda _, work=work: work for name, work in made.items()}  # type: ignore[misc]
        taken = in_turns(works, arguments.rounds, clock=time.process_time)
    least = {name: 1e3 * min(seconds) for name, seconds in taken.items()}
    rows = []
    for side in ("encoder", "decoder"):
        mine, reference = ((least[f"{who} {side}"] - least[f"{who} base"]) / MORE_LAYERS for who in ("ours", "torch"))
        rows.append({"layer": side, "ms": mine, "torch's ms": reference, "ratio": mine / reference})
    if slow := [f"{row['layer']} {row['ratio']:.2f}" for row in rows if row["ratio"] > arguments.bound]:
        sys.exit(f"above the bound of {arguments.bound}: {', '.join(slow)}")
    return Results(tables={"layers": Table.of(rows, {"ms": "{:.2f}", "torch's ms": "{:.2f}", "ratio": "{:.2f}"})})
