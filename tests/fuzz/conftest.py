"""Profiles of hypothesis, and a tiny run that the tests by random input share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from deepspeed_nmt.sample.corpus import write_sample
from tests.fuzz.program import run_program

COMMON = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    # Every example runs a command, so a smaller one would take minutes to find.
    "phases": [Phase.generate],
}
settings.register_profile("ci", derandomize=True, **COMMON)
settings.register_profile("full", max_examples=100, print_blob=True, **COMMON)

TINY = [
    *("model.dim=8", "model.ffn_dim=8", "model.heads=1", "model.encoder_layers=2", "model.decoder_layers=1"),
    *("batch.update_tokens=200", "batch.micro_tokens=200", "training.max_updates=2", "training.validate_every=1"),
    *("search.beam=2", "search.max_length_ratio=0.1", "search.max_length_extra=3", "validation.max_sentences=2"),
    *("collapse.every=1", "collapse.sentences=3", "engine.device=cpu", "objective.multi_softmax={}"),
]
"""Settings of a run of two updates with several exits, so that every command can use it."""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of a launcher, which a test before may have left, do not make a command one of several ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with text/, data/ and run/, to copy."""
    directory = tmp_path_factory.mktemp("tiny")
    write_sample(directory / "text", train=200, valid=4, test=4, seed=3)
    words = ["prepare", "--out", "data", "--vocab-size", "400", "--max-length", "50"]
    for split in ("train", "valid"):
        words += [f"--{split}-source", f"text/{split}.en", f"--{split}-target", f"text/{split}.de"]
    assert run_program(words, directory, ["data"]).status == 0
    assert run_program(["train", "--data", "data", "--run", "run", *TINY], directory, ["run"]).status == 0
    return directory


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory that every example clears."""
    directory = tmp_path_factory.mktemp("place")
    yield directory
    shutil.rmtree(directory)
