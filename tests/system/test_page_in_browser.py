"""The page of a run in a real browser: no errors, no requests, every figure has marks, and its controls work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from tests.chromium import Chromium, chromium, find_chromium
from tests.page_runs import HOSTILE, full_run

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason="needs Chromium (SYSTEM_EXTRA=chromium-headless-shell launch/test.sh --system installs it)",
)

DRAWN = "['yes', 'failed'].includes(document.documentElement.dataset.drawn)"
MARKS = ".js-line, .point path, .points path, .heatmaplayer image, .bars path"
WITHOUT_MARKS = f"""[...document.querySelectorAll('.plot')]
    .filter(plot => !plot.querySelector({MARKS!r})).map(plot => plot.dataset.figure)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a written run that has everything."""
    directory = tmp_path_factory.mktemp("page")
    out = directory / "page.html"
    assert main(["report", "run", str(full_run(directory / "run")), "--out", str(out)]) == 0
    return out


def open_page(browser: Chromium, page: Path, width: int = 1280, *, dark: bool = False) -> None:
    browser.problems.clear()
    browser.requests.clear()
    browser.open(page, width, dark=dark, until=DRAWN)


def check_page(browser: Chromium, figures: int) -> None:
    assert browser.problems == [] and browser.requests == []
    assert browser("document.documentElement.dataset.drawn") == "yes"
    assert browser(WITHOUT_MARKS) == [] and browser("document.querySelectorAll('.plot').length") >= figures
    assert browser("document.documentElement.scrollWidth <= window.innerWidth"), "nothing is cut off at the side"


def test_page_of_a_trained_run(browser: Chromium, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["report", "run", str(trained), "--out", str(out)]) == 0
    open_page(browser, out)
    check_page(browser, figures=8)
    assert "finished" in browser("document.querySelector('h1').innerText")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk", "phone"])
def test_page_with_everything(width: int, dark: bool, browser: Chromium, full_page: Path) -> None:
    open_page(browser, full_page, width, dark=dark)
    check_page(browser, figures=20)
    brightness = browser("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert brightness < 60 if dark else brightness > 200
    shown = browser("document.querySelector('.plot .xtick text').style.fill.match(/\\d+/g).map(Number)[0]")
    assert shown > 130 if dark else shown < 130, "figures follow the colours of the page"


def test_controls(browser: Chromium, full_page: Path) -> None:
    open_page(browser, full_page)
    loss = "document.querySelector('[data-figure=loss]')"
    last = f"{loss}.data[0].x.at(-1)"
    assert browser(last) == 200
    skips = f"{loss}.data.find(trace => trace.name === 'skipped update').x"
    assert browser(skips) == [31, 32]
    is_star = "trace => trace.name === 'best validation'"
    star = f"document.querySelector('[data-figure=metric-bleu]').data.find({is_star})"
    assert browser(f"[{star}.x[0], {star}.y[0], {star}.yaxis]") == [200, 30, "y"]
    assert browser(f"{loss}.data.every(trace => !({is_star})(trace))"), "the star is on no other curve"
    for axis, value in (("hours", 0.2), ("tokens", 140_000)):
        browser(f"document.querySelector('input[value={axis}]').click()")
        browser.wait(f"{DRAWN} && Math.abs({last} - {value}) < 1e-6 * {value}")
    assert browser(skips) == pytest.approx([700 * 31, 700 * 32])
    browser("document.getElementById('marks').click()")
    browser.wait(f"{DRAWN} && {loss}.data.length === 3")
    table = "document.querySelector('.samples')"
    rows = f"[...{table}.querySelectorAll('tbody tr:not([hidden])')].map(row => row.innerText)"
    assert len(browser(rows)) == 4 and all("ONE TWO THREE FOUR 0" in row for row in browser(rows))

    def choose(name: str, value: str) -> list[str]:
        choice = f"{table}.querySelector('select[name={name}]')"
        browser(f"{choice}.value = '{value}'; {choice}.dispatchEvent(new Event('change'))")
        return list(browser(rows))

    assert "ONE TWO THREE FOUR 0" not in choose("line", "30")[-1]
    choose("line", "")
    shown = choose("update", "200")
    assert len(shown) >= 16 and shown[-1].count(HOSTILE) == 2, "as reference and as translation"
    assert browser("document.querySelectorAll('img[src^=http], script[src]').length") == 0
    assert browser.problems == [] and browser.requests == []


def test_the_policy_stops_foreign_code_and_requests(browser: Chromium, full_page: Path, tmp_path: Path) -> None:
    """The check itself sees what a page must not do."""
    changed = tmp_path / "changed.html"
    foreign = "<script>window.foreign = 1</script><img src='http://127.0.0.1:9/x.png'></body>"
    changed.write_text(full_page.read_text(encoding="utf-8").replace("</body>", foreign), encoding="utf-8")
    open_page(browser, changed)
    assert browser("window.foreign") is None
    assert any("script-src" in problem for problem in browser.problems)
    assert any("img-src" in problem for problem in browser.problems)
