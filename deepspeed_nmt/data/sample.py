"""An endless supply of English sentences with their German translations, made by a grammar from a seed.

It is enough language to watch a translation model learn (agreement, separable verbs, several word orders) where no
corpus is at hand, and easy enough to be learnt in minutes. A sentence has one translation, whatever stands around it.

The same seed gives the same sentences on every machine and Python: of ``random.Random`` only ``random()`` is used,
whose stream Python promises to keep.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from deepspeed_nmt.data.sample_sentences import Author
from deepspeed_nmt.errors import DataError

SPLITS = ("train", "valid", "test")


def sentence_pairs(seed: int) -> Iterator[tuple[str, str]]:
    """English sentences with their German translations, without end.

    No English and no German sentence comes twice, so consecutive stretches of the stream have none in common. What
    has been given is remembered: about 350 bytes a pair.
    """
    author = Author(random.Random(f"deepspeed_nmt sample {seed}").random)
    seen: set[str] = set()
    while True:
        english, german = author.sentence()
        # One set for both sides: no sentence here is English and German at once.
        if english in seen or german in seen:
            continue
        seen.add(english)
        seen.add(german)
        yield english, german


def write_sample(out: Path, train: int, valid: int, test: int, seed: int) -> None:
    """Write ``train``, ``valid`` and ``test`` pairs to ``out``/train.en, ``out``/train.de, and so on.

    A file is either complete or not there: each is written under another name first.

    Raises:
        DataError: if a count is negative or ``out`` cannot be written.
    """
    counts = dict(zip(SPLITS, (train, valid, test), strict=True))
    for name, count in counts.items():
        if count < 0:
            raise DataError(f"the number of {name} pairs must be 0 or more, but is {count}")
    pairs = sentence_pairs(seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
        # The held-out pairs come first, so they stay the same when more training pairs are asked for.
        for name in ("test", "valid", "train"):
            lines = list(islice(pairs, counts[name]))
            for side, language in enumerate(("en", "de")):
                _write(out / f"{name}.{language}", [pair[side] for pair in lines])
    except OSError as error:
        raise DataError(
            f"--out must be a directory that can be written, but {out} is not ({error.strerror}); choose another"
        ) from None


def _write(path: Path, lines: list[str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
