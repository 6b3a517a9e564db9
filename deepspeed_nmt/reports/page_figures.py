"""Figures of a run's page by plotly: which series of the log belong together, and heat maps by layer.

Colours of text and background are added in the browser, which knows if the page is dark; so are the marks of events,
and the positions on another axis than updates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from plotly import graph_objects

from deepspeed_nmt.reports.run_log import CROSS_SHARE, PREFIX_RELIANCE, SOURCE_RELIANCE, Event, RunLog, shortened
from deepspeed_nmt.train.configuration import LOSSES
from deepspeed_nmt.train.log import label

_CORPUS = re.compile(r"data/(.+)/share|train/(.+)/nll")
_LAYER = re.compile(r"(.*?)(\d{1,9})$")
_RELIANCE = f"{SOURCE_RELIANCE}|{PREFIX_RELIANCE}"
_SHOWN_ELSEWHERE = re.compile(
    r"train/(ppl|target_tokens|skipped|spikes|rollbacks)|perf/hours|collapse/seconds|valid/(.*/)?(nll|ppl)"
    r"|data/.*/(epochs|target_tokens)|collapse/cross_share/.*|norm/.*"
)
"""Tags without a curve: another curve, a mark or a table says the same."""
_MAX_METRICS, _MAX_OTHERS, _MAX_MARKS, _MAX_COLUMNS = 24, 16, 150, 240
_WIDE = 50.0
"""Ratio of the largest value to the smallest above which an axis may be logarithmic."""
_NARROW = 0.5
"""Share of the largest value; if all values are above it, the axis does not begin at 0."""
_BLUE, _ORANGE, _RED, _GREEN, _GREY, _PURPLE = "#4269d0", "#d99a0b", "#e0593f", "#3ca951", "#8a919c", "#8a63d2"
_COLOURS = [_BLUE, _ORANGE, _RED, "#3ba99c", _GREEN, "#d96fa5", _PURPLE, "#7fa8e8", "#9c6b4e", _GREY]
_MARKS_AXIS = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}


class Mark(NamedTuple):
    """The look of a kind of event: plotly's symbol, a sign like it, and True for a line across."""

    words: str
    colour: str
    symbol: str
    sign: str
    line: bool = False


MARKS = {
    "skip": Mark("skipped update", _ORANGE, "triangle-down", "▼"),
    "spike": Mark("spike", _PURPLE, "triangle-up", "▲"),
    "rollback": Mark("rollback", _RED, "x", "✕", True),
    "growth": Mark("growth", _PURPLE, "cross", "✚", True),
    "collapse": Mark("warning of collapse", "#d0312d", "diamond", "◆", True),
    "failure": Mark("failure", "#d0312d", "square", "■", True),
    "resume": Mark("restart", _GREY, "circle", "●", True),
    "best": Mark("best validation", _GREEN, "star", "★"),
}


class Best(NamedTuple):
    """The best validation: updates before it, and tag and value that chose it, None if it is not known."""

    update: int
    tag: str
    value: float | None


@dataclass(frozen=True)
class Chart:
    """A figure of the page; the horizontal axis of a timeline is updates."""

    id: str
    title: str
    caption: str
    figure: graph_objects.Figure
    timeline: bool = True

    @property
    def specification(self) -> dict[str, Any]:
        """The figure for plotly.js."""
        return {"id": self.id, "timeline": self.timeline, **self.figure.to_plotly_json()}


def theme(ink: str, faint: str, lines: str, card: str) -> dict[str, Any]:
    """Return plotly's template of a page with colours of text, buttons, grids, and the ground of labels."""
    axis = {"gridcolor": lines, "zerolinecolor": lines, "linecolor": lines, "automargin": True, "title_font_size": 12}
    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "colorway": _COLOURS,
        "font": {"size": 12, "color": ink}, "hoverlabel": {"bgcolor": card, "bordercolor": lines, "align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom", "font_size": 11},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": faint, "activecolor": _BLUE}, "xaxis": axis, "yaxis": axis,
    }  # fmt: skip
    template: dict[str, Any] = graph_objects.layout.Template(layout=layout).to_plotly_json()
    return template


def words_of(tag: str) -> str:
    """Return the words for a tag: the corpus that it is of, those of the console, or its last part."""
    if match := _CORPUS.fullmatch(tag):
        return match[1] or match[2]
    return label(tag) or tag.rpartition("/")[2].replace("_", " ")


def plain(text: str) -> str:
    """Return a text for plotly, which reads some HTML and its own fields in texts."""
    return text.replace("<", "‹").replace(">", "›").replace("%{", "% {").replace("&", "＆")


def curves(log: RunLog, threshold: float) -> list[Chart]:
    """Return the charts of the log's curves; those without a value are left out.

    ``threshold`` is the source reliance of a collapsed decoder.
    """
    reliance = (
        "Rise of the loss, in nats per target token, when sources, or the target prefixes that the decoder reads, "
        f"are shuffled among sentences. With a source reliance below the dashed line ({threshold:g}) the decoder is "
        "a language model; with a prefix reliance near 0 it predicts each token from the source alone."
    )
    monitor = "On the monitor's slice of the validation set, with the true sources and prefixes, without dropout."
    waiting = "Waiting for data, padding and, for known GPUs, model FLOPs utilisation."
    mixture = "Share of each corpus in the target tokens."
    scales = "train/loss_scale" if {*log.series("train/loss_scale").finite.values()} - {1.0} else ""
    measures = dict.fromkeys(tag.rpartition("/")[2] for tag in _tags(log, "valid/.+"))
    per_token, draw = "nats per target token", partial(_curves, log)

    def metric(name: str) -> Chart | None:
        caption = "Of the translated validation sets." + (" Lower is better." if name == "ter" else "")
        return draw(f"metric-{name}", name, "", f"valid/(.*/)?{re.escape(name)}", caption)

    charts = [
        draw("loss", "Loss", per_token, "train/(loss|nll)|valid/(.*/)?loss", "In training and validation."),
        *map(metric, [name for name in measures if name not in LOSSES][:_MAX_METRICS]),
        draw("reliance", "Reliance on source and prefix", per_token, _RELIANCE, reliance, level=threshold),
        draw("slice-loss", "Loss on the monitor's slice", per_token, "collapse/nll", monitor),
        draw("rate", "Learning rate", "", "train/lr", "Of each update."),
        draw("norm", "Gradient norm", "", "train/grad_norm", "Before clipping.", log_scale=True),
        draw("speed", "Speed", "target tokens a second", "perf/target_tokens_per_s", "Over all ranks."),
        draw("memory", "Memory", "GiB", "perf/memory", "The largest peak of any rank."),
        draw("shares", "Use of time and of the device", "share", "perf/(goodput|mfu|data_wait|padding)", waiting),
        draw("loss-scale", "Loss scale", "", scales, "Dynamic loss scale of fp16.", log_scale=True),
        draw("mixture", "Mixture", "share of target tokens", "data/.*/share", mixture, stacked=True),
        draw("corpora", "Loss by corpus", per_token, "train/.+/nll", "Negative log-likelihood in training."),
    ]
    drawn = [chart for chart in charts if chart is not None]
    used = {"train/loss_scale", *(trace.meta for chart in drawn for trace in chart.figure.data)}
    others = [tag for tag in log.tags if tag not in used and not _SHOWN_ELSEWHERE.fullmatch(tag)]
    others = [tag for tag in others if log.series(tag).finite][:_MAX_OTHERS]
    rest = [draw(f"other-{n}", tag, "", re.escape(tag), "As logged under this tag.") for n, tag in enumerate(others)]
    return [chart for chart in [*drawn, *rest] if chart is not None]


def _tags(log: RunLog, pattern: str) -> list[str]:
    return [tag for tag in log.tags if re.fullmatch(pattern, tag)]


def _curves(
    log: RunLog, name: str, title: str, unit: str, pattern: str, caption: str, *,
    log_scale: bool = False, stacked: bool = False, level: float | None = None,
) -> Chart | None:  # fmt: skip
    """Return a chart with a line for each tag of a pattern that has a finite value; None if none has.

    Args:
        log_scale: True for a logarithmic axis, if the values differ much.
        stacked: True to draw each line on top of the ones before.
        level: value at which there is a dashed line, with a shade below; None for none.
    """
    tags = sorted(_tags(log, pattern), key=lambda tag: tag.count("/"))  # the main set before others
    series = {tag: log.series(tag) for tag in tags if log.series(tag).finite}
    stacked = stacked and len(series) > 1
    if not series:
        return None
    values = [value for of_tag in series.values() for value in of_tag.finite.values()]
    lowest, highest = min(values), max(values)
    axis: dict[str, Any] = {"title_text": unit}
    if log_scale and lowest > 0.0 and highest > _WIDE * lowest:
        axis |= {"type": "log", "dtick": 1}
    elif level is not None or 0.0 <= lowest < _NARROW * highest:  # others would look flat
        axis["rangemode"] = "tozero"
    figure = _figure(hovermode="x unified", showlegend=len(series) > 1, yaxis=axis, yaxis2=_MARKS_AXIS)
    for tag, of_tag in series.items():
        thin, words = of_tag.thinned(), plain(words_of(tag))
        figure.add_scatter(
            x=list(thin), y=[_rounded(value, 6) for value in thin.values()], name=words, meta=tag, line_width=1.8,
            mode="lines" if stacked or len(thin) > 25 else "lines+markers", marker_size=5,
            stackgroup="all" if stacked else None, hovertemplate=f"%{{y:.5g}}<extra>{words}</extra>",
        )  # fmt: skip
    if level is not None:
        figure.add_hline(y=level, line={"color": _RED, "dash": "dash", "width": 1.2})
        figure.add_hrect(y0=0, y1=level, fillcolor=_RED, opacity=0.12, line_width=0, layer="below")
    lost = sum(map(len, series.values())) - len(values)
    gaps = f" {lost:,} values are not finite and are gaps." if lost else ""
    return Chart(name, title, caption + gaps, figure)


def _figure(**layout: Any) -> graph_objects.Figure:
    layout = {"height": 250, "margin": {"l": 52, "r": 12, "t": 30 if layout["showlegend"] else 8, "b": 40}, **layout}
    return graph_objects.Figure(layout={"template": "none", **layout})


def _rounded(value: float | None, digits: int) -> float | None:
    """Return a value with some digits, for JSON; None if it is not finite."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def heat_maps(log: RunLog) -> list[Chart]:
    """Return the heat maps of values by layer: cross-attention's share, and norms where they are logged."""
    shares = (
        "Share of cross-attention in what each decoder layer adds to its state: |c| / (|a| + |c| + |f|), of "
        "self-attention, cross-attention and feed-forward network. Layers that stay dark do not read the source."
    )
    norms = "Logarithmic colours. A layer far from its neighbours, or one that changes at once, is worth a look."
    groups = list(dict.fromkeys(tag.split("/")[1] for tag in _tags(log, r"norm/[^/]+/.+")))[:_MAX_METRICS]
    charts = [
        _heat_map(log, "cross-share", "Cross-attention's share by decoder layer", CROSS_SHARE, shares),
        *(_heat_map(log, f"norm-{of}", f"Norm of the {of} by layer", f"norm/{of}/", norms) for of in groups),
    ]
    return [chart for chart in charts if chart is not None]


def _heat_map(log: RunLog, name: str, title: str, prefix: str, caption: str) -> Chart | None:
    """Return a heat map of the tags that begin with a prefix, layers in order from the bottom up; norms in log10."""
    rows = {tag.removeprefix(prefix): log.series(tag) for tag in log.tags if tag.startswith(prefix)}
    rows = {row: rows[row] for row in sorted(rows, key=_layer) if rows[row].finite}
    if not rows:
        return None
    updates = sorted({update for series in rows.values() for update in series})
    updates = updates[:: -(-len(updates) // _MAX_COLUMNS)]
    values = [[_rounded(series.get(update), 4) for update in updates] for series in rows.values()]
    names = [plain(f"{words} {number}" if number >= 0 else words) for words, number in map(_layer, rows)]
    height = max(240, min(900, 120 + 24 * len(names)))
    figure = _figure(hovermode="closest", showlegend=False, height=height, yaxis={"type": "category"})
    shown, scale, unit = values, {}, "log10"
    if prefix == CROSS_SHARE:
        top = max(max(series.finite.values()) for series in rows.values())
        scale, unit = {"zmin": 0, "zmax": top or 1.0}, "share"
    else:
        shown = [[math.log10(value) if value and value > 0.0 else None for value in row] for row in values]
    figure.add_heatmap(
        x=updates, y=names, z=shown, customdata=values, colorscale="Viridis", hoverongaps=False, **scale,
        colorbar={"thickness": 12, "title_side": "right", "title_text": unit},
        hovertemplate="%{y}, update %{x}: %{customdata:.4g}<extra></extra>",
    )  # fmt: skip
    return Chart(name, title, caption, figure)


def _layer(row: str) -> tuple[str, int]:
    """Return words and number of the row of a layer, by which rows are sorted; -1 without a number."""
    match = _LAYER.fullmatch(row)
    words = (match[1] if match else row).replace("_", " ").replace("/", " ").strip()
    return words, int(match[2]) if match else -1


def histogram(name: str, title: str, caption: str, values: Mapping[str, Sequence[float]], high: float) -> Chart:
    """Return a histogram of each list of values from 0, as shares; the last bin has all values from ``high`` on."""
    size = high / 25
    figure = _figure(
        hovermode="x unified", showlegend=len(values) > 1, barmode="overlay", xaxis={"title_text": title}
    )
    for (side, numbers), colour in zip(values.items(), (_BLUE, _ORANGE), strict=False):
        figure.add_histogram(
            x=[round(min(number, high - size / 2), 4) for number in numbers], name=side, marker_color=colour,
            xbins={"start": 0, "end": high, "size": size}, histnorm="probability", opacity=0.65,
            hovertemplate="%{x}: %{y:.1%}<extra>" + side + "</extra>",
        )  # fmt: skip
    figure.update_yaxes(title_text="share of sentences", tickformat=".0%")
    return Chart(name, title, caption, figure, timeline=False)


def marks(events: Sequence[Event], best: Best | None) -> list[dict[str, Any]]:
    """Return the marks on curves as plotly's traces, along the bottom, and lines across for some kinds.

    The mark of the best validation has the tag of the curve that it lies on, the only place of it, and its height.
    """
    points: dict[str, list[tuple[int, str]]] = {kind: [] for kind in MARKS}
    for event in events:
        if event.kind in points and event.kind != "best" and event.update is not None:
            words = f"update {event.update}: {shortened(event.text or event.kind, 110)}"
            points[event.kind].append((event.update, words))
    place: dict[str, Any] = {}
    if best is not None:
        words = "best validation"
        if best.value is not None and math.isfinite(best.value):
            words += f", {words_of(best.tag)} {best.value:.4g}"
            place = {"meta": best.tag, "customdata": [best.value]}
        points["best"] = [(best.update, words)]
    signs = list[Any]()
    for kind, all_points in points.items():
        if not all_points:
            continue
        look, shown = MARKS[kind], all_points[:: -(-len(all_points) // _MAX_MARKS)]
        updates, height = [update for update, _ in shown], 0.035 + 0.055 * len(signs)  # two of one update are seen
        sign = graph_objects.Scatter(
            x=updates, y=[height] * len(updates), yaxis="y2", mode="markers", name=look.words, showlegend=False,
            marker={"symbol": look.symbol, "color": look.colour, "size": 8, "line": {"width": 1, "color": "white"}},
            text=[plain(text) for _, text in shown], hovertemplate="%{text}<extra></extra>", cliponaxis=False,
            error_y={
                "type": "constant", "symmetric": False, "value": 1.0 - height, "valueminus": height, "width": 0,
                "color": look.colour, "thickness": 1.2, "visible": look.line,
            },
            **(place if kind == "best" else {}),
        )  # fmt: skip
        signs.append(sign.to_plotly_json())
    return signs
