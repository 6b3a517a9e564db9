"""Back-translation and distillation: monolingual text becomes a corpus, by tasks of :mod:`deepspeed_nmt.data.tasks`.

| stage | tasks | files of a task |
|---|---|---|
| ``text`` | 1 | the text as one plain file, and where its pieces begin |
| ``translate`` | N | translations of successive pieces |
| ``score`` | N | log-probabilities of the same pieces |
| ``collect`` | 1 | none: the files of the stages before become those of OUT |
| those of :mod:`deepspeed_nmt.data.stages` | | the data directory OUT/data |

Pieces have equally many lines, as those of `translate`. Each is translated and scored by itself, and samples of a
sentence depend on its number: the result is the same for any number of tasks, and that of `translate`.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field, ValidationError, model_validator
from typing_extensions import override

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.corpus import join_files
from deepspeed_nmt.data.data_directory import META_FILE, DataDirectory, Meta
from deepspeed_nmt.data.inputs import IndexedText, Inputs, check_inputs, copy_text, inspect_inputs, state_of
from deepspeed_nmt.data.options import CLUSTER, ExecutorOptions, PrepareOptions, command_option
from deepspeed_nmt.data.preparation import check_options, differences, set_up
from deepspeed_nmt.data.stages import PairsRecord, Preparation
from deepspeed_nmt.data.tasks import resumed, run_stages
from deepspeed_nmt.data.training import DataOption
from deepspeed_nmt.errors import ConfigError, DataError, typed
from deepspeed_nmt.files import is_replaceable, remove
from deepspeed_nmt.manifest import HASH_SUFFIX, DamagedRecordError, FileRecord, read_record, write_record
from deepspeed_nmt.parallel.hardware import uses_cuda
from deepspeed_nmt.registry import Config, validated
from deepspeed_nmt.run.translation import piece_lines, stream_keywords
from deepspeed_nmt.search.decode_options import DecodeOptions, identity_of
from deepspeed_nmt.search.lines import LINES_OF_A_FORM, SourceCounts, warn_of_form
from deepspeed_nmt.text import TextForm, text_of

if TYPE_CHECKING:
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.run.directory import Run

TEXT, TRANSLATIONS, SCORES = "text", "translations", "scores"
"""Files of OUT."""
MAX_TASKS = 4096
"""Tasks of a host at most: a task that is stopped begins anew."""
MAX_TOKENS = 4096
"""Batch size of scores: pairs x longest side."""
_MAX_CHARACTERS = 1 << 16
"""Characters of a target that is scored; `prepare` removes pairs of far fewer."""
_RECORD = "corpus.json"
_BEGINS = "begins.npy"


class BacktranslateOptions(ExecutorOptions):
    """Options of `backtranslate`; ``translation`` are those of `translate`, with the runs."""

    text: Inputs = command_option("monolingual text, one sentence a line", ..., min_length=1)
    data: Path = command_option(
        "data directory of the parallel text, whose vocabulary and validation set are used", ..., "DIR"
    )
    out: Path = command_option("directory of the results", ..., "DIR")
    score_run: Path | None = command_option(
        "run that translates as the data does, and scores the pairs: mean log-probability of a target token",
        metavar="DIR",
    )
    min_score: float | None = command_option("remove pairs with a lower score", metavar="S")
    filters: str = command_option("filters of `prepare`, for example web,language", "", "NAME[=VALUE],...")
    tag: str | None = command_option(
        "symbol of the data's vocabulary that marks the corpus in a mixture, or none (default: <bt>; with --distill: "
        "none)"
    )
    weight: str = command_option("weight of the corpus in the mixture", "1", "W")
    distill: bool = command_option(
        "sequence-level distillation: the text is of the source language, --run is a teacher that translates as the "
        "data does, and its translations are the targets",
        False,
    )
    workers: int | None = command_option(
        "processes of this host that translate and score; the result is the same for any (default: one for each "
        "GPU; without GPUs, for each core)",
        ge=1,
        le=1024,
    )  # type: ignore[assignment]
    gpus_per_task: int = command_option(
        "GPUs of a task that translates or scores", 0, "{0,1}", group=CLUSTER, ge=0, le=1
    )
    translation: DecodeOptions

    @model_validator(mode="after")
    def _fit_together(self) -> BacktranslateOptions:
        if self.score_run is not None and self.min_score is None:
            raise ValueError("no smallest score for --score-run; give --min-score, for example -3")
        if self.min_score is not None and self.score_run is None:
            raise ValueError("no run that scores the pairs for --min-score; give --score-run")
        if any(part.partition("=")[0].strip() == "score" for part in self.filters.split(",")):
            raise ValueError("--filters has score, which needs scores; give --score-run and --min-score")
        if self.translation.detokenise is not None:
            raise ValueError("--detokenise gives translations another form than their text has; leave it out")
        if self.gpus_per_task and self.executor == "local":
            raise ValueError("--gpus-per-task is for --executor slurm; leave it out, since all GPUs here translate")
        return self

    @property
    def symbol(self) -> str | None:
        """Return the tag of the corpus, or None."""
        tag = self.tag or ("none" if self.distill else "<bt>")
        return None if tag == "none" else tag

    @property
    def mixture(self) -> list[str]:
        """Values of ``train --data``: the parallel text and the new corpus, or that alone if it is distilled."""
        corpus = self.out / "data"
        if self.distill and self.symbol is None:
            return [str(corpus)]
        return [str(self.data), f"{corpus}={self.weight}{f'@{self.symbol}' if self.symbol else ''}"]

    def side(self, side: str) -> Path:
        """Return the file of OUT that is a side of the corpus."""
        return self.out / (TRANSLATIONS if (side == "source") != self.distill else TEXT)


class LinesRecord(PairsRecord):
    """The record of a task; ``read`` are its lines.

    ``counts`` are what there is to warn of, ``identity`` all that translations depend on, as the translator says.
    """

    counts: SourceCounts = Field(default_factory=SourceCounts)
    identity: dict[str, Any] = Field(default_factory=dict)


class CorpusRecord(Config):
    """The record of OUT: the monolingual text, the files, and what translations and scores were made with."""

    texts: tuple[IndexedText, ...]
    files: dict[str, FileRecord]
    made: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, out: Path) -> CorpusRecord | None:
        """Read the record of a directory; None if there is nothing in it. Others are a DataError."""
        if not out.exists() or (
            # A process that is killed while it first writes the record has written the hash.
            out.is_dir() and all(file.name[0] == "." or file.name == _RECORD + HASH_SUFFIX for file in out.iterdir())
        ):
            return None
        try:
            return cls.model_validate_json(read_record(out / _RECORD))
        except (DamagedRecordError, ValidationError, NotADirectoryError) as error:
            raise DataError(
                f"--out {out} is not as `backtranslate` makes it ({error}); choose another --out"
            ) from error

    def has(self, out: Path, name: str) -> bool:
        """Return True if a file is as it was written, False if it is missing; a changed one is a DataError."""
        if not (out / name).exists():
            return False
        problem = self.files[name].problem(out / name) if name in self.files else "is not of `backtranslate`"
        if problem:
            raise DataError(f"{out / name} {problem}; move it away, or choose another --out")
        return True


class Backtranslation(Preparation):
    """The preparation of OUT/data, after stages that make its text of monolingual text.

    ``made`` is what decides the translations, and the scores if there are any. ``present`` are files of OUT that are
    made already, ``fingerprint`` is that of the parallel data.
    """

    command = "backtranslate"
    record_type = LinesRecord
    packages: ClassVar = (*Preparation.packages, "torch")
    shown: ClassVar = {"translate": "translate", "score": "score", **Preparation.shown}
    memory_gib: ClassVar = {**Preparation.memory_gib, "translate": 6, "score": 6}

    own: BacktranslateOptions
    made: dict[str, dict[str, Any]]
    present: tuple[str, ...]
    fingerprint: str

    @property
    @override
    def stages(self) -> dict[str, int]:
        """Names of the stages, in order, with their numbers of tasks; on one host without those of preparation."""
        tasks = self.own.tasks or (self.division() if self.place("text", 0).is_dir() else 1)
        scoring = {"score": tasks} if SCORES in self.made else {}
        new = (
            {} if {TEXT, *self.made} <= {*self.present} else {"text": 1, "translate": tasks, **scoring, "collect": 1}
        )
        return {**new, **(super().stages if self.own.executor == "slurm" else {})}

    @property
    def preparation(self) -> Preparation:
        """The preparation alone."""
        return Preparation(**{name: getattr(self, name) for name in Preparation.model_fields})

    @override
    def gpus(self, stage: str) -> int:
        return self.own.gpus_per_task if stage in ("translate", "score") else 0

    @override
    def division(self) -> int:
        return self.own.tasks or max(1, min(len(self.begins(TEXT)) - 1, MAX_TASKS))

    @override
    def run(self, stage: str, task: int, new: Path) -> PairsRecord:
        return _TASKS[stage](self, task, new) if stage in _TASKS else super().run(stage, task, new)

    def begins(self, name: str) -> Any:
        """Return the first byte of each piece of a file, and the bytes of all. Shape: (pieces + 1,)."""
        return np.load(self.place("text", 0) / f"{name}.{_BEGINS}", mmap_mode="r")

    def of_task(self, task: int) -> range:
        """Return the numbers of the pieces of a task."""
        count, tasks = len(self.begins(TEXT)) - 1, self.stages["translate"]
        return range(count * task // tasks, count * (task + 1) // tasks)

    def opened(self, options: DecodeOptions, name: str, file: str) -> Translator:
        """Open the runs that make a file of OUT."""
        return _opened(options.model_dump_json(), name, tuple(self.made[file][name]))

    @property
    def piece_lines(self) -> int:
        """Lines of a piece."""
        return piece_lines(self.record("text", 0).read, self.own.translation.max_tokens)


def _lines(path: Path, first: int, last: int) -> list[str]:
    """Return the lines of a range of bytes of a file."""
    with path.open("rb") as file:
        file.seek(first)
        return [text_of(line) for line in BytesIO(file.read(last - first))]


def _find_pieces(path: Path, lines: int, file: Path) -> None:
    """Write where the pieces of a text begin, and its end."""
    begins, end = [0], 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            end += len(line)
            if number % lines == 0:
                begins.append(end)
    np.save(file, np.array([*begins, *([end] if end > begins[-1] else [])], np.int64))


def read_text(work: Backtranslation, task: int, new: Path) -> LinesRecord:
    """Write the monolingual text as one file."""
    options = work.own
    states = [state_of(path) if isinstance(path, Path) else None for path in options.text]
    records = copy_text(options.text, new / TEXT)
    with (new / TEXT).open("rb+") as file:
        if not any(map(bytes.strip, file)):
            raise DataError(f"{', '.join(map(str, options.text))} has no sentence; check --text")
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.write(b"\n")
    read = sum(record.lines for record in records)
    lines = piece_lines(read, options.translation.max_tokens)
    _find_pieces(new / TEXT, lines, new / f"{TEXT}.{_BEGINS}")
    if TRANSLATIONS in work.present:
        _find_pieces(options.out / TRANSLATIONS, lines, new / f"{TRANSLATIONS}.{_BEGINS}")
    texts = [IndexedText(record=record, start=0, state=state) for record, state in zip(records, states, strict=True)]
    return LinesRecord(texts={str(number): text for number, text in enumerate(texts)}, read=read)


@lru_cache(maxsize=1)
def _opened(options: str, name: str, weights: tuple[str, ...]) -> Translator:
    """Open runs, once for all tasks of a process; their weights must be those that the work began with."""
    from deepspeed_nmt.api import Translator  # imports torch

    opened = DecodeOptions.model_validate_json(options)
    translator = Translator.opened(opened, opened.settings)
    if translator.digests != weights:
        raise DataError(f"{name} has another checkpoint than when the work began; give that by --checkpoint")
    return translator


def translate(work: Backtranslation, task: int, new: Path) -> LinesRecord:
    """Write the translations of the pieces of a task."""
    options, pieces, number = work.own.translation, work.of_task(task), work.piece_lines
    begins = work.begins(TEXT)
    if TRANSLATIONS in work.present:
        begins = work.begins(TRANSLATIONS)
        with (work.own.out / TRANSLATIONS).open("rb") as file:
            file.seek(begins[pieces.start])
            (new / TRANSLATIONS).write_bytes(file.read(begins[pieces.stop] - begins[pieces.start]))
        return LinesRecord()
    translator, counts = work.opened(options, "--run", TRANSLATIONS), SourceCounts()
    keywords = stream_keywords(options, strict=False, buffer_lines=number)
    with (new / TRANSLATIONS).open("w", encoding="utf-8", newline="\n") as file:
        for piece in pieces:
            lines = _lines(work.place("text", 0) / TEXT, *begins[piece : piece + 2])
            if piece == 0:
                deque(warn_of_form(lines[:LINES_OF_A_FORM], translator.text), maxlen=0)
            for best in translator.stream(lines, first_line=piece * number, counts=counts, **keywords):
                file.write(f"{best[0].text}\n")
    identity = json.loads(json.dumps(translator.identity(), default=str))
    if task == 0:  # a text of another language is not noticed at the end only
        SourceCounts().warn_of(counts)
    return LinesRecord(read=counts.lines, counts=counts, identity=identity)


def score(work: Backtranslation, task: int, new: Path) -> LinesRecord:
    """Write the mean log-probability of a target's token of each pair of a task."""
    work.record("translate", task, verify=(TRANSLATIONS,))
    translations, read = work.place("translate", task) / TRANSLATIONS, 0
    run = work.own.score_run
    scorer = DecodeOptions(run=None if run is None else [run], device=work.own.translation.device)
    translator, begins = work.opened(scorer, "--score-run", SCORES), work.begins(TEXT)
    with translations.open("rb") as lines, (new / SCORES).open("w", encoding="utf-8") as file:
        for piece in work.of_task(task):
            sides = [_lines(work.place("text", 0) / TEXT, *begins[piece : piece + 2])]
            sides.insert(0, [text_of(lines.readline()) for _ in sides[0]])
            sources, targets = reversed(sides) if work.own.distill else sides
            file.writelines(f"{value:.9g}\n" for value in scores(translator, sources, targets, warn=piece == 0))
            read += len(sides[0])
    return LinesRecord(read=read)


def scores(translator: Translator, sources: list[str], targets: list[str], warn: bool) -> Iterator[float]:
    """Yield the mean log-probability of a token of each target; -inf for one that the model cannot read.

    Monolingual text can have a file in base64 on a line. An error would lose the translations of all others.
    """
    longest = math.inf if translator.model.longest_target is None else translator.model.longest_target - 1
    longest -= translator.tags.target is not None
    beginnings = [text[: _MAX_CHARACTERS + 1] for text in targets]
    too_long = [
        len(text) > _MAX_CHARACTERS or len(tokens) > longest
        for text, tokens in zip(beginnings, translator.tokenizer.encode_batch(beginnings, "target"), strict=True)
    ]
    read = ["" if is_left_out else text for text, is_left_out in zip(targets, too_long, strict=True)]
    pairs = translator.score(sources, read, max_tokens=MAX_TOKENS, warn=warn)
    for pair, is_left_out in zip(pairs, too_long, strict=True):
        yield -math.inf if is_left_out else pair.mean_log_prob


def collect(work: Backtranslation, task: int, new: Path) -> LinesRecord:
    """Join the files of the tasks as those of OUT, whose record is written first."""
    options, stages = work.own, {TRANSLATIONS: "translate", SCORES: "score"}
    records: list[Any] = work.records("translate")
    counts, text = SourceCounts(), work.record("text", 0, verify=(TEXT,))
    for record in records:
        counts.warn_of(record.counts)
    counts.warn_at_end()
    if differing := {name for record in records for name in _differing(record.identity, records[0].identity)}:
        logger.warning("tasks differed in %s; other hosts could give other bytes", ", ".join(sorted(differing)))
    parts = {TEXT: [work.place("text", 0) / TEXT]}
    for name in work.made:
        all_tasks = range(work.stages[stages[name]])
        for number in all_tasks:
            work.record(stages[name], number, verify=(name,))
        parts[name] = [work.place(stages[name], number) / name for number in all_tasks]
    for name, files in parts.items():
        join_files(files, new / name)
    options.out.mkdir(parents=True, exist_ok=True)
    if SCORES in parts:  # those of another run may be there
        (options.out / SCORES).unlink(missing_ok=True)
    whole = {name: FileRecord.of(new / name) for name in parts}
    record = CorpusRecord(texts=tuple(text.texts.values()), files=whole, made=work.made)
    write_record(options.out / _RECORD, record.model_dump_json().encode())
    for name in parts:
        (new / name).replace(options.out / name)
    return LinesRecord(read=text.read)


_TASKS: Mapping[str, Callable[[Backtranslation, int, Path], LinesRecord]] = {
    "text": read_text,
    "translate": translate,
    "score": score,
    "collect": collect,
}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def backtranslate(options: BacktranslateOptions) -> Meta | str:
    """Make OUT and OUT/data, as far as they are not made of the same text by the same options.

    For SLURM, submit the tasks that are not done, and return a message. What is stopped is resumed by the same call.

    Raises:
        ConfigError: if runs cannot be opened, or SLURM or datatrove is missing.
        DataError: if the options, the runs and the data do not fit each other, text is missing or changed, or other
            files or tasks are in the way.
    """
    check_inputs({"--text": options.text})
    if pipes := [path for path in options.text if isinstance(path, Path) and not is_replaceable(path)]:
        raise DataError(f"--text {pipes[0]} is a pipe, which could not be read again to resume; write it to a file")
    data = DataDirectory.open(options.data)
    options, made = _checked(options, data)
    present = _present(options, made)
    prepared = _preparation(options, data)
    to_come = [options.out / name for name in (TEXT, TRANSLATIONS, SCORES)]
    place, vocabulary, sampling = check_options(prepared, to_come)
    recorded = prepared.recorded(vocabulary, sampling)
    is_made = {TEXT, *made} <= {*present}
    if is_made and (place / META_FILE).exists():
        meta, differing = differences(place, prepared, recorded)
        if not differing:
            logger.info("%s is made of the same text by the same options: nothing to do", options.out)
            return meta

    new = {"own": options, "made": made, "present": present, "fingerprint": data.fingerprint, "options": prepared}
    new["recorded"] = recorded

    def make(directory: Path) -> Backtranslation:
        preparation = set_up(directory, prepared, vocabulary, sampling, options.tasks or 1)
        return Backtranslation(**{**dict(preparation), **new})

    def adopt(work: Backtranslation) -> Backtranslation:
        """Go on with translations and scores, and begin the preparation again if its options differ."""
        differing = _differing(work.made[TRANSLATIONS], made[TRANSLATIONS])
        if any((work.directory / "score").glob("[0-9]*")):
            differing += _differing(work.made.get(SCORES, {}), made.get(SCORES, {}))
        if work.place("text", 0).is_dir() and not _is_same(options, work.record("text", 0).texts.values()):
            differing.append("--text")
        differing += ["--tasks"] if work.own.tasks != options.tasks else []
        differing += ["--data"] if work.fingerprint != data.fingerprint else []
        if differing:
            raise DataError(
                f"{work.directory} holds tasks of another {', '.join(differing)}; remove it, or choose another --out"
            )
        is_other = (work.options, work.recorded) != (prepared, recorded)
        # What was prepared of texts or scores that are made again does not count.
        is_other |= not is_made
        stale = [*(work.preparation.stages if is_other else ()), *(["text"] if work.present != present else ())]
        stale += _TASKS if is_made else ()
        for stage in (*stale, "collect"):
            remove(work.directory / stage)
        work = work.model_copy(update=new)
        work.save()
        return work

    if options.executor == "slurm":
        from deepspeed_nmt.data import cluster

        return cluster.submit(Backtranslation, options, make, adopt)
    with resumed(Backtranslation, options, make, adopt) as (work, _):
        try:
            if work.stages:
                run_stages(work, *_workers(options))
            made_data = run_stages(work.preparation, prepared.workers).join()
            remove(work.directory)
        except BaseException:
            if not any((work.directory / "translate").glob("[0-9]*")):  # other options may follow
                remove(work.directory)
            raise
    return made_data


def _checked(
    options: BacktranslateOptions, data: DataDirectory
) -> tuple[BacktranslateOptions, dict[str, dict[str, Any]]]:
    """Check that runs, data and options fit each other; return the options, and what decides each file of OUT."""
    form, tag = data.text_form, options.symbol
    if data.meta.segmented:
        raise DataError(
            f"--data {data.path} is of segmented text, and translations are not segmented; prepare it from raw text"
        )
    DataOption.parse(options.mixture[-1])
    if tag is not None:
        data.tokenizer().symbol("source", tag)
    needed = form if options.distill else TextForm(form.form, form.target_lang, form.source_lang)
    runs = [_run(path, needed, "--run", data) for path in options.translation.run or ()]
    translation = options.translation
    if tag is not None and all(tag in run.tokenizer.symbols for run in runs):  # a text has it in front only
        translation = translation.model_copy(update={"suppress": [*(translation.suppress or ()), tag]})
    made = {TRANSLATIONS: {**_made("--run", runs, str(translation.checkpoint)), "--distill": options.distill}}
    own = {"run", "checkpoint", "device", "native", "choose_exits"}  # a rule is in the search
    made[TRANSLATIONS] |= {
        typed(name): value for name, value in translation.model_dump(mode="json", exclude=own).items()
    }
    if runs:
        made[TRANSLATIONS] |= _search_of(runs, translation)
    if options.score_run is not None:
        made[SCORES] = _made("--score-run", [_run(options.score_run, form, "--score-run", data)], "best")

    return options.model_copy(update={"translation": translation}), made


def _run(path: Path, form: TextForm, option: str, data: DataDirectory) -> Run:
    """Open a run, which must be for text of a form."""
    from deepspeed_nmt.run.directory import Run  # imports torch

    run = Run.open(path, option)
    if run.data.common_text.contradicts(form):
        raise ConfigError(
            f"{option} {path} was trained on {run.data.common_text}, but --data {data.path} needs {form}; give "
            "another run, or prepare the data from such text"
        )
    return run


def _made(name: str, runs: list[Run], checkpoint: str) -> dict[str, Any]:
    """Return what of runs decides their output."""
    weights = [run.checkpoint(checkpoint).weights_digest for run in runs]
    return {name: weights, f"vocabulary of {name}": [run.tokenizer.digest for run in runs]}


def _search_of(runs: list[Run], translation: DecodeOptions) -> dict[str, Any]:
    """Return the search and the tags by which runs decode, also where the options leave them to the runs."""
    from deepspeed_nmt.run.opening import chosen_tags, search_settings

    search = search_settings(runs, translation.settings, translation.exits)
    tags = chosen_tags(runs[0], translation.tag, translation.tag_target)
    by = identity_of(search, "any", str(translation.precision))
    return {**by, typed("tag"): tags.source, typed("tag_target"): tags.target}


def _present(options: BacktranslateOptions, made: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files of OUT that need not be made again; translations by other options are a DataError."""
    record = CorpusRecord.read(options.out)
    if record is None:
        return ()
    differing = _differing(record.made[TRANSLATIONS], made[TRANSLATIONS])
    if not _is_same(options, record.texts):
        differing.append("--text")
    if differing:
        raise DataError(
            f"--out {options.out} holds translations by another {', '.join(differing)}; choose another --out"
        )
    whole = [name for name in (TEXT, *made) if record.has(options.out, name)]
    return tuple(name for name in whole if name != SCORES or record.made.get(SCORES) == made[SCORES])


def _is_same(options: BacktranslateOptions, texts: Collection[IndexedText]) -> bool:
    """Return True if the text is the one that was read, by sizes and times, or by its hashes."""
    paths = [text.record.path for text in texts]
    is_known = all(text.state is not None and not text.is_changed() for text in texts)  # of a URL only the hash tells
    if paths == list(map(str, options.text)) and is_known:
        return True
    now = inspect_inputs({"text": options.text})["text"]
    return [record.sha256 for record in now] == [text.record.sha256 for text in texts]


def _preparation(options: BacktranslateOptions, data: DataDirectory) -> PrepareOptions:
    """Return the options by which `prepare` makes a directory like DATA."""
    scored = "" if options.score_run is None else f"score={options.min_score}"
    values: dict[str, Any] = {"out": options.out / "data", "overwrite": True, "vocab_from": data.path}
    values |= {"filters": ",".join(filter(None, [options.filters, scored]))}
    values |= {"workers": options.workers or len(os.sched_getaffinity(0))}
    form = data.text_form
    values["text"] = form.form
    for side in SIDES:
        values |= {f"train_{side}": (options.side(side),), f"valid_{side}": (data.path / f"valid.{side}",)}
        values |= {f"{side}_lang": getattr(form, f"{side}_lang"), f"tag_{side}": data.meta.tags.of(side)}
    if options.score_run is not None:
        values["train_scores"] = (options.out / SCORES,)
    return validated(PrepareOptions, values)


def _workers(options: BacktranslateOptions) -> tuple[int, list[dict[str, str]]]:
    """Return the number of processes that translate, and variables that each sets: its GPU, or its threads."""
    cores = len(os.sched_getaffinity(0))
    if uses_cuda(options.translation.device, "--device"):
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
        return options.workers or len(gpus), [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]
    workers = options.workers or cores
    return workers, [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // workers)))}]
