"""Reader of settings in YAML, from files and from the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from deepspeed_nmt.errors import ConfigError, finite_number

MAX_DEPTH = 20
"""Bound on nested sections. Settings have four levels."""
_MAX_CHARACTERS = 1 << 20
_MAX_INTEGER = 1 << 64


class _Loader(yaml.SafeLoader):
    """Loader of plain values: mappings, lists, text, numbers, true, false and null.

    Aliases are refused: a few lines of them can be millions of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[str] = []
        """Keys that occur more than once in a mapping."""

    @override
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="an alias, which settings cannot have", problem_mark=self.get_mark())
        return super().compose_node(parent, index)

    @override
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(str(key.value) for key, _ in node.value)
        self.repeated += [key for key, count in keys.items() if count > 1]
        return super().construct_mapping(node, deep)

    @override
    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """Return a number, or the text of one that is larger than every setting; its check then shows the text.

        In YAML 1.1 010 is 8, and 2:00 is 120. Here they are 10 and a text.
        """
        text = node.value.replace("_", "")
        try:
            number = int(text) if text.lstrip("+-").isdecimal() else super().construct_yaml_int(node)
        except ValueError:  # more digits than Python converts
            return node.value
        return number if abs(number) < _MAX_INTEGER and ":" not in text else node.value

    @override
    def construct_yaml_float(self, node: yaml.ScalarNode) -> Any:
        return node.value if ":" in node.value else super().construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
# Without timestamps, 2024-01-01 is the name of a folder, and 2024-99-99 no error.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str, source: str) -> Any:
    """Parse settings in YAML.

    Args:
        source: file or setting that the text is from, for messages.

    Returns:
        The value. Keys are strings, and text that is a number is a number.

    Raises:
        ConfigError: if a key occurs twice, or there are too many levels.
        yaml.YAMLError: if the text is no YAML.
    """
    try:
        loader = _Loader(text)
        content = _plain(loader.get_single_data())
    except RecursionError as error:
        raise _too_large(source) from error
    except (ValueError, LookupError, AttributeError) as error:  # an explicit tag, such as `!!bool x`
        raise yaml.YAMLError(f"a value does not have the type of its tag: {error}") from error
    if loader.repeated:
        raise ConfigError([f"{source} has the key '{key}' more than once; remove one" for key in loader.repeated])
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """Read settings from a YAML file.

    Returns:
        Settings nested by section.

    Raises:
        ConfigError: if the file cannot be read, does not contain a mapping, or contains a key twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_CHARACTERS + 1)
        if len(text) > _MAX_CHARACTERS:
            raise _too_large(str(path))
        content = parse_yaml(text, str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} must be a YAML file, but cannot be read: {_reason(error)}") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} must contain sections with keys, but contains a {type(content).__name__}")
    return content or {}


def _reason(error: Exception) -> str:
    """Return the reason of an error in one line, without the excerpt of the file."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        mark = error.problem_mark
        return f"{error.problem} in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Override nested settings in place."""
    for key, value in new.items():
        if isinstance(value, Mapping):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            merge(into[key], value)
        else:
            into[key] = value


def _too_large(source: str) -> ConfigError:
    return ConfigError(f"{source} is too large or too deep for settings; give only what differs from the defaults")


def _plain(value: Any) -> Any:
    """Return a value with strings as keys of its mappings, and with numbers for text that is a number."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> str | float:
    """Convert text to a number if it is one in a form that YAML 1.1 does not know, such as 7e-4."""
    try:
        return text if text.isdecimal() or text[:1] not in "+-.0123456789" else finite_number(text)
    except ValueError:
        return text
