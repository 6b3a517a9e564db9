"""Reading the README and the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(page: Path) -> str:
    """The text of a page, with the files that it includes."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r'^--8<-- "(.+)"$', lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), text, flags=re.M)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.M | re.S)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as code hosts and the site form them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), flags=re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower().replace("`", ""))) for heading in headings}
