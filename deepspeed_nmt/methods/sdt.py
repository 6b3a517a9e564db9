"""SDT, shallow-to-deep training: an encoder grows by copies of its top layers, with links between its stacks.

Li, Wang, Liu, Jiang, Du, Xiao, Wang, Zhu: "Shallow-to-Deep Training for Neural Machine Translation", 2020.

**Sparse connections.** The N layers of the encoder are stacks of h layers each. The first layer of a stack reads a
learned sum of what all stacks below computed, as in DLCL (Wang et al. 2019), the other layers read the state below.
With y_0 the embedded source and y_s the state after s stacks,

    x_s = sum_k W_sk LN_k(y_k),   k = 0 .. s,   y_{s+1} = stack_{s+1}(x_s),   y_0 without LayerNorm.

Each decoder layer reads the sum over all layers below, as in the authors' architectures.

**Growing.** Stage 1 trains the lowest stack. A deeper encoder begins with the weights of the shallower one
(`--init-from`); each layer that this lacks begins as the layer h below, a stack's LayerNorm as that of the stack
below, and new sums begin as means. The optimizer begins anew, and the learning rate where its warm-up ended
(``schedule.skipped_updates``); or both go on, in one run (``growth``).

Legend: N encoder layers, h layers of a stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import override

from deepspeed_nmt.core.parts import MAX_LAYERS, ModelConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError, multiples_around
from deepspeed_nmt.methods.dlcl import CombinedShape, LayerCombination, build_dlcl
from deepspeed_nmt.methods.transformer import SMALL, Transformer
from deepspeed_nmt.nn.layers import MakeDecoderLayer, make_decoder_layer
from deepspeed_nmt.registry import Entry, SelfTest

_COPIED = re.compile(r"encoder\.(layers|links\.norms)\.(\d+)\.")


class SDTConfig(CombinedShape):
    """Settings of a Transformer whose encoder grows by stacks of layers."""

    name: Literal["sdt"] = "sdt"
    stack_layers: int = Field(
        default=6, ge=1, le=MAX_LAYERS, description="layers of a stack of the encoder (h); divides encoder_layers"
    )

    @model_validator(mode="after")
    def _check_stacks(self) -> SDTConfig:
        h, n = self.stack_layers, self.encoder_layers
        if n % h:
            raise ValueError(
                f"encoder_layers is {n}, no multiple of stack_layers {h}; use encoder_layers={multiples_around(n, h)}"
            )
        return self

    @override
    def check_shape_of(self, other: ModelConfig, where: str, keys: Iterable[str] | None = None) -> None:
        super().check_shape_of(other, where, self.shape_fields | {"stack_layers", "name"} if keys is None else keys)
        if isinstance(other, SDTConfig) and other.encoder_layers > self.encoder_layers:
            raise ConfigError(
                f"model.encoder_layers is {self.encoder_layers}, less than the {other.encoder_layers} of {where}; "
                "an encoder only grows"
            )

    @override
    def begins_as(self, name: str, other: ModelConfig) -> str | None:
        match = _COPIED.match(name)
        if match is None or not isinstance(other, SDTConfig):
            return None
        period = self.stack_layers if match[1] == "layers" else 1
        known = other.encoder_layers // (1 if match[1] == "layers" else other.stack_layers)
        number = int(match[2])
        if number < known:
            return None
        return f"encoder.{match[1]}.{known - period + (number - known) % period}.{name[match.end() :]}"


def build_sdt(
    config: SDTConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer = make_decoder_layer
) -> Transformer:
    """Build a freshly initialised Transformer with sparse connections between the stacks of its encoder."""
    model = build_dlcl(config, vocabulary, make_layer)
    stacks = range(0, config.encoder_layers + 1, config.stack_layers)
    model.encoder.links = LayerCombination(config.dim, stacks, config.norms()[0] == "pre")
    return model


ENTRY = Entry(
    "sdt",
    SDTConfig,
    build_sdt,
    SelfTest("sdt", {"model": {"name": "sdt", **SMALL, "encoder_layers": 4, "stack_layers": 2}}),
)
