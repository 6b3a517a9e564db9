"""Cross-attention of a few validation sentences, drawn at every validation.

The references are decoded as they are. A row is a token that the model predicts, a column a token of the source, and
a cell the attention weight at the position that predicts it, as the mean over the heads of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.evaluate.heat_maps import heat_maps
from deepspeed_nmt.search.alignment import watched
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.translate import pad_sources

SHORTEST, LONGEST = 8, 25
"""Bounds on the tokens of each side of a sentence that is drawn."""
Images = dict[str, NDArray[np.uint8]]
"""Grey images by tag. Shape: (height,width) each"""


class AttentionImages:
    """Drawings of the cross-attention of some sentences.

    Args:
        corpus: validation corpus, whose first sentences of suitable length are drawn.
        tokenizer: of the run.
        count: number of sentences.
    """

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
        """Return an image of each sentence by tag; none for a model without cross-attention.

        Args:
            model: in eval mode, on the device.
            device: of the model.
        """
        attentions = model.cross_attentions()
        layers = sorted(attentions)
        if not layers or not self._pairs:
            return {}
        layers = list(dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])))
        source = self._tokenizer.vocabulary.source
        rows = [[*tokens, source.eos] for tokens, _ in self._pairs]
        source_BS, padded = pad_sources(rows, source.pad, device)
        found: dict[int, list[Tensor]] = {}
        with watched([attentions[layer] for layer in layers]) as seen:

            def keep(numbers: list[int], rows_N: Tensor) -> None:
                weights = [seen[attentions[layer]].float().cpu() for layer in layers]
                found.update({number: [each[place] for each in weights] for place, number in enumerate(numbers)})

            references = [[target] for _, target in self._pairs]
            token_log_probs([model], self._tokenizer.vocabulary, source_BS, padded, references, None, keep)
        return {
            f"attention/sentence_{number + 1}": self._draw(rows[number], target, layers, found[number])
            for number, (_, target) in enumerate(self._pairs)
        }

    def _draw(
        self, source: list[int], target: list[int], layers: Sequence[int], weights: Sequence[Tensor]
    ) -> NDArray[np.uint8]:
        maps = [each[: len(target) + 1, : len(source)].numpy() for each in weights]
        predicted = [*target, self._tokenizer.vocabulary.eos]
        return heat_maps(
            maps,
            [f"decoder layer {layer}" for layer in layers],
            self._tokenizer.pieces(predicted),
            self._tokenizer.pieces(source, "source"),
        )
