"""Several passes over one micro-batch, carried out together.

A pass is one run of the decoder over the batch's targets. Regularisers ask for further ones: the same pair once more,
or the same target with another source. All sources are encoded in one call and all passes decoded in one call, as
blocks of rows, so that many small runs become one large one; what a method draws at random still differs from pass to
pass (:class:`~deepspeed_nmt.nn.layers.Draw`).

A likelihood may also ask for several exits. Encoder exits become blocks of rows, too, so that each decoder layer runs
once for all of them.

Legend: B sentences, S source length, T target length, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.nn.layers import Draw


class Passes:
    """The passes wanted of a micro-batch: at first only the ordinary one, number 0.

    Args:
        model: what runs.
        batch: the micro-batch.

    Attributes:
        encoder_exits, decoder_exits: stages wanted, from 1; every combination is computed. At first the top ones.
        twin: a further pass over the batch's own pairs that predicts, too, or None.
        divergence: weight of the divergence between the predictions of the first pass and the twin.
    """

    def __init__(self, model: TranslationModel, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        self.encoder_exits, self.decoder_exits = ([stage] for stage in model.stages)
        self.paired_pass: int | None = None
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

    def run(self) -> list[dict[str, Tensor]]:
        """Decoder states of each pass by the exit's name, the top also as TOP. Shape: -> (B,T,D) each"""
        batch, model = self.batch, self.model
        sources, passes, encoders = len(self._sources_BS), len(self._source_of_pass), len(self.encoder_exits)
        top = exit_name(*model.stages)
        if passes == len(self.decoder_exits) == encoders == 1:
            found_once = model.read(batch)
            return [{**found_once, top: found_once[TOP]}]
        rows = batch.source_BS.shape[0]
        memory = model.encode(torch.cat(self._sources_BS), batch.source_padded, self.encoder_exits)
        # Blocks of rows: encoder exits outside, passes inside.
        blocks = [exit * sources + source for exit in range(encoders) for source in self._source_of_pass]
        if blocks != list(range(encoders * sources)):
            first_X = torch.tensor(blocks, device=batch.source_BS.device) * rows
            memory = memory.select((first_X.unsqueeze(1) + torch.arange(rows, device=first_X.device)).flatten())
        draw = Draw(batch.update.seed, batch.update.number, tuple(range(passes)) * encoders)
        states = model.decode(batch.target_input_BT.repeat(len(blocks), 1), memory, draw, self.decoder_exits)
        found: list[dict[str, Tensor]] = [{} for _ in range(passes)]
        for decoder_exit, states_XTD in zip(self.decoder_exits, states, strict=True):
            for number, block_BTD in enumerate(torch.split(states_XTD, rows)):
                encoder_exit = self.encoder_exits[number // passes]
                found[number % passes][exit_name(encoder_exit, decoder_exit)] = block_BTD
        for each in found:
            each[TOP] = each[top]
        return found
