"""The page of a run: what is gathered, from whole and from damaged files, and that nothing of a run is code."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.page.document import check_drawing, render
from deepspeed_nmt.evaluate.page.events import read_events
from deepspeed_nmt.evaluate.page.figures import Figure, curves, heat_maps
from deepspeed_nmt.evaluate.page.log import RunLog, Series, grid
from deepspeed_nmt.evaluate.page.texts import read_texts
from deepspeed_nmt.evaluate.page.words import words_of
from deepspeed_nmt.run.page import RunPage
from tests.page_runs import HOSTILE, append_log, full_run, write_events, write_run, write_texts

pytest.importorskip("plotly")


DATA = ("figures", "marks", "positions", "samples", "drawer")


class Parsed(HTMLParser):
    """Elements of a page: tags with attributes, and the text of each script by its id, or as the code of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.text = ""
        self._script = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = str(dict(attrs).get("id", "code"))
            self.scripts.setdefault(self._script, "")

    def handle_endtag(self, tag: str) -> None:
        self._script = "" if tag == "script" else self._script

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[self._script] += data
        else:
            self.text += data


def page_of(run: Path) -> Parsed:
    found = RunPage(run)
    return Parsed(render(found.content, found.log, found.events, found.texts).decode())


def figures_of(run: Path) -> dict[str, Figure]:
    found = RunPage(run)
    return {figure.id: figure for figure in [*curves(found.log, found.content), *heat_maps(found.log)]}


def test_thinned_series_keep_extremes_ends_and_gaps() -> None:
    values = [math.sin(number / 50) for number in range(30_000)]
    values[12_345], values[20_001], values[25_000] = 99.0, -99.0, math.nan
    thin = Series(list(range(30_000)), values).thinned()
    assert len(thin) <= 2100 and (thin.updates[0], thin.updates[-1]) == (0, 29_999)
    assert thin.values[thin.updates.index(12_345)] == 99.0 and thin.values[thin.updates.index(20_001)] == -99.0
    assert math.isnan(thin.values[thin.updates.index(25_000)]) and thin.updates == sorted(thin.updates)
    short = Series([1, 2], [3.0, 4.0])
    assert short.thinned() is short


def test_grid_joins_neighbours_by_their_means() -> None:
    rows = {"a": Series([10, 20, 30, 40], [1.0, 3.0, math.nan, 5.0]), "b": Series([20], [7.0])}
    joined = grid(rows, most=2)
    assert joined.updates == [10, 30] and joined.values == [[2.0, 5.0], [7.0, None]]
    assert grid(rows).values == [[1.0, 3.0, None, 5.0], [None, 7.0, None, None]]


def test_log_reads_what_is_not_damaged(tmp_path: Path) -> None:
    assert RunLog.read(tmp_path).tags == [] and RunLog.read(tmp_path).update == 0
    lines = [
        '{"update": 20, "train/loss": 2.0, "perf/hours": 0.2, "note": "text", "flag": true}',
        '{"update": 10, "train/loss": NaN, "perf/hours": 0.1}',
        '{"update": 20, "valid/loss": Infinity}',
        '{"update": 30, "train/loss": 1' + "0" * 400 + "}",
        '{"update": 30, "trai',
        "[]",
        '{"update": -1, "train/loss": 1}',
        '{"update": Infinity, "train/loss": 1}',
        "\ufffd\x00",
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    log = RunLog.read(tmp_path)
    assert log.damaged == 5 and log.update == 30 and set(log.tags) == {"train/loss", "perf/hours", "valid/loss"}
    assert log.series("train/loss").updates == [10, 20, 30] and log.series("train/loss").finite == [2.0]
    assert log.last("train/loss") is None and log.last("perf/hours") == 0.2
    assert log.positions() == {"hours_at": [0, 10.0, 20.0], "hours": [0.0, 0.1, 0.2]}


def test_events_are_read_by_their_contract(tmp_path: Path) -> None:
    lines = [
        '{"time": "2026-11-23T04:05:09+00:00", "update": 400, "event": "rollback", "text": "back", "to_update": 350}',
        '{"event": "skip"',
        "null",
        '{"event": 3, "update": 1}',
        '{"event": "skip", "update": "x", "text": ["a"], "time": 7}',
    ]
    (tmp_path / "events.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe")
    events = read_events(tmp_path)
    assert events.source == "events.jsonl" and [event.kind for event in events.events] == ["rollback", "skip"]
    first, second = events.events
    assert (first.update, first.text, first.more) == (400, "back", {"to_update": 350})
    assert first.shown_time == "2026-11-23 04:05:09 UTC"
    assert (second.update, second.text, second.shown_time) == (None, '["a"]', "7")


def test_events_of_older_runs_are_read_from_the_log(tmp_path: Path) -> None:
    words = [
        "INFO deepspeed_nmt 0.1.0 (git 1234567), torch 2.13.0 on node1, job 17",
        "INFO 1,276,544 parameters",
        "WARNING update 31 skipped: loss is not finite (loss scale 1, 1 in a row)",
        "WARNING update 40: its loss of 9.100 nats a token is 1.9 times the median of the last 99 updates, 4.7",
        "WARNING 20 updates in a row skipped: rolling back from update 50 to 20, and on with the data",
        "INFO stopped by SIGUSR1 after update 60; start the same command again to resume",
        "INFO deepspeed_nmt 0.1.0 (git 1234567), torch 2.13.0 on node2",
        "INFO resuming after update 60 (runs/x/checkpoints/update-0000060)",
        "WARNING update 80: the decoder ignores its source. With the sources shuffled",
        "ERROR stopped: update 90: the decoder ignores its source. With the sources shuffled",
        "INFO deepspeed_nmt 0.1.0 (git 1234567), torch 2.13.0 on node3",
        "ERROR error: a file must be there",
        "INFO done: 100 updates, 1,000 target tokens (update 100)",
        "a line of something else",
    ]
    (tmp_path / "logs").mkdir()
    text = "\n".join(f"2026-11-23 04:05:{number:02},123 {line}" for number, line in enumerate(words))
    (tmp_path / "logs" / "rank-0.log").write_text(text, encoding="utf-8")
    events = read_events(tmp_path).events
    assert [(event.kind, event.update) for event in events] == [
        ("start", 0), ("skip", 31), ("spike", 40), ("rollback", 50), ("stop", 60), ("resume", 60), ("collapse", 80),
        ("collapse", 90), ("failure", 90), ("start", 0), ("failure", None), ("end", 100),
    ]  # fmt: skip
    assert events[0].more == {"host": "node1", "job": "17"} and events[5].more == {"host": "node2"}
    assert events[3].more == {"to_update": 20} and events[3].shown_time == "2026-11-23 04:05:04"


def test_translations_are_sampled_scored_and_counted(tmp_path: Path) -> None:
    directory = write_texts(tmp_path, range(10, 400, 10), lines=100)
    (directory / "update-0000400.txt").write_bytes(b"ONE\xff TWO\n\n" + b"ONE TWO THREE FOUR 2\n" * 90)
    (directory / "update-0000400.comet.result").write_text("0.5")
    (one,) = read_texts(tmp_path, best=110)
    assert len(one.updates) == 40 and one.sampled[0] == 10 and one.sampled[-1] == 400 and 110 in one.sampled
    assert len(one.sampled) <= 16 and len(one.newest) == 92, "the last translations are fewer than the references"
    signs = one.signs
    assert signs is not None and (signs.lines, signs.distinct, signs.empty, signs.copies) == (92, 3, 1, 0)
    worst = one.worst
    assert len(worst) == 15 and worst[0].translation == "" and worst[0].number == 2
    assert [each.chrf for each in worst] == sorted(each.chrf for each in one.newest)[:15]
    samples = one.samples()
    assert len(samples) >= 16 and all(len(sample.translations) == len(one.sampled) for sample in samples)
    assert samples[0].translations[-1][0] == "ONE\ufffd TWO" and samples[0].reference == "ONE TWO THREE FOUR 0"
    assert read_texts(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("events", "updates", "expected"),
    [
        ([("start", 0, ""), ("end", 100, "done")], 100, "finished"),
        ([("start", 0, "")], 200, "finished"),
        ([("start", 0, ""), ("stop", 100, "by SIGTERM")], 100, "stopped"),
        ([("start", 0, ""), ("failure", 100, "out of memory")], 100, "failed"),
        ([("failure", 50, "full disk"), ("resume", 50, "")], 100, "running"),
        ([], 100, "running"),
    ],
)
def test_state(events: list[tuple[str, int, str]], updates: int, expected: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", updates, "training.max_updates=200")
    write_events(run, *events)
    assert RunPage(run).status().state == expected
    assert expected != "failed" or "out of memory" in RunPage(run).status().sentence
    if expected == "running":
        assert RunPage(run).status(now=time.time() + 3600).state == "silent"


def test_state_of_a_collapsed_run(tmp_path: Path) -> None:
    settings = ["training.max_updates=200", "collapse.threshold=0.2", "collapse.patience=2", "collapse.grace=100"]
    collapsed = RunPage(write_run(tmp_path / "low", 200, *settings, reliance=0.01)).status()
    assert collapsed.state == "collapsed" and "0.010 nats a token, below 0.2" in collapsed.sentence
    assert "finished" in collapsed.sentence
    assert RunPage(write_run(tmp_path / "high", 200, *settings, reliance=1.0)).status().state == "finished"
    early = RunPage(write_run(tmp_path / "early", 100, *settings, reliance=0.01)).status()
    assert early.state == "running", "within the grace period"


def test_settings_are_compared_with_the_recipe(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 50, "optimizer.lr=5e-4")
    changed, same = RunPage(run).content.settings
    assert changed.title == "Differences from the recipe sample_small" and changed.rows == [
        ["optimizer.lr", "0.0005", "0.002"]
    ]
    assert same.folded and ["model.dim", "128"] in same.rows and len(same.rows) > 40
    nearest = RunPage(write_run(tmp_path / "nearest", 50, "optimizer.lr=5e-4", recipe=None)).content
    assert nearest.settings[0].rows == changed.rows and "differs least" in nearest.settings[0].note
    other = RunPage(run, "transformer_base").content.settings[0]
    assert ["model.dim", "128", "512"] in other.rows
    with pytest.raises(ConfigError, match="transformer_base"):
        RunPage(run, "transformer_bass")


def test_page_shows_all_that_a_run_has(tmp_path: Path) -> None:
    figures = figures_of(full_run(tmp_path / "run"))
    assert {"loss", "metric-bleu", "reliance", "slice-loss", "rate", "norm", "speed", "memory", "shares"} <= set(
        figures
    )
    assert {"mixture", "corpora", "cross-share", "norm-gradient", "norm-update"} <= set(figures)
    assert [trace["name"] for trace in figures["metric-bleu"].traces] == ["BLEU", "BLEU, news"]
    assert "1 values are not finite" in figures["loss"].caption and None in figures["loss"].traces[0]["y"]
    layers = figures["cross-share"].traces[0]
    assert layers["y"] == [f"layer {number}" for number in range(1, 12)], "layer 10 follows layer 9"
    assert (layers["zmin"], layers["zmax"]) == (0, pytest.approx(1.1)), "0 is dark whatever the smallest share"
    norms = figures["norm-gradient"].traces[0]
    assert norms["y"] == ["embeddings", "encoder 1", "encoder 2", "encoder 3"]
    assert norms["z"][0][0] is None and norms["z"][2][0] == -2.0, "logarithms; none of 0"
    shown = {trace["meta"] for figure in figures.values() for trace in figure.traces if "meta" in trace}
    assert {"train/ald", HOSTILE} <= shown and not {"train/loss_scale", "train/ppl", "perf/hours"} & shown
    page = page_of(tmp_path / "run")
    found = json.loads(page.scripts["marks-data"])
    assert {"tag": "valid/bleu", "values": [30.0]}.items() <= found[-1].items(), "the star is on its curve"
    marks = {mark["kind"]: mark["updates"] for mark in found}
    assert marks == {
        "skip": [31, 32],
        "spike": [60],
        "rollback": [80],
        "collapse": [160],
        "resume": [120],
        "best": [200],
    }
    samples = json.loads(page.scripts["samples-data"])
    assert [each["set"] for each in samples] == ["main", "news"] and samples[0]["updates"] == [50, 100, 150, 200]
    for words in ("3 lines of metrics.jsonl", "Worst sentences of main", "stopped by SIGUSR1", "nrefs:1|tok:13a"):
        assert words in page.text
    assert "best BLEU" in page.text and "Without resolved.json, data.json, checkpoints: missing" in page.text


def test_tags_have_words() -> None:
    words = {
        "train/loss": "training loss", "valid/loss": "validation loss", "valid/news/loss": "validation loss, news",
        "valid/mean/ter": "TER, mean of all sets", "valid/comet": "comet", "data/web/share": "web",
        "train/web/nll": "web", "train/ald": "train/ald",
    }  # fmt: skip
    assert {tag: words_of(tag) for tag in words} == words


def test_measures_have_their_direction(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    names = {
        "valid/loss": "3.000",
        "valid/chrf": "5.000",
        "valid/ter": "3.000",
        "valid/comet": "5.000",
        "valid/cost": "3.000",
    }
    append_log(
        run,
        [{"update": update, **dict.fromkeys(names, value)} for update, value in ((10, 4.0), (20, 5.0), (30, 3.0))],
    )
    signatures = {"cost": "command:cost.sh|lower", "comet": "command:comet.sh", "chrf": 7}
    (write_texts(run, [10]) / "signatures.json").write_text(json.dumps(signatures))
    (measures,) = RunPage(run).content.validation
    assert {f"valid/{row[0]}": row[2] for row in measures.rows} == names
    assert measures.rows[-1][-1] == "command:cost.sh|lower"


def test_plotly_accepts_every_figure(tmp_path: Path) -> None:
    from plotly import graph_objects

    run = full_run(tmp_path / "run")
    specifications = json.loads(page_of(run).scripts["figures-data"])
    assert len(specifications) > 15
    for figure in specifications:
        graph_objects.Figure(data=figure["data"], layout=figure["layout"])  # raises for an unknown property
    with pytest.raises(ValueError, match="colour"):
        graph_objects.Figure(data=[{"type": "scatter", "colour": "red"}])


def test_nothing_of_a_run_is_code_and_nothing_is_requested(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "<script>alert(1)<"))
    assert [tag for tag, _ in page.tags].count("script") == 6
    assert set(page.scripts) == {
        "figures-data",
        "marks-data",
        "positions-data",
        "samples-data",
        "drawer-data",
        "code",
    }
    assert HOSTILE in page.text and "<script>alert(1)<" in page.text
    assert HOSTILE in json.dumps(json.loads(page.scripts["samples-data"]), ensure_ascii=False)
    for name, text in page.scripts.items():
        assert "<" not in text or name == "code"
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form"), attributes
        assert not [key for key in attributes if key.startswith("on")], attributes
        for key in ("src", "href", "action", "data", "srcset"):
            assert (attributes.get(key) or "#").startswith(("#", "data:")), (tag, attributes)
    policy = next(str(a["content"]) for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "http" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    digest = base64.b64encode(hashlib.sha256(page.scripts["code"].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy


def test_page_of_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", 0)
    (bare / "metrics.jsonl").unlink()
    (bare / "environment.json").write_text("{")
    page = page_of(bare)
    assert "Nothing is logged yet" in page.text and "keeps no translations" in page.text
    assert "No events are recorded" in page.text and json.loads(page.scripts["figures-data"]) == []
    os.utime(write_run(tmp_path / "old", 100) / "metrics.jsonl", (1e9, 1e9))
    assert RunPage(bare).status().state == "new" and RunPage(tmp_path / "old").status().state == "silent"
    plain = figures_of(write_run(tmp_path / "plain", 100, "collapse.every=0", reliance=None))
    assert "reliance" not in plain and "cross-share" not in plain and "loss" in plain
    nan = write_run(tmp_path / "nan", 0)
    append_log(nan, [{"update": update, "train/loss": math.nan, "train/lr": 1e-3} for update in (10, 20)])
    assert set(figures_of(nan)) == {"rate"} and page_of(nan).text


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0)
    shares = {f"collapse/cross_share/layer_{layer:02}": 0.2 for layer in range(1, 55)}
    append_log(run, [{"update": 100 * n, "train/loss": 99.0 if n == 1777 else 2.0} for n in range(1, 3001)])
    append_log(run, [{"update": 500 * n, "train/nll": 1.0, **shares} for n in range(1, 601)])
    write_events(run, *(("skip", 10 * number, "update skipped") for number in range(1, 5000)))
    page = page_of(run)
    loss = next(each for each in json.loads(page.scripts["figures-data"]) if each["id"] == "loss")["data"][0]
    assert loss["y"][loss["x"].index(177_700)] == 99.0 and len(loss["x"]) < 2100
    assert sum(len(text) for name, text in page.scripts.items() if name.endswith("-data")) < 3_000_000
    (marks,) = json.loads(page.scripts["marks-data"])
    assert len(marks["updates"]) <= 150 and marks["updates"][0] == 10


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", 100, "training.max_updates=200")
    out = tmp_path / "page.html"
    assert main(["report", "run", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("run: running, 100 of 200 updates")
    assert 1_000_000 < out.stat().st_size < 3_000_000 and out.read_bytes().startswith(b"<!doctype html>")
    for words, message in (
        ([str(tmp_path)], "has no config.yaml"),
        ([str(run), "--out", str(run / "config.yaml")], "--out must end in .html or .htm"),
        ([str(run), "--out", str(tmp_path)], "is a directory"),
        ([str(run), "--out", str(tmp_path / "no" / "page.html")], "must be in a directory that exists"),
        ([str(run), "--out", str(out), "--recipe", "none"], "--recipe must name a known recipe"),
    ):
        assert main(["report", "run", *words]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"report run needs the package plotly.*\(pip install plotly\)"):
        check_drawing()
