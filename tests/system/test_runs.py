"""Whole runs: their files, and resumption to the bit."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import sacrebleu
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepspeed_nmt.cli import main
from deepspeed_nmt.evaluate.nbest import read_nbest
from deepspeed_nmt.text import TextForm, detokenise
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests import commands
from tests.commands import await_until, log_of, logged, pair_words, refused, train_words
from tests.programs import Program
from tests.support import ROOT, assert_same, run_ranks
from tests.system.conftest import SMALL


def train(data: Path, run: Path, *settings: str) -> int:
    """Train in this process."""
    return main(train_words(data, run, *settings))


def train_ranks(data: Path, run: Path, *settings: str) -> None:
    """Train on two ranks."""
    run.mkdir(exist_ok=True)
    run_ranks(["-m", "deepspeed_nmt", *train_words(data, run, *settings)], 2, run)


def checkpoint(run: Path, update: int) -> Checkpoint:
    return Checkpoint(run / "checkpoints" / f"update-{update:07d}")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted plain run of twelve updates."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(data, run, *SMALL, "training.norms_every=4", "engine.hash_gradients=true") == 0
    return run


def test_a_run_goes_on_with_compiled_layers(
    whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    settings = [*SMALL, "engine.compile=layers", "training.max_updates=14"]

    def fail(function: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", fail)
    refused(train_words(data, run, *settings), capsys, "No working C++ compiler found", "install")
    monkeypatch.undo()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert train(data, run, *settings) == 0
    assert "compiled layers" in (run / "logs" / "rank-0.log").read_text()
    assert [json.loads((path / "resolved.json").read_text())["compile"] for path in (run, whole)] == ["layers", "off"]
    assert checkpoint(run, 14).weights().keys() == checkpoint(whole, 12).weights().keys()


def test_files_and_metrics_of_a_run(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {
        *("config.yaml", "data.json", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints"),
        *("events.jsonl", "vocabulary.model", "vocabulary.json", "logs", "resolved.json"),
        *("manifest.json", "manifest.json.sha256", "validation", "goodput.jsonl", "gradients"),
    }
    lines = log_of(whole)
    assert [line["update"] for line in lines] == [4, 4, 4, 8, 8, 8, 12, 12, 12, 12]
    tags = {tag for line in lines for tag in line} - {"update"}
    layers = [f"{side}/{part}" for side in ("encoder", "decoder") for part in ("layer_01", "layer_02", "final_norm")]
    assert tags == {
        *(f"norm/{kind}/{part}" for kind in ("gradient", "update") for part in ("source_embedding", *layers)),
        *(f"train/{tag}" for tag in ("loss", "nll", "ppl", "grad_norm", "lr", "loss_scale", "skipped", "spikes")),
        *("train/rollbacks", "train/target_tokens", "collapse/source_reliance", "collapse/prefix_reliance"),
        *("collapse/nll", "collapse/seconds"),
        *("collapse/cross_share/layer_01", "collapse/cross_share/layer_02"),
        *("valid/loss", "valid/nll", "valid/ppl", "valid/bleu"),
        *("perf/target_tokens_per_s", "perf/padding", "perf/data_wait", "perf/memory", "perf/hours", "perf/goodput"),
    }
    board = EventAccumulator(str(whole / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == tags
    assert [image.step for image in board.Images("attention/sentence_3")] == [4, 8, 12]
    losses = list(logged(whole, "valid/loss").values())
    assert losses[-1] < losses[0], "the loss falls"
    norms = next(line for line in lines if "norm/gradient/source_embedding" in line)
    total = math.sqrt(sum(value**2 for tag, value in norms.items() if tag.startswith("norm/gradient/")))
    assert total == pytest.approx(lines[0]["train/grad_norm"], rel=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(data: Path, whole: Path, tmp_path: Path, small: list[str]) -> None:
    run, small = tmp_path / "run", [*small, "engine.hash_gradients=true"]
    assert train(data, run, *small, "training.max_updates=6") == 0
    assert train(data, run, *small) == 0
    assert_same(run, whole)
    compare = [sys.executable, str(ROOT / "benchmarks" / "compare_gradients.py"), str(whole), str(run)]
    assert "equal to the bit" in subprocess.run(compare, check=True, capture_output=True, text=True).stdout
    hashes = run / "gradients" / "rank-0.jsonl"
    lines = [json.loads(line) for line in hashes.read_text().splitlines()]
    assert [line["update"] for line in lines if line["micro_batch"] is None] == [*range(1, 13)]
    name = "encoder.final_norm.weight"
    next(line for line in lines if line["update"] == 9)["gradients"][name] = "00000000"
    hashes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = subprocess.run(compare, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith(f"update 9, micro-batch 0, rank 0, {name} was ")
    updates = [line["update"] for line in log_of(run)]
    assert updates == sorted(updates), "one continuous log"
    events = log_of(run, "events")
    history = [(event["event"], event["update"]) for event in events if event["event"] != "best"]
    assert history == [("start", 0), ("saved", 4), ("end", 6), ("resume", 6), ("end", 12)]
    assert (events[0]["ranks"], events[0]["host"]) == (1, socket.gethostname())
    best = [event for event in events if event["event"] == "best"]
    # BLEU below 1 is no measure yet.
    assert best and best[-1]["measure"] == "valid/loss" and best[-1]["score"] == best[-1]["loss"]
    latest = (run / "checkpoints" / "latest").stat().st_mtime_ns
    assert train(data, run, *small) == 0, "finished: nothing is done"
    assert (run / "checkpoints" / "latest").stat().st_mtime_ns == latest and log_of(run, "events") == events


def test_a_damaged_checkpoint_costs_time_but_changes_nothing(
    data: Path, whole: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(data, run, *small, "training.max_updates=8") == 0
    file = run / "checkpoints" / "update-0000008" / "weights-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert train(data, run, *small) == 0
    said = capsys.readouterr().err
    assert "using update-0000004" in said and "update-0000008 is damaged" in said
    assert_same(run, whole)


def test_a_signal_saves_and_stops_a_run_that_resumes_to_the_bit(data: Path, tmp_path: Path, small: list[str]) -> None:
    number = signal.SIGINT
    run, log = tmp_path / "run", tmp_path / "log"
    endless = ["training.max_updates=100000", "training.validate_every=50000", "training.log_every=1"]
    endless += [f"training.notify=sh -c 'cat > {shlex.quote(str(tmp_path))}/notice'"]
    # As many threads as this process: equal bits need equal thread counts.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = Program(["-m", "deepspeed_nmt", *train_words(data, run, *small, *endless)], environment, log)
    try:
        await_until(lambda: "update 5/" in log.read_text(), process, log)
        process.send_signal(number)
        assert process.wait(timeout=300) == 75, log.read_text()
    finally:
        process.kill()
    assert number.name in log.read_text() and "start the same command again to resume" in log.read_text()
    last = log_of(run, "events")[-1]
    assert (last["event"], last["signal"]) == ("stop", number.name) and last["update"] >= 5
    assert json.loads((tmp_path / "notice").read_text()) == last
    end = last["update"] + 3
    for directory in (run, tmp_path / "straight"):
        assert train(data, directory, *small, f"training.max_updates={end}") == 0
    assert_same(run, tmp_path / "straight", end)


def test_two_ranks_resume_to_the_bit_and_validate_unequal_numbers_of_sentences(
    data: Path, tmp_path: Path, small: list[str]
) -> None:
    settings = [*small, "engine.name=deepspeed", "engine.ds_config=zero3"]
    train_ranks(data, tmp_path / "straight", *settings)
    train_ranks(data, tmp_path / "run", *settings, "training.max_updates=6")
    train_ranks(data, tmp_path / "run", *settings)
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_translate_average_and_score(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, reference = (data.parent / "text" / f"test.{language}" for language in ("en", "de"))
    assert main(["average", "--run", str(whole), "--last", "2"]) == 0

    def translated(which: str, *more: str) -> list[str]:
        options = ["--beam", "3", "--length-penalty", "none", "--checkpoint", which, *more]
        return commands.translate(whole, source, tmp_path / "out", *options)

    texts = {which: translated(which) for which in ("best", "last", "average")}
    assert [len(lines) for lines in texts.values()] == [20] * 3
    assert translated("last", "--max-tokens", "1") == texts["last"], "the batch size does not change translations"
    translated("last", "--nbest", "2")
    lists = read_nbest(str(tmp_path / "out"))
    assert [len(candidates) for candidates in lists] == [2] * 20
    assert [candidates[0].text for candidates in lists] == texts["last"]
    assert all(one.score == one.features["log_prob"] for candidates in lists for one in candidates)
    (tmp_path / "best").write_text("\n".join([*texts["best"], ""]), encoding="utf-8")
    bleu = sacrebleu.corpus_bleu(texts["best"], [reference.read_text(encoding="utf-8").splitlines()]).score
    capsys.readouterr()
    assert main(["score", "--hypothesis", str(tmp_path / "best"), "--reference", str(reference), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"]["score"] == pytest.approx(bleu, abs=0.01)


def test_a_stop_request_during_the_start_ends_the_run_before_its_first_update(
    data: Path, tmp_path: Path, small: list[str]
) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "deepspeed_nmt", *train_words(data, run, *small)]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream, env={**os.environ, "PYTHONPATH": str(ROOT)})
    status, usr1 = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGUSR1 - 1)
    try:
        await_until(
            lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & usr1, process, log, within=150
        )
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=300) == 75, log.read_text()
    finally:
        process.kill()
    assert "SIGUSR1 after update 0" in log.read_text()
    assert not list(run.glob("checkpoints/update-*"))
    assert train(data, run, *small, "training.max_updates=1") == 0


def test_a_run_of_moses_text_is_scored_by_every_metric_and_detokenised(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample text is plain, but has its full stops at words, which only tokens lack."""
    moses, text = tmp_path / "data", data.parent / "text"
    words = ["prepare", "--out", str(moses), "--vocab-size", "500", "--text", "moses"]
    words += ["--source-lang", "en", "--target-lang", "de", *pair_words(text, train="train", valid="valid")]
    assert main(words) == 0
    run = shutil.copytree(whole, tmp_path / "run")
    assert json.loads((run / "data.json").read_text())["text"]["form"] == "raw"
    metrics = ["validation.metrics=[bleu,bleu_tokenised,chrf,ter]", "validation.best_by=ter"]
    assert train(moses, run, *SMALL, *metrics, "training.max_updates=13", "collapse.every=0") == 0
    assert "valid/bleu_tokenised: nrefs:1|case:mixed|eff:no|tok:none" in capsys.readouterr().err
    last = log_of(run)[-1]
    assert {tag for tag in last if tag.startswith("valid/")} == {
        *("valid/loss", "valid/nll", "valid/ppl", "valid/bleu", "valid/bleu_tokenised", "valid/chrf", "valid/ter")
    }
    progress, record = checkpoint(run, 13).progress, checkpoint(run, 13).run
    assert progress.best_by is not None and progress.best_by.startswith("valid/ter by settings ")
    assert (progress.best_update, progress.best_score) == (13, -last["valid/ter"])
    assert record is not None and record.text == TextForm(form="moses", source_lang="en", target_lang="de")

    def translated(path: Path, *option: str) -> list[str]:
        options = ["--checkpoint", "update-0000012", "--beam", "1", *option]
        capsys.readouterr()
        lines = commands.translate(path, text / "test.en", tmp_path / "out", *options)
        said = capsys.readouterr().err
        assert ("look like plain text" in said) == (path == run), "it was trained on tokens"
        assert ("--detokenise changes nothing" in said) == (path == whole), "raw text is plain already"
        return lines

    tokens = translated(run)
    assert translated(run, "--detokenise") == detokenise(tokens, "de")
    assert translated(whole, "--detokenise") == tokens
