"""Print the settings of a run with their defaults, values and meanings, as tables in Markdown.

    deepspeed-nmt settings [WORD ...]

Words choose the tables, or else the settings, that have all of them in the name or the meaning: `settings search`,
`settings transformer`, `settings warmup`. The settings of plug-ins that DEEPSPEED_NMT_PLUGINS names are among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from deepspeed_nmt.console import output
from deepspeed_nmt.errors import UserError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_HEAD = "| setting | default | values | meaning |\n|---|---|---|---|\n"
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_MEANINGS = {
    "model": "model",
    "layer": "kind of the decoder layers",
    "optimizer": "optimizer",
    "search": "search for translations",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a table's title, of a name or of a meaning")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables of settings that have all words."""
    if not (tables := settings_reference(arguments.words)):
        raise UserError(f"no setting has {' '.join(arguments.words)}; `deepspeed-nmt settings` lists all")
    output(tables.rstrip())
    return 0


def settings_reference(words: Sequence[str] = ()) -> str:
    """Return a table of settings, defaults, values and meanings for each section.

    Settings that several parts of a section share are listed once.
    """
    from deepspeed_nmt.config import RunConfig

    def chosen(text: str) -> bool:
        return all(word.lower() in text.lower() for word in words)

    tables = []
    for section in RunConfig.model_fields:
        for title, rows in _tables(section):
            if some := rows if chosen(title) else list(filter(chosen, rows)):
                tables.append(f"## {title}\n\n{_HEAD}{''.join(f'{row}{chr(10)}' for row in some)}")
    return "\n".join(tables)


def _tables(section: str) -> Iterator[tuple[str, list[str]]]:
    from deepspeed_nmt.config import NAMED, setting_classes

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
        f"{sign} {_bound(getattr(constraint, name))}"
        for constraint in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(constraint, name)
    ]
    values = " ".join([_values(field.annotation), " and ".join(bounds)]).rstrip()
    return f"| `{setting}` | `{_shown(field.default)}` | {values} | {field.description or ''} |"


def _bound(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _values(annotation: Any) -> str:
    """Return the values that a type allows, in words."""
    from pydantic import BaseModel

    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0])
    if origin is Literal:
        return f"one of {', '.join(arguments)}" if len(arguments) > 1 else arguments[0]
    if origin in (Union, UnionType):
        return " or ".join(map(_values, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return "mapping"
    if origin is not None:
        return "list of " + _values(arguments[0]).removeprefix("one of ")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    kinds = {bool: "true or false", int: "integer", float: "number", str: "text", type(None): "null"}
    return kinds.get(annotation, str(annotation))


def _shown(value: object) -> str:
    """Return a default as YAML has it."""
    from pydantic import BaseModel

    if isinstance(value, BaseModel):
        return f"{{{', '.join(f'{key}: {_shown(of)}' for key, of in value)}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    words = {True: "true", False: "false", "": '""', None: "null"}
    return words[value] if value is None or isinstance(value, bool) or value == "" else str(value)
