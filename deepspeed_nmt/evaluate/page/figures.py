"""Figures of the page: which series of the log belong together, and the specification of each for plotly.

A specification is plotly's JSON, traces and layout. Colours of text and background are those of the page, which adds
them in the browser; so are the marks of events, and the positions on another axis than updates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_nmt.evaluate.curves import SOURCE_RELIANCE
from deepspeed_nmt.evaluate.page.content import Content
from deepspeed_nmt.evaluate.page.log import RunLog, Series, finite, grid
from deepspeed_nmt.evaluate.page.words import METRIC_NAMES, words_of

Trace = dict[str, Any]
_LOSSES = ("loss", "nll", "ppl")
_LAYER = re.compile(r"(.*?)(\d+)$")
_SHOWN_ELSEWHERE = re.compile(
    r"train/(ppl|target_tokens|skipped|spikes|rollbacks)|perf/hours|collapse/seconds|valid/(.*/)?(nll|ppl)"
    r"|data/.*/(epochs|target_tokens)|collapse/cross_share/.*|norm/.*"
)
"""Tags without a curve: another curve, a mark or a table says the same."""
_MAX_OTHERS = 16
_WIDE = 50.0
"""Ratio of the largest value to the smallest above which an axis may be logarithmic."""
_NARROW = 0.5
"""Share of the largest value; if all values are above it, the axis does not begin at 0."""
_BLUE, _ORANGE, _RED = "#4269d0", "#d99a0b", "#e0593f"


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        id: identifier on the page.
        title: its title.
        caption: what it shows.
        words: its content in words, for readers who do not see it.
        traces: plotly's traces.
        layout: plotly's layout.
        timeline: True if its horizontal axis is updates.
        wide: True if it takes the width of the page.
    """

    id: str
    title: str
    caption: str
    words: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    timeline: bool = True
    wide: bool = False


def curves(log: RunLog, content: Content) -> list[Figure]:
    """Return the figures of the log's curves; those without a value are left out."""
    losses = _tags(log, r"train/(loss|nll)|valid/(.*/)?loss")
    drawn = [
        _curves(log, "loss", "Loss", "nats per target token", losses, "In training and on the validation sets."),
        *_metrics(log),
        _reliance(log, content),
        _slice_loss(log, content),
        _curves(log, "rate", "Learning rate", "", ["train/lr"], "Of each update."),
        _curves(log, "norm", "Gradient norm", "", ["train/grad_norm"], "Before clipping.", log_scale=True),
        _curves(log, "speed", "Speed", "target tokens a second", ["perf/target_tokens_per_s"], "Over all ranks."),
        _curves(log, "memory", "Memory", "GiB", ["perf/memory"], "The largest peak of any rank."),
        _curves(
            log, "shares", "Use of time and of the device", "share", ["perf/mfu", "perf/data_wait", "perf/padding"],
            "Waiting for data, padding and, for known GPUs, model FLOPs utilisation.",
        ),
        _loss_scale(log),
        *_mixtures(log),
    ]  # fmt: skip
    found = [figure for figure in drawn if figure is not None]
    used = {trace["meta"] for figure in found for trace in figure.traces}
    return [*found, *_others(log, used)]


def heat_maps(log: RunLog) -> list[Figure]:
    """Return the heat maps of values by layer: cross-attention's share, and norms where they are logged."""
    drawn = [
        _heat_map(
            log, "cross-share", "Cross-attention's share by decoder layer", "collapse/cross_share/",
            "Share of cross-attention in what each decoder layer adds to its state: |c| / (|a| + |c| + |f|), of "
            "self-attention, cross-attention and feed-forward network. Layers that stay dark do not read the source.",
        )
    ]  # fmt: skip
    groups = dict.fromkeys(tag.split("/")[1] for tag in log.tags if re.fullmatch(r"norm/[^/]+/.+", tag))
    for group in groups:
        title = f"Norm of the {group} by layer"
        caption = (
            "Logarithmic colours. A layer far from its neighbours, or one that changes at once, is worth a look."
        )
        drawn.append(_heat_map(log, f"norm-{group}", title, f"norm/{group}/", caption, log_scale=True))
    return [figure for figure in drawn if figure is not None]


def distribution(
    name: str, title: str, caption: str, axis: str, values: Mapping[str, Sequence[float]], bounds: tuple[float, float]
) -> Figure:
    """Return a histogram with the same bins for each list of values, as shares.

    Args:
        name: identifier on the page.
        title: its title.
        caption: what it shows.
        axis: title of the horizontal axis.
        values: by name; each list has values.
        bounds: of the bins; values beyond them are counted in the outermost bins.
    """
    bins = 25
    low, high = bounds
    width = (high - low) / bins or 1.0
    centres = [round(low + (number + 0.5) * width, 4) for number in range(bins)]
    traces: list[Trace] = []
    words = []
    for (label, each), colour in zip(values.items(), (_BLUE, _ORANGE), strict=False):
        counts = [0] * bins
        for value in each:
            counts[max(0, min(bins - 1, int((value - low) / width)))] += 1
        shares = [round(count / len(each), 5) for count in counts]
        hover = "%{x}: %{y:.1%}<extra>" + plain(label) + "</extra>"
        traces.append(
            {
                "type": "bar", "name": label, "x": centres, "y": shares, "width": width * 0.94, "opacity": 0.65,
                "marker": {"color": colour}, "hovertemplate": hover,
            }
        )  # fmt: skip
        words.append(f"{label}: median {sorted(each)[len(each) // 2]:.4g}")
    layout = {
        "barmode": "overlay",
        "showlegend": len(traces) > 1,
        "xaxis": {"title": {"text": axis}},
        "yaxis": {"title": {"text": "share of sentences"}, "tickformat": ".0%"},
    }
    return Figure(name, title, caption, "; ".join(words), traces, layout, timeline=False)


def _tags(log: RunLog, pattern: str) -> list[str]:
    return [tag for tag in log.tags if re.fullmatch(pattern, tag)]


def _curves(
    log: RunLog,
    name: str,
    title: str,
    unit: str,
    tags: Sequence[str],
    caption: str,
    *,
    log_scale: bool = False,
) -> Figure | None:
    """Return a figure with a line for each tag that has a finite value; None if none has."""
    series = {tag: log.series(tag) for tag in tags if log.series(tag).finite}
    if not series:
        return None
    lowest, highest = min(map(_smallest, series.values())), max(map(_largest, series.values()))
    log_scale = log_scale and lowest > 0.0 and highest > _WIDE * lowest
    axis: dict[str, Any] = {"title": {"text": unit}, "type": "log" if log_scale else "linear"}
    if log_scale:
        axis["dtick"] = 1
    elif 0.0 <= lowest < _NARROW * highest:  # otherwise a curve that is far from 0 would look flat
        axis["rangemode"] = "tozero"
    lost = sum(len(each) - len(each.finite) for each in series.values())
    gaps = f" {lost:,} values are not finite and are gaps." if lost else ""
    traces = [_line(tag, each) for tag, each in series.items()]
    layout = {"yaxis": axis, "showlegend": len(traces) > 1}
    return Figure(name, title, caption + gaps, _words(series), traces, layout)


def _largest(series: Series) -> float:
    return max(series.finite)


def _smallest(series: Series) -> float:
    return min(series.finite)


def _line(tag: str, series: Series) -> Trace:
    """Return the curve of a tag; few values have markers, too."""
    thin = series.thinned()
    few = len(thin) <= 25
    words = plain(words_of(tag))
    hover = "%{y:.5g}<extra>" + words + "</extra>"
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": words,
        "meta": tag,
        "x": thin.updates,
        "y": finite(thin.values),
        "line": {"width": 1.8},
        "marker": {"size": 5},
        "hovertemplate": hover,
    }


def plain(text: str) -> str:
    """Return a name for plotly, which reads some HTML and its own fields in texts."""
    return text.replace("<", "‹").replace(">", "›").replace("%{", "% {").replace("&", "＆")


def _words(series: Mapping[str, Series]) -> str:
    parts = []
    for tag, each in list(series.items())[:6]:
        values = each.finite
        parts.append(f"{words_of(tag)} from {values[0]:.4g} to {values[-1]:.4g}, at least {min(values):.4g}, at most "
                     f"{max(values):.4g}")  # fmt: skip
    return "; ".join(parts)


def _metrics(log: RunLog) -> Iterator[Figure | None]:
    """Yield a figure for each metric of translations, with a line for each validation set."""
    names = dict.fromkeys(tag.rpartition("/")[2] for tag in log.tags if tag.startswith("valid/"))
    for name in names:
        if name in _LOSSES:
            continue
        tags = [tag for tag in log.tags if tag.startswith("valid/") and tag.rpartition("/")[2] == name]
        tags.sort(key=lambda tag: tag.count("/"))  # the main set first
        title = "Tokenised BLEU" if name == "bleu_tokenised" else METRIC_NAMES.get(name, name)
        better = " Lower is better." if name == "ter" else ""
        yield _curves(log, f"metric-{name}", title, "", tags, f"Of the translated validation sets.{better}")


def _reliance(log: RunLog, content: Content) -> Figure | None:
    """Return source reliance with its threshold, the band below it shaded."""
    caption = (
        "Rise of the loss, in nats per target token, when sources are shuffled among sentences. Below the dashed "
        f"line ({content.threshold:g}) the decoder is a language model that ignores its source."
    )
    figure = _curves(log, "reliance", "Source reliance", "nats per target token", [SOURCE_RELIANCE], caption)
    if figure is None:
        return None
    band = {
        "type": "rect", "xref": "paper", "x0": 0, "x1": 1, "yref": "y", "y0": 0, "y1": content.threshold,
        "fillcolor": _RED, "opacity": 0.12, "line": {"width": 0}, "layer": "below",
    }  # fmt: skip
    edge = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": content.threshold, "y1": content.threshold,
        "line": {"color": _RED, "dash": "dash", "width": 1.2},
    }  # fmt: skip
    most = max(_largest(log.series(SOURCE_RELIANCE)), 3 * content.threshold, 0.1)
    least = min(0.0, _smallest(log.series(SOURCE_RELIANCE)))
    axis = {**figure.layout["yaxis"], "range": [least - 0.04 * most, 1.08 * most]}
    layout = {**figure.layout, "yaxis": axis, "shapes": [band, edge]}
    return replace(figure, layout=layout)


def _slice_loss(log: RunLog, content: Content) -> Figure | None:
    """Return the loss on the monitor's slice, with that of guessing as a line where it is near."""
    caption = "On the monitor's slice of the validation set, with the true sources and without dropout."
    guessing = content.guessing
    if guessing is not None:
        caption += f" Guessing has {guessing:.2f}."
    figure = _curves(
        log, "slice-loss", "Loss on the monitor's slice", "nats per target token", ["collapse/nll"], caption
    )
    if figure is None or guessing is None:
        return figure
    line = {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": guessing, "y1": guessing,
        "line": {"color": _RED, "dash": "dash", "width": 1.2},
    }  # fmt: skip
    most = max(guessing, _largest(log.series("collapse/nll")))
    axis = {**figure.layout["yaxis"], "range": [0.0, 1.08 * most]}
    return replace(figure, layout={**figure.layout, "yaxis": axis, "shapes": [line]})


def _loss_scale(log: RunLog) -> Figure | None:
    """Return the loss scale of fp16; None where it is always 1."""
    if set(log.series("train/loss_scale").finite) <= {1.0}:
        return None
    caption = "Dynamic loss scale of fp16."
    return _curves(log, "loss-scale", "Loss scale", "", ["train/loss_scale"], caption, log_scale=True)


def _mixtures(log: RunLog) -> Iterator[Figure | None]:
    """Yield shares and losses of the corpora of a mixture."""
    shares = _curves(
        log, "mixture", "Mixture", "share of target tokens", _tags(log, "data/.*/share"),
        "Share of each corpus in the target tokens.",
    )  # fmt: skip
    if shares is not None and len(shares.traces) > 1:
        stacked = [{**trace, "stackgroup": "shares", "mode": "lines"} for trace in shares.traces]
        shares = replace(shares, traces=stacked)
    yield shares
    caption = "Negative log-likelihood of each corpus in training."
    yield _curves(log, "corpora", "Loss by corpus", "nats per target token", _tags(log, "train/.+/nll"), caption)


def _others(log: RunLog, used: set[object]) -> list[Figure]:
    """Return a figure for each tag that no other figure shows, such as those of regularizers."""
    rest = [tag for tag in log.tags if tag not in used and not _SHOWN_ELSEWHERE.fullmatch(tag)]
    if set(log.series("train/loss_scale").finite) <= {1.0}:
        rest = [tag for tag in rest if tag != "train/loss_scale"]
    found = (
        _curves(log, f"other-{number}", tag, "", [tag], "As logged under this tag.")
        for number, tag in enumerate(rest)
    )
    return [figure for figure in found if figure is not None][:_MAX_OTHERS]


def _heat_map(
    log: RunLog, name: str, title: str, prefix: str, caption: str, *, log_scale: bool = False
) -> Figure | None:
    """Return a heat map of the tags that begin with a prefix, layers in order from the bottom up."""
    rows = {tag.removeprefix(prefix): log.series(tag) for tag in log.tags if tag.startswith(prefix)}
    rows = {row: rows[row] for row in sorted(rows, key=_layer_order) if rows[row].finite}
    if not rows:
        return None
    found = grid(rows)
    shown = found.values
    if log_scale:
        shown = [[math.log10(value) if value else None for value in row] for row in shown]
    names = [_row_name(row) for row in found.rows]
    trace: Trace = {
        "type": "heatmap",
        "x": found.updates,
        "y": names,
        "z": [[None if value is None else float(f"{value:.4g}") for value in row] for row in shown],
        "colorscale": "Viridis",
        "hoverongaps": False,
        "hovertemplate": "%{y}, update %{x}: %{customdata:.4g}<extra></extra>" if log_scale
        else "%{y}, update %{x}: %{z:.4g}<extra></extra>",
        "colorbar": {"thickness": 12, "title": {"text": "log10" if log_scale else "share", "side": "right"}},
    }  # fmt: skip
    if log_scale:
        trace["customdata"] = [[None if v is None else float(f"{v:.4g}") for v in row] for row in found.values]
    else:
        trace["zmin"] = 0
        trace["zmax"] = max(map(_largest, rows.values())) or 1.0
    height = max(240, min(900, 120 + 24 * len(names)))
    axis = {"type": "category", "title": {"text": ""}, "automargin": True}
    last = {row: series.finite[-1] for row, series in rows.items()}
    words = "; ".join(f"{_row_name(row)}: {value:.3g}" for row, value in list(last.items())[:60])
    layout = {"yaxis": axis, "height": height}
    return Figure(name, title, caption, f"last values: {words}", [trace], layout, wide=True)


def _layer_order(row: str) -> tuple[str, int]:
    found = _LAYER.fullmatch(row)
    return (found[1], int(found[2])) if found else (row, -1)


def _row_name(row: str) -> str:
    """Return the words for the row of a layer: ``layer_03`` is layer 3."""
    found = _LAYER.fullmatch(row)
    return (
        f"{found[1].replace('_', ' ').replace('/', ' ').strip()} {int(found[2])}" if found else row.replace("_", " ")
    )
