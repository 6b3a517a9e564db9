"""Options of `plan`, checked."""

from __future__ import annotations

import argparse
import math

_MAX_GPUS = 1_000_000
_NUM_GPUS, _MFU, _WRITE_SPEED = 1, 0.3, 300.0


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Declare the options that describe a machine."""
    parser.add_argument("--gpu", metavar="G", help="GPU to plan memory and speed for (default: none)")
    parser.add_argument(
        "--num-gpus", type=int, default=_NUM_GPUS, metavar="N", help="number of GPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--mfu", type=float, default=_MFU, metavar="U", help="expected share of the GPU's peak (default: %(default)s)"
    )
    parser.add_argument(
        "--write-speed",
        type=float,
        default=_WRITE_SPEED,
        metavar="MB/S",
        help="assumed speed of writing checkpoints, their hashes included (default: %(default)g)",
    )


def check(arguments: argparse.Namespace) -> None:
    """Check the options.

    Raises:
        ConfigError: if they contradict each other or are out of range; it lists all of them.
    """
    from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY
    from deepspeed_nmt.errors import ConfigError, shown

    problems = []
    if arguments.recipe is None and arguments.sweep is None and arguments.config is None:
        problems.append("--recipe, --config or --sweep is required, but missing; give one of them")
    if arguments.sweep is not None and arguments.config is not None:
        problems.append("--sweep plans recipes, but --config is given; leave out one of them")
    sizes = ("4" if arguments.vocab_size is None else arguments.vocab_size).split(",")
    if len(sizes) > 2 or not all(map(_is_size, sizes)):
        problems.append(
            f"--vocab-size must be from 4 to {MAX_VOCABULARY:,}, or two such numbers, but is "
            f"{shown(arguments.vocab_size)}"
        )
    if not 1 <= arguments.num_gpus <= _MAX_GPUS:
        problems.append(f"--num-gpus must be from 1 to {_MAX_GPUS:,}, but is {shown(arguments.num_gpus)}")
    if not 0.0 < arguments.mfu <= 1.0:
        problems.append(f"--mfu must be above 0 and at most 1, but is {arguments.mfu}")
    if not 0.0 < arguments.write_speed < math.inf:
        problems.append(f"--write-speed must be a positive number of MB/s, but is {arguments.write_speed}")
    if not problems and arguments.gpu is None and arguments.point is None and (unused := _set_for_a_gpu(arguments)):
        problems.append(f"{' and '.join(unused)} must go with --gpu, which is missing; give it too")
    if arguments.point is not None and arguments.sweep is None:
        problems.append("--point is the number of a point of --sweep, which is missing; give both")
    if arguments.point is not None and (unused := _set_for_a_plan(arguments)):
        problems.append(
            f"--point prints the arguments of a point for `train` and plans nothing, but {unused[0]} is given; leave "
            f"out {' and '.join(unused)}, or --point"
        )
    if problems:
        raise ConfigError(problems)


def _set_for_a_plan(arguments: argparse.Namespace) -> list[str]:
    """Return the options given that change plans alone."""
    defaults = {"vocab_size": None, "data": None, "gpu": None, "num_gpus": _NUM_GPUS, "mfu": _MFU}
    defaults |= {"write_speed": _WRITE_SPEED, "json": False}
    given = vars(arguments)
    return [f"--{name.replace('_', '-')}" for name, default in defaults.items() if given[name] != default]


def _set_for_a_gpu(arguments: argparse.Namespace) -> list[str]:
    """Return the options given that change nothing without a GPU; layouts of data depend on the number of GPUs."""
    given = {"--num-gpus": arguments.num_gpus != _NUM_GPUS and arguments.data is None, "--mfu": arguments.mfu != _MFU}
    return [name for name, is_given in given.items() if is_given]


def _is_size(text: str) -> bool:
    from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY

    return text.isdecimal() and len(text) < 20 and 4 <= int(text) <= MAX_VOCABULARY
