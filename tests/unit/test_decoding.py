"""Settings of the search that decodes with a run."""

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


def test_an_option_of_another_search_is_refused_by_name() -> None:
    end = "which decodes here, but of "
    assert refusal("transformer_base", {"alpha": 0.5}).endswith(f"search.name=beam, {end}deep_shallow; leave it out")
    assert "search.name=mask_predict, which decodes here" in refusal("abnet_serial", {"beam": 4})
    assert refusal("depth_growing_big_8", {"alpha": 0.5}, "exit").endswith(f"{end}deep_shallow; leave it out")
