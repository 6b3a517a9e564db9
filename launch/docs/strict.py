"""Build the site, and fail on any warning, also of a docstring, which `zensical build --strict` only prints."""

from __future__ import annotations

import logging
import sys

from zensical.main import cli


class _Counter(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that prints warnings and counts them."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1
        super().emit(record)


if __name__ == "__main__":
    counter = _Counter()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[counter])
    cli(["build", "--strict", "--clean"], standalone_mode=False)
    if counter.count:
        sys.exit(f"the site has {counter.count} warnings; see above")
