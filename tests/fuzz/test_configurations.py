"""Every configuration ends in a plan, in a trained update, or in a sentence."""

import shutil
from pathlib import Path

from hypothesis import strategies as st

from deepspeed_nmt.recipes import recipes
from tests.fuzz.configurations import words
from tests.fuzz.conftest import Explore
from tests.fuzz.program import run_program

GPUS = [None, None, "v100-32g", "h100-80g", "x:1"]
SMALL = ["training.max_updates=1", "engine.device=cpu", "validation.max_sentences=2", "search={}"]


def plans() -> st.SearchStrategy[tuple[str, list[str], str | None]]:
    """Recipes, mostly a small one, words of settings, and GPUs."""
    names = st.integers(0, 29).flatmap(lambda n: st.just("sample_small") if n else st.sampled_from(recipes()))
    return st.tuples(names, words(), st.sampled_from(GPUS))


def check_plan(place: Path, case: tuple[str, list[str], str | None]) -> None:
    """Plan a run with these settings."""
    recipe, chosen, gpu = case
    options = [] if gpu is None else ["--gpu", gpu]
    run_program(["plan", "--recipe", recipe, "--vocab-size", "100", *options, *chosen], place)


def check_training(tiny: Path, place: Path, chosen: list[str]) -> None:
    """Train one update with these settings."""
    shutil.rmtree(place / "run", ignore_errors=True)
    run_program(["train", "--data", str(tiny / "data"), "--run", "run", *chosen, *SMALL], place, ["run"])


def test_words(place: Path, explore: Explore) -> None:
    explore(lambda case: check_plan(place, case), plans(), 30, 300.0)


def test_training(tiny: Path, place: Path, explore: Explore) -> None:
    explore(lambda chosen: check_training(tiny, place, chosen), words(tame=True), 5, 300.0)
