"""Named parts of a run: a name leads to the part's configuration class and to the function that builds it.

Tables are written out where they are owned (``deepspeed_nmt/methods/__init__.py``); nothing registers itself by
being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from deepspeed_nmt.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Config(BaseModel):
    """Base of every configuration class: frozen, strict about unknown keys, checked on construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def resolved(self, before: Config | None = None) -> Config:
        """With what the files say that it names; ``before`` is what a run began with. As it is, where it names none.

        Raises:
            ConfigError: if a file cannot be read.
        """
        return self


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One row of a registry."""

    name: str
    config: type[Config]
    build: Callable[..., T]


class Registry(Generic[T]):
    """An immutable table of named parts.

    Args:
        kind: what the parts are, for messages ("model", "objective", ...).
        entries: the rows.

    Raises:
        AssertionError: if two rows share a name.
    """

    def __init__(self, kind: str, entries: Iterable[Entry[T]]) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}
        for entry in entries:
            assert entry.name not in self._entries, f"two {kind}s are named '{entry.name}'"
            self._entries[entry.name] = entry

    def __getitem__(self, name: Any) -> Entry[T]:
        """Raises ConfigError, with a suggestion, when there is no such name."""
        if name not in self._entries:
            raise ConfigError(
                f"{self.kind}.name must be a known {self.kind}, but is '{name}'{did_you_mean(str(name), self)}"
            )
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
