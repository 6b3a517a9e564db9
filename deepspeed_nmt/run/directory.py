"""Run directories.

Files of a run:

config.yaml  data.json  environment.json  resolved.json  origin.json  vocabulary.*  manifest.json
metrics.jsonl  events.jsonl  tensorboard/  checkpoints/  logs/  test_scores.json  alignment.json
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import RunConfig, load_recorded, validate_recorded
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import LikelihoodConfig
from deepspeed_nmt.data.directory import VOCABULARY_FILES, open_tokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.data.training import DataOption, TrainingData
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError
from deepspeed_nmt.evaluate.metrics import Scorer
from deepspeed_nmt.files import atomic_write_text, check_utf8_name, parse_json, remove_orphans
from deepspeed_nmt.manifest import MANIFEST_FILE, DamagedRecordError, FileRecord
from deepspeed_nmt.run.environment import environment
from deepspeed_nmt.run.manifest import (
    CHECKPOINTS,
    CONFIG_FILE,
    DATA_FILE,
    DataRecord,
    RunManifest,
    replace_files,
    verify_run,
)
from deepspeed_nmt.run.validation import ValidationConfig
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS
from deepspeed_nmt.text import Tags, TextForm
from deepspeed_nmt.train.checkpoint import Checkpoint, RunRecord
from deepspeed_nmt.train.metrics import METRICS_FILE
from deepspeed_nmt.train.store import CheckpointStore

ALIGNMENT_FILE = "alignment.json"
"""File with the decoder layers that align best."""
ENVIRONMENT_FILE = "environment.json"
LOGS = "logs"
"""Log of each rank, over all restarts."""
ORIGIN_FILE = "origin.json"
"""File that records the run of a warm start."""
SCORES_FILE = "test_scores.json"
"""File with the scores of test sets that reports have measured."""

_FIXED = (
    "model.",
    "layer.",
    "objective.",
    "optimizer.name.",
    "training.seed.",
    "batch.update_tokens.",
    "batch.order.",
)
"""Settings that cannot change once the run has a checkpoint."""
_LEARNING = ("optimizer.", "schedule.")
"""Settings whose change in a resumed run is logged, because a recipe may have changed them."""


@dataclass(frozen=True)
class Run:
    """An existing run, opened for reading.

    Attributes:
        path: run directory.
        config: settings of the run.
        tokenizer: tokenizer of the run.
        files: records of its files.
    """

    path: Path
    config: RunConfig
    tokenizer: Tokenizer
    files: Mapping[str, FileRecord]

    @classmethod
    def open(cls, path: Path, option: str = "--run") -> Run:
        """Open the directory of a run for reading. Its files are verified, and restored if they are lost.

        Args:
            path: run directory.
            option: option by which the user named it, for messages.

        Raises:
            ConfigError: if it is no run directory.
            DataError: if a file is lost or damaged and cannot be restored.
        """
        if (path / "state.json").is_file():
            raise ConfigError(
                f"{option} must be a directory made by `train`, but {path} is one of its checkpoints; give "
                f"{path.parent.parent} and the checkpoint {path.name}"
            )
        if not any((path / name).exists() for name in (CONFIG_FILE, MANIFEST_FILE, CHECKPOINTS)):
            what = "has no config.yaml" if path.is_dir() else "does not exist"
            raise ConfigError(f"{option} must be a directory made by `train`, but {path} {what}")
        check_utf8_name(path, option)
        files = verify_run(path)
        return cls(path, load_recorded(path / CONFIG_FILE), open_tokenizer(path), files)

    @property
    def checkpoints(self) -> CheckpointStore:
        """Checkpoints of the run."""
        training = self.config.training
        return CheckpointStore(self.path / CHECKPOINTS, training.keep_last, training.keep_best)

    @property
    def max_source_tokens(self) -> int:
        """Default bound of a source line, in tokens: 1024, or the longest training sentence if that is longer."""
        return max(MAX_SOURCE_TOKENS, DataRecord.read(self.path).longest_source)

    @property
    def text_form(self) -> TextForm:
        """Form of the text that the run was trained on, which is that of its translations."""
        return DataRecord.read(self.path).text or TextForm.unrecorded(self.tokenizer.segmented)

    @property
    def tags(self) -> Tags:
        """Symbols in front of all sentences of the data that the run was trained on."""
        return DataRecord.read(self.path).tags

    def scorer(self, references: Iterable[str]) -> Scorer:
        """Return a scorer of the run's translations by the BLEUs that the form of its text allows.

        Its first metric is sacreBLEU where that is possible, else tokenised BLEU.

        Args:
            references: one reference of each sentence, in the form of the text that the run was trained on.

        Raises:
            ConfigError: if sacremoses is required and not installed.
        """
        metrics, _ = ValidationConfig().chosen(self.text_form)
        return Scorer(metrics, self.text_form, [self.tokenizer.reference(line) for line in references])

    def checkpoint(self, which: str, option: str = "") -> Checkpoint:
        """Open a checkpoint of the run (best, last, average, a name, or a path).

        Args:
            which: its name or path.
            option: option by which the user named it, for messages; "" for that of most commands and of the API.

        Raises:
            CheckpointError: if there is none, or it is damaged, or of another run.
        """
        checkpoint = self.checkpoints.open(which, option)
        check_record(checkpoint, self.config, self.files)
        return checkpoint

    def model(self, which: str) -> TranslationModel:
        """Build the model with the weights of a checkpoint (best, last, average, or a path), for decoding."""
        return self.loaded(which)[0]

    def loaded(self, which: str) -> tuple[TranslationModel, str]:
        """Return the model with the weights of a checkpoint, as :meth:`model`, and the hash of these weights."""
        model = build_model(self.config, self.tokenizer.vocabulary)
        checkpoint = self.checkpoint(which)
        try:
            checkpoint.load_into(model)
        except CheckpointError:
            if checkpoint.path.exists() or which not in ("best", "last"):
                raise
            # A training of the run has removed it, after it has written a newer one.
            checkpoint = self.checkpoint(which)
            checkpoint.load_into(model)
        logger.info("%s: update %d", checkpoint.path, checkpoint.progress.update)
        return model.eval(), checkpoint.weights_digest

    def trained_at(self, exit: str, stages: tuple[int, int]) -> bool:
        """Return True if the run's objective trains an exit of its model.

        Args:
            exit: name of the exit. Exits without numbers, such as those of a grown model, are always trained.
            stages: number of stages of the encoder and of the decoder.
        """
        encoder, numbered, decoder = exit.partition("-")
        if not numbered:
            return True
        likelihoods = [part for part in self.config.objective.values() if isinstance(part, LikelihoodConfig)]
        return any(part.trains_exit(int(encoder), int(decoder), stages) for part in likelihoods)


def has_begun(path: Path) -> bool:
    """Return True if a run has a checkpoint. Until then, all its settings can change."""
    return bool(CheckpointStore(path / CHECKPOINTS).names())


def record_of(config: RunConfig, data: TrainingData) -> RunRecord:
    """Return the record of a run, for its checkpoints."""
    return RunRecord(
        config=config.model_dump(mode="json"),
        data=str(data.main.path.resolve()),
        fingerprint=data.main.fingerprint,
        longest_source=data.longest_source,
        text=data.main.text_form,
        tags=data.tags,
        corpora=data.records,
        vocabulary=data.main.vocabulary,
    )


def check_record(checkpoint: Checkpoint, config: RunConfig, files: Mapping[str, FileRecord]) -> None:
    """Check that a checkpoint is of a run with the same fixed settings and the same vocabulary.

    Args:
        checkpoint: to check. Those of older versions have no record, and pass.
        config: settings of the run.
        files: records of files of the run, those of its vocabulary among them.

    Raises:
        CheckpointError: if it is of another run.
    """
    if (record := checkpoint.run) is None:
        return
    now = config.flat()
    before = validate_recorded(record.config).flat()
    differences = [
        f"its {key} is {before.get(key, 'unset')} instead of {now.get(key, 'unset')}" for key in _changed(before, now)
    ]
    if any(files.get(name) != each for name, each in record.vocabulary.items()):
        differences.append("its vocabulary is another one")
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} must be a checkpoint of this run, but {differences[0]} ({len(differences)} "
            "differences); open it with its own run, or move it away, and the one before it is used"
        )


def begin(path: Path, config: RunConfig, data: TrainingData) -> None:
    """Write the files of a new run, or check that a resumed one has the same fixed settings and the same data.

    Args:
        path: run directory.
        config: settings of the run.
        data: data to train on.

    Raises:
        ConfigError: if a setting has changed that cannot change, all of them at once; or if files are in the way that
            `train` did not write.
        CheckpointError: if the newest checkpoint is of another run.
        DataError: if the data has changed.
    """
    files = {
        CONFIG_FILE: config.to_yaml().encode(),
        DATA_FILE: DataRecord.of(data).content(),
    }
    if has_begun(path):
        verify_run(path, data.main.path)
        _check_same(path, config, data)
    else:
        path.mkdir(parents=True, exist_ok=True)
        _check_own(path)
        if (path / METRICS_FILE).exists():
            logger.warning("%s has no checkpoint: training starts from the beginning, and its metrics with it", path)
        for name in (ORIGIN_FILE, MANIFEST_FILE, SCORES_FILE, ALIGNMENT_FILE):
            (path / name).unlink(missing_ok=True)
        files |= {name: (data.main.path / name).read_bytes() for name in data.main.vocabulary}
    for directory in (path, path / CHECKPOINTS, *(path / CHECKPOINTS).glob("update-*/")):
        remove_orphans(directory)
    replace_files(path, files)
    atomic_write_text(path / ENVIRONMENT_FILE, json.dumps(environment(), indent=1))


def recorded_data(path: Path) -> TrainingData:
    """Open the data directories that a run was last trained on.

    Args:
        path: run directory.

    Raises:
        DataError: if one is not where it was, or is incomplete.
    """
    record = DataRecord.read(path)
    options = [each.option for each in record.corpora] or [DataOption(Path(record.path))]
    for option in options:
        if not option.path.is_dir():
            raise DataError(
                f"--data is not given, so it is that of {path}, but there is no directory {option.path}; give the "
                "place of its data by --data"
            )
    return TrainingData(options)


def _check_same(path: Path, config: RunConfig, data: TrainingData) -> None:
    recorded = DataRecord.read(path)
    main = data.main
    if recorded.fingerprint != main.fingerprint:
        if recorded.fingerprint in (part.directory.fingerprint for part in data.parts):
            raise ConfigError(
                f"the first --data must be that of {recorded.path}, which gives {path} its vocabulary and validation "
                f"set, but is {main.path}; give that one first"
            )
        raise DataError(
            f"{main.path} must hold the data that {path} began with (from {recorded.path}), but it has changed; "
            "restore it, or start a new run with another --run directory"
        )
    before_at = {each.path: each.fingerprint for each in recorded.corpora}
    for part in data.parts:
        where = str(part.directory.path.resolve())
        if before_at.get(where, part.directory.fingerprint) != part.directory.fingerprint:
            raise DataError(
                f"{where} must hold the data that {path} was trained on, but it has changed; restore it, or give the "
                "new data another directory"
            )
    before = load_recorded(path / CONFIG_FILE).flat()
    now = config.flat()
    problems = [
        f"{key} must stay {before.get(key, 'unset')} once {path} has a checkpoint, but is {now.get(key, 'unset')}; "
        "without --recipe, --config and this setting the run keeps its own; for another one, start a new run"
        for key in _changed(before, now)
    ]
    if problems:
        raise ConfigError(problems)
    if learning := [key for key in sorted(now) if key.startswith(_LEARNING) and before.get(key) != now[key]]:
        changes = [f"{key} was {before.get(key, 'unset')} and is {now[key]}" for key in learning]
        logger.warning("%s continues with other settings: %s", path, ", ".join(changes))
    if config.layer.depends_on_micro_batches:
        _warn_of_micro_batches(path, before, now)
    store = CheckpointStore(path / CHECKPOINTS)
    newest = None
    with suppress(CheckpointError):  # a damaged one is skipped later
        newest = store.read(store.names()[-1], verify=False)
    if newest is not None:
        check_record(newest, config, main.vocabulary)


def _warn_of_micro_batches(path: Path, before: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Warn if updates are divided into other micro-batches than at the last start, on which random choices depend.

    Args:
        path: run directory.
        before: settings of the last start.
        now: settings of this one.
    """
    changes = [
        f"{key} was {before.get(key, 'unset')} and is {now[key]}"
        for key in sorted(now)
        if key.startswith("batch.") and before.get(key) != now[key]
    ]
    with suppress(OSError, ValueError, KeyError, TypeError):  # of an older version, or damaged
        ranks = int(parse_json((path / ENVIRONMENT_FILE).read_bytes())["ranks"])
        sizes = [(ranks, before), (int(environment()["ranks"]), now)]
        old, new = (count // int(str(settings["engine.tensor_parallel"])) for count, settings in sizes)
        if old != new:
            changes.append(f"there were {old} data-parallel ranks and are {new}")
    if changes:
        logger.warning(
            "%s: the random choices of layer.name=%s for each micro-batch are others from now on, because %s",
            path,
            now["layer.name"],
            " and ".join(changes),
        )


def _check_own(path: Path) -> None:
    """Check that a new run replaces only files of a run that has no checkpoint yet.

    Raises:
        ConfigError: if there are other files of these names.
    """
    with suppress(DamagedRecordError, ValidationError):
        RunManifest.read(path)
        return
    if all((path / name).is_file() for name in (CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE)):
        return  # of an older version
    names = (CONFIG_FILE, DATA_FILE, ENVIRONMENT_FILE, ORIGIN_FILE, MANIFEST_FILE, METRICS_FILE, *VOCABULARY_FILES)
    if found := [name for name in names if (path / name).exists()]:
        raise ConfigError(
            f"--run must be a new directory or one made by `train`, but {path} has {' and '.join(found[:3])} that "
            "`train` did not write; give another directory"
        )


def _changed(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the fixed settings that differ."""
    keys = sorted(before.keys() | now.keys())
    return [key for key in keys if f"{key}.".startswith(_FIXED) and before.get(key) != now.get(key)]
