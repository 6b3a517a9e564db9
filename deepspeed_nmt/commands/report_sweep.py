"""Compare the runs of a sweep: final training perplexity, score, source reliance and hours of each point.

    deepspeed-nmt report sweep deep_decoder_fig1 --runs runs/fig1 --data DATA

The runs are the directories in --runs; launch/sweep.sbatch trains point I of a sweep in the directory I. A run
belongs to a point if it has the settings that the sweep varies, whatever its name. With --data, or --input and
--reference, each run translates the test set by its own search, and its scores are recorded in the run, so that it is
translated once; otherwise the score is the best of validation, by --metric or the first metric that any run has
logged. Runs without it and unfinished runs are named, and points without a run are counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.report_options import add_decoding, add_picture, check_decoding, read_text

if TYPE_CHECKING:
    from deepspeed_nmt.run.outcome import Outcome
    from deepspeed_nmt.run.parallel_text import ParallelText
    from deepspeed_nmt.run.sweep import Point, Sweep

_Scores = Mapping[Path, Mapping[str, float | None]]
"""Scores of each run, by its path and the metric."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("sweep", metavar="SWEEP", help="name of the sweep")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="directory of the run directories")
    add_decoding(parser)
    parser.add_argument(
        "--metric",
        metavar="M",
        help="measure of validation that is the score: a metric or loss, of a named set as SET/METRIC, of the mean "
        "as mean/METRIC (default: the first metric that any run has logged)",
    )
    add_picture(parser, "sweep.png")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each point, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Score the runs, draw the picture, and print the table.

    Raises:
        ConfigError: if the sweep is unknown, or an option is out of range.
        DataError: if there is no run of the sweep, or no test set where one is named.
    """
    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.evaluate.table import json_line, text_table
    from deepspeed_nmt.run.sweep import Sweep, choose_runs, warn_of_differences

    check_decoding(arguments)
    check_picture(arguments.out)
    sweep = Sweep(arguments.sweep)
    text = read_text(arguments)
    runs = choose_runs(sweep, arguments.runs)
    trained = [run for run in runs if run is not None]
    _check_metric(arguments.metric, text, trained)
    warn_of_differences(sweep, runs)
    if text is None:
        metrics, scores = _validation_scores(trained, arguments.metric)
    else:
        metrics, scores = _test_scores(trained, text, arguments)
    rows = [_row(point, run, metrics, scores) for point, run in zip(sweep.points, runs, strict=True)]
    titles = {metric: f"{'validation' if text is None else 'test'} {metric}" for metric in metrics}
    _draw(sweep, rows, titles[metrics[0]], arguments.out)
    output("\n".join(map(json_line, rows)) if arguments.json else text_table(_table(sweep, rows, titles)))
    logger.info("picture: %s", arguments.out)
    return 0


def _check_metric(metric: str | None, text: ParallelText | None, runs: Sequence[Outcome]) -> None:
    """Check the measure of validation that is asked for.

    Raises:
        ConfigError: if it is none, or the test set decides.
    """
    from deepspeed_nmt.errors import ConfigError, shown
    from deepspeed_nmt.evaluate.metrics import METRICS

    if metric is None:
        return
    programs = dict.fromkeys(name for run in runs for name in run.config.validation.commands)
    known = ("loss", *METRICS, *programs)
    if metric.rpartition("/")[2] not in known or metric.count("/") > 1:
        raise ConfigError(
            f"--metric must be one of {', '.join(known)}, or SET/ and one of them, but is {shown(metric)}"
        )
    if text is not None:
        raise ConfigError("--metric chooses a measure of validation, but a test set is given; leave one of them out")


def _validation_scores(runs: Sequence[Outcome], metric: str | None) -> tuple[Sequence[str], _Scores]:
    """Return the name of a measure of validation, one for all runs, and the best score of each run by its path."""
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.evaluate.curves import validation_metric

    metric = metric or validation_metric(run.curves for run in runs if run.curves is not None).name
    scores = {run.path: {metric: run.best(metric)} for run in runs}
    if without := [path.name for path, score in scores.items() if score[metric] is None]:
        logger.warning("no validation %s is logged by %s", metric, ", ".join(without))
    return [metric], scores


def _test_scores(
    runs: Sequence[Outcome], text: ParallelText, arguments: argparse.Namespace
) -> tuple[Sequence[str], _Scores]:
    """Return the names of the metrics of the test set, and the scores of each run by its path."""
    from deepspeed_nmt.run.scores import score_runs

    paths = [run.path for run in runs]
    metrics, scores = score_runs(paths, arguments.checkpoint, text, arguments.max_tokens)
    return metrics, {path: {each.metric: each.value for each in found} for path, found in scores.items()}


def _row(point: Point, run: Outcome | None, metrics: Sequence[str], scores: _Scores) -> dict[str, Any]:
    """Return what is known of a point, for JSON; its score is that of the first metric."""
    from deepspeed_nmt.evaluate.curves import SOURCE_RELIANCE, TRAIN_PERPLEXITY

    row: dict[str, Any] = {"point": point.number, "recipe": point.recipe, "settings": point.values}
    if run is None:
        return {**row, "status": "missing"}
    found = scores.get(run.path, {})
    return {
        **row,
        "status": run.status,
        "run": str(run.path),
        "updates": run.updates,
        "train_ppl": run.last(TRAIN_PERPLEXITY),
        "metric": metrics[0],
        "score": found.get(metrics[0]),
        "scores": {metric: found.get(metric) for metric in metrics},
        "source_reliance": run.last(SOURCE_RELIANCE),
        "hours": run.hours,
    }


def _table(sweep: Sweep, rows: Sequence[dict[str, Any]], titles: Mapping[str, str]) -> list[list[str]]:
    from deepspeed_nmt.evaluate.table import cell, setting

    head = ["point", *sweep.axes, "train ppl", *titles.values(), "source reliance", "hours", "run"]
    lines = [head]
    for point, row in zip(sweep.points, rows, strict=True):
        values = [setting(point.value(axis)) for axis in sweep.axes]
        scores = [cell(row.get("scores", {}).get(metric), 2) for metric in titles]
        others = [cell(row.get(key), digits) for key, digits in (("source_reliance", 3), ("hours", 2))]
        lines.append([str(point.number), *values, cell(row.get("train_ppl"), 3), *scores, *others, row["status"]])
    return lines


def _draw(sweep: Sweep, rows: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    from deepspeed_nmt.evaluate.sweep import Measured, draw_sweep
    from deepspeed_nmt.evaluate.table import setting

    panels = {"train_ppl": "final training perplexity", "score": title, "source_reliance": "source reliance (nats)"}
    first, *others = sweep.axes
    measured = []
    for point, row in zip(sweep.points, rows, strict=True):
        value = point.value(first)
        measured.append(
            Measured(
                x=value if isinstance(value, int | float) and not isinstance(value, bool) else setting(value),
                line=", ".join(f"{axis}={setting(point.value(axis))}" for axis in others),
                results={result: row.get(result) for result in panels},
                is_finished=row["status"] == "finished",
            )
        )
    draw_sweep(first, measured, panels, out)
