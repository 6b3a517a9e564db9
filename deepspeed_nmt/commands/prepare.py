r"""Make a data directory from aligned text files: clean the text, build the vocabulary, encode.

    deepspeed-nmt prepare --train-source train.en --train-target train.de \
        --valid-source valid.en --valid-target valid.de --out DATA

Training pairs are removed if a side is empty, not UTF-8, too long, or much longer than the other, and if they are
duplicates, and for further reasons with --filters; removals are counted by reason, with examples. Validation and test
text is copied as it is. Raw text gets a joint SentencePiece BPE vocabulary. Text that is already segmented with `@@ `
marks (--segmented) has its own tokens as vocabulary. An option with several files reads them one after another.
Text may be compressed by gzip, xz or zstd.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.commands.prepare_cleaning import add_cleaning_options, removals, removed_examples, repairs
from deepspeed_nmt.commands.prepare_inputs import add_inputs

if TYPE_CHECKING:
    from deepspeed_nmt.data.clean import CleaningConfig
    from deepspeed_nmt.data.directory import Meta
    from deepspeed_nmt.data.options import PrepareOptions

HELP = "make a data directory from text files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_inputs(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="data directory to make")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="size of the vocabulary (default: 8000; with --segmented: all)"
    )
    parser.add_argument(
        "--vocab-from", type=Path, metavar="DIR", help="use the vocabulary of this data or run directory"
    )
    parser.add_argument(
        "--tokenizer", metavar="hf:B[,B]",
        help="use the tokenizer of a BERT for both sides, or of two for source and target; B is a folder, or a name "
        "on the Hugging Face hub",
    )  # fmt: skip
    parser.add_argument("--segmented", action="store_true", help="the text is already segmented with '@@ ' marks")
    parser.add_argument(
        "--text", choices=("raw", "moses", "tokenised"),
        help="form of the text: raw, tokenised by Moses' rules, or by others; decides how translations are scored "
        "(default: raw; with --segmented: tokenised)",
    )  # fmt: skip
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-lang", metavar="L", help=f"language code of the {side}, for example de; Moses' rules need it"
        )
    parser.add_argument(
        "--character-coverage", type=float, default=1.0, metavar="P",
        help="share of the text's characters that the vocabulary covers; 0.9995 for Chinese or Japanese "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--normalization", choices=("none", "nfc", "nfkc"),
        help="Unicode normalization of raw text: nfkc rewrites compatibility variants (½ km² as 1⁄2 km2, full-width "
        "letters), nfc only unifies spellings of the same characters, none keeps them (default: nfkc)",
    )  # fmt: skip
    add_cleaning_options(parser)
    parser.add_argument(
        "--workers", "--threads", type=int, metavar="N",
        help="number of processes that clean and encode; the result is the same for any (default: all cores)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N",
        help="seed of the sample of text that the vocabulary is learnt from (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a data directory made from other text or options"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data, and print what was removed and what is left.

    Raises:
        ConfigError: if an option is out of range.
        DataError: if the text cannot be used.
    """
    from deepspeed_nmt.console import output
    from deepspeed_nmt.data.prepare import prepare

    options = read_options(arguments)
    output(report(prepare(options), options.cleaning, options.out))
    return 0


def read_options(arguments: argparse.Namespace) -> PrepareOptions:
    """Return the options of a command line.

    Raises:
        ConfigError: if an option is out of range, or contradicts another.
        DataError: if the directory of a given vocabulary cannot be read.
    """
    from pydantic import ValidationError

    from deepspeed_nmt.data.clean import CleaningConfig
    from deepspeed_nmt.data.options import PrepareOptions
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.registry import problem_of
    from deepspeed_nmt.run.vocabulary import verify_vocabulary

    given = vars(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cleaning = {name: given[name] for name in CleaningConfig.model_fields if name in given}
    given["workers"] = cores if arguments.workers is None else arguments.workers
    if arguments.tsv_columns is not None:
        given["tsv_columns"] = arguments.tsv_columns.split(",")
    settings = {name: given[name] for name in PrepareOptions.model_fields if name in given} | {"cleaning": cleaning}
    try:
        options = PrepareOptions.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(problem_of(problem, _option(problem["loc"])) for problem in error.errors()) from error
    if options.vocab_from is not None:
        verify_vocabulary(options.vocab_from)
    return options


def _option(location: tuple[int | str, ...]) -> str:
    """Return the option for an error's place among the settings."""
    names = [part for part in location if isinstance(part, str)]
    return f"--{names[-1].replace('_', '-')}" if names else ""


def report(meta: Meta, cleaning: CleaningConfig, out: Path) -> str:
    """Return a table of the pairs removed, by reason, and of the data directory's content."""
    train = meta.splits["train"]
    lines = [f"{'training pairs read':<62}{meta.pairs_read:>14,}", *removals(meta, cleaning)]
    lines.append(f"{'training pairs kept':<62}{train.pairs:>14,}{train.pairs / meta.pairs_read:>8.2%}")
    lines += repairs(meta)
    header = f"{'':<16}{'pairs':>12}{'tokens':>16}{'a sentence':>12}{'longest':>10}{'unknown':>12}{'changed':>10}"
    lines += ["", header]
    for split, stats in meta.splits.items():
        for side, counted in (("source", stats.source), ("target", stats.target)):
            lines.append(
                f"{f'{split} {side}':<16}{stats.pairs:>12,}{counted.tokens:>16,}"
                f"{counted.tokens / max(1, stats.pairs):>12.1f}{counted.longest:>10,}"
                f"{counted.unknown / max(1, counted.tokens):>12.4%}{_changed(meta, f'{split}.{side}'):>10}"
            )
    if "test.source" in meta.inputs:
        lines.append(f"{'test':<16}{sum(file.lines for file in meta.inputs['test.source']):>12,}  copied as it is")
    lines += removed_examples(meta) + _examples(meta)
    kind = "words of segmented text" if meta.segmented else "SentencePiece"
    if "vocab_from" in meta.options:
        kind += ", given"
    elif not meta.segmented:
        kind += f", normalization {meta.options.get('normalization', 'nfkc')}"
    size = f"{meta.vocabulary_size:,} tokens ({kind})"
    if "vocabulary.source.json" in meta.files:
        size = f"{meta.source_vocabulary_size:,} and {meta.vocabulary_size:,} tokens (of two BERTs)"
    return "\n".join([*lines, "", f"vocabulary      {size}", f"data directory  {out}"])


def _changed(meta: Meta, side: str) -> str:
    """Return the share of lines that encoding and decoding changes; "" if it is not recorded."""
    tried = meta.round_trips.get(side)
    return "" if tried is None else f"{tried.changed / max(1, tried.lines):.2%}"


def _examples(meta: Meta) -> list[str]:
    """Return lines of the report with examples of changed lines of both sides; none if no line was changed."""
    from deepspeed_nmt.data.round_trip import EXAMPLES, excerpts

    lines = []
    for side in ("source", "target"):
        tried = (each for name, each in meta.round_trips.items() if name.endswith(side))
        examples = [example for each in tried for example in each.examples][:EXAMPLES]
        lines += [f"  {side}  {excerpts(*example)}" for example in examples]
    return ["", "changed: lines that differ after encoding and decoding, for example", *lines] if lines else []
