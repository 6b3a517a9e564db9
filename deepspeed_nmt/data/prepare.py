"""Preparation of a data directory: clean, train the vocabulary, encode, record hashes.

Each input is read once, and hashed meanwhile. Worker processes clean and encode it in pieces. It is never held in
memory, which holds the vocabulary's sample and 8 bytes for each pair, 12 if pairs have weights. Files are written
into a hidden directory beside the result, renamed at the end.
"""

from __future__ import annotations

import errno
import os
import re
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_nmt import __version__
from deepspeed_nmt.console import logger, progress
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.bert_tokenizer import PREFIX, BertTokenizer
from deepspeed_nmt.data.clean import PairCleaner, read_lines
from deepspeed_nmt.data.directory import (
    FORMAT,
    META_FILE,
    DataDirectory,
    InputRecord,
    Meta,
    open_tokenizer,
)
from deepspeed_nmt.data.encoding import PairEncoder
from deepspeed_nmt.data.inputs import (
    STANDARD_INPUT,
    Paths,
    check_inputs,
    copy_text,
    inspect_inputs,
    unaligned,
    unaligned_error,
)
from deepspeed_nmt.data.options import DEFAULT_VOCAB_SIZE, PrepareOptions, input_option
from deepspeed_nmt.data.reading import read_pieces
from deepspeed_nmt.data.segmentation import SampledSegmentations
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.sizes import check_room, sizes_before_cleaning, sizes_before_encoding
from deepspeed_nmt.data.stages import PairFiles, clean_text, encode_split
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.data.vocabulary_training import adopt_models, train_subwords, train_words, type_of
from deepspeed_nmt.directories import replacing, staged
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import parse_json, resolved
from deepspeed_nmt.manifest import HASH_SUFFIX, FileRecord, write_record
from deepspeed_nmt.text import looks_tokenised, warn_of_missing_rules

SAMPLE_PAIRS = 1_000_000
"""Pairs that a BPE vocabulary is trained on if there are more: two million lines."""
_PREPARED = re.compile(r"(train(\.\d+)?|valid|test)\.(source|target|weights)(\..*)?|vocabulary\..*")
"""Names of the files of a data directory besides META_FILE."""


def prepare(options: PrepareOptions) -> Meta:
    """Make a data directory, unless the same one exists already. A failed call leaves nothing behind.

    Returns:
        The content of the directory's ``meta.json``.

    Raises:
        DataError: if files are missing or not aligned, no pairs are left after cleaning, the text does not support
            the vocabulary, the vocabulary does not fit the options, another directory is in the way, or the disk is
            full.
    """
    out = resolved(options.out)  # renaming onto a link would replace the link
    _check_replaceable(out, options.overwrite)
    check_inputs({input_option(name): paths for name, paths in options.inputs.items()})
    _check_outside(out, options)
    given = _given_vocabulary(options)
    sampling = _sampling(options, given)
    if given is not None:
        PairEncoder(given, options.tags, sampling).check()
    try:
        with replacing(out, _is_whole):
            _check_replaceable(out, options.overwrite)  # another process may have made it, or it is restored
            if (out / META_FILE).exists() and not options.overwrite:
                return _same_or_refuse(out, options.recorded(given, sampling), inspect_inputs(options.inputs))
            with staged(out) as staging:
                return _fill(staging, options, given, sampling)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"--out must be writable, but {out} could not be written ({error.strerror or error}), and is as it was "
            f"before; {'free disk space, or ' if full else ''}choose another --out"
        ) from error


def _is_whole(out: Path) -> bool:
    try:
        DataDirectory.open(out)
    except DataError:
        return False
    return True


def _fill(
    staging: Path, options: PrepareOptions, given: Tokenizer | None, sampling: SampledSegmentations | None
) -> Meta:
    sets = options.training_sets
    sizes = sizes_before_cleaning(sets, given, options.weighted)
    check_room(sizes, staging)
    inputs = _copy_held_out(staging, options)

    cleaner = PairCleaner(options.cleaning, options.segmented, options.pair_filters(), options.unicode)
    records: dict[str, list[InputRecord]] = {}
    files = (staging / "clean.source", staging / "clean.target")
    expected = None if sizes is None else _rounded(sizes.pairs)
    clean = clean_text(read_pieces(sets, records), options.layout, cleaner, files, options.workers, expected)
    inputs |= {name: tuple(each) for name, each in records.items()}
    _check_some_left(cleaner)

    tokenizer = given or _train_vocabulary(options, files, cleaner.kept)
    tokenizer.save(staging)
    encoder = PairEncoder(tokenizer, options.tags, sampling)
    check_room(sizes_before_encoding(clean, encoder, options.weighted), staging)
    encoded = encode_split(clean, encoder, staging, "train", options.workers, cleaner, options.weighted)
    _check_some_left(cleaner)
    for path in files:
        path.unlink()
    # Every line of valid is encoded, broken ones as well as possible: line numbers must stay those of the text.
    valid = PairFiles.of(staging / "valid.source", staging / "valid.target")
    encoded |= encode_split(valid, PairEncoder(tokenizer, options.tags), staging, "valid", options.workers)

    if options.text == "moses" and options.target_lang is not None:
        warn_of_missing_rules(options.target_lang, "--target-lang")
    if options.text_form.form == "raw":
        _warn_of_tokens(staging / "valid.target")

    written = {path.name: FileRecord.of(path) for path in sorted(staging.iterdir())}
    meta = Meta(
        format=FORMAT,
        version=__version__,
        options=options.recorded(given, sampling),
        inputs={name: inputs[name] for name in options.inputs},
        segmented=tokenizer.segmented,
        text=options.text_form,
        tags=options.tags,
        vocabulary_size=tokenizer.size,
        source_vocabulary_size=tokenizer.vocabulary.source.size,
        pairs_read=cleaner.read,
        removed={reason: cleaner.removed[reason] for reason in cleaner.reasons},
        removed_examples={reason: tuple(cleaner.removals.examples.get(reason, ())) for reason in cleaner.reasons},
        repaired={rule: {side: cleaner.repaired[rule, side] for side in SIDES} for rule in options.unicode},
        splits={split: stats for split, (stats, _) in encoded.items()},
        round_trips={
            f"{split}.{side}": each for split, (_, tried) in encoded.items() for side, each in tried.items()
        },
        files=written,
    )
    write_record(staging / META_FILE, f"{meta.model_dump_json(indent=2)}\n".encode())
    return meta


def _copy_held_out(staging: Path, options: PrepareOptions) -> dict[str, tuple[InputRecord, ...]]:
    """Copy the text of validation and test set, and return records of its files.

    Raises:
        DataError: if files are not aligned, or the validation set is empty.
    """
    records: dict[str, tuple[InputRecord, ...]] = {}
    problems = []
    for split in options.splits[1:]:
        for side, paths in zip(SIDES, options.paths(split), strict=True):
            records[f"{split}.{side}"] = copy_text(paths, staging / f"{split}.{side}")
        pairs = zip(*(records[f"{split}.{side}"] for side in SIDES), strict=True)
        problems += [unaligned([(record.path, record.lines) for record in pair]) for pair in pairs]
    if found := [problem for problem in problems if problem is not None]:
        raise unaligned_error(found)
    for side, paths in zip(SIDES, options.paths("valid"), strict=True):
        with (staging / f"valid.{side}").open("rb") as text:
            if any(map(bytes.strip, text)):
                continue
        raise DataError(
            f"the validation set must have a sentence, but {', '.join(map(str, paths))} is empty; "
            "hold out some hundreds of sentence pairs of the training text"
        )
    return records


def _rounded(count: int) -> int:
    """Round an estimate to two digits."""
    return round(count, 2 - len(str(count)))


def _warn_of_tokens(path: Path) -> None:
    """Warn of raw text that looks tokenised."""
    lines = [line.decode("utf-8", errors="replace").rstrip() for line in read_lines((path,))]
    if count := looks_tokenised(lines):
        logger.warning(
            "%s: %s of %s lines end in ' .' and look tokenised, so that BLEU would not be comparable; give --text "
            "moses and the languages, or --text tokenised",
            path.name,
            f"{count:,}",
            f"{len(lines):,}",
        )


def _train_vocabulary(options: PrepareOptions, files: Paths, pairs: int) -> Tokenizer:
    """Train the vocabulary on the clean text in ``files``, or on a sample of it; or one on each of them."""
    if options.separate_vocabularies:
        source, target = (_trained(options, (path,), pairs) for path in files)
        return SentencePieceTokenizer(target.model, target.segmented, source.model, options.symbols)
    return _trained(options, files, pairs)


def _trained(options: PrepareOptions, files: Paths, pairs: int) -> SentencePieceTokenizer:
    """Train one vocabulary."""
    if options.segmented:
        total = len(files) * pairs
        lines = (line.decode() for line in progress(read_lines(files), "vocabulary", "lines", total=total))
        return train_words(lines, options.vocab_size, options.symbols)
    chosen = np.ones(pairs, dtype=np.bool_)
    if pairs > SAMPLE_PAIRS:
        chosen[:] = False
        chosen[np.random.default_rng(options.seed).choice(pairs, SAMPLE_PAIRS, replace=False, shuffle=False)] = True
    size = options.vocab_size or DEFAULT_VOCAB_SIZE
    logger.info("vocabulary: training %s tokens on %s pairs", f"{size:,}", f"{int(chosen.sum()):,}")
    return train_subwords(
        (line.decode() for path in files for line in compress(read_lines((path,)), chosen)),
        size,
        options.character_coverage,
        options.normalization or "nfkc",
        options.vocabulary_type or "bpe",
        options.byte_fallback,
        options.symbols,
    )


def _sampling(options: PrepareOptions, given: Tokenizer | None) -> SampledSegmentations | None:
    """Return the segmentations to draw; None for one that is not sampled."""
    models = None if given is None else given.sentencepiece_models()
    return options.sampling(options.vocabulary_type or ("bpe" if models is None else type_of(models[1])))


def _check_some_left(cleaner: PairCleaner) -> None:
    if cleaner.kept == 0:
        reasons = "; ".join(
            f"{cleaner.removed[reason]}: {cleaner.describe(reason)}"
            for reason in cleaner.reasons
            if cleaner.removed[reason]
        )
        raise DataError(
            f"some training pairs must be left after cleaning, but all {cleaner.read} were removed "
            f"({reasons or 'the files are empty'}); check that the files are the right ones, or loosen the cleaning"
        )


def _given_vocabulary(options: PrepareOptions) -> Tokenizer | None:
    if options.tokenizer is not None:
        return BertTokenizer.from_berts(options.tokenizer.removeprefix(PREFIX))
    if options.sentencepiece:
        return adopt_models(options.sentencepiece, options.symbols)
    if options.vocab_from is None:
        return None
    tokenizer = open_tokenizer(options.vocab_from)
    if tokenizer.segmented != options.segmented:
        wanted, actual = ("segmented", "raw") if options.segmented else ("raw", "segmented")
        raise DataError(
            f"the vocabulary of {options.vocab_from} must be for {wanted} text, but is for {actual} text; take "
            f"another, or {'leave out' if options.segmented else 'add'} --segmented and give {actual} text"
        )
    if options.vocab_size not in (None, tokenizer.size):
        raise DataError(
            f"--vocab-size must be that of the vocabulary given, {tokenizer.size}, but is {options.vocab_size}; "
            "leave it out"
        )
    return tokenizer


def _check_replaceable(out: Path, overwrite: bool) -> None:
    """Refuse to replace anything but a data directory: `--out ~ --overwrite` must not delete a home directory."""
    if not out.exists() or ((out / META_FILE).is_file() and not overwrite):
        return
    if not out.is_dir():
        raise DataError(f"--out must be a directory, but {out} is a file; choose another --out")
    if os.path.ismount(out):
        raise DataError(
            f"--out must be a directory that can be replaced, but {out} is a mount point; give a directory inside it"
        )
    names = {path.name for path in out.iterdir()}
    try:
        ours = {META_FILE, META_FILE + HASH_SUFFIX, *parse_json((out / META_FILE).read_bytes())["files"]}
    except FileNotFoundError:
        ours = set()
    except (OSError, ValueError, KeyError, TypeError):  # damaged, so its names decide
        ours = {META_FILE, META_FILE + HASH_SUFFIX, *filter(_PREPARED.fullmatch, names)}
    others = sorted(names - ours)
    if others:
        shown = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise DataError(
            f"--out must be a new directory or hold only what `prepare` made, but {out} has {shown}; move that away, "
            "or choose another --out"
        )


def _check_outside(out: Path, options: PrepareOptions) -> None:
    """Refuse to replace a directory that the text is in, which would be lost with it."""
    paths = (path for paths in options.inputs.values() for path in paths)
    if inside := [path for path in paths if path != STANDARD_INPUT and resolved(path).is_relative_to(out)]:
        raise DataError(
            f"--out must be another directory than that of the text, but {out} holds {inside[0]}; choose another "
            "--out"
        )


def _same_or_refuse(out: Path, recorded: dict[str, Any], inputs: dict[str, tuple[InputRecord, ...]]) -> Meta:
    """Open an existing data directory if it was made from the same text with the same options.

    Raises:
        DataError: if it was not, or was changed since.
    """
    directory = DataDirectory.open(out)
    meta = directory.meta
    differing = [name for name in sorted({*recorded, *meta.options}) if recorded.get(name) != meta.options.get(name)]
    for name in sorted({*inputs, *meta.inputs}):
        new, old = (tuple(record.sha256 for record in records.get(name, ())) for records in (inputs, meta.inputs))
        if new != old:
            differing.append(f"{name} text")
    if differing:
        raise DataError(
            f"--out must be new or hold data of the same text and options, but {out} differs in "
            f"{', '.join(differing)}; give --overwrite to replace it, or choose another --out"
        )
    directory.verify_hashes()
    logger.info("%s is already prepared from the same text with the same options: nothing to do", out)
    return meta
