"""Layer-wise coordination: decoder layer i attends to itself and to encoder layer i at once, with the same weights.

He, Tan, Xia, He, Qin, Chen, Liu: "Layer-Wise Coordination between Encoder and Decoder for Neural Machine
Translation", 2018. It is a baseline of "Recurrent multiple shared layers in Depth for Neural Machine Translation" (Li
and Li, 2021), table 1.

Each layer serves both sides. With A_i and F_i its attention and feed-forward network, each within its residual
connection, h_i the states of the source and s_i those of the target,

    h_i = F_i(A_i(h_{i-1}, h_{i-1}))
    s_i = F_i(A_i(s_{i-1}, [h_i; s_{i-1}])),

where A(q, m) has queries of q, and keys and values of m. Position t of the target sees the whole source and the
target up to t by one softmax, the *mixed attention*. With pre-norm, h_i passes the LayerNorm of A_i, as s_{i-1} does.

Encoder and decoder have equally many layers. 14 layers have about as many parameters as 6 and 6 of a Transformer.
Memory and time of decoding are those of a Transformer, whose keys and values of the source are kept by layer, too.

Legend: B sentences, S source length, T target length, D model width, N layers, H heads, K head width, R rows = B x W,
W hypotheses of a sentence, P cached positions.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.model import Exits, Memory
from deepspeed_nmt.core.parts import Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods.transformer import (
    SMALL,
    Transformer,
    TransformerShape,
    build_embeddings,
    initialise_layers,
    layer_parts,
)
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.layers import Context, EncoderLayer, LayerNorm, LayerParts
from deepspeed_nmt.nn.linear import Product
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest


class CoordinationConfig(TransformerShape):
    """Settings of layer-wise coordination."""

    name: Literal["coordination"] = "coordination"

    packed: ClassVar[bool] = False
    known_norms: ClassVar[frozenset[str]] = frozenset({"pre", "post"})
    """DeepNorm's constants differ between the sides."""

    @model_validator(mode="after")
    def _check_depths(self) -> CoordinationConfig:
        if self.encoder_layers != self.decoder_layers:
            raise ValueError(
                f"encoder_layers is {self.encoder_layers} and decoder_layers {self.decoder_layers}, but each layer "
                "serves both sides; make them equal"
            )
        if self.decoder_norm not in (None, self.norm):
            raise ValueError(
                f"decoder_norm is {self.decoder_norm} and norm {self.norm}, but each layer serves both sides; remove "
                "decoder_norm"
            )
        return self

    @override
    def custom_layers(self) -> tuple[str, int] | None:
        return None

    @override
    def exit_stages(self) -> tuple[Stages, Stages] | None:
        return None


class CoordinatedLayer(EncoderLayer):
    """Layer ``number``, from 0, of both sides; the decoder's context has the states of all layers of the encoder."""

    def __init__(self, parts: LayerParts, number: int) -> None:
        super().__init__(parts)
        self.number = number

    @override
    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Encode, or decode if the context has a memory. Shape: (B,T,D) -> (B,T,D), with a cache (R,1,D)."""
        if context.memory_BSD is None:
            return super().forward(x_BSD, context)
        x_BSD = self.self_residual(x_BSD, lambda h: self._mixed(h, context, cache))
        x_BSD = self.feed_forward_residual(x_BSD, self.feed_forward)
        return x_BSD

    def _mixed(self, h_BTD: Tensor, context: Context, cache: LayerCache | None) -> Product:
        """Attend to the source and to the target up to each position."""
        attention = self.self_attention
        own, mask = attention.project(h_BTD), None
        assert not isinstance(context.mask, tuple)
        if cache is None:
            source, length = self._source(context), h_BTD.shape[1]
            mask = torch.ones(length, length, dtype=torch.bool, device=h_BTD.device).tril()[None, None]
        else:
            source = cache.source.of(lambda _: self._source(context), context.memory_BSD)
            own, mask = cache.append(own)
        keys, values = (torch.cat(pair, dim=2) for pair in ((source.keys, own.keys), (source.values, own.values)))
        if mask is not None or context.mask is not None:
            sentences = source.keys.shape[0]
            shape = (sentences, 1, h_BTD.shape[0] // sentences * h_BTD.shape[1])
            seen = h_BTD.new_ones(1, 1, 1, 1, dtype=torch.bool)
            parts = (context.mask, source.keys.shape[2]), (mask, own.keys.shape[2])
            mask = torch.cat([(seen if part is None else part).expand(*shape, size) for part, size in parts], dim=3)
        product: Product = attention(h_BTD, KeysValues(keys, values), mask)
        return product

    def _source(self, context: Context) -> KeysValues:
        """Project the states of the encoder's layer of the same number. Shape: -> two of (B,H,S,K)."""
        assert context.memory_BSD is not None
        states_BSD = context.memory_BSD[:, self.number]
        around = self.self_residual
        return self.self_attention.project(around.norm(states_BSD) if around.style == "pre" else states_BSD)


class CoordinatedTransformer(Transformer):
    """Transformer of layers that both sides share. Its :class:`Memory` has the states of each, (B,N,S,D)."""

    not_standard = "its decoder layers attend to the source and to the target by one softmax"
    has_exits = False

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded)
        exits = range(1, self.encoder.stages + 1)
        states = self.encoder(self.source_embedding(source_BS), Context(mask=mask), exits=exits)
        return Memory(torch.stack(states, dim=1), mask)


def build_coordination(config: CoordinationConfig, vocabulary: Vocabulary) -> CoordinatedTransformer:
    """Build a freshly initialised model."""
    source, target, projection = build_embeddings(config, vocabulary)
    layers = [CoordinatedLayer(layer_parts(config, "encoder"), number) for number in range(config.encoder_layers)]
    initialise_layers(layers, config, "encoder")
    norm = LayerNorm(config.dim) if config.norm == "pre" else None
    stacks = LayerStack(layers), LayerStack(layers, final_norm=norm)
    return CoordinatedTransformer(source, target, *stacks, projection, vocabulary.pad)


ENTRY = Entry(
    "coordination",
    CoordinationConfig,
    lambda config, vocabulary, make_layer: build_coordination(config, vocabulary),
    SelfTest("coordination", {"model": {"name": "coordination", **SMALL, "encoder_layers": 3, "decoder_layers": 3}}),
)
