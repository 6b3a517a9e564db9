"""Random settings of a run, drawn from the classes that define them, as words and as YAML."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic.fields import FieldInfo

from deepspeed_nmt.config import NAMED, RunConfig, setting_classes
from deepspeed_nmt.methods import REGULARIZERS, self_tests
from deepspeed_nmt.plugins import PLUGINS
from deepspeed_nmt.recipes import load_recipe, recipes
from deepspeed_nmt.registry import Config

OWN = [entry for plugin in PLUGINS.values() for entry in plugin.entries]
"""Entries of the plug-ins of DEEPSPEED_NMT_PLUGINS; if there are any, settings of no other method are drawn."""
FIELDS = [
    (prefix, name, field, content.annotation, content)
    for section in RunConfig.model_fields
    for prefix, name, config in setting_classes(section)
    for field, content in config.model_fields.items()
    if field != "name" and (not OWN or config in [entry.config for entry in OWN])
]
"""All settings: prefix, name of the part or "", field, type, description."""
HUGE = [2**31 - 1, 2**31, 2**63, 10**9, 10**20, 10**400, -(10**20), 1e308, 5e-324, math.inf, -math.inf, math.nan]
WRONG: SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, "", " ", "-", "none", "auto", "~", "1e3", "0x10", "1_000", "٣", "../x", "x" * 300]),
    st.sampled_from(HUGE),
    st.text(max_size=8),
    st.recursive(
        st.sampled_from([1, "a", None]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
)
"""Values that hardly a setting takes."""


def known_values() -> dict[str, list[Any]]:
    """Values of settings in recipes and self-tests, by the last part of their names."""
    found: dict[str, list[Any]] = {}

    def collect(content: Mapping[str, Any]) -> None:
        for key, value in content.items():
            found.setdefault(key, []).append(value)
            if isinstance(value, Mapping):
                collect(value)

    for content in sources():
        collect(content)
    return found


def sources() -> Iterator[Mapping[str, Any]]:
    """The settings of all self-tests and recipes."""
    for case in self_tests().values():
        yield case.settings
    for name in recipes():
        yield load_recipe(name)


KNOWN = known_values()


def allowed(name: str, annotation: Any, field: FieldInfo | None, tame: bool = False) -> SearchStrategy[Any]:
    """Values of the type of a setting, mostly within its bounds.

    Args:
        name: last part of the setting's name.
        annotation: its type.
        field: its bounds and description; None for a part of a value.
        tame: True for values with which a tiny run takes a second.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, type(int | str)):
        return st.one_of(*(allowed(name, each, field, tame) for each in inner))
    if origin is Annotated:  # a part of a value with bounds of its own
        return allowed(name, inner[0], inner[1] if isinstance(inner[1], FieldInfo) else field, tame)
    if origin is tuple:
        return st.lists(allowed(name, inner[0], field if inner[0] is str else None, tame), max_size=3)
    if origin is dict:
        values = st.sampled_from(["data", "text", "none", ""]) if inner[1] is str else st.floats(0, 2)
        return st.dictionaries(st.sampled_from(["1-1", "2-1", "deep", "x"]), values, max_size=2)
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return section(annotation, tame)
    bounds = {kind: value for each in field.metadata if field for kind, value in _bound(each)} if field else {}
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        low = bounds.get("ge", bounds.get("gt", 0))
        high = bounds.get("le", bounds.get("lt", low + 2**40))
        if tame:
            return st.integers(low, min(high, low + 5))
        near = {low - 1, low, low + 1, high - 1, high, high + 1}
        return st.integers(low, min(high, low + 9)) | st.sampled_from(sorted(near)) | _some(KNOWN.get(name, []))
    if annotation is float:
        low, high = bounds.get("ge", bounds.get("gt", -10.0)), bounds.get("le", bounds.get("lt", 10.0))
        inside = st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
        return inside if tame else inside | st.sampled_from([low, high, low - 0.5, high + 0.5])
    words = re.findall(r"[\w:.]+", field.description or "") if field else []
    values = _some([value for value in KNOWN.get(name, []) if isinstance(value, str)])
    return values | _some(words) | (st.nothing() if tame else st.text(max_size=8))


def _bound(metadata: Any) -> Iterator[tuple[str, Any]]:
    for kind in ("ge", "gt", "le", "lt"):
        if hasattr(metadata, kind):
            yield kind, getattr(metadata, kind)


def _some(values: list[Any]) -> SearchStrategy[Any]:
    return st.sampled_from(values) if values else st.nothing()


def section(config: type[Config], tame: bool) -> SearchStrategy[dict[str, Any]]:
    """Some settings of a class."""
    fields = config.model_fields.items()
    values = {name: allowed(name, field.annotation, field, tame) for name, field in fields}
    return st.fixed_dictionaries({}, optional=values)


@dataclass(frozen=True)
class Change:
    """A setting and its value."""

    key: str
    value: Any


def fields_of(base: Mapping[str, Any]) -> list[Any]:
    """Settings that fit the parts that other settings name."""
    objective = base.get("objective", {})

    def fits(prefix: str, part: str) -> bool:
        section, _, name = prefix.partition(".")
        if section == "objective":
            return name in objective or name in REGULARIZERS
        return part == (base.get(section, {}).get("name", NAMED[section].default) if section in NAMED else "")

    return [each for each in FIELDS if fits(each[0], each[1])] or FIELDS


@st.composite
def changes(draw: st.DrawFn, base: Mapping[str, Any], tame: bool) -> list[Change]:
    """A setting with a value.

    Args:
        draw: given by hypothesis.
        base: settings that it changes.
        tame: True for a setting that fits those, with a value of its type; else it may be any setting, with a value
            of its type, or nearly, or wrong, with the name of its part or without.
    """
    prefix, part, name, annotation, field = draw(st.sampled_from(fields_of(base) if tame else FIELDS))
    value, kind = allowed(name, annotation, field, tame), draw(st.integers(0, 9))
    if tame:
        return [Change(f"{prefix}.{name}", draw(value))]
    if kind == 0:
        value = WRONG
    if kind == 1:
        name = draw(other_names())
    change = Change(f"{prefix}.{name}", draw(value))
    return [Change(f"{prefix}.name", part), change] if part and draw(st.integers(0, 2)) else [change]


def other_names() -> SearchStrategy[str]:
    """Names of settings of other sections, and names of none."""
    return (
        st.sampled_from([name for _, _, name, _, _ in FIELDS])
        | st.text(max_size=8)
        | st.sampled_from(["", ".", "a.b"])
    )


def as_word(change: Change) -> str:
    """The setting as a word of a command line."""
    text = change.value if isinstance(change.value, str) else json.dumps(change.value)
    return f"{change.key}={text}"


def case_words(content: Mapping[str, Any]) -> list[str]:
    """Settings nested by section as words."""
    return [f"{section}={json.dumps(values)}" for section, values in content.items()]


CASES = [entry.selftest for entry in OWN if entry.selftest] or self_tests().values()
BASES = [case.settings for case in CASES]
"""Small models of every method."""


@st.composite
def words(draw: st.DrawFn, tame: bool = False) -> list[str]:
    """Settings as words of a command line: those of a self-test, and some more."""
    base: Mapping[str, Any] = draw(st.sampled_from(BASES)) if tame or draw(st.integers(0, 3)) else {}
    fitting = tame or draw(st.booleans())
    chosen = draw(st.lists(changes(base, fitting), min_size=1, max_size=4 if fitting else 6))
    more = [as_word(change) for each in chosen for change in each]
    strange = st.text(max_size=12) | st.sampled_from(["=", "a=", "=1", "model.=1", ".=", "model..dim=1", "model.dim"])
    return [*case_words(base), *more, *([] if fitting or draw(st.integers(0, 9)) else [draw(strange)])]
