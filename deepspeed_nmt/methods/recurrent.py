"""Recurrent stacks: layers that are applied several times, in the same or in alternating direction.

Li, Li: "Recurrent multiple shared layers in Depth for Neural Machine Translation", 2021.

**Stacked sharing (eq. 7).** A block of N layers is applied T times. With x the embedded source or target, the input
of application t is

    B_0 = x,    B_t = block(B_{t-1}) + x.

**Closed parameter chain (eq. 8 and 9).** The N layers are applied in ascending and descending order alternately,

    W_0 W_1 .. W_{N-1} | W_{N-2} .. W_0 | W_1 .. W_{N-1} | ...,

T times in all. The last layer of a loop is not repeated at the start of the next one, where x is added to the state.
With N = 4 and T = 2 there are seven applications.

With ``repeat_input=false`` x is not added again, B_t = block(B_{t-1}), as in Dehghani, Gouws, Vinyals, Uszkoreit,
Kaiser: "Universal Transformers", 2018. Such a stack is an ordinary one whose layers repeat.

With ``loop_rank`` R > 0 the state S_t after loop t, to which x is not added yet, becomes

    S_t + U_t V_t S_t,    so that in stacked sharing    B_t = (1 + U_t V_t) block(B_{t-1}) + x,

with a U_t (D,R), zero at first, and a V_t (R,D) of its own, so loops may differ a little. An exit there reads it
without x. It is an idea of Bae, Fisch, Harutyunyan, Ji, Kim, Schuster: "Relaxed Recursive Transformers: Effective
Parameter Sharing with Layer-wise LoRA", 2024, who let the matrices within the layers differ; here it is the state
between the loops.

Encoder and decoder have a T each; T = 1 is an ordinary stack. Parameters exist once. In decoding each application has
a cache of its own for the target; the source's keys and values are equal in all applications of a layer, and are
projected and kept once. An exit is a number of loops. DeepNorm's constants, and the start
of LayerScale's weights, count applications.

Deviations are in docs/papers/recurrent-layers.md.

Legend: D model width, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.parts import MAX_LAYERS, MAX_WIDTH, ModelConfig, Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.methods.stabilisers import PLAIN
from deepspeed_nmt.methods.transformer import SMALL, Transformer, TransformerShape, build_transformer
from deepspeed_nmt.nn.layers import LowRank, MakeDecoderLayer, make_decoder_layer
from deepspeed_nmt.nn.stack import LayerOrder, Links
from deepspeed_nmt.registry import Entry, SelfTest

Sharing = Literal["stacked", "closed_chain"]


class RecurrentConfig(TransformerShape):
    """Settings of a Transformer with recurrent stacks. The numbers of layers do not count repetitions."""

    name: Literal["recurrent"] = "recurrent"
    sharing: Sharing = Field(
        default="stacked",
        description="stacked: each loop starts at the lowest layer; closed_chain: loops go up and down in turn",
    )
    encoder_loops: int = Field(
        default=5, ge=1, le=MAX_LAYERS, description="loops over the layers of the encoder (T); 1: no recurrence"
    )
    decoder_loops: int = Field(
        default=2, ge=1, le=MAX_LAYERS, description="loops over the layers of the decoder (T); 1: no recurrence"
    )
    repeat_input: bool = Field(
        default=True,
        description="true: add the embedded tokens to the state before each further loop; false: do not, which other "
        "programs can express (export)",
    )

    loop_rank: int = Field(
        default=0,
        ge=0,
        le=MAX_WIDTH,
        description="rank of a map of each loop's own that the state passes after it; 0: there are none",
    )

    depth_fields: ClassVar[frozenset[str]] = TransformerShape.depth_fields | {"loop_rank"}
    # A layer that is applied several times has no single number (layernorm_scaling), and no single input (admin).
    known_norms: ClassVar[frozenset[str]] = frozenset({*PLAIN, "b2t", "peri", "layer_scale"})

    @model_validator(mode="after")
    def _check_loops(self) -> RecurrentConfig:
        if self.loop_rank > self.dim:
            raise ValueError(f"loop_rank is {self.loop_rank:,}, more than dim={self.dim:,}; lower it")
        for side, layers, loops in (
            ("encoder", self.encoder_layers, self.encoder_loops),
            ("decoder", self.decoder_layers, self.decoder_loops),
        ):
            if layers * loops > MAX_LAYERS:
                raise ValueError(
                    f"{side}_layers x {side}_loops is {layers:,} x {loops:,}, more than {MAX_LAYERS:,}; lower one"
                )
            if self.sharing == "closed_chain" and loops > 1 and layers < 2:
                raise ValueError(
                    f"sharing=closed_chain needs 2 layers or more, but {side}_layers is 1 and "
                    f"{side}_loops is {loops}; use more layers, or sharing=stacked"
                )
        return self

    def applications(self) -> tuple[int, int]:
        """Return the numbers of layer applications, each of which adds to the state, of encoder and decoder."""
        encoder, decoder = self.layer_orders()
        return len(encoder.indices), len(decoder.indices)

    def layer_orders(self) -> tuple[LayerOrder, LayerOrder]:
        """Return the orders in which encoder and decoder apply their layers."""
        return (
            layer_order(self.sharing, self.encoder_layers, self.encoder_loops, self.repeat_input),
            layer_order(self.sharing, self.decoder_layers, self.decoder_loops, self.repeat_input),
        )

    @override
    def begins_as(self, name: str, other: ModelConfig) -> str | None:
        return "" if ".links." in name else None  # maps that change nothing

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """Return the loops of encoder and decoder as stages."""
        return (
            Stages("encoder_loops", self.encoder_loops, self.encoder_layers, shared=True),
            Stages("decoder_loops", self.decoder_loops, self.decoder_layers, shared=True),
        )


def layer_order(sharing: Sharing, layers: int, loops: int, repeat_input: bool = True) -> LayerOrder:
    """Return the order in which a recurrent stack applies its N layers in T loops, each of which ends at an exit."""
    ascending = list(range(layers))
    order, stages, inputs_at = list(ascending), [layers], set()
    for _ in range(1, loops):
        if repeat_input:
            inputs_at.add(len(order))
        if sharing == "stacked":
            order += ascending
        else:
            # Continue next to the layer that was applied last.
            order += range(layers - 2, -1, -1) if order[-1] == layers - 1 else range(1, layers)
        stages.append(len(order))
    return LayerOrder(tuple(order), frozenset(inputs_at), tuple(stages))


class LoopMaps(Links):
    """Maps x + U_t V_t x of the state after each loop t, which ends after ``ends[t - 1]`` applications."""

    def __init__(self, ends: Sequence[int], maps: Iterable[nn.Module]) -> None:
        super().__init__()
        self.ends = tuple(ends)
        self.maps = nn.ModuleList(maps)

    @override
    def until(self, number: int) -> LoopMaps:
        ends = [end for end in self.ends if end <= number]
        return LoopMaps(ends, self.maps[: len(ends)])

    @override
    def changes(self, number: int) -> bool:
        return number in self.ends

    @override
    def read(self, x_BTD: Tensor, number: int, kept: list[Tensor]) -> Tensor:
        if number == 0 and self.training:
            # An update may end before some loops. ZeRO-3 would keep the last gradient of their maps.
            probe_D = x_BTD.new_zeros(x_BTD.shape[2])
            for each in self.maps:
                x_BTD = torch_ops.touch(x_BTD, each(probe_D))
        if not self.changes(number):
            return x_BTD
        mapped_BTD: Tensor = self.maps[self.ends.index(number)](x_BTD)
        return mapped_BTD


def build_recurrent(
    config: RecurrentConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer = make_decoder_layer
) -> Transformer:
    """Build a freshly initialised recurrent Transformer."""
    model = build_transformer(config, vocabulary, make_layer, config.layer_orders())
    if config.loop_rank:
        for stack in (model.encoder, model.decoder):
            ends = stack.order.stages
            stack.links = LoopMaps(ends, [LowRank(config.dim, config.loop_rank) for _ in ends])
    return model


ENTRY = Entry(
    "recurrent",
    RecurrentConfig,
    build_recurrent,
    SelfTest(
        "loops",
        {
            "model": {"name": "recurrent", **SMALL, "encoder_loops": 3, "decoder_loops": 3, "loop_rank": 3},
            "objective": {"multi_softmax": {"exits": "1x1", "full_depth": False}},
        },
    ),
)
