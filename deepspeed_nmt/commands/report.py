"""Compare the training curves of runs, in a picture and a table.

    deepspeed-nmt report collapse runs/plain runs/with_cad --out collapse.png

The picture shows if decoders use their source: source reliance, validation loss and BLEU over target tokens. Source
reliance is the rise of the loss, in nats per target token, when the sources are shuffled among the sentences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.commands import report_depths

if TYPE_CHECKING:
    from deepspeed_nmt.evaluate.curves import RunCurves

HELP = "compare runs (`report collapse`) or the depths of a run (`report depths`)"

RELIANCE, LOSS, PERPLEXITY, BLEU = "collapse/source_reliance", "valid/loss", "valid/ppl", "valid/bleu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    collapse = kinds.add_parser("collapse", help="source reliance, loss and BLEU of runs", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    collapse.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    collapse.add_argument(
        "--out",
        type=Path,
        default=Path("collapse.png"),
        metavar="F",
        help="picture to write, .png, .svg or .pdf (default: %(default)s)",
    )
    collapse.add_argument("--json", action="store_true", help="print a JSON object for each run, one a line")
    depths = kinds.add_parser("depths", help="BLEU and time at every depth", description=report_depths.__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    report_depths.add_arguments(depths)


def run(arguments: argparse.Namespace) -> int:
    """Draw the picture, and print the table."""
    return report_depths.run(arguments) if arguments.kind == "depths" else _collapse(arguments)


def _collapse(arguments: argparse.Namespace) -> int:
    import json

    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.evaluate.curves import RunCurves, draw, run_names
    from deepspeed_nmt.evaluate.picture import check_picture

    check_picture(arguments.out)
    paths = list(dict.fromkeys(arguments.runs))
    runs = dict(zip(run_names(paths), map(RunCurves, paths), strict=True))
    panels = {RELIANCE: "source reliance (nats per token)", LOSS: "validation loss", BLEU: "validation BLEU"}
    draw(runs, panels, arguments.out)
    rows = [_row(name, each) for name, each in runs.items()]
    output("\n".join(map(json.dumps, rows)) if arguments.json else _table(rows))
    logger.info("picture: %s", arguments.out)
    return 0


def _row(name: str, curves: RunCurves) -> dict[str, object]:
    return {
        "run": name,
        "updates": curves.updates,
        "target_tokens": int(curves.tokens),
        "source_reliance": curves.curve(RELIANCE).last,
        "valid_loss": curves.curve(LOSS).last,
        "valid_ppl": curves.curve(PERPLEXITY).last,
        "valid_bleu": curves.curve(BLEU).last,
        "best_valid_bleu": max(curves.curve(BLEU).values, default=None),
    }


_COLUMNS = {
    "run": "run",
    "updates": "updates",
    "target_tokens": "target tokens",
    "source_reliance": "source reliance",
    "valid_loss": "valid loss",
    "valid_ppl": "valid ppl",
    "valid_bleu": "valid BLEU",
    "best_valid_bleu": "best",
}


def _table(rows: list[dict[str, object]]) -> str:
    cells = [list(_COLUMNS.values()), *([_cell(row[column]) for column in _COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    lines = []
    for line in cells:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
