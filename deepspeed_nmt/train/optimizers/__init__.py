"""Optimizers by name, one file each."""

from __future__ import annotations

import torch

from deepspeed_nmt.registry import Entry, Registry
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig

OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry(
    "optimizer",
    [
        Entry("adam", AdamConfig, AdamConfig.over),
        Entry("adamw", AdamWConfig, AdamWConfig.over),
    ],
)
"""Optimizers. Engine, checkpoints and planner know only what OptimizerConfig declares of them."""
