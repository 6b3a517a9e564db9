"""Take a picture of a page that `deepspeed-nmt report run` made, as docs/images/report_*.png are.

    python benchmarks/page_picture.py PAGE OUT [--width 1280] [--height 2570] [--dark]

It needs Chromium (Debian: chromium-headless-shell). The picture has 256 colours, so that it stays small.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from PIL import Image

from tests.chromium import chromium


def main() -> None:
    """Open the page, wait for its figures, and write the picture of its upper part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=2570)
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    with chromium() as browser:
        drawn = "['yes', 'failed'].includes(document.documentElement.dataset.drawn)"
        browser.open(arguments.page, arguments.width, dark=arguments.dark, until=drawn)
        browser.picture(arguments.out, arguments.width, arguments.height)
        with Image.open(arguments.out) as picture:
            picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(arguments.out, optimize=True)
        sys.exit("; ".join(browser.problems) or None)


if __name__ == "__main__":
    main()
