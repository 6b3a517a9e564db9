"""A regularizer outside the package: the mean square of the decoder's top states.

With h_td element d of the top state at target position t, of N positions,

    L = 1/N sum_t 1/D sum_d h_td^2.

The file shows what a regularizer needs: a configuration class, the regularizer, a case for `selftest`, and the
registry entry; and what a plug-in needs: PLUGIN_API and ENTRIES.

Legend: B sentences, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import TOP
from deepspeed_nmt.core.objective import Passes, Regularizer, States
from deepspeed_nmt.core.parts import RegularizerConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.registry import Entry, SelfTest


class StateNormConfig(RegularizerConfig):
    """Settings of the regularizer."""

    weight: float = Field(default=0.1, ge=0.0, description="factor in the loss; 0 disables it")


class StateNorm(Regularizer):
    """Mean square of the top states at positions that are not padding."""

    name = "state_norm"

    def __init__(self, config: StateNormConfig, vocabulary: Vocabulary) -> None:
        self.weight = config.weight

    def request_passes(self, passes: Passes) -> Callable[[States], Tensor]:
        """Request no further pass, and return the function that computes the value from pass 0."""
        batch = passes.batch

        def value(states: States) -> Tensor:
            square_BT = batch.target_rows(states[0][TOP].float().square().mean(dim=2))
            # The engine divides by the tokens of the update.
            return batch.weighted((square_BT * batch.target_mask).sum(dim=1)).sum()

        return value


_SMALL = {"dim": 32, "ffn_dim": 64, "heads": 4, "encoder_layers": 1, "decoder_layers": 1}
SELFTEST = SelfTest("state_norm", {"model": _SMALL, "objective": {"state_norm": {"weight": 0.5}}})
ENTRY = Entry("state_norm", StateNormConfig, StateNorm, SELFTEST)

PLUGIN_API = 1
ENTRIES = [ENTRY]
