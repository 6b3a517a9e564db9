"""Imports go one way. The rooms and their order are those of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "deepspeed_nmt"
HELPERS = {"errors", "registry", "console", "files", "randomness", "hub"}
MAY_IMPORT = {
    "kernels": set(),
    "nn": {"kernels"},
    "core": {"kernels", "nn"},
    "search": {"kernels", "nn", "core"},
    "methods": {"kernels", "nn", "core", "search"},
    "data": {"core"},
    "parallel": {"kernels", "nn"},
    "engine": {"kernels", "core", "parallel"},
    "train": {"engine", "core", "data", "parallel"},
    "evaluate": set(),
    "planning": {"core"},
    "sample": set(),
}
COMPOSITION = {"cli", "commands", "config", "inherit", "parity", "runs", "selftest", "__main__"}
DISTRIBUTED = {"parallel"}


def imports(source: str) -> Iterator[str]:
    """Every module a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    """The room of a module of the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def wrong_arrows(where: str, path: str, source: str) -> list[str]:
    """What a file of the room ``where`` imports and must not."""
    found = []
    for name in imports(source):
        if name.split(".")[0] == "deepspeed" and path != "engine/deepspeed.py":
            found.append(f"{path} imports {name}; only engine/deepspeed.py may")
        if name.split(".")[0] == "transformers" and path != "hub.py":
            found.append(f"{path} imports {name}; only hub.py may")
        if name.startswith("torch.distributed") and where not in DISTRIBUTED:
            found.append(f"{path} imports {name}; only {DISTRIBUTED} may")
        target = room(name) if name.startswith("deepspeed_nmt.") else ""
        if not target or target == where or target in HELPERS | {"__version__"} or where in COMPOSITION:
            continue
        if target not in MAY_IMPORT.get(where, set()):
            found.append(f"{path} imports {name}; {where} may import {MAY_IMPORT.get(where, set()) or 'no room'}")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_wrong_arrow(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    where = relative.parts[0].removesuffix(".py")
    assert not wrong_arrows(where, str(relative), path.read_text(encoding="utf-8"))


def test_every_room_is_known() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert rooms - HELPERS - COMPOSITION - {"__init__"} == set(MAY_IMPORT)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    assert not [path.name for path in FILES if len(path.read_text(encoding="utf-8").split("\n")) > 401]


@pytest.mark.parametrize(
    ("where", "path", "source"),
    [
        ("train", "train/x.py", "from deepspeed_nmt.methods import MODELS"),
        ("nn", "nn/x.py", "def f():\n    import deepspeed_nmt.core.batch"),
        ("engine", "engine/plain.py", "import deepspeed"),
        ("data", "data/x.py", "from transformers import BertModel"),
        ("nn", "nn/x.py", "import torch.distributed as dist"),
        ("registry", "registry.py", "from deepspeed_nmt.core import batch"),
    ],
)
def test_the_check_sees_a_wrong_arrow(where: str, path: str, source: str) -> None:
    assert wrong_arrows(where, path, source)
