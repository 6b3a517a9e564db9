"""Heat maps with words at their sides, drawn in milliseconds: a validation during training draws several."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

_CELL, _GAP, _TITLE, _FONT = 16, 24, 22, 12
"""Pixels of a cell, between two maps, of a title, and of a letter."""
_LONGEST = 16
"""Letters after which a word is cut."""


def heat_maps(
    maps: Sequence[NDArray[np.float32]], titles: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> NDArray[np.uint8]:
    """Draw matrices of values from 0 (white) to 1 (black) beside one another, with the same words at their sides.

    Args:
        maps: the matrices. Shape: (rows,columns) each
        titles: of the matrices.
        rows: word of each row.
        columns: word of each column.

    Returns:
        A grey image. Shape: (height,width)
    """
    from PIL import Image, ImageDraw

    font = _font()
    rows, columns = ([word[:_LONGEST] for word in side] for side in (rows, columns))
    left, top = (int(max(map(font.getlength, side), default=0)) + 6 for side in (rows, columns))
    across, down = len(columns) * _CELL, len(rows) * _CELL
    image = Image.new("L", (left + len(maps) * (across + _GAP), _TITLE + top + down + 2), 255)
    draw = ImageDraw.Draw(image)
    for number, word in enumerate(rows):
        draw.text((left - 4, _TITLE + top + (number + 0.5) * _CELL), word, fill=0, font=font, anchor="rm")
    # The words of the columns are written in lines, and turned to be read from below.
    heads = Image.new("L", (top, across), 255)
    for number, word in enumerate(columns):
        ImageDraw.Draw(heads).text((3, (number + 0.5) * _CELL), word, fill=0, font=font, anchor="lm")
    heads = heads.transpose(Image.Transpose.ROTATE_90)
    for number, (values, title) in enumerate(zip(maps, titles, strict=True)):
        at = left + number * (across + _GAP)
        draw.text((at, 3), title, fill=0, font=font)
        image.paste(heads, (at, _TITLE))
        grey = (255 - 255 * np.clip(values, 0.0, 1.0)).astype(np.uint8)
        image.paste(Image.fromarray(grey.repeat(_CELL, axis=0).repeat(_CELL, axis=1)), (at, _TITLE + top))
        draw.rectangle((at - 1, _TITLE + top - 1, at + across, _TITLE + top + down), outline=128)
    return np.asarray(image)


@cache
def _font() -> FreeTypeFont | ImageFont:
    """Return a font with Latin, Greek, Cyrillic and Arabic letters: that of matplotlib, which is not imported."""
    from PIL import ImageFont

    found = importlib.util.find_spec("matplotlib")
    for place in [] if found is None else found.submodule_search_locations or []:
        file = Path(place, "mpl-data/fonts/ttf/DejaVuSans.ttf")
        if file.is_file():
            return ImageFont.truetype(file, _FONT)
    return ImageFont.load_default(_FONT)
