"""Compare BLEU and time at every pair of encoder and decoder stages.

    deepspeed-nmt report depths --run RUN --input test.en --reference test.de --oracle --repeat 3
    deepspeed-nmt report depths --run runs/nxm runs/vanilla/* --data DATA --oracle --repeat 3

A stage is a layer, or a loop of a recurrent model. A run alone translates at all its depths. Beside other runs, one
that was trained with objective.multi_softmax does so, and all others together are one system, with the full depth of
each. The report names the fastest pair whose BLEU is at most --max-loss below that of the full depth, or if no
model has it, below the best BLEU. With --oracle it also counts the sentences that each pair translates best, by
sentence BLEU (ties go to the pair of the least measured time), and has the BLEU of the best pair for each sentence.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_nmt.commands.report_options import add_decoding, add_picture, check_decoding, read_text

_ENOUGH_SENTENCES = 200
"""Number of sentences below which the report warns that it is not reliable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument(
        "--run", type=Path, action="extend", nargs="+", required=True, metavar="DIR", dest="runs",
        help="run directories, made by `train`",
    )  # fmt: skip
    add_decoding(parser)
    parser.add_argument(
        "--max-loss",
        type=float,
        default=0.5,
        metavar="B",
        help="largest loss of BLEU that is accepted (default: %(default)s)",
    )
    parser.add_argument("--oracle", action="store_true", help="count the sentences that each pair translates best")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="number of measurements; times are their medians (default: %(default)s)",
    )
    add_picture(parser, "depths.png")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each system, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Translate the text at every depth, draw the picture, and print the tables.

    Raises:
        ConfigError: if an option is out of range, or the runs cannot be compared.
        DataError: if the text is empty or not aligned.
    """
    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.evaluate.depths import draw_depths
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.evaluate.table import json_line
    from deepspeed_nmt.run.comparison import common_scorer
    from deepspeed_nmt.run.depths import Measurement, measure, systems_of
    from deepspeed_nmt.run.directory import Run

    if not 0.0 <= arguments.max_loss < float("inf"):
        raise ConfigError(f"--max-loss must be at least 0 and finite, but is {arguments.max_loss}")
    if arguments.repeat < 1:
        raise ConfigError(f"--repeat must be at least 1, but is {arguments.repeat}")
    check_decoding(arguments)
    check_picture(arguments.out)
    text = read_text(arguments)
    if text is None:
        raise ConfigError("--data, or --input and --reference, must be given, but are missing")
    runs = [Run.open(path) for path in dict.fromkeys(arguments.runs)]
    systems = systems_of(runs)
    scorer = common_scorer(runs, text)
    if len(text.sources) < _ENOUGH_SENTENCES:
        few = "%d sentences are too few to compare depths: BLEU and times vary by chance; give %d or more"
        logger.warning(few, len(text.sources), _ENOUGH_SENTENCES)
    if arguments.oracle and arguments.repeat == 1:
        logger.warning(
            "--oracle breaks ties by decoding time, but these times and the Pareto front rest on one measurement of "
            "each pair; --repeat 3 steadies them"
        )
    how = Measurement(arguments.checkpoint, arguments.max_tokens, arguments.repeat, arguments.oracle)
    measured = [measure(system, text, scorer, how) for system in systems]
    draw_depths(measured, arguments.out)
    if arguments.json:
        output("\n".join(json_line(system.report(arguments.max_loss)) for system in measured))
    else:
        output("\n\n".join(system.text(arguments.max_loss) for system in measured))
    logger.info("picture: %s", arguments.out)
    return 0
