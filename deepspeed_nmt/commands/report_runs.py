r"""Compare runs: the settings in which they differ, and what came of it.

    deepspeed-nmt report runs runs/plain runs/with_cad --out runs.png
    deepspeed-nmt report runs runs/plain runs/with_cad --data DATA --checkpoint average

The table has a column for each run, with the settings that differ, then length, cost and results. What a run does not
record is shown as `-`. With --data, or --input and --reference, each run translates the test set by its own search,
and its scores are recorded in the run, so that it is translated once; scores recorded before are shown, too. The
picture shows perplexity and BLEU over target tokens.
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
    from deepspeed_nmt.run.plans import Plans
    from deepspeed_nmt.run.scores import RecordedScore

_NUMBERS = {
    "updates": ("updates", 0),
    "target_tokens": ("target tokens", 0),
    "hours": ("hours in updates", 2),
    "parameters": ("parameters", 0),
    "train_ppl": ("training perplexity", 3),
    "valid_loss": ("validation loss", 3),
    "valid_ppl": ("validation perplexity", 3),
    "source_reliance": ("source reliance", 3),
}
"""Title and decimals of each result by key of the JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add_decoding(parser)
    add_picture(parser, "runs.png")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    form.add_argument("--json", action="store_true", help="print a JSON object for each run, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Draw the picture, and print the table.

    Raises:
        ConfigError: if a directory is no run, an option is wrong, the picture cannot be written where it should be,
            or the runs translate into different forms of text.
        DataError: if the test set is missing, empty or not aligned, or no run can translate it.
    """
    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.evaluate.curves import (
        TRAIN_PERPLEXITY,
        VALID_PERPLEXITY,
        draw_curves,
        run_names,
        validation_measures,
        validation_metric,
    )
    from deepspeed_nmt.evaluate.metrics import validation_tag
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.evaluate.table import json_line, markdown_table, text_table
    from deepspeed_nmt.run.outcome import Outcome
    from deepspeed_nmt.run.plans import Plans
    from deepspeed_nmt.run.scores import score_runs

    check_decoding(arguments)
    check_picture(arguments.out)
    text = read_text(arguments)
    paths = list(dict.fromkeys(arguments.runs))
    runs = dict(zip(run_names(paths), map(Outcome.read, paths), strict=True))
    settings = _differing(list(runs.values()))
    plans = Plans()
    logged = {name: each.curves for name, each in runs.items() if each.curves is not None}
    measures = validation_measures(logged.values())
    tested = {} if text is None else score_runs(paths, arguments.checkpoint, text, arguments.max_tokens)[1]
    scores = {name: _test_scores(each, text, tested.get(each.path, ())) for name, each in runs.items()}
    rows = {name: _row(each, settings, measures, plans, scores[name]) for name, each in runs.items()}
    metric = validation_metric(logged.values())
    panels = {
        TRAIN_PERPLEXITY: "training perplexity",
        VALID_PERPLEXITY: "validation perplexity",
        validation_tag(metric.name): f"validation {metric.name}",
    }
    draw_curves(logged, panels, arguments.out)
    if arguments.json:
        output("\n".join(json_line({"run": name, **row}) for name, row in rows.items()))
    else:
        output((markdown_table if arguments.markdown else text_table)(_table(rows, measures)))
    logger.info("picture: %s", arguments.out)
    return 0


def _differing(runs: list[Outcome]) -> list[str]:
    """Return the settings in which runs differ."""
    flat = [each.config.flat() for each in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    return [key for key in keys if any(each.get(key) != flat[0].get(key) for each in flat)]


def _test_scores(
    run: Outcome, text: ParallelText | None, measured: Sequence[RecordedScore]
) -> Sequence[RecordedScore]:
    """Return the scores of test sets: those measured now, and of other texts those that the run has recorded."""
    from deepspeed_nmt.run.scores import recorded_scores

    recorded = recorded_scores(run.path)
    return [*(score for score in recorded if text is None or score.key.text != text.digest), *measured]


def _row(
    run: Outcome, settings: list[str], measures: list[str], plans: Plans, scores: Sequence[RecordedScore]
) -> dict[str, Any]:
    """Return what is known of a run, for JSON."""
    from deepspeed_nmt.evaluate.curves import (
        SOURCE_RELIANCE,
        TRAIN_PERPLEXITY,
        VALID_LOSS,
        VALID_PERPLEXITY,
    )
    from deepspeed_nmt.evaluate.metrics import validation_tag

    flat = run.config.flat()
    tags = {measure: validation_tag(measure) for measure in measures}
    return {
        "path": str(run.path),
        "settings": {key: flat.get(key) for key in settings},
        "data": run.data,
        "status": run.status,
        "updates": run.updates,
        "target_tokens": run.target_tokens,
        "hours": run.hours,
        "parameters": run.parameters(plans),
        "train_ppl": run.last(TRAIN_PERPLEXITY),
        "valid_loss": run.last(VALID_LOSS),
        "valid_ppl": run.last(VALID_PERPLEXITY),
        "source_reliance": run.last(SOURCE_RELIANCE),
        "validation": {
            measure: {"last": run.last(tag), "best": run.best(measure)}
            for measure, tag in tags.items()
            if run.last(tag) is not None
        },
        "test": [score.model_dump(exclude={"key"}) for score in scores],
    }


def _table(rows: Mapping[str, Mapping[str, Any]], measures: list[str]) -> list[list[str]]:
    """Return the table: a line for each setting and each result, a column for each run."""
    from deepspeed_nmt.evaluate.table import cell, setting

    runs = list(rows.values())
    lines = [["", *rows]]
    lines += [[key, *(setting(row["settings"][key]) for row in runs)] for key in runs[0]["settings"]]
    if len({row["data"] for row in runs}) > 1:
        lines.append(["data", *(cell(row["data"]) for row in runs)])
    lines.append(["status", *(row["status"] for row in runs)])
    lines += [[title, *(cell(row[key], digits) for row in runs)] for key, (title, digits) in _NUMBERS.items()]
    for measure in measures:
        digits = 3 if measure.endswith("/loss") else 2
        for which in ("last", "best"):
            found = [row["validation"].get(measure, {}).get(which) for row in runs]
            lines.append([f"validation {measure}, {which}", *(cell(value, digits) for value in found)])
    scores = [{(each["text"], each["metric"]): each["value"] for each in row["test"]} for row in runs]
    for text, metric in dict.fromkeys(key for each in scores for key in each):
        lines.append([f"{metric} of {text}", *(cell(each.get((text, metric)), 2) for each in scores)])
    return lines
