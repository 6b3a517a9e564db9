"""Validation sets of a run: that of its training data, and those that have names."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.errors import ConfigError, DataError, shown
from deepspeed_nmt.evaluate.command_metrics import check_programs
from deepspeed_nmt.files import check_utf8_name
from deepspeed_nmt.parallel.agreement import fail_together
from deepspeed_nmt.parallel.collectives import from_main
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.validation import MAIN, ValidationConfig, check_set_name

SPLIT = "valid"


def given_sets(values: Sequence[str]) -> dict[str, str]:
    """Return the directories of validation sets by name, from NAME=DIR as ``train --valid`` takes it.

    Raises:
        ConfigError: if a value has another form, or a name is given twice.
    """
    sets: dict[str, str] = {}
    for value in values:
        name, _, directory = value.partition("=")
        if not name or not directory:
            raise ConfigError(
                f"--valid must be NAME=DIR, but is {shown(value)}; give a name and a directory made by `prepare`"
            )
        try:
            check_set_name(name)
        except ValueError as error:
            raise ConfigError(f"--valid {error}") from error
        if name in sets:
            raise ConfigError(f"--valid must have each name once, but has {name} twice; remove one")
        path = Path(directory).absolute()
        check_utf8_name(path, "--valid")
        sets[name] = str(path)
    return sets


def open_sets(config: ValidationConfig, data: DataDirectory) -> dict[str, DataDirectory]:
    """Open the data directories of all validation sets by name, first that of the training data.

    Args:
        config: settings of validation.
        data: data to train on.

    Raises:
        ConfigError: if a directory cannot be opened or has another vocabulary, all of them at once.
    """
    sets, problems = {MAIN: data}, []
    for name, directory in config.sets.items():
        try:
            sets[name] = DataDirectory.open(Path(directory))
        except DataError as error:
            problems.append(
                f"validation.sets.{name}: {error}; or give its place by --valid {name}=DIR, or leave it out by "
                f"validation.sets.{name}=null"
            )
            continue
        if sets[name].vocabulary != data.vocabulary:
            problems.append(
                f"validation.sets.{name} must have the vocabulary of {data.path}, but {directory} has another one; "
                f"prepare its text with --vocab-from {data.path}"
            )
    if problems:
        raise ConfigError(problems)
    return sets


def title(name: str) -> str:
    """Return the words for a validation set in messages."""
    return f"the validation set {name}" if name else "the validation set"


def digest(sets: Mapping[str, DataDirectory]) -> str:
    """Return a short hash of the names and the text of validation sets: scores of equal digests can be compared."""
    found = hashlib.sha256()
    for name, data in sorted(sets.items()):
        for file, record in sorted(data.meta.files.items()):
            if file.startswith(f"{SPLIT}."):
                found.update(f"{name} {file} {record.sha256}\n".encode())
    return found.hexdigest()[:8]


def check_sets_agree(sets: Mapping[str, DataDirectory], world: World) -> None:
    """Check that all ranks have the validation sets of rank 0, since each host may have files of its own.

    Args:
        sets: validation sets that this rank has opened, by name; the names are those of rank 0.
        world: the ranks, which call it together.

    Raises:
        DataError: if one differs.
    """
    own = {name: [digest({name: each}), each.text_form.form] for name, each in sets.items()}
    main = from_main(own, world)
    with fail_together(world):
        if differing := [name for name, value in own.items() if value != main.get(name)]:
            raise DataError(
                f"all ranks must have the same validation sets, but {title(differing[0])} in "
                f"{sets[differing[0]].path} is not that of rank 0 here; copy that to this host"
            )


def check_commands(config: ValidationConfig, timeout_s: float, world: World) -> None:
    """Check on rank 0, which calls them, that programs can be called, and that other ranks wait for them.

    Args:
        config: settings of validation.
        timeout_s: time limit of waiting for another rank.
        world: the ranks, which call it together.

    Raises:
        ConfigError: if a program cannot be called, or may take longer than other ranks wait.
    """
    with fail_together(world):
        if world.is_main:
            check_programs(list(config.commands.values()))
        direct = any(not metric.late for metric in config.commands.values())
        if direct and world.ranks > 1 and config.command_s >= timeout_s:
            raise ConfigError(
                f"validation.command_s must be below engine.timeout_s={timeout_s:g}, for which other ranks wait, but "
                f"is {config.command_s:g}; lower it, or raise engine.timeout_s"
            )
