"""Learning-rate schedules, parameter groups, and steps without torch._dynamo."""

import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError

from deepspeed_nmt.engine.eager import eager
from deepspeed_nmt.engine.optimizer import Groups, OptimizerConfig
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig
from deepspeed_nmt.train.schedule import ScheduleConfig, learning_rate


@pytest.mark.parametrize(
    ("name", "update", "expected"),
    [
        ("inverse_sqrt", 50, 0.5),
        ("inverse_sqrt", 400, 0.5),
        ("cosine", 600, 0.55),
        ("cosine", 1100, 0.1),
        ("linear", 1100, 0.1),
        ("linear", 9999, 0.1),
        ("constant", 700, 1.0),
        ("wsd", 50, 0.5),
        ("wsd", 900, 1.0),
        ("wsd", 950, 0.55),
        ("wsd", 1100, 0.1),
        ("wsd", 9999, 0.1),
    ],
)
def test_schedules(name: str, update: int, expected: float) -> None:
    decay = {"decay_updates": 200} if name == "wsd" else {}
    config = ScheduleConfig(name=name, warmup_updates=100, initial_lr=0.0, final_lr=0.1, **decay)
    assert learning_rate(update, 1.0, config, max_updates=1100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"name": "wsd"}, "ends in a decay"), ({"name": "cosine", "decay_updates": 9}, "a setting of name=wsd only")],
)
def test_a_decay_belongs_to_wsd(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ScheduleConfig.model_validate(settings)


def test_a_schedule_that_is_ahead_begins_at_its_peak() -> None:
    ahead = ScheduleConfig(warmup_updates=8000, skipped_updates=8000)
    rates = [learning_rate(update, 2e-3, ahead, 10_000) for update in (1, 8000)]
    assert rates == pytest.approx([2e-3, 2e-3 / 2**0.5], rel=1e-3)
    cosine = ahead.model_copy(update={"name": "cosine", "final_lr": 1e-4})
    assert [learning_rate(update, 2e-3, cosine, 100) for update in (50, 100)] == pytest.approx([1.05e-3, 1e-4])


def test_weight_decay_excludes_vectors_and_frozen_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    groups = AdamWConfig(weight_decay=0.1).over(model).param_groups
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in groups] == [(0.1, [2]), (0.0, [1, 1, 1, 1])]
    assert isinstance(AdamConfig().over(model), torch.optim.Adam)


class MomentumConfig(OptimizerConfig):
    """SGD, which keeps a state only with momentum."""

    states: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    name: str = "sgd"
    momentum: float = 0.9

    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum)


def test_an_optimizer_without_the_states_that_it_declares_is_refused() -> None:
    model = torch.nn.Linear(3, 4)
    assert not MomentumConfig().over(model).state
    with pytest.raises(ConfigError, match=r"optimizer\.name=sgd keeps no momentum_buffer"):
        MomentumConfig(momentum=0.0).over(model)


PROGRAM = """
import sys, torch
from torch import nn
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.eager import eager, without_dynamo
weight = nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
optimizer = eager(torch.optim.AdamW)([weight], fused=True)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
with without_dynamo():
    import deepspeed.runtime.engine, deepspeed.runtime.zero.muon.muon_optimizer
    from deepspeed.runtime.zero import stage3
sys.exit("torch._dynamo" in sys.modules)
"""


def test_steps_and_deepspeed_do_not_import_dynamo() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_steps_are_those_of_torch(kind: type[torch.optim.Optimizer]) -> None:
    weights = []
    for built in (kind, eager(kind)):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = built([weight], lr=0.1, weight_decay=0.1, fused=True)
        for step in range(3):
            (weight * step).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        assert not weight.grad and torch.is_grad_enabled()
        weights.append([weight.detach(), *state["state"][0].values()])
    for ours, torchs in zip(*weights, strict=True):
        assert torch.equal(ours, torchs)
