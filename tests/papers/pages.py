"""Parsing of docs/papers/: the rows and points of the papers, and the settings of their recipes."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deepspeed_nmt.cli import _parser
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.recipes import load_sweep, recipes
from deepspeed_nmt.recipes.reading import parse_yaml
from tests.docs.pages import ROOT

PAPERS = sorted(page for page in (ROOT / "docs" / "papers").glob("*.md") if page.name != "index.md")
ROWS, SETTINGS = "Every row and point", "Settings of the recipes"
"""Headings of the sections that are read."""
NOT_STATED = "not stated"
_POINT = re.compile(r"\$\(plan --sweep (\S+) --point (\d+|I)\)")
_RANGE = re.compile(r"points (\d+) to (\d+):")


@dataclass(frozen=True)
class Row:
    """A row of a table, or a curve of a figure; ``text`` is the cell of the commands."""

    page: str
    place: str
    name: str
    commands: tuple[str, ...]
    text: str

    def points(self) -> Iterator[tuple[str, int]]:
        """Yield (sweep, number) of each point that the commands train; I stands for those that the row names."""
        for sweep, number in _POINT.findall(self.text):
            if number == "I":
                named = _RANGE.search(self.name)
                assert named is not None, f"{self.page}, {self.place}: '{self.name}' must have 'points A to B:'"
                yield from ((sweep, each) for each in range(int(named[1]), int(named[2]) + 1))
            else:
                yield sweep, int(number)

    def runs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield (recipe, settings) of each run that the commands start."""
        for sweep, number in self.points():
            points = load_sweep(sweep)
            assert 1 <= number <= len(points), f"{self.name}: the sweep {sweep} has {len(points)} points"
            recipe, given = points[number - 1]
            yield recipe, tuple(given)
        for command in self.commands:
            if command.startswith("train ") and not _POINT.search(command):
                arguments = parsed(shlex.split(command))
                yield arguments.recipe, tuple(arguments.settings)


@dataclass(frozen=True)
class Setting:
    """A row of a table of settings: values of the paper and of the recipes that match the patterns."""

    key: str
    paper: Any
    here: Any
    patterns: tuple[str, ...]
    reason: str

    def names(self, recipe: str) -> bool:
        """Return True if the row is about a recipe."""
        return any(fnmatchcase(recipe, pattern) for pattern in self.patterns)


def parsed(words: list[str]) -> Any:
    """Parse a command line, completed by the options that the pages leave out."""
    more = {
        "train": ["--run", "RUN", "--data", "DATA"],
        "translate": ["--run", "RUN", "--input", "F", "--output", "F"],
        "average": ["--run", "RUN"],
        "report sweep": ["--runs", "DIR", "--data", "DATA"],
        "report depths": ["--run", "RUN", "--data", "DATA"],
    }
    missing = more[" ".join(words[:2]) if words[0] == "report" else words[0]]
    complete = [*words, *(missing[2:] if "--run" in words else missing)]
    arguments, rest = _parser(words[0]).parse_known_args(complete)
    assert all("=" in word and not word.startswith("-") for word in rest), f"{' '.join(words)}: {rest}"
    if rest:
        arguments.settings += rest
    return arguments


def rows() -> list[Row]:
    """Return the rows of all pages."""
    return [row for page in PAPERS for row in _rows(page)]


def settings(page: Path) -> list[Setting]:
    """Return the rows of a page's tables of settings, in order."""
    found = []
    for _, cells in _tables(page, SETTINGS):
        key, paper, here, names, reason = cells
        stated = paper if paper == NOT_STATED else parse_yaml(paper.replace("`", ""), page.name) if paper else None
        value = parse_yaml(here.replace("`", ""), page.name) if here else stated
        found.append(Setting(key.strip("`"), stated, value, tuple(re.findall(r"`([^`]+)`", names)), reason))
    return found


def recipes_of(page: Path) -> list[str]:
    """Return the recipes that a page's tables of settings name; rows of other pages may run them, too."""
    table = settings(page)
    return [recipe for recipe in recipes() if any(row.names(recipe) for row in table)]


def value_of(config: RunConfig, key: str) -> Any:
    """Return a resolved setting by its dotted key."""
    value: Any = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return value


def resolved(recipe: str, given: tuple[str, ...] = ()) -> RunConfig:
    """Return the settings of a run that a page names."""
    return load_config(recipe, settings=given).resolved()


def _rows(page: Path) -> Iterator[Row]:
    for place, cells in _tables(page, ROWS):
        if len(cells) != 3:  # a grid of results
            continue
        name, _, text = cells
        commands = tuple(
            each for each in re.findall(r"`([^`]+)`", text) if re.match(r"(train|translate|average|report) ", each)
        )
        yield Row(page.name, place, name, commands, text)


def _tables(page: Path, section: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, cells) of each row of the tables in a section."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    assert found is not None, f"{page.name} must have a section '{section}'"
    heading = ""
    lines = found[1].splitlines()
    for number, line in enumerate(lines):
        if line.startswith("### "):
            heading = line[4:]
        ruled = number + 1 < len(lines) and re.fullmatch(r"(\|\s*-+\s*)+\|", lines[number + 1].strip()) is not None
        if line.startswith("|") and not ruled and not re.fullmatch(r"[|\s-]+", line):
            yield heading, [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
