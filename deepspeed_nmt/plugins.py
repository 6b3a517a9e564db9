"""Plug-ins: modules outside the package with methods, searches and optimizers of their own.

The environment variable ``DEEPSPEED_NMT_PLUGINS`` names them, so that ranks and workers inherit them. Nothing else
causes one to be imported: neither a run, which may come from somebody else, nor its installation. A plug-in states
the version of the interface that it is written for, and its rows of the registries:

    PLUGIN_API = 1
    ENTRIES = [Entry("gated", GatedLayerConfig, build_gated_layer)]
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import Field

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.parts import LayerConfig, LikelihoodConfig, ModelConfig, RegularizerConfig, SearchConfig
from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.errors import ConfigError, did_you_mean, first_line, shown
from deepspeed_nmt.files import sha256_of
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, MODELS, REGULARIZERS, self_tests
from deepspeed_nmt.parallel.launched import place
from deepspeed_nmt.registry import Config, Entry, Registry
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.train.optimizers import OPTIMIZERS

PLUGIN_API = 1
"""Version of what a plug-in may import, see docs/add-a-method.md. It rises when a plug-in may have to change."""
PLUGINS_VARIABLE = "DEEPSPEED_NMT_PLUGINS"
"""Environment variable with the names of modules, or of their entry points, separated by commas."""
GROUP = "deepspeed_nmt.methods"
"""Group of entry points, which give modules names."""
_MODULE = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
PluginName = Annotated[str, Field(pattern=_MODULE, max_length=200)]
"""Name of a module."""

_REGISTRIES: dict[type[Config], Registry[Any]] = {
    ModelConfig: MODELS,
    LayerConfig: LAYERS,
    LikelihoodConfig: LIKELIHOODS,
    RegularizerConfig: REGULARIZERS,
    SearchConfig: SEARCHES,
    OptimizerConfig: OPTIMIZERS,
}
"""Registries by the base of their configuration classes."""
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Plugin:
    """Rows of the registries of a loaded plug-in, and the hash (hexadecimal) of the Python files of its package."""

    entries: Sequence[Entry[Any]]
    sha256: str


PLUGINS: dict[str, Plugin] = {}
"""Plug-ins of this process, by the name of their module."""


def load_plugins() -> None:
    """Import the plug-ins that the environment names, and add their entries to the registries."""
    for name in filter(None, map(str.strip, os.environ.get(PLUGINS_VARIABLE, "").split(","))):
        module = _imported(name)
        if module.__name__ not in PLUGINS:
            entries = _entries(module)
            for entry in entries:
                registry_of(entry).add(entry)
            PLUGINS[module.__name__] = Plugin(entries, _digest(module))


def registry_of(entry: Entry[Any]) -> Registry[Any]:
    """Return the registry to which an entry belongs, by its configuration class."""
    for base, registry in _REGISTRIES.items():
        if issubclass(entry.config, base):
            return registry
    bases = ", ".join(base.__name__ for base in _REGISTRIES)
    raise ConfigError(f"{entry.config.__name__} extends none of {bases}; extend the one of its kind")


def plugins_of(entries: Sequence[Entry[Any]]) -> dict[str, str]:
    """Return the hashes of the plug-ins to which any of these rows of the registries belong, by name."""
    return {
        name: plugin.sha256
        for name, plugin in PLUGINS.items()
        if any(own is entry for own in plugin.entries for entry in entries)
    }


def check_plugins(recorded: Mapping[str, str], run: Path) -> None:
    """Check that the plug-ins of a run, whose hashes are recorded by name, are loaded; warn if one has changed."""
    if missing := [name for name in recorded if name not in PLUGINS]:
        plugins, all_names = " and ".join(missing), ",".join([*PLUGINS, *missing])
        raise ConfigError(f"{run} was trained with the plug-in {plugins}; set {PLUGINS_VARIABLE}={all_names}")
    for name, before in recorded.items():
        if PLUGINS[name].sha256 != before and place().rank == 0:
            _warn_once(
                "%s was trained with another version of the plug-in %s (%s, now %s); bring that version back, unless "
                "both compute the same",
                *(run, name, before[:12], PLUGINS[name].sha256[:12]),
            )


_warn_once = cache(logger.warning)


def _imported(name: str) -> ModuleType:
    """Import a module by its own name, or by that of an entry point."""
    points = metadata.entry_points(group=GROUP)
    modules = {point.module for point in points if point.name == name} or {name}
    if len(modules) > 1:
        raise ConfigError(
            f"{PLUGINS_VARIABLE} names {name}, which is an entry point of {' and '.join(sorted(modules))}; name the "
            "module"
        )
    (module,) = modules
    try:
        if not re.match(_MODULE, module):
            raise ModuleNotFoundError(name=module)
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a plug-in may do anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            hint = did_you_mean(name, {point.name for point in points})
            raise ConfigError(
                f"{PLUGINS_VARIABLE} names {shown(name)}, but there is no such module; install it, or add its "
                f"directory to PYTHONPATH{hint}"
            ) from error
        raise ConfigError(
            f"the plug-in {module} cannot be imported ({first_line(error)}); "
            f"`python -c 'import {module}'` shows where"
        ) from error


def _entries(module: ModuleType) -> list[Entry[Any]]:
    """Return the entries of a plug-in, after checking that they can be added to the registries."""
    name = module.__name__
    if (version := getattr(module, "PLUGIN_API", None)) != PLUGIN_API:
        raise ConfigError(
            f"the plug-in {name} has PLUGIN_API {shown(version)}, but this deepspeed_nmt has {PLUGIN_API}; install "
            "the version of one that fits the other"
        )
    entries = getattr(module, "ENTRIES", None)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, Entry) for entry in entries):
        raise ConfigError(f"the plug-in {name} has no list ENTRIES of `Entry`; add it")
    known = {registry.kind: set(registry) for registry in _REGISTRIES.values()} | {"SelfTest": set(self_tests())}
    known[LIKELIHOODS.kind] = known[REGULARIZERS.kind] = {*LIKELIHOODS, *REGULARIZERS}
    for entry in entries:
        names = {registry_of(entry).kind: entry.name}
        if entry.selftest is not None:
            names["SelfTest"] = entry.selftest.name
        for kind, of in names.items():
            if of in known[kind]:
                raise ConfigError(f"the plug-in {name} has the {kind} {of}, but that name exists; rename it")
            if kind != "SelfTest" and not _NAME.fullmatch(of):
                raise ConfigError(f"the plug-in {name} has the {kind} {shown(of)}; name it by letters, digits and _")
            known[kind].add(of)
    return entries


def _digest(module: ModuleType) -> str:
    """Return the SHA-256 of the output of ``sha256sum`` for the Python files of a module's package."""
    package = module.__spec__.parent if module.__spec__ is not None else ""
    alone = Path(module.__file__ or "")
    files: dict[str, Path] = {} if package else {alone.name: alone}
    for root in map(Path, sys.modules[package].__path__ if package else ()):
        files |= {str(file.relative_to(root)): file for file in root.rglob("*.py") if file.is_file()}
    lines = [f"{sha256_of(files[name])}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
