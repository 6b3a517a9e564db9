"""Fixtures of the system tests: a small prepared corpus, and the settings of a run that takes seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import prepare_sample, run_ranks


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of 400 sample pairs, with their text in the directory text/ beside it."""
    return prepare_sample(tmp_path_factory.mktemp("sample"), 500, train=400, valid=31, test=20)


SMALL = [
    *("model.dim=32", "model.ffn_dim=64", "model.heads=4", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("batch.update_tokens=600", "batch.micro_tokens=600", "schedule.warmup_updates=10", "optimizer.lr=2e-3"),
    *("training.max_updates=12", "training.validate_every=4", "training.log_every=4", "training.keep_last=9"),
    *("search.beam=2", "validation.max_sentences=7", "collapse.every=12", "engine.device=cpu"),
]


@pytest.fixture
def small() -> list[str]:
    """Settings of a run of twelve updates. It translates seven sentences, so that two ranks get unequal shares."""
    return list(SMALL)


@pytest.fixture(scope="session")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve updates, to translate with."""
    scratch = tmp_path_factory.mktemp("trained")
    words = ["train", "--recipe", "transformer_base", "--data", str(data), "--run", str(scratch / "run"), *SMALL]
    run_ranks(["-m", "deepspeed_nmt", *words, "engine.name=plain", "validation.metrics=[]"], 1, scratch)
    return scratch / "run"
