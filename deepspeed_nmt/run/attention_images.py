"""Cross-attention of a few validation sentences, drawn at every validation.

The references are decoded as they are. A row is a token that the model predicts, a column a token of the source, and
a cell the attention weight at the position that predicts it, as the mean over the heads of a layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.search.alignment import watched
from deepspeed_nmt.search.forced import pad_sources, token_log_probs

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

SHORTEST, LONGEST = 8, 25
"""Bounds on the tokens of each side of a sentence that is drawn."""
_CELL, _GAP, _TITLE, _FONT = 16, 24, 22, 12
"""Pixels of a cell, between two maps, of a title, and of a letter."""
_LONGEST = 16
"""Letters after which a word is cut."""
Images = dict[str, NDArray[np.uint8]]
"""Grey images by tag. Shape: (height,width) each"""


class AttentionImages:
    """Drawings of the cross-attention of some sentences."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, count: int) -> None:
        lengths = np.stack([corpus.source_lengths, corpus.target_lengths])
        # Both lengths count the EOS.
        suitable = ((lengths > SHORTEST) & (lengths <= LONGEST + 1)).all(axis=0)
        self._pairs = [
            (corpus.source(number).tolist(), corpus.target(number).tolist())
            for number in np.flatnonzero(suitable)[:count].tolist()
        ]
        self._tokenizer = tokenizer

    def __call__(self, model: TranslationModel, device: torch.device) -> Images:
        """Return an image of each sentence by tag; none for a model without cross-attention."""
        attentions = model.cross_attentions()
        layers = sorted(attentions)
        if not layers or not self._pairs:
            return {}
        layers = list(dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])))
        source = self._tokenizer.vocabulary.source
        rows = [[*tokens, source.eos] for tokens, _ in self._pairs]
        source_BS, padded = pad_sources(rows, source.pad, device)
        weights: dict[int, list[Tensor]] = {}
        with watched([attentions[layer] for layer in layers]) as seen:

            def keep(numbers: list[int], rows_N: Tensor, real_NT: Tensor) -> None:
                of_layers = [seen[attentions[layer]].float().cpu() for layer in layers]
                weights.update({number: [rows[place] for rows in of_layers] for place, number in enumerate(numbers)})

            references = [[target] for _, target in self._pairs]
            token_log_probs(model, self._tokenizer.vocabulary, source_BS, padded, references, keep)
        titles = [f"decoder layer {layer}" for layer in layers]
        images: Images = {}
        for number, (_, target) in enumerate(self._pairs):
            maps = [of[: len(target) + 1, : len(rows[number])].numpy() for of in weights[number]]
            predicted = self._tokenizer.pieces([*target, self._tokenizer.vocabulary.eos])
            words = self._tokenizer.pieces(rows[number], "source")
            images[f"attention/sentence_{number + 1}"] = heat_maps(maps, titles, predicted, words)
        return images


def heat_maps(
    maps: Sequence[NDArray[np.float32]], titles: Sequence[str], rows: Sequence[str], columns: Sequence[str]
) -> NDArray[np.uint8]:
    """Draw matrices from 0 (white) to 1 (black) beside one another, with the same words at their sides, in grey.

    Shape: (rows,columns) each -> (height,width)
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

    package = importlib.util.find_spec("matplotlib")
    for place in [] if package is None else package.submodule_search_locations or []:
        file = Path(place, "mpl-data/fonts/ttf/DejaVuSans.ttf")
        if file.is_file():
            return ImageFont.truetype(file, _FONT)
    return ImageFont.load_default(_FONT)
