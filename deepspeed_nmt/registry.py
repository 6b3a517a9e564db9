"""Registries: tables from the name of a part of a run to its configuration class and its builder.

Each table is an explicit list in the package that owns it (:mod:`deepspeed_nmt.methods`,
:mod:`deepspeed_nmt.search.searches`). Importing a module registers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator

from deepspeed_nmt.errors import ConfigError, did_you_mean, shown, typed

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Config(BaseModel):
    """Base of every configuration class: frozen, validated on construction, without unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, defer_build=True
    )


class Section(Config):
    """Base of the sections of a run's settings, and of the parts that are configured in them."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false, as which YAML reads yes, no, on and off, for a number: they would be 1 and 0."""
        if info.field_name in cls.model_fields and any(isinstance(one, bool) for one in _leaves(value)):
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and not kinds & {bool, Literal["auto"]}:  # see number_or_auto
                raise ValueError(f"is {shown(value)}; give {'a whole' if float not in kinds else 'a'} number")
        return value


def _leaves(value: object) -> Iterator[object]:
    """Yield what lists and mappings hold, of any depth."""
    if isinstance(value, (list, tuple, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(one)
    else:
        yield value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of."""
    parts = [part for part in get_args(annotation) if isinstance(part, type) or get_args(part)]
    return {annotation}.union(*map(_kinds, parts))


C = TypeVar("C", bound=Config)


def number_or_auto(least: int, most: int) -> BeforeValidator:
    """Return a validator of a whole number, or "auto"."""

    def check(value: object) -> object:
        is_whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if value != "auto" and not is_whole:
            raise ValueError(f"is {shown(value)}; use auto, or a whole number from {least} to {most:,}")
        return value

    return BeforeValidator(check)


_KINDS = {
    "bool": "true or false",
    "dict": "a section with keys",
    "finite": "a finite number",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "mapping": "a section with keys",
    "model": "a section with keys",
    "sequence": "a list",
    "string": "text",
    "tuple": "a list",
}
"""Kinds of values by the first word of pydantic's name of an error about a type."""
_OF_TYPES = ("_type", "_parsing", "_parsing_size", "_from_float", "_number", "_unicode", "_str")
"""Ends of pydantic's names of errors about types."""


def problem_of(error: Mapping[str, Any], name: str) -> str:
    """Return the message for an error of pydantic: "`name` is ...; give ..."; "" for the name of a whole."""
    kind: str = error["type"]
    if kind == "value_error":  # of a validator of ours, which shows the value itself
        message = str(error["ctx"]["error"])
        colon = "" if message.startswith(("is ", "has ", "must ")) else ":"
        return f"{name}{colon} {message}".removeprefix(": ")
    if kind == "json_invalid":
        return f"{name} is no JSON ({error['ctx']['error']})"
    if kind == "missing":
        return f"{name} is missing; give it"
    kinds = _KINDS.get(kind.split("_")[0]) if kind.endswith(_OF_TYPES) else None
    bound = "a number " if kind.startswith(("greater_than", "less_than")) else ""
    remedy = kinds or error["msg"].replace("Input should be ", bound)
    return f"{name} is {shown(error['input'])}; give {remedy}"


def problems_of(error: ValidationError, named: Callable[[str], str] = str, whole: str = "") -> list[str]:
    """Return the messages for all errors of pydantic; ``named`` returns the name of the value at a dotted place."""
    return [
        problem_of(problem, named(".".join(map(str, problem["loc"]))) if problem["loc"] else whole)
        for problem in error.errors()
    ]


def option_at(place: str) -> str:
    """Return the option of a command that gives the value at a dotted place."""
    return typed([part for part in place.split(".") if not part.isdigit()][-1])


def validated(config: type[C], values: Mapping[str, Any], named: Callable[[str], str] = option_at) -> C:
    """Return the configuration of some values, or raise a ConfigError with :func:`problems_of` the values."""
    try:
        return config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(problems_of(error, named)) from error


@dataclass(frozen=True)
class SelfTest:
    """A small run that the command `selftest` trains under every engine; one can cover several methods.

    Attributes:
        settings: of the run, nested by section as in YAML. Dropout is 0 unless the comparison sets it.
        quick: True for the case that `selftest --quick` trains.
    """

    name: str
    settings: Mapping[str, Mapping[str, Any]]
    quick: bool = False


@dataclass(frozen=True)
class Entry(Generic[T_co]):
    """A row of a registry: the name of a part in a configuration, its configuration class, and its builder.

    Attributes:
        build: function whose arguments depend on the registry.
        selftest: case of `selftest` that covers the part; None if the case of another part covers it.
        collapse_remedy: settings to recommend when a decoder ignores its source; "" if the part is no remedy.
    """

    name: str
    config: type[Config]
    build: Callable[..., T_co]
    selftest: SelfTest | None = None
    collapse_remedy: str = ""


class Registry(dict[str, Entry[T]]):
    """A table of named parts of one kind; the first entry is the default."""

    def __init__(self, kind: str, entries: Iterable[Entry[T]]) -> None:
        super().__init__()
        self.kind = kind
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry[T]) -> None:
        """Add a row, whose name must be new."""
        assert entry.name not in self, f"two {self.kind}s are named '{entry.name}'"
        self[entry.name] = entry

    @property
    def default(self) -> str:
        """Name of the part that a run uses if its configuration names none."""
        return next(iter(self))

    def __getitem__(self, name: Any) -> Entry[T]:
        """Return the row with a name, or raise a ConfigError."""
        if name not in self:
            raise ConfigError(
                f"{self.kind}.name is {shown(name)}, which is no known {self.kind}{did_you_mean(str(name), self)}"
            )
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        """Return True if there is a row with a name; lists and the like, which YAML may give, are none."""
        return isinstance(name, str) and super().__contains__(name)
