"""Import a MarianMT model of Hugging Face as a run.

    deepspeed-nmt import --from Helsinki-NLP/opus-mt-en-de --run RUN

The run has one checkpoint, with which `translate`, `export`, `train --init-from` and `train --grow-from` work as with
any other. To train it further, prepare text with its vocabulary: `prepare --vocab-from RUN`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepspeed_nmt.console import output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--from", required=True, dest="origin", metavar="MODEL", help="folder, or name on the Hugging Face hub"
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory to make")


def run(arguments: argparse.Namespace) -> int:
    """Import the model, and print its shape."""
    from deepspeed_nmt.run.importing import import_marian

    model = import_marian(arguments.origin, arguments.run).model.model_dump()
    keys = ("encoder_layers", "decoder_layers", "dim", "ffn_dim", "heads")
    output(f"{arguments.run}: {', '.join(f'{key}={model[key]}' for key in keys)}")
    return 0
