"""Processes that compile nothing do not import torch._dynamo, and optimizers make the same steps without it."""

import subprocess
import sys

import pytest
import torch

from deepspeed_nmt.engine.eager import eager

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
