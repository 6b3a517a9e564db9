"""The site builds without a warning, and its pages load nothing from other hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.chromium import chromium, find_chromium
from tests.support import ROOT

if importlib.util.find_spec("zensical") is None:
    pytest.skip("needs requirements/docs.txt, which launch/test.sh installs", allow_module_level=True)

SITE = ROOT / "site"
LOADING = {"src", "srcset", "data", "poster"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "modulepreload", "manifest"}
SCRIPTED = {"mermaid", "glightbox"}
"""Classes of elements for which the theme's script loads a library from another host."""


class Loads(HTMLParser):
    """Collector of the addresses that a browser fetches when it shows a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses in the attributes of an element."""
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.found += [value for name, value in given.items() if name in LOADING]
        if tag == "link" and LOADING_LINKS & set(given.get("rel", "").split()):
            self.found.append(given["href"])
        self.found += styled(given.get("style", ""))
        self.found += [f"https://script-for-{name}" for name in SCRIPTED & set(given.get("class", "").split())]

    def handle_data(self, data: str) -> None:
        """Collect the addresses in the text of an element."""
        if self._in_style:
            self.found += styled(data)


def styled(css: str) -> list[str]:
    """Return the addresses that a style sheet loads."""
    return re.findall(r"""(?:url\(|@import )\s*["']?([^"')]+)""", css)


def foreign(addresses: list[str]) -> list[str]:
    """Return the addresses of other hosts."""
    return [address for address in addresses if re.match(r"(https?:)?//", address)]


@pytest.fixture(scope="module")
def site() -> Path:
    """The site, built by launch/docs.sh."""
    done = subprocess.run(
        [ROOT / "launch" / "docs.sh"],
        env={**os.environ, "VENV": sys.prefix, "SKIP_INSTALL": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


def pins(lock: str) -> dict[str, str]:
    """Return the versions that a lock installs under this Python."""
    lines = (ROOT / "requirements" / f"{lock}.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and line[0] not in "#-"]
    return {
        canonicalize_name(each.name): str(each.specifier).removeprefix("==")
        for each in found
        if each.marker is None or each.marker.evaluate()
    }


def test_lock_is_complete() -> None:
    """The requirements of the site are pinned by one of the locks, in versions that satisfy them."""
    locked = {**pins("common"), **pins("test"), **pins("docs")}
    for name in pins("docs"):
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                version = locked.get(canonicalize_name(needed.name), "none")
                assert version != "none" and needed.specifier.contains(version), f"{name} needs {needed}"


def test_every_page_is_built(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file(), page


def test_navigation_has_every_page_once() -> None:
    navigation = (
        (ROOT / "zensical.toml").read_text(encoding="utf-8").partition("nav = [")[2].partition("[project.")[0]
    )
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(re.findall(r'"([^"]+\.md)"', navigation)) == sorted(pages)


def test_a_warning_fails_the_build(tmp_path: Path) -> None:
    """Zensical only prints a warning of a docstring, also with --strict."""
    texts = {
        "docs/index.md": "# Home\n\n::: module\n",
        "module.py": 'def call():\n    """Call it.\n\n    Args:\n        gone: no parameter.\n    """\n',
        "zensical.toml": '[project]\nsite_name=""\n[project.plugins.mkdocstrings.handlers.python]\npaths = ["."]\n',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(ROOT / "launch" / "docs" / "strict.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "'gone' does not appear" in done.stderr, done.stdout + done.stderr


@pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")
def test_dark_mode_and_blocks_of_code_that_fit(site: Path) -> None:
    """Lines that are too long for a screen or a telephone wrap."""
    too_wide = (
        "[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1).length"
    )
    ground = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).reduce((sum, x) => sum + Number(x), 0)"
    with chromium() as page:
        for name in ("index", "tutorial", "launch", "directories"):
            for width, dark in ((1280, True), (420, False)):
                page.open(site / f"{name}.html", width, dark=dark)
                assert page(too_wide) == 0, f"{name} at {width} pixels"
                assert (page(ground) < 100) == dark
        assert page.requests == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        assert foreign(Loads(page.read_text(encoding="utf-8")).found) == [], page
    for sheet in site.rglob("*.css"):
        assert foreign(styled(sheet.read_text(encoding="utf-8"))) == [], sheet


def test_links_between_pages_are_valid(site: Path) -> None:
    """Links out of docs/ are replaced. All others lead to an existing file and to an element in it."""
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    names = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'<a\b[^>]*\bhref="([^"]*)"', text):
            if re.match(r"(https?:)?//|mailto:|data:", link) or page.name == "404.html":
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file() and target.is_relative_to(site), f"{page}: {link}"
            assert not anchor or target not in names or anchor in names[target], f"{page}: {link}"


def test_diagrams_and_equations_are_drawn(site: Path) -> None:
    assert "<svg" in (site / "architecture.html").read_text(encoding="utf-8").split('class="diagram"')[1][:200]
    equations = (ROOT / "docs" / "papers" / "deep-decoder.md").read_text(encoding="utf-8").count("```math")
    assert (site / "papers" / "deep-decoder.html").read_text(encoding="utf-8").count("<math") == equations > 2


def test_the_api_is_generated(site: Path) -> None:
    text = (site / "api" / "core.html").read_text(encoding="utf-8")
    assert 'id="deepspeed_nmt.core.objective.LossOutput"' in text
    assert not [page for page in (site / "api").glob("*.html") if ":class:" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("fence", "source"),
    [
        ("diagram", "graph LR\na --> b"),
        ("diagram", "flowchart LR\na -.-> b"),
        ("diagram", "flowchart LR\na --> b\nb --> a"),
        ("math", r"\nothing{x}"),
        ("math", r"\begin{aligned} a &= b \end{aligned}"),
    ],
)
def test_an_unsupported_block_is_refused(fence: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "launch" / "docs")
    fences = importlib.import_module("fences")
    with pytest.raises(fences.SuperFencesException, match="must"):
        getattr(fences, fence)(source, "", fence, {}, None)
