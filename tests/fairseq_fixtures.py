"""Fixtures that fairseq 0.12.2 (post, pre) and 0.10.2 (old) have written: tests/fixtures/fairseq/make.py."""

from __future__ import annotations

from pathlib import Path

from tests.support import ROOT

FIXTURES = ROOT / "tests" / "fixtures" / "fairseq"
KINDS = ("post", "pre", "old")


def words(kind: str, *more: str, origin: Path | None = None) -> list[str]:
    """Return a command line that imports from a fixture."""
    path = FIXTURES / kind
    given = [] if origin is None else ["--from", str(origin)]
    return ["import-fairseq", "--data-bin", str(path / "data-bin"), *given, *more]


def text_of(kind: str, name: str) -> list[str]:
    """Return the lines that a fixture's text was binarised from."""
    return (FIXTURES / kind / "data-bin" / name).read_text("utf-8").split("\n")[:-1]
