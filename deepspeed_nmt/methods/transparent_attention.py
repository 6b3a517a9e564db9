"""Transparent attention: each decoder layer attends to its own mixture of all encoder layers.

Bapna, Chen, Firat, Cao, Wu: "Training Deeper Neural Machine Translation Models with Transparent Attention", 2018. It
is a baseline of "Depth Growing for Neural Machine Translation" (Wu et al., 2019), table 1.

With h_0 the embedded source (scaled, with positions and dropout) and h_1 .. h_N the states of the N encoder layers,
the cross-attention of decoder layer j of M reads keys and values from

    z_j = sum_i s_ij h_i,    s_ij = exp(W_ij) / sum_k exp(W_kj),

where W is a learned (N + 1) x M matrix, to which dropout is applied in training. So the gradient of the loss reaches
each encoder layer directly, which makes deep encoders (N = 16) trainable. The rest is a Transformer.

W begins with zeros, and its dropout precedes the softmax, both as in Lingvo, the framework of the authors. With a
pre-norm encoder every h_i, the embeddings included, passes through the stack's final LayerNorm before it is mixed.
The mixtures have weights for the whole encoder and the whole decoder only, so the top is the only exit.

Legend: B sentences, S source length, D model width, N encoder layers, M decoder layers, T target length, R rows = B x
beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import Exits, Memory
from deepspeed_nmt.core.parts import Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.segments import Segments, mask_between
from deepspeed_nmt.methods.transformer import SMALL, Transformer, TransformerShape, build_transformer
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.layers import Context, Dropout, MakeDecoderLayer, make_decoder_layer
from deepspeed_nmt.registry import Entry, SelfTest


class TransparentAttentionConfig(TransformerShape):
    """Settings of a Transformer with transparent attention."""

    name: Literal["transparent_attention"] = "transparent_attention"
    mixture_dropout: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="dropout of the logits by which encoder layers are mixed (W)"
    )

    learning_fields: ClassVar[frozenset[str]] = TransformerShape.learning_fields | {"mixture_dropout"}

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """Return None, because the mixtures have weights for whole stacks only."""
        return None


class Mixtures(nn.Module):
    """Learned convex combinations of the encoder's ``states`` = N + 1 states, M ``mixtures`` of them."""

    def __init__(self, states: int, mixtures: int, dropout_p: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(states, mixtures))
        self.dropout = Dropout(dropout_p)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """Mix states. Shape: N + 1 of (B,S,D) -> (B,M,S,D)."""
        weights = torch.softmax(self.dropout(self.logits).float(), dim=0).to(states[0].dtype)
        return torch.einsum("nm,nbsd->bmsd", weights, torch.stack(list(states)))


class MixtureLayer(nn.Module):
    """Decoder layer that attends to its own mixture, by its number from 0."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer = layer
        self.number = number

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode; the memory of the context has all mixtures, (B,M,S,D).

        Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)
        """
        assert context.memory_BSD is not None
        own = replace(context, memory_BSD=context.memory_BSD[:, self.number])
        states_BTD: Tensor = self.layer(x_BTD, own, cache)
        return states_BTD


class TransparentTransformer(Transformer):
    """Transformer whose decoder layers attend to mixtures. Built by :func:`build_transparent_attention`.

    Its :class:`Memory` has a mixture for each decoder layer: states of (B,M,S,D).
    """

    not_standard = "its decoder layers attend to different mixtures of the encoder's layers"
    has_exits = False

    def __init__(self, transformer: Transformer, dropout_p: float) -> None:
        encoder, decoder = transformer.encoder, transformer.decoder
        decoder.layers = nn.ModuleList(MixtureLayer(layer, number) for number, layer in enumerate(decoder.layers))
        embeddings = transformer.source_embedding, transformer.target_embedding
        super().__init__(*embeddings, encoder, decoder, transformer.projection, transformer.pad)
        self.mixtures = Mixtures(encoder.applications + 1, decoder.applications, dropout_p)

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded) if segments is None else segments
        embedded_BSD = self.source_embedding(source_BS, segments=segments)
        context = Context(mask=mask_between(segments, mask))
        layers = self.encoder(embedded_BSD, context, exits=range(1, self.encoder.stages + 1))
        norm = self.encoder.final_norm
        return Memory(self.mixtures([embedded_BSD if norm is None else norm(embedded_BSD), *layers]), mask)


def build_transparent_attention(
    config: TransparentAttentionConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer = make_decoder_layer
) -> TransparentTransformer:
    """Build a freshly initialised Transformer with transparent attention."""
    return TransparentTransformer(build_transformer(config, vocabulary, make_layer), config.mixture_dropout)


ENTRY = Entry(
    "transparent_attention",
    TransparentAttentionConfig,
    build_transparent_attention,
    SelfTest(
        "transparent",
        {
            "model": {"name": "transparent_attention", **SMALL, "decoder_norm": "post", "mixture_dropout": 0.0},
            "objective": {"guided_alignment": {"weight": 0.5}},
        },
    ),
)
