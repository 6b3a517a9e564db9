"""Named experiments: recipes in YAML, and sweeps around them in ``sweeps/``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deepspeed_nmt.errors import ConfigError, did_you_mean

RECIPES = Path(__file__).parent
SWEEPS = RECIPES / "sweeps"


def recipes() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def sweeps() -> list[str]:
    """Return the names of all sweeps."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, on top of those of the one it ``extends``.

    Raises:
        ConfigError: if there is no such recipe.
    """
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"--recipe must name a known recipe, but is '{name}'{did_you_mean(name, recipes())}")
    content = read_yaml(path)
    base = content.pop("extends", None)
    if base is None:
        return content
    merged = load_recipe(base)
    merge(merged, content)
    return merged


def load_sweep(name: str) -> list[tuple[str, list[str]]]:
    """Return the points of a sweep: each a recipe and settings on top of it.

    A sweep's file names a ``recipe``, and either a ``grid`` (setting -> values, all combinations) or ``points`` (a
    list of setting -> value).

    Raises:
        ConfigError: if there is no such sweep.
    """
    path = SWEEPS / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"--sweep must name a known sweep, but is '{name}'{did_you_mean(name, sweeps())}")
    content = read_yaml(path)
    grid = content.get("grid", {})
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    points: list[dict[str, Any]] = content.get("points", combinations)
    return [(content["recipe"], [f"{key}={json.dumps(value)}" for key, value in point.items()]) for point in points]


def read_yaml(path: Path) -> dict[str, Any]:
    """Read settings nested by section.

    Raises:
        ConfigError: if the file cannot be read or holds no mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} must be a YAML file that can be read, but is not: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections with keys, but holds a {type(content).__name__}")
    return _with_numbers({str(key): value for key, value in content.items()})


def merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Override nested settings in place."""
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif isinstance(value, Mapping):
            into[key] = {}
            merge(into[key], value)
        else:
            into[key] = value


def to_number(text: str) -> Any:
    """Return a number for text that is one: YAML 1.1 takes 7e-4 for a string."""
    try:
        return float(text) if text[:1] in "+-.0123456789" else text
    except ValueError:
        return text


def _with_numbers(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _with_numbers(value)
        if isinstance(value, dict)
        else to_number(value)
        if isinstance(value, str)
        else value
        for key, value in content.items()
    }
