"""Decoding: searches for the best translation.

The registry of their names is :mod:`deepspeed_nmt.search.searches`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_nmt.core.parts import SearchConfig
    from deepspeed_nmt.search.base import Hypothesis, Search
    from deepspeed_nmt.search.searches import SEARCHES

__all__ = ["SEARCHES", "Hypothesis", "Search", "SearchConfig"]

_WHERE = {"SEARCHES": "search.searches", "Hypothesis": "search.base", "Search": "search.base"}
_WHERE["SearchConfig"] = "core.parts"


def __getattr__(name: str) -> Any:
    """Import a name of the package at its first use: most of them import torch, which takes seconds."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"deepspeed_nmt.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
