"""Train small models of every method under every engine on this machine, and compare with one plain process.

    deepspeed-nmt selftest --ranks 2                      # on one machine
    srun --ntasks 16 python -m deepspeed_nmt selftest     # on a cluster, started like training
    deepspeed-nmt selftest --only recurrent               # one method, also one of a plug-in
    deepspeed-nmt selftest --busy                         # once more under load, to find races

The reference process uses torch's own operations, the others the fused kernels chosen for this machine. Losses and
gradient norms of six updates and the final weights must agree: within 1e-5 in fp32 on a CPU, 1e-3 in fp32 on a GPU,
and 5% in 16 bit. Each engine is also saved and resumed half-way, which must not change its losses. One method, the
only one of `--quick`, meets every engine, as does that of `--only`; the others take turns with them. It takes two or
three minutes, `--quick` one. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from deepspeed_nmt.console import output, setup_logging
from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.parallel.launched import isolate_extension_builds, once_per_host, place

if TYPE_CHECKING:
    from deepspeed_nmt.parity import Row

_MAX_RANKS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--ranks", type=int, metavar="N", help="processes to start (default: one for each GPU, or 2)")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs if there are any (default: %(default)s)",
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--quick", action="store_true", help="test only the method that meets every engine")
    some.add_argument("--only", metavar="NAME", help="test only this method, or this case of the first column")
    parser.add_argument(
        "--busy", action="store_true", help="compare once more with all cores busy and new memory filled with NaN"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each comparison, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Start the ranks, or run as one of them."""
    import os

    from deepspeed_nmt.parallel.hardware import uses_cuda
    from deepspeed_nmt.parity import methods

    launched, ranks = place().ranks, arguments.ranks
    with once_per_host():
        if ranks is not None and not 1 <= ranks <= _MAX_RANKS:
            raise ConfigError(f"--ranks is {shown(ranks)}; give 1 to {_MAX_RANKS}")
        if launched > 1 and ranks not in (None, launched):
            raise ConfigError(f"--ranks is {ranks}, but a launcher has started {launched} processes; leave it out")
        on_gpu = uses_cuda(arguments.device, "--device")
        methods(arguments.quick, arguments.only)
    if launched > 1 or "RANK" in os.environ:
        return _run_rank(arguments)
    import torch

    from deepspeed_nmt.cli import execute
    from deepspeed_nmt.parallel.shared_work import run_workers

    isolate_extension_builds()
    gpus = torch.cuda.device_count() if on_gpu else 0
    ranks = ranks or max(2, gpus)
    return run_workers(execute, argparse.Namespace(**{**vars(arguments), "ranks": None}), min(ranks, gpus or ranks))


def _run_rank(arguments: argparse.Namespace) -> int:
    import json
    from contextlib import nullcontext
    from dataclasses import asdict

    import torch

    from deepspeed_nmt.kernels.choice import DEFAULT
    from deepspeed_nmt.parallel.world import join_world, leave_world
    from deepspeed_nmt.parity import busy, methods, rows

    failed = 0
    world = join_world(arguments.device, timeout_s=300.0)
    setup_logging(world.rank)
    prints_table = world.is_main and not arguments.json
    try:
        if prints_table:
            output(f"kernels: {DEFAULT.describe(world.device, torch.float32)}")
            output(_HEAD)
        for is_busy in (False, True)[: 1 + arguments.busy]:
            if is_busy and prints_table:
                output("the same with all cores busy, and new memory filled with NaN")
            with busy(world) if is_busy else nullcontext():
                for row in rows(world, methods(arguments.quick, arguments.only)):
                    failed += not row.passed
                    if prints_table:
                        output(_line(row))
                    elif world.is_main:
                        output(json.dumps({**asdict(row), "passed": row.passed, "busy": is_busy}))
    finally:
        leave_world()
    if prints_table:
        warning = f"{failed} differ: do not train with these engines on this machine, and report the table"
        output(warning if failed else "all agree")
    return 1 if failed else 0


_HEAD = (
    f"{'method':<14}{'engine':<22}{'ranks':>6}{'loss':>10}{'norm':>10}{'weights':>10}{'resumed':>9}{'':>8}{'s':>7}"
)


def _line(row: Row) -> str:
    ranks = str(row.ranks) if row.tensor_ranks == 1 else f"{row.ranks // row.tensor_ranks}x{row.tensor_ranks}"
    start = f"{row.method:<14}{row.engine:<22}{ranks:>6}"
    if row.problem:
        return f"{start}  FAIL: {row.problem}"
    figures = f"{row.loss:>10.1e}{row.norm:>10.1e}{row.weights:>10.1e}{row.resumed:>9.0e}"
    return f"{start}{figures}{'pass' if row.passed else 'FAIL':>8}{row.seconds:>7.1f}"
