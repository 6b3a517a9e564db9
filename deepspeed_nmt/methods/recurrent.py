"""Recurrent stacks of shared layers, and the closed parameter chain (papers/recurrent-shared-layers).

**Stacked sharing (eq. 7).** A block of N layers runs T times; with x the embedded source or target,

    B_0 = x,    B_t = (output of block t-1) + x.

**Closed parameter chain (eq. 8, 9).** The N layers are walked there and back,

    W0 W1 .. W(N-1) | W(N-2) .. W0 | W1 .. W(N-1) | ...,

the layer at each turn applied once, and x is added to the state at each turn. With N = 4 and T = 2 that is seven
applications.

T is set for encoder and decoder separately; 1 means no recurrence. Each application has its own cache in decoding.
Parameters exist once. An exit is a number of loops. (Eq. 9 prints dS6/dW2 as a product; its sum is what the chain
gives. The paper's conclusion and Table 3 name parts of another paper; they are left out.)
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from deepspeed_nmt.core.parts import Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.transformer import Transformer, TransformerShape, build_transformer
from deepspeed_nmt.nn.layers import MakeDecoderLayer, make_decoder_layer
from deepspeed_nmt.nn.stack import LayerOrder

Sharing = Literal["stacked", "closed_chain"]


class RecurrentConfig(TransformerShape):
    """A Transformer whose stacks run several times over their layers. Layers are counted once each."""

    name: Literal["recurrent"] = "recurrent"
    sharing: Sharing = Field(
        default="stacked",
        description="stacked: each loop starts at the lowest layer; closed_chain: loops go up and down in turn",
    )
    encoder_loops: int = Field(default=5, ge=1, description="loops over the encoder's layers (T); 1: no recurrence")
    decoder_loops: int = Field(default=2, ge=1, description="loops over the decoder's layers (T); 1: no recurrence")

    @model_validator(mode="after")
    def _turns(self) -> RecurrentConfig:
        if self.sharing == "closed_chain":
            for side, layers, loops in (
                ("encoder", self.encoder_layers, self.encoder_loops),
                ("decoder", self.decoder_layers, self.decoder_loops),
            ):
                if loops > 1 and layers < 2:
                    raise ValueError(
                        f"sharing=closed_chain needs 2 layers to go back and forth on, but {side}_layers is 1 and "
                        f"{side}_loops is {loops}; use more layers, or sharing=stacked"
                    )
        return self

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """A stage is a loop."""
        return (
            Stages("encoder_loops", self.encoder_loops, self.encoder_layers),
            Stages("decoder_loops", self.decoder_loops, self.decoder_layers),
        )


def layer_order(sharing: Sharing, layers: int, loops: int) -> LayerOrder:
    """The order in which N layers are applied in T loops; each loop ends at an exit."""
    there = list(range(layers))
    order, stages, inputs_at = list(there), [layers], set()
    for _ in range(1, loops):
        inputs_at.add(len(order))
        if sharing == "stacked":
            order += there
        else:
            # The layer at the turn was the last one applied.
            order += range(layers - 2, -1, -1) if order[-1] == layers - 1 else range(1, layers)
        stages.append(len(order))
    return LayerOrder(tuple(order), frozenset(inputs_at), tuple(stages))


def build_recurrent(
    config: RecurrentConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer = make_decoder_layer
) -> Transformer:
    """A freshly initialised recurrent Transformer."""
    orders = (
        layer_order(config.sharing, config.encoder_layers, config.encoder_loops),
        layer_order(config.sharing, config.decoder_layers, config.decoder_loops),
    )
    return build_transformer(config, vocabulary, make_layer, orders)
