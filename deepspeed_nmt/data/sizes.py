"""Sizes of the files that `prepare` will write, estimated before it writes them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.corpus import token_dtype
from deepspeed_nmt.data.encoding import PairEncoder
from deepspeed_nmt.data.inputs import STANDARD_INPUT, open_input
from deepspeed_nmt.data.reading import FileSet
from deepspeed_nmt.data.stages import PairFiles, vocabulary_size
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import DataError, shown_bytes

_SAMPLE_BYTES = 1 << 18
"""Text at the beginning of a file from which the length of its lines is estimated."""
_SAMPLE_SPANS = 8
_SAMPLE_PAIRS = 500
"""Pairs of each of :data:`_SAMPLE_SPANS` pieces of clean text from which the number of tokens is estimated."""
_BYTES_A_TOKEN = 3.5
"""Bytes of text for each token before the vocabulary is known."""
_OFFSET_BYTES, _WEIGHT_BYTES = 8, 4
_TOKEN_BYTES = {"uint16": 2, "int32": 4}


class Sizes(NamedTuple):
    """Bytes that are still to be written, and the number of pairs."""

    pairs: int
    text: int
    tokens: int
    offsets: int
    weights: int

    @property
    def total(self) -> int:
        """Bytes on disk at the end of encoding, just before the clean text is removed."""
        return self.text + self.tokens + self.offsets + self.weights


def sizes_before_cleaning(sets: Sequence[FileSet], tokenizer: Tokenizer | None, weighted: bool) -> Sizes | None:
    """Estimate sizes from the sizes of the text files and the text at their beginning; cleaning removes nothing.

    Args:
        sets: the training text.
        tokenizer: the vocabulary, if it is given.
        weighted: True if the pairs have weights.

    Returns:
        Estimates; None if a file is a pipe or standard input, whose size is not known.

    Raises:
        DataError: if a file cannot be read.
    """
    pairs = text = 0.0
    for files in sets:
        for place, path in enumerate(
            each for name, each in files.items() if not name.endswith(("weights", "scores"))
        ):
            if path == STANDARD_INPUT or not path.is_file():  # opening a pipe would take its text away
                return None
            with open_input(path, quiet=True) as opened:
                sample = opened.stream.read(_SAMPLE_BYTES)
                expected = opened.expected_bytes or 0
            text += expected
            if place == 0 and sample:
                lines = sample.count(b"\n") + (not sample.endswith(b"\n"))
                pairs += lines if len(sample) < _SAMPLE_BYTES else expected * lines / len(sample)
    size = _TOKEN_BYTES[token_dtype(0 if tokenizer is None else vocabulary_size(tokenizer))]
    return _sizes(round(pairs), round(text), round(text / _BYTES_A_TOKEN) * size, weighted)


def sizes_before_encoding(files: PairFiles, encoder: PairEncoder, weighted: bool) -> Sizes:
    """Estimate sizes of the encoded training text from some of its clean text.

    Args:
        files: the clean text, which is already on disk.
        encoder: the vocabulary, tags and segmentations.
        weighted: True if the pairs have weights.
    """
    spans = files.spans[:: -(-len(files.spans) // _SAMPLE_SPANS)]
    tokens = taken = 0
    for span in spans:
        texts = [[line.decode() for line in lines[:_SAMPLE_PAIRS]] for lines in files.read(span)]
        found = encoder.encode(list(zip(*texts, strict=True)), span.first)
        tokens += sum(len(sentence) for each in found for side in SIDES for sentence in each[side])
        taken += min(span.pairs, _SAMPLE_PAIRS)
    size = _TOKEN_BYTES[token_dtype(vocabulary_size(encoder.tokenizer))]
    count = 1 if encoder.sampling is None else encoder.sampling.count
    return _sizes(files.pairs, 0, round(tokens * files.pairs / taken) * size, weighted, count)


def _sizes(pairs: int, text: int, tokens: int, weighted: bool, segmentations: int = 1) -> Sizes:
    offsets = segmentations * len(SIDES) * _OFFSET_BYTES * (pairs + 1)
    return Sizes(pairs, text, tokens, offsets, _WEIGHT_BYTES * pairs if weighted else 0)


def check_room(sizes: Sizes | None, directory: Path) -> None:
    """Log the estimate, and check that the disk has room for it.

    Args:
        sizes: the estimate; None if there is none.
        directory: where the files will be written.

    Raises:
        DataError: if the disk has less free space than is needed.
    """
    if sizes is None:
        logger.info("sizes: not known before the text is read, because it comes from a pipe or standard input")
        return
    parts = [("clean text", sizes.text), ("tokens", sizes.tokens), ("offsets", sizes.offsets)]
    parts.append(("weights", sizes.weights))
    shown = ", ".join(f"{name} {shown_bytes(size)}" for name, size in parts if size)
    free = shutil.disk_usage(directory).free
    if sizes.total > free:
        raise DataError(
            f"--out must have room for about {shown_bytes(sizes.total)} ({shown}), but its disk has "
            f"{shown_bytes(free)} free; free disk space, or choose another --out"
        )
    removed = ", of which the clean text is removed at the end" if sizes.text else ""
    logger.info(
        "sizes: about %s will be written (%s)%s; %s are free",
        shown_bytes(sizes.total),
        shown,
        removed,
        shown_bytes(free),
    )
