"""Exploration by hypothesis, and a tiny run that the tests by random input share."""

import importlib.util
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from deepspeed_nmt.native import library as native
from deepspeed_nmt.sample import write_sample
from tests.fuzz.program import run_program

HOURS = float(os.environ.get("FUZZ_HOURS", "1"))
"""Time of all tests that try random examples."""
COMMON = settings(
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # every example runs a command, so a smaller one would take minutes to find
)
Explore = Callable[[Callable[[Any], object], SearchStrategy[Any], int, float], None]


@pytest.fixture(params=["few", pytest.param("many", marks=[pytest.mark.slow, pytest.mark.timeout(2000)])])
def explore(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Explore:
    """A function that tries a property: on a few examples, always the same, or on random ones for a time.

    Its arguments are the property, the examples, their number, and the time in seconds (in HOURS = 1).
    """

    def few(check: Callable[[Any], object], examples: SearchStrategy[Any], number: int, seconds: float) -> None:
        settings(COMMON, derandomize=True, max_examples=number)(given(examples)(lambda example: check(example)))()

    def many(check: Callable[[Any], object], examples: SearchStrategy[Any], number: int, seconds: float) -> None:
        end, done = time.monotonic() + HOURS * seconds, 0

        def counted(example: Any) -> None:
            nonlocal done
            if time.monotonic() < end:  # a round of hypothesis cannot be stopped
                done += 1
                check(example)

        while time.monotonic() < end:
            chosen = hypothesis.seed(random.SystemRandom().getrandbits(64))(given(examples)(counted))
            settings(COMMON, max_examples=100, print_blob=True)(chosen)()
        record_property("tried", f"{request.node.name}: {done} examples")

    return few if request.param == "few" else many


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


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of a BERT that does not exist is not looked for on the hub, again and again without a network."""
    if importlib.util.find_spec("huggingface_hub"):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with text/, data/ and run/, to copy."""
    native.obstacle()  # builds the code in its cache, outside of the directories that a command may change
    directory = tmp_path_factory.mktemp("tiny")
    write_sample(directory / "text", train=200, valid=4, test=4, seed=3)
    words = ["prepare", "--out", "data", "--vocab-size", "400", "--max-length", "50"]
    for split in ("train", "valid"):
        words += [f"--{split}-source", f"text/{split}.en", f"--{split}-target", f"text/{split}.de"]
    assert run_program(words, directory, ["data"]).status == 0
    assert run_program(["train", "--data", "data", "--run", "run", *TINY], directory, ["run"]).status == 0
    return directory


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that every example clears."""
    return tmp_path_factory.mktemp("place")
