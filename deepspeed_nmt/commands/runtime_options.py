"""Options of `translate` that choose the program that translates."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.translate_options import tag_of
from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, check_installed
from deepspeed_nmt.parallel.launched import place

if TYPE_CHECKING:
    from deepspeed_nmt.export.certificate import Certificate
    from deepspeed_nmt.export.runtime import Asked, ExportedTranslator

_TORCH_ONLY = ("prefix", "constraints", "alignment", "alignment_layer", "weights", "suppress")
"""Options that CTranslate2 does not have."""
_OF_EXPORTS = ("exit", "encoder_layers", "decoder_layers")
"""Options that are decided when a run is exported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--runtime", choices=("torch", "ctranslate2"),
        help="program that translates; ctranslate2: with an export of the run, which the first use makes and "
        "compares with the run (default: torch; with --export ctranslate2)",
    )  # fmt: skip


def uses_export(arguments: argparse.Namespace) -> bool:
    """Return True if CTranslate2 translates.

    Raises:
        ConfigError: if there is neither a run nor an export, or both.
    """
    if (arguments.run is None) == (arguments.export is None):
        what = "neither is" if arguments.run is None else "both are"
        raise ConfigError(f"--run or --export must be given, but {what}; give one of them")
    if arguments.export is not None and arguments.runtime == "torch":
        raise ConfigError("--export is for --runtime ctranslate2, but that is torch; leave out one of them")
    return arguments.export is not None or arguments.runtime == "ctranslate2"


def translate(arguments: argparse.Namespace, search: Mapping[str, Any]) -> int:
    """Translate with CTranslate2, without importing torch if there is a current export. Return the exit status.

    Args:
        arguments: of the command line.
        search: settings of the search by name; None where the run's is to be taken.

    Raises:
        UserError: if CTranslate2 does not have what the options ask for, or a file cannot be opened.
    """
    from deepspeed_nmt.commands.translate_layout import file_of, layout, translate_file
    from deepspeed_nmt.commands.translate_stream import translate_stream
    from deepspeed_nmt.commands.translate_texts import texts_beside
    from deepspeed_nmt.export.ctranslate2_search import EXTRA
    from deepspeed_nmt.export.runtime import Asked
    from deepspeed_nmt.files import open_text

    check_installed("ctranslate2", "--runtime ctranslate2", EXTRA)
    _check(arguments)
    changes = {key: value for key, value in search.items() if key not in ("suppress", "name")}
    tags = tag_of(arguments.tag), tag_of(arguments.tag_target)
    asked = Asked(search["name"], changes, arguments.nbest, arguments.detokenise, *tags)
    with ExitStack() as opened:
        source = opened.enter_context(open_text(arguments.input))
        beside = opened.enter_context(texts_beside(arguments, source))
        division = layout(arguments, source, beside)
        translator = _open(arguments, asked)
        if division.in_pieces:
            return translate_file(translator, arguments, file_of(arguments, source, division, beside))
        translate_stream(translator, arguments, source, {}, division.lines, division.piece_lines)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Check the options that do not depend on the run.

    Raises:
        ConfigError: if CTranslate2 does not have one.
    """
    from deepspeed_nmt.export.runtime import PRECISIONS

    if arguments.precision not in ("auto", *PRECISIONS):
        raise ConfigError(
            f"--precision must be {' or '.join(PRECISIONS)} with --runtime ctranslate2, but is "
            f"{arguments.precision}; give one of them"
        )
    if arguments.workers > 1 or place().ranks > 1:
        raise ConfigError(
            "--runtime ctranslate2 translates in one process, but several are to start; leave out --workers or the "
            "launcher, and set OMP_NUM_THREADS for more threads"
        )
    given = [name for name in _TORCH_ONLY if getattr(arguments, name) is not None]
    if given or arguments.token_scores:
        name = (given[0] if given else "token_scores").replace("_", "-")
        raise ConfigError(f"--{name} is not for CTranslate2; leave it out, or translate by the run with torch")
    if arguments.rerank is not None:
        raise ConfigError("--runtime ctranslate2 decodes from one exit, --rerank from two; give one of them")
    if (arguments.encoder_layers is None) != (arguments.decoder_layers is None):
        raise ConfigError(
            "--runtime ctranslate2 needs both --encoder-layers and --decoder-layers, or --exit N-M; give the other"
        )


def _open(arguments: argparse.Namespace, asked: Asked) -> ExportedTranslator:
    """Open the export, which is made first if a run has no current one.

    Raises:
        ConfigError: if CTranslate2 does not have what the options ask for.
    """
    from deepspeed_nmt.export import kept
    from deepspeed_nmt.export.ctranslate2_search import check_device
    from deepspeed_nmt.export.runtime import ExportedTranslator

    asked.check()
    check_device(arguments.device)
    if arguments.export is not None:
        where = arguments.export
        chosen = [name for name in _OF_EXPORTS if getattr(arguments, name) is not None]
        if chosen or arguments.checkpoint != "best":
            chosen = chosen or ["checkpoint"]
            name = chosen[0].replace("_", "-")
            raise ConfigError(f"--{name} is decided when a run is exported; leave it out, or give --run")
        certificate = kept.given(where, arguments.precision)
    else:
        where, certificate = _kept(arguments, asked)
    return ExportedTranslator(where, certificate, arguments.device, asked)


def _kept(arguments: argparse.Namespace, asked: Asked) -> tuple[Path, Certificate]:
    """Return the export that a run keeps and its certificate; it is made if there is none.

    Raises:
        ConfigError: if CTranslate2 does not have what the options or the run ask for.
    """
    from deepspeed_nmt.export import kept

    if len(arguments.run) > 1:
        raise ConfigError(f"--runtime ctranslate2 takes one --run, but {len(arguments.run)} are given; give one")
    run: Path = arguments.run[0]
    if not run.is_dir():
        raise ConfigError(f"--run must be a directory made by `train`, but {run} does not exist")
    layers = arguments.encoder_layers, arguments.decoder_layers
    exit: str | None = arguments.exit if layers[0] is None else f"{layers[0]}-{layers[1]}"
    precision = "fp32" if arguments.precision == "auto" else arguments.precision

    def make(out: Path) -> Certificate:
        from deepspeed_nmt.run.export_text import ExportRequest  # imports torch
        from deepspeed_nmt.run.exporting import export_run, owner_of

        owner = owner_of(run, exit)  # options that the run excludes are refused before it is exported
        asked.settings(owner), asked.tags(owner), asked.plain(owner)
        kept.check_place(out, run)
        logger.info("%s is exported for CTranslate2, once; later translations use %s", run, out)
        return export_run(
            ExportRequest(run, kept.EXPORTER, precision, arguments.checkpoint, exit), out, overwrite=True
        )

    def is_current(certificate: Certificate) -> bool:
        from deepspeed_nmt.run.exporting import is_current  # imports torch

        return is_current(certificate, run, arguments.checkpoint)

    place = kept.place_of(run, arguments.checkpoint, exit, precision)
    return place, kept.ensure(place, run, arguments.checkpoint, make, is_current)
