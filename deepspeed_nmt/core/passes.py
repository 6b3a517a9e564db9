"""Several passes over one micro-batch, carried out together.

A pass is one run of the decoder over the batch's targets. Regularisers ask for further ones: the same pair once more,
or the same target with another source. All sources are encoded in one call and all passes decoded in one call, as
blocks of rows, so that many small runs become one large one; what a method draws at random still differs from pass to
pass (:class:`~deepspeed_nmt.nn.layers.Draw`).

Legend: B sentences, S source length, T target length, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.nn.layers import Draw


class Passes:
    """The passes wanted of a micro-batch: at first only the ordinary one, number 0.

    Args:
        batch: the micro-batch.

    Attributes:
        twin: a further pass over the batch's own pairs that predicts, too, or None.
        divergence: weight of the divergence between the predictions of the first pass and the twin.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.twin: int | None = None
        self.divergence = 0.0
        self._sources_BS = [batch.source_BS]
        self._source_of_pass = [0]

    def add_source(self, source_BS: Tensor) -> int:
        """Have another source encoded for the same targets, and return its number. Shape: (B,S), as the batch's."""
        self._sources_BS.append(source_BS)
        return len(self._sources_BS) - 1

    def add_pass(self, source: int) -> int:
        """Have the targets decoded once more, from source ``source``, and return the pass's number."""
        self._source_of_pass.append(source)
        return len(self._source_of_pass) - 1

    def run(self, model: TranslationModel) -> list[dict[str, Tensor]]:
        """Decoder states of each pass at each exit. Shape: -> (B,T,D) each"""
        batch = self.batch
        sources, passes = len(self._sources_BS), len(self._source_of_pass)
        if passes == 1:
            return [model(batch)]
        rows = batch.source_BS.shape[0]
        memory = model.encode(torch.cat(self._sources_BS), padded=batch.source_padded)
        if self._source_of_pass != list(range(sources)):
            first_P = torch.tensor(self._source_of_pass, device=batch.source_BS.device) * rows
            memory = memory.select((first_P.unsqueeze(1) + torch.arange(rows, device=first_P.device)).flatten())
        draw = Draw(batch.seed, batch.update, tuple(range(passes)))
        states = model.decode(batch.target_input_BT.repeat(passes, 1), memory, draw)
        blocks = {name: torch.split(states_XTD, rows) for name, states_XTD in states.items()}
        return [{name: blocks[name][number] for name in blocks} for number in range(passes)]
