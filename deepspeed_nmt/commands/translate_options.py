"""Options of `translate` that choose the search, its settings, and its inputs beside the source."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deepspeed_nmt.deep_shallow import ALPHA, EXPONENT
from deepspeed_nmt.errors import ConfigError, shown

_SEARCH_OPTIONS = (
    *("beam", "length_penalty", "alpha", "exponent", "iterations", "length_beam", "groups", "diversity"),
    *("samples", "temperature", "top_k", "top_p", "seed", "utility"),
    *("min_length", "max_length", "max_length_ratio", "max_length_extra", "no_repeat_ngram", "suppress_unknown"),
)
"""Options that override settings of the search."""


def add_run_arguments(parser: argparse.ArgumentParser, verb: str, required: bool = True) -> None:
    """Declare the options that choose the runs.

    Args:
        parser: of the command.
        verb: of what several runs do as an ensemble, for the help.
        required: False if the command takes something else in place of a run.
    """
    parser.add_argument(
        "--run", type=Path, required=required, action="append", metavar="DIR",
        help=f"run directory, made by `train`; several {verb} as an ensemble",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint", default="best", metavar="C", help="best, last, average, or a path (default: %(default)s)"
    )
    parser.add_argument(
        "--weights", metavar="W,W", help="weights of the runs of an ensemble, for example 0.7,0.3 (default: equal)"
    )


def add_tag_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for tags."""
    parser.add_argument(
        "--tag", metavar="S",
        help="put this symbol of the vocabulary in front of each source line, or `none` (default: that of the run's "
        "data, if any)",
    )  # fmt: skip
    parser.add_argument(
        "--tag-target", metavar="S",
        help="let each translation begin with this symbol, which is not written, or `none` (default: that of the "
        "run's data, if any)",
    )  # fmt: skip


def tag_of(given: str | None) -> str | None:
    """Return a tag as :meth:`Translator.open` takes it: "" for none, None for that of the run's data."""
    return "" if given == "none" else given


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    search = parser.add_argument_group("search")
    search.add_argument(
        "--search", metavar="S",
        help="beam, diverse_beam, constrained_beam, sampling, mbr, deep_shallow, or mask_predict "
        "(default: search.name of the run)",
    )  # fmt: skip
    search.add_argument("--beam", type=int, metavar="K", help="beam size (default: search.beam of the run)")
    search.add_argument("--length-penalty", metavar="P", help="gnmt:A, power:A, mean or none (default: the run's)")
    search.add_argument("--groups", type=int, metavar="G", help="diverse beam: groups (default: the beam size)")
    search.add_argument(
        "--diversity", type=float, metavar="D",
        help="diverse beam: cost of a token for each hypothesis of an earlier group that has it (default: 0.5)",
    )  # fmt: skip
    search.add_argument(
        "--samples", type=int, metavar="N", help="sampling, mbr: samples of a sentence (default: 1, mbr: 32)"
    )
    search.add_argument("--temperature", type=float, metavar="T", help="sampling, mbr: temperature (default: 1)")
    search.add_argument("--top-k", type=int, metavar="K", help="sampling, mbr: from the K best tokens (default: all)")
    search.add_argument(
        "--top-p", type=float, metavar="P",
        help="sampling, mbr: from the fewest tokens whose probabilities sum to P (default: 1)",
    )  # fmt: skip
    search.add_argument("--seed", type=int, metavar="N", help="sampling, mbr: of the random choices (default: 1)")
    search.add_argument("--utility", metavar="U", help="mbr: chrf or bleu (default: chrf)")
    search.add_argument(
        "--iterations", type=int, metavar="T", help="mask-predict: iterations (default: search.iterations of the run)"
    )
    search.add_argument(
        "--length-beam", type=int, metavar="L",
        help="mask-predict: candidate lengths (default: search.length_beam of the run)",
    )  # fmt: skip
    search.add_argument(
        "--rerank", choices=("deep-shallow",), help="depth growing: rerank the candidates of both exits by both exits"
    )
    search.add_argument(
        "--alpha", type=float, metavar="A",
        help="deep-shallow: weight of the exit that proposed a candidate (default: search.alpha of the run, or "
        f"{ALPHA})",
    )  # fmt: skip
    search.add_argument(
        "--exponent", type=float, metavar="E",
        help="deep-shallow: exponent of the length in the score (default: search.exponent of the run, or "
        f"{EXPONENT})",
    )  # fmt: skip
    rules = parser.add_argument_group("rules of the translation")
    rules.add_argument("--prefix", metavar="F", help="text with which each translation begins, line by line")
    rules.add_argument(
        "--constraints", metavar="F",
        help="phrases that each translation contains, separated by tabs, line by line (search constrained_beam)",
    )  # fmt: skip
    rules.add_argument("--min-length", type=int, metavar="N", help="shortest translation in tokens, EOS included")
    rules.add_argument(
        "--max-length", type=int, metavar="N",
        help="longest translation in tokens, EOS included; the ratio and the tokens on top of it bound it as well",
    )  # fmt: skip
    rules.add_argument("--max-length-ratio", type=float, metavar="A", help="at most A tokens for each source token")
    rules.add_argument("--max-length-extra", type=int, metavar="B", help="at most B tokens on top of the ratio")
    rules.add_argument("--no-repeat-ngram", type=int, metavar="N", help="no N tokens occur twice in this order")
    rules.add_argument(
        "--suppress-unknown", action="store_true", default=None, help="never predict the unknown token"
    )
    rules.add_argument(
        "--suppress", action="append", metavar="TOKEN", help="never predict this token; may be given several times"
    )


def search_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the search, as :meth:`Translator.open` takes them.

    Raises:
        ConfigError: if options choose different searches.
    """
    chosen = {
        "--search": arguments.search,
        "--rerank": arguments.rerank and arguments.rerank.replace("-", "_"),
        "--constraints": arguments.constraints and "constrained_beam",
    }
    given = [(option, name) for option, name in chosen.items() if name is not None]
    for option, name in given[1:]:
        if name != given[0][1]:
            raise ConfigError(
                f"{given[0][0]} decodes by the search {given[0][1]}, {option} by {name}; give one of them"
            )
    settings = {option: getattr(arguments, option) for option in _SEARCH_OPTIONS}
    return {"name": given[0][1] if given else None, "suppress": arguments.suppress, **settings}


def weights_of(arguments: argparse.Namespace) -> list[float] | None:
    """Return the weights of an ensemble.

    Raises:
        ConfigError: if they are no numbers.
    """
    if arguments.weights is None:
        return None
    try:
        return [float(word) for word in arguments.weights.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--weights must be numbers, separated by commas, but is {arguments.weights}; for example 0.7,0.3"
        ) from error


def check_numbers(arguments: argparse.Namespace) -> None:
    """Check the numbers that no setting bounds, as far as the command has them.

    Raises:
        ConfigError: if one is below 1, naming all.
    """
    names = ("nbest", "max_tokens", "max_source_tokens", "buffer_lines")
    given = {name: getattr(arguments, name, None) for name in names}
    problems = [
        f"--{name.replace('_', '-')} must be a whole number of at least 1, but is {shown(value)}"
        for name, value in given.items()
        if value is not None and value < 1
    ]
    if problems:
        raise ConfigError(problems)


def check_exits(arguments: argparse.Namespace) -> None:
    """Check that the options that choose an exit do not contradict others.

    Raises:
        ConfigError: if they do, naming them.
    """
    layers = arguments.encoder_layers is not None or arguments.decoder_layers is not None
    if layers and arguments.exit is not None:
        raise ConfigError("--exit and --encoder-layers or --decoder-layers both choose an exit; give one of them")
    if arguments.rerank is None:
        return
    if layers or arguments.exit is not None:
        option = "--exit" if arguments.exit is not None else "--encoder-layers or --decoder-layers"
        raise ConfigError(f"--rerank {arguments.rerank} decodes from two exits, {option} from one; give one of them")
    if arguments.run is not None and len(arguments.run) > 1:
        raise ConfigError(
            f"--rerank {arguments.rerank} takes one --run, but {len(arguments.run)} are given; leave out --rerank to "
            "decode with an ensemble, or give one"
        )
