"""MSC: each layer of the decoder attends to its own block of the encoder, and all layers to a recurrent context.

Wei, Yu, Hu, Zhang, Weng, Luo: "Multiscale Collaborative Deep Models for Neural Machine Translation", 2020. It is a
baseline of the deep decoder's paper, table 1.

The N layers of the encoder are M blocks, as many as the decoder has layers. Block n reads the block below and a
context C, which a GRU carries from block to block, position by position. With e the embedded source,

    B_0 = C_0 = e,    B_n = block_n(B_{n-1}, C_{n-1}),    C_n = GRU(B_n, C_{n-1}),    n = 1 .. M,
    s_n = layer_n(s_{n-1}, B_n, C_n).

Layers of the encoder attend to their input, then to C_{n-1}; layer n of the decoder to the target, then to B_n, then
to C_n. A feed-forward network follows. Each has a residual connection. With pre-norm, decoder and GRU read B_n
through a LayerNorm of its own.

The authors' repository has no code, and how their layers read the context could not be looked up. Attention by
matrices of its own in each layer, with one GRU for all blocks, has 272.7M and 510.4M parameters if source and target
have an embedding each, V=37,000; printed are 272M (BASE 48-6) and 512M (BIG 18-6).

Legend: B sentences, S source length, T target length, D model width, M blocks, H heads, K head width, R rows = B x
beam.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from typing_extensions import Self, override

from deepspeed_nmt.core.model import Exits, Memory
from deepspeed_nmt.core.parts import ModelConfig, Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import multiples_around
from deepspeed_nmt.kernels.segments import Segments, mask_between
from deepspeed_nmt.methods.transformer import (
    SMALL,
    Transformer,
    TransformerShape,
    build_embeddings,
    initialise_layers,
    layer_parts,
)
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.layers import Context, DecoderLayer, EncoderLayer, LayerNorm, LayerParts, Residual
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest


class MSCConfig(TransformerShape):
    """Settings of a multiscale collaborative model."""

    name: Literal["msc"] = "msc"

    known_norms: ClassVar[frozenset[str]] = frozenset({"pre", "post"})
    """DeepNorm's constants are for layers that read no context."""

    @model_validator(mode="after")
    def _check_blocks(self) -> MSCConfig:
        n, m = self.encoder_layers, self.decoder_layers
        if n % m:
            raise ValueError(
                f"encoder_layers is {n}, but the decoder's {m} layers attend to as many blocks of equal size; "
                f"use encoder_layers={multiples_around(n, m)}"
            )
        return self

    @property
    def block_layers(self) -> int:
        """Number of layers of a block."""
        return self.encoder_layers // self.decoder_layers

    @override
    def custom_layers(self) -> tuple[str, int] | None:
        return None

    @override
    def composition_differences(self, other: ModelConfig) -> list[str]:
        differences = super().composition_differences(other)
        if isinstance(other, MSCConfig) and other.block_layers != self.block_layers:
            # Layers of the other run move to other blocks, so they read and feed other contexts.
            differences.append(f"blocks have {other.block_layers} encoder layers there and {self.block_layers} here")
        return differences

    @override
    def exit_stages(self) -> tuple[Stages, Stages] | None:
        return None


class ContextEncoderLayer(EncoderLayer):
    """Layer of the encoder that attends to the context, which is the memory of its :class:`Context`."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__(parts)
        self.context_attention, self.context_residual = parts.attention(), parts.residual()

    @override
    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        memory_BSD, mask = context.memory_BSD, context.mask
        assert memory_BSD is not None
        x_BSD = self.self_residual(x_BSD, lambda h: self.self_attention(h, h, mask))
        x_BSD = self.context_residual(x_BSD, lambda h: self.context_attention(h, memory_BSD, mask))
        x_BSD = self.feed_forward_residual(x_BSD, self.feed_forward)
        return x_BSD


class ContextDecoderLayer(DecoderLayer):
    """Layer ``number``, from 0, of the decoder; the memory of its :class:`Context` has all blocks and contexts."""

    context_attention: MultiHeadAttention
    context_residual: Residual
    number: int

    @classmethod
    @override
    def of(cls, parts: LayerParts, crosses: bool = True) -> Self:
        layer = super().of(parts, crosses)
        layer.context_attention, layer.context_residual = parts.attention(), parts.residual()
        return layer

    @override
    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        both = self.project_source(context) if cache is None else cache.source.of(self._project, context.memory_BSD)
        block, carried = (
            KeysValues(*pair) for pair in zip(both.keys.chunk(2, dim=1), both.values.chunk(2, dim=1), strict=True)
        )
        x_BTD = self.self_residual(x_BTD, lambda h: self.self_attention(h, h, context.target_mask, True, cache))
        x_BTD = self.cross(x_BTD, replace(context, source=block), None)
        x_BTD = self.context_residual(x_BTD, lambda h: self.context_attention(h, carried, context.mask))
        x_BTD = self.feed_forward_residual(x_BTD, self.feed_forward)
        return x_BTD

    @override
    def project_source(self, context: Context) -> KeysValues:
        assert context.memory_BSD is not None
        return self._project(context.memory_BSD)

    def _project(self, memory_BMSD: Tensor) -> KeysValues:
        """Project the layer's block and context, the heads of one after those of the other. Shape: -> (B,2H,S,K)."""
        assert self.cross_attention is not None
        block_BSD, context_BSD = memory_BMSD[:, self.number].chunk(2, dim=2)
        block, carried = self.cross_attention.project(block_BSD), self.context_attention.project(context_BSD)
        return KeysValues(torch.cat([block.keys, carried.keys], 1), torch.cat([block.values, carried.values], 1))


class ContextCell(nn.Module):
    """The GRU (Cho et al. 2014) that carries the context from block to block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(dim, dim)

    def forward(self, block_BSD: Tensor, context_BSD: Tensor) -> Tensor:
        """Compute the next context. Shape: (B,S,D), (B,S,D) -> (B,S,D)."""
        states: Tensor = self.cell(block_BSD.flatten(0, 1), context_BSD.flatten(0, 1))
        return states.view_as(block_BSD)


class MultiscaleTransformer(Transformer):
    """Transformer of encoder blocks. Its :class:`Memory` has each block beside its context, (B,M,S,2D)."""

    not_standard = "its decoder layers attend to different blocks of the encoder, and to a context"
    has_exits = False

    def __init__(self, config: MSCConfig, vocabulary: Vocabulary) -> None:
        source, target, projection = build_embeddings(config, vocabulary)
        n, m = config.encoder_layers, config.decoder_layers
        encoder = [ContextEncoderLayer(layer_parts(config, "encoder")) for _ in range(n)]
        decoder = [ContextDecoderLayer.of(layer_parts(config, "decoder")) for _ in range(m)]
        for number, layer in enumerate(decoder):
            layer.number = number
        initialise_layers(encoder, config, "encoder")
        initialise_layers(decoder, config, "decoder")
        reads, top = (norm == "pre" for norm in config.norms())
        stacks = LayerStack(encoder), LayerStack(decoder, final_norm=LayerNorm(config.dim) if top else None)
        super().__init__(source, target, *stacks, projection, vocabulary.pad)
        self.block_norms = nn.ModuleList(LayerNorm(config.dim) if reads else nn.Identity() for _ in range(m))
        self.context_cell = ContextCell(config.dim)

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded) if segments is None else segments
        below_BSD = context_BSD = self.source_embedding(source_BS, segments=segments)
        shared, found = Context(mask=mask_between(segments, mask)), []
        size = self.encoder.applications // len(self.block_norms)
        for end, norm in enumerate(self.block_norms, 1):
            of_block = replace(shared, memory_BSD=context_BSD)
            (below_BSD,) = self.encoder(below_BSD, of_block, exits=(size * end,), first=size * (end - 1))
            block_BSD = norm(below_BSD)
            context_BSD = self.context_cell(block_BSD, context_BSD)
            found.append(torch.cat([block_BSD, context_BSD], dim=2))
        return Memory(torch.stack(found, dim=1), mask)


ENTRY = Entry(
    "msc",
    MSCConfig,
    lambda config, vocabulary, make_layer: MultiscaleTransformer(config, vocabulary),
    SelfTest("msc", {"model": {"name": "msc", **SMALL, "encoder_layers": 4, "decoder_layers": 2}}),
)
