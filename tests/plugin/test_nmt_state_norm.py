"""The regularizer is its equation."""

from types import SimpleNamespace
from typing import Any

import torch
from nmt_state_norm import StateNorm, StateNormConfig

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.model import TOP
from deepspeed_nmt.core.objective import Passes
from deepspeed_nmt.core.vocabulary import Vocabulary


def test_it_is_the_sum_over_targets_of_the_mean_square() -> None:
    target = torch.tensor([[1, 5, 2], [1, 2, 0]])
    batch = Batch(
        source_BS=target,
        target_input_BT=target,
        target_output_BT=torch.tensor([[5, 6, 2], [5, 2, 0]]),
        sentence_ids_B=torch.arange(2),
        source_tokens=5,
        target_tokens=5,
        pad=0,
        update=UpdateInfo(),
    )
    states_BTD = torch.randn(2, 3, 8)
    model: Any = SimpleNamespace(stages=(1, 1))
    value = StateNorm(StateNormConfig(), Vocabulary(10)).request_passes(Passes(model, batch))
    words = [*states_BTD[0], *states_BTD[1, :2]]  # the last one of the second row is padding
    squares = [float(word_D.double().square().mean()) for word_D in words]
    assert abs(float(value([{TOP: states_BTD}])) - sum(squares)) < 1e-5
