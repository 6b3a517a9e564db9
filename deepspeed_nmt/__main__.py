"""Entry point of `python -m deepspeed_nmt`, the same program as `deepspeed-nmt`."""

import sys

from deepspeed_nmt.cli import main

if __name__ == "__main__":
    sys.exit(main())
