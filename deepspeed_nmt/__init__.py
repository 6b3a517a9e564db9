"""DeepSpeed-scaled training and decoding of very deep translation models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_nmt.api import Translator

__all__ = ["Translator", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the Python API at its first use: importing torch takes seconds, and some commands do not need it."""
    if name == "Translator":
        from deepspeed_nmt.api import Translator

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
