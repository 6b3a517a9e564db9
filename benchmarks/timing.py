"""What benchmarks of training steps share: arguments, a batch, and the seconds of one forward and backward."""

from __future__ import annotations

import argparse
import time

import torch

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import TrainModule

LENGTH = 32
"""Tokens of each sentence, on both sides."""


def parser(description: str | None, layers: int, tokens: int, vocab: int, rounds: int) -> argparse.ArgumentParser:
    """The arguments all take, with their defaults."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--dim", type=int, default=512)
    made.add_argument("--layers", type=int, default=layers)
    made.add_argument("--tokens", type=int, default=tokens)
    made.add_argument("--vocab", type=int, default=vocab)
    made.add_argument("--rounds", type=int, default=rounds)
    return made


def random_batch(arguments: argparse.Namespace, update: int) -> Batch:
    """Sentences of random tokens, the same for every variant of an update."""
    generator = torch.Generator().manual_seed(update)
    rows = max(1, arguments.tokens // LENGTH)
    source, target = (torch.randint(4, arguments.vocab, (rows, LENGTH), generator=generator) for _ in range(2))
    count = rows * LENGTH
    made = Batch(
        source_BS=source,
        target_input_BT=target,
        target_output_BT=target,
        sentence_ids_B=torch.arange(rows),
        source_tokens=count,
        target_tokens=count,
        pad=0,
        update=UpdateInfo(seed=1, number=update, tokens=count, sentences=rows),
    )
    return made.to(torch.device(arguments.device))


def seconds(module: TrainModule, batch: Batch) -> float:
    """One forward and backward; on a GPU in bf16."""
    device = batch.source_BS.device
    synchronise(device)
    started = time.perf_counter()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        loss = module(batch).loss
    (loss / batch.target_tokens).backward()
    module.zero_grad(set_to_none=True)
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    """Wait for what a GPU was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
