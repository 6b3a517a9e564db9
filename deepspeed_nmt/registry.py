"""Named parts of a run: a name leads to a configuration class and to the function that builds the part.

The tables are written out where they are owned (``deepspeed_nmt/methods/__init__.py``, ``deepspeed_nmt/search``);
importing a module registers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from deepspeed_nmt.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Config(BaseModel):
    """Base of every configuration class: frozen, strict about unknown keys, checked on construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


@dataclass(frozen=True)
class SelfTest:
    """A small run that `selftest` trains under every engine, where a part does something of its own.

    Attributes:
        name: shown in the table of `selftest`; methods that are tested together share one case.
        settings: of the run, nested by section as in YAML. Dropout is 0 unless the comparison asks for some.
        quick: True for the case that `selftest --quick` trains.
    """

    name: str
    settings: Mapping[str, Mapping[str, Any]]
    quick: bool = False


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One row of a registry.

    Attributes:
        name: by which a configuration names the part.
        config: its settings.
        build: makes the part; its arguments are those of the registry's kind.
        selftest: the case that covers it in `selftest`; None if another part's case does.
        collapse_remedy: settings to try when a decoder ignores its source; "" if the part is no remedy.
    """

    name: str
    config: type[Config]
    build: Callable[..., T]
    selftest: SelfTest | None = None
    collapse_remedy: str = ""


class Registry(Generic[T]):
    """A table of named parts.

    Args:
        kind: what the parts are, for messages ("model", "objective", ...).
        entries: the rows; the first one is the default.

    Raises:
        AssertionError: if two rows share a name.
    """

    def __init__(self, kind: str, entries: Iterable[Entry[T]]) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry[T]) -> None:
        """Add a row.

        Raises:
            AssertionError: if there is a row of that name.
        """
        assert entry.name not in self._entries, f"two {self.kind}s are named '{entry.name}'"
        self._entries[entry.name] = entry

    @property
    def default(self) -> str:
        """Name of the part that is used where none is named."""
        return next(iter(self._entries))

    @property
    def entries(self) -> tuple[Entry[T], ...]:
        """All rows, in order."""
        return tuple(self._entries.values())

    def __getitem__(self, name: Any) -> Entry[T]:
        """Return the row called ``name``.

        Raises:
            ConfigError: if there is none, with a suggestion.
        """
        if name not in self:
            raise ConfigError(
                f"{self.kind}.name must be a known {self.kind}, but is '{name}'{did_you_mean(str(name), self)}"
            )
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
