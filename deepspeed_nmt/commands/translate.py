"""Translate a file, one sentence a line, with a trained run.

    deepspeed-nmt translate --run RUN --input test.en --output test.hyp
    deepspeed-nmt translate --run RUN_A --run RUN_B --input test.en --output test.hyp       # an ensemble

Files of any length are translated in bounded memory, by all ranks that a launcher or --workers starts. The same
command resumes a translation that was stopped. The translation of an empty line is an empty line. A line of an n-best
list is `line ||| translation ||| features ||| score`, with lines counted from 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from signal import SIGUSR1
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands import runtime_options
from deepspeed_nmt.commands.translate_options import (
    add_run_arguments,
    add_search_arguments,
    add_tag_arguments,
    check_exits,
    check_numbers,
    search_arguments,
    tag_of,
    weights_of,
)
from deepspeed_nmt.commands.translate_outputs import check_outputs
from deepspeed_nmt.interruption import interruptible

if TYPE_CHECKING:
    from deepspeed_nmt.api import Translator

HELP = "translate text with a trained run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_arguments(parser, "decode", required=False)
    parser.add_argument(
        "--export", type=Path, metavar="DIR",
        help="export for CTranslate2, made by `export`, to translate with in place of a run",
    )  # fmt: skip
    parser.add_argument("--input", required=True, metavar="F", help="source text; - is standard input")
    parser.add_argument("--output", required=True, metavar="F", help="file for translations; - is standard output")
    parser.add_argument(
        "--nbest", type=int, default=1, metavar="N",
        help="translations of each sentence; if above 1, as n-best lists in Moses' format (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--token-scores", action="store_true",
        help="write n-best lists, also of one translation, with the log-probability of each token",
    )  # fmt: skip
    parser.add_argument(
        "--alignment", metavar="F",
        help="file for links of words in Pharaoh's format, a line for each translation",
    )  # fmt: skip
    parser.add_argument(
        "--alignment-layer", type=int, metavar="N",
        help="decoder layer whose cross-attention aligns (default: the best on the run's validation text)",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N",
        help="batch size: sentences x longest source (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-source-tokens", type=int, metavar="N",
        help="longest source line, in tokens; of longer ones the beginning is translated (default: 1024, or the "
        "longest sentence that the run was trained on)",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true",
        help="refuse source lines longer than --max-source-tokens, and those that are not UTF-8, instead",
    )  # fmt: skip
    parser.add_argument(
        "--buffer-lines", type=int, metavar="N",
        help="lines of a pipe that are read, and written, together (default: 4096; of a terminal 1)",
    )  # fmt: skip
    parser.add_argument("--encoder-layers", type=int, metavar="N", help="first layers or loops to use (default: all)")
    parser.add_argument("--decoder-layers", type=int, metavar="M", help="first layers or loops to use (default: all)")
    parser.add_argument(
        "--exit", metavar="E", help="exit to decode from: shallow, deep (depth growing), or N-M (default: the top)"
    )
    parser.add_argument(
        "--detokenise", nargs="?", const="", metavar="L",
        help="write plain text: undo Moses' tokenizer by the rules of language L (default: that of the run's data)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16", "fp16", "int8"), default="auto",
        help="auto: 16 bit on a GPU, fp32 on a CPU; int8 is the fastest on a CPU (default: %(default)s)",
    )  # fmt: skip
    runtime_options.add_arguments(parser)
    add_tag_arguments(parser)
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="processes on this host's CPU that translate pieces of the file (default: %(default)s)",
    )  # fmt: skip
    add_search_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Translate the input.

    Raises:
        UserError: if options contradict each other, or a run or a file cannot be opened.
    """
    check_numbers(arguments)
    check_exits(arguments)
    search = search_arguments(arguments)
    with interruptible(SIGUSR1):  # batch systems announce a time limit by it
        if runtime_options.uses_export(arguments):
            return runtime_options.translate(arguments, search)
        return _translate(arguments, search)


def _translate(arguments: argparse.Namespace, search: Mapping[str, Any]) -> int:
    """Translate with torch, and return the exit status.

    Raises:
        UserError: as :func:`run`.
    """
    from deepspeed_nmt.commands import translate_pieces as pieces
    from deepspeed_nmt.commands.translate_layout import file_of, layout, translate_file
    from deepspeed_nmt.commands.translate_stream import translate_stream
    from deepspeed_nmt.commands.translate_texts import texts_beside
    from deepspeed_nmt.files import open_text
    from deepspeed_nmt.parallel.launched import once_per_host

    with once_per_host(), ExitStack() as opened:
        check_outputs(arguments)
        source = opened.enter_context(open_text(arguments.input))
        beside = opened.enter_context(texts_beside(arguments, source))
        division = layout(arguments, source, beside)
        if arguments.workers == 1:
            pieces.take_device(arguments)
            with pieces.warned_once():
                translator = _translator(arguments, search)
        opening = opened.pop_all()
    with opening:
        if arguments.workers > 1:
            return pieces.translate_by_workers(arguments, search, file_of(arguments, source, division, beside))
        if division.in_pieces:
            return translate_file(translator, arguments, file_of(arguments, source, division, beside))
        wanted = {
            "token_scores": arguments.token_scores,
            "alignment": arguments.alignment is not None,
            "alignment_layer": arguments.alignment_layer,
        }
        lines = {**beside.lines(), **wanted}
        translate_stream(translator, arguments, source, lines, division.lines, division.piece_lines)
    return 0


def _translator(arguments: argparse.Namespace, search: Mapping[str, Any]) -> Translator:
    """Open the run.

    Raises:
        UserError: if it cannot be opened.
    """
    from deepspeed_nmt.api import Translator

    return Translator.open(
        arguments.run,
        checkpoint=arguments.checkpoint,
        device=arguments.device,
        exit=arguments.exit,
        encoder_layers=arguments.encoder_layers,
        decoder_layers=arguments.decoder_layers,
        detokenise=arguments.detokenise,
        precision=arguments.precision,
        weights=weights_of(arguments),
        tag=tag_of(arguments.tag),
        tag_target=tag_of(arguments.tag_target),
        **search,
    )
