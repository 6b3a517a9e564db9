"""`deepspeed-nmt` on a rank that gets into trouble: TROUBLE is "rank:update:kind", a kind being hang or raise."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from deepspeed_nmt.cli import main
from deepspeed_nmt.engine.plain import PlainEngine

rank, update, kind = os.environ.get("TROUBLE", "-1:0:none").split(":")
update_of_engine = PlainEngine._backward


def troubled(self: PlainEngine, batch: Any, factor: float) -> Any:
    """Fail where it was asked for."""
    if os.environ["RANK"] == rank and batch.update == int(update):
        if kind == "hang":
            time.sleep(600)
        raise ValueError("a tensor is not what it should be")
    return update_of_engine(self, batch, factor)


PlainEngine._backward = troubled  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
