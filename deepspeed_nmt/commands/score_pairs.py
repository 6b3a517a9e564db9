"""Print the log-probabilities that a trained run gives to translations.

    deepspeed-nmt score-pairs --run RUN --source test.en --target candidates.de --output scores.tsv
    deepspeed-nmt score-pairs --run RUN --source test.en --target test.de --all-exits --tokens

For reranking and for contrastive test sets. A line has the number of the pair from 0, the exit, the log-probability
(nats) of the translation with its EOS, the mean of its tokens, and their number without EOS, separated by tabs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from io import BufferedReader
from itertools import tee
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.translate_options import (
    add_run_arguments,
    add_tag_arguments,
    check_numbers,
    tag_of,
    weights_of,
)
from deepspeed_nmt.commands.translate_outputs import target_of
from deepspeed_nmt.commands.translate_texts import count_lines
from deepspeed_nmt.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.search.scoring import ScoredTranslation

HELP = "log-probabilities of given translations, by sentence and token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_arguments(parser, "score")
    add_tag_arguments(parser)
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
    parser.add_argument("--tokens", action="store_true", help="also print each token and its log-probability")
    parser.add_argument("--json", action="store_true", help="print JSON objects, one a line")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N",
        help="batch size: pairs x longest side (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-source-tokens", type=int, metavar="N",
        help="longest source line, in tokens; of longer ones the beginning is read (default: 1024, or the longest "
        "sentence that the run was trained on)",
    )  # fmt: skip
    parser.add_argument(
        "--strict", action="store_true",
        help="refuse source lines longer than --max-source-tokens, and those that are not UTF-8, instead",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto: a GPU if there is one (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16", "fp16", "int8"), default="fp32",
        help="auto: 16 bit on a GPU, whose scores differ in the third digit (default: %(default)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Score the pairs.

    Raises:
        UserError: if options contradict each other, or a run or a file cannot be opened, or the files have different
            numbers of lines; the pairs before are scored.
    """
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.console import counting
    from deepspeed_nmt.errors import DataError
    from deepspeed_nmt.files import atomic_text_writer, open_text, replaces, text_lines
    from deepspeed_nmt.search.base import MisalignedError
    from deepspeed_nmt.search.scoring import check_targets

    check_numbers(arguments)
    target = target_of(arguments.output, "--output")
    if arguments.source == arguments.target == "-":
        raise ConfigError("standard input (`-`) must be given at most once, but is given more often; give paths")
    problem: MisalignedError | None = None
    with ExitStack() as stack:
        files = [stack.enter_context(open_text(name)) for name in (arguments.source, arguments.target)]
        for option, file in zip(("source", "target"), files, strict=True):
            if target is not None and replaces(target, file):
                raise ConfigError(
                    f"--output must be another file than --{option}, but {target} is that text; give a path"
                )
        names = (arguments.source, arguments.target)
        counts = [count_lines(file, name) for file, name in zip(files, names, strict=True)]
        if None not in counts and counts[0] != counts[1]:
            raise DataError(
                f"--source and --target must be aligned line by line, but have {counts[0]:,} and {counts[1]:,} "
                "lines; give texts of the same sentences"
            )
        translator = Translator.open(
            arguments.run,
            checkpoint=arguments.checkpoint,
            device=arguments.device,
            exit=arguments.exit,
            weights=weights_of(arguments),
            tag=tag_of(arguments.tag),
            tag_target=tag_of(arguments.tag_target),
            precision=arguments.precision,
        )
        if files[1].seekable():  # a pipe is checked as it is read
            check_targets(translator.model, translator.tokenizer, translator.tags, text_lines(files[1], names[1]))
            files[1].seek(0)
        exits = translator.exits if arguments.all_exits else [arguments.exit or "top"]
        output = stack.enter_context(nullcontext(sys.stdout) if target is None else atomic_text_writer(target))
        advance = stack.enter_context(counting("score-pairs", "scores"))
        streams = _streams(translator, exits, files, arguments, advance)
        try:
            for number, scored in enumerate(zip(*streams, strict=True)):
                for name, each in zip(exits, scored, strict=True):
                    output.write(_line(number, name, each, translator, arguments) + "\n")
        except MisalignedError as error:  # what was scored is kept
            problem = error
        output.flush()
    if problem is not None:
        raise DataError(f"{problem}; the pairs before are scored") from problem
    return 0


def _streams(
    translator: Translator,
    exits: Sequence[str],
    files: Sequence[BufferedReader[Any]],
    arguments: argparse.Namespace,
    advance: Callable[[int], object],
) -> list[Iterator[ScoredTranslation]]:
    """Return the scores of all pairs at each exit, which are read in bounded memory if they are read together."""
    from deepspeed_nmt.files import text_lines

    names = (arguments.source, arguments.target)
    sides = [tee(text_lines(file, name), len(exits)) for file, name in zip(files, names, strict=True)]
    return [
        (translator.at_exit(name) if arguments.all_exits else translator).score(
            sources,
            targets,
            max_tokens=arguments.max_tokens,
            advance=advance,
            max_source_tokens=arguments.max_source_tokens,
            strict=arguments.strict,
            warn=number == 0,
        )
        for number, (name, sources, targets) in enumerate(zip(exits, *sides, strict=True))
    ]


def _line(
    number: int, exit: str, scored: ScoredTranslation, translator: Translator, arguments: argparse.Namespace
) -> str:
    """Return the scores of a pair at an exit as a line."""
    pieces = translator.tokenizer.pieces(scored.tokens, "target") if arguments.tokens else []
    if arguments.json:
        values: dict[str, object] = {
            "line": number,
            "exit": exit,
            "log_prob": scored.log_prob,
            "mean_log_prob": scored.mean_log_prob,
            "tokens": len(scored.tokens),
        }
        if arguments.tokens:
            values |= {"pieces": pieces, "token_log_probs": scored.log_probs}
        return json.dumps(values, ensure_ascii=False)
    fields = [str(number), exit, f"{scored.log_prob:.9g}", f"{scored.mean_log_prob:.9g}", str(len(scored.tokens))]
    if arguments.tokens:
        fields += [" ".join(pieces), " ".join(f"{value:.9g}" for value in scored.log_probs)]
    return "\t".join(fields)
