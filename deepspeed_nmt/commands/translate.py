"""Translate a file, one sentence a line, with a trained run.

    deepspeed-nmt translate --run RUN --input test.en --output test.hyp
    deepspeed-nmt translate --run RUN_A --run RUN_B --input test.en --output test.hyp       # an ensemble

Files of any length are translated in bounded memory, by all ranks that a launcher or --workers starts. The same
command resumes a translation that was stopped. The translation of an empty line is an empty line. A line of an n-best
list is `line ||| translation ||| features ||| score`, with lines counted from 0.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.commands import runtime_options
from deepspeed_nmt.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_nmt.api import Translator

HELP = "translate text with a trained run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--run", type=Path, required=True, action="append", metavar="DIR",
        help="run directory, made by `train`; several decode as an ensemble",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", default="best", metavar="C", help="best, last, average, or a path (default: %(default)s)"
    )
    parser.add_argument("--input", required=True, metavar="F", help="source text; - is standard input")
    parser.add_argument("--output", required=True, metavar="F", help="file for translations; - is standard output")
    parser.add_argument("--beam", type=int, metavar="K", help="beam size (default: search.beam of the run)")
    parser.add_argument(
        "--length-penalty",
        metavar="P",
        help="gnmt:A, power:A, mean or none (default: search.length_penalty of the run)",
    )
    parser.add_argument(
        "--iterations", type=int, metavar="T", help="mask-predict: iterations (default: search.iterations of the run)"
    )
    parser.add_argument(
        "--length-beam", type=int, metavar="L",
        help="mask-predict: candidate lengths (default: search.length_beam of the run)",
    )  # fmt: skip
    parser.add_argument(
        "--nbest", type=int, default=1, metavar="N",
        help="translations of each sentence; if above 1, as n-best lists in Moses' format (default: %(default)s)",
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
        "--strict", action="store_true", help="refuse source lines longer than --max-source-tokens instead"
    )
    parser.add_argument("--encoder-layers", type=int, metavar="N", help="first layers or loops to use (default: all)")
    parser.add_argument("--decoder-layers", type=int, metavar="M", help="first layers or loops to use (default: all)")
    parser.add_argument(
        "--exit", metavar="E", help="exit to decode from: shallow, deep (depth growing), or N-M (default: the top)"
    )
    parser.add_argument(
        "--rerank", choices=("deep-shallow",), help="depth growing: rerank the candidates of both nets by both nets"
    )
    parser.add_argument(
        "--alpha", type=float, metavar="A",
        help="deep-shallow: weight of the net that proposed a candidate (default: search.alpha of the run, or 0.5)",
    )  # fmt: skip
    parser.add_argument(
        "--exponent", type=float, metavar="E",
        help="deep-shallow: exponent of the length in the score (default: search.exponent of the run, or 0.4)",
    )  # fmt: skip
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
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="processes on this host's CPU that translate pieces of the file (default: %(default)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Translate the input.

    Raises:
        UserError: if options contradict each other, or a run or a file cannot be opened.
    """
    from deepspeed_nmt.commands.translate_stream import checked_target, translate_stream
    from deepspeed_nmt.files import open_text
    from deepspeed_nmt.parallel.launched import once_per_host

    if arguments.runtime == "ctranslate2":
        _check(arguments)
        return runtime_options.translate(arguments, {name: getattr(arguments, name) for name in _SEARCH_OPTIONS})
    from deepspeed_nmt.commands import translate_files as files

    with once_per_host(), ExitStack() as opened:
        _check(arguments)
        target = checked_target(arguments)
        source = opened.enter_context(open_text(arguments.input))
        layout = files.layout(arguments, source, target)
        if arguments.workers == 1:
            files.take_device(arguments)
            with files.warned_once():
                translator = _translator(arguments)
        opening = opened.pop_all()
    with opening:
        if arguments.workers > 1:
            return files.translate_by_workers(arguments)
        if layout.in_pieces:
            return files.translate(translator, arguments, source, layout)
        translate_stream(translator, arguments, source, target, layout.lines, layout.piece_lines)
    return 0


_SEARCH_OPTIONS = ("beam", "length_penalty", "alpha", "exponent", "iterations", "length_beam")
"""Options that override settings of the search."""


def _translator(arguments: argparse.Namespace) -> Translator:
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
        name=arguments.rerank and arguments.rerank.replace("-", "_"),
        **{option: getattr(arguments, option) for option in _SEARCH_OPTIONS},
    )


def _check(arguments: argparse.Namespace) -> None:
    """Check that the options do not contradict each other.

    Raises:
        ConfigError: if they do, naming them.
    """
    if arguments.max_source_tokens is not None and arguments.max_source_tokens < 1:
        raise ConfigError(f"--max-source-tokens must be at least 1, but is {arguments.max_source_tokens}")
    layers = arguments.encoder_layers is not None or arguments.decoder_layers is not None
    if layers and arguments.exit is not None:
        raise ConfigError("--exit and --encoder-layers or --decoder-layers both choose an exit; give one of them")
    if arguments.rerank is None:
        return
    if layers or arguments.exit is not None:
        option = "--exit" if arguments.exit is not None else "--encoder-layers or --decoder-layers"
        raise ConfigError(f"--rerank {arguments.rerank} decodes from two exits, {option} from one; give one of them")
    if len(arguments.run) > 1:
        raise ConfigError(
            f"--rerank {arguments.rerank} takes one --run, but {len(arguments.run)} are given; leave out --rerank to "
            "decode with an ensemble, or give one"
        )
