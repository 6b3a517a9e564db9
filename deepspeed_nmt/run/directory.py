"""Run directories, and the manifest with hashes of the files that decide a run's outputs.

docs/directories.md has the files of a run with their contents. The manifest records ``config.yaml``, ``data.json``
and ``vocabulary.*``. If one of them is lost or damaged, a run is refused.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import LikelihoodConfig
from deepspeed_nmt.data.data_directory import VOCABULARY_FILES, DataDirectory, open_tokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.data.training import TrainingData
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError
from deepspeed_nmt.evaluate.metrics import Metric, Scorer, TextMetric
from deepspeed_nmt.export.certificate import EXPORTS
from deepspeed_nmt.files import atomic_write_bytes, check_utf8_name, read_regular, resolved
from deepspeed_nmt.manifest import (
    HASH_SUFFIX,
    MANIFEST_FILE,
    DamagedRecordError,
    FileRecord,
    PlainName,
    Sha256,
    read_record,
    write_record,
)
from deepspeed_nmt.plugins import PluginName, check_plugins
from deepspeed_nmt.recipes.reading import read_yaml
from deepspeed_nmt.registry import Config
from deepspeed_nmt.search.decode_options import MAX_SOURCE_TOKENS
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore, DataDescription, RunRecord
from deepspeed_nmt.train.configuration import ValidationConfig

CONFIG_FILE, DATA_FILE, CHECKPOINTS = "config.yaml", "data.json", "checkpoints"
ENVIRONMENT_FILE = "environment.json"
LOGS = "logs"
"""Log of each rank, over all restarts."""
GRADIENTS = "gradients"
"""Hashes of the gradients of each rank, over all restarts."""
ORIGIN_FILE = "origin.json"
"""File that records the run of a warm start."""
SCORES_FILE = "test_scores.json"
"""File with the scores of test sets that reports have measured."""
VALIDATION = "validation"
LOCK_FILE = ".lock"
"""File that names the process that trains in a run directory."""
_FILES_READ = {
    *("config.yaml", "data.json", ENVIRONMENT_FILE, LOCK_FILE, MANIFEST_FILE),
    *(MANIFEST_FILE + HASH_SUFFIX, ORIGIN_FILE, SCORES_FILE, "resolved.json", *VOCABULARY_FILES),
    *("metrics.jsonl", "events.jsonl", "goodput.jsonl"),
}
"""Names of a run's files that are read, or appended to."""

_FIXED = ("model.", "growth.", "layer.", "objective.", "optimizer.name.", "training.seed.", "batch.update_tokens.")
"""Settings that cannot change once the run has a checkpoint."""


@dataclass(frozen=True)
class Run:
    """An existing run, opened for reading, with the records of its files."""

    path: Path
    config: RunConfig
    tokenizer: Tokenizer
    files: Mapping[str, FileRecord]

    @classmethod
    def open(cls, path: Path, option: str = "--run") -> Run:
        """Open the directory of a run for reading, after its files are verified."""
        if (path / "state.json").is_file():
            raise ConfigError(
                f"{path} is a checkpoint, not a run; give {path.parent.parent} as {option} and the "
                f"checkpoint {path.name}"
            )
        if not any((path / name).exists() for name in (CONFIG_FILE, MANIFEST_FILE, CHECKPOINTS)):
            what = "has no config.yaml" if path.is_dir() else "does not exist"
            raise ConfigError(f"{path} {what}; give a directory made by `train` as {option}")
        check_utf8_name(path, option)
        files = verify_run(path)
        return cls(path, recorded_config(path), open_tokenizer(path), files)

    @property
    def checkpoints(self) -> CheckpointStore:
        """Checkpoints of the run, to read and choose from."""
        return CheckpointStore(self.path / CHECKPOINTS)

    def check_vocabulary(self, data: DataDirectory) -> None:
        """Check that the tokens of a data directory are those of the run; a DataError if they are not."""
        if any(self.files.get(name) != file for name, file in data.vocabulary.items()):
            raise DataError(f"{data.path} has another vocabulary than {self.path}")

    @property
    def longest_line(self) -> int:
        """Default bound of a source line, in tokens: 1024, or the longest training sentence if that is longer."""
        return max(MAX_SOURCE_TOKENS, self.data.longest_source)

    @cached_property
    def data(self) -> DataRecord:
        """Record of the data that the run was trained on."""
        return DataRecord.read(self.path)

    def bleus(self, text: TextForm) -> tuple[Metric, ...]:
        """Return BLEUs of the run's translations into text of a form: of its validation, then others it allows."""
        (named, _), (usual, _) = (
            validation.chosen(text) for validation in (self.config.validation, ValidationConfig())
        )
        bleus = [metric for metric in named if isinstance(metric, TextMetric) and metric.name.startswith("bleu")]
        return tuple(dict.fromkeys([*bleus, *usual]))

    def scorer(self, references: Iterable[str], text: TextForm, metrics: Sequence[Metric] = ()) -> Scorer:
        """Return a scorer of the run's translations, which are text of a form, by metrics, or by its :meth:`bleus`.

        The references, one of each sentence, have that form, too.
        """
        lines = [self.tokenizer.reference(line) for line in references]
        return Scorer(metrics or self.bleus(text), text, lines)

    def checkpoint(self, which: str, option: str = "") -> Checkpoint:
        """Open a checkpoint, which must be of this run; arguments as of :meth:`CheckpointStore.open`."""
        checkpoint = self.checkpoints.open(which, option)
        check_record(checkpoint, self.config, self.files)
        return checkpoint

    def model(self, which: str) -> TranslationModel:
        """Build the model with the weights of a checkpoint (best, last, average, or a path), for decoding."""
        return self.loaded(which)[0]

    def loaded(self, which: str) -> tuple[TranslationModel, str]:
        """Return the model as :meth:`model`, and the hash of its weights."""
        checkpoint = self.checkpoint(which)
        try:
            model = self._model_of(checkpoint)
        except CheckpointError:
            if checkpoint.path.exists() or which not in ("best", "last"):
                raise
            # A training of the run has removed it, after it has written a newer one.
            checkpoint = self.checkpoint(which)
            model = self._model_of(checkpoint)
        logger.info("%s: update %d", checkpoint.path, checkpoint.progress.update)
        return model.eval(), checkpoint.weights_digest

    def at(self, which: str) -> Run:
        """Return the run with the settings of a checkpoint, since when its model may have grown."""
        if not self.config.growth.at:
            return self
        return replace(self, config=self.config.for_update(self.checkpoint(which).progress.update))

    def _model_of(self, checkpoint: Checkpoint) -> TranslationModel:
        model = build_model(self.config.for_update(checkpoint.progress.update), self.tokenizer.vocabulary)
        model.float()  # whatever a program's default tensors are: of fewer bits they would round the weights
        checkpoint.load_into(model)
        return model

    def trained_at(self, exit: str, stages: tuple[int, int]) -> bool:
        """Return True if the run's objective trains an exit of its model, as always one without numbers."""
        encoder, numbered, decoder = exit.partition("-")
        if not numbered:
            return True
        likelihoods = [part for part in self.config.objective.values() if isinstance(part, LikelihoodConfig)]
        return any(part.trains_exit(int(encoder), int(decoder), stages) for part in likelihoods)


def recorded_config(run: Path) -> RunConfig:
    """Load the settings of a run; those of a plug-in that is not loaded are a ConfigError."""
    with suppress(DamagedRecordError, ValidationError):
        check_plugins(RunManifest.read(run).plugins, run)
    return validate(read_yaml(run / CONFIG_FILE))


def check_record(checkpoint: Checkpoint, config: RunConfig, files: Mapping[str, FileRecord]) -> None:
    """Check that a checkpoint is of a run with the same fixed settings and the same vocabulary."""
    if (record := checkpoint.run) is None:
        return
    now = config.flat()
    before = validate(record.config).flat()
    differences = [
        f"its {key} is {before.get(key, 'unset')} instead of {now.get(key, 'unset')}"
        for key in changed_fixed_settings(before, now)
    ]
    if any(files.get(name) != file for name, file in record.vocabulary.items()):
        differences.append("its vocabulary is another one")
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} is a checkpoint of another run: {differences[0]} ({len(differences)} differences); "
            "open it with its own run, or move it away, and the one before it is used"
        )


def changed_fixed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the fixed settings that differ."""
    keys = sorted(before.keys() | now.keys())
    return [key for key in keys if f"{key}.".startswith(_FIXED) and before.get(key) != now.get(key)]


def check_contents(run: Path) -> None:
    """Check that what is read of a run are files of its own, since a run may come from somebody else.

    Reading a pipe may never end, and a link may lead to any file of this user. Only the directories of checkpoints
    may be links, to another disk: they have hashes, and none of their text is shown.
    """
    places = [run / name for name in (*_FILES_READ, LOGS, GRADIENTS, VALIDATION, CHECKPOINTS, EXPORTS)]
    inside, store = resolved(run), run / CHECKPOINTS
    while places:
        path = places.pop()
        try:
            is_link, on_other_disk = path.is_symlink(), store in (path, path.parent) and path.is_dir()
            if is_link and not on_other_disk and not resolved(path).is_relative_to(inside):
                raise DataError(f"{path} is a link to {path.readlink()}, out of the run; put a copy in its place")
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                places += path.iterdir() if on_other_disk or not is_link else ()  # other links may lead in circles
            elif not stat.S_ISREG(mode):
                raise DataError(f"{path} is a pipe or a device; remove it, or restore the file from a copy")
        except OSError:  # a file that is missing, or removed by a training meanwhile
            continue


class DataRecord(DataDescription):
    """The content of ``data.json``, which describes the data that the run was last trained on.

    ``path`` is its directory, or the first one of a mixture.
    """

    path: str

    @classmethod
    def of(cls, data: TrainingData) -> DataRecord:
        """Return the record of the data of a run."""
        return cls(
            path=str(data.main.path.resolve()),
            fingerprint=data.main.fingerprint,
            longest_source=data.longest_source,
            text=data.main.text_form,
            common_text=data.common_form,
            tags=data.tags,
            corpora=data.records,
        )

    @classmethod
    def read(cls, run: Path) -> DataRecord:
        """Read the record of a run."""
        try:
            return cls.model_validate_json(read_regular(run / DATA_FILE))
        except (OSError, ValidationError) as error:
            raise DataError(
                f"{run / DATA_FILE} is not what `train` wrote when the run began; restore it from a copy"
            ) from error

    def for_checkpoints(self, config: RunConfig, vocabulary: dict[str, FileRecord]) -> RunRecord:
        """Return the record of a run with this data, for its checkpoints."""
        of_data = dict(self)
        directory = of_data.pop("path")
        return RunRecord(config=config.model_dump(mode="json"), data=directory, vocabulary=vocabulary, **of_data)


class RunManifest(Config):
    """The content of ``manifest.json`` of a run.

    Attributes:
        before: records of files that were being replaced when the manifest was written: a file may match either.
        seal: by which the user who started the run knows its commands again, see :mod:`deepspeed_nmt.run.start`.
        plugins: hashes of the plug-ins by which the run was trained, by name.
    """

    format: Literal[1] = 1
    files: dict[PlainName, FileRecord]
    before: dict[PlainName, FileRecord] = Field(default={})
    seal: str = ""
    plugins: dict[PluginName, Sha256] = Field(default={})

    @classmethod
    def read(cls, path: Path) -> RunManifest:
        """Read the manifest of a run; raise a DamagedRecordError or a ValidationError if it is damaged."""
        return cls.model_validate_json(read_record(path / MANIFEST_FILE))

    def problems(self, path: Path) -> dict[str, str]:
        """Return the predicate of a message for each file that is not as recorded, by name."""
        problems = {}
        for name, record in self.files.items():
            problem = record.problem(path / name)
            if problem and not (name in self.before and self.before[name].problem(path / name) is None):
                problems[name] = problem
        return problems

    def write(self, path: Path) -> None:
        """Write the manifest and its hash."""
        write_record(path / MANIFEST_FILE, self.model_dump_json(indent=1).encode())


def replace_files(
    path: Path,
    contents: Mapping[str, bytes],
    seal: str | None = None,
    plugins: Mapping[str, str] | None = None,
    *,
    keep: bool = True,
) -> None:
    """Replace files of a run, and hashes of plug-ins; after a crash at any moment the files match the manifest.

    Args:
        seal: of the commands; None for the one that the manifest has.
        keep: True for files and plug-ins of the manifest to stay, if nothing new replaces them; False to remove them.
    """
    try:
        old = RunManifest.read(path)
    except (DamagedRecordError, ValidationError):
        old = RunManifest(files={})
    records = {name: FileRecord.of(content) for name, content in contents.items()}
    new = RunManifest(
        files={**(old.files if keep else {}), **records},
        seal=old.seal if seal is None else seal,
        plugins={**(old.plugins if keep else {}), **(plugins or {})},
    )
    changed = [
        name for name in contents if old.files.get(name) != records[name] or records[name].problem(path / name)
    ]
    if not changed and old == new:
        return
    damaged = old.problems(path)
    before = {name: FileRecord.of(path / name) for name in changed if name in old.files and name not in damaged}
    new.model_copy(update={"before": before}).write(path)
    for name in changed:
        atomic_write_bytes(path / name, contents[name])
    if before:
        new.write(path)
    for name in old.files.keys() - new.files.keys():
        (path / name).unlink(missing_ok=True)


def verify_run(path: Path) -> dict[str, FileRecord]:
    """Compare a run's files with its manifest, and return their records by name."""
    check_contents(path)
    for _ in range(2):  # a start of `train` may replace the files between the two readings
        try:
            manifest = RunManifest.read(path)
        except DamagedRecordError as error:
            raise DataError(f"{error}; restore it from a copy of {path}") from error
        except ValidationError as error:
            raise DataError(f"{path / MANIFEST_FILE} is not what `train` writes; restore it from a copy") from error
        if not (problems := manifest.problems(path)):
            return manifest.files
    name, problem = min(problems.items())
    remedy = "copy it from the run's data directory" if name in VOCABULARY_FILES else "restore it from a copy"
    if name == CONFIG_FILE:
        remedy += "; change settings on the command line of `train`, as section.key=value"
    raise DataError(f"{path / name} {problem}; {remedy}")
