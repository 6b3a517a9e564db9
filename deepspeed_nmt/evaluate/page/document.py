"""The page as one HTML file that needs nothing else: its texts, its figures and the library that draws them.

Everything that comes from a run is text, and is escaped as text: by the template, or as JSON that scripts read with
``JSON.parse`` and show with ``textContent``. A content security policy permits the two scripts of the page by their
hashes, and no request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from deepspeed_nmt.errors import check_installed
from deepspeed_nmt.evaluate.page.content import Content
from deepspeed_nmt.evaluate.page.events import Event, Events
from deepspeed_nmt.evaluate.page.figures import Figure, curves, distribution, heat_maps, plain
from deepspeed_nmt.evaluate.page.log import RunLog
from deepspeed_nmt.evaluate.page.texts import Sentence, TextSet, shortened
from deepspeed_nmt.evaluate.page.words import words_of

_FOLDER = Path(__file__).parent
_ON_CURVES = ("skip", "spike", "rollback", "collapse", "failure", "resume")
"""Kinds of events that are marked on curves."""
_MAX_MARKS, _MAX_EVENTS = 150, 400


def check_drawing() -> None:
    """Check that the library that draws is installed.

    Raises:
        ConfigError: if it is not.
    """
    check_installed("plotly", "report run", "pip install plotly")


def render(content: Content, log: RunLog, events: Events, texts: Sequence[TextSet]) -> bytes:
    """Return the page of a run.

    Args:
        content: the run in words.
        log: its log.
        events: its events.
        texts: translations of its validation sets.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    lines, layers = curves(log, content), heat_maps(log)
    spreads = {each.name: _distributions(number, each) for number, each in enumerate(texts)}
    figures = [*lines, *layers, *(figure for found in spreads.values() for figure in found)]
    drawer, script = _drawer(), (_FOLDER / "page.js").read_text(encoding="utf-8")
    environment = Environment(
        loader=FileSystemLoader(_FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    template = environment.get_template("page.html")
    page = template.render(
        content=content,
        policy=_policy(script, drawer),
        style=_Trusted((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=_Trusted(script),
        drawer=_compressed(drawer),
        curves=lines,
        layers=layers,
        texts=[(each, each.signs, spreads[each.name], [_shown(one) for one in each.worst]) for each in texts],
        events=events.events[-_MAX_EVENTS:],
        events_left_out=max(0, len(events.events) - _MAX_EVENTS),
        events_source=events.source,
        damaged=log.damaged,
        figures_json=_json([_specification(figure) for figure in figures]),
        marks_json=_json(_marks(events, content)),
        positions_json=_json(log.positions()),
        samples_json=_json([_samples(each) for each in texts]),
    )
    return page.encode("utf-8", errors="replace")


class _Trusted(str):
    """Text of the project itself, which the template does not escape."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def _json(value: object) -> _Trusted:
    """Return JSON for a script element: no character in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _Trusted(text)


def _policy(*scripts: str) -> str:
    """Return the content security policy: these scripts, styles and images of the page, and no request."""
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _drawer() -> str:
    """Return the source of plotly.js, as the package plotly brings it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@cache
def _compressed(text: str) -> str:
    """Return a text compressed, which is less than half as long; equal texts give equal results."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _specification(figure: Figure) -> Mapping[str, Any]:
    return {"id": figure.id, "data": figure.traces, "layout": figure.layout, "timeline": figure.timeline}


def _marks(events: Events, content: Content) -> list[dict[str, Any]]:
    """Return the marks on curves, by kind: at which updates, and words for each.

    The mark of the best validation has the tag of the curve that it lies on, and its height there.
    """
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for kind in _ON_CURVES:
        found = [event for event in events.of(kind) if event.update is not None]
        step = max(1, -(-len(found) // _MAX_MARKS))
        if found:
            by_kind[kind] = [(event.update or 0, _mark(event)) for event in found[::step]]
    if content.best is not None:
        value = "" if content.best.value is None else f", {words_of(content.best.tag)} {content.best.value:.4g}"
        by_kind["best"] = [(content.best.update, f"best validation{value}")]
    marks: list[dict[str, Any]] = [
        {"kind": kind, "updates": [update for update, _ in found], "texts": [plain(text) for _, text in found]}
        for kind, found in by_kind.items()
    ]
    best = content.best
    if best is not None and best.value is not None and math.isfinite(best.value):
        marks[-1] |= {"tag": best.tag, "values": [best.value]}
    return marks


def _mark(event: Event) -> str:
    words = event.text or event.kind
    return f"update {event.update}: {words if len(words) <= 110 else words[:110] + '...'}"


def _distributions(number: int, texts: TextSet) -> list[Figure]:
    """Return histograms of lengths and scores of the newest translations of a set."""
    newest = texts.newest
    if not newest:
        return []
    lengths = {
        "translations": [float(len(each.translation.split())) for each in newest],
        "references": [float(len(each.reference.split())) for each in newest],
    }
    most = sorted(lengths["references"])[int(0.99 * (len(newest) - 1))]
    which = f"update {texts.updates[-1]:,}, {len(newest):,} sentences of the set {texts.name}"
    return [
        distribution(
            f"lengths-{number}", "Lengths", f"Words of translations and of references; {which}.", "words", lengths,
            (0.0, max(10.0, 1.4 * most)),
        ),
        distribution(
            f"scores-{number}", "Scores of sentences", f"chrF of each sentence alone; {which}.", "chrF",
            {"chrF": [each.chrf for each in newest]}, (0.0, 100.0),
        ),
    ]  # fmt: skip


def _samples(texts: TextSet) -> Mapping[str, Any]:
    """Return the sample translations of a set."""
    return {
        "set": texts.name,
        "updates": texts.sampled,
        "sentences": [
            {
                "number": sample.number,
                "source": sample.source,
                "reference": sample.reference,
                "translations": [text for text, _ in sample.translations],
                "chrf": [round(chrf, 1) for _, chrf in sample.translations],
            }
            for sample in texts.samples()
        ],
    }


def _shown(sentence: Sentence) -> Sentence:
    """Return a sentence with texts of the length that the page shows."""
    return replace(
        sentence,
        source=shortened(sentence.source),
        reference=shortened(sentence.reference),
        translation=shortened(sentence.translation),
    )
