"""Translate a file, one sentence a line, with a trained run.

    deepspeed-nmt translate --run RUN --input test.en --output test.hyp
    deepspeed-nmt translate --run RUN_A --run RUN_B --input test.en --output test.hyp       # an ensemble

Files of any length are translated in bounded memory. The translation of an empty line is an empty line. A line of an
n-best list is `line ||| translation ||| features ||| score`, with lines counted from 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_nmt.commands.translate_files import Outputs, target_of, texts_beside
from deepspeed_nmt.commands.translate_options import (
    add_search_arguments,
    check_exits,
    search_arguments,
    weights_of,
)
from deepspeed_nmt.errors import ConfigError

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
    parser.add_argument(
        "--weights", metavar="W,W", help="weights of the runs of an ensemble, for example 0.7,0.3 (default: equal)"
    )
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
        "--strict", action="store_true", help="refuse source lines longer than --max-source-tokens instead"
    )
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
    add_search_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Translate the input.

    Raises:
        UserError: if options contradict each other, or a run or a file cannot be opened.
    """
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.console import counting
    from deepspeed_nmt.errors import DataError
    from deepspeed_nmt.files import open_text, text_lines
    from deepspeed_nmt.search.requests import MisalignedError

    if arguments.max_source_tokens is not None and arguments.max_source_tokens < 1:
        raise ConfigError(f"--max-source-tokens must be at least 1, but is {arguments.max_source_tokens}")
    check_exits(arguments)
    search = search_arguments(arguments)
    problem: MisalignedError | None = None
    number = -1
    for option in ("output", "alignment"):
        target_of(getattr(arguments, option) or "-", f"--{option}")
    with open_text(arguments.input) as source, texts_beside(arguments, source) as beside:
        translator = Translator.open(
            arguments.run,
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            exit=arguments.exit,
            encoder_layers=arguments.encoder_layers,
            decoder_layers=arguments.decoder_layers,
            detokenise=arguments.detokenise,
            weights=weights_of(arguments),
            **search,
        )
        if arguments.strict and source.seekable():  # a pipe is checked as it is read
            start = source.tell()
            translator.check(text_lines(source, arguments.input), arguments.max_source_tokens)
            source.seek(start)
        interactive = source.isatty()
        with Outputs.open(arguments) as outputs, counting("translate", "sentences") as advance:
            translations = translator.stream(
                text_lines(source, arguments.input),
                max_tokens=arguments.max_tokens,
                buffer_lines=1 if interactive else 4096,
                nbest=arguments.nbest,
                advance=advance,
                max_source_tokens=arguments.max_source_tokens,
                strict=arguments.strict,
                token_scores=arguments.token_scores,
                alignment=arguments.alignment is not None,
                alignment_layer=arguments.alignment_layer,
                prefix=beside["prefix"],
                constraints=beside["constraints"],
            )
            try:
                for number, best in enumerate(translations):
                    outputs.write(number, best)
                    if interactive:
                        outputs.text.flush()
            except MisalignedError as error:  # what was translated is kept
                problem = error
    if problem is not None:
        raise DataError(f"{problem}; lines translated: {number + 1:,}") from problem
    return 0
