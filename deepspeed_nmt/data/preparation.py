"""Preparation of a data directory: clean, train the vocabulary, encode, record hashes.

Training text goes through the stages of :mod:`deepspeed_nmt.data.stages`, in this process or several, and the parts
of the corpus are joined. The result is the same for any number of processes. Files are written into a hidden
directory beside the result, renamed at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.bert_tokenizer import PREFIX, BertTokenizer
from deepspeed_nmt.data.data_directory import META_FILE, DataDirectory, Meta, open_tokenizer
from deepspeed_nmt.data.inputs import (
    STANDARD_INPUT,
    InputRecord,
    check_aligned,
    check_inputs,
    copy_text,
    inspect_inputs,
    size_of,
)
from deepspeed_nmt.data.options import PrepareOptions, input_option
from deepspeed_nmt.data.sentencepiece import type_of
from deepspeed_nmt.data.stages import PairEncoder, Preparation, differing, join, replacing_data, staged_data
from deepspeed_nmt.data.tasks import run_stages
from deepspeed_nmt.data.tokenizer import SampledSegmentations, Tokenizer
from deepspeed_nmt.data.vocabulary_training import adopt_models
from deepspeed_nmt.errors import ConfigError, DataError, shown_bytes
from deepspeed_nmt.files import is_replaceable, remove, resolved
from deepspeed_nmt.manifest import check_own
from deepspeed_nmt.text import DamagedLine, text_of

_DISK_SHARE = 2.5
"""Bytes of clean text, hashes, parts and result for each byte of text, about."""


def prepare(options: PrepareOptions) -> Meta | str:
    """Make a data directory, unless the same one exists already. A failed call leaves nothing behind.

    For SLURM, submit the tasks that are not done, and return a message.

    Raises:
        ConfigError: if SLURM or datatrove is missing.
        DataError: if files are missing or not aligned, no pairs are left after cleaning, the vocabulary does not fit
            the text or the options, another directory is in the way, or the disk is full; for SLURM also as of
            :func:`cluster.submit`, and if text can be read only once.
    """
    by_slurm = options.executor == "slurm"
    files = (path for paths in options.inputs.values() for path in paths if isinstance(path, Path))
    if by_slurm and (
        pipes := [path for path in files if path == STANDARD_INPUT or not (path.is_dir() or is_replaceable(path))]
    ):
        raise DataError(f"--executor slurm reads files on other hosts, and {pipes[0]} is a pipe; write it to a file")
    out, vocabulary, sampling = check_options(options)
    with replacing_data(out):
        if (out / META_FILE).exists() and not options.overwrite:  # another process may have made it
            return same_or_refuse(out, options, options.recorded(vocabulary, sampling))
        if by_slurm:
            from deepspeed_nmt.data import cluster

            return cluster.submit(
                Preparation,
                options,
                lambda new: set_up(new, options, vocabulary, sampling, options.tasks or 1),
                lambda work: work.check_same(options, options.recorded(vocabulary, sampling)),
            )
        with staged_data(out) as staging:
            work = set_up(staging / ".work", options, vocabulary, sampling)
            meta = join(run_stages(work, options.workers), staging)
            remove(work.directory)
            return meta


def check_options(
    options: PrepareOptions, to_come: Collection[Path] = ()
) -> tuple[Path, Tokenizer | None, SampledSegmentations | None]:
    """Check options and files; return the data directory, a vocabulary that is given, and segmentations to sample.

    The files ``to_come`` need not exist.
    """
    out = resolved(options.out)  # renaming onto a link would replace the link
    if options.overwrite or not (out / META_FILE).is_file():
        check_own(out, META_FILE, "--out")
    inputs = options.inputs.items()
    check_inputs({input_option(name): paths for name, paths in inputs if not {*paths} <= {*to_come}})
    paths = (path for paths in options.inputs.values() for path in paths if isinstance(path, Path))
    if inside := [path for path in paths if path != STANDARD_INPUT and resolved(path).is_relative_to(out)]:
        raise DataError(f"--out {out} holds the text {inside[0]}, which would be replaced; choose another --out")
    vocabulary = _existing_vocabulary(options)
    if isinstance(vocabulary, BertTokenizer) and options.train_alignments:
        raise ConfigError(
            "--train-alignments needs tokens that show where words begin, unlike those of a BERT; leave it out, or "
            "take another vocabulary"
        )
    models = None if vocabulary is None else vocabulary.sentencepiece_models()
    sampling = options.sampling(options.vocabulary_type or ("bpe" if models is None else type_of(models[1])))
    if vocabulary is not None:
        PairEncoder(vocabulary, options.tags, sampling).encode([])  # which finds what the vocabulary lacks
    return out, vocabulary, sampling


def set_up(
    directory: Path,
    options: PrepareOptions,
    existing: Tokenizer | None,
    sampling: SampledSegmentations | None,
    tasks: int = 1,
) -> Preparation:
    """Make the directory of the tasks, with the text that is held out, and the vocabulary if there is one."""
    (directory / "held_out").mkdir(parents=True)
    _check_room(directory, options)
    if existing is not None:
        (directory / "given").mkdir()
        existing.save(directory / "given")
    inputs, recorded = _copy_held_out(directory / "held_out", options), options.recorded(existing, sampling)
    return Preparation(
        directory=directory, options=options, inputs=inputs, sampling=sampling, recorded=recorded, tasks=tasks
    )


def _copy_held_out(directory: Path, options: PrepareOptions) -> dict[str, tuple[InputRecord, ...]]:
    """Copy the text of validation and test set, and return records of its files."""
    records: dict[str, tuple[InputRecord, ...]] = {}
    pairs: list[list[tuple[str, int]]] = []
    for split in ("valid", "test") if options.test_source else ("valid",):
        for side, paths in zip(SIDES, options.paths(split), strict=True):
            records[f"{split}.{side}"] = copy_text(paths, directory / f"{split}.{side}")
        files = zip(*(records[f"{split}.{side}"] for side in SIDES), strict=True)
        pairs += [[(record.path, record.lines) for record in pair] for pair in files]
    check_aligned(pairs)
    for name, files_of in records.items():
        if name.endswith(".target"):
            _check_encoding(directory / name, files_of)
    for side, paths in zip(SIDES, options.paths("valid"), strict=True):
        with (directory / f"valid.{side}").open("rb") as text:
            if not any(map(bytes.strip, text)):
                raise DataError(
                    f"no sentence in the validation set {', '.join(map(str, paths))}; hold out some hundreds of "
                    "sentence pairs of the training text"
                )
    return records


def _check_encoding(copied: Path, records: Sequence[InputRecord]) -> None:
    """Raise a DataError if references, copied from some files into one, are not UTF-8: none would be matched."""
    with copied.open("rb") as text:
        for record in records:
            for number, line in enumerate(islice(text, record.lines), 1):
                if isinstance(text_of(line), DamagedLine):
                    raise DataError(
                        f"line {number:,} of {record.path} is not UTF-8, and no translation can match it; convert "
                        "the file, for example by `iconv -f LATIN1 -t UTF-8`"
                    )


def _check_room(directory: Path, options: PrepareOptions) -> None:
    """Log how much of the disk is needed if nothing is removed, and check that the clean text fits.

    Pipes do not count.
    """
    paths = [path for name, paths in options.inputs.items() if name.startswith("train.") for path in paths]
    if not (needed := sum(map(size_of, paths))):
        return
    if needed > (free := shutil.disk_usage(directory).free):
        raise DataError(
            f"the disk of --out has {shown_bytes(free)} free, but the training text has {shown_bytes(needed)}; free "
            "disk space, or choose another --out"
        )
    needed = int(_DISK_SHARE * needed)
    logger.info("the disk will hold up to about %s of parts, and has %s free", *map(shown_bytes, (needed, free)))


def _existing_vocabulary(options: PrepareOptions) -> Tokenizer | None:
    if options.tokenizer is not None:
        return BertTokenizer.from_berts(options.tokenizer.removeprefix(PREFIX))
    if options.sentencepiece:
        return adopt_models(options.sentencepiece, options.symbols)
    if options.vocab_from is None:
        return None
    tokenizer = open_tokenizer(options.vocab_from)
    if tokenizer.segmented != options.segmented:
        kind = "segmented" if tokenizer.segmented else "raw"
        raise DataError(
            f"the vocabulary of {options.vocab_from} is for {kind} text; take another, or "
            f"{'leave out' if options.segmented else 'add'} --segmented and give {kind} text"
        )
    if options.vocab_size not in (None, tokenizer.size):
        raise DataError(
            f"--vocab-size is {options.vocab_size}, but the vocabulary of {options.vocab_from} has {tokenizer.size} "
            "tokens; leave it out"
        )
    return tokenizer


def same_or_refuse(out: Path, options: PrepareOptions, recorded: Mapping[str, Any]) -> Meta:
    """Open an existing data directory if it was made from the same text with the same options; refuse others."""
    meta, names = differences(out, options, recorded)
    if names:
        raise DataError(
            f"--out {out} holds data that differs in {', '.join(names)}; give --overwrite to replace it, or "
            "choose another --out"
        )
    DataDirectory.open(out).verify_hashes()
    logger.info("%s is already prepared from the same text with the same options: nothing to do", out)
    return meta


def differences(out: Path, options: PrepareOptions, recorded: Mapping[str, Any]) -> tuple[Meta, list[str]]:
    """Return the record of a data directory, and the ``recorded`` options and texts in which it differs."""
    inputs = inspect_inputs(options.inputs)
    meta = DataDirectory.open(out).meta
    return meta, differing((recorded, inputs), (meta.options, meta.inputs))
