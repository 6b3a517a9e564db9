"""A sweep: its points, the runs that trained them, their results, and the picture of them.

A run belongs to a point if the settings in which the sweep's points differ have that point's values. Its name does
not matter, and other settings may differ from the recipe, for example at a smaller scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_nmt.config import load_config
from deepspeed_nmt.console import cell, logger, setting
from deepspeed_nmt.errors import ConfigError, DataError, counted, shown
from deepspeed_nmt.evaluate.metrics import METRICS, decimals_of
from deepspeed_nmt.recipes import load_sweep
from deepspeed_nmt.reports.outcome import Outcome, differing
from deepspeed_nmt.reports.pictures import picture, plainly, use_log_scale
from deepspeed_nmt.reports.run_log import SOURCE_RELIANCE, TRAIN_PERPLEXITY, validation_metric
from deepspeed_nmt.run.directory import CONFIG_FILE

RECIPE = "recipe"
"""Name of the axis along which points have different recipes."""
_INCIDENTAL = (
    *("engine.", "collapse.", "validation.max_tokens", "batch.micro_tokens", "training.log_every", "training.probe"),
    *("training.validate_every", "training.save", "training.keep_", "validation.sets."),
    *("validation.command_s", "validation.keep_translations", "validation.late_keep"),
)
"""Settings that are not meant to change the result of a run."""
_WIDE = 20.0
"""Ratio of perplexities from which their axis is logarithmic."""
Scores = Mapping[Path, Mapping[str, float | None]]
"""Scores of each run, by its path and the metric."""


@dataclass(frozen=True)
class Point:
    """A point of a sweep, numbered from 1: the settings that the sweep lists, and all of its run's."""

    number: int
    recipe: str
    values: Mapping[str, Any]
    settings: Mapping[str, object]

    @property
    def name(self) -> str:
        """Words for the point."""
        return f"point {self.number} ({', '.join(f'{key}={setting(value)}' for key, value in self.values.items())})"

    def value(self, axis: str) -> Any:
        """Return the value of a setting; of a part of the objective True. None if the point leaves it out."""
        own = self.recipe if axis == RECIPE else self.values.get(axis, self.settings.get(axis))
        return own if own is not None else any(key.startswith(f"{axis}.") for key in self.settings) or None

    def differences(self, run: Outcome) -> dict[str, object]:
        """Return the settings of a run that are not those of the point."""
        settings = run.config.flat()
        return {key: settings.get(key) for key in sorted(differing([settings, self.settings]))}


class Sweep:
    """A sweep by its name; a ConfigError if there is none.

    ``axes`` are the settings that are swept independently of each other, at least one. The first has the most values.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.points: list[Point] = []
        for number, (recipe, settings) in enumerate(load_sweep(name), 1):
            values = {key: json.loads(value) for key, _, value in (text.partition("=") for text in settings)}
            self.points.append(Point(number, recipe, values, load_config(recipe, settings=settings).flat()))
        self.axes = _axes(self.points)
        identifying = {*differing([point.settings for point in self.points])}
        self._identifying = tuple(f"{key}." for key in identifying.union(*(point.values for point in self.points)))

    def runs_of(self, point: Point, runs: Sequence[Outcome]) -> list[Outcome]:
        """Return the runs that trained a point, the one with the fewest differences from its recipe first."""
        return sorted(
            (run for run in runs if not any(map(self._identifies, point.differences(run)))),
            key=lambda run: (len(self.differences(point, run)), run.path.name != str(point.number), run.path),
        )

    def differences(self, point: Point, run: Outcome) -> dict[str, object]:
        """Return the settings of a run that are not those of its point's recipe, without those of no effect."""
        return {
            key: value
            for key, value in point.differences(run).items()
            if not self._identifies(key) and not key.startswith(_INCIDENTAL)
        }

    def _identifies(self, key: str) -> bool:
        """Return True if points differ in a setting, or the sweep sets it."""
        return f"{key}.".startswith(self._identifying)


def _axes(points: Sequence[Point]) -> list[str]:
    """Return the settings that vary, without those that follow from the ones before them."""
    keys = list(dict.fromkeys([*(key for point in points for key in point.values), RECIPE]))
    column = {key: [setting(point.value(key)) for point in points] for key in keys}
    # Sorting is stable: of settings with equally many values the one that the sweep lists first comes first.
    varying = sorted((key for key in keys if len(set(column[key])) > 1), key=lambda key: -len(set(column[key])))
    axes: list[str] = []
    for key in varying:
        rows = [tuple(column[axis][row] for axis in [*axes, key]) for row in range(len(points))]
        if len(set(rows)) > len({row[:-1] for row in rows}):
            axes.append(key)
    return axes or keys[:1]


def choose_runs(sweep: Sweep, directory: Path) -> list[Outcome | None]:
    """Return the run of each point; None if there is none.

    Warnings count the points without a run, and name points with several, and runs that are unfinished or unreadable.

    Raises:
        DataError: if there is no such directory, or it has no run of any point.
    """
    if not directory.is_dir():
        raise DataError(f"there is no directory {directory}; --runs is the directory of run directories")
    runs = []
    for file in sorted(directory.glob(f"*/{CONFIG_FILE}")):
        try:
            runs.append(Outcome.read(file.parent))
        except ConfigError as error:
            text = "%s is left out, because its settings cannot be read: %s"
            logger.warning(text, file.parent, error.problems[0])
    members = [sweep.runs_of(point, runs) for point in sweep.points]
    if not any(members):
        raise DataError(
            f"none of the {counted(len(runs), 'runs')} in {directory} has the settings of a point of {sweep.name}; "
            f"`plan --sweep {sweep.name}` lists them"
        )
    if missing := [point for point, of_point in zip(sweep.points, members, strict=True) if not of_point]:
        command = f"train $(deepspeed-nmt plan --sweep {sweep.name} --point {missing[0].number})"
        text = f"{len(missing)} of {len(members)} points have no run in {directory}; the first is {missing[0].name}"
        logger.warning("%s: `%s`", text, command)
    for point, of_point in zip(sweep.points, members, strict=True):
        if of_point and not of_point[0].is_finished:
            logger.warning("%s: %s is not finished: %s", point.name, of_point[0].path, of_point[0].status)
        if others := ", ".join(run.path.name for run in of_point[1:]):
            logger.warning("%s has several runs: %s is taken, not %s", point.name, of_point[0].path, others)
    return [of_point[0] if of_point else None for of_point in members]


def warn_of_differences(sweep: Sweep, chosen: Sequence[Outcome | None]) -> None:
    """Log in what the runs of the points differ from the recipe, and warn if they do not differ from it alike."""
    trained = [(point, run) for point, run in zip(sweep.points, chosen, strict=True) if run is not None]
    differences = [sweep.differences(point, run) for point, run in trained]
    keys = sorted({key for of_run in differences for key in of_run})
    common = [
        key for key in keys if all(key in of_run and of_run[key] == differences[0][key] for of_run in differences)
    ]
    if common:
        values = " ".join(f"{key}={setting(differences[0][key])}" for key in common)
        logger.info("all runs differ from the recipe of %s in %s", sweep.name, values)
    others = [key for key in keys if key not in common]
    data = [run.data_record for _, run in trained if run.data_record is not None]
    parts = [[(part.fingerprint, part.weights, part.tag) for part in record.corpora] for record in data]
    if len({(record.fingerprint, *part) for record, part in zip(data, parts, strict=True)}) > 1:
        others.append("the data")
    if others:
        text = "the runs of %s also differ in %s, and not only in the settings swept; compare them with `report runs`"
        logger.warning(text, sweep.name, ", ".join(others))


def validation_scores(runs: Sequence[Outcome], metric: str | None) -> tuple[str, Scores]:
    """Return a measure of validation, or else the first that any run has logged, and the best score of each run.

    A name that is no measure is a ConfigError.
    """
    if metric is None:
        metric = validation_metric(run.log for run in runs).name
    else:
        known = ("loss", *METRICS, *dict.fromkeys(name for run in runs for name in run.config.validation.commands))
        if metric.rpartition("/")[2] not in known or metric.count("/") > 1:
            raise ConfigError(f"--metric {shown(metric)} is none of {', '.join(known)}, or SET/ and one of them")
    best = {run.path: run.best(metric) for run in runs}
    if without := [path.name for path, value in best.items() if value is None]:
        logger.warning("no validation %s is logged by %s", metric, ", ".join(without))
    return metric, {path: {metric: value and value[1]} for path, value in best.items()}


def sweep_rows(
    sweep: Sweep, runs: Sequence[Outcome | None], metrics: Sequence[str], scores: Scores
) -> list[dict[str, Any]]:
    """Return what is known of each point, for JSON; its score is that of the first metric."""
    rows = []
    for point, run in zip(sweep.points, runs, strict=True):
        row: dict[str, Any] = {"point": point.number, "recipe": point.recipe, "settings": point.values}
        if run is None:
            rows.append({**row, "status": "missing"})
            continue
        of_run = scores.get(run.path, {})
        row |= {"status": run.status, "run": str(run.path), "updates": run.updates}
        row |= {"train_ppl": run.log.last(TRAIN_PERPLEXITY), "metric": metrics[0], "score": of_run.get(metrics[0])}
        row |= {"scores": {metric: of_run.get(metric) for metric in metrics}}
        rows.append({**row, "source_reliance": run.log.last(SOURCE_RELIANCE), "hours": run.hours})
    return rows


def sweep_table(sweep: Sweep, rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> list[list[str]]:
    """Return the cells of a sweep's table, a line for each point, with a title for each metric."""
    lines = [["point", *sweep.axes, "train ppl", *titles.values(), "source reliance", "hours", "run"]]
    for point, row in zip(sweep.points, rows, strict=True):
        values = [setting(point.value(axis)) for axis in sweep.axes]
        scores = [cell(row.get("scores", {}).get(metric), decimals_of(metric)) for metric in titles]
        others = [cell(row.get("source_reliance"), 3), cell(row.get("hours"), 2)]
        lines.append([str(point.number), *values, cell(row.get("train_ppl"), 3), *scores, *others, row["status"]])
    return lines


def draw_sweep(sweep: Sweep, rows: Sequence[Mapping[str, Any]], score: str, out: Path) -> None:
    """Draw a panel for each result, with a line for each value of the settings swept besides the first.

    Points of unfinished runs are hollow. ``score`` is the title of the score.
    """
    panels = {"train_ppl": "final training perplexity", "score": score, "source_reliance": "source reliance (nats)"}
    first, *others = sweep.axes
    are_numbers = all(type(point.value(first)) in (int, float) for point in sweep.points)
    lines: dict[str, list[tuple[Any, Mapping[str, Any]]]] = {}
    for point, row in zip(sweep.points, rows, strict=True):
        label = ", ".join(f"{axis}={setting(point.value(axis))}" for axis in others)
        value = point.value(first) if are_numbers else setting(point.value(first))  # words stand side by side
        lines.setdefault(label, []).append((value, row))
    with picture(out, 4.5 * len(panels), 3.8) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (result, title) in zip(axes, panels.items(), strict=True):
            for label, members in lines.items():
                points = sorted(members, key=lambda member: member[0]) if are_numbers else members
                ys = [math.nan if row.get(result) is None else row[result] for _, row in points]
                (drawn,) = axis.plot([x for x, _ in points], ys, marker="o", label=plainly(label))
                for (x, row), y in zip(points, ys, strict=True):
                    if row["status"] != "finished":
                        axis.plot(x, y, marker="o", color=drawn.get_color(), markerfacecolor="white")
            if are_numbers:
                axis.set_xticks(sorted({point.value(first) for point in sweep.points}))
            axis.set(title=title, xlabel=first)
            axis.grid(alpha=0.3)
        known = [row["train_ppl"] for row in rows if (row.get("train_ppl") or 0.0) > 0.0]
        if known and max(known) > _WIDE * min(known):
            use_log_scale(axes[0])
        if others:
            axes[0].legend(fontsize="small")
