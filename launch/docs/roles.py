"""Cross-references of docstrings, such as :class:`~package.module.Name`, shown as code: `Name`."""

from __future__ import annotations

import re

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`]+)`")


class _Roles(Preprocessor):
    """Replaces roles line by line."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines without roles."""
        return [_ROLE.sub(_as_code, line) for line in lines]


def _as_code(found: re.Match[str]) -> str:
    """Return the name of a cross-reference as code; with a tilde only its last part."""
    short, name = found.groups()
    return f"`{name.split('.')[-1] if short else name}`"


class Roles(Extension):
    """Makes the preprocessor part of Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Register before all that looks at code spans and fences."""
        md.preprocessors.register(_Roles(md), "roles", priority=50)


def makeExtension(**settings: object) -> Roles:  # noqa: N802
    """Return the extension, by the name that Markdown looks for."""
    return Roles(**settings)
