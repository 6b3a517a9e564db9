"""Tables and JSON of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence


def cell(value: object, digits: int = 3) -> str:
    """Return a value as it stands in a table: ``-`` for None, thousands separated, a float with ``digits``."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def setting(value: object) -> str:
    """Return the value of a setting as it stands in a table: unrounded."""
    return value if isinstance(value, str) else json.dumps(value)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal: the first column is left-aligned, the others are right-aligned.

    Args:
        rows: lines of equally many cells; the first line is the head.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        aligned = [each.rjust(width) for each, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, aligned as by :func:`text_table`.

    Args:
        rows: lines of equally many cells; the first line is the head.
    """
    head, *body = [[each.replace("|", "\\|") for each in row] for row in rows]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def json_line(values: Mapping[str, object]) -> str:
    """Return values as one line of JSON, which has neither infinity nor NaN: null stands for them."""
    return json.dumps(_finite(values), ensure_ascii=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
