"""Parsing of the README and the pages of docs/."""

from __future__ import annotations

import re

from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


INCLUDE = re.compile(r'^--8<-- "(.+)"$', flags=re.M)
"""A line of a page that the site replaces by a file."""


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts form them, without those of included files."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), flags=re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", plain))
        number = sum(each == anchor or re.fullmatch(re.escape(anchor) + r"-\d+", each) is not None for each in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found
