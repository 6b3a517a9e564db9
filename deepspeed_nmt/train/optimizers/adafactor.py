"""Adafactor, by torch: second moments of a matrix as those of its rows and columns, and no first moment.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018. In step t, with gradient G
of m rows and n columns, learning rate r, weight decay d and beta = 1 - t^decay,

    R <- beta R + (1 - beta) mean over columns of G^2,      (m,1)
    C <- beta C + (1 - beta) mean over rows of G^2,         (1,n)
    U = G / sqrt(R C / mean R),
    W <- (1 - r d) W - max(1e-3, RMS(W)) min(r, 1/sqrt(t)) U / max(1, RMS(U)).

Vectors keep their whole second moments. The step is relative to the size of a weight, so ``lr`` is not that of Adam:
torch's default is 0.01.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from typing_extensions import override

from deepspeed_nmt.engine.eager import eager
from deepspeed_nmt.engine.optimizer import Groups, OptimizerConfig

_EPS = 1e-18, 1e-3
"""Torch's: least mean R, whose square is the least R C / mean R, and least RMS of a weight.

Torch's own default of the first, the precision of fp32, would bound the moments of usual gradients of large models;
the paper's 1e-30 has no square in fp32.
"""


class AdafactorConfig(OptimizerConfig):
    """Adafactor, by torch."""

    states: ClassVar[tuple[str, ...]] = ("row_var", "col_var", "variance")
    needs_whole: ClassVar[bool] = True

    name: Literal["adafactor"] = "adafactor"
    lr: float = Field(default=1e-2, gt=0.0, description="peak learning rate, relative to the size of a weight")
    decay: float = Field(
        default=-0.8, ge=-1.0, lt=0.0, description="exponent in the decay of the second moments, 1 - t^decay"
    )

    @override
    def state_shapes(self, group: Mapping[str, Any], shape: torch.Size) -> dict[str, torch.Size]:
        if len(shape) < 2:
            return {"variance": shape}
        *outer, rows, columns = shape
        return {"row_var": torch.Size([*outer, rows, 1]), "col_var": torch.Size([*outer, 1, columns])}

    @override
    def build(self, groups: Groups) -> torch.optim.Optimizer:
        return eager(torch.optim.Adafactor)(groups, lr=self.lr, beta2_decay=self.decay, eps=_EPS)
