"""Settings of the search that decodes with runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.errors import ConfigError, did_you_mean, option, shown
from deepspeed_nmt.registry import problem_of
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search import SEARCHES


def search_settings(runs: Sequence[Run], changes: Mapping[str, Any], exits: Sequence[str]) -> SearchConfig:
    """Return the search of the first run with changed settings.

    Args:
        runs: to decode with.
        changes: settings by name; those that are None stay.
        exits: options by which the user chooses an exit.

    Raises:
        ConfigError: if a setting is unknown or out of range, or the model lacks an exit that the search needs.
    """
    run = runs[0]
    settings = run.config.search.model_dump()
    if (exits or len(runs) > 1) and run.config.search.needs_exits and changes.get("name") is None:
        settings["name"] = SEARCHES.default  # decodes from one exit, although the run was validated with both
    settings |= {key: value for key, value in changes.items() if value is not None}
    if settings["name"] not in SEARCHES:
        name = settings["name"]
        raise ConfigError(
            f"{option('name', 'search')} must be a known search, but is {shown(name)}"
            f"{did_you_mean(str(name), SEARCHES)}"
        )
    kind = SEARCHES[settings["name"]].config
    if unknown := [key for key, value in changes.items() if value is not None and key not in kind.model_fields]:
        raise ConfigError(
            f"{option(unknown[0])} is no option of search.name={settings['name']}, which decodes here; "
            + _remedy(runs, unknown[0], exits)
        )
    try:
        search = kind.model_validate({key: value for key, value in settings.items() if key in kind.model_fields})
    except ValidationError as error:
        raise ConfigError(
            [problem_of(each, option(str(each["loc"][0])) if each["loc"] else "") for each in error.errors()]
        ) from error
    assert isinstance(search, SearchConfig)
    if not set(search.needs_exits) <= set(run.config.model.named_exits):
        raise ConfigError(
            f"search.name={search.name} needs a run whose model has the exits {' and '.join(search.needs_exits)}, "
            f"but {run.path} has model.name={run.config.model.name}"
        )
    parts = run.config.parts
    if wrong := set(replace(parts, search=search).contradictions()) - set(parts.contradictions()):
        raise ConfigError(sorted(wrong))
    return search


def _remedy(runs: Sequence[Run], setting: str, exits: Sequence[str]) -> str:
    """Return the remedy for a setting that the search lacks; another search only if it can decode with the runs.

    Args:
        runs: to decode with.
        setting: its name.
        exits: options by which the user chooses an exit.
    """
    config = runs[0].config
    if exits and setting in type(config.search).model_fields:
        chosen = " and ".join(map(option, exits))
        return f"leave out {chosen} to decode with {config.search.name}, or leave out {option(setting)}"
    kinds = [entry.config() for entry in SEARCHES.entries if setting in entry.config.model_fields]
    possible = [
        kind.name
        for kind in kinds
        if isinstance(kind, SearchConfig)
        and not replace(config.parts, search=kind).contradictions()
        and not (kind.needs_exits and len(runs) > 1)
    ]
    return f"use search {' or '.join(possible)}, or leave it out" if possible else "leave it out"
