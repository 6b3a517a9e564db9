"""Print the log-probabilities that a trained run gives to translations.

    deepspeed-nmt score-pairs --run RUN --source test.en --target candidates.de --output scores.tsv
    deepspeed-nmt score-pairs --run RUN --source test.en --target test.de --all-exits --tokens

For reranking, contrastive test sets, and doubtful translations. A line has the number of the pair from 0, the exit,
the log-probability (nats) of the translation with its EOS, the mean of its tokens, and their number without EOS,
separated by tabs. With `--reliance` it also has by how much the source raises the mean: if little, the translation
may not come from its source.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, nullcontext
from itertools import tee
from typing import TYPE_CHECKING

from deepspeed_nmt.commands.flags import add_flags
from deepspeed_nmt.console import counting
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_writer, text_lines
from deepspeed_nmt.search.decode_options import DecodeOptions

if TYPE_CHECKING:
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.search.reliance import ScoredTranslation

_OPTIONS = (
    *("run", "checkpoint", "weights", "tag", "tag_target", "max_tokens", "max_source_tokens", "strict", "device"),
    "precision",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--source", required=True, metavar="F", help="source text; - is standard input")
    parser.add_argument(
        "--target", required=True, metavar="F",
        help="a translation of each source line; for several translations of a sentence repeat its source",
    )  # fmt: skip
    parser.add_argument(
        "--output", default="-", metavar="F", help="file for scores; - is standard output (default: %(default)s)"
    )
    exits = parser.add_mutually_exclusive_group()
    exits.add_argument("--exit", metavar="E", help="exit to score at: shallow, deep, or N-M (default: the top)")
    exits.add_argument("--all-exits", action="store_true", help="score at every exit that the run has trained")
    parser.add_argument(
        "--reliance",
        action="store_true",
        help="also print by how much the source raises the mean of the tokens",
    )
    parser.add_argument("--tokens", action="store_true", help="also print each token and its log-probability")
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line")
    add_flags(parser, DecodeOptions, _OPTIONS, ("run",), {"precision": "fp32"})


def run(arguments: argparse.Namespace) -> int:
    """Score the pairs; if the files have different numbers of lines, those before."""
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.run.translation import open_aligned, output_path
    from deepspeed_nmt.search.base import MisalignedError
    from deepspeed_nmt.search.forced import check_targets

    options = DecodeOptions.of_command(arguments)
    target = output_path(arguments.output, "--output")
    names = {"source": arguments.source, "target": arguments.target}
    problem: MisalignedError | None = None
    with ExitStack() as stack:
        files, _ = open_aligned(stack, names, {"output": target})
        translator = Translator.opened(options, {})
        for side, file in files.items():
            if file.seekable():  # a pipe is checked as it is read
                start, lines = file.tell(), text_lines(file, names[side])
                if side == "target":
                    check_targets(translator.model, translator.tokenizer, translator.tags, lines, options.strict)
                elif options.strict:
                    translator.check(lines, options.max_source_tokens)
                file.seek(start)
        exits = translator.exits if arguments.all_exits else [arguments.exit or "top"]
        output = stack.enter_context(nullcontext(sys.stdout) if target is None else atomic_writer(target, "w"))
        advance = stack.enter_context(counting("score-pairs", "scores"))
        sides = [tee(text_lines(file, names[side]), len(exits)) for side, file in files.items()]
        keywords = options.given_values("max_tokens", "max_source_tokens", "strict")
        streams = [  # read together, in bounded memory
            (translator.at_exit(name) if arguments.all_exits else translator).score(
                *texts, advance=advance, warn=number == 0, reliance=arguments.reliance, **keywords
            )
            for number, (name, *texts) in enumerate(zip(exits, *sides, strict=True))
        ]
        try:
            for number, scored in enumerate(zip(*streams, strict=True)):
                for name, pair in zip(exits, scored, strict=True):
                    output.write(_line(number, name, pair, translator, arguments) + "\n")
        except MisalignedError as error:  # what was scored is kept
            problem = error
        output.flush()
    if problem is not None:
        raise DataError(f"{problem}; the pairs before are scored") from problem
    return 0


def _line(
    number: int, exit: str, scored: ScoredTranslation, translator: Translator, arguments: argparse.Namespace
) -> str:
    """Return the scores of a pair at an exit as a line."""
    values: dict[str, object] = {
        "line": number,
        "exit": exit,
        "log_prob": scored.log_prob,
        "mean_log_prob": scored.mean_log_prob,
        "tokens": len(scored.tokens),
    }
    if arguments.reliance:
        values["reliance"] = scored.reliance
    if arguments.tokens:
        values["pieces"] = translator.tokenizer.pieces(scored.tokens, "target")
        values["token_log_probs"] = scored.log_probs
    if arguments.tokens and arguments.reliance:
        values["token_reliance"] = scored.token_reliance
    return json.dumps(values, ensure_ascii=False) if arguments.json else "\t".join(map(_field, values.values()))


def _field(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_field, value))
    return f"{value:.9g}" if isinstance(value, float) else str(value)
