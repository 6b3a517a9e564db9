"""Several passes over one micro-batch, in one call of the encoder and one of the decoder.

A pass is one run of the decoder over the batch's targets. Regularizers request further passes: of the same pair, or
of the same target with another source. All sources, and all passes, are blocks of rows of one larger batch. Random
choices of a method still differ from pass to pass (:class:`~deepspeed_nmt.nn.layers.Draw`).

A likelihood may also request several exits. Encoder exits are blocks of rows too, so that each decoder layer runs
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
    """The requested passes over a micro-batch. Initially there is one pass, number 0.

    Args:
        model: model to run.
        batch: micro-batch.

    Attributes:
        encoder_exits: requested stages of the encoder, counted from 1; initially the last. Every combination with
            ``decoder_exits`` is computed.
        decoder_exits: requested stages of the decoder, counted from 1; initially the last.
        paired_pass: number of a second pass over the batch's own pairs, which the likelihood compares with pass 0;
            None if there is none.
        divergence: weight of the divergence between the predictions of pass 0 and of the paired pass.
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
        """Request that another source of the same targets be encoded, and return its number.

        Shape: (B,S), as ``batch.source_BS``
        """
        self._sources_BS.append(source_BS)
        return len(self._sources_BS) - 1

    def add_pass(self, source: int) -> int:
        """Request another pass over the targets, with source number ``source``, and return the number of the pass."""
        self._source_of_pass.append(source)
        return len(self._source_of_pass) - 1

    def run(self) -> list[dict[str, Tensor]]:
        """Compute the decoder states of each pass, by the exit's name. The top exit is also contained as TOP.

        Shape: -> (B,T,D) each
        """
        batch, model = self.batch, self.model
        sources, passes, encoders = len(self._sources_BS), len(self._source_of_pass), len(self.encoder_exits)
        top = exit_name(*model.stages)
        if passes == len(self.decoder_exits) == encoders == 1:
            found_once = model.single_pass(batch)
            return [{**found_once, top: found_once[TOP]}]
        rows = batch.source_BS.shape[0]
        memory = model.encode(
            torch.cat(self._sources_BS), batch.source_padded, self.encoder_exits, batch.source_segments
        )
        # Order of the blocks of rows: encoder exits, and within each the passes.
        blocks = [exit * sources + source for exit in range(encoders) for source in self._source_of_pass]
        if blocks != list(range(encoders * sources)):
            # Indices are computed on the device: a copy of them from the host would wait for the device.
            ranges = [
                torch.arange(block * rows, (block + 1) * rows, device=batch.source_BS.device) for block in blocks
            ]
            memory = memory.select(torch.cat(ranges))
        update = batch.update
        draw = Draw(update.seed, update.number, tuple(range(passes)) * encoders, update.micro_batch)
        targets = batch.target_input_BT.repeat(len(blocks), 1)
        states = model.decode(targets, memory, draw, self.decoder_exits, batch.target_segments)
        found: list[dict[str, Tensor]] = [{} for _ in range(passes)]
        for decoder_exit, states_XTD in zip(self.decoder_exits, states, strict=True):
            for number, block_BTD in enumerate(torch.split(states_XTD, rows)):
                encoder_exit = self.encoder_exits[number // passes]
                found[number % passes][exit_name(encoder_exit, decoder_exit)] = block_BTD
        for each in found:
            each[TOP] = each[top]
        return found
