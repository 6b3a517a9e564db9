"""Settings and options of no sensible value: refused by name, at once, in a sentence that shows them shortly."""

from pathlib import Path

import pytest

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import load_config
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.evaluate.metrics import METRICS as ALL_METRICS

LONG = "n" * 300
KNOWN = ", ".join(ALL_METRICS)
METRICS = f"{KNOWN}, command:PATH, late:PATH"
PREPARE = [
    *("prepare", "--train-source", "F", "--train-target", "F", "--valid-source", "F", "--valid-target", "F"),
    *("--out", "D"),
]
PLAN = ["plan", "--recipe", "transformer_base"]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("layer.name=-", "layer.name is [None], which is no known layer; known: cross_attention_drop, "),
        ("model={name: [1, 2]}", "model.name is [1, 2], which is no known model; known: "),
        ("objective=-", "objective is [None]; give a section with keys"),
        ("training.seed=" + "9" * 5000, "training.seed is '9999"),
        ("model.dim=2147483647", "model.dim is 2147483647"),
        ("optimizer.lr=" + "9" * 400, "optimizer.lr is '999"),
        ("model.name=2001-99-99", "model.name is '2001-99-99', which is no known model; known: "),
        ("a" + ".a" * 5000 + "=1", "'a.a."),
        ("validation.best_by=x", f"validation.best_by is 'x', which is none of auto, loss, {KNOWN}"),
        ("validation.metrics=[blue]", f"validation.metrics has 'blue', which is none of {METRICS}"),
        ("model.dim=\udcff", "model.dim is '\\udcff'"),
        ("training.patience=yes", "training.patience is True; give a whole number"),
        ("batch.micro_tokens=yes", "batch.micro_tokens is True; use auto, or a whole number from 1 to "),
        ("optimizer.lr=on", "optimizer.lr is True; give a number"),
        ("objective={label_smoothed: null, multi_softmax: {weights: {1-1: yes}}}",
         "objective.multi_softmax.weights is {'1-1': True}; give a number"),
        ("growth.at=[no]", "growth.at is [False]; give a whole number"),
        ("model.name=" + LONG, "model.name is 'nnnn"),
        ("search.length_penalty=x", "search.length_penalty must be gnmt:A or power:A with A from 0 to 10, mean, or "
         "none, but is 'x'; the usual one is gnmt:0.6"),
    ],
    ids=lambda text: text[:30],
)  # fmt: skip
def test_a_setting_is_refused_in_a_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings=[setting])
    (problem,) = caught.value.problems
    assert problem.startswith(sentence)
    assert len(problem) < 400


def test_a_gpu_that_is_missing_is_not_replaced_by_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="`device` is cuda, but torch finds no GPU; use cpu"):
        Translator.open("RUN", device="cuda")
    with pytest.raises(ConfigError, match=r"`device` .* 'gpu'"):
        Translator.open("RUN", device="gpu")
    assert main(["translate", "--run", "RUN", "--device", "cuda", "--input", __file__, "--output", "-"]) == 2
    assert "--device is cuda, but torch finds no GPU" in capsys.readouterr().err


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", "--sweep", "../x"], "--sweep must name a known sweep, but is '../x'; known: deep_decoder_fig1, "),
        (["plan", "--recipe", "sweeps/deep_decoder_fig1"], "--recipe must name a known recipe"),
        ([*PLAN, "--vocab-size", str(10**12)], "--vocab-size is "),
        ([*PLAN, "--num-gpus", str(10**400)], "--num-gpus is 1000"),
        ([*PLAN, "--bandwidth", "9"], "--bandwidth is that of GPUs, but --gpu is not given"),
        ([*PREPARE, "--seed", "-1"], "--seed is -1"),
        ([*PREPARE, "--tokenizer", "x"], "error: --tokenizer is 'x', not hf:BERT or hf:BERT,BERT"),
        ([*PREPARE[:-1], LONG], "File name too long ('"),
        (["sample-data", "--out", LONG], "cannot be written"),
        (["train", "--config", LONG, "--data", "D", "--run", "R"], "must be a YAML file, but cannot be read"),
        (["selftest", "--ranks", str(10**9)], "--ranks is 1000000000"),
    ],
    ids=lambda words: " ".join(words)[:40] if isinstance(words, list) else "",
)  # fmt: skip
def test_an_option_is_refused_in_a_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Value error" not in error and "Input should" not in error
    assert len(error) < 1500
