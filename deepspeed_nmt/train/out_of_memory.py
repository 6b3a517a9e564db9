"""Running out of memory: tested before the first update, and explained wherever it happens."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.errors import TrainingError, counted, first_line
from deepspeed_nmt.train.configuration import Probe

_SIGNS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
"""Phrases in messages of errors that have no class of their own."""


class OutOfMemoryError(TrainingError):
    """A micro-batch does not fit into the memory."""


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: on its GPU, or in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def probe(wanted: Probe, engine: Engine, loader: TrainLoader, is_auto: bool = False) -> None:
    """Run the largest expected micro-batch, so that a run does not fail for lack of memory after days.

    Nothing changes: a run is the same to the bit with and without it. It must precede :meth:`Engine.restore`. All
    ranks call it together, and fail if it does not fit. Unless ``is_auto``, it says where larger ones would fit.
    """
    device = engine.device
    if wanted == "never" or (wanted == "auto" and device.type != "cuda"):
        return
    started = time.monotonic()
    batch = loader.largest()
    with explained("the largest expected micro-batch", [batch], device):
        engine.probe(batch)
    peak = peak_memory_gib(device)
    logger.info(
        "largest micro-batch: %s x %d tokens; peak memory %.1f GiB%s (tested in %.1f s)",
        counted(batch.rows, "rows"),
        batch.longest,
        peak,
        f" of {_capacity_gib(device):.1f}" if device.type == "cuda" else " of RAM, the program included",
        time.monotonic() - started,
    )
    if device.type == "cuda":
        if not is_auto and has_room(loader.config, loader.ranks, peak, _capacity_gib(device)):
            logger.info("larger micro-batches would fit, and wait less for the host: batch.micro_tokens=auto")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def has_room(config: BatchConfig, ranks: int, peak_gib: float, capacity_gib: float) -> bool:
    """Return True if an update has several micro-batches, and a GPU has room for one of twice the size."""
    return config.update_tokens > ranks * config.bound and 2.0 * peak_gib < capacity_gib


@contextmanager
def explained(what: str, micro_batches: Sequence[Batch], device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error of ``what`` the block does into a message with sizes and settings to change."""
    try:
        yield
    except Exception as error:  # DeepSpeed, NCCL and CUDA libraries have errors of their own for it
        if not out_of_memory(error):
            raise
        largest = max(micro_batches, key=lambda batch: batch.padded_tokens)
        name = "RAM"
        if device.type == "cuda":
            name = f"{torch.cuda.get_device_name(device)}, which has {_capacity_gib(device):.1f} GiB"
        raise OutOfMemoryError(
            f"{what} ran out of the memory of {name} with {largest.rows} rows x {largest.longest} tokens, "
            f"{largest.padded_tokens} of batch.micro_tokens ({first_line(error)}). Lower batch.micro_tokens (the "
            "updates stay the same), recompute layers (engine.recompute_decoder=1 engine.recompute_encoder=1), or "
            "with several GPUs divide the model's state (engine.ds_config=zero2 or zero3) or its matrices "
            f"(engine.tensor_parallel=2)"
        ) from error


def out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one that caused it, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _capacity_gib(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 2**30
