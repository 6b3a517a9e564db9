"""Take a picture of a page that `deepspeed-nmt report run` made, as docs/images/report_*.png are.

    python benchmarks/page_picture.py PAGE OUT [--width 1280] [--height 1850] [--dark]

It needs Chromium (Debian: chromium-headless-shell).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chromium import chromium


def main() -> None:
    """Open the page, wait for its figures, and write the picture of its upper part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1850)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    with chromium() as browser:
        drawn = "['yes', 'failed'].includes(document.documentElement.dataset.drawn)"
        browser.open(arguments.page, arguments.width, dark=arguments.dark, until=drawn)
        browser.picture(arguments.out, arguments.width, arguments.height)
        sys.exit("; ".join(browser.problems) or None)


if __name__ == "__main__":
    main()
