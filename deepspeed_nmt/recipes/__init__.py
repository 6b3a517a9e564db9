"""Named experiments: recipes as YAML files, and sweeps over their settings in ``sweeps/``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deepspeed_nmt.errors import ConfigError, did_you_mean

RECIPES = Path(__file__).parent
"""Directory of the recipes."""
SWEEPS = RECIPES / "sweeps"
"""Directory of the sweeps."""


def recipes() -> list[str]:
    """Return the names of all recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def sweeps() -> list[str]:
    """Return the names of all sweeps."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, merged over those of the recipe that it ``extends``.

    Args:
        name: of the recipe.

    Returns:
        Settings nested by section.

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
    """Return the points of a sweep.

    The file of a sweep contains the name of a ``recipe``, and either a ``grid`` (lists of values by setting, of which
    all combinations are points) or ``points`` (a list of values by setting).

    Args:
        name: of the sweep.

    Returns:
        For each point the recipe, and the settings that override it as "key=value".

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
    """Read settings from a YAML file.

    Args:
        path: of the file.

    Returns:
        Settings nested by section.

    Raises:
        ConfigError: if the file cannot be read, or does not contain a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} must be a YAML file, but cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain sections with keys, but contains a {type(content).__name__}")
    return _with_numbers({str(key): value for key, value in content.items()})


def merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Override nested settings in place.

    Args:
        into: settings to change.
        new: settings that take precedence.
    """
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        elif isinstance(value, Mapping):
            into[key] = {}
            merge(into[key], value)
        else:
            into[key] = value


def to_number(text: str) -> Any:
    """Convert text to a number if it is one, else return it. YAML 1.1 reads 7e-4 as a string."""
    try:
        return float(text) if text[:1] in "+-.0123456789" else text
    except ValueError:
        return text


def _with_numbers(content: dict[str, Any]) -> dict[str, Any]:
    """Apply :func:`to_number` to all strings in nested settings."""
    return {
        key: _with_numbers(value)
        if isinstance(value, dict)
        else to_number(value)
        if isinstance(value, str)
        else value
        for key, value in content.items()
    }
