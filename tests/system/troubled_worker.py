"""`deepspeed-nmt` on a rank that gets into trouble.

$TROUBLE is "rank:update:kind". The kind is hang, raise, linger (the rank is slow to leave, whatever the update), disk
(the rank's disk hangs while the checkpoint of that update is written), loss (the rank computes a wrong loss once), or
flip (a bit of the rank's weights changes).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.train import checkpoint

rank, update, kind = os.environ.get("TROUBLE", "-1:0:none").split(":")
update_of_engine, close_of_engine = PlainEngine._backward, PlainEngine.close


def troubled(self: PlainEngine, batch: Any, factor: float) -> Any:
    """Fail in the requested update."""
    if os.environ["RANK"] == rank and batch.update.number == int(update) and kind in ("hang", "raise"):
        if kind == "hang":
            sys.stderr.write("this rank hangs\n")
            time.sleep(600)
        raise ValueError("a tensor is not what it should be")
    if os.environ["RANK"] == rank and batch.update.number == int(update) and kind == "flip":
        weight = next(self.module.parameters()).detach().flatten()
        weight[3:4].view(torch.int32).bitwise_xor_(1 << 22)
    output = update_of_engine(self, batch, factor)
    if os.environ["RANK"] == rank and batch.update.number == int(update) and kind == "loss":
        gradient = next(parameter.grad for parameter in self.module.parameters() if parameter.grad is not None)
        gradient.fill_(float("nan"))
        output = output._replace(loss=output.loss * float("nan"))
    return output


def lingering(self: PlainEngine) -> None:
    """Wait before closing the engine."""
    if os.environ["RANK"] == rank and kind == "linger":
        time.sleep(4)
    close_of_engine(self)


def hanging(tensors: Any, path: Any) -> None:
    """Write a file, unless the disk hangs."""
    if os.environ["RANK"] == rank and kind == "disk" and f"{int(update):07d}" in str(path):
        time.sleep(600)
    save_file(tensors, path)


save_file, checkpoint.save_file = checkpoint.save_file, hanging
PlainEngine._backward = troubled  # type: ignore[method-assign]
PlainEngine.close = lingering  # type: ignore[method-assign]
sys.exit(main(sys.argv[1:]))
