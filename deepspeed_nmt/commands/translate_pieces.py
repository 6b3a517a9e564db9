"""Files of `translate` that are translated by the ranks of a launcher, and by workers."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed_nmt.commands.translate_options import weights_of
from deepspeed_nmt.console import logger
from deepspeed_nmt.parallel.device import uses_cuda
from deepspeed_nmt.parallel.launched import place
from deepspeed_nmt.parallel.workers import run_workers
from deepspeed_nmt.parallel.world import take_gpu
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.opening import check_ensemble, chosen_search
from deepspeed_nmt.run.translated_file import FileToTranslate
from deepspeed_nmt.run.translation import check_resumable
from deepspeed_nmt.search.precision import resolve_precision


def take_device(arguments: argparse.Namespace) -> None:
    """Make this rank's GPU the current one, if several ranks decode on GPUs.

    Raises:
        ConfigError: if there is no GPU for it.
    """
    here = place()
    if here.ranks > 1 and uses_cuda(arguments.device, "--device"):
        take_gpu(here.local_rank)


@contextmanager
def warned_once() -> Iterator[None]:
    """Let only rank 0 log warnings of the block, which are the same on all ranks."""
    level = logger.level
    if place().rank:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def translate_by_workers(arguments: argparse.Namespace, search: Mapping[str, Any], file: FileToTranslate) -> int:
    """Translate a file with workers on this host's CPU, and return their exit status.

    Args:
        arguments: of the command line.
        search: settings of the search, as ``Translator.open`` takes them.
        file: what to translate.

    Raises:
        UserError: if an option is wrong, or another translation was begun. Starting workers takes much longer.
    """
    from deepspeed_nmt.cli import execute

    runs = [Run.open(path) for path in arguments.run]
    check_ensemble(runs, weights_of(arguments))
    changes = {key: value for key, value in search.items() if key != "suppress"}
    exits = {name: getattr(arguments, name) for name in ("exit", "encoder_layers", "decoder_layers")}
    chosen = chosen_search(runs, changes, search["suppress"], exits)
    check_resumable(file, chosen, "cpu", resolve_precision(arguments.precision, torch.device("cpu")))
    one = argparse.Namespace(**{**vars(arguments), "workers": 1, "device": "cpu"})
    return run_workers(execute, one, min(arguments.workers, max(1, -(-file.lines // file.piece_lines))))
