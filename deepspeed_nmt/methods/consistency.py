"""Two passes that should predict the same: R-Drop (Liang et al. 2021) and its decoder-only form, DDR.

The deep-decoder paper, section 3.4 (papers/deep-decoder), "decoder dropout regularisation". Both passes see the same
pair, with different dropout masks and different cross-attention coins. Per target token,

    L = 1/2 [NLL_1 + NLL_2] + lambda * 1/2 [KL(P_1 || P_2) + KL(P_2 || P_1)].

- DDR encodes once and decodes twice.
- R-Drop encodes and decodes twice.

The paper does not state its lambda: 1.0 here, where R-Drop's authors often take 5.0. Gradients flow through both
arguments of both divergences, as in R-Drop. The divergence is formed together with the cross-entropy, chunk by chunk
(:func:`deepspeed_nmt.kernels.cross_entropy.projected_cross_entropy`); no full distributions are held.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from deepspeed_nmt.core.parts import Parts, RegularizerConfig
from deepspeed_nmt.core.passes import Passes
from deepspeed_nmt.core.vocabulary import Vocabulary


class ConsistencyConfig(RegularizerConfig):
    """Settings of DDR and R-Drop."""

    weight: float = Field(default=1.0, ge=0.0, description="factor of the divergence in the loss (lambda); 0: off")
    every: int = Field(default=1, ge=1, description="k: applied in every k-th update")

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse DDR and R-Drop together: one paired pass cannot have one encoding and two."""
        names = [name for name, part in parts.active_regularizers().items() if isinstance(part, ConsistencyConfig)]
        if len(names) > 1 and parts.objective[names[0]] is self:
            yield (
                f"objective.{names[0]} and objective.{names[1]} both run every pair twice, with one encoding and "
                "with two; set one of them to null"
            )


class Consistency:
    """Asks for a second pass over the same pairs.

    Args:
        encode_twice: R-Drop; otherwise DDR.
    """

    def __init__(self, config: ConsistencyConfig, encode_twice: bool) -> None:
        self.name = "r_drop" if encode_twice else "ddr"
        self.weight = config.weight
        self.every = config.every
        self._encode_twice = encode_twice

    def request_passes(self, passes: Passes) -> None:
        """The likelihood compares the first pass with the paired one; nothing else is added."""
        source = passes.add_source(passes.batch.source_BS) if self._encode_twice else 0
        passes.paired_pass = passes.add_pass(source)
        passes.divergence = self.weight


def build_ddr(config: ConsistencyConfig, vocabulary: Vocabulary) -> Consistency:
    """Decoder dropout regularisation."""
    return Consistency(config, encode_twice=False)


def build_r_drop(config: ConsistencyConfig, vocabulary: Vocabulary) -> Consistency:
    """R-Drop."""
    return Consistency(config, encode_twice=True)
