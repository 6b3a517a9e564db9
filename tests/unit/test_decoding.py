"""Settings of the search that decodes with a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.registry import Entry
from deepspeed_nmt.run.opening import search_settings
from deepspeed_nmt.search import SEARCHES
from deepspeed_nmt.search.sampling import Sampling, SamplingConfig


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


class BoundedConfig(SamplingConfig):
    """Settings of a search that has no value of a setting that other searches have by default."""

    name: Literal["bounded"] = "bounded"  # type: ignore[assignment]
    max_length: int = Field(default=50, ge=1)


def test_another_search_takes_from_the_run_what_is_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SEARCHES, "_entries", dict(SEARCHES._entries))
    SEARCHES.add(Entry("bounded", BoundedConfig, Sampling))
    run: Any = StubRun(load_config("transformer_base", settings=("search.no_repeat_ngram=3",)))
    search = search_settings([run], {"name": "bounded"}, ()).model_dump()
    assert search["max_length"] == 50 and search["no_repeat_ngram"] == 3
    assert search_settings([run], {"name": "bounded", "max_length": 7}, ()).model_dump()["max_length"] == 7
    assert "max_length" in refusal("transformer_base", {"name": "bounded", "max_length": 0})


def test_an_option_of_another_search_is_refused_by_name() -> None:
    end = "which decodes here, but of "
    assert refusal("transformer_base", {"alpha": 0.5}).endswith(f"search.name=beam, {end}deep_shallow; leave it out")
    assert "search.name=mask_predict, which decodes here" in refusal("abnet_serial", {"beam": 4})
    assert refusal("depth_growing_big_8", {"alpha": 0.5}, "exit").endswith(f"{end}deep_shallow; leave it out")
