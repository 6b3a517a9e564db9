"""Export a run for another program, with a certificate.

    deepspeed-nmt export --run RUN --format ctranslate2 --out DIR
    deepspeed-nmt export --run RUN --format huggingface --exit 6-3 --out DIR

The export has the model, its vocabulary, and a certificate: both programs translate the same sentences, and every
difference is listed. A model that the format cannot express is refused.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from deepspeed_nmt.console import logger, output
from deepspeed_nmt.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory, made by `train`")
    parser.add_argument(
        "--format", choices=("ctranslate2", "huggingface"), required=True,
        help="ctranslate2; huggingface: MarianMT (post-norm) or Pegasus (pre-norm)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the export")
    parser.add_argument(
        "--exit", metavar="E", help="exit to export: N-M, or shallow of a grown model (default: the top)"
    )
    parser.add_argument(
        "--checkpoint", default="best", metavar="C", help="best, last, average, or a path (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", choices=("fp32", "int8"), default="fp32",
        help="of the matrices; int8: ctranslate2 only (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--source", type=Path, metavar="F",
        help="text to compare translations of (default: test, validation and training set of the run's data)",
    )  # fmt: skip
    parser.add_argument("--reference", type=Path, metavar="F", help="translations of --source, for BLEU")
    parser.add_argument("--sentences", type=int, metavar="N", help="sentences to compare (default: 1000)")
    parser.add_argument("--overwrite", action="store_true", help="replace an older export")


def run(arguments: argparse.Namespace) -> int:
    """Export, print the certificate, and return 0, or 1 if it is not passed."""
    from deepspeed_nmt.run.exporting import ExportRequest, export_run

    if arguments.precision != "fp32" and arguments.format != "ctranslate2":
        raise ConfigError(
            f"--format {arguments.format} has no --precision {arguments.precision}; leave it out, or use ctranslate2"
        )
    if arguments.sentences is not None and arguments.sentences < 1:
        raise ConfigError(f"--sentences is {arguments.sentences}; give at least 1")
    request = ExportRequest(**{field.name: getattr(arguments, field.name) for field in fields(ExportRequest)})
    certificate = export_run(request, arguments.out, arguments.overwrite)
    output(certificate.table())
    if certificate.passed:
        return 0
    logger.error("error: %s does not translate as the run; its certificate above has the reasons", arguments.out)
    return 1
