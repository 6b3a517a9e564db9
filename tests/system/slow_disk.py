"""`deepspeed-nmt` with a disk that takes $SLOW_DISK_S seconds for each file of tensors, while training goes on."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from deepspeed_nmt.cli import main
from deepspeed_nmt.train import checkpoint

save_file = checkpoint.save_file


def slowly(tensors: Any, path: Any) -> None:
    """Write a file late."""
    path.touch()
    time.sleep(float(os.environ["SLOW_DISK_S"]))
    save_file(tensors, path)


checkpoint.save_file = slowly
sys.exit(main(sys.argv[1:]))
