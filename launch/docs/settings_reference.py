"""Reference of all settings in Markdown, the content of docs/configuration.md; a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deepspeed_nmt.config import NAMED, RunConfig, setting_classes

_HEAD = """\
# All settings

Each setting with its default, the values it takes, and its meaning. [Settings](settings.md) explains how to give
them. (This page is generated: `python launch/docs/tables.py` writes it from the code.)
"""
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_MEANINGS = {
    "model": "model",
    "layer": "kind of the decoder layers",
    "optimizer": "optimizer",
    "search": "search for translations",
}


def settings_reference() -> str:
    """Return the page: a table of settings, defaults, values and meanings for each section.

    Settings that several parts of a section share are listed once.
    """
    lines = [_HEAD]
    for section in RunConfig.model_fields:
        for title, rows in _tables(section):
            lines += [f"## {title}", "", "| setting | default | values | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines)


def _tables(section: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the rows of each table of a section."""
    if section in NAMED:
        registry = NAMED[section]
        row = f"| `{section}.name` | `{registry.default}` | one of {', '.join(registry)} | {_MEANINGS[section]} |"
        yield section, [row]
        parts_of_row: dict[str, list[str]] = {}
        for prefix, part, config in setting_classes(section):
            for key, field in config.model_fields.items():
                if key != "name":
                    parts_of_row.setdefault(_row(f"{prefix}.{key}", field), []).append(part)
        for parts in dict.fromkeys(map(tuple, parts_of_row.values())):
            rows = [row for row, having in parts_of_row.items() if tuple(having) == parts]
            yield f"{section}: {', '.join(parts)}", rows
    else:
        for prefix, _, config in setting_classes(section):
            rows = [_row(f"{prefix}.{key}", field) for key, field in config.model_fields.items()]
            yield prefix.replace(".", ": "), rows


def _row(setting: str, field: FieldInfo) -> str:
    bounds = [
        f"{sign} {_bound(getattr(each, name))}"
        for each in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(each, name)
    ]
    values = " ".join([_values(field.annotation), " and ".join(bounds)]).rstrip()
    return f"| `{setting}` | `{_shown(field.default)}` | {values} | {field.description or ''} |"


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _values(annotation: Any) -> str:
    """Return the values that a type allows, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(arguments)}" if len(arguments) > 1 else arguments[0]
    if origin in (Union, UnionType):
        return " or ".join(_values(each) for each in arguments)
    if origin is not None and issubclass(origin, Mapping):
        return "mapping"
    if origin is not None:
        return "list of " + _values(arguments[0]).removeprefix("one of ")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}[annotation]


def _shown(value: object) -> str:
    """Return a default as YAML has it."""
    if isinstance(value, BaseModel):
        return f"{{{', '.join(f'{key}: {_shown(each)}' for key, each in value)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    words = {True: "true", False: "false", "": '""', None: "null"}
    return words[value] if value is None or isinstance(value, bool) or value == "" else str(value)
