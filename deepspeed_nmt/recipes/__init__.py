"""Named experiments: recipes as YAML files in a folder for each paper, and sweeps over settings in ``sweeps/``."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.recipes.reading import merge, read_yaml

RECIPES = Path(__file__).parent
"""Directory of the recipes."""
SWEEPS = RECIPES / "sweeps"
"""Directory of the sweeps."""


def recipe_files() -> dict[str, Path]:
    """Return the files of all recipes by name."""
    files = (path for path in RECIPES.rglob("*.yaml") if SWEEPS not in path.parents)
    return {path.stem: path for path in sorted(files, key=lambda path: path.stem)}


def recipes() -> list[str]:
    """Return the names of all recipes."""
    return list(recipe_files())


def sweeps() -> list[str]:
    """Return the names of all sweeps."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """Return the settings of a recipe, merged over those of the recipe that it ``extends``.

    Returns:
        Settings nested by section.

    Raises:
        ConfigError: if there is no such recipe.
    """
    known = recipe_files()
    if name not in known:
        raise ConfigError(f"--recipe must name a known recipe, but is {shown(name)}{did_you_mean(name, known)}")
    content = read_yaml(known[name])
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

    Returns:
        For each point the recipe, and the settings that override it as "key=value".

    Raises:
        ConfigError: if there is no such sweep.
    """
    known = sweeps()
    if name not in known:
        raise ConfigError(f"--sweep must name a known sweep, but is {shown(name)}{did_you_mean(name, known)}")
    content = read_yaml(SWEEPS / f"{name}.yaml")
    grid = content.get("grid", {})
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    points: list[dict[str, Any]] = content.get("points", combinations)
    return [(content["recipe"], [f"{key}={json.dumps(value)}" for key, value in point.items()]) for point in points]
