"""A short training on real text: Multi30k, English to German.

A broken model cannot pass: copying the source stays under half the threshold, and so does one caption over and over,
which is what a decoder that ignores the source would write.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.evaluate.bleu import join_segments, tokenised_bleu
from tests.support import run_ranks


def _lines(path: Path) -> list[str]:
    return [join_segments(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


@pytest.mark.timeout(600)
def test_multi30k_under_deepspeed(shared_data: Path, tmp_path: Path) -> None:
    text = shared_data / "multi30k_bpe_ende"
    words = ["prepare", "--segmented", "--out", str(tmp_path / "data")]
    for split, name in (("train", "train"), ("valid", "valid"), ("test", "test.2016")):
        words += [f"--{split}-source", str(text / f"{name}.en"), f"--{split}-target", str(text / f"{name}.de")]
    assert main(words) == 0
    run = tmp_path / "run"
    command = ["-m", "deepspeed_nmt", "train", "--recipe", "multi30k_cpu", "--data", str(tmp_path / "data")]
    settings = [
        "engine.ds_config=cpu",
        "engine.device=cpu",
        "training.max_updates=300",
        "training.validate_every=300",
    ]
    quick = [
        "schedule.warmup_updates=150",
        "model.encoder_layers=2",
        "model.decoder_layers=2",
        "validation.bleu=false",
    ]
    run_ranks([*command, "--run", str(run), *settings, *quick, "validation.best_by=loss"], 2, tmp_path, timeout=560)
    out = tmp_path / "hypothesis"
    source = text / "test.2016.en"
    assert main(["translate", "--run", str(run), "--input", str(source), "--output", str(out), "--beam", "2"]) == 0
    bleu = tokenised_bleu(_lines(out), [_lines(text / "test.2016.de")]).bleu
    assert bleu > 12.0


@pytest.mark.parametrize("name", ["copy", "constant"])
def test_the_threshold_is_out_of_reach_without_translating(shared_data: Path, name: str) -> None:
    text = shared_data / "multi30k_bpe_ende"
    reference = _lines(text / "test.2016.de")
    frequent = "ein mann in einem blauen hemd steht auf einer leiter und putzt ein fenster ."
    hypotheses = _lines(text / "test.2016.en") if name == "copy" else [frequent] * len(reference)
    assert tokenised_bleu(hypotheses, [reference]).bleu < 6.0
