"""Configuration of a run: defaults, overridden by a recipe, a YAML file and key=value settings, in this order.

Unknown settings are errors. The class of a section is next to the code that it configures; this module composes them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import SerializeAsAny, ValidationError

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.parts import LayerConfig, ModelConfig, PartConfig, Parts, SearchConfig
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.mixture import MixtureConfig
from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.engine.settings import EngineConfig
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, MODELS, REGULARIZERS
from deepspeed_nmt.parallel.launched import once_per_host
from deepspeed_nmt.plugins import load_plugins, plugins_of
from deepspeed_nmt.recipes import load_recipe
from deepspeed_nmt.recipes.reading import MAX_DEPTH, merge, parse_yaml, read_yaml
from deepspeed_nmt.registry import Config, Entry, Registry, problem_of
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.train.configuration import CollapseConfig, TrainingConfig, ValidationConfig
from deepspeed_nmt.train.growth import GrowthConfig
from deepspeed_nmt.train.optimizers import OPTIMIZERS
from deepspeed_nmt.train.schedule import ScheduleConfig

NAMED: dict[str, Registry[Any]] = {"model": MODELS, "layer": LAYERS, "optimizer": OPTIMIZERS, "search": SEARCHES}
"""Sections whose class depends on their setting ``name``."""
_MAX_HINTS = 10
"""Bound on the unknown settings that are listed."""


def _flat(content: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _default(registry: Registry[Any]) -> Any:
    return registry[registry.default].config()


class RunConfig(Config):
    """Settings of a run, by section.

    ``name`` chooses the class of ``model``, ``layer``, ``optimizer`` and ``search``; ``objective`` has one likelihood
    and any number of regularizers, by name.
    """

    model: SerializeAsAny[ModelConfig] = _default(MODELS)
    layer: SerializeAsAny[LayerConfig] = _default(LAYERS)
    objective: Mapping[str, SerializeAsAny[PartConfig]] = {LIKELIHOODS.default: _default(LIKELIHOODS)}
    optimizer: SerializeAsAny[OptimizerConfig] = _default(OPTIMIZERS)
    schedule: ScheduleConfig = ScheduleConfig()
    batch: BatchConfig = BatchConfig()
    mixture: MixtureConfig = MixtureConfig()
    training: TrainingConfig = TrainingConfig()
    growth: GrowthConfig = GrowthConfig()
    engine: EngineConfig = EngineConfig()
    validation: ValidationConfig = ValidationConfig()
    collapse: CollapseConfig = CollapseConfig()
    search: SerializeAsAny[SearchConfig] = _default(SEARCHES)

    @property
    def parts(self) -> Parts:
        """Sections that methods define and that are combined freely."""
        return Parts(self.model, self.layer, self.objective, self.search)

    @property
    def plugins(self) -> dict[str, str]:
        """Hashes of the plug-ins that the settings use, by name."""
        entries: list[Entry[Any]] = [registry[getattr(self, name).name] for name, registry in NAMED.items()]
        entries += [(LIKELIHOODS if name in LIKELIHOODS else REGULARIZERS)[name] for name in self.objective]
        return plugins_of(entries)

    def resolved(self, before: RunConfig | None = None) -> RunConfig:
        """Return the settings completed from files that the model refers to, such as the shape of a BERT.

        Paths of validation sets become absolute. ``before`` are the settings that the run began with.
        """
        model = self.model.resolved(None if before is None else before.model)
        return self.model_copy(update={"model": model, "validation": self.validation.located()})

    def for_update(self, update: int) -> RunConfig:
        """Return the settings with which an update is made, those of a run's start for 0: ``model`` may grow."""
        return self.model_copy(update={"model": self.growth.model_of(self.model, update)})

    def to_yaml(self) -> str:
        """Return all settings, defaults included, in the form that :func:`load_config` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def flat(self) -> dict[str, object]:
        """Return all settings as ``section.key: value``; an objective has those of the parts that it consists of."""
        return dict(_flat(self.model_dump(mode="json")))


def load_config(
    recipe: str | None = None,
    file: Path | None = None,
    settings: Sequence[str] = (),
    resumed: Path | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> RunConfig:
    """Load a configuration; each source overrides those before it. A ConfigError lists all settings that are wrong.

    A source that names another part than those before it, such as another optimizer, leaves of their settings for it
    those that mean the same.

    Args:
        settings: of the form ``section.key=value``, with the value in YAML.
        resumed: file with the settings of the run that is resumed. What it records is not the user's choice.
        options: settings by section that options of the command line give; ``settings`` override them.
    """
    merged: dict[str, Any] = {}
    given: dict[str, Any] = {}  # without those that the resumed run recorded

    def take(content: Mapping[str, Any], *, recorded: bool = False) -> None:
        if left := _leave_other_parts(merged, content):
            logger.info("without %s, which another part had", ", ".join(left))
        for into in (merged,) if recorded else (merged, given):
            merge(into, content)

    if recipe is not None:
        take(load_recipe(recipe))
    if file is not None:
        take(read_yaml(file), recorded=recipe is None and file == resumed)
    take(options)
    problems: list[str] = []
    single: dict[str, Any] = {}
    for content in given_settings(settings, problems):
        merge(single, content)
    take(single)
    config = validate(merged, problems)
    return config.model_copy(update={"engine": config.engine.chosen_by(given.get("engine", {}))})


def _leave_other_parts(merged: dict[str, Any], content: Mapping[str, Any]) -> list[str]:
    """Remove settings of the parts that ``content`` replaces by others, and return their keys.

    A setting that both parts have, with the same default, means the same, and stays.
    """
    left = []
    for section, registry in NAMED.items():
        old, new = merged.get(section), content.get(section)
        if not (isinstance(old, dict) and isinstance(new, Mapping) and "name" in new):
            continue
        names = old.get("name", registry.default), new["name"]
        if names[0] == names[1] or not all(name in registry for name in names):
            continue
        before, after = (registry[name].config.model_fields for name in names)
        for key in [key for key in old if key != "name" and key in before]:
            if key not in after or after[key].default != before[key].default:
                del old[key]
                left.append(f"{section}.{key}")
    return left


def given_settings(settings: Sequence[str], problems: list[str]) -> list[dict[str, Any]]:
    """Return settings of the form ``section.key=value``, each by its section; messages go to ``problems``."""
    contents = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key or key.count(".") > MAX_DEPTH:
            problems.append(f"{shown(setting)} is no setting; write it as section.key=value")
            continue
        try:
            parsed = parse_yaml(value, shown(key))
        except yaml.YAMLError:  # text that is no YAML is itself
            parsed = value
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        for part in reversed(key.split(".")):
            parsed = {part: parsed}
        contents.append(parsed)
    return contents


def setting_classes(section: str) -> Iterator[tuple[str, str, type[Config]]]:
    """Yield (prefix of the settings, name of the part or "", class) for each class that can configure a section."""
    if section in NAMED:
        for entry in NAMED[section].values():
            yield section, entry.name, entry.config
    elif section == "objective":
        for table in (LIKELIHOODS, REGULARIZERS):
            for entry in table.values():
                yield f"objective.{entry.name}", "", entry.config
    else:
        yield section, "", _section(section)


def validate(merged: Mapping[str, Any], problems: Sequence[str] = ()) -> RunConfig:
    """Validate settings; raise a ConfigError that lists all problems, with those that are given."""
    outside = [
        key
        for name, content in merged.items()
        if name not in RunConfig.model_fields
        for key in ([f"{name}.{key}" for key in content] if isinstance(content, dict) and content else [name])
    ]
    problems = [*problems, *_unknown(outside)]
    sections: dict[str, Any] = {}
    for name, content in merged.items():
        if name not in RunConfig.model_fields:
            continue
        if not isinstance(content, dict):
            problems.append(f"{name} is {shown(content)}; give a section with keys")
            continue
        try:
            if name == "objective":
                sections[name] = _objective(content)
            elif name in NAMED:
                part = content.get("name", NAMED[name].default)
                sections[name] = NAMED[name][part].config.model_validate(content)
            else:
                sections[name] = _section(name).model_validate(content)
        except ConfigError as error:
            problems.extend(error.problems)
        except ValidationError as error:
            problems.extend(_sentences(name, error))
    if problems:
        raise ConfigError(problems)
    config = RunConfig(**sections)
    contradictions = [*config.parts.contradictions(), *config.growth.contradictions(config.parts)]
    if config.model.custom_layers() is None and config.layer.name != LAYERS.default:
        contradictions.append(
            f"layer.name={config.layer.name} makes layers of a Transformer, but model.name={config.model.name} has "
            f"its own; use layer.name={LAYERS.default}"
        )
    if config.engine.tensor_parallel > 1 and not config.model.sliceable:
        contradictions.append(
            f"engine.tensor_parallel is {config.engine.tensor_parallel}, but no ranks can share the layers of "
            f"model.name={config.model.name}; use engine.tensor_parallel=1 with engine.ds_config=zero3"
        )
    if config.layer.adapts and not config.collapse.every:
        contradictions.append(
            "collapse.every is 0, so nothing is measured that the decoder layers could adapt to; set "
            "collapse.every=500, or layer.target_reliance=0"
        )
    if contradictions:
        raise ConfigError(contradictions)
    return config


def _objective(content: dict[str, Any]) -> dict[str, PartConfig]:
    """Return the parts of an objective by name; null removes a part."""
    if not any(name in LIKELIHOODS and settings is not None for name, settings in content.items()):
        content = {LIKELIHOODS.default: {}, **content}
    known = [*LIKELIHOODS, *REGULARIZERS]
    parts: dict[str, PartConfig] = {}
    problems: list[str] = []
    for name, settings in content.items():
        if name not in known:
            problems.append(f"objective has no part {shown(name)}{did_you_mean(name, known)}")
        elif settings is not None and not isinstance(settings, dict):
            problems.append(f"objective.{name} is {shown(settings)}; give a section with keys, or null")
        elif settings is not None:
            table: Registry[Any] = LIKELIHOODS if name in LIKELIHOODS else REGULARIZERS
            try:
                part = table[name].config.model_validate(settings)
                assert isinstance(part, PartConfig)
                parts[name] = part
            except ValidationError as error:
                problems.extend(_sentences(f"objective.{name}", error))
    chosen = [name for name in parts if name in LIKELIHOODS]
    if len(chosen) != 1 and not problems:
        problems.append(
            f"objective has {' and '.join(chosen) or 'none'} of {', '.join(LIKELIHOODS)}; keep one, and set the "
            "others to null"
        )
    if problems:
        raise ConfigError(problems)
    return parts


def _section(name: str) -> type[Config]:
    section = RunConfig.model_fields[name].annotation
    assert isinstance(section, type) and issubclass(section, Config)
    return section


def _sentences(section: str, error: ValidationError) -> Iterator[str]:
    """Yield the messages for the errors of pydantic in a section."""
    unknown = []
    for problem in error.errors():
        key = ".".join([section, *map(str, problem["loc"])])
        if problem["type"] == "extra_forbidden":
            unknown.append(key)
        else:
            yield problem_of(problem, key)
    yield from _unknown(unknown)


def _unknown(keys: Sequence[str]) -> Iterator[str]:
    """Yield a message for each unknown setting: the ``name`` that it belongs to, the nearest known one, or all."""
    known = list(_all_keys())
    for key in keys[:_MAX_HINTS]:
        section, _, last = key.rpartition(".")
        if key == "extends":
            yield "extends is for recipes; name the recipe beside the file: --recipe NAME --config F"
            continue
        entries = NAMED[section].values() if section in NAMED else ()
        if names := [f"{section}.name={entry.name}" for entry in entries if last in entry.config.model_fields]:
            yield f"{key} is a setting of {' or '.join(names)} only; set that, too, or leave it out"
            continue
        same = [other for other in known if other.rpartition(".")[2] == last]
        inside = [other for other in known if other.rpartition(".")[0] == section]
        close = same or difflib.get_close_matches(key, inside or known, n=1, cutoff=0.75)
        hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(inside or RunConfig.model_fields)}"
        yield f"there is no setting {shown(key)}; {hint}"
    if len(keys) > _MAX_HINTS:
        yield f"{len(keys) - _MAX_HINTS:,} more settings are unknown"


def _all_keys() -> Iterator[str]:
    for section in RunConfig.model_fields:
        keys = {
            f"{prefix}.{field}" for prefix, _, config in setting_classes(section) for field in config.model_fields
        }
        yield from sorted(keys)


with once_per_host():
    load_plugins()
