"""Command-line arguments of commands that decode, from the table of all options of a translation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_nmt.search.decode_options import DecodeOptions, choices, flags, kinds, typed


def add_options(
    parser: argparse.ArgumentParser, names: Sequence[str] = (), required: Sequence[str] = (), **defaults: Any
) -> None:
    """Declare options of a translation.

    Args:
        parser: of the command.
        names: of the options; all of them by default.
        required: names of those that must be given.
        **defaults: by name, other than those of a translation.
    """
    groups: dict[str, Any] = {"": parser}
    for name in names or flags():
        flag, field = flags()[name], DecodeOptions.model_fields[name]
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        help = str(field.description)
        default = defaults.get(name, field.default)
        keywords: dict[str, Any] = {"default": default, "dest": name, "required": name in required}
        if default not in (None, False):
            help += " (default: %(default)s)"
        kind = kinds(name)[0]
        if kind is bool and flag.metavar == "":
            keywords |= {"action": "store_true"}
        elif choices(name):
            keywords |= {"choices": choices(name)}
        else:
            is_path = "Path" in str(kind) and kind != str | Path
            parse = flag.parse or (kind if kind in (int, float) else Path if is_path else str)
            keywords |= {"type": parse, "metavar": flag.metavar}
            if "Sequence" in str(kind) and flag.parse is None:
                keywords |= {"action": "append"}
        if name == "detokenise":
            keywords |= {"nargs": "?", "const": ""}
        groups[flag.group].add_argument(typed(name), help=help, **keywords)


def options_of(arguments: argparse.Namespace) -> DecodeOptions:
    """Return the options of a command, checked.

    Raises:
        ConfigError: naming all that are wrong, or options that exclude one another.
    """
    return DecodeOptions.of({name: value for name, value in vars(arguments).items() if name in flags()})
