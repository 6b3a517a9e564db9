"""Figures and rules of docs/first-day.md are those of the program."""

from __future__ import annotations

import re

from deepspeed_nmt.config import load_config
from deepspeed_nmt.run.directory import _FIXED
from tests.support import ROOT

PAGE = (ROOT / "docs" / "first-day.md").read_text(encoding="utf-8").replace("\n", " ")


def test_settings_that_must_stay_are_those_of_the_program() -> None:
    section = PAGE.split("## Which settings may change")[1].split("All others may change")[0]
    named = {name.removesuffix(".*") for name in re.findall(r"`([a-z_]+\.[a-z_*]+)`", section)}
    assert named == {name.removesuffix(".") for name in _FIXED}
    changeable = PAGE.split("All others may change")[1].split("##")[0]
    settings = load_config("deep_decoder_big_54").flat()
    for name in re.findall(r"`([a-z]+\.[a-z_]+)`", changeable):
        assert name in settings and not f"{name}.".startswith(_FIXED), name
