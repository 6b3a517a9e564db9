"""Training objectives, and the module that an engine trains.

An objective is a likelihood and any number of regularizers:

    loss = likelihood + sum_r weight_r regularizer_r.

If pairs have weights (``Batch.weights_B``), both multiply the loss of each pair, per target position or as a whole,
by its weight. The engine divides by the number of target tokens all the same. So a pair counts as its weight says,
whatever other pairs its update has.

A regularizer may request further passes over the micro-batch. All passes run in one call of the encoder and one of
the decoder (:mod:`deepspeed_nmt.core.passes`).

Legend: B sentences, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.passes import Passes


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
        """Return the batch as the model reads it, for example with masked tokens."""

    def request_passes(self, passes: Passes) -> None:
        """Request exits. Called in training only; validation uses the top exit."""

    def __call__(
        self, model: TranslationModel, passes: Sequence[Mapping[str, Tensor]], batch: Batch, divergence: float
    ) -> LikelihoodOutput:
        """Compute the loss, averaged over one or two passes over the same pairs.

        With two passes, the symmetric KL divergence between their predictions, times ``divergence``, is added to the
        loss, and the divergence is reported as the metric "divergence". Both have the weights of pairs.

        Args:
            model: model whose projection is applied.
            passes: decoder states, (B,T,D), of each pass by the exit's name.
            batch: micro-batch.
            divergence: weight of the divergence.
        """


class Regularizer(Protocol):
    """Addition to the loss besides the likelihood.

    Attributes:
        name: name of its metric.
        weight: factor of its value in the loss.
        every: k, to apply it in every k-th update.
    """

    name: str
    weight: float
    every: int

    def request_passes(self, passes: Passes) -> Callable[[Sequence[Mapping[str, Tensor]]], Tensor] | None:
        """Request passes, and return a function that computes the value from the states of all passes.

        The value is a sum: divided by the target tokens of the update it is the regularizer as its paper defines it,
        if all pairs weigh 1. Otherwise each pair's part is multiplied by the pair's weight (``Batch.weighted``).

        Returns:
            The function, or None if the regularizer is only a divergence from a paired pass, which the likelihood
            adds (``passes.paired_pass``, ``passes.divergence``).
        """


class Objective:
    """A likelihood and regularizers. Regularizers apply in training only; validation is one pass of the likelihood.

    Args:
        likelihood: likelihood of the references.
        regularizers: additions to the loss. Those of weight 0 are omitted, with their passes.
    """

    def __init__(self, likelihood: Likelihood, regularizers: Sequence[Regularizer] = ()) -> None:
        self._likelihood = likelihood
        self._regularizers = tuple(each for each in regularizers if each.weight > 0.0)

    def __call__(self, model: TranslationModel, batch: Batch) -> LossOutput:
        """Compute the loss of a micro-batch."""
        passes = Passes(model, self._likelihood.corrupted(batch, model.training))
        due = [each for each in self._regularizers if model.training and batch.update.number % each.every == 0]
        finish = [(each, value) for each in due if (value := each.request_passes(passes)) is not None]
        if model.training:
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
