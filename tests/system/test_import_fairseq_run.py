"""A model of fairseq, imported with its data, trained further, and exported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.core.model import TranslationModel
from tests.support import ROOT

FIXTURE = ROOT / "tests" / "fixtures" / "fairseq" / "post"


def test_a_warm_start_trains_the_imported_weights(tmp_path: Path) -> None:
    run, data, tuned = (tmp_path / name for name in ("run", "data", "tuned"))
    line = ["import-fairseq", "--from", str(FIXTURE / "checkpoint.pt"), "--data-bin", str(FIXTURE / "data-bin")]
    assert main([*line, "--run", str(run), "--out", str(data), "--workers", "1"]) == 0
    small = ["batch.update_tokens=300", "batch.micro_tokens=600", "training.max_updates=2", "collapse.every=0"]
    small += ["validation.metrics=[]", "engine.device=cpu", "engine.name=plain", "optimizer.lr=1e-9"]
    line = ["train", "--config", str(run / "config.yaml"), "--data", str(data)]
    assert main([*line, "--run", str(tuned), "--init-from", str(run), *small]) == 0
    before, after = (Translator.open(each, device="cpu").model for each in (run, tuned))
    assert isinstance(before, TranslationModel) and isinstance(after, TranslationModel)
    parameters = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        difference = (parameter - parameters[name]).abs().max()
        assert difference < 1e-6, name


def test_an_imported_model_is_exported(tmp_path: Path) -> None:
    """EOS is the first token of the decoder there, too."""
    run = tmp_path / "run"
    line = ["import-fairseq", "--from", str(FIXTURE / "checkpoint.pt"), "--data-bin", str(FIXTURE / "data-bin")]
    assert main([*line, "--run", str(run)]) == 0
    text = ["--source", str(FIXTURE / "data-bin" / "train.en"), "--reference", str(FIXTURE / "data-bin" / "train.de")]
    for format, package in (("ctranslate2", "ctranslate2"), ("huggingface", "transformers")):
        if find_spec(package) is not None:
            assert (
                main(["export", "--run", str(run), "--format", format, "--out", str(tmp_path / format), *text]) == 0
            )
