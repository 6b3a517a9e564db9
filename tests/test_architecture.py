"""Imports go one way: the parts of the package and their order are those of docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "deepspeed_nmt"
HELPERS = {
    *("errors", "registry", "console", "files", "manifest", "interruption", "randomness", "huggingface", "text"),
    "deep_shallow_score",
}
MAY_IMPORT = {
    "kernels": set(),
    "native": set(),
    "nn": {"kernels", "native"},
    "core": {"kernels", "native", "nn"},
    "search": {"kernels", "native", "nn", "core"},
    "methods": {"kernels", "native", "nn", "core", "search"},
    "data": {"core"},
    "parallel": {"kernels", "nn"},
    "engine": {"kernels", "nn", "core", "parallel"},
    "train": {"engine", "core", "data", "parallel", "evaluate"},
    "evaluate": set(),
    "export": {"core", "search", "data", "evaluate"},
    "doctor": {"kernels", "parallel"},
    "planning": {"kernels", "core", "data", "parallel", "engine"},
    "recipes": set(),
    "sample": set(),
}
PARTS = set(MAY_IMPORT)
COMPOSITION = {
    "plugins": PARTS,
    "config": PARTS | {"plugins"},
    "build": PARTS | {"config"},
    "run": PARTS | {"plugins", "config", "build"},
    "parity": PARTS | {"config", "build"},
    "api": PARTS | {"config", "build", "run"},
    "backtranslation": PARTS | {"config", "build", "run", "api"},
    "reports": PARTS | {"config", "build", "run", "api"},
    "cli": {"parallel"},
    "commands": PARTS | {"config", "build", "run", "parity", "api", "backtranslation", "reports", "cli"},
    "__main__": {"cli"},
    "__init__": {"api"},
}
"""Rooms that put the parts together, from the lowest to the highest."""
DISTRIBUTED = {"parallel", "doctor"}


def imports(source: str) -> Iterator[str]:
    """Yield every module that a source imports, at any level."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """Return the part of the package that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def wrong_imports(where: str, path: str, source: str) -> list[str]:
    """Return the forbidden imports of a file in the part ``where`` of the package."""
    found = []
    for name in imports(source):
        if name.split(".")[0] == "deepspeed" and path != "engine/deepspeed.py":
            found.append(f"{path} imports {name}; only engine/deepspeed.py may")
        if name.split(".")[0] == "transformers" and path != "huggingface.py":
            found.append(f"{path} imports {name}; only huggingface.py may")
        if name.split(".")[0] == "ctranslate2" and not path.startswith("export/ctranslate2_"):
            found.append(f"{path} imports {name}; only export/ctranslate2_*.py may")
        if name.split(".")[0] == "datatrove" and path != "data/cluster.py":
            found.append(f"{path} imports {name}; only data/cluster.py may")
        if name.startswith("torch.distributed") and where not in DISTRIBUTED:
            found.append(f"{path} imports {name}; only {DISTRIBUTED} may")
        target = part_of(name) if name.startswith("deepspeed_nmt.") else ""
        if not target or target == where or target in HELPERS | {"__version__"}:
            continue
        allowed = {**MAY_IMPORT, **COMPOSITION}.get(where, set())
        if target not in allowed:
            found.append(f"{path} imports {name}; {where} may import {sorted(allowed) or 'no part'}")
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


def test_imports_are_allowed_and_only_methods_refer_to_a_method() -> None:
    for path in FILES:
        relative, source = path.relative_to(PACKAGE), path.read_text(encoding="utf-8")
        where = relative.parts[0].removesuffix(".py")
        assert not wrong_imports(where, str(relative), source)
        assert where == "methods" or not references_to_methods(str(relative), source)


def imported_names(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, imported name or "") of each import, also in functions and for types only.

    A package's ``__getattr__`` is left out: it imports for users of the package.
    """
    if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield from ((node.module, alias.name) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child)


def module_name(path: Path) -> str:
    """Return the name by which a file of the package is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def import_cycle(sources: Mapping[str, str]) -> list[str]:
    """Return an import cycle of sources by module, with the first module repeated at its end; empty without one."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        named = imported_names(ast.parse(source))
        # `from package import name` imports a module of the package or reads a name of its __init__.
        found = (f"{parent}.{child}" if f"{parent}.{child}" in sources else parent for parent, child in named)
        graph[name] = {module for module in found if module in sources}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_there_is_no_import_cycle() -> None:
    assert import_cycle({module_name(path): path.read_text(encoding="utf-8") for path in FILES}) == []


def test_the_check_finds_an_import_cycle() -> None:
    lazy = "def __getattr__(name):\n    from p.a import A"
    sources = {"p": lazy, "p.a": "import p.b", "p.b": "def f():\n    from p import c", "p.c": ""}
    assert import_cycle(sources) == []
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import A"
    cycle = import_cycle({**sources, "p.c": types})
    assert cycle[0] == cycle[-1] and set(cycle) == {"p.a", "p.b", "p.c"}
    assert import_cycle({**sources, "p.a": "from p import A", "p": "from p.a import A"})


def test_only_commands_read_a_namespace_of_arguments() -> None:
    """Other parts get values; files of fairseq have namespaces of their own."""
    own = {"cli.py", "run/importing_fairseq.py"}
    readers = {str(path.relative_to(PACKAGE)) for path in FILES if "Namespace" in path.read_text(encoding="utf-8")}
    assert {path for path in readers if not path.startswith("commands/")} <= own


def test_every_part_is_known() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    assert parts - HELPERS - set(COMPOSITION) == PARTS


def references_to_methods(path: str, source: str) -> list[str]:
    """Return the references to concrete methods in a file outside methods/: its imports, and names in strings."""
    imported = [name for name in imports(source) if name.startswith("deepspeed_nmt.methods.")]
    names = [name for name in imported if name.removeprefix("deepspeed_nmt.methods.") not in EXPORTED]
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    # Docstrings of several lines may name a method as an example.
    words = {value for value in constants if isinstance(value, str) and "\n" not in value}
    spelt = [name for name in OWN_NAMES if any(name in word for word in words)]
    return [f"{path} refers to {name}" for name in [*names, *spelt]]


EXPORTED = {"MODELS", "LAYERS", "LIKELIHOODS", "REGULARIZERS", "self_tests", "collapse_remedies"}
OWN_NAMES = (
    *("depth_growing", "cross_attention_drop", "recurrent", "closed_chain", "abnet", "drop_depth", "multi_softmax"),
    *(
        "objective.ddr",
        "objective.ald",
        "r_drop",
        "masked_tokens",
        "parallel_decoder",
        "transparent",
        "dlcl",
        "relative_positions",
    ),
)


@pytest.mark.parametrize(
    "source",
    [
        "from deepspeed_nmt.methods.abnet import AbNetConfig",
        "from deepspeed_nmt.methods import transformer",
        "x = name == 'depth_growing'",
        "raise ValueError(f'use objective.ddr.weight={x}')",
    ],
)
def test_the_check_finds_a_reference_to_a_method(source: str) -> None:
    assert references_to_methods("x.py", source)


@pytest.mark.parametrize(
    ("where", "path", "source"),
    [
        ("train", "train/x.py", "from deepspeed_nmt.methods import MODELS"),
        ("nn", "nn/x.py", "def f():\n    import deepspeed_nmt.core.batch"),
        ("engine", "engine/plain.py", "import deepspeed"),
        ("data", "data/x.py", "from transformers import BertModel"),
        ("export", "export/x.py", "from ctranslate2 import specs"),
        ("nn", "nn/x.py", "import torch.distributed as dist"),
        ("registry", "registry.py", "from deepspeed_nmt.core import batch"),
        ("config", "config.py", "from deepspeed_nmt.run.directory import Run"),
        ("run", "run/x.py", "from deepspeed_nmt.api import Translator"),
    ],
)
def test_the_check_finds_a_wrong_import(where: str, path: str, source: str) -> None:
    assert wrong_imports(where, path, source)


def test_files_of_the_package_have_different_names() -> None:
    names = [path.name for path in FILES if path.name != "__init__.py"]
    commands = {path.name for path in FILES if path.parent.name == "commands"}
    assert sorted({name for name in names if names.count(name) > 1} - commands) == []
