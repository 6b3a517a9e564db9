"""Make a page of a run, or compare runs: curves, settings and results, points of a sweep, depths of a model."""

from __future__ import annotations

import argparse
import importlib

HELP = "make a page of a run; compare runs, the points of a sweep, or the depths of a model"

KINDS = {
    "collapse": "curves of runs: source reliance, loss, BLEU, cross-attention by layer",
    "depths": "BLEU and time at every depth of one or more runs",
    "run": "page of one run: curves, layers, translations, events, settings",
    "runs": "settings in which runs differ, and what came of it",
    "sweep": "results of a sweep's runs against the setting swept",
}
"""Kinds of reports. Each is a module of deepspeed_nmt.commands, report_KIND."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of each kind."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for kind, words in KINDS.items():
        module = importlib.import_module(f"deepspeed_nmt.commands.report_{kind}")
        module.add_arguments(
            kinds.add_parser(
                kind,
                help=words,
                description=module.__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )


def run(arguments: argparse.Namespace) -> int:
    """Make the report, and return the exit status."""
    status: int = importlib.import_module(f"deepspeed_nmt.commands.report_{arguments.kind}").run(arguments)
    return status
