"""What training minimises, and the one module an engine sees.

An objective is a likelihood plus any number of terms. Each term may ask for further passes over the micro-batch
(:mod:`deepspeed_nmt.core.passes`), which are carried out together.

Legend: B sentences, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.passes import Passes


class LossOutput(NamedTuple):
    """What one micro-batch contributes to an update. A tuple, because ZeRO-3 looks for tensors in those.

    Attributes:
        loss: what is minimised, *summed* over target tokens (fp32 scalar). The engine divides by the tokens of the
            update.
        nll: negative log-likelihood of the reference, summed over target tokens (fp32 scalar, no gradient).
        terms: further sums to report, by name (fp32 scalars, no gradient), divided by the tokens of the update too.
    """

    loss: Tensor
    nll: Tensor
    terms: Mapping[str, Tensor] = MappingProxyType({})


class Likelihood(Protocol):
    """How well predictions fit the references."""

    def request_passes(self, passes: Passes) -> None:
        """Ask for exits; in training only. Validation reads the top."""

    def __call__(
        self, model: TranslationModel, passes: Sequence[Mapping[str, Tensor]], batch: Batch, divergence: float
    ) -> LossOutput:
        """The mean over one or two passes over the same pairs, given the decoder states at each exit.

        With two, ``divergence`` times the symmetric KL divergence between their predictions is added to the loss and
        the divergence itself reported as the term "divergence".
        """


class Regularizer(Protocol):
    """Something added to the likelihood.

    Attributes:
        name: by which it is reported.
        weight: its factor in the loss.
        every: it is part of every so manieth update.
    """

    name: str
    weight: float
    every: int

    def request_passes(self, passes: Passes) -> Callable[[Sequence[Mapping[str, Tensor]]], Tensor] | None:
        """Ask for passes; the function returned takes the states of all passes to this term's value.

        The value is summed so that divided by the update's target tokens it is what the paper defines. None: nothing
        is added, the passes' twin and divergence say it all.
        """


class Objective:
    """A likelihood and its terms. Only training has terms; validation sees the likelihood alone, in one pass.

    Args:
        likelihood: of the references.
        terms: what else is minimised; those of weight 0 are left out, with their passes.
    """

    def __init__(self, likelihood: Likelihood, regularizers: Sequence[Regularizer] = ()) -> None:
        self._likelihood = likelihood
        self._regularizers = tuple(each for each in regularizers if each.weight > 0.0)

    def __call__(self, model: TranslationModel, batch: Batch) -> LossOutput:
        """The loss of a micro-batch."""
        passes = Passes(model, batch)
        due = [term for term in self._regularizers if model.training and batch.update.number % term.every == 0]
        finish = [(term, value) for term in due if (value := term.request_passes(passes)) is not None]
        if model.training:
            self._likelihood.request_passes(passes)
        states = passes.run()
        predicting = states[:1] if passes.paired_pass is None else [states[0], states[passes.paired_pass]]
        loss, nll, reported = self._likelihood(model, predicting, batch, passes.divergence)
        terms = dict(reported)
        for term, value in finish:
            added = value(states)
            loss = loss + term.weight * added
            terms[term.name] = added.detach()
        return LossOutput(loss, nll, terms)


class TrainModule(nn.Module):
    """A model together with its objective: one forward per micro-batch, whatever the objective does inside."""

    def __init__(self, model: TranslationModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Batch) -> LossOutput:
        return self.objective(self.model, batch)
