"""Flags of a command, made from the fields of a configuration class.

A field with a description is an option: its name, type and default are those of the field. A flag that is not given
is not in the namespace, so that the class itself has its default, and checks all values.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from deepspeed_nmt.errors import typed
from deepspeed_nmt.registry import Config

_METAVARS: Mapping[Any, str] = {int: "N", float: "P", Path: "F", Path | str: "F"}


def add_flags(
    parser: argparse._ActionsContainer,
    config: type[Config],
    names: Collection[str] | None = None,
    required: Collection[str] = (),
    defaults: Mapping[str, Any] = {},
) -> None:
    """Declare the fields of a class as options of a command.

    A field's ``json_schema_extra`` may have a ``metavar``, a ``group`` of options, under which the help shows it,
    ``aliases``, ``nargs`` "?" for a flag that means "" without a value, and for a tuple an ``action``, by default to
    replace its values if the flag is repeated. The flag of a list is repeated for each value.

    Args:
        names: fields to declare; None for all that have a description.
        required: those that must be given.
        defaults: those that are in the namespace in any case.
    """
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for name, field in config.model_fields.items():
        if field.description is None or (names is not None and name not in names):
            continue
        extra: Mapping[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if (group := extra.get("group", "")) not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(
            typed(name),
            *extra.get("aliases", ()),
            dest=name,
            default=defaults.get(name, argparse.SUPPRESS),
            help=_help(field, defaults.get(name, field.default)),
            **_form(field, extra, name in required),
        )


def _help(field: FieldInfo, default: Any) -> str:
    text = str(field.description).replace("%", "%%")
    shows_default = type(default) in (int, float, str) and "(default" not in text
    return f"{text} (default: {default})" if shows_default else text


def _form(field: FieldInfo, extra: Mapping[str, Any], required: bool) -> dict[str, Any]:
    """Return the arguments of argparse that follow from the type of a field."""
    kinds = get_args(field.annotation)
    kind = next(kind for kind in kinds if kind is not NoneType) if NoneType in kinds else field.annotation
    if kind is bool:
        return {"action": "store_true"}
    form: dict[str, Any] = {"required": True} if required or field.is_required() else {}
    if get_origin(kind) is Literal:
        return {**form, "choices": get_args(kind)}
    metavar = extra.get("metavar") or ""
    if "," not in metavar and get_origin(kind) in (tuple, Sequence):
        repeated = get_origin(kind) is Sequence
        form |= {"action": "append"} if repeated else {"nargs": "+", "action": extra.get("action", "store")}
        kind = get_args(kind)[0]
    if extra.get("nargs") == "?":
        form |= {"nargs": "?", "const": ""}
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    types = {"type": kind} if kind in (int, float, Path) else {}
    return {**form, **types, "metavar": metavar or _METAVARS.get(kind, "S")}
