"""Run parts of the GPU benchmark, and write the record PART.json of each.

    python benchmarks/gpu/run.py PART ... --out DIR [--device cuda|cpu] [--tiny] [--limit SECONDS] [--only NAME ...]

Parts: smoke, journey, host, kernels, attention, training, ranks, marian, decoding. `run.sh` runs each in a process of
its own. `--only` chooses rows by their labels in the table. The exit status is 1 if a measurement has failed, or a
NAME is no label; all others are made nevertheless.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

import torch
from harness import Bench

from deepspeed_nmt.parallel.hardware import prepare_gpu
from deepspeed_nmt.parallel.launched import use_expandable_segments

PARTS = ("smoke", "journey", "host", "kernels", "attention", "training", "ranks", "marian", "decoding")


def main() -> int:
    """Run the parts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="PART", choices=PARTS, help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models; the figures mean nothing")
    parser.add_argument(
        "--limit", type=float, default=400.0, help="seconds of a part, then it starts nothing new (default: 400)"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="rows, by any of their labels")
    arguments = parser.parse_args()
    use_expandable_segments()  # as the commands do
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # or each launch would take longer once a row has been profiled
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, but torch finds no GPU; rehearse with --device cpu --tiny")
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        prepare_gpu(device)
    status = 0
    for part in arguments.parts:
        bench = Bench(part, arguments.out, device, arguments.tiny, arguments.limit, arguments.only)
        try:
            importlib.import_module(part).run(bench)
        except Exception:  # the other parts are still wanted
            traceback.print_exc()
            status = 1
        if bench.unknown:
            names, known = ", ".join(bench.unknown), ", ".join(bench.known)
            sys.stderr.write(f"--only must name rows of {part}, but names {names}; labels are {known}\n")
        status = status or int(bench.failed or bool(bench.unknown))
    return status


if __name__ == "__main__":
    sys.exit(main())
