"""Common code of the benchmarks of training steps: arguments, random batches, and timing."""

from __future__ import annotations

import argparse
import time

import torch

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import TrainModule

LENGTH = 32
"""Length of each sentence, on both sides."""


def parser(description: str | None, layers: int, tokens: int, vocab: int, rounds: int) -> argparse.ArgumentParser:
    """Return a parser of the common options, with these defaults."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", default=device, help="cpu or cuda (default: %(default)s)")
    made.add_argument("--dim", type=int, default=512, help="width of the model (default: %(default)s)")
    made.add_argument("--layers", type=int, default=layers, help="layers on each side (default: %(default)s)")
    made.add_argument("--tokens", type=int, default=tokens, help="tokens of a batch (default: %(default)s)")
    made.add_argument("--vocab", type=int, default=vocab, help="size of the vocabulary (default: %(default)s)")
    made.add_argument(
        "--rounds", type=int, default=rounds, help="measurements of each variant (default: %(default)s)"
    )
    return made


def random_batch(arguments: argparse.Namespace, update: int) -> Batch:
    """Return a batch of random tokens, the same for every variant."""
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


def half_on_gpu(device: str) -> torch.dtype:
    """Return the dtype of a model's weights: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def seconds(module: TrainModule, batch: Batch) -> float:
    """Return the seconds of a forward and backward pass."""
    device = batch.source_BS.device
    synchronise(device)
    started = time.perf_counter()
    loss = module(batch).loss
    (loss / batch.target_tokens).backward()
    module.zero_grad(set_to_none=True)
    synchronise(device)
    return time.perf_counter() - started


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
