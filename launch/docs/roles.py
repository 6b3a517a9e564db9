"""Markdown extension for docstrings and links.

Cross-references such as :class:`~package.module.Name` become code: `Name`. Links out of docs/ work only on a code
host. On the site, links to the measurements lead to their page, and other links are replaced by their text.
"""

from __future__ import annotations

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`]+)`")
_MEASUREMENTS = re.compile(r"\]\(\.\./((?:\.\./)*)benchmarks/RESULTS\.md(#[^)]*)?\)")
_OUTSIDE = re.compile(
    r"\[([^]]+)\]\((?:\.\./)+(?:(?:benchmarks|deepspeed_nmt|ds_configs|launch|requirements|tests)/|[A-Z]+\.md)[^)]*\)"
)


class _Roles(Preprocessor):
    """Preprocessor that replaces roles and links line by line."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines without roles and without links out of docs/."""
        return [_shown(line) for line in lines]


def _shown(line: str) -> str:
    line = _ROLE.sub(_as_code, line)
    line = _MEASUREMENTS.sub(lambda found: f"]({found[1]}results.md{found[2] or ''})", line)
    return _OUTSIDE.sub(r"\1", line)


def _as_code(found: re.Match[str]) -> str:
    """Return the name of a cross-reference as code; with a tilde only its last part."""
    short, name = found.groups()
    return f"`{name.split('.')[-1] if short else name}`"


class Roles(Extension):
    """Markdown extension that registers the preprocessor."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register the preprocessor before those of code spans and fences."""
        md.preprocessors.register(_Roles(md), "roles", priority=50)


def makeExtension(**settings: object) -> Roles:  # noqa: N802
    """Return the extension, by the name that Markdown looks for."""
    return Roles(**settings)
