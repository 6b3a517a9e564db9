"""Translate a file, one sentence a line, with a trained run.

    deepspeed-nmt translate --run RUN --input test.en --output test.hyp
    deepspeed-nmt translate --run RUN_A --run RUN_B --input test.en --output test.hyp       # an ensemble

Files of any length are translated in bounded memory, by all ranks that a launcher or --workers starts. The same
command resumes a translation that was stopped. The translation of an empty line is an empty line. A line of an n-best
list is `line ||| translation ||| features ||| score`, with lines counted from 0.
"""

from __future__ import annotations

import argparse
import logging
from contextlib import ExitStack
from pathlib import Path
from signal import SIGUSR1
from typing import TYPE_CHECKING

from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.interruption import interruptible

if TYPE_CHECKING:
    from deepspeed_nmt.export.certificate import Certificate, ExportInfo
    from deepspeed_nmt.export.runtime import ExportedTranslator
    from deepspeed_nmt.run.translation import LineTranslator
    from deepspeed_nmt.search.decode_options import DecodeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    from deepspeed_nmt.commands.flags import add_flags
    from deepspeed_nmt.search.decode_options import DecodeOptions

    add_flags(parser, DecodeOptions, required=("input", "output"))


def run(arguments: argparse.Namespace) -> int:
    """Translate the input."""
    from deepspeed_nmt.cli import execute
    from deepspeed_nmt.parallel.launched import once_per_host, place
    from deepspeed_nmt.parallel.shared_work import run_workers
    from deepspeed_nmt.run import translation
    from deepspeed_nmt.search.decode_options import DecodeOptions

    options = DecodeOptions.of_command(arguments)
    if options.run is None and options.export is None:
        raise ConfigError("neither --run nor --export is given; give one of them")
    with interruptible(SIGUSR1):  # batch systems announce a time limit by it
        with once_per_host(), ExitStack() as stack:
            if options.is_exported:
                from deepspeed_nmt.export.runtime import check_options

                check_options(options)
            translation.check_workers(options)
            texts = stack.enter_context(translation.open_texts(options))
            in_pieces = texts.in_pieces()
            if options.workers == 1:
                level = logger.level
                if place().rank:  # warnings of a run are the same on all ranks
                    logger.setLevel(logging.ERROR)
                try:
                    translator = _open(options)
                finally:
                    logger.setLevel(level)
            opened = stack.pop_all()
        with opened:
            if options.workers > 1:
                pieces = -(-(texts.lines or 0) // texts.piece_lines)
                one = argparse.Namespace(**{**vars(arguments), "workers": 1, "device": "cpu"})
                return run_workers(execute, one, min(options.workers, max(1, pieces)))
            if in_pieces:
                return translation.translate_in_pieces(translator, texts)
            translation.translate_stream(translator, texts)
    return 0


def _open(options: DecodeOptions) -> LineTranslator:
    if options.is_exported:
        return _open_exported(options)
    import torch

    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.parallel.hardware import uses_cuda
    from deepspeed_nmt.parallel.launched import place
    from deepspeed_nmt.parallel.world import gpu_of

    if place().ranks > 1 and uses_cuda(options.device, "--device"):
        torch.cuda.set_device(gpu_of(place().local_rank))
    return Translator.opened(options, options.settings)


def _open_exported(options: DecodeOptions) -> ExportedTranslator:
    """Open an export, which is made first if a run has no current one. Nothing imports torch if it has one."""
    from deepspeed_nmt.export.certificate import EXPORTER, KeptExport, given_export
    from deepspeed_nmt.export.runtime import ExportedTranslator, choose

    if options.export is not None:
        return ExportedTranslator(options.export, given_export(options.export, options.precision), options)
    runs = options.run or ()
    if len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs are given, and --runtime ctranslate2 takes one; give one --run")
    run = runs[0]
    if not run.is_dir():
        raise ConfigError(f"{run} does not exist; give a directory made by `train`")
    checkpoint, layers = str(options.checkpoint), (options.encoder_layers, options.decoder_layers)
    exit = options.exit if layers[0] is None else f"{layers[0]}-{layers[1]}"
    precision = "fp32" if options.precision == "auto" else options.precision

    kept = KeptExport(run, checkpoint, exit, precision)

    def make(out: Path) -> Certificate:
        from deepspeed_nmt.run.exporting import ExportRequest, export_run  # imports torch

        def check(info: ExportInfo) -> None:
            choose(options, info, run)  # options that the run excludes are refused before it is exported
            kept.check_writable()
            logger.info("%s is exported for CTranslate2, once; later translations use %s", run, out)

        return export_run(ExportRequest(run, EXPORTER, precision, checkpoint, exit), out, overwrite=True, check=check)

    def is_current(certificate: Certificate) -> bool:
        from deepspeed_nmt.run.exporting import is_current  # imports torch

        return is_current(certificate, run, checkpoint)

    return ExportedTranslator(kept.place, kept.ensure(make, is_current), options)
