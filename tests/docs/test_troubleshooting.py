"""The messages that docs/troubleshooting.md explains are those of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support import ROOT

VARIES = "\0"


def texts(node: ast.AST) -> Iterator[str]:
    """Yield every string in a syntax tree, with ``VARIES`` for the replacement fields of f-strings and formats."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.sub(r"%(\.\d)?[sdgf]", VARIES, node.value)
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def messages() -> list[str]:
    """Return the first cells of the page's tables."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[0].removeprefix("| ").strip() for line in page.splitlines() if line.startswith("| `")]
    assert len(cells) > 50
    return [cell.strip("`").strip() for cell in cells]


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """All strings of the package, and the texts of the launch scripts."""
    found = [
        text
        for path in (ROOT / "deepspeed_nmt").rglob("*.py")
        for text in texts(ast.parse(path.read_text(encoding="utf-8")))
    ]
    return found + [path.read_text(encoding="utf-8") for path in (ROOT / "launch").glob("*.sh")]


def occurs(parts: list[str], text: str) -> bool:
    """Return True if ``text`` contains the parts in this order."""
    start = 0
    for part in parts:
        start = text.find(part, start)
        if start < 0:
            return False
        start += len(part)
    return True


@pytest.mark.parametrize("message", messages())
def test_message_is_one_of_the_program(message: str, sources: list[str]) -> None:
    parts = [part.strip() for part in message.split("...") if part.strip()]
    assert any(occurs(parts, text) for text in sources), f"no message of the program matches: {message}"
