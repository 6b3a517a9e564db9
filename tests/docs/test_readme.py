"""The README and the pages of docs/ agree with the program: commands, recipes, links, files, tags and figures."""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_nmt import cli
from deepspeed_nmt.cli import module_of
from deepspeed_nmt.config import load_config
from deepspeed_nmt.evaluate.metrics import METRICS
from deepspeed_nmt.recipes import recipes, sweeps
from deepspeed_nmt.run.validation_sets import given_sets
from tests.docs.pages import PAGES, anchors, blocks, prose
from tests.support import ROOT
from tests.test_architecture import MAY_IMPORT

README = ROOT / "README.md"
SCRIPTS = {f"{command}.sbatch": command for command in ("train", "prepare", "translate", "doctor")}
STARTERS = ("launch/local.sh", "launch/multinode.sh")
SETTING = re.compile(r"[\w.]+=")


def statements(block: str) -> Iterator[list[str]]:
    """Yield the commands of a block of bash, those in $(...) first."""
    for line in block.replace("\\\n", " ").splitlines():
        inner = re.findall(r"\$\((.+?)\)", line)
        for text in [*inner, re.sub(r"\$\(.+?\)", "", line)]:
            words = shlex.split(text, comments=True)
            if words:
                yield words


def program_arguments(words: list[str]) -> list[str] | None:
    """Return the arguments of `deepspeed-nmt` in a command line; None if it runs another program."""
    if words[0] == "deepspeed-nmt":
        return words[1:]
    for before, word in itertools.pairwise(words):  # python -m, srun, deepspeed --module, torchrun -m --
        if word == "deepspeed_nmt" and before in ("-m", "--module", "--"):
            return words[words.index(word) + 1 :]
    if words[0].removeprefix("./") in STARTERS:
        return ["train", *words[words.index("--") + 1 :]]
    for script, command in SCRIPTS.items():
        if f"launch/{script}" in words:
            return [command, *words[words.index(f"launch/{script}") + 1 :]]
    return None


COMMANDS = [
    pytest.param(arguments, id=f"{page.stem}: {' '.join(arguments)[:60]}")
    for page in PAGES
    for block in blocks(page.read_text(encoding="utf-8"), "bash")
    for words in statements(block)
    if (arguments := program_arguments(words)) is not None
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_command_is_valid(arguments: list[str]) -> None:
    """A command line of the pages can be parsed, and its configuration can be built. Nothing runs."""
    name, *rest = arguments
    parser = argparse.ArgumentParser()
    module_of(name).add_arguments(parser)
    parsed, more = parser.parse_known_args(rest)
    settings = [*getattr(parsed, "settings", []), *more]
    assert all(SETTING.match(word) for word in settings), settings
    if getattr(parsed, "sweep", None) is not None:
        assert parsed.sweep in sweeps()
    if getattr(parsed, "recipe", None) not in (None, "R"):
        sets = {"validation": {"sets": given_sets(getattr(parsed, "valid", []))}}
        load_config(parsed.recipe, settings=settings, options=sets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_imported_names_links_and_named_files_exist(page: Path) -> None:
    """Blocks of Python compile. Paths in code spans are relative to the repository or to the package."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(text, "python"):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed_nmt"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not link.startswith(("http://", "https://")):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link
    for name in re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|sh|sbatch|md|txt|yaml|json|toml))`", prose(text)):
        if not name.isupper() and name.split("/")[0] not in ("RUN", "DATA", "tensorboard"):
            assert (ROOT / name).exists() or (ROOT / "deepspeed_nmt" / name).exists(), name
    for script in re.findall(r"\blaunch/[\w/]+\.(?:sh|sbatch)\b", text):
        assert (ROOT / script).is_file(), script


def test_every_recipe_and_sweep_is_documented() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in [*recipes(), *sweeps()] if f"`{name}`" not in text] == []


def test_every_tag_is_documented() -> None:
    """Tags are string literals of the program, except those that a part, a metric or a layer number completes."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z]+/[\w/]+)`", page, flags=re.M))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "deepspeed_nmt").rglob("*.py"))
    used = set(re.findall(r'"((?:train|valid|perf|collapse)/[a-z_]+)"', sources))
    assert len(used) > 15
    assert used - documented == set()
    varying = {"train/divergence", "train/ald", "train/guided_alignment", "train/length", "train/mean_exit_nll"}
    varying |= {"collapse/cross_share/layer_NN", "valid/SET/loss"}
    metrics = {f"valid/{name}" for name in (*METRICS, "loss", "nll", "ppl")}
    assert metrics <= documented
    varying |= {"valid/NAME", "valid/samples", "train/CORPUS/nll", "data/CORPUS/share", "data/CORPUS/epochs"}
    varying |= {"norm/gradient/PART", "norm/update/PART", "attention/sentence_N"}
    assert documented - used - varying - metrics - {"train/loss", "train/nll", "train/ppl"} == set()


def test_the_diagram_of_packages_has_the_allowed_imports() -> None:
    """An arrow leads from a package to one that it may import; arrows implied by others are left out."""
    diagram = blocks((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"), "mermaid")[1]
    arrows = [
        pair
        for line in diagram.splitlines()[1:]
        for pair in itertools.pairwise(line.strip().split(" --> "))
        if pair[0] in MAY_IMPORT
    ]
    related = {name for importer, allowed in MAY_IMPORT.items() for name in (importer, *allowed) if allowed}
    assert {name for pair in arrows for name in pair} == related
    assert [(importer, imported) for importer, imported in arrows if imported not in MAY_IMPORT[importer]] == []


def options(name: str) -> dict[str, set[str]]:
    """Return the long options of a command, or of each of its subcommands."""
    parser = argparse.ArgumentParser(add_help=False)
    module_of(name).add_arguments(parser)
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    parsers = {f"{name} {kind}": each for kind, each in kinds[0].choices.items()} if kinds else {name: parser}
    return {
        each: {word for action in parser._actions for word in action.option_strings if word.startswith("--")}
        - {"--help"}
        for each, parser in parsers.items()
    }


def test_every_option_is_documented() -> None:
    """docs/commands.md has a table of all commands, and the section of a command names exactly its options."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `([a-z -]+)`\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S)
    named = {name: set(re.findall(r"--[a-z][a-z-]*", prose(text))) for name, text in sections}
    known = {kind: found for name in cli.COMMANDS for kind, found in options(name).items()}
    assert named == known
    rows = re.findall(r"^\| \[`([a-z -]+)`\]\(#([a-z-]+)\) \|", page, flags=re.M)
    assert sorted(rows) == sorted((name, name.replace(" ", "-")) for name in known), "the table of commands"


@pytest.mark.parametrize("name", ["fairseq", "marian"])
def test_the_tables_for_other_programs_name_settings_and_options(name: str) -> None:
    """Right-hand cells name settings and options of this program."""
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    cells = [line.split(" | ", maxsplit=1)[1] for line in page.splitlines() if line.startswith("| `")]
    named = " ".join(word for cell in cells for word in re.findall(r"`([^`]+)`", cell) if "/" not in word)
    settings = set(re.findall(r"\b([a-z_]+(?:\.[a-z0-9_]+)+)\b", named))
    reference = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `([a-z0-9_.]+)`", reference, flags=re.M))
    assert len(settings) > 20 and settings - known == set()
    given = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", named))
    every = set().union(*(found for command in cli.COMMANDS for found in options(command).values()))
    assert len(given) > 15 and given - every == set()


@pytest.mark.parametrize(("name", "table"), [("recipes", "recipe_table"), ("commands", "option_tables")])
def test_tables_are_up_to_date(name: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "launch" / "docs")
    tables = importlib.import_module("tables")
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert tables.with_table(page, getattr(tables, table)()) == page, "run `python launch/docs/tables.py`"


@pytest.mark.long
def test_the_plans_of_a_large_model_are_up_to_date() -> None:
    """Compute the plans in a process without Triton's interpreter, which allocates differently."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "launch" / "docs")])
    command = [sys.executable, "-c", "import tables; print(tables.plan_table())"]
    table = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert table in page, "run `python launch/docs/tables.py`"


def test_excerpts_are_in_the_files_that_they_name() -> None:
    """Each block of Python in the page is preceded by a link to a file that contains all lines of the block.

    `...` stands for code that the page leaves out.
    """
    page = ROOT / "docs" / "add-a-method.md"
    before, excerpts = "", 0
    for part in re.split(r"(^```python\n.*?^```$)", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        if not part.startswith("```python"):
            before = part
            continue
        name = re.findall(r"\]\(([^)]+\.py)\)", before)[-1]
        lines = (page.parent / name).read_text(encoding="utf-8").splitlines()
        shown = [line.removesuffix(" ...") for line in part.splitlines()[1:-1] if line.strip() not in ("", "...")]
        assert [line for line in shown if line not in lines] == [], name
        excerpts += 1
    assert excerpts > 4
