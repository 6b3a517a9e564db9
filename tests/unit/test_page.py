"""The page of a run: what is gathered, from whole and from damaged files, and that nothing of a run is code."""

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
from deepspeed_nmt.engine.contract import EngineScalars
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.reports.pictures import draw_curves
from deepspeed_nmt.reports.run_log import PREFIX_RELIANCE, SOURCE_RELIANCE, RunLog, Series, read_events
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.progress import Progress
from tests.page_runs import HOSTILE, append_log, full_run, write_events, write_run, write_texts

pytest.importorskip("plotly")

from deepspeed_nmt.reports.page import RunPage, marked_words, read_texts
from deepspeed_nmt.reports.page_figures import Chart, heat_maps


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
    return Parsed(RunPage(run).render().decode())


def charts_of(run: Path) -> dict[str, Chart]:
    page = RunPage(run)
    return {chart.id: chart for chart in [*page.curves(), *heat_maps(page.log)]}


def test_thinned_series_keep_extremes_ends_and_gaps() -> None:
    values = [math.sin(number / 50) for number in range(30_000)]
    values[12_345], values[20_001], values[25_000] = 99.0, -99.0, math.nan
    thin = Series(enumerate(values)).thinned()
    assert len(thin) <= 2100 and [*thin] == sorted(thin) and {0, 29_999} <= thin.keys()
    assert thin[12_345] == 99.0 and thin[20_001] == -99.0 and math.isnan(thin[25_000])


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
    assert [*log.series("train/loss")] == [10, 20, 30] and log.series("train/loss").finite == {20: 2.0}
    assert math.isinf(log.last("train/loss") or 0) and log.last("perf/hours") == 0.2
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
    first, second = read_events(tmp_path)
    assert (first.kind, first.update, first.text, first.details) == ("rollback", 400, "back", {"to_update": 350})
    assert first.shown_time == "2026-11-23 04:05:09 UTC"
    assert (second.kind, second.update, second.text, second.shown_time) == ("skip", None, '["a"]', "7")
    assert read_events(tmp_path / "none") == []


def test_translations_are_sampled_scored_and_counted(tmp_path: Path) -> None:
    directory = write_texts(tmp_path, range(10, 400, 10), lines=100)
    (directory / "update-0000400.txt").write_bytes(b"ONE\xff TWO\n\n" + b"ONE TWO THREE FOUR 2\n" * 90)
    (directory / "update-0000400.comet.result").write_text("0.5")
    (one,) = read_texts(tmp_path, best=110)
    assert len(one.updates) == 40 and one.sampled[0] == 10 and one.sampled[-1] == 400 and 110 in one.sampled
    assert len(one.sampled) <= 16 and len(one.newest) == 92, "the last translations are fewer than the references"
    signs = one.signs
    assert [signs[name] for name in ("lines", "distinct", "empty", "copied")] == [92, 3, 1, 0]
    worst = one.worst
    assert len(worst) == 15 and worst[0].translation == "" and worst[0].number == 2
    assert [row.chrf for row in worst] == sorted(row.chrf for row in one.newest)[:15]
    first, *others = one.samples
    assert len(others) >= 15 and all(len(sample) == len(one.sampled) for sample in others)
    assert first[-1].translation == "ONE\ufffd TWO" and first[-1].reference == "ONE TWO THREE FOUR 0"
    assert marked_words(first[-1]) == [("ONE\ufffd", True), (" ", False), ("TWO", False)]
    assert read_texts(tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("events", "updates", "expected"),
    [
        ([("start", 0, ""), ("end", 100, "done")], 100, "finished"),
        ([("start", 0, ""), ("stop", 100, "by SIGTERM")], 100, "stopped"),
        ([("start", 0, ""), ("failure", 100, "out of memory")], 100, "failed"),
        ([("failure", 50, "full disk"), ("resume", 50, "")], 100, "running"),
    ],
)
def test_state(events: list[tuple[str, int, str]], updates: int, expected: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", updates, "training.max_updates=200")
    write_events(run, *events)
    assert RunPage(run).status().state == expected
    if expected == "running":
        assert RunPage(run).status(now=time.time() + 3600).state == "silent"


def test_a_run_that_ends_by_its_epochs_has_not_stopped_early(tmp_path: Path) -> None:
    for since, early in ((1, False), (2, True)):
        run = write_run(tmp_path / str(since), 100, "training.patience=2", "training.max_epochs=1")
        progress = Progress(update=100, epoch=1, validations_since_best=since)
        CheckpointStore(run / "checkpoints").save(progress, EngineScalars(), [])
        status = RunPage(run).status()
        assert status.state == "finished" and ("stopped early" in status.sentence) == early


def test_page_shows_all_that_a_run_has(tmp_path: Path) -> None:
    charts = charts_of(full_run(tmp_path / "run"))
    names = {"loss", "metric-bleu", "reliance", "slice-loss", "rate", "norm", "speed", "memory", "shares", "mixture"}
    assert names | {"corpora", "cross-share", "norm-gradient", "norm-update"} <= set(charts)
    data = {name: chart.specification["data"] for name, chart in charts.items()}
    assert [trace["name"] for trace in data["metric-bleu"]] == ["valid BLEU", "valid news BLEU"]
    assert "1 values are not finite" in charts["loss"].caption and None in data["loss"][0]["y"]
    (layers,), (norms,) = data["cross-share"], data["norm-gradient"]
    assert layers["y"] == [f"layer {number}" for number in range(1, 12)], "layer 10 follows layer 9"
    assert (layers["zmin"], layers["zmax"]) == (0, pytest.approx(1.1)), "0 is dark whatever the smallest share"
    assert norms["y"] == ["embeddings", "encoder 1", "encoder 2", "encoder 3"]
    assert norms["z"][0][0] is None and norms["z"][2][0] == -2.0, "logarithms; none of 0"
    shown = {trace["meta"] for traces in data.values() for trace in traces if "meta" in trace}
    assert {"train/ald", HOSTILE} <= shown and not {"train/loss_scale", "train/ppl", "perf/hours"} & shown
    page = page_of(tmp_path / "run")
    content = json.loads(page.scripts["page-data"])
    assert len(content["figures"]) > 15
    marks = {mark["name"]: mark for mark in content["marks"] if mark["mode"] == "markers"}
    assert {name: mark["x"] for name, mark in marks.items()} == {
        "skipped update": [31, 32], "spike": [60], "rollback": [80], "warning of collapse": [160], "restart": [120],
        "best validation": [200],
    }  # fmt: skip
    best = marks["best validation"]
    assert (best["meta"], best["customdata"]) == ("valid/bleu", [30.0]), "the star is on its curve"
    samples = [attributes for tag, attributes in page.tags if tag == "tr" and "data-line" in attributes]
    assert {str(attributes["data-update"]) for attributes in samples} == {"50", "100", "150", "200"}
    tiles = {label: value for label, value, _ in RunPage(tmp_path / "run").tiles}
    assert tiles["skipped updates"] == "2" and tiles["best valid BLEU"] == "30.00"
    append_log(tmp_path / "run", [{"update": 200, "train/skipped": 1.0}])
    tiles = {label: value for label, value, _ in RunPage(tmp_path / "run").tiles}
    assert tiles["skipped updates"] == "1", "a killed process lost the update of the other"
    for words in ("3 lines of metrics.jsonl", "Worst sentences of main", "Samples of news", "nrefs:1|tok:13a"):
        assert words in page.text


@pytest.mark.parametrize(("reliance", "lacks"), [(0.15, "its source: source"), (0.3, "what it has written: prefix")])
def test_a_run_has_collapsed_if_the_monitor_has_warned(tmp_path: Path, reliance: float, lacks: str) -> None:
    run = write_run(tmp_path / "run", 200, "schedule.warmup_updates=20", reliance=reliance)
    assert RunPage(run).status().state == "running", "the loss still falls, and the monitor waits"
    write_events(run, ("collapse", 180, "the decoder"))
    status = RunPage(run).status()
    assert status.state == "collapsed" and f"the decoder ignores {lacks} reliance is 0.150" in status.sentence
    append_log(run, [{"update": update, SOURCE_RELIANCE: 1.0, PREFIX_RELIANCE: 1.0} for update in (220, 240)])
    assert RunPage(run).status().state == "running", "it has recovered"
    append_log(run, [{"update": 260, SOURCE_RELIANCE: 0.1, PREFIX_RELIANCE: 1.0}])
    append_log(run, [{"update": 280, SOURCE_RELIANCE: 1.0, PREFIX_RELIANCE: 0.1}])
    assert RunPage(run).status().state == "running", "the monitor has not warned of these"
    write_events(run, ("collapse", 280, "the decoder"))
    status = RunPage(run).status()
    assert status.state == "collapsed" and "what it has written: prefix reliance is 0.100" in status.sentence


def test_one_directory_with_two_tags_is_two_corpora(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    corpora = [
        {"path": "/data/en", "fingerprint": "a" * 64, "weights": weights, "tag": tag}
        for weights, tag in (([{"value": 3, "last": 50}, {"value": 1, "first": 51}], "<2de>"), ([{"value": 2}], None))
    ]
    record = {"path": "/data/en", "fingerprint": "a" * 64, "corpora": corpora, "text": {}, "common_text": {}}
    (run / "data.json").write_text(json.dumps(record), encoding="utf-8")
    table = RunPage(run).tables["data"][0]
    columns = [[row[table.head.index(name)] for row in table.rows] for name in ("directory", "weight", "tag")]
    assert columns == [["/data/en"] * 2, ["3:1-50, 1:51-", "2"], ["<2de>", "-"]]


def test_nothing_of_a_run_is_code_and_nothing_is_requested(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "<script>alert(1)<"))
    assert set(page.scripts) == {"page-data", "drawer", "code"} and page.text.count(HOSTILE) > 10
    assert "<script>alert(1)<" in page.text
    assert "<" not in page.scripts["page-data"] + page.scripts["drawer"]
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


@pytest.mark.long
def test_page_of_a_run_that_has_hardly_begun(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare", 0)
    (bare / "metrics.jsonl").unlink()
    (bare / "environment.json").write_text("{")
    page = page_of(bare)
    assert "Nothing is logged yet" in page.text and "keeps no translations" in page.text
    assert "No events are recorded" in page.text and json.loads(page.scripts["page-data"])["figures"] == []
    os.utime(write_run(tmp_path / "old", 100) / "metrics.jsonl", (1e9, 1e9))
    assert RunPage(bare).status().state == "new" and RunPage(tmp_path / "old").status().state == "silent"
    plain = charts_of(write_run(tmp_path / "plain", 100, "collapse.every=0", reliance=None))
    assert "reliance" not in plain and "cross-share" not in plain and "loss" in plain
    nan = write_run(tmp_path / "nan", 0)
    append_log(nan, [{"update": update, "train/loss": math.nan, "train/lr": 1e-3} for update in (10, 20)])
    assert set(charts_of(nan)) == {"rate"} and page_of(nan).text


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 100, "training.max_updates=200")
    out = tmp_path / "page.html"
    assert main(["report", "run", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("run: running, 100 of 200 updates")
    assert 1_000_000 < out.stat().st_size < 3_000_000 and out.read_bytes().startswith(b"<!doctype html>")
    for words, message in (
        ([str(tmp_path)], f"{tmp_path} has no config.yaml"),
        ([str(run), "--out", str(run / "config.yaml")], "does not end in .html or .htm"),
    ):
        assert main(["report", "run", *words]) == 2
        assert message in capsys.readouterr().err


CROSS = "collapse/cross_share/layer_"
HUGE = "9" * 400
LAYERS = ("0", "99999999", "9" * 150, "-1", "")


def log_lines(tag: str, *values: str) -> list[str]:
    return [f'{{"update": 210, "{tag}": {value}}}' for value in values]


@pytest.mark.parametrize(
    ("lines", "new"),
    [
        ([f'{{"update": {update}, "train/loss": 1}}' for update in (HUGE, f"-{HUGE}", "true", '"7"', "[]")], ()),
        (
            [
                line
                for tag in ("train/target_tokens", "perf/hours", "valid/bleu", f"{CROSS}01", "new")
                for line in log_lines(tag, HUGE, f"-{HUGE}", "1e308", "-1e99", "null")
            ],
            {"new"},
        ),
        ([line for layer in LAYERS for line in log_lines(CROSS + layer, "0.5")], {CROSS + layer for layer in LAYERS}),
        (log_lines("train/loss", '"x"', "true", "[1]", "{}", "[" * 9999, "[" * 30 + "]" * 30), ()),
        (log_lines("valid/../../../x/bleu", "1") + log_lines("x" * 300, "1"), {"valid/../../../x/bleu"}),
        (log_lines("norm/gradient/encoder.layer_1", "-1.0"), {"norm/gradient/encoder.layer_1"}),
        ([json.dumps({"update": 210, **{f"valid/set{number}/bleu": 1 for number in range(4000)}})], ()),
    ],
    ids=["update", "numbers", "layers", "types", "names", "negative", "many"],
)
def test_a_hostile_log_is_drawn(lines: list[str], new: set[str], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 200)
    known = set(RunLog.read(run).tags)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("\n".join(lines) + "\n")
    assert page_of(run).text
    log = RunLog.read(run)
    draw_curves({"_run": log, "a$x_$b": log}, {"train/ppl": "perplexity"}, tmp_path / "out.svg")
    assert "_run -->" in (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert set(log.tags) - known == set(new) and list(log.cross_shares()) == list(range(1, 12))


READ = (
    *("events.jsonl", "environment.json", "resolved.json", "origin.json", "data.json"),
    *("test_scores.json", "validation/main/source.txt", "validation/main/reference.txt"),
    *("validation/main/update-0000050.txt", "validation/main/signatures.json", "metrics.jsonl"),
)
"""Files of a run that its page shows, its log last."""


@pytest.mark.long
def test_links_out_of_a_run_and_pipes_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"event": "SECRET", "command": ["SECRET"], "update": 1, "SECRET": 1, "bleu": "SECRET"}\n' * 9)
    for kind in ("link", "pipe"):
        run = write_run(tmp_path / kind, 50)
        write_texts(run, [50])
        caplog.clear()
        for name in READ:
            if name == "metrics.jsonl":  # without measures there is no need of signatures
                assert "SECRET" not in RunPage(run).render().decode()
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(secret) if kind == "link" else os.mkfifo(run / name)
        assert RunLog.read(run).tags == []
        for name in READ:
            assert len([line for line in caplog.messages if f"{run / name} is left out" in line]) == 1, name
    outside = write_texts(tmp_path / "SECRET", [50])
    run = write_run(tmp_path / "directory", 50)
    (run / "validation").mkdir()
    (run / "validation" / "main").symlink_to(outside)
    assert "ONE TWO" not in page_of(run).text
    (run / "config.yaml").rename(tmp_path / "config.yaml")
    (run / "config.yaml").symlink_to(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="leads out of the run"):
        RunPage(run)


@pytest.mark.parametrize("place", ["run/logs/page.html", "link/page.html"])
def test_a_page_is_not_written_into_its_run(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 50)
    (run / "logs").mkdir()
    (tmp_path / "link").symlink_to(run)
    assert main(["report", "run", str(run), "--out", str(tmp_path / place)]) == 2
    assert f"{tmp_path / place} is {run}, or lies in it" in capsys.readouterr().err
    text = tmp_path / "text.svg"
    text.write_text("a b\n")
    words = ["--input", str(text), "--reference", str(text), "--out", str(text)]
    for command in (
        ["depths", "--run", str(run)],
        ["runs", str(run)],
        ["sweep", "deep_decoder_fig1", "--runs", str(run)],
    ):
        assert main(["report", *map(str, command), *words]) == 2
        assert f"--out {text} is {text}" in capsys.readouterr().err
    assert text.read_text() == "a b\n"
