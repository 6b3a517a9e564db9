"""Figures of the pages come from records, and every benchmark starts under the driver."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from deepspeed_nmt import __version__
from tests.docs.pages import prose
from tests.support import ROOT

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def driver() -> Iterator[ModuleType]:
    """benchmarks/run.py, with its neighbours on the path, which this leaves as it was."""
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    sys.modules.pop("run", None)
    yield importlib.import_module("run")
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def records(driver: ModuleType) -> ModuleType:
    """benchmarks/records.py."""
    return sys.modules["records"]


def test_pages_are_current(records: ModuleType) -> None:
    for page in records.PAGES:
        text = page.read_text(encoding="utf-8")
        assert records.rewrite(text) == text, f"{page.name}: run `python benchmarks/run.py --write`"


def test_every_record_is_shown(records: ModuleType) -> None:
    marks = [mark for page in records.PAGES for mark in records.marked(page.read_text(encoding="utf-8"))]
    shown = {words.partition("; ")[0] for _, words, _ in marks}
    names = [str(path.relative_to(records.RESULTS))[:-5] for path in sorted(records.RESULTS.rglob("*.json"))]
    tables = {f"{name}/{table}" for name in names for table in records.read(records.RESULTS / f"{name}.json").tables}
    assert len(tables) > 40 and tables - shown == set()


def test_measured_figures_of_the_readme_are_marked(records: ModuleType) -> None:
    """Decimals and large numbers, outside of code and links, are results."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\([^)]*\)|`[^`\n]*`", "]", prose(records.MARK.sub("", page)))
    assert len(records.marked(page)) > 20
    assert re.findall(r"\d+[.,]\d+", text.replace(__version__, "").replace("Python 3.10", "")) == []
    assert not re.search(r"^<!-- figure", page, flags=re.M), "a line that begins with a comment is not Markdown"


def test_a_record_of_a_run_has_commit_machine_versions_and_load(records: ModuleType, tmp_path: Path) -> None:
    table = records.Table.of([{"name": "a|b", "speed": [1234.5, 0.5]}, {"name": "c"}], {"speed": "{:,.0f} ({:.2f})"})
    results = records.Results(tables={"speed": table}, rounds={"a": [[1, 2], [3]], "text": ["[x ]", "y"]})
    record = records.Record.of("some", results, command="run", load=0.0, settings={"rounds": 2}, seed=1)
    path = record.write(tmp_path)
    assert records.read(path) == record and record.commit and record.machine.cores and "torch" in record.versions
    assert table.markdown().splitlines()[2:] == ["| a/b | 1,234 (0.50) |", "| c |  |"]
    assert table.figure("c", "speed") == ""
    content = json.loads(path.read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="commit"):
        records.Record.model_validate({key: value for key, value in content.items() if key != "commit"})


def test_every_benchmark_starts(driver: ModuleType) -> None:
    """Each is imported, and its parser knows its options and those of the driver. Nothing runs."""
    files = {
        path.stem for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks/experiments").glob("*.py")]
    }
    tools = {"arms", "compare_gradients", "page_picture", "pictures", "records", "run", "timing"}
    assert set(driver.NAMES) == files - tools
    for name in driver.NAMES:
        parser = driver.parser_of(name, importlib.import_module(name))
        assert isinstance(parser, argparse.ArgumentParser) and "--replace" in parser.format_help()
        assert len(driver.described(name)) > 20


def test_a_record_is_not_replaced_by_chance(
    driver: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        driver.measure("step", ["--results", str(tmp_path)])
    assert "--replace" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        driver.measure("step", ["--results", str(tmp_path), "--as", "other", "--rounds", "0"])
    assert "--rounds" in capsys.readouterr().err
