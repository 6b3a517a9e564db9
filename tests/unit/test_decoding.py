"""Settings of the search that decodes with a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.run.opening import search_settings


@dataclass
class StubRun:
    """A run that has settings alone."""

    config: RunConfig
    path: Path = Path("run")


def refusal(recipe: str, changes: dict[str, Any], *exits: str, settings: tuple[str, ...] = ()) -> str:
    run: Any = StubRun(load_config(recipe, settings=settings))
    with pytest.raises(ConfigError) as error:
        search_settings([run], changes, exits)
    return str(error.value)


def test_remedies_are_possible_for_the_model() -> None:
    base, grown, masked = "transformer_base", "depth_growing_big_8", "abnet_serial"
    end = "which decodes here; "
    assert refusal(base, {"alpha": 0.5}).endswith(f"search.name=beam, {end}leave it out")
    assert refusal(masked, {"beam": 4}).endswith(f"search.name=mask_predict, {end}leave it out")
    assert refusal(base, {"iterations": 4}).endswith(f"search.name=beam, {end}leave it out")
    alone = refusal(grown, {"alpha": 0.5}, settings=("search.name=beam",))
    assert alone.endswith(f"{end}use search deep_shallow, or leave it out")
    shallow = refusal(grown, {"alpha": 0.5}, "exit")
    assert shallow.endswith(f"{end}leave out `exit` to decode with deep_shallow, or leave out `alpha`")
