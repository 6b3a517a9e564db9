"""Import of fairseq's models as runs, and of its binarised text as data directories."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.console import progress
from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.fairseq_binarised import BinarisedText
from deepspeed_nmt.data.fairseq_dictionary import read_dictionary
from deepspeed_nmt.data.fairseq_tokenizer import FairseqTokenizer
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.run.fairseq_checkpoint import FairseqCheckpoint
from deepspeed_nmt.run.fairseq_model import model_settings, states
from deepspeed_nmt.run.imported import check_new, write_run
from deepspeed_nmt.text import TextForm

_INDEX = re.compile(r"\w+\.([^.-]+)-([^.-]+)\.([^.-]+)\.idx")
SEARCH = {"name": "beam", "beam": 5, "length_penalty": "power:1", "max_length_ratio": 0.0, "max_length_extra": 201}
"""Defaults of `fairseq-generate`, which does not count EOS."""


@dataclass(frozen=True)
class Languages:
    """Languages of a model or a corpus, as fairseq's files name them."""

    source: str
    target: str

    def of(self, side: Side) -> str:
        """Return the language of a side."""
        return self.source if side == "source" else self.target


def find_languages(
    directory: Path, source: str | None, target: str | None, options: dict[str, Any] | None = None
) -> Languages:
    """Find the languages: those that are given, those of a checkpoint, or those of the directory's only pair.

    Args:
        directory: made by fairseq-preprocess.
        source: language of the source; None to find it.
        target: language of the target; None to find it.
        options: those of a checkpoint.

    Raises:
        ConfigError: if they are not clear.
    """
    known = options or {}
    source, target = source or known.get("source_lang"), target or known.get("target_lang")
    if source and target:
        return Languages(source, target)
    found = {match.groups()[:2] for file in _names(directory) if (match := _INDEX.fullmatch(file))}
    pairs = [pair for pair in found if source in (None, pair[0]) and target in (None, pair[1])]
    if len(pairs) != 1:
        what = f"has {len(pairs)} pairs of languages" if pairs else "has no binarised text that names them"
        dictionaries = [file for file in _names(directory) if file.startswith("dict.") and file.endswith(".txt")]
        if len(dictionaries) < 2:
            what += (
                f", and of dictionaries only {dictionaries[0]}" if dictionaries else ", and no dictionaries either"
            )
        raise ConfigError(
            f"--source-lang and --target-lang must be given, because --data-bin {directory} {what}; give the "
            "names in its dict.LANG.txt"
        )
    return Languages(*pairs[0])


def open_dictionaries(directory: Path, languages: Languages, models: Sequence[Path] = ()) -> FairseqTokenizer:
    """Read the dictionaries of both sides.

    Args:
        directory: with `dict.LANG.txt` of both languages.
        languages: of both sides.
        models: SentencePiece model of both sides, or of source and target; none for segmented text.

    Raises:
        DataError: if a file is missing or damaged.
        ConfigError: if there are more than two models.
    """
    source, target = (read_dictionary(directory / f"dict.{languages.of(side)}.txt") for side in SIDES)
    if len(models) > 2:
        raise ConfigError(f"--sentencepiece must be one model, or two for source and target, but are {len(models)}")
    try:
        contents = [path.read_bytes() for path in models]
    except OSError as error:
        raise DataError(f"--sentencepiece must be readable, but is not ({error}); check the path") from error
    return FairseqTokenizer((source, target), (contents[0], contents[-1]) if contents else None)


def import_model(
    path: Path, checkpoint: FairseqCheckpoint, tokenizer: FairseqTokenizer, out: Path, text: TextForm
) -> RunConfig:
    """Write a model of fairseq as a run with one checkpoint, which is its best and its last.

    Args:
        path: file of the checkpoint, for messages and the run's record.
        checkpoint: its content.
        tokenizer: its dictionaries.
        out: directory of the run.
        text: form of the text.

    Returns:
        Settings of the run.

    Raises:
        ConfigError: if the directory is not new, or the model has what this program has not.
        OSError: if a file cannot be written; then nothing is left in the directory.
    """
    check_new(out)
    settings: dict[str, Any] = {"model": model_settings(checkpoint, str(path)), "search": SEARCH}
    smoothing = checkpoint.options.get("label_smoothing")
    if isinstance(smoothing, float):
        settings["objective"] = {"label_smoothed": {"smoothing": smoothing}}
    config = validate(settings)
    shared = tokenizer.vocabulary.own_source is None
    if checkpoint.options.get("share_all_embeddings") and not shared:
        raise ConfigError(
            f"--data-bin must have equal dictionaries for {path}, which shares all embeddings, but has different "
            "ones; give the directory that the model was trained on"
        )
    model = build_meta_model(config, tokenizer.vocabulary)
    write_run(out, config, tokenizer, list(states(model, checkpoint, str(path))), str(path.resolve()), text)
    return config


def binarised_splits(directory: Path, languages: Languages) -> dict[str, list[Path]]:
    """Return the binarised files of both sides by split, without ``.SIDE.bin``: train, train1 and so on for train.

    A directory of the reverse direction has the same text.

    Raises:
        DataError: if there is no training or no validation text.
    """
    names = _names(directory)
    pairs = [
        f"{one}-{other}"
        for one, other in ((languages.source, languages.target), (languages.target, languages.source))
    ]
    found: dict[str, list[Path]] = {}
    for split in ("train", "valid", "test"):
        numbers = range(len(names)) if split == "train" else range(1)
        files = []
        for number in numbers:
            stems = [f"{split}{number or ''}.{pair}" for pair in pairs]
            stem = next((each for each in stems if f"{each}.{languages.source}.idx" in names), None)
            if stem is None:
                break
            files.append(directory / stem)
        if files:
            found[split] = files
        elif split != "test":
            raise DataError(
                f"--data-bin must have binarised text {split}.{pairs[0]}.{languages.source}.idx, but {directory} has "
                "none; give the directory that fairseq-preprocess has made"
            )
    return found


def write_text(
    directory: Path, languages: Languages, tokenizer: FairseqTokenizer, out: Path
) -> dict[str, list[Path]]:
    """Write binarised text as text, one sentence a line, from which the tokenizer makes the same numbers.

    Args:
        directory: made by fairseq-preprocess.
        languages: of both sides.
        tokenizer: its dictionaries.
        out: existing directory for the text.

    Returns:
        The files by names such as ``train_source``.

    Raises:
        DataError: if files are missing, damaged, or not aligned.
    """
    written: dict[str, list[Path]] = {}
    sizes = {side: len(tokenizer.all_pieces(side)) for side in SIDES}
    for split, stems in binarised_splits(directory, languages).items():
        for stem in stems:
            sides = {
                side: BinarisedText.open(stem.with_name(f"{stem.name}.{languages.of(side)}"), sizes[side])
                for side in SIDES
            }
            counts = [each.lines for each in sides.values()]
            if counts[0] != counts[1]:
                raise DataError(
                    f"{stem} must have as many lines on both sides, but has {counts[0]:,} and {counts[1]:,}; "
                    "binarise the text again"
                )
            for side, text in sides.items():
                path = out / f"{stem.name}.{languages.of(side)}"
                lines = (tokenizer.spelt(row, side) for row in text.rows())
                _write_lines(path, progress(lines, f"{split} {side}", "lines", total=text.lines))
                written.setdefault(f"{split}_{side}", []).append(path)
    return written


def staging(out: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory beside a data directory that is to be made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=f".{out.name}.text-", dir=out.parent)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def _names(directory: Path) -> set[str]:
    """Return the names of a directory's files.

    Raises:
        ConfigError: if it is none.
    """
    try:
        return {each.name for each in directory.iterdir()}
    except OSError as error:
        raise ConfigError(
            f"--data-bin must be a directory with fairseq's dictionaries, but {directory} cannot be read "
            f"({error.strerror or error}); check the path"
        ) from error
