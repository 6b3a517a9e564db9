"""`deepspeed-nmt` on a rank that gets into trouble.

$TROUBLE is "rank:update:kind". The kind is hang, raise, or linger (the rank is slow to leave, whatever the update).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from deepspeed_nmt.cli import main
from deepspeed_nmt.engine.plain import PlainEngine

rank, update, kind = os.environ.get("TROUBLE", "-1:0:none").split(":")
update_of_engine, close_of_engine = PlainEngine._backward, PlainEngine.close


def troubled(self: PlainEngine, batch: Any, factor: float) -> Any:
    """Fail in the requested update."""
    if os.environ["RANK"] == rank and batch.update.number == int(update) and kind != "linger":
        if kind == "hang":
            time.sleep(600)
        raise ValueError("a tensor is not what it should be")
    return update_of_engine(self, batch, factor)


def lingering(self: PlainEngine) -> None:
    """Wait before closing the engine."""
    if os.environ["RANK"] == rank and kind == "linger":
        time.sleep(4)
    close_of_engine(self)


PlainEngine._backward = troubled  # type: ignore[method-assign]
PlainEngine.close = lingering  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
