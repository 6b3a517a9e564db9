"""Learning-rate schedules, parameter groups, and steps without torch._dynamo."""

import copy
import subprocess
import sys
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.eager import eager
from deepspeed_nmt.engine.optimizer import Groups, OptimizerConfig
from deepspeed_nmt.engine.settings import EngineConfig, resolve_engine_for
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.train.optimizers import OPTIMIZERS
from deepspeed_nmt.train.optimizers.adafactor import AdafactorConfig
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig
from deepspeed_nmt.train.optimizers.muon import MuonConfig
from deepspeed_nmt.train.schedule import ScheduleConfig, learning_rate

V = Vocabulary(30)


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
    end = {} if name in ("inverse_sqrt", "constant") else {"final_lr": 0.1}
    decay = {"decay_updates": 200} if name == "wsd" else {}
    config = ScheduleConfig(name=name, warmup_updates=100, initial_lr=0.0, **end, **decay)
    assert learning_rate(update, 1.0, config, max_updates=1100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "wsd"}, "ends in a decay"),
        ({"name": "cosine", "decay_updates": 9}, "a setting of name=wsd only"),
        ({"name": "constant", "final_lr": 1e-5}, "never comes to it"),
    ],
)
def test_a_decay_without_a_meaning_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ScheduleConfig.model_validate(settings)


def test_a_schedule_that_is_ahead_begins_at_its_peak() -> None:
    ahead = ScheduleConfig(warmup_updates=8000, skipped_updates=8000)
    rates = [learning_rate(update, 2e-3, ahead, 10_000) for update in (1, 8000)]
    assert rates == pytest.approx([2e-3, 2e-3 / 2**0.5], rel=1e-3)
    assert ahead.warmup_left == 0, "the collapse monitor waits for no warm-up"
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


def orthogonalised(g: Tensor) -> Tensor:
    """Return the quintic Newton-Schulz iteration of Jordan et al. in float64."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def test_muon_is_its_equation_and_adamw_for_the_rest() -> None:
    torch.manual_seed(1)
    model = build_transformer(TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1), V)
    twin, lr, decay = copy.deepcopy(model), 0.01, 0.1
    optimizer = MuonConfig(lr=lr, weight_decay=decay, momentum=0.9, eps=1e-6).over(model)
    adamw = AdamWConfig(lr=lr, weight_decay=decay, eps=1e-6).over(twin)
    layers = {p for layer in model.all_layers() for p in layer.parameters()}
    hidden = [name for name, p in model.named_parameters() if p in layers and p.ndim == 2]
    weights = {name: model.get_parameter(name).detach().double() for name in hidden}
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for _ in range(3):
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            is_hidden = name in hidden
            p.grad = q.grad = torch.nn.init.orthogonal_(torch.empty_like(p)) if is_hidden else torch.randn_like(p)
            if is_hidden:
                g = p.grad.double()
                means[name] = 0.9 * means[name] + 0.1 * g
                step = 0.2 * max(p.shape) ** 0.5 * lr * orthogonalised(0.9 * means[name] + 0.1 * g)
                weights[name] = (1 - lr * decay) * weights[name] - step
        optimizer.step()
        adamw.step()
    assert len(hidden) == 16
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name in hidden:  # torch iterates in bfloat16
            torch.testing.assert_close(p.double(), weights[name], rtol=0, atol=0.02 * 3 * lr)
        else:
            assert torch.equal(p, q), name


def test_muon_leaves_a_matrix_alone_whose_gradient_is_zero() -> None:
    torch.manual_seed(1)
    model = build_transformer(TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1), V)
    optimizer = MuonConfig(weight_decay=0.1).over(model)
    crossing = model.decoder.layers[0].cross_attention.q_proj.weight
    before = []
    for dropped in (False, True, False):
        before.append(crossing.detach().clone())
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if dropped and p is crossing else torch.randn_like(p)
        optimizer.step()
    assert not torch.equal(before[0], before[1]) and torch.equal(before[1], before[2])
    assert crossing.grad is not None and not torch.equal(before[2], crossing)


def test_muon_without_matrices_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name=muon is for matrices of layers"):
        MuonConfig().over(torch.nn.Linear(3, 4))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1.0), (torch.float32, 1e-6)])
def test_adafactor_is_its_equation(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(1)
    model, lr, decay = torch.nn.Linear(4, 3).to(dtype), 0.02, 0.1
    optimizer = AdafactorConfig(lr=lr, weight_decay=decay).over(model)
    w, b = model.weight.detach().double().clone(), model.bias.detach().double().clone()
    rows, columns, squares = torch.zeros(3, 1).double(), torch.zeros(1, 4).double(), torch.zeros(3).double()
    for t in range(1, 5):
        share = t**-0.8
        g, h = scale / t**2 * torch.randn(3, 4).double(), scale / t**2 * torch.randn(3).double()
        rows = (1 - share) * rows + share * (g * g).mean(dim=1, keepdim=True)
        columns = (1 - share) * columns + share * (g * g).mean(dim=0, keepdim=True)
        squares = (1 - share) * squares + share * h * h
        for x, u, d in ((w, g / (rows * columns / rows.mean()).sqrt(), decay), (b, h / squares.sqrt(), 0.0)):
            size = max(1e-3, float(x.square().mean().sqrt())) * min(lr, t**-0.5)
            x.copy_((1 - lr * d) * x - size * u / max(1.0, float(u.square().mean().sqrt())))
        model.weight.grad, model.bias.grad = g.to(dtype), h.to(dtype)
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), w.to(dtype))
    torch.testing.assert_close(model.bias.detach(), b.to(dtype))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("engine", "divided"),
    [
        ({"name": "deepspeed", "ds_config": "zero1"}, "ZeRO-1"),
        ({"name": "deepspeed"}, "ZeRO-2"),
        ({"name": "deepspeed", "ds_config": "zero3"}, "ZeRO-3"),
        ({"name": "plain", "tensor_parallel": 2}, "engine.tensor_parallel=2"),
    ],
)
def test_ranks_do_not_share_what_a_step_needs_whole(name: str, engine: dict[str, Any], divided: str) -> None:
    optimizer = OPTIMIZERS[name].config.model_validate({})
    assert isinstance(optimizer, OptimizerConfig)

    def resolved(**settings: Any) -> int | None:
        return resolve_engine_for(
            EngineConfig(**settings), optimizer, ranks=2, data_ranks=2, native="fp32"
        ).zero_stage

    with pytest.raises(ConfigError, match=f"optimizer.name={name} .* {divided} "):
        resolved(**engine)
    assert resolved(name="plain") is None and resolved(name="deepspeed", ds_config="zero0") == 0


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


@pytest.mark.long
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
