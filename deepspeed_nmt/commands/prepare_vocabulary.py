"""Options of `prepare` for vocabularies, tags and segmentations, and their part of its report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_nmt.data.directory import Meta


def add_vocabulary_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("vocabulary")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="size of the vocabulary (default: 8000; with --segmented: all)"
    )
    group.add_argument(
        "--vocabulary-type", choices=("bpe", "unigram"),
        help="type of a new vocabulary of raw text: merges, or a language model of pieces (default: bpe)",
    )  # fmt: skip
    group.add_argument(
        "--separate-vocabularies", action="store_true",
        help="make a vocabulary for each side, each of --vocab-size tokens, instead of one for both",
    )  # fmt: skip
    group.add_argument(
        "--symbols", nargs="+", default=[], metavar="S",
        help="texts that are single tokens of the vocabulary, such as tags of languages; normalization keeps them",
    )  # fmt: skip
    group.add_argument(
        "--character-coverage", type=float, default=1.0, metavar="P",
        help="share of the text's characters that the vocabulary covers; 0.9995 for Chinese or Japanese "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--byte-fallback", action="store_true",
        help="write a character that is not in the vocabulary as its bytes, for which it has 256 tokens",
    )  # fmt: skip
    group.add_argument(
        "--normalization", choices=("none", "nfc", "nfkc"),
        help="Unicode normalization of raw text: nfkc rewrites compatibility variants (½ km² as 1⁄2 km2, full-width "
        "letters), nfc only unifies spellings of the same characters, none keeps them (default: nfkc)",
    )  # fmt: skip
    group.add_argument(
        "--vocab-from", type=Path, metavar="DIR", help="use the vocabulary of this data or run directory"
    )
    group.add_argument(
        "--sentencepiece", nargs="+", type=Path, default=[], metavar="F",
        help="use a SentencePiece model for both sides, or two for source and target",
    )  # fmt: skip
    group.add_argument(
        "--tokenizer", metavar="hf:B[,B]",
        help="use the tokenizer of a BERT for both sides, or of two for source and target; B is a folder, or a name "
        "on the Hugging Face hub",
    )  # fmt: skip
    group = parser.add_argument_group("tags and segmentations")
    for side in ("source", "target"):
        group.add_argument(
            f"--tag-{side}", metavar="S", help=f"put this symbol in front of every {side}, those of validation too"
        )
    group.add_argument(
        "--segmentations", type=int, default=1, metavar="K",
        help="sampled segmentations of each training sentence, one for an epoch; 1: one that is not sampled "
        "(default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--segmentation-alpha", type=float, metavar="A",
        help="sampling: probability that a merge of BPE is skipped (default: 0.1), or exponent of a unigram model's "
        "probabilities (default: 0.2)",
    )  # fmt: skip


def describe_vocabulary(meta: Meta) -> str:
    """Return the size and the kind of a directory's vocabularies."""
    source, target = meta.source_vocabulary_size, f"{meta.vocabulary_size:,}"
    if "vocabulary.source.json" in meta.files:
        return f"{source:,} and {target} tokens (of two BERTs)"
    options, kind = meta.options, ["words of segmented text" if meta.segmented else "SentencePiece"]
    if options.keys() & {"vocab_from", "sentencepiece"}:
        kind.append("given")
    elif not meta.segmented:
        kind += ["unigram"] if options.get("vocabulary_type") == "unigram" else []
        kind += ["byte fallback"] if options.get("byte_fallback") else []
        kind.append(f"normalization {options.get('normalization', 'nfkc')}")
    if symbols := options.get("symbols"):
        kind.append(f"symbols {' '.join(symbols)}")
    size = f"{source:,} and {target}" if "vocabulary.source.model" in meta.files else target
    return f"{size} tokens ({', '.join(kind)})"
