"""Points of a sweep, and the runs that trained them.

A run belongs to a point if the settings in which the sweep's points differ have that point's values. Its name does
not matter, and other settings may differ from the recipe, for example at a smaller scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_nmt.config import load_config
from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.evaluate.table import setting
from deepspeed_nmt.recipes import load_sweep
from deepspeed_nmt.run.manifest import CONFIG_FILE
from deepspeed_nmt.run.outcome import Outcome

RECIPE = "recipe"
"""Name of the axis along which points have different recipes."""
_INCIDENTAL = (
    *("engine.", "collapse.", "validation.max_tokens", "batch.micro_tokens", "training.log_every", "training.probe"),
    *("training.validate_every", "training.save", "training.keep_", "validation.sets."),
    *("validation.command_s", "validation.keep_translations", "validation.late_keep"),
)
"""Settings that are not meant to change the result of a run."""


@dataclass(frozen=True)
class Point:
    """A point of a sweep.

    Attributes:
        number: from 1.
        recipe: recipe that the point sets out from.
        values: settings of the point as the sweep lists them.
        settings: all settings.
    """

    number: int
    recipe: str
    values: Mapping[str, Any]
    settings: Mapping[str, object]

    @property
    def name(self) -> str:
        """Words for the point."""
        return f"point {self.number} ({', '.join(f'{key}={setting(each)}' for key, each in self.values.items())})"

    def value(self, axis: str) -> Any:
        """Return the value of a setting; None if the point leaves it out."""
        return self.recipe if axis == RECIPE else self.values.get(axis, self.settings.get(axis))


class Sweep:
    """A sweep.

    Args:
        name: of the sweep.

    Attributes:
        points: its points.
        axes: settings that are swept independently of each other, at least one. The first has the most values.

    Raises:
        ConfigError: if there is no such sweep.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.points = [
            Point(number, recipe, _values(settings), load_config(recipe, settings=settings).flat())
            for number, (recipe, settings) in enumerate(load_sweep(name), 1)
        ]
        self.axes = _axes(self.points)
        keys = {key for point in self.points for key in point.settings}
        differing = {key for key in keys if len({setting(point.settings.get(key)) for point in self.points}) > 1}
        self._identifying = tuple(f"{key}." for key in differing.union(*(point.values for point in self.points)))

    def runs_of(self, point: Point, runs: Sequence[Outcome]) -> list[Outcome]:
        """Return the runs that trained a point, the one with the fewest differences from its recipe first."""
        found = [run for run in runs if not any(map(self._identifies, _differing(point, run)))]
        return sorted(
            found, key=lambda run: (len(self.differences(point, run)), run.path.name != str(point.number), run.path)
        )

    def differences(self, point: Point, run: Outcome) -> dict[str, object]:
        """Return the settings of a run that are not those of its point's recipe, without those of no effect."""
        return {
            key: value
            for key, value in _differing(point, run).items()
            if not self._identifies(key) and not key.startswith(_INCIDENTAL)
        }

    def _identifies(self, key: str) -> bool:
        """Return True if points differ in a setting, or the sweep sets it."""
        return f"{key}.".startswith(self._identifying)


def _values(settings: Sequence[str]) -> dict[str, Any]:
    pairs = (each.partition("=") for each in settings)
    return {key: json.loads(value) for key, _, value in pairs}


def _differing(point: Point, run: Outcome) -> dict[str, object]:
    """Return the settings of a run that are not those of a point."""
    settings = run.config.flat()
    keys = sorted(settings.keys() | point.settings.keys())
    return {key: settings.get(key) for key in keys if settings.get(key) != point.settings.get(key)}


def _axes(points: Sequence[Point]) -> list[str]:
    """Return the settings that vary, without those that follow from the ones before them."""
    keys = list(dict.fromkeys([*(key for point in points for key in point.values), RECIPE]))
    column = {key: [setting(point.value(key)) for point in points] for key in keys}
    # Sorting is stable: of settings with equally many values the one that the sweep lists first comes first.
    varying = sorted((key for key in keys if len(set(column[key])) > 1), key=lambda key: -len(set(column[key])))
    axes: list[str] = []
    for key in varying:
        known = {tuple(column[axis][row] for axis in axes) for row in range(len(points))}
        both = {tuple(column[axis][row] for axis in [*axes, key]) for row in range(len(points))}
        if len(both) > len(known):
            axes.append(key)
    return axes or keys[:1]


def read_runs(directory: Path) -> list[Outcome]:
    """Read the runs in a directory; a run whose settings cannot be read is left out with a warning.

    Raises:
        DataError: if there is no such directory.
    """
    if not directory.is_dir():
        raise DataError(f"--runs must be a directory of run directories, but there is no directory {directory}")
    runs = []
    for path in sorted(directory.iterdir()):
        if (path / CONFIG_FILE).is_file():
            try:
                runs.append(Outcome.read(path))
            except ConfigError as error:
                first, *others = error.problems
                more = f" ({len(others)} more)" if others else ""
                logger.warning("%s is left out, because its settings cannot be read: %s%s", path, first, more)
    return runs


def choose_runs(sweep: Sweep, directory: Path) -> list[Outcome | None]:
    """Return the run of each point; None if there is none.

    Warnings count the points without a run, and name the points with several and the runs that are not finished.

    Raises:
        DataError: if the directory has no run of any point.
    """
    runs = read_runs(directory)
    found = [sweep.runs_of(point, runs) for point in sweep.points]
    if not any(found):
        count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
        raise DataError(
            f"--runs must hold runs of the sweep {sweep.name}, but of the {count} in {directory} none has the "
            f"settings of a point; `plan --sweep {sweep.name}` lists them"
        )
    if missing := [point for point, each in zip(sweep.points, found, strict=True) if not each]:
        logger.warning(
            "%d of %d points have no run in %s; the first is %s: `%s`",
            len(missing),
            len(found),
            directory,
            missing[0].name,
            f"train $(deepspeed-nmt plan --sweep {sweep.name} --point {missing[0].number})",
        )
    for point, each in zip(sweep.points, found, strict=True):
        if each and not each[0].is_finished:
            logger.warning("%s: %s is not finished: %s", point.name, each[0].path, each[0].status)
        if others := ", ".join(run.path.name for run in each[1:]):
            logger.warning("%s has several runs: %s is taken, not %s", point.name, each[0].path, others)
    return [each[0] if each else None for each in found]


def warn_of_differences(sweep: Sweep, chosen: Sequence[Outcome | None]) -> None:
    """Log in what the runs differ from the sweep's recipe, and warn if they do not differ from it alike.

    Args:
        sweep: the sweep.
        chosen: run of each point; None if there is none.
    """
    trained = [(point, run) for point, run in zip(sweep.points, chosen, strict=True) if run is not None]
    differences = [sweep.differences(point, run) for point, run in trained]
    keys = sorted({key for each in differences for key in each})
    common = [key for key in keys if all(key in each and each[key] == differences[0][key] for each in differences)]
    if common:
        values = " ".join(f"{key}={setting(differences[0][key])}" for key in common)
        logger.info("all runs differ from the recipe of %s in %s", sweep.name, values)
    others = [key for key in keys if key not in common]
    if len({run.data_fingerprint for _, run in trained} - {None}) > 1:
        others.append("the data")
    if others:
        logger.warning(
            "the runs of %s must differ only in the settings swept, but also differ in %s; compare them with "
            "`report runs`",
            sweep.name,
            ", ".join(others),
        )
