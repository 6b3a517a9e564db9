"""Options of `translate` that choose the program that translates."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.translate_options import tag_of
from deepspeed_nmt.errors import ConfigError, check_installed
from deepspeed_nmt.parallel.launched import place

if TYPE_CHECKING:
    from deepspeed_nmt.commands.translate_stream import StreamTranslator
    from deepspeed_nmt.export.certificate import Certificate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--runtime", choices=("torch", "ctranslate2"), default="torch",
        help="program that translates; ctranslate2: with an export of the run, which the first use makes and "
        "compares with the run (default: %(default)s)",
    )  # fmt: skip


def translate(arguments: argparse.Namespace, search: Mapping[str, Any]) -> int:
    """Translate with CTranslate2, without importing torch if there is a current export. Return the exit status.

    Args:
        arguments: of the command line.
        search: settings of the search by name; None where the run's is to be taken.

    Raises:
        UserError: if CTranslate2 does not have what the options ask for, or a file cannot be opened.
    """
    from deepspeed_nmt.commands.translate_outputs import target_of
    from deepspeed_nmt.commands.translate_stream import translate_stream
    from deepspeed_nmt.commands.translate_texts import texts_beside
    from deepspeed_nmt.export.ctranslate2_search import EXTRA
    from deepspeed_nmt.files import open_text

    check_installed("ctranslate2", "--runtime ctranslate2", EXTRA)
    if arguments.precision not in ("auto", "fp32", "int8"):
        raise ConfigError(
            f"--precision must be fp32 or int8 with --runtime ctranslate2, but is {arguments.precision}; give one of "
            "them"
        )
    if arguments.workers > 1 or place().ranks > 1:
        raise ConfigError(
            "--runtime ctranslate2 translates in one process, but several are to start; leave out --workers or the "
            "launcher, and set OMP_NUM_THREADS for more threads"
        )
    torch_only = ("prefix", "constraints", "alignment", "alignment_layer", "weights", "suppress", "tag_target")
    given = [name for name in torch_only if getattr(arguments, name) is not None]
    if given or arguments.token_scores:
        name = (given[0] if given else "token_scores").replace("_", "-")
        raise ConfigError(f"--{name} is not for --runtime ctranslate2; leave out one of them")
    target_of(arguments.output, "--output")
    with open_text(arguments.input) as source, texts_beside(arguments, source):
        translator = _open_exported(
            arguments.run,
            precision="int8" if arguments.precision == "int8" else "fp32",
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            exit=arguments.exit,
            encoder_layers=arguments.encoder_layers,
            decoder_layers=arguments.decoder_layers,
            detokenise=arguments.detokenise,
            nbest=arguments.nbest,
            rerank=arguments.rerank,
            tag=tag_of(arguments.tag),
            **{key: value for key, value in search.items() if key != "suppress"},
        )
        translate_stream(translator, arguments, source, {})
    return 0


def _open_exported(
    runs: Sequence[Path],
    *,
    precision: str,
    checkpoint: str,
    device: str,
    exit: str | None,
    encoder_layers: int | None,
    decoder_layers: int | None,
    detokenise: str | None,
    nbest: int,
    rerank: str | None,
    tag: str | None,
    name: str | None,
    **changes: Any,
) -> StreamTranslator:
    """Export a run if it has no current export, and open that.

    Raises:
        ConfigError: if CTranslate2 does not have what the options ask for.
    """
    from deepspeed_nmt.export import runtime
    from deepspeed_nmt.export.ctranslate2_search import check_device

    if len(runs) > 1:
        raise ConfigError(f"--runtime ctranslate2 takes one --run, but {len(runs)} are given; give one")
    if rerank is not None:
        raise ConfigError("--runtime ctranslate2 decodes with one net, --rerank with two; give one of them")
    if name not in (None, "beam"):
        raise ConfigError(f"--runtime ctranslate2 decodes by beam search, but --search is {name}; give one of them")
    if (encoder_layers is None) != (decoder_layers is None):
        raise ConfigError(
            "--runtime ctranslate2 needs both --encoder-layers and --decoder-layers, or --exit N-M; give the other"
        )
    exit = f"{encoder_layers}-{decoder_layers}" if encoder_layers is not None else exit
    run = runs[0]
    if not run.is_dir():
        raise ConfigError(f"--run must be a directory made by `train`, but {run} does not exist")
    runtime.check_changes(changes)
    check_device(device)
    place = runtime.place_of(run, checkpoint, exit, precision)

    def make(out: Path) -> Certificate:
        from deepspeed_nmt.run.directory import Run  # imports torch
        from deepspeed_nmt.run.exporting import ExportRequest, export_run, settings_of

        opened = Run.open(run)  # options that the run excludes are refused before it is exported
        runtime.check_nbest(nbest, runtime.changed_settings(settings_of(opened), changes))
        if detokenise is not None:
            runtime.plain_form(opened.text_form, detokenise)
        return export_run(ExportRequest(run, "ctranslate2", precision, checkpoint, exit), out, overwrite=True)

    def is_current(certificate: Certificate) -> bool:
        from deepspeed_nmt.run.exporting import is_current  # imports torch

        return is_current(certificate, run, checkpoint)

    runtime.ensure(place, run, checkpoint, make, is_current)
    return runtime.ExportedTranslator(place, device, changes, detokenise, tag)
