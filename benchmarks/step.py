"""Speed of a training step on a CPU, relative to a reference built from torch's own modules.

    OMP_NUM_THREADS=2 python benchmarks/run.py step [--rounds 8]

Both models have 6+6 layers, D=256, FFN 1,024, 4 heads, V=8,000, label smoothing, gradient clipping, and the same
padded batches of about 2,048 target tokens. The reference is torch.nn.Transformer (pre-norm, batch first) with
foreach AdamW and all logits at once. Reference and variants take turns on each batch, so that other work on the
machine affects all alike; a ratio is the median over the batches. Each variant after the first undoes one
optimisation, but for the last:

    ours              as in the recipes: no dropout on attention weights or after the activation
    same dropout      dropout wherever torch.nn.Transformer has it
    foreach Adam      foreach instead of fused AdamW
    torch's dropout   one random number for each element
    all logits        projection, softmax and loss as separate operations on all tokens
    BLAS, oneDNN      products by torch's BLAS, or by oneDNN; one of them is the choice
    bf16              16-bit weights with fp32 masters, which only CPUs that multiply bf16 in hardware gain from
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from records import Results
from timing import Work, add_rounds, in_turns, relative
from torch import Tensor, nn

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.optimizer import Groups
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.kernels.choice import Kernels, use_kernels
from deepspeed_nmt.kernels.precision import Precision
from deepspeed_nmt.methods import label_smoothed
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn.embedding import sinusoids
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.optimizers.adam import AdamWConfig
from tests.support import batch_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.equations import projected_cross_entropy_ref

DIM, FFN, HEADS, LAYERS, VOCABULARY, DROPOUT, SMOOTHING = 256, 1024, 4, 6, 8000, 0.1, 0.1
TOKENS = 2048


class Reference(nn.Module):
    """torch.nn.Transformer with embeddings and a tied output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.transformer = nn.Transformer(
            DIM, HEADS, LAYERS, LAYERS, FFN, DROPOUT, batch_first=True, norm_first=True, bias=True
        )
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("positions", sinusoids(512, DIM))

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Embed tokens, with positions and dropout."""
        embedded: Tensor = self.embedding(tokens_BT) * math.sqrt(DIM) + self.positions[: tokens_BT.shape[1]]
        dropped: Tensor = self.dropout(embedded)
        return dropped

    def forward(self, batch: Batch) -> Tensor:
        """Return the sum of the loss over target tokens."""
        padding = batch.source_BS.eq(batch.pad)
        causal = nn.Transformer.generate_square_subsequent_mask(batch.target_input_BT.shape[1])
        states = self.transformer(
            self.embed(batch.source_BS),
            self.embed(batch.target_input_BT),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        logits = F.linear(states, self.embedding.weight)
        return F.cross_entropy(
            logits.flatten(0, 1),
            batch.target_output_BT.flatten(),
            ignore_index=batch.pad,
            label_smoothing=SMOOTHING,
            reduction="sum",
        )


class ForeachAdamWConfig(AdamWConfig):
    """AdamW without torch's fused kernel."""

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return torch.optim.AdamW(groups, lr=self.lr, foreach=True)


def reference_step() -> Callable[[Batch], None]:
    """Return a function that makes an update of the reference."""
    torch.manual_seed(1)
    model = Reference().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(batch: Batch) -> None:
        (model(batch) / batch.target_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_step(
    same_dropout: bool = False, fused: bool = True, precision: Precision = "fp32", kernels: str = "auto"
) -> Callable[[Batch], None]:
    """Return a function that makes an update of this package's model and engine."""
    torch.manual_seed(1)
    inner = DROPOUT if same_dropout else 0.0
    config = TransformerConfig(
        dim=DIM, ffn_dim=FFN, heads=HEADS, encoder_layers=LAYERS, decoder_layers=LAYERS, dropout=DROPOUT,
        attention_dropout=inner, activation_dropout=inner,
    )  # fmt: skip
    vocabulary = Vocabulary(VOCABULARY)
    module = TrainModule(build_transformer(config, vocabulary), Objective(LabelSmoothed(SMOOTHING, vocabulary.pad)))
    use_kernels(module, Kernels(kernels))
    optimizer = AdamWConfig(lr=1e-4) if fused else ForeachAdamWConfig(lr=1e-4)
    engine = PlainEngine(module, optimizer, precision, World(0, 1, 0, torch.device("cpu")))

    def step(batch: Batch) -> None:
        engine.update([batch], batch.target_tokens, 1e-4)

    return step


@contextmanager
def torch_dropout() -> Iterator[None]:
    """Use torch's own dropout in the block."""
    with mock.patch.object(torch_ops, "_has_fast_dropout", lambda x: True):
        yield


@contextmanager
def all_logits() -> Iterator[None]:
    """Use the unfused loss, on all logits, in the block."""

    def reference(*arguments: Any, kernels: Kernels, vocabulary: None = None, **options: Any) -> Any:
        return projected_cross_entropy_ref(*arguments, **options)

    with mock.patch.object(label_smoothed, "projected_cross_entropy", reference):
        yield


def batches(count: int) -> Iterator[Batch]:
    """Yield padded batches of sentence pairs of similar length, with lengths as in news text."""
    generator = torch.Generator().manual_seed(3)
    vocabulary = Vocabulary(VOCABULARY)
    for number in range(1, count + 1):
        longest = int(torch.randint(12, 60, (), generator=generator))
        rows = TOKENS // longest
        lengths = torch.randint(max(4, int(longest * 0.85)), longest + 1, (rows,), generator=generator)
        lengths[0] = longest
        source, target = (
            torch.randint(4, VOCABULARY, (rows, longest), generator=generator).masked_fill(
                torch.arange(longest) >= lengths.unsqueeze(1), vocabulary.pad
            )
            for _ in range(2)
        )
        yield batch_of(source, target, target, pad=vocabulary.pad, update=number)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 8)


def run(arguments: argparse.Namespace) -> Results:
    """Measure the variants."""
    variants = {
        "reference": (reference_step(), nullcontext),
        "ours": (our_step(), nullcontext),
        "same dropout": (our_step(same_dropout=True), nullcontext),
        "foreach Adam": (our_step(fused=False), nullcontext),
        "torch's dropout": (our_step(), torch_dropout),
        "all logits": (our_step(), all_logits),
        "BLAS": (our_step(kernels="linear=torch"), nullcontext),
        "oneDNN": (our_step(kernels="linear=onednn"), nullcontext),
        "bf16": (our_step(precision="bf16"), nullcontext),
    }
    made = list(batches(arguments.rounds + 1))

    def work(name: str) -> Work:
        step, changed = variants[name]

        def once(batch: Batch) -> None:
            with changed():
                step(batch)

        return lambda number: partial(once, made[number])

    taken = in_turns({name: work(name) for name in variants}, arguments.rounds)
    return Results(tables={"speed": relative(taken, speed=True)}, rounds=taken)
