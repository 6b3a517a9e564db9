"""Preparation of a data directory: clean, train the vocabulary, encode, record hashes.

Training text goes through the stages of :mod:`deepspeed_nmt.data.stages`, in this process or several, and the parts
of the corpus are joined. The result is the same for any number of processes. Files are written into a hidden
directory beside the result, renamed at the end.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import Any

from deepspeed_nmt import __version__
from deepspeed_nmt.console import counting, logger
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.bert_tokenizer import PREFIX, BertTokenizer
from deepspeed_nmt.data.corpus import Corpus, join_files
from deepspeed_nmt.data.data_directory import FORMAT, META_FILE, DataDirectory, Meta, RoundTrip, open_tokenizer
from deepspeed_nmt.data.filters import Removals
from deepspeed_nmt.data.inputs import (
    STANDARD_INPUT,
    InputRecord,
    check_aligned,
    check_inputs,
    copy_text,
    count_pieces,
    inspect_inputs,
    size_of,
)
from deepspeed_nmt.data.options import PrepareOptions, input_option
from deepspeed_nmt.data.stages import PairEncoder, Work, check_some_left, encode_split, run_task
from deepspeed_nmt.data.tokenizer import SampledSegmentations, Tokenizer, split_name
from deepspeed_nmt.data.vocabulary_training import adopt_models, type_of
from deepspeed_nmt.errors import DataError, shown_bytes
from deepspeed_nmt.files import open_text, remove, replacing, resolved, staged, text_lines
from deepspeed_nmt.manifest import FileRecord, check_own, write_record
from deepspeed_nmt.text import looks_tokenised, warn_of_missing_rules

TASK_PIECES = 8
"""Pieces of text of a task: some seconds of encoding. Text of fewer is prepared without workers."""
_DISK_SHARE = 2.5
"""Bytes of clean text, hashes, parts and result for each byte of text, about."""
MAX_TASKS = 256
"""Tasks of a host, each of which reads a part of the hashes of every other one."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_VERBS = {"clean": "cleaning", "encode": "encoding"}


def prepare(options: PrepareOptions) -> Meta:
    """Make a data directory, unless the same one exists already. A failed call leaves nothing behind.

    Raises:
        DataError: if files are missing or not aligned, no pairs are left after cleaning, the vocabulary does not fit
            the text or the options, another directory is in the way, or the disk is full.
    """
    out, vocabulary, sampling = check_options(options)
    with replacing_data(out):
        if (out / META_FILE).exists() and not options.overwrite:  # another process may have made it
            return same_or_refuse(out, options, vocabulary, sampling)
        with staged_data(out) as staging:
            work = set_up(staging / ".work", options, vocabulary, sampling)
            meta = join(run_stages(work, options.workers), staging)
            remove(work.directory)
            return meta


def check_options(options: PrepareOptions) -> tuple[Path, Tokenizer | None, SampledSegmentations | None]:
    """Check options and files; return the data directory, a vocabulary that is given, and segmentations to sample."""
    out = resolved(options.out)  # renaming onto a link would replace the link
    if options.overwrite or not (out / META_FILE).is_file():
        check_own(out, META_FILE, "--out")
    check_inputs({input_option(name): paths for name, paths in options.inputs.items()})
    paths = (path for paths in options.inputs.values() for path in paths if isinstance(path, Path))
    if inside := [path for path in paths if path != STANDARD_INPUT and resolved(path).is_relative_to(out)]:
        raise DataError(f"--out {out} holds the text {inside[0]}, which would be replaced; choose another --out")
    vocabulary = _existing_vocabulary(options)
    models = None if vocabulary is None else vocabulary.sentencepiece_models()
    sampling = options.sampling(options.vocabulary_type or ("bpe" if models is None else type_of(models[1])))
    if vocabulary is not None:
        PairEncoder(vocabulary, options.tags, sampling).encode([])  # which finds what the vocabulary lacks
    return out, vocabulary, sampling


@contextmanager
def replacing_data(out: Path) -> Iterator[None]:
    """Hold the right to replace a data directory; an error of the disk is a DataError."""
    try:
        with replacing(out, _is_whole):
            yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise DataError(
            f"--out {out} could not be written ({error.strerror or error}), and is as it was before; "
            f"{'free disk space, or ' if full else ''}choose another --out"
        ) from error


def staged_data(out: Path) -> AbstractContextManager[Path]:
    """Make a data directory that replaces ``out`` when the block ends."""
    return staged(out, partial(check_own, out, META_FILE, "--out", verify=False))


def _is_whole(out: Path) -> bool:
    try:
        DataDirectory.open(out)
    except DataError:
        return False
    return True


def set_up(
    directory: Path,
    options: PrepareOptions,
    existing: Tokenizer | None,
    sampling: SampledSegmentations | None,
    tasks: int = 1,
) -> Work:
    """Make the directory of the tasks, with the text that is held out, and the vocabulary if there is one."""
    (directory / "held_out").mkdir(parents=True)
    _check_room(directory, options)
    if existing is not None:
        (directory / "given").mkdir()
        existing.save(directory / "given")
    inputs, recorded = _copy_held_out(directory / "held_out", options), options.recorded(existing, sampling)
    return Work(
        directory=directory, options=options, inputs=inputs, sampling=sampling, recorded=recorded, tasks=tasks
    )


def run_stages(work: Work, workers: int) -> Work:
    """Run all tasks, as many as the text needs, in this process or several, and return the work with their number."""
    pairs = run_stage(work, "index", map)
    pieces = sum(count_pieces(work.place("index", number)) for number in range(work.stages["index"]))
    work = work.model_copy(update={"tasks": max(1, min(-(-pieces // TASK_PIECES), MAX_TASKS))})
    with worker_pool(min(workers, work.tasks)) as run:
        for stage in [*work.stages][1:]:
            pairs = run_stage(work, stage, run, pairs)
    return work


def run_stage(work: Work, stage: str, run: Callable[..., Iterable[int]], total: int = 0) -> int:
    """Run the tasks of a stage by a function like ``map``, and return the number of pairs."""
    done = 0
    shown = counting(_VERBS[stage], "pairs", total) if stage in _VERBS else nullcontext(lambda _: None)
    with shown as advance:
        for pairs in run(partial(run_task, work, stage), range(work.stages[stage])):
            advance(pairs)
            done += pairs
    return done


def join(work: Work, staging: Path) -> Meta:
    """Write a data directory, of the parts that the tasks have made, and return its record."""
    options, vocabulary, held_out = work.options, work.place("vocabulary", 0), work.directory / "held_out"
    for path in (*held_out.iterdir(), *vocabulary.glob("vocabulary.*")):
        shutil.copyfile(path, staging / path.name)
    indexed, cleaned, encoded = (work.records(stage) for stage in ("index", "clean", "encode"))
    removals, repaired = Removals(), Counter[str]()
    for record in (*cleaned, *encoded):
        removals.merge(record.removals)
        repaired.update(record.repaired)
    read = sum(record.read for record in cleaned)
    check_some_left(work, removals, read, read - removals.counts.total())
    for name in sorted(encoded[0].files):
        join_files([work.place("encode", task) / name for task in range(work.tasks)], staging / name)
    if unlinked := sum(record.unlinked for record in encoded):
        logger.warning(
            f"{unlinked:,} of {read - removals.counts.total():,} pairs lose their word alignments, because "
            "the vocabulary divides their text into other words"
        )
    # Every line of valid is encoded, broken ones as well as possible: line numbers must stay those of the text.
    tokenizer, valid = open_tokenizer(vocabulary), (staging / "valid.source", staging / "valid.target")
    lines = sum(record.lines for record in work.inputs["valid.source"])
    encoder = PairEncoder(tokenizer, options.tags)
    of_valid = encode_split(valid, encoder, staging, "valid", lines)
    if options.text == "moses" and options.target_lang is not None:
        warn_of_missing_rules(options.target_lang, "--target-lang")
    if options.text_form.form == "raw":
        _warn_of_tokens(valid[1])

    unknown = (tokenizer.vocabulary.source.unk, tokenizer.vocabulary.unk)
    splits = [*map(split_name, range(options.segmentations)), "valid"]
    round_trips = {
        f"{split}.{side}": reduce(RoundTrip.followed_by, (record.round_trips[side] for record in records))
        for split, records in (("train", encoded), ("valid", [of_valid]))
        for side in SIDES
    }
    inputs = dict(work.inputs)
    for texts in (record.texts for record in indexed):
        inputs |= {name: (*inputs.get(name, ()), text.record) for name, text in texts.items()}
    reasons = options.cleaning.reasons(options.filters)
    meta = Meta(
        format=FORMAT,
        version=__version__,
        options=work.recorded,
        inputs={name: inputs[name] for name in options.inputs},
        segmented=tokenizer.segmented,
        text=options.text_form,
        tags=options.tags,
        vocabulary_size=tokenizer.size,
        source_vocabulary_size=tokenizer.vocabulary.source.size,
        pairs_read=read,
        removed={reason: removals.counts[reason] for reason in reasons},
        removed_examples={reason: tuple(removals.examples.get(reason, ())) for reason in reasons},
        repaired={rule: {side: repaired[f"{rule}.{side}"] for side in SIDES} for rule in options.unicode},
        splits={split: Corpus(staging, split).stats(unknown) for split in splits},
        round_trips=round_trips,
        files={path.name: FileRecord.of(path) for path in sorted(staging.iterdir()) if path.is_file()},
    )
    write_record(staging / META_FILE, f"{meta.model_dump_json(indent=2)}\n".encode())
    return meta


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
    for side, paths in zip(SIDES, options.paths("valid"), strict=True):
        with (directory / f"valid.{side}").open("rb") as text:
            if not any(map(bytes.strip, text)):
                raise DataError(
                    f"no sentence in the validation set {', '.join(map(str, paths))}; hold out some hundreds of "
                    "sentence pairs of the training text"
                )
    return records


def _warn_of_tokens(path: Path) -> None:
    """Warn of raw text that looks tokenised."""
    with open_text(path) as text:
        lines = [line.rstrip() for line in text_lines(text)]
    if count := looks_tokenised(lines):
        logger.warning(
            f"{path.name}: {count:,} of {len(lines):,} lines end in ' .' and look tokenised, so BLEU would not be "
            "comparable; give --text moses and the languages, or --text tokenised"
        )


def _check_room(directory: Path, options: PrepareOptions) -> None:
    """Log how much of the disk is needed if nothing is removed, and check that the clean text fits.

    Pipes do not count.
    """
    paths = [path for name, paths in options.inputs.items() if name.startswith("train.") for path in paths]
    needed = sum(map(size_of, paths))
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


def same_or_refuse(
    out: Path, options: PrepareOptions, vocabulary: Tokenizer | None, sampling: SampledSegmentations | None
) -> Meta:
    """Open an existing data directory if it was made from the same text with the same options; refuse others."""
    recorded, inputs = options.recorded(vocabulary, sampling), inspect_inputs(options.inputs)
    directory = DataDirectory.open(out)
    meta = directory.meta
    differing = [name for name in sorted({*recorded, *meta.options}) if recorded.get(name) != meta.options.get(name)]
    for name in sorted({*inputs, *meta.inputs}):
        new, old = (tuple(record.sha256 for record in records.get(name, ())) for records in (inputs, meta.inputs))
        if new != old:
            differing.append(f"{name} text")
    if differing:
        raise DataError(
            f"--out {out} holds data that differs in {', '.join(differing)}; give --overwrite to replace it, or "
            "choose another --out"
        )
    directory.verify_hashes()
    logger.info("%s is already prepared from the same text with the same options: nothing to do", out)
    return meta


@contextmanager
def worker_pool(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Provide a function like ``map``, which works in several processes if there are several items.

    The processes end with the block; after an error, at once.

    Raises:
        DataError: if a worker ends before its work.
    """
    if workers == 1:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # a forked one could not use its parent's threads
    with _signals_blocked():  # the process that cleans up after semaphores starts here, and must outlive SIGHUP
        pool = ProcessPoolExecutor(workers, context, initializer=_start)

    def run(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        if len(items) == 1:
            return map(work, items)
        with _signals_blocked():  # of the workers
            return pool.map(work, items)

    try:
        yield run
    except BaseException as error:
        for process in list((pool._processes or {}).values()):
            process.kill()
        if isinstance(error, BrokenProcessPool):
            raise DataError(
                "a worker of `prepare` was killed, probably out of memory; start again, with fewer --workers if so"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals during the block, and for good in processes that start in it: their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start() -> None:
    """Prepare a new worker, which ends when its parent has ended, however it has."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library of BERTs' tokenizers would start threads
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
