"""Properties, tried on a number of examples or for a time."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

Check = Callable[[Any], None]
HOURS = float(os.environ.get("FUZZ_HOURS", "1"))
"""Time of all tests that try random examples."""


def explore(check: Check, examples: SearchStrategy[Any], number: int) -> None:
    """Try a property on a number of examples, the same ones every time."""
    settings(settings.get_profile("ci"), max_examples=number)(given(examples)(lambda example: check(example)))()


def explore_for(seconds: float, check: Check, examples: SearchStrategy[Any]) -> int:
    """Try a property on random examples for a time (in HOURS = 1), and return their number."""
    end, done = time.monotonic() + HOURS * seconds, 0

    def counted(example: Any) -> None:
        nonlocal done
        if time.monotonic() < end:  # a round of hypothesis cannot be stopped
            done += 1
            check(example)

    while time.monotonic() < end:
        chosen = hypothesis.seed(random.SystemRandom().getrandbits(64))(given(examples)(counted))
        settings(settings.get_profile("full"))(chosen)()
    return done
