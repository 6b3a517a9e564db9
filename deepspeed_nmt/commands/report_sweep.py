"""Compare the runs of a sweep: final training perplexity, BLEU, source reliance and hours of each point.

    deepspeed-nmt report sweep deep_decoder_fig1 --runs runs/fig1 --data DATA

The runs are the directories in --runs; launch/sweep.sbatch trains point I of a sweep in the directory I. A run
belongs to a point if it has the settings that the sweep varies, whatever its name. With --data, or --input and
--reference, each run translates the test set by its own search, and the score is recorded in the run, so that it is
translated once; otherwise BLEU is the best of validation. Points without a run, and unfinished runs, are named.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.report_options import add_decoding, add_picture, read_text

if TYPE_CHECKING:
    from deepspeed_nmt.run.outcome import Outcome
    from deepspeed_nmt.run.parallel_text import ParallelText
    from deepspeed_nmt.run.sweep import Point, Sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("sweep", metavar="SWEEP", help="name of the sweep")
    parser.add_argument("--runs", type=Path, required=True, metavar="DIR", help="directory of the run directories")
    add_decoding(parser)
    add_picture(parser, "sweep.png")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each point, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Score the runs, draw the picture, and print the table.

    Raises:
        ConfigError: if the sweep is unknown, or an option is out of range.
        DataError: if there is no run of the sweep, or no test set where one is named.
    """
    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.errors import DataError
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.evaluate.table import json_line, text_table
    from deepspeed_nmt.run.sweep import Sweep

    check_picture(arguments.out)
    sweep = Sweep(arguments.sweep)
    text = read_text(arguments)
    runs = _read_runs(arguments.runs)
    found = [sweep.runs_of(point, runs) for point in sweep.points]
    if not any(found):
        raise DataError(
            f"--runs must hold runs of the sweep {sweep.name}, but of the {len(runs)} runs in {arguments.runs} none "
            f"has the settings of a point; `plan --sweep {sweep.name}` lists them"
        )
    chosen = [each[0] if each else None for each in found]
    _warn_of_runs(sweep, found, arguments.runs)
    _warn_of_settings(sweep, chosen)
    rows = [_row(point, run, text, arguments) for point, run in zip(sweep.points, chosen, strict=True)]
    bleu = "validation BLEU" if text is None else "test BLEU"
    _draw(sweep, rows, bleu, arguments.out)
    output("\n".join(map(json_line, rows)) if arguments.json else text_table(_table(sweep, rows, bleu)))
    logger.info("picture: %s", arguments.out)
    return 0


def _read_runs(directory: Path) -> list[Outcome]:
    """Read the runs in a directory; a run whose settings cannot be read is left out with a warning.

    Raises:
        DataError: if there is no such directory.
    """
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.errors import ConfigError, DataError
    from deepspeed_nmt.run.manifest import CONFIG_FILE
    from deepspeed_nmt.run.outcome import Outcome

    if not directory.is_dir():
        raise DataError(f"--runs must be a directory of run directories, but there is no directory {directory}")
    runs = []
    for path in sorted(directory.iterdir()):
        if (path / CONFIG_FILE).is_file():
            try:
                runs.append(Outcome.read(path))
            except ConfigError as error:
                logger.warning("%s is left out, because its settings cannot be read: %s", path, error)
    return runs


def _warn_of_runs(sweep: Sweep, found: Sequence[Sequence[Outcome]], directory: Path) -> None:
    """Name the points that have no run or several, and the runs that are not finished."""
    from deepspeed_nmt.console import logger

    for point, runs in zip(sweep.points, found, strict=True):
        if not runs:
            train = f"train $(deepspeed-nmt plan --sweep {sweep.name} --point {point.number})"
            logger.warning("%s has no run in %s: `%s`", point.name, directory, train)
            continue
        if not runs[0].is_finished:
            logger.warning("%s: %s is not finished: %s", point.name, runs[0].path, runs[0].status)
        if others := ", ".join(run.path.name for run in runs[1:]):
            logger.warning("%s has several runs: %s is taken, not %s", point.name, runs[0].path, others)


def _warn_of_settings(sweep: Sweep, chosen: Sequence[Outcome | None]) -> None:
    """Log in what the runs differ from the sweep's recipe, and warn if they do not differ from it alike."""
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.evaluate.table import setting

    trained = [(point, run) for point, run in zip(sweep.points, chosen, strict=True) if run is not None]
    differences = [sweep.differences(point, run) for point, run in trained]
    keys = sorted({key for each in differences for key in each})
    common = [key for key in keys if all(key in each and each[key] == differences[0][key] for each in differences)]
    if common:
        values = " ".join(f"{key}={setting(differences[0][key])}" for key in common)
        logger.info("all runs differ from the recipe of %s in %s", sweep.name, values)
    if others := [key for key in keys if key not in common]:
        logger.warning(
            "the runs of %s must differ in the settings swept alone, but differ in %s, too; compare them with "
            "`report runs`",
            sweep.name,
            ", ".join(others),
        )


def _row(
    point: Point, run: Outcome | None, text: ParallelText | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return what is known of a point, for JSON."""
    from deepspeed_nmt.evaluate.curves import SOURCE_RELIANCE, TRAIN_PERPLEXITY, validation_metric

    row: dict[str, Any] = {"point": point.number, "recipe": point.recipe, "settings": point.values}
    if run is None:
        return {**row, "status": "missing"}
    if text is None:
        bleu = run.best(validation_metric([] if run.curves is None else [run.curves]).name)
    else:
        bleu = _test_bleu(run, text, arguments)
    return {
        **row,
        "status": run.status,
        "run": str(run.path),
        "updates": run.updates,
        "train_ppl": run.last(TRAIN_PERPLEXITY),
        "bleu": bleu,
        "source_reliance": run.last(SOURCE_RELIANCE),
        "hours": run.hours,
    }


def _test_bleu(run: Outcome, text: ParallelText, arguments: argparse.Namespace) -> float | None:
    """Return the BLEU of the test set; None, with a warning, if the run cannot translate it."""
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.errors import UserError
    from deepspeed_nmt.run.directory import Run
    from deepspeed_nmt.run.scores import score_text

    try:
        score = score_text(Run.open(run.path), arguments.checkpoint, text, arguments.max_tokens)
    except UserError as error:
        logger.warning("%s has no test BLEU: %s", run.path, error)
        return None
    logger.info("%s, %s: BLEU %.2f (%s)", run.path, score.checkpoint, score.value, score.signature)
    return score.value


def _table(sweep: Sweep, rows: Sequence[dict[str, Any]], bleu: str) -> list[list[str]]:
    from deepspeed_nmt.evaluate.table import cell, setting

    head = ["point", *sweep.axes, "train ppl", bleu, "source reliance", "hours", "run"]
    lines = [head]
    for point, row in zip(sweep.points, rows, strict=True):
        values = [setting(point.value(axis)) for axis in sweep.axes]
        numbers = [("train_ppl", 3), ("bleu", 2), ("source_reliance", 3), ("hours", 2)]
        results = [cell(row.get(key), digits) for key, digits in numbers]
        lines.append([str(point.number), *values, *results, row["status"]])
    return lines


def _draw(sweep: Sweep, rows: Sequence[dict[str, Any]], bleu: str, out: Path) -> None:
    from deepspeed_nmt.evaluate.sweep import Measured, draw_sweep
    from deepspeed_nmt.evaluate.table import setting

    panels = {"train_ppl": "final training perplexity", "bleu": bleu, "source_reliance": "source reliance (nats)"}
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
