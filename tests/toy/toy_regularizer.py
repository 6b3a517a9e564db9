"""A toy regularizer: the mean square of the decoder's top states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import TOP
from deepspeed_nmt.core.parts import RegularizerConfig
from deepspeed_nmt.core.passes import Passes
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.registry import Entry


class StateNormConfig(RegularizerConfig):
    """Settings of the regularizer."""

    weight: float = Field(default=0.1, ge=0.0, description="factor in the loss")


class StateNorm:
    """Mean square of the states at positions that are not padding."""

    name = "state_norm"
    every = 1

    def __init__(self, config: StateNormConfig) -> None:
        self.weight = config.weight

    def request_passes(self, passes: Passes) -> Callable[[Sequence[Mapping[str, Tensor]]], Tensor]:
        """Ask for no further pass, and take the value from the ordinary one."""
        real_BT = passes.batch.target_output_BT.ne(passes.batch.pad)

        def value(states: Sequence[Mapping[str, Tensor]]) -> Tensor:
            square_BT = states[0][TOP].float().square().mean(dim=2)
            return (square_BT * real_BT).sum()  # the engine divides by the tokens of the update

        return value


def build_state_norm(config: StateNormConfig, vocabulary: Vocabulary) -> StateNorm:
    """Build the regularizer of a run."""
    return StateNorm(config)


ENTRY = Entry("state_norm", StateNormConfig, build_state_norm)
