"""Training objectives, and the module that an engine trains.

An objective is a likelihood and any number of regularizers:

    loss = likelihood + sum_r weight_r regularizer_r.

If pairs have weights (``Batch.weights_B``), both multiply the loss of each pair, per target position or as a whole,
by its weight. The engine divides by the number of target tokens all the same. So a pair counts as its weight says,
whatever other pairs its update has.

A pass is one run of the decoder over the batch's targets. Regularizers request further passes: of the same pair, or
of the same target with another source. All sources, and all passes, are blocks of rows of one larger batch. Random
choices of a method still differ from pass to pass (:class:`~deepspeed_nmt.nn.layers.Draw`).

A likelihood may also request several exits. Encoder exits are blocks of rows too, so that each decoder layer runs
once for all of them.

Legend: B sentences, S source length, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.nn.layers import AttentionRecord, Draw

States = Sequence[Mapping[str, Tensor]]
"""Decoder states, (B,T,D), of each pass by the exit's name, those of the deepest requested exit also as TOP; and
further outputs, such as the attention weights, (B,T,S), of :meth:`Passes.request_attention`."""


class Passes:
    """The requested passes of a model over a micro-batch. Initially there is one pass, number 0.

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
        self._attentions: dict[str, nn.Module] = {}

    def add_source(self, source_BS: Tensor) -> int:
        """Request that another source of the same targets be encoded, and return its number. Shape: (B,S)."""
        self._sources_BS.append(source_BS)
        return len(self._sources_BS) - 1

    def add_pass(self, source: int) -> int:
        """Request another pass over the targets, with source number ``source``, and return the number of the pass."""
        self._source_of_pass.append(source)
        return len(self._source_of_pass) - 1

    def request_attention(self, layer: int) -> str:
        """Request the weights of a decoder layer's cross-attention in all passes; return their name among the states.

        They are the mean of the heads, before dropout, at the deepest encoder exit, and have a gradient. In
        either layout each sentence is a row, as in :attr:`Batch.target_mask` and :meth:`Batch.source_rows`; what
        padding attends to is arbitrary. Shape of each pass: fp32 (B,T,S)

        Args:
            layer: its number, from 1 at the bottom.

        Raises:
            ConfigError: if the model cannot hand them over.
        """
        self._attentions[f"attention/{layer}"] = self.model.attention_layer(layer)
        return f"attention/{layer}"

    def run(self) -> list[dict[str, Tensor]]:
        """Compute the decoder states of each pass, (B,T,D), by the exit's name; the deepest exit's also as TOP."""
        batch, model = self.batch, self.model
        sources, passes, encoders = len(self._sources_BS), len(self._source_of_pass), len(self.encoder_exits)
        deepest = max(self.encoder_exits), max(self.decoder_exits)
        top = exit_name(*deepest)
        if passes == len(self.decoder_exits) == encoders == 1 and deepest == model.stages and not self._attentions:
            states_once = model.single_pass(batch)
            return [{**states_once, top: states_once[TOP]}]
        rows = batch.source_BS.shape[0]
        memory = model.encode(
            torch.cat(self._sources_BS), batch.source_padded, self.encoder_exits, batch.source_segments
        )
        # Order of the blocks of rows: encoder exits, and within each the passes.
        blocks = [exit * sources + source for exit in range(encoders) for source in self._source_of_pass]
        if blocks != list(range(encoders * sources)):
            # Indices are computed on the device: a copy of them from the host would wait for the device.
            device = batch.source_BS.device
            ranges = [torch.arange(block * rows, (block + 1) * rows, device=device) for block in blocks]
            memory = memory.select(torch.cat(ranges))
        if self._attentions:
            memory = replace(memory, record=AttentionRecord(self._attentions.values()))
        update = batch.update
        draw = Draw(update.seed, update.number, tuple(range(passes)) * encoders, update.micro_batch)
        targets = batch.target_input_BT.repeat(len(blocks), 1)
        states = model.decode(targets, memory, draw, self.decoder_exits, batch.target_segments)
        states_of_pass: list[dict[str, Tensor]] = [{} for _ in range(passes)]
        for decoder_exit, states_XTD in zip(self.decoder_exits, states, strict=True):
            for number, block_BTD in enumerate(torch.split(states_XTD, rows)):
                encoder_exit = self.encoder_exits[number // passes]
                states_of_pass[number % passes][exit_name(encoder_exit, decoder_exit)] = block_BTD
        for by_exit in states_of_pass:
            by_exit[TOP] = by_exit[top]
        first = self.encoder_exits.index(deepest[0]) * passes
        for name, layer in self._attentions.items():
            assert memory.record is not None
            weights_of_block = memory.record.weights[layer].chunk(len(blocks))
            for number, by_name in enumerate(states_of_pass):
                by_name[name] = weights_of_block[first + number]
        return states_of_pass


class LikelihoodOutput(NamedTuple):
    """Result of a likelihood for one micro-batch.

    Attributes:
        loss: loss to minimise, summed over target tokens, times the weights of pairs (fp32 scalar).
        nll_N: negative log-likelihood of the reference at each position of the target, in the batch's layout and
            without weights of pairs; 0 where there is none (fp32, no gradient). Shape: (N,)
        metrics: further sums to report, by name, with the weights of pairs (fp32 scalars, no gradient).
    """

    loss: Tensor
    nll_N: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})


class LossOutput(NamedTuple):
    """Sums of one micro-batch, which the engine divides by the target tokens of the update.

    A tuple, because ZeRO-3 finds the tensors of a module's output in tuples.

    Attributes:
        loss: loss to minimise, *summed* over target tokens, times the weights of pairs (fp32 scalar).
        nll: negative log-likelihood of the reference, summed over target tokens without weights of pairs (fp32
            scalar, no gradient).
        metrics: further sums to report, by name, parts of the loss with the weights of pairs (fp32 scalars, no
            gradient).
    """

    loss: Tensor
    nll: Tensor
    metrics: Mapping[str, Tensor] = MappingProxyType({})


class Likelihood(Protocol):
    """Loss of predictions against the references."""

    def corrupted(self, batch: Batch, training: bool) -> Batch:
        """Return the batch as the model reads it, for example with masked tokens; by default unchanged."""
        return batch

    def request_passes(self, passes: Passes) -> None:
        """Request exits, by default the top alone; in validation, with a model in eval mode, usually nothing else."""
        return

    def __call__(self, model: TranslationModel, passes: States, batch: Batch, divergence: float) -> LikelihoodOutput:
        """Compute the loss, averaged over one or two passes over the same pairs, whose projection is the model's.

        With two passes, the symmetric KL divergence between their predictions, times ``divergence``, is added to the
        loss, and the divergence is reported as the metric "divergence". Both have the weights of pairs.
        """


class Regularizer(Protocol):
    """Addition to the loss besides the likelihood, named as its metric, in every k-th update, k = ``every``."""

    name: str
    weight: float
    every: int = 1

    def check_model(self, model: TranslationModel) -> None:
        """Refuse a model, which may be on the meta device, by a ConfigError."""
        return

    def request_passes(self, passes: Passes) -> Callable[[States], Tensor] | None:
        """Request passes, and return a function from the states of all passes to the value.

        The value is a sum: divided by the target tokens of the update it is the regularizer as its paper defines it,
        if all pairs weigh 1. Otherwise each pair's part is multiplied by the pair's weight (``Batch.weighted``).

        Return None if the regularizer is only a divergence from a paired pass, which the likelihood adds
        (``passes.paired_pass``, ``passes.divergence``).
        """


class Objective:
    """A likelihood and the regularizers whose weight is not 0. In validation, it is one pass of the likelihood."""

    def __init__(self, likelihood: Likelihood, regularizers: Sequence[Regularizer] = ()) -> None:
        self._likelihood = likelihood
        self._regularizers = tuple(part for part in regularizers if part.weight > 0.0)

    def due(self, update: int) -> tuple[Regularizer, ...]:
        """Return the regularizers that are computed in an update."""
        return tuple(part for part in self._regularizers if update % part.every == 0)

    def deepest(self, model: TranslationModel, batch: Batch) -> tuple[int, int]:
        """Return the deepest stages of encoder and decoder that the likelihood requests, without running them."""
        passes = Passes(model, batch)
        self._likelihood.request_passes(passes)
        return max(passes.encoder_exits), max(passes.decoder_exits)

    def check_model(self, model: TranslationModel) -> None:
        """Refuse a model that a regularizer cannot be computed with, by a ConfigError."""
        for part in self._regularizers:
            part.check_model(model)

    def __call__(self, model: TranslationModel, batch: Batch) -> LossOutput:
        """Compute the loss of a micro-batch."""
        passes = Passes(model, self._likelihood.corrupted(batch, model.training))
        due = self.due(batch.update.number) if model.training else ()
        finish = [(part, value) for part in due if (value := part.request_passes(passes)) is not None]
        self._likelihood.request_passes(passes)
        states = passes.run()
        predicting = states[:1] if passes.paired_pass is None else [states[0], states[passes.paired_pass]]
        loss, nll_N, reported = self._likelihood(model, predicting, batch, passes.divergence)
        metrics = {**reported, **batch.sums_by_corpus(nll_N)}
        for regularizer, value in finish:
            added = value(states)
            loss = loss + regularizer.weight * added
            metrics[regularizer.name] = added.detach()
        return LossOutput(loss, nll_N.sum(), metrics)


class TrainModule(nn.Module):
    """A model and its objective. An engine calls it once per micro-batch, also for objectives of several passes."""

    def __init__(self, model: TranslationModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    @override
    def forward(self, batch: Batch) -> LossOutput:
        return self.objective(self.model, batch)
