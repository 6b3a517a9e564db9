"""The program's command line with the toy optimizer: ``python -m tests.toy.with_lion train ...``."""

from __future__ import annotations

import sys

from deepspeed_nmt.cli import main
from deepspeed_nmt.train.optimizers import OPTIMIZERS
from tests.toy.toy_optimizer import ENTRY

if __name__ == "__main__":
    OPTIMIZERS.add(ENTRY)
    sys.exit(main(sys.argv[1:]))
