"""Fenced blocks that are drawn while the site is built, so that a page loads no script from elsewhere.

`math` blocks become MathML. `mermaid` blocks become SVG; only flowcharts like those of this documentation are
supported:

    flowchart TD
        id["label<br>second line"] --> other["label"]
        other --> third
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from latex2mathml.converter import convert
from pymdownx.superfences import (
    SuperFencesException,
)  # other exceptions are swallowed, and the block is shown unchanged

_STATEMENT = re.compile(r'(\w+)(?:\["([^"]*)"\])?')
_CHARACTER, _LINE, _PADDING = 8, 17, 12  # pixels, at a font size of 13
_BETWEEN_RANKS, _BETWEEN_BOXES = 34, 22


def math(source: str, language: str, css_class: str, options: Mapping[str, Any], md: object, **_: Any) -> str:
    """Convert a block of LaTeX to MathML.

    Raises:
        SuperFencesException: If a command or an environment is not supported.
    """
    drawn = convert(source, display="block")
    if "\\" in drawn or "<mi>&</mi>" in drawn:
        raise SuperFencesException(f"an equation must be of LaTeX that latex2mathml converts, but is: {source}")
    return f'<div class="{css_class}">{drawn}</div>'


def diagram(source: str, language: str, css_class: str, options: Mapping[str, Any], md: object, **_: Any) -> str:
    """Draw a Mermaid flowchart as SVG.

    Raises:
        SuperFencesException: If a line is not supported.
    """
    first, *lines = [line.strip() for line in source.splitlines() if line.strip()]
    direction = re.fullmatch(r"flowchart (TD|LR)", first)
    if direction is None:
        raise SuperFencesException(
            f"a diagram must begin with `flowchart TD` or `flowchart LR`, but begins with `{first}`"
        )
    labels: dict[str, list[str]] = {}
    edges: list[tuple[str, str]] = []
    for line in lines:
        chain = [_box(statement, labels) for statement in line.split(" --> ")]
        edges += itertools.pairwise(chain)
    return _draw(labels, edges, down=direction[1] == "TD", css_class=css_class)


def _box(statement: str, labels: dict[str, list[str]]) -> str:
    found = _STATEMENT.fullmatch(statement.strip())
    if found is None:
        raise SuperFencesException(f'a box must look like `name` or `name["label"]`, but is `{statement}`')
    name, label = found.groups()
    if label is not None or name not in labels:
        labels[name] = (label or name).split("<br>")
    return name


def _ranks(names: list[str], edges: list[tuple[str, str]]) -> dict[str, int]:
    """Return the longest path to each box. A box without a predecessor stands just before its first successor."""
    ranks = dict.fromkeys(names, 0)
    for _ in names:
        for source, target in edges:
            ranks[target] = max(ranks[target], ranks[source] + 1)
    if any(ranks[source] >= ranks[target] for source, target in edges):
        raise SuperFencesException("a diagram must have no cycle")
    for name in names:
        following = [ranks[target] for source, target in edges if source == name]
        if following and all(target != name for _, target in edges):
            ranks[name] = min(following) - 1
    return ranks


def _draw(labels: dict[str, list[str]], edges: list[tuple[str, str]], down: bool, css_class: str) -> str:
    ranks = _ranks(list(labels), edges)
    width = max(len(line) for lines in labels.values() for line in lines) * _CHARACTER + 2 * _PADDING
    height = max(len(lines) for lines in labels.values()) * _LINE + _PADDING
    along, across = (height, width) if down else (width, height)
    widest = max(list(ranks.values()).count(rank) for rank in ranks.values())
    breadth = widest * (across + _BETWEEN_BOXES) - _BETWEEN_BOXES
    centers: dict[str, tuple[float, float]] = {}
    for rank in range(max(ranks.values()) + 1):
        row = [name for name in labels if ranks[name] == rank]
        start = (breadth - len(row) * (across + _BETWEEN_BOXES) + _BETWEEN_BOXES + across) / 2
        for number, name in enumerate(row):
            place = (rank * (along + _BETWEEN_RANKS) + along / 2, start + number * (across + _BETWEEN_BOXES))
            centers[name] = (place[1], place[0]) if down else place
    length = (max(ranks.values()) + 1) * (along + _BETWEEN_RANKS) - _BETWEEN_RANKS
    size = (breadth, length) if down else (length, breadth)
    drawn = [_arrow(centers[source], centers[target], along / 2, down) for source, target in edges]
    drawn += [_rectangle(centers[name], width, height, lines) for name, lines in labels.items()]
    return (
        f'<div class="{css_class}"><svg xmlns="http://www.w3.org/2000/svg" role="img" font-size="13" '
        f'viewBox="-2 -2 {size[0] + 4:.0f} {size[1] + 4:.0f}" style="max-width:{size[0] + 4:.0f}px;width:100%">'
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="currentColor"/></marker>{"".join(drawn)}</svg></div>'
    )


def _arrow(source: tuple[float, float], target: tuple[float, float], half: float, down: bool) -> str:
    (x0, y0), (x1, y1) = source, target
    if down:
        y0, y1 = y0 + half, y1 - half
        middle = f"{x0:.0f} {(y0 + y1) / 2:.0f} {x1:.0f} {(y0 + y1) / 2:.0f}"
    else:
        x0, x1 = x0 + half, x1 - half
        middle = f"{(x0 + x1) / 2:.0f} {y0:.0f} {(x0 + x1) / 2:.0f} {y1:.0f}"
    path = f"M{x0:.0f} {y0:.0f}C{middle} {x1:.0f} {y1:.0f}"
    return f'<path d="{path}" fill="none" stroke="currentColor" opacity=".6" marker-end="url(#head)"/>'


def _rectangle(center: tuple[float, float], width: float, height: float, lines: list[str]) -> str:
    x, y = center
    texts = "".join(
        f'<text x="{x:.0f}" y="{y + (number - (len(lines) - 1) / 2) * _LINE:.0f}" fill="currentColor" '
        f'text-anchor="middle" dominant-baseline="central" font-weight="{400 if number else 700}">'
        f"{escape(line)}</text>"
        for number, line in enumerate(lines)
    )
    return (
        f'<rect x="{x - width / 2:.0f}" y="{y - height / 2:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5" '
        f'fill="var(--md-default-bg-color, white)" stroke="currentColor"/>{texts}'
    )
