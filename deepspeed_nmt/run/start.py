"""Start of a run: lock, environment, files of the directory, and a warm start from the weights of another run."""

from __future__ import annotations

import hmac
import itertools
import json
import os
import platform
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from deepspeed_nmt import __version__
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import LikelihoodConfig
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.training import DataOption, TrainingData, is_mixture
from deepspeed_nmt.errors import CheckpointError, ConfigError, DataError, counted
from deepspeed_nmt.files import (
    atomic_write_text,
    atomic_writer,
    exclusive,
    made,
    read_regular,
    remove_orphans,
    resolved,
)
from deepspeed_nmt.manifest import HASH_SUFFIX, MANIFEST_FILE, DamagedRecordError
from deepspeed_nmt.methods import LIKELIHOODS, MODELS
from deepspeed_nmt.registry import Config
from deepspeed_nmt.run.directory import (
    CHECKPOINTS,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    LOCK_FILE,
    ORIGIN_FILE,
    SCORES_FILE,
    DataRecord,
    Run,
    RunManifest,
    changed_fixed_settings,
    check_contents,
    recorded_config,
    replace_files,
    verify_run,
)
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore
from deepspeed_nmt.train.events import EVENTS_FILE, read_lines
from deepspeed_nmt.train.growth import SIDES
from deepspeed_nmt.train.log import METRICS_FILE
from deepspeed_nmt.train.progress import Count

_LEARNING = ("optimizer.", "schedule.")
"""Settings whose change in a resumed run is logged, because a recipe may have changed them."""


def has_begun(path: Path) -> bool:
    """Return True if a run has a checkpoint. Until then, all its settings can change."""
    return bool(CheckpointStore(path / CHECKPOINTS).names())


def is_of_this_job(path: Path) -> bool:
    """Return True if it was this job of SLURM that last began or resumed a run."""
    entry = f'"SLURM_JOB_ID": {json.dumps(os.environ.get("SLURM_JOB_ID"))}'
    with suppress(OSError):
        return entry.encode() in read_regular(path / ENVIRONMENT_FILE)
    return False


def begin(path: Path, config: RunConfig, data: TrainingData, *, restart: bool = False) -> str:
    """Write the files of a new run, or check that a resumed one has the same fixed settings and the same data.

    With ``restart`` a run begins anew; what is in the directory is moved into a new one beside it. Return a line for
    the log about the environment.
    """
    if restart:
        _set_aside(path)
    files = {CONFIG_FILE: config.to_yaml().encode(), DATA_FILE: DataRecord.of(data).model_dump_json().encode()}
    if has_begun(path):
        verify_run(path)
        _check_same(path, config, data)
    else:
        path.mkdir(parents=True, exist_ok=True)
        _check_own(path)
        check_contents(path)
        # A run that goes on may end, and decay, before it grows; one that begins so is a mistake.
        if config.growth.at and config.growth.at[-1] >= config.training.max_updates:
            raise ConfigError(
                f"growth.at has {config.growth.at[-1]}, but training.max_updates is {config.training.max_updates}; "
                "raise that, or leave the growth out"
            )
        # A run that was killed before its first checkpoint starts again. Of one that has lost its history, the
        # metrics decide.
        events = list(read_lines(path / EVENTS_FILE))
        saved = [line.update for line in events if line.event in ("saved", "resume", "rollback", "stop", "end")]
        if update := max(saved if events else (line.update for line in read_lines(path / METRICS_FILE)), default=0):
            raise CheckpointError(
                f"{path} was trained to update {update} or further, but its checkpoints are gone; bring "
                f"{path / CHECKPOINTS} back, or give --restart, which sets aside what is left and begins anew"
            )
        if (path / METRICS_FILE).exists():
            logger.warning("%s has no checkpoint: training starts from the beginning, and its metrics with it", path)
        for name in (ORIGIN_FILE, SCORES_FILE):
            (path / name).unlink(missing_ok=True)
        files |= {name: read_regular(data.main.path / name) for name in data.main.vocabulary}
    for directory in (path, path / CHECKPOINTS, *(path / CHECKPOINTS).glob("update-*/")):
        remove_orphans(directory)
    replace_files(path, files, seal_of(commands_of(config)), config.plugins, keep=has_begun(path))
    values = environment()
    atomic_write_text(path / ENVIRONMENT_FILE, json.dumps(values, indent=1))
    ours = f"deepspeed_nmt {__version__} (git {values['git'] or 'unknown'})"
    job = f", job {values['slurm']['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in values["slurm"] else ""
    plugins = "".join(f", {name} {digest}" for name, digest in config.plugins.items())
    return f"{ours}{plugins}, torch {values['packages']['torch']} on {platform.node()}{job}"


def recorded_data(path: Path) -> TrainingData:
    """Open the data directories that a run was last trained on."""
    record = DataRecord.read(path)
    options = [corpus.option for corpus in record.corpora] or [DataOption(Path(record.path))]
    for option in options:
        if not option.path.is_dir():
            raise DataError(
                f"--data is not given, so it is that of {path}, but there is no directory {option.path}; give the "
                "place of its data by --data"
            )
    return TrainingData(options)


def _check_same(path: Path, config: RunConfig, data: TrainingData) -> None:
    recorded = DataRecord.read(path)
    if recorded.fingerprint != data.main.fingerprint:
        raise DataError(
            f"{data.main.path} is not, or no longer, the data that {path} began with, {recorded.path}, which has its "
            "vocabulary and validation set; restore it and give it as the first --data, or start a new run"
        )
    before_at = {corpus.path: corpus.fingerprint for corpus in recorded.corpora}
    for part in data.parts:
        where = str(part.directory.path.resolve())
        if before_at.get(where, part.directory.fingerprint) != part.directory.fingerprint:
            raise DataError(
                f"{where} has changed since {path} was trained on it; restore it, or give the new data another "
                "directory"
            )
    before = recorded_config(path).flat()
    now = config.flat()
    if not (data.is_mixture or is_mixture(recorded.corpora)):  # of a mixture, another tag begins a phase
        tags = data.parts[0].tag, next((corpus.tag for corpus in recorded.corpora), None)
        told = [_told(tag, of["mixture.tag"]) for tag, of in zip(tags, (now, before), strict=True)]
        if told[0] != told[1]:
            raise ConfigError(
                f"{data} has {told[0]}, but {path} was trained with {told[1]}; give the same, or start a new run"
            )
    if problems := [
        f"{key} is {now.get(key, 'unset')}, but {path} has a checkpoint and stays at {before.get(key, 'unset')}; "
        "leave out --recipe, --config and this setting to keep the run's own, or start a new run"
        for key in changed_fixed_settings(before, now)
    ]:
        raise ConfigError(problems)
    if changes := [
        f"{key} was {before.get(key, 'unset')} and is {now[key]}"
        for key in sorted(now)
        if before.get(key) != now[key]
        and (key.startswith(_LEARNING) or (key == "training.max_updates" and config.schedule.needs_end))
    ]:
        logger.warning("%s continues with other settings: %s", path, ", ".join(changes))


def _told(tag: str | None, side: object) -> str:
    return "no tag" if tag is None else f"the tag {tag} in front of {side}s"


def _check_own(path: Path) -> None:
    """Check that a directory that is no run with a checkpoint has nothing in it that `train` did not write.

    Logs of batch jobs may be there, and the hash of a manifest, which is written before it.
    """
    with suppress(DamagedRecordError, ValidationError):
        if CONFIG_FILE in RunManifest.read(path).files:
            return
    others = [
        file.name
        for file in path.iterdir()
        if not file.name.startswith(".")
        and file.name != MANIFEST_FILE + HASH_SUFFIX
        and not (file.suffix in (".log", ".out", ".err") and file.is_file())
        and not (file.is_dir() and not any(file.iterdir()))
    ]
    if others:
        shown = " and ".join(sorted(others)[:3])
        raise ConfigError(f"{path} has {shown}, which `train` did not write; give --run a new directory")


def _set_aside(path: Path) -> None:
    """Move what is in a run directory into a new one beside it, checkpoints first."""
    _check_own(path)
    files = sorted(path.iterdir(), key=lambda file: file.name != CHECKPOINTS)
    if not any(file.name != LOCK_FILE for file in files):
        return
    here = resolved(path)
    beside = (here.with_name(f"{here.name}.before-{number}") for number in itertools.count(1))
    aside = next(place for place in beside if not place.exists())
    try:
        aside.mkdir()
        for file in files:
            if file.name != LOCK_FILE:
                file.rename(aside / file.name)
    except OSError as error:
        raise ConfigError(f"{path} cannot be set aside as {aside} ({error.strerror}); give another --run") from error
    logger.warning("%s begins anew; what was in it is in %s", path, aside)


def commands_of(config: RunConfig) -> list[str]:
    """Return the settings by which training starts programs, as they are given on the command line."""
    notify = config.training.notify
    metrics = map(str, config.validation.commands.values())
    return [f"training.notify={notify}"] * bool(notify) + [f"validation.metrics=[{metric}]" for metric in metrics]


def seal_of(commands: Sequence[str]) -> str:
    """Return the seal of commands, which nobody makes who cannot read this user's home; "" without commands.

    The secret is a file in the home directory that only this user can read. Owners of files and names of users would
    not do: whoever makes a run for others can write any of them into it.
    """
    if not commands:
        return ""
    try:
        file = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "deepspeed_nmt" / "key"
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_writer(file) as stream:
                os.fchmod(stream.fileno(), 0o600)
                stream.write(secrets.token_hex(32).encode())
        status = file.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            return ""
        return hmac.new(file.read_bytes(), json.dumps(commands).encode(), "sha256").hexdigest()
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return ""


def check_trusted(path: Path, config: RunConfig, given: Sequence[Mapping[str, Any]]) -> None:
    """Check that this user gave the commands of a run: ``given`` by section now, or when it was last started."""
    recorded = commands_of(recorded_config(path))
    own = {f"{section}.{key}" for content in given for section, keys in content.items() for key in keys or ()}
    foreign = [name for name in commands_of(config) if name in recorded and name.partition("=")[0] not in own]
    if not foreign:
        return
    seal = recorded_seal = ""
    with suppress(DamagedRecordError, ValidationError):
        seal, recorded_seal = seal_of(recorded), RunManifest.read(path).seal
    if not (seal and hmac.compare_digest(seal, recorded_seal)):
        raise ConfigError(
            f"{path} starts programs that another user, or this one with another home, has recorded: "
            f"{' and '.join(foreign)}; read them, then give --trust-run, or settings of your own"
        )


@contextmanager
def run_lock(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Lock a run directory against a second training during the block.

    It waits ``patience_s`` seconds for another holder: a network file system may release a lost host's lock late.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; give --run another name")
    refusal = (
        f"{{holder}} is training in {path}; wait for it, or stop it (`kill -USR1` to that process lets all its ranks "
        "save and stop)"
    )
    with made(path), exclusive(path / LOCK_FILE, refusal, patience_s) as locked:
        if not locked:
            logger.warning("%s cannot be locked; do not start the same run twice", path)
        yield


_SLURM = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_RESTART_COUNT")
_PACKAGES = (
    *("torch", "deepspeed", "numpy", "sentencepiece", "sacrebleu", "safetensors", "pydantic"),
    *("sacremoses", "transformers", "tokenizers"),
)


def environment() -> dict[str, Any]:
    """Return the environment of this process, as values for JSON."""
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    git: str | None = None
    words, here = ["git", "describe", "--always", "--dirty"], Path(__file__).parent
    # An installed package may lie in a repository of something else, as a virtual environment does.
    variables = {**os.environ, "GIT_CEILING_DIRECTORIES": str(here.parents[2])}
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, cwd=here, env=variables, capture_output=True, text=True, timeout=5, check=True)
        git = done.stdout.strip()
    return {
        "deepspeed_nmt": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "threads": torch.get_num_threads(),
        "git": git,
        "command": sys.argv,
        "slurm": {name: value for name, value in os.environ.items() if name in _SLURM},
    }


_NUMBERED = re.compile(r"((?:encoder|decoder)\.[a-z_.]+\.)\d+\.")
_OPTIONS = {False: "--init-from", True: "--grow-from"}


@dataclass(frozen=True)
class Origin:
    """Run and checkpoint of a warm start, which with ``grow`` become the frozen bottom of the new run's model."""

    run: Path
    checkpoint: str
    grow: bool

    @property
    def option(self) -> str:
        """Option by which the user named it."""
        return _OPTIONS[self.grow]


class OriginRecord(Config):
    """The content of ORIGIN_FILE: a checkpoint, ``which`` as the user named it, of another run.

    ``frozen`` is `Origin.grow`; ``differences`` are phrases for what computes differently with the weights here.
    """

    run: str
    which: str
    checkpoint: str
    update: Count
    frozen: bool
    differences: tuple[str, ...] = ()

    def write(self, run: Path) -> None:
        """Write ORIGIN_FILE, and warn if the weights fit but were trained in a different network."""
        if self.differences:
            logger.warning(
                "--init-from %s: %s; the weights fit, but were trained in a different network",
                self.run,
                " and ".join(self.differences),
            )
        atomic_write_text(run / ORIGIN_FILE, self.model_dump_json(indent=1))


def load_first_weights(
    model: TranslationModel, config: RunConfig, origin: Origin | None, data: DataDirectory
) -> OriginRecord | None:
    """Give a new run's model the weights of its origin, if it has one, or pretrained ones.

    With ``origin.grow`` they become the model's frozen bottom (depth growing). Otherwise they are the model's own,
    and layers above those of the other run keep their initial weights (direct stacking), or begin as the copies that
    the model's settings say. Vocabularies, shapes, or computations with the weights that differ are a ConfigError.
    """
    if origin is None:
        if not model.load_pretrained() and not all(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "this model has frozen parts, which need trained weights; give their run with --grow-from RUN, or "
                "with --init-from RUN if exits are added"
            )
        return None
    source = Run.open(origin.run, origin.option)
    if source.tokenizer.digest != data.tokenizer().digest:
        raise ConfigError(
            f"{origin.option}: {origin.run} has another vocabulary than {data.path}; prepare the data with "
            f"--vocab-from {origin.run}"
        )
    checkpoint = source.checkpoint(origin.checkpoint, "--from-checkpoint")
    source = replace(source, config=source.config.for_update(checkpoint.progress.update))
    differences: list[str] = []
    prefix = ""
    if origin.grow:
        if config.model.grown_prefix is None:
            growing = [
                f"model.name={entry.name}" for entry in MODELS.values() if getattr(entry.config, "grown_prefix", None)
            ]
            raise ConfigError(
                f"--grow-from needs a model that grows on top of another, but model.name={config.model.name} does "
                f"not; use {' or '.join(growing)}"
            )
        prefix = config.model.grown_prefix
        config.model.check_bottom(source.config.parts, str(source.path))
    else:
        config.model.check_shape_of(source.config.model, str(source.path))
        differences = config.model.composition_differences(source.config.model)
    _copy(model, checkpoint, source, prefix, config)
    return OriginRecord(
        run=str(origin.run.resolve()),
        which=origin.checkpoint,
        checkpoint=str(checkpoint.path.resolve()),
        update=checkpoint.progress.update,
        frozen=origin.grow,
        differences=tuple(differences),
    )


def exits_settings(run: Path, which: str, exits: str) -> list[str]:
    """Return settings, as on the command line, that add exits to a checkpoint of a run; no programs are started.

    Its model has the layers that the checkpoint has, and does not grow any more. Labels are smoothed as in the run.
    """
    own = next(entry.name for entry in LIKELIHOODS.values() if getattr(entry.config, "adds_exits", False))
    config, depths = recorded_config(run), []
    if config.growth.at:
        update = Run.open(run).checkpoint(which, "--from-checkpoint").progress.update
        model = config.for_update(update).model
        depths = [f"model.{side}={getattr(model, side)}" for side in SIDES]
        depths.append("growth={at: [], encoder_layers: [], decoder_layers: []}")
    others = [f"objective.{name}=null" for name in config.objective if name != own]
    others += [
        f"objective.{own}.smoothing={part.smoothing}"
        for part in config.objective.values()
        if hasattr(part, "smoothing")
    ]
    # What is translated at full depth does not change, so the loss of the exits chooses the best checkpoint.
    validation = ["validation.metrics=[]", "validation.best_by=loss", "validation.significant=0", "training.notify="]
    return [*depths, *others, f"objective.{own}.exits=[{exits}]", *validation]


def check_origin(run: Path, origin: Origin) -> None:
    """Check that a resumed run had the same warm start."""
    file = run / ORIGIN_FILE
    remedy = f"leave {origin.option} out to resume, or start a new run with another --run directory"
    if not file.exists():
        raise ConfigError(f"{origin.option} applies to the start of a run, but {run} has begun without it; {remedy}")
    try:
        record = OriginRecord.model_validate_json(read_regular(file))
    except (OSError, ValidationError) as error:
        raise DataError(
            f"{file} is not what `train` wrote when the run began; restore it from a copy, or leave out --init-from "
            "and --grow-from to resume the run"
        ) from error
    same_run = _same_path(origin.run, record.run) and origin.grow == record.frozen
    same_checkpoint = origin.checkpoint == record.which or _same_path(Path(origin.checkpoint), record.checkpoint)
    if not (same_run and same_checkpoint):
        began = f"{_OPTIONS[record.frozen]} {record.run} --from-checkpoint {record.which}"
        raise ConfigError(
            f"{run} began with {began}, but now {origin.option} is {origin.run} and --from-checkpoint "
            f"{origin.checkpoint}; {remedy}"
        )


def _copy(model: TranslationModel, checkpoint: Checkpoint, source: Run, prefix: str, config: RunConfig) -> None:
    """Copy a checkpoint's weights into a model, or into the part of it that has a prefix."""
    grow = bool(prefix)
    own = dict(model.named_parameters())
    weights = {prefix + name: weight for name, weight in checkpoint.weights().items()}
    expected = {name for name in own if name.startswith(prefix)}
    likelihoods = [part for part in config.objective.values() if isinstance(part, LikelihoodConfig)]
    lacking = expected - set(weights)
    begins = {
        name: origin
        for name in lacking
        for origin in (config.model.begins_as(name, source.config.model), *(of.begins_as(name) for of in likelihoods))
        if origin is not None
    }
    missing = {name for name in lacking - set(begins) if grow or not _above(name, weights)}
    differences = [
        *(f"{name} is {list(weights[name].shape)} instead of {list(own[name].shape)}"
          for name in sorted(expected & set(weights)) if weights[name].shape != own[name].shape),
        *(f"{name.removeprefix(prefix)} is unexpected" for name in sorted(set(weights) - expected)),
        *(f"{name.removeprefix(prefix)} is missing" for name in sorted(missing)),
    ]  # fmt: skip
    if differences:
        there, here = source.config.model.name, config.model.name
        names = "" if grow or there == here else f"model.name is {there} there and {here} here; "
        raise ConfigError(
            f"the {'bottom' if grow else 'model'} has another shape than {source.path}: {names}"
            f"{differences[0].removeprefix(prefix)} (one of {len(differences)} differences); make the model.* and "
            f"layer.* settings those of {source.path / 'config.yaml'}"
        )
    weights |= {name: weights[origin] for name, origin in begins.items() if origin in weights}
    fresh = sorted(name for name in expected - set(weights) if not own[name].requires_grad)
    if fresh and not grow:
        raise ConfigError(
            f"{source.path} lacks {fresh[0]}, which is frozen here; use BERTs of its depth, or start without "
            "--init-from"
        )
    if lacking:
        count = sum(own[name].numel() for name in lacking)
        logger.info("%s are new: %s lacks them", counted(count, "parameters"), source.path)
    with torch.no_grad():
        for name in expected & set(weights):
            own[name].copy_(weights[name])


def _same_path(path: Path, recorded: str) -> bool:
    return str(path) == recorded or resolved(path) == resolved(Path(recorded))


def _above(name: str, weights: dict[str, Tensor]) -> bool:
    """Return True if a parameter belongs to a layer above all those of the other run, or to such another part."""
    part = _NUMBERED.match(name)
    if part is None or any(other.startswith(part[0]) for other in weights):
        return False
    return any(other.startswith(part[1]) for other in weights)
