"""Optimizers by name, one file each."""

from __future__ import annotations

import torch

from deepspeed_nmt.registry import Entry, Registry
from deepspeed_nmt.train.optimizers.adafactor import AdafactorConfig
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig
from deepspeed_nmt.train.optimizers.muon import MuonConfig

OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry(
    "optimizer",
    [
        Entry("adam", AdamConfig, AdamConfig.over),
        Entry("adamw", AdamWConfig, AdamWConfig.over),
        Entry("muon", MuonConfig, MuonConfig.over),
        Entry("adafactor", AdafactorConfig, AdafactorConfig.over),
    ],
)
"""Optimizers. Engine, checkpoints and planner know only what OptimizerConfig declares of them."""
