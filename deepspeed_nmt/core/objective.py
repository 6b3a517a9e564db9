"""What training minimises, and the one module an engine sees.

Legend: B sentences, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel


class LossOutput(NamedTuple):
    """What one micro-batch contributes to an update. A tuple, because ZeRO-3 looks for tensors in those.

    Attributes:
        loss: what is minimised, *summed* over target tokens (fp32 scalar). The engine divides by the tokens of the
            update.
        nll: negative log-likelihood of the reference, summed over target tokens (fp32 scalar, no gradient).
        terms: further sums to report, by name (fp32 scalars, no gradient).
    """

    loss: Tensor
    nll: Tensor
    terms: Mapping[str, Tensor] = MappingProxyType({})


class Objective(Protocol):
    """Turns a model and a micro-batch into a loss; may run the model several times."""

    def __call__(self, model: TranslationModel, batch: Batch) -> LossOutput: ...


class TrainModule(nn.Module):
    """A model together with its objective: one forward per micro-batch, whatever the objective does inside."""

    def __init__(self, model: TranslationModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Batch) -> LossOutput:
        return self.objective(self.model, batch)
