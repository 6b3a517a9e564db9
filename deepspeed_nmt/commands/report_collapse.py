"""Compare the training curves of runs, in a picture and a table.

    deepspeed-nmt report collapse runs/plain runs/with_cad --out collapse.png

The picture shows if decoders use their source: source reliance, training perplexity, validation loss and score over
target tokens, and for each run the share of cross-attention in the update of each decoder layer over updates. Source
reliance is the rise of the loss, in nats per target token, when the sources are shuffled among the sentences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.commands.report_options import add_picture

if TYPE_CHECKING:
    from deepspeed_nmt.evaluate.curves import RunCurves

_TITLES = {
    "run": "run",
    "updates": "updates",
    "target_tokens": "target tokens",
    "source_reliance": "source reliance",
    "train_ppl": "train ppl",
    "valid_loss": "valid loss",
    "valid_ppl": "valid ppl",
    "metric": "metric",
    "valid_score": "valid score",
    "best_valid_score": "best",
}
"""Columns of the table by key of the JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    add_picture(parser, "collapse.png")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each run, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Draw the picture, and print the table.

    Raises:
        ConfigError: if the picture cannot be written where it should be.
        DataError: if a run has logged nothing.
    """
    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.evaluate.curves import (
        SOURCE_RELIANCE,
        TRAIN_PERPLEXITY,
        VALID_LOSS,
        RunCurves,
        draw_curves,
        run_names,
        validation_metric,
    )
    from deepspeed_nmt.evaluate.metrics import validation_tag
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.evaluate.table import cell, json_line, text_table

    check_picture(arguments.out)
    paths = list(dict.fromkeys(arguments.runs))
    runs = dict(zip(run_names(paths), map(RunCurves, paths), strict=True))
    metric = validation_metric(runs.values())
    panels = {
        SOURCE_RELIANCE: "source reliance (nats per token)",
        TRAIN_PERPLEXITY: "training perplexity",
        VALID_LOSS: "validation loss",
        validation_tag(metric.name): f"validation {metric.name}",
    }
    draw_curves(runs, panels, arguments.out, shares=True)
    rows = [_row(name, each) for name, each in runs.items()]
    table = [list(_TITLES.values()), *([cell(row[key]) for key in _TITLES] for row in rows)]
    output("\n".join(map(json_line, rows)) if arguments.json else text_table(table))
    logger.info("picture: %s", arguments.out)
    return 0


def _row(name: str, curves: RunCurves) -> dict[str, object]:
    from deepspeed_nmt.evaluate.curves import (
        SOURCE_RELIANCE,
        TRAIN_PERPLEXITY,
        VALID_LOSS,
        VALID_PERPLEXITY,
        validation_metric,
    )
    from deepspeed_nmt.evaluate.metrics import validation_tag

    metric = validation_metric([curves])
    score = curves.curve(validation_tag(metric.name))
    return {
        "run": name,
        "updates": curves.updates,
        "target_tokens": int(curves.tokens),
        "source_reliance": curves.curve(SOURCE_RELIANCE).last,
        "train_ppl": curves.curve(TRAIN_PERPLEXITY).last,
        "valid_loss": curves.curve(VALID_LOSS).last,
        "valid_ppl": curves.curve(VALID_PERPLEXITY).last,
        "metric": metric.name,
        "valid_score": score.last,
        "best_valid_score": score.best(higher_is_better=metric.higher_is_better),
        "cross_share": {layer: curve.last for layer, curve in curves.cross_shares().items()},
    }
