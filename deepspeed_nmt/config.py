"""The configuration of a run: defaults < recipe < YAML file < key=value, strict, and written down in the run.

Each section's class sits beside the code it configures; this file only puts them together.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, SerializeAsAny, ValidationError

from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.engine.base import EngineConfig
from deepspeed_nmt.errors import ConfigError, did_you_mean
from deepspeed_nmt.methods import LAYERS, LIKELIHOODS, MODELS, REGULARIZERS
from deepspeed_nmt.methods.combinations import problems_of
from deepspeed_nmt.methods.label_smoothed import LabelSmoothedConfig
from deepspeed_nmt.methods.transformer import StandardLayerConfig, TransformerConfig
from deepspeed_nmt.registry import Config, Registry
from deepspeed_nmt.search import SEARCHES
from deepspeed_nmt.search.beam import BeamConfig
from deepspeed_nmt.train.collapse import CollapseConfig
from deepspeed_nmt.train.loop import TrainingConfig
from deepspeed_nmt.train.optimizer import OptimizerConfig, ScheduleConfig

_DEFAULT_LIKELIHOOD = "label_smoothed"

RECIPES = Path(__file__).parent / "recipes"
SWEEPS = RECIPES / "sweeps"

# Sections whose class depends on the `name` in them, and the name they have by default.
_BY_NAME: dict[str, tuple[Registry[Any], str]] = {
    "model": (MODELS, "transformer"),
    "layer": (LAYERS, "standard"),
    "search": (SEARCHES, "beam"),
}


class ValidationConfig(Config):
    """How the model is judged during training."""

    bleu: bool = Field(default=True, description="translate the validation set by search and score it")
    best_by: str = Field(default="bleu", pattern="^(bleu|loss)$", description="what the best checkpoint is chosen by")
    max_sentences: int = Field(default=0, ge=0, description="translate only the first so many; 0: all")
    max_tokens: int = Field(default=4096, ge=1, description="sentences x longest source in one batch of the search")


class RunConfig(Config):
    """Everything that decides a run, besides its data.

    Attributes:
        objective: its parts by name: one likelihood, and any terms.
    """

    model: SerializeAsAny[Config] = TransformerConfig()
    layer: SerializeAsAny[Config] = StandardLayerConfig()
    objective: Mapping[str, SerializeAsAny[Config]] = {_DEFAULT_LIKELIHOOD: LabelSmoothedConfig()}
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    batch: BatchConfig = BatchConfig()
    training: TrainingConfig = TrainingConfig()
    engine: EngineConfig = EngineConfig()
    validation: ValidationConfig = ValidationConfig()
    collapse: CollapseConfig = CollapseConfig()
    search: SerializeAsAny[Config] = BeamConfig()

    def resolved(self, before: Config | None = None) -> RunConfig:
        """With what files say that the model names, such as a BERT's shape; ``before`` is what a run began with.

        Raises:
            ConfigError: if such a file cannot be read.
        """
        model = self.model.resolved(before.model if isinstance(before, RunConfig) else None)
        return self if model is self.model else self.model_copy(update={"model": model})

    def to_yaml(self) -> str:
        """The whole configuration, defaults included, as :func:`load_config` reads it."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load_config(recipe: str | None = None, file: Path | None = None, settings: Sequence[str] = ()) -> RunConfig:
    """Put a configuration together.

    Args:
        recipe: name of a file in recipes/.
        file: YAML of the user.
        settings: ``section.key=value``, the value in YAML.

    Raises:
        ConfigError: listing every setting that is unknown, of the wrong type or out of range.
    """
    merged: dict[str, Any] = {}
    if recipe is not None:
        _merge(merged, _recipe(recipe))
    if file is not None:
        _merge(merged, _yaml(file))
    problems: list[str] = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            problems.append(f"settings must look like section.key=value, but one is '{setting}'")
            continue
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        if isinstance(parsed, str):
            parsed = _number(parsed)
        nested: Any = parsed
        for part in reversed(key.split(".")):
            nested = {part: nested}
        _merge(merged, nested)
    return _validate(merged, problems)


def recipes() -> list[str]:
    """Names of all recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def sweeps() -> list[str]:
    """Names of all sweeps."""
    return sorted(path.stem for path in SWEEPS.glob("*.yaml"))


def sweep(name: str) -> list[tuple[str, list[str]]]:
    """The points of a sweep: each a recipe and settings on top of it.

    A sweep's file names a ``recipe``, and either a ``grid`` (setting -> values, all combinations) or ``points`` (a
    list of setting -> value).

    Raises:
        ConfigError: if there is no such sweep.
    """
    path = SWEEPS / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"--sweep must name a known sweep, but is '{name}'{did_you_mean(name, sweeps())}")
    content = _yaml(path)
    grid = content.get("grid", {})
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    points: list[dict[str, Any]] = content.get("points", combinations)
    return [(content["recipe"], [f"{key}={json.dumps(value)}" for key, value in point.items()]) for point in points]


def reference() -> str:
    """All settings, their defaults and meanings, as Markdown. docs/configuration.md holds it."""
    lines = ["# Settings", "", "Written by `deepspeed_nmt.config.reference()`; a test compares.", ""]
    for name in RunConfig.model_fields:
        for title, prefix, config in _documented(name):
            if not config.model_fields:
                continue
            lines += [f"## {title}", "", "| setting | default | meaning |", "|---|---|---|"]
            for key, part in config.model_fields.items():
                lines.append(f"| `{prefix}.{key}` | `{part.default}` | {part.description or ''} |")
            lines.append("")
    return "\n".join(lines)


def _documented(section: str) -> Iterator[tuple[str, str, type[Config]]]:
    """(title, prefix of its settings, class) of each table that describes a section."""
    if section in _BY_NAME:
        registry, default = _BY_NAME[section]
        for entry in registry:
            title = section if entry == default else f"{section} `name: {entry}`"
            yield title, section, registry[entry].config
    elif section == "objective":
        for table in (LIKELIHOODS, REGULARIZERS):
            for entry in table:
                yield f"objective: {entry}", f"objective.{entry}", table[entry].config
    else:
        yield section, section, _section(section)


def _validate(merged: dict[str, Any], problems: list[str]) -> RunConfig:
    sections: dict[str, Any] = {}
    for name, content in merged.items():
        if name not in RunConfig.model_fields:
            keys = [f"{name}.{key}" for key in content] if isinstance(content, dict) else [str(name)]
            problems.extend(_unknown(key, "") for key in keys)
            continue
        if not isinstance(content, dict):
            problems.append(f"{name} must be a section with keys, but is {content!r}")
            continue
        try:
            if name == "objective":
                sections[name] = _objective(content)
            elif name in _BY_NAME:
                sections[name] = _named(name, content)
            else:
                sections[name] = _section(name).model_validate(content)
        except ConfigError as error:
            problems.extend(error.problems)
        except ValidationError as error:
            problems.extend(_sentence(name, problem) for problem in error.errors())
    if problems:
        raise ConfigError(problems)
    config = RunConfig(**sections)
    if contradictions := problems_of(config.model, config.layer, config.objective, config.search):
        raise ConfigError(contradictions)
    return config


def _objective(content: dict[str, Any]) -> dict[str, Config]:
    """The parts of an objective by name; null takes one out.

    Raises:
        ConfigError: for unknown parts, wrong settings, and any number of likelihoods but one.
    """
    named = content
    if not any(name in LIKELIHOODS and settings is not None for name, settings in content.items()):
        named = {_DEFAULT_LIKELIHOOD: {}, **content}
    known = [*LIKELIHOODS, *REGULARIZERS]
    parts: dict[str, Config] = {}
    problems: list[str] = []
    for name, settings in named.items():
        if name not in known:
            problems.append(f"objective has no part '{name}'{did_you_mean(name, known)}")
        elif settings is not None and not isinstance(settings, dict):
            problems.append(f"objective.{name} must be a section with keys, or null, but is {settings!r}")
        elif settings is not None:
            table: Registry[Any] = LIKELIHOODS if name in LIKELIHOODS else REGULARIZERS
            try:
                parts[name] = table[name].config.model_validate(settings)
            except ValidationError as error:
                problems.extend(_sentence(f"objective.{name}", problem) for problem in error.errors())
    chosen = [name for name in parts if name in LIKELIHOODS]
    if len(chosen) != 1 and not problems:
        problems.append(
            f"objective must have one of {', '.join(LIKELIHOODS)}, but has {' and '.join(chosen) or 'none'}; "
            "set the others to null"
        )
    if problems:
        raise ConfigError(problems)
    return parts


def _named(section: str, content: dict[str, Any]) -> Config:
    registry, default = _BY_NAME[section]
    return registry[content.get("name", default)].config.model_validate(content)


def _section(name: str) -> type[Config]:
    section = RunConfig.model_fields[name].annotation
    assert isinstance(section, type) and issubclass(section, Config)
    return section


def _sentence(section: str, problem: Mapping[str, Any]) -> str:
    """One of pydantic's complaints, in our words."""
    key = ".".join([section, *map(str, problem["loc"])])
    if problem["type"] == "extra_forbidden":
        return _unknown(key, section)
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if problem["loc"] else f"{section}: {problem['ctx']['error']}"
    what = problem["msg"].replace("Input should be", "must be").replace("String should", "must")
    return f"{key} {what}, but is {problem['input']!r}"


def _unknown(key: str, section: str) -> str:
    """`there is no setting x; did you mean y?`, looking for the key's last part in every section; or, where there is
    such a setting under another `name` of the section, which name that is.
    """
    if names := _names_with(key):
        return f"{key} is a setting of {' or '.join(names)} only; give that, too, or leave it out"
    last = key.rsplit(".", 1)[-1]
    known = list(_all_keys())
    same = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last]
    if same:
        return f"there is no setting '{key}'; did you mean '{same[0]}'?"
    inside = [candidate for candidate in known if section and candidate.startswith(section + ".")]
    return f"there is no setting '{key}'{did_you_mean(key, inside or known)}"


def _names_with(key: str) -> list[str]:
    """`section.name=...` for each name under which a section has the setting ``key``."""
    section, _, field = key.partition(".")
    if section not in _BY_NAME:
        return []
    registry, _default = _BY_NAME[section]
    return [f"{section}.name={name}" for name in registry if field in registry[name].config.model_fields]


def _all_keys() -> Iterator[str]:
    for name in RunConfig.model_fields:
        keys = {f"{prefix}.{field}" for _, prefix, config in _documented(name) for field in config.model_fields}
        yield from sorted(keys)


def _recipe(name: str) -> dict[str, Any]:
    """A recipe, on top of the one it ``extends``."""
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"--recipe must name a known recipe, but is '{name}'{did_you_mean(name, recipes())}")
    content = _yaml(path)
    base = content.pop("extends", None)
    if base is None:
        return content
    merged = _recipe(base)
    _merge(merged, content)
    return merged


def _yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} must be a YAML file that can be read, but is not: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold sections with keys, but holds a {type(content).__name__}")
    return _numbers({str(key): value for key, value in content.items()})


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, Mapping):
            into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value


def _numbers(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _numbers(value) if isinstance(value, dict) else _number(value) if isinstance(value, str) else value
        for key, value in content.items()
    }


def _number(text: str) -> Any:
    """YAML 1.1 takes 7e-4 for a string; everybody else takes it for a number."""
    try:
        return float(text) if text[:1] in "+-.0123456789" else text
    except ValueError:
        return text
