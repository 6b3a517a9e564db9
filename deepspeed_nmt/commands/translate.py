"""Translate a file, one sentence a line, with a trained run.

    deepspeed-nmt translate --run RUN --input test.en --output test.hyp
    deepspeed-nmt translate --run RUN_A --run RUN_B --input test.en --output test.hyp       # an ensemble

Files of any length are translated in bounded memory. The translation of an empty line is an empty line. A line of an
n-best list is `line ||| translation ||| features ||| score`, with lines counted from 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.commands import runtime_options
from deepspeed_nmt.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_nmt.evaluate.nbest import Candidate
    from deepspeed_nmt.search.base import Translation

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
    runtime_options.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Translate the input.

    Raises:
        UserError: if options contradict each other, or a run or a file cannot be opened.
    """
    from deepspeed_nmt.console import counting
    from deepspeed_nmt.files import atomic_text_writer, open_text, replaces, text_lines

    _check(arguments)
    target = None if arguments.output == "-" else Path(arguments.output)
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        what = "is a directory" if target.is_dir() else f"is in {target.parent}, which is no directory"
        raise ConfigError(f"--output must be a writable file, but {target} {what}; give another path")
    with open_text(arguments.input) as source:
        if target is not None and replaces(target, source):
            raise ConfigError(
                f"--output must be another file than --input, but {target} is the source text; give another path"
            )
        translator = runtime_options.opener(arguments)(
            arguments.run,
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            exit=arguments.exit,
            encoder_layers=arguments.encoder_layers,
            decoder_layers=arguments.decoder_layers,
            detokenise=arguments.detokenise,
            name=arguments.rerank and arguments.rerank.replace("-", "_"),
            **{option: getattr(arguments, option) for option in _SEARCH_OPTIONS},
        )
        if arguments.strict and source.seekable():  # a pipe is checked as it is read
            start = source.tell()
            translator.check(text_lines(source, arguments.input), arguments.max_source_tokens)
            source.seek(start)
        interactive = source.isatty()
        writer = nullcontext(sys.stdout) if target is None else atomic_text_writer(target)
        with writer as output, counting("translate", "sentences") as advance:
            translations = translator.stream(
                text_lines(source, arguments.input),
                max_tokens=arguments.max_tokens,
                buffer_lines=1 if interactive else 4096,
                nbest=arguments.nbest,
                advance=advance,
                max_source_tokens=arguments.max_source_tokens,
                strict=arguments.strict,
            )
            for number, best in enumerate(translations):
                if arguments.nbest == 1:
                    output.write(best[0].text + "\n")
                else:
                    output.writelines(f"{candidate}\n" for candidate in _candidates(number, best))
                if interactive:
                    output.flush()
            output.flush()
    return 0


_SEARCH_OPTIONS = ("beam", "length_penalty", "alpha", "exponent", "iterations", "length_beam")
"""Options that override settings of the search."""


def _candidates(line: int, translations: Sequence[Translation]) -> Iterator[Candidate]:
    """Yield the translations of a line as an n-best list."""
    from deepspeed_nmt.evaluate.nbest import Candidate

    for each in translations:
        features = {**each.features, "log_prob": each.log_prob, "tokens": len(each.tokens)}
        yield Candidate(line, each.text, features, each.score)


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
