r"""Make a data directory from aligned text files: clean the text, build the vocabulary, encode.

    deepspeed-nmt prepare --train-source train.en --train-target train.de \
        --valid-source valid.en --valid-target valid.de --out DATA

Training pairs are removed if a side is empty, not UTF-8, too long, or much longer than the other, and if they are
duplicates, and for further reasons with --filters; removals are counted by reason, with examples. Validation and test
text is copied as it is. By default raw text gets a joint SentencePiece BPE vocabulary. Text that is already segmented
with `@@ ` marks (--segmented) has its own tokens as vocabulary. An option with several files reads them one after
another. Text may be compressed by gzip, xz or zstd, and a file of it may be a URL, such as s3://BUCKET/train.en.gz.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from typing_extensions import override

from deepspeed_nmt.commands.flags import add_flags
from deepspeed_nmt.console import output, table
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.bert_tokenizer import side_file
from deepspeed_nmt.data.clean import CleaningConfig
from deepspeed_nmt.data.data_directory import Meta
from deepspeed_nmt.data.fairseq import DICTIONARY_FILES
from deepspeed_nmt.data.filters import EXAMPLES, read_filters
from deepspeed_nmt.data.marian_tokenizer import NUMBERS_FILES
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.preparation import prepare
from deepspeed_nmt.data.sentencepiece import SIDE_MODEL_FILES
from deepspeed_nmt.data.stages import Preparation
from deepspeed_nmt.registry import validated

_SHOWN = 50  # characters of an example


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_flags(parser, PrepareOptions)
    add_flags(parser, CleaningConfig)
    add_status(parser)


def add_status(parser: argparse.ArgumentParser) -> None:
    """Declare the option that shows the progress of tasks."""
    text = "show the progress of the tasks of an --out, and nothing else"
    parser.add_argument("--status", type=Path, metavar="OUT", action=_Status, help=text)


class _Status(argparse.Action):
    """The option with which no other is required."""

    @override
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *values: Any) -> None:
        namespace.status = values[0]
        for action in parser._actions:
            action.required = False


def run(arguments: argparse.Namespace) -> int:
    """Prepare the data, and print what was removed and what is left."""
    if arguments.status is not None:
        from deepspeed_nmt.data.cluster import status  # imports datatrove

        output(status(Preparation, arguments.status))
        return 0
    options = read_options(vars(arguments))
    made = prepare(options)
    output(made if isinstance(made, str) else report(made, options.out))
    return 0


def read_options(values: Mapping[str, Any]) -> PrepareOptions:
    """Return the options of a command line; others are ignored. Without ``workers`` all cores work."""
    cores = len(os.sched_getaffinity(0))
    cleaning = {name: values[name] for name in CleaningConfig.model_fields if name in values}
    known = {name: values[name] for name in PrepareOptions.model_fields if name in values}
    options = validated(PrepareOptions, {"workers": cores, **known, "cleaning": cleaning})
    if options.vocab_from is not None:
        verify_vocabulary(options.vocab_from)
    return options


def verify_vocabulary(path: Path) -> None:
    """Verify the files of a run. A data directory is verified when it is opened."""
    if (path / "checkpoints").is_dir():
        from deepspeed_nmt.run.directory import verify_run  # takes seconds

        verify_run(path)


def report(meta: Meta, out: Path) -> str:
    """Return a table of the pairs removed, by reason, and of the data directory's content."""
    reasons = CleaningConfig(**meta.options["cleaning"]).reasons(read_filters(meta.options.get("filters", {})))
    train, read = meta.splits["train"], meta.pairs_read
    counts = [["training pairs read", f"{read:,}", ""]]
    for reason, count in meta.removed.items():
        if count:
            counts.append([f"removed: {reasons[reason]}", f"{count:,}", f"{count / read:.2%}"])
    counts.append(["training pairs kept", f"{train.pairs:,}", f"{train.pairs / read:.2%}"])
    parts = [table(counts)]
    if meta.repaired:
        rules = [[rule, f"{lines['source']:,}", f"{lines['target']:,}"] for rule, lines in meta.repaired.items()]
        parts.append(table([["lines repaired", "source", "target"], *rules]))

    rows = [["", "pairs", "tokens", "a sentence", "longest", "unknown", "changed"]]
    for split, stats in meta.splits.items():
        for side, tokens in (("source", stats.source), ("target", stats.target)):
            trip = meta.round_trips.get(f"{split}.{side}")
            rows.append(
                [
                    f"{split} {side}",
                    *(f"{stats.pairs:,}", f"{tokens.tokens:,}", f"{tokens.tokens / max(1, stats.pairs):.1f}"),
                    *(f"{tokens.longest:,}", f"{tokens.unknown / max(1, tokens.tokens):.4%}"),
                    "" if trip is None else f"{trip.changed / max(1, trip.lines):.2%}",
                ]
            )
    if "test.source" in meta.inputs:
        rows.append(["test", f"{sum(file.lines for file in meta.inputs['test.source']):,}", "copied", *[""] * 4])
    parts += [table(rows), *_examples(meta)]
    return "\n\n".join([*parts, f"vocabulary      {_describe_vocabulary(meta)}\ndata directory  {out}"])


def _examples(meta: Meta) -> list[str]:
    """Return examples of removed pairs, and of lines that encoding changes; none if there are none."""

    def excerpt(text: str, start: int = 0) -> str:
        return f"{'...' if start else ''}{text[start : start + _SHOWN]}{'...' if start + _SHOWN < len(text) else ''}"

    removed = [
        f"  {reason:<16}{excerpt(source):<{_SHOWN}}  |  {excerpt(target)}"
        for reason, examples in meta.removed_examples.items()
        for source, target in examples
    ]
    changed = []
    for side in ("source", "target"):
        trips = (trip for name, trip in meta.round_trips.items() if name.endswith(side))
        for original, decoded in [example for trip in trips for example in trip.examples][:EXAMPLES]:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(original, decoded, strict=False))
            start = max(0, len(list(same)) - 15)
            changed.append(f"  {side}  {excerpt(original, start)} -> {excerpt(decoded, start)}")
    heads = ("removed, for example", "changed: lines that differ after encoding and decoding, for example")
    return ["\n".join([head, *lines]) for head, lines in zip(heads, (removed, changed), strict=True) if lines]


def _describe_vocabulary(meta: Meta) -> str:
    target = f"{meta.vocabulary_size:,}"
    both = f"{meta.source_vocabulary_size:,} and {target}"
    source_bert, target_bert = (meta.files.get(side_file(side)) for side in SIDES)
    if source_bert is not None:
        return f"{target} tokens (of a BERT)" if source_bert == target_bert else f"{both} tokens (of two BERTs)"
    options, kind = meta.options, ["words of segmented text" if meta.segmented else "SentencePiece"]
    if options.keys() & {"vocab_from", "sentencepiece"}:
        kind.append("given")
    elif not meta.segmented:
        kind += ["unigram"] if options.get("vocabulary_type") == "unigram" else []
        kind += ["byte fallback"] if options.get("byte_fallback") else []
        kind += [f"--normalization {form}"] if (form := options.get("normalization")) else []
    if symbols := options.get("symbols"):
        kind.append(f"symbols {' '.join(symbols)}")
    of_sides = {SIDE_MODEL_FILES["source"], NUMBERS_FILES["target"], DICTIONARY_FILES["target"]}
    return f"{both if of_sides & meta.files.keys() else target} tokens ({', '.join(kind)})"
