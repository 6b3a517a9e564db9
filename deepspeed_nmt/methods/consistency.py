"""Consistency of two passes over the same pair: R-Drop, and DDR, decoder dropout regularisation.

- DDR encodes once and decodes twice. Li, Wang, Utiyama, Sumita, Zhao, Watanabe: "What Works and Doesn't Work, A Deep
  Decoder for Neural Machine Translation", Findings of ACL 2022, section 3.4.
- R-Drop encodes twice and decodes twice. Liang, Wu, Li, Wang, Meng, Qin, Chen, Zhang, Liu: "R-Drop: Regularized
  Dropout for Neural Networks", 2021.

The passes have different dropout masks and different coins of cross-attention drop. Per target token,

    L = 1/2 [NLL_1 + NLL_2] + lambda * 1/2 [KL(P_1 || P_2) + KL(P_2 || P_1)].

Gradients flow through both arguments of both divergences. The likelihood computes the divergence with the
cross-entropy. R-Drop's authors sum the two NLLs, so their alpha = 5 is lambda = 2.5 here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from deepspeed_nmt.core.objective import Passes, Regularizer
from deepspeed_nmt.core.parts import Parts, RegularizerConfig
from deepspeed_nmt.registry import Entry


class ConsistencyConfig(RegularizerConfig):
    """Settings of DDR and R-Drop."""

    pairs: ClassVar[bool] = True

    weight: float = Field(
        default=1.0,
        ge=0.0,
        description="factor of the divergence in the loss (lambda), half of R-Drop's alpha; 0 disables it",
    )
    every: int = Field(default=1, ge=1, description="k: apply it in every k-th update")

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse DDR together with R-Drop, because there is one paired pass."""
        names = [name for name, part in parts.active_regularizers().items() if part.pairs]
        if len(names) > 1 and parts.objective[names[0]] is self:
            yield (
                f"objective.{names[0]} and objective.{names[1]} both run every pair twice, with one encoding and "
                "with two; set one of them to null"
            )


class Consistency(Regularizer):
    """Divergence between two passes over the same pairs: R-Drop if the source is encoded twice, otherwise DDR."""

    def __init__(self, config: ConsistencyConfig, encode_twice: bool) -> None:
        self.name = "r_drop" if encode_twice else "ddr"
        self.weight = config.weight
        self.every = config.every
        self._encode_twice = encode_twice

    def request_passes(self, passes: Passes) -> None:
        """Request a paired pass, which the likelihood compares with pass 0."""
        source = passes.add_source(passes.batch.source_BS) if self._encode_twice else 0
        passes.paired_pass = passes.add_pass(source)
        passes.divergence = self.weight


DDR = Entry(
    "ddr",
    ConsistencyConfig,
    lambda config, vocabulary: Consistency(config, encode_twice=False),
    collapse_remedy="objective.ddr.weight=1",
)
R_DROP = Entry("r_drop", ConsistencyConfig, lambda config, vocabulary: Consistency(config, encode_twice=True))
