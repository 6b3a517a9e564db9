"""Figures and rules of docs/first-day.md are those of the program."""

from __future__ import annotations

import re

from deepspeed_nmt.config import load_config
from deepspeed_nmt.planning.gpus import gpu_named
from deepspeed_nmt.run.directory import _FIXED
from tests.support import ROOT

PAGE = (ROOT / "docs" / "first-day.md").read_text(encoding="utf-8").replace("\n", " ")
SCALE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
"""Its plans are compared with the planner by another test."""


def test_gpu_days_follow_from_the_plan() -> None:
    config = load_config("deep_decoder_big_54")
    tokens = config.training.max_updates * config.batch.update_tokens
    gflop = re.search(r"A target token costs ([\d.]+) GFLOP", SCALE)
    assert gflop is not None and f"{gflop[1]} GFLOP for each target token" in PAGE
    days = float(gflop[1]) * 1e9 * tokens / (0.3 * gpu_named("v100-16g").tflops * 1e12) / 86_400
    assert f"{config.training.max_updates:,} updates of {config.batch.update_tokens:,} target tokens" in PAGE
    assert f"{tokens / 1e9:.2f} billion" in PAGE
    assert f"that is {days:.1f} GPU-days: {days / 8:.1f} days on 8 GPUs, {days / 32:.1f} day on 32" in PAGE


def test_sizes_of_checkpoints_follow_from_the_parameters() -> None:
    parameters = 754_907_136
    keep = load_config("deep_decoder_big_54").training.keep_last
    assert f"{parameters:,}" in PAGE and f"{parameters:,}" in (ROOT / "benchmarks" / "RESULTS.md").read_text("utf-8")
    assert f"{parameters * 12 / 1e9:.2f} GB a checkpoint" in PAGE and f"`training.keep_last` ({keep})" in PAGE
    assert f"{parameters * 12 * (keep + 2) / 1e9:.1f} GB" in PAGE and f"{parameters * 4 / 1e9:.2f} GB" in PAGE


def test_published_figures_are_those_of_the_papers_page() -> None:
    rows = (ROOT / "docs" / "papers" / "deep-decoder.md").read_text(encoding="utf-8")
    for recipe, figures in (
        ("deep_decoder_base_54", ("30.31 BLEU", "28.8 sacreBLEU", "17.92 h")),
        ("deep_decoder_big_30", ("30.69 BLEU", "29.0 sacreBLEU", "46.52 h")),
        ("deep_decoder_base_54_plain", ("0.31",)),
        ("deep_decoder_big_30_plain", ("0.40",)),
    ):
        (row,) = [line for line in rows.splitlines() if f"`train --recipe {recipe}`" in line and "En-De" in line]
        assert [figure for figure in figures if figure not in row or figure not in PAGE] == [], recipe


def test_the_first_warning_follows_from_the_defaults() -> None:
    config = load_config("deep_decoder_big_54")
    monitor = config.collapse
    first = (config.schedule.warmup_updates * 2 // monitor.every + monitor.patience) * monitor.every
    assert monitor.grace == 0 and monitor.patience == 2
    assert f"logged every {monitor.every} updates" in PAGE and f"at update {first:,} at the earliest" in PAGE


def test_settings_that_must_stay_are_those_of_the_program() -> None:
    section = PAGE.split("## Which settings may change")[1].split("All others may change")[0]
    named = {name.removesuffix(".*") for name in re.findall(r"`([a-z_]+\.[a-z_*]+)`", section)}
    assert named == {name.removesuffix(".") for name in _FIXED}
    changeable = PAGE.split("All others may change")[1].split("##")[0]
    settings = load_config("deep_decoder_big_54").flat()
    for name in re.findall(r"`([a-z]+\.[a-z_]+)`", changeable):
        assert name in settings and not f"{name}.".startswith(_FIXED), name
