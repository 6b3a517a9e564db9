"""Whole runs: their files, and resumption to the bit."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.evaluate.nbest import read_nbest
from deepspeed_nmt.run.manifest import DataRecord, replace_files
from deepspeed_nmt.text import TextForm, detokenise
from deepspeed_nmt.train.board import LAYOUT
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.programs import Program
from tests.support import ROOT, assert_same, change_settings, rank_environment, run_ranks
from tests.system.conftest import SMALL


def train(data: Path, run: Path, *settings: str) -> int:
    """Train in this process."""
    return main(["train", "--data", str(data), "--run", str(run), *settings])


def train_ranks(data: Path, run: Path, *settings: str) -> None:
    """Train on two ranks."""
    run.mkdir(exist_ok=True)
    command = ["-m", "deepspeed_nmt", "train", "--data", str(data), "--run", str(run), *settings]
    run_ranks(command, 2, run, timeout=100)


def weights(run: Path, update: int) -> dict[str, torch.Tensor]:
    """Return all weights of a checkpoint."""
    return Checkpoint(run / "checkpoints" / f"update-{update:07d}").weights()


PARTS = ("layer_01", "layer_02", "final_norm")


def not_drawn(tags: set[str]) -> set[str]:
    """Return the tags that no chart of TensorBoard's layout shows."""
    patterns = [pattern for charts in LAYOUT.values() for _, each in charts.values() for pattern in each]
    return {tag for tag in tags if not any(re.match(pattern, tag) for pattern in patterns)}


def events(run: Path) -> list[dict[str, Any]]:
    """Return the history of a run."""
    return [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted plain run of twelve updates."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert train(data, run, *SMALL, "training.norms_every=4") == 0
    return run


def test_a_run_goes_on_with_compiled_layers(
    whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    settings = [*SMALL, "engine.compile=layers", "training.max_updates=14"]

    def fail(function: object) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", fail)
    assert train(data, run, *settings) == 2
    assert "fails on cpu: No working C++ compiler found; install a C++ compiler" in capsys.readouterr().err
    assert train(data, tmp_path / "new", *settings) == 2 and not (tmp_path / "new").exists(), "nothing is left"
    monkeypatch.undo()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    assert train(data, run, *settings) == 0
    log = (run / "logs" / "rank-0.log").read_text()
    assert "compiled layers" in log and "layers are compiled as they first run" in log
    assert json.loads((run / "resolved.json").read_text())["compile"] == "layers"
    assert json.loads((whole / "resolved.json").read_text())["compile"] == "off"
    assert weights(run, 14).keys() == weights(whole, 12).keys()
    assert len(Translator.open(run, device="cpu").translate(["a b"])) == 1


def test_files_and_metrics_of_a_run(whole: Path) -> None:
    assert {path.name for path in whole.iterdir()} == {
        *("config.yaml", "data.json", "environment.json", "metrics.jsonl", "tensorboard", "checkpoints"),
        "events.jsonl",
        *("vocabulary.model", "vocabulary.json", "logs", "resolved.json"),
        *("manifest.json", "manifest.json.sha256", "validation"),
    }
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [4, 4, 4, 8, 8, 8, 12, 12, 12, 12]
    tags = {tag for line in lines for tag in line} - {"update"}
    parts = ["source_embedding", *(f"{side}/{part}" for side in ("encoder", "decoder") for part in PARTS)]
    assert tags == {
        *(f"norm/{kind}/{part}" for kind in ("gradient", "update") for part in parts),
        *("train/loss", "train/nll", "train/ppl", "train/grad_norm", "train/lr", "train/loss_scale", "train/skipped"),
        *(
            "train/spikes",
            "train/rollbacks",
            "train/target_tokens",
            "collapse/source_reliance",
            "collapse/nll",
            "collapse/seconds",
        ),
        *("collapse/cross_share/layer_01", "collapse/cross_share/layer_02"),
        *("valid/loss", "valid/nll", "valid/ppl", "valid/bleu"),
        *("perf/target_tokens_per_s", "perf/padding", "perf/data_wait", "perf/memory", "perf/hours"),
    }
    board = EventAccumulator(str(whole / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == tags
    assert not_drawn(tags) == {"train/target_tokens", "perf/hours", "collapse/seconds"}
    assert board.Tags()["images"] == [f"attention/sentence_{number}" for number in (1, 2, 3)]
    assert [image.step for image in board.Images("attention/sentence_3")] == [4, 8, 12]
    losses = [line["valid/loss"] for line in lines if "valid/loss" in line]
    assert losses[-1] < losses[0], "the loss falls"
    norms = next(line for line in lines if "norm/gradient/source_embedding" in line)
    total = math.sqrt(sum(value**2 for tag, value in norms.items() if tag.startswith("norm/gradient/")))
    assert total == pytest.approx(lines[0]["train/grad_norm"], rel=1e-4)
    assert json.loads((whole / "environment.json").read_text())["packages"]["torch"]


def test_a_resumed_run_equals_an_uninterrupted_one(data: Path, whole: Path, tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    assert train(data, run, *small, "training.max_updates=6") == 0
    assert train(data, run, *small) == 0
    assert_same(run, whole)
    updates = [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert updates == sorted(updates), "one continuous log"
    history = [(event["event"], event["update"]) for event in events(run) if event["event"] != "best"]
    assert history == [("start", 0), ("end", 6), ("resume", 6), ("end", 12)]
    assert (events(run)[0]["ranks"], events(run)[0]["host"]) == (1, socket.gethostname())
    best = [event for event in events(run) if event["event"] == "best"]
    # BLEU below 1 is no measure yet.
    assert best and best[-1]["measure"] == "valid/loss" and best[-1]["score"] == best[-1]["loss"]


def test_a_finished_run_started_again_does_nothing(data: Path, whole: Path, small: list[str]) -> None:
    before, history = (whole / "checkpoints" / "latest").stat().st_mtime_ns, events(whole)
    assert train(data, whole, *small) == 0
    assert (whole / "checkpoints" / "latest").stat().st_mtime_ns == before
    assert events(whole) == history and history[-1]["event"] == "end"


def test_a_damaged_checkpoint_costs_time_but_changes_nothing(
    data: Path, whole: Path, tmp_path: Path, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(data, run, *small, "training.max_updates=8") == 0
    file = run / "checkpoints" / "update-0000008" / "weights-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert train(data, run, *small) == 0
    assert "using update-0000004, because update-0000008 is damaged" in capsys.readouterr().err
    assert_same(run, whole)


def test_ctrl_c_saves_and_explains_how_to_resume(data: Path, whole: Path, tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "deepspeed_nmt", "train", "--data", str(data), "--run", str(run), *small]
    long = [*command, "training.max_updates=100000", "training.validate_every=50000", "training.log_every=1"]
    # As many threads as this process: equal bits need equal thread counts.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(long, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "update 5/" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.communicate(timeout=150)[1]
    finally:
        process.kill()
    assert process.returncode == 75, rest
    assert "stopped by SIGINT after update" in rest and "start the same command again to resume" in rest
    stopped_at = Checkpoint(next((run / "checkpoints").glob("update-*"))).progress.update
    assert stopped_at >= 5
    last = f"training.max_updates={stopped_at + 3}"
    assert train(data, run, *small, last) == 0
    assert train(data, tmp_path / "straight", *small, last) == 0
    assert_same(run, tmp_path / "straight", stopped_at + 3)


def test_a_lost_terminal_saves_and_stops(data: Path, tmp_path: Path, small: list[str]) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    words = [*small, "training.max_updates=100000", "training.validate_every=50000", "training.log_every=1"]
    words += [f"training.notify=sh -c 'cat > {shlex.quote(str(tmp_path))}/notice'"]
    command = ["-m", "deepspeed_nmt", "train", "--data", str(data), "--run", str(run), *words, "collapse.every=0"]
    process = Program(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log)
    try:
        deadline = time.monotonic() + 150
        while "update 5/" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=150) == 75, log.read_text()
    finally:
        process.kill()
    assert "stopped by SIGHUP after update" in log.read_text()
    last = events(run)[-1]
    assert (last["event"], last["signal"]) == ("stop", "SIGHUP") and last["update"] >= 5
    assert json.loads((tmp_path / "notice").read_text()) == last
    assert Checkpoint(next((run / "checkpoints").glob("update-*"))).progress.update >= 5


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_two_ranks_resume_to_the_bit_and_validate_unequal_numbers_of_sentences(
    data: Path, whole: Path, tmp_path: Path, small: list[str], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine a trial of the libraries for products may end differently from one start to the next.
    monkeypatch.setenv("DEEPSPEED_NMT_CPU_PRODUCTS", "blas")
    settings = [*small, "engine.name=deepspeed", f"engine.ds_config={stage}"]
    train_ranks(data, tmp_path / "straight", *settings)
    train_ranks(data, tmp_path / "run", *settings, "training.max_updates=6")
    train_ranks(data, tmp_path / "run", *settings)
    assert_same(tmp_path / "run", tmp_path / "straight")


def test_another_engine_and_number_of_ranks_continue_the_curve(data: Path, tmp_path: Path, small: list[str]) -> None:
    settings = [*small, "model.dropout=0"]
    assert train(data, tmp_path / "one", *settings) == 0
    train_ranks(data, tmp_path / "run", *settings, "training.max_updates=6", "engine.ds_config=zero2")
    assert train(data, tmp_path / "run", *settings) == 0
    expected = weights(tmp_path / "one", 12)
    for name, weight in weights(tmp_path / "run", 12).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=2e-5, msg=name)


def test_the_deepspeed_launcher_runs_it(data: Path, tmp_path: Path, small: list[str]) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        *(sys.executable, str(launcher), "--num_accelerators", "2", "--master_port", str(_port())),
        *("--module", "deepspeed_nmt", "train", "--data", str(data), "--run", str(tmp_path / "run"), *small),
    ]
    environment = {
        name: value
        for name, value in rank_environment(0, 1, 0, tmp_path).items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment["PATH"] = f"{launcher.parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 x cpu; DeepSpeedEngine" in done.stdout + done.stderr
    assert len(weights(tmp_path / "run", 12)) > 10


def _port() -> int:
    from tests.support import free_port

    return free_port()


def test_translate_average_and_score(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = data.parent / "text" / "test.en"
    assert main(["average", "--run", str(whole), "--last", "2"]) == 0
    texts = {}
    for which in ("best", "last", "average"):
        out = tmp_path / which
        assert (
            main(
                [
                    "translate",
                    "--run",
                    str(whole),
                    "--checkpoint",
                    which,
                    "--input",
                    str(source),
                    "--output",
                    str(out),
                    "--beam",
                    "3",
                    "--length-penalty",
                    "none",
                ]
            )
            == 0
        )
        texts[which] = out.read_text(encoding="utf-8")
        assert texts[which].count("\n") == 20
    small = tmp_path / "small"
    assert (
        main(
            [
                "translate",
                "--run",
                str(whole),
                "--checkpoint",
                "last",
                "--input",
                str(source),
                "--output",
                str(small),
                "--beam",
                "3",
                "--length-penalty",
                "none",
                "--max-tokens",
                "1",
            ]
        )
        == 0
    )
    assert small.read_text(encoding="utf-8") == texts["last"], "the batch size does not change translations"
    nbest = tmp_path / "nbest"
    assert (
        main(
            [
                "translate",
                "--run",
                str(whole),
                "--input",
                str(source),
                "--output",
                str(nbest),
                "--nbest",
                "2",
                "--beam",
                "3",
                "--checkpoint",
                "last",
                "--length-penalty",
                "none",
            ]
        )
        == 0
    )
    lists = read_nbest(str(nbest))
    assert [len(each) for each in lists] == [2] * 20
    assert [each[0].text for each in lists] == texts["last"].splitlines()
    assert all(each.score == each.features["log_prob"] for found in lists for each in found)
    capsys.readouterr()
    reference = str(data.parent / "text" / "test.de")
    assert main(["score", "--hypothesis", str(tmp_path / "best"), "--reference", reference, "--json"]) == 0
    score = json.loads(capsys.readouterr().out)["bleu"]["score"]
    lines = [(tmp_path / "best").read_text(encoding="utf-8"), Path(reference).read_text(encoding="utf-8")]
    hypotheses, references = (text.splitlines() for text in lines)
    assert score == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=0.01)
    assert main(["score", "--hypothesis", reference, "--reference", reference, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"]["score"] == pytest.approx(100.0)


def test_translate_tells_what_is_wrong_with_its_input(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out, lines = tmp_path / "source", tmp_path / "out", ["The dog sleeps.", "The dog " * 30, "The cat " * 40]
    words = ["translate", "--run", str(whole), "--input", str(source), "--output", str(out), "--beam", "1"]

    def translated(text: str, *more: str, status: int = 0) -> tuple[list[str], str]:
        source.write_text(text, encoding="utf-8")
        out.write_text("before")
        capsys.readouterr()
        assert main([*words, *more]) == status
        return out.read_text(encoding="utf-8").splitlines(), capsys.readouterr().err

    whole_lines, said = translated("\n".join(lines))
    assert "WARNING" not in said and "tokens" not in said
    marked, said = translated("\ufeff" + "\n".join(lines))
    assert marked == whole_lines and "source: the byte order mark at its beginning is not read as text" in said
    cut, said = translated("\n".join(lines), "--max-source-tokens", "20")
    assert cut[0] == whole_lines[0] and len(cut) == 3
    assert "line 2 has " in said and "2 of 3 lines were cut to 20 tokens: lines 2, 3" in said
    kept, said = translated("\n".join(lines), "--max-source-tokens", "20", "--strict", status=2)
    assert kept == ["before"] and "20 tokens at most (--max-source-tokens), but line 2 has " in said
    assert "sentences in" not in said, "nothing was translated"
    assert translated("\n".join(lines), "--strict")[0] == whole_lines
    assert "--max-source-tokens must be a whole number of" in translated("a", "--max-source-tokens=0", status=2)[1]
    _, said = translated("これは日本語の文です。\n猫が寝ている。\n")
    assert "tokens up to line 2 (" in said and "unknown to the vocabulary" in said


def test_lines_as_long_as_the_training_text_are_translated_whole(whole: Path, tmp_path: Path) -> None:
    run, record = tmp_path / "run", json.loads((whole / "data.json").read_text())
    shutil.copytree(whole, run)
    saved = Checkpoint(whole / "checkpoints" / "update-0000012").run
    assert saved is not None and 5 < saved.longest_source == record["longest_source"] < 100
    for longest, expected in ((3000, 3000), (100, 1024)):
        replace_files(run, {"data.json": DataRecord(**{**record, "longest_source": longest}).content()})
        assert Translator.open(run).max_source_tokens == expected
        assert Translator.open([run, whole]).max_source_tokens == 1024, "every run of an ensemble reads it"
    replace_files(run, {"data.json": json.dumps({key: record[key] for key in ("path", "fingerprint")}).encode()})
    assert Translator.open(run).max_source_tokens == 1024, "an older run"


def test_a_stop_request_during_the_start_ends_the_run_before_its_first_update(
    data: Path, tmp_path: Path, small: list[str]
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "deepspeed_nmt", "train", "--data", str(data), "--run", str(run), *small]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        deadline, usr1 = time.monotonic() + 150, 1 << (signal.SIGUSR1 - 1)
        status = Path(f"/proc/{process.pid}/status")
        while not int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & usr1:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=150)[1]
    finally:
        process.kill()
    assert process.returncode == 75, said
    assert "stopped by SIGUSR1 after update 0; start the same command again" in said
    assert not list(run.glob("checkpoints/update-*"))
    assert train(data, run, *small, "training.max_updates=1") == 0


def test_patience_stops_a_run_that_no_longer_improves(data: Path, tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    frozen = ["optimizer.lr=1e-30", "schedule.initial_lr=0", "validation.metrics=[]"]
    settings = [*small, *frozen, "training.patience=2", "training.max_updates=400"]
    for _ in range(2):  # it is still finished when started again
        assert train(data, run, *settings) == 0
        (last,) = (run / "checkpoints").glob("update-*012")
        progress = Checkpoint(last).progress
        assert (progress.update, progress.best_update, progress.validations_since_best) == (12, 4, 2)
        assert len(list((run / "checkpoints").glob("update-*"))) == 3


def test_a_run_resumes_with_its_own_settings_and_data(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--run", "new", *SMALL]) == 2
    assert "error: --data is required to start a run, but missing; give a directory" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["train", "--run", "run", "training.max_updates=14"]) == 0
    assert Checkpoint(run / "checkpoints" / "update-0000014").progress.update == 14
    assert "dim: 32" in (run / "config.yaml").read_text()


def test_a_run_of_moses_text_is_scored_by_every_metric_and_detokenised(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample text is plain, but has its full stops at words, which only tokens lack."""
    run, moses, text = tmp_path / "run", tmp_path / "data", data.parent / "text"
    words = ["prepare", "--out", str(moses), "--vocab-size", "500"]
    for split in ("train", "valid", "test"):
        words += [f"--{split}-source", str(text / f"{split}.en"), f"--{split}-target", str(text / f"{split}.de")]
    assert main([*words, "--text", "moses", "--source-lang", "en", "--target-lang", "de"]) == 0
    shutil.copytree(whole, run)
    assert json.loads((run / "data.json").read_text())["text"]["form"] == "raw"
    metrics = ["validation.metrics=[bleu,bleu_tokenised,chrf,ter]", "validation.best_by=ter"]
    assert train(moses, run, *SMALL, *metrics, "training.max_updates=13", "collapse.every=0") == 0
    said = capsys.readouterr().err
    assert "; detokenised by Moses' rules for de" in said
    assert "valid/bleu_tokenised: nrefs:1|case:mixed|eff:no|tok:none" in said and ", valid ter " in said
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {tag for tag in last if tag.startswith("valid/")} == {
        *("valid/loss", "valid/nll", "valid/ppl", "valid/bleu", "valid/bleu_tokenised", "valid/chrf", "valid/ter")
    }
    checkpoint = Checkpoint(run / "checkpoints" / "update-0000013")
    progress = checkpoint.progress
    assert (progress.best_by, progress.best_update, progress.best_score) == ("valid/ter", 13, -last["valid/ter"])
    record = checkpoint.run
    assert record is not None and record.text == TextForm(form="moses", source_lang="en", target_lang="de")
    outputs = {}
    for path, option in (
        (run, []),
        (run, ["--detokenise"]),
        (run, ["--detokenise", "fr"]),
        (whole, ["--detokenise"]),
    ):
        out = tmp_path / "out"
        command = ["translate", "--run", str(path), "--checkpoint", "update-0000012", "--beam", "1", *option]
        assert main([*command, "--input", str(text / "test.en"), "--output", str(out)]) == 0
        outputs[(path, *option)] = out.read_text(encoding="utf-8").splitlines()
        said = capsys.readouterr().err
        assert ("look like plain text, but the run was trained on tokenised text" in said) == (path == run)
        assert (f"--detokenise changes nothing, because {whole} was trained on plain" in said) == (path == whole)
    tokens = outputs[run,]
    assert outputs[run, "--detokenise"] == detokenise(tokens, "de")
    assert outputs[run, "--detokenise", "fr"] == detokenise(tokens, "fr")
    assert outputs[whole, "--detokenise"] == tokens, "raw text is plain already"
    assert main(["translate", "--run", str(run), "--input", "-", "--output", "-", "--detokenise", "German"]) == 2
    assert "--detokenise must be a language code, for example de, but is 'German'" in capsys.readouterr().err


def test_a_run_with_the_settings_of_older_versions_is_resumed_and_translates(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["validation"] = {"bleu": True, "best_by": "bleu", "max_sentences": 7, "max_tokens": 4096}
    change_settings(run, config)
    record = json.loads((run / "data.json").read_text())
    del record["text"]
    replace_files(run, {"data.json": json.dumps(record).encode()})
    out = tmp_path / "out"
    command = [
        "translate",
        "--run",
        str(run),
        "--input",
        str(run / "config.yaml"),
        "--output",
        str(out),
        "--beam",
        "1",
    ]
    assert main(command) == 0
    assert main([*command, "--detokenise"]) == 2
    assert "--detokenise needs a run that records the form of its text, but" in capsys.readouterr().err
    assert main([*command, "--detokenise", "de"]) == 0
    assert main(["train", "--run", str(run), "training.max_updates=13", "collapse.every=0"]) == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {tag for tag in last if tag.startswith("valid/")} == {"valid/loss", "valid/nll", "valid/ppl", "valid/bleu"}
    now = yaml.safe_load((run / "config.yaml").read_text())["validation"]
    assert (now["metrics"], now["best_by"], "bleu" in now) == ("auto", "auto", False)
