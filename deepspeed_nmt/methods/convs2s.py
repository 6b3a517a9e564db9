"""Convolutional sequence to sequence learning: convolutions with gated linear units, and attention in every layer.

Gehring, Auli, Grangier, Yarats, Dauphin: "Convolutional Sequence to Sequence Learning", 2017. It is a baseline of
"Recurrent multiple shared layers in Depth for Neural Machine Translation" (Li and Li, 2021), table 1.

**Block (3.2).** With v([A B]) = A * sigmoid(B), a block with a kernel of width k computes

    h^l_i = (v(W^l [h^{l-1}_{i-k/2} .. h^{l-1}_{i+k/2}] + b^l) + h^{l-1}_i) sqrt(1/2),

in the decoder from the k newest positions only. Where the width changes, h^{l-1} is projected for the sum. Linear
maps lead from embeddings to the first block, and from the last block of each side back.

**Attention (3.3).** With z_1 .. z_m the encoder's output, e_j the embedded source, g_i the embedded target, and h_i
the output v(..) of a decoder block before its sum,

    d_i = (W_d h_i + b_d + g_i) sqrt(1/2),       a_ij = softmax_j(d_i . z_j),
    c_i = m sqrt(1/m) sum_j a_ij (z_j + e_j) sqrt(1/2),      h_i <- (W_c c_i + b_c + h_i) sqrt(1/2).

**Scales (3.4, 3.5).** Each sum of two is multiplied by sqrt(1/2), c_i by m sqrt(1/m), and the gradient that reaches
the encoder's blocks by one over the number of attentions. Every layer but the embeddings has normalised weights,
w = g v / |v| (Salimans and Kingma: "Weight Normalization", 2016), that begin as N(0, 4p/n) before a gated linear
unit, else N(0, p/n), for n inputs that dropout keeps with probability p. Embeddings begin as N(0, 0.01).

Positions are learned, up to ``positions`` of them. The scales of the sums inside attention, and where p is 1, are
those of fairseq, the authors' code, which halves the gradient of the encoder's blocks once more. Source, target and
output have a matrix each. A hypothesis keeps the k - 1 newest inputs of each block.

Legend: B sentences, S source length, T target length, D embedding width, C and E widths of blocks, k kernel width,
R rows = B x W, W hypotheses of a sentence, N queries of a sentence.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import Exits, Memory, StackedModel
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, MAX_LAYERS, MAX_WIDTH, ModelConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.choice import UsesKernels
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.nn.cache import DecoderCache, LayerCache
from deepspeed_nmt.nn.embedding import Projection
from deepspeed_nmt.nn.layers import Context, Draw, Dropout
from deepspeed_nmt.nn.linear import UsesPackedWeights
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest

_HALF = math.sqrt(0.5)
_MAX_KERNEL = 1 << 10
Convolutions = tuple[tuple[int, int, int], ...]
"""Groups of equal blocks, each (blocks, width, kernel width)."""
_OF_THE_PAPER: Convolutions = ((10, 512, 3), (3, 768, 3), (2, 2048, 1))


class ConvS2SConfig(ModelConfig):
    """Settings of ConvS2S. The defaults are the paper's for En-De."""

    name: Literal["convs2s"] = "convs2s"
    dim: int = Field(default=512, ge=1, le=MAX_WIDTH, description="width of the embeddings (D)")
    encoder_convolutions: Convolutions = Field(
        default=_OF_THE_PAPER, description="blocks of the encoder: a list of [blocks, width, kernel width]"
    )
    decoder_convolutions: Convolutions = Field(
        default=_OF_THE_PAPER, description="blocks of the decoder: a list of [blocks, width, kernel width]"
    )
    positions: int = Field(default=1024, ge=2, le=MAX_INNER_WIDTH, description="longest sentence, in tokens")
    dropout: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="dropout of embeddings, of the inputs of blocks and of the output"
    )

    sliceable: ClassVar[bool] = False
    learning_fields: ClassVar[frozenset[str]] = frozenset({"dropout"})
    shape_fields: ClassVar[frozenset[str]] = frozenset(
        {"dim", "encoder_convolutions", "decoder_convolutions", "positions"}
    )

    @model_validator(mode="after")
    def _check(self) -> ConvS2SConfig:
        for name in ("encoder_convolutions", "decoder_convolutions"):
            groups: Convolutions = getattr(self, name)
            for blocks, width, kernel in groups:
                if not (blocks >= 1 and 1 <= width <= MAX_INNER_WIDTH and 1 <= kernel <= _MAX_KERNEL):
                    raise ValueError(
                        f"{name} has [{blocks}, {width}, {kernel}]; give blocks from 1, a width from 1 to "
                        f"{MAX_INNER_WIDTH:,}, and a kernel width from 1 to {_MAX_KERNEL:,}"
                    )
                if name == "encoder_convolutions" and kernel % 2 == 0:
                    raise ValueError(
                        f"{name} has the kernel width {kernel}, which has no middle; use {kernel - 1} or {kernel + 1}"
                    )
            if not 1 <= (total := sum(blocks for blocks, _, _ in groups)) <= MAX_LAYERS:
                raise ValueError(f"{name} has {total:,} blocks; give 1 to {MAX_LAYERS:,}")
        return self

    @property
    def encoder_layers(self) -> int:
        """Number of blocks of the encoder."""
        return sum(blocks for blocks, _, _ in self.encoder_convolutions)

    @property
    def decoder_layers(self) -> int:
        """Number of blocks of the decoder."""
        return sum(blocks for blocks, _, _ in self.decoder_convolutions)


class NormalisedLinear(nn.Module, UsesKernels, UsesPackedWeights):
    """x W^T + b, with rows g v / |v| of W."""

    def __init__(self, input_dim: int, output_dim: int, variance: float) -> None:
        super().__init__()
        self.v_ED = nn.Parameter(torch.empty(output_dim, input_dim).normal_(0.0, math.sqrt(variance / input_dim)))
        self.g_E = nn.Parameter(self.v_ED.detach().norm(dim=1))
        self.bias = nn.Parameter(torch.zeros(output_dim))

    @property
    def weight(self) -> Tensor:
        """The matrix, which is packed when it is first used for decoding on a CPU. Shape: -> (E,D)."""
        weight_ED: Tensor = self.v_ED * (self.g_E / self.v_ED.norm(dim=1)).unsqueeze(1)
        return weight_ED

    def forward(self, x: Tensor) -> Tensor:
        """Project. Shape: (..., D) -> (..., E)."""
        if self.packed is None:
            return self.kernels.linear(x, self.weight, self.bias)
        product: Tensor = self.packed.of(self)(x)
        return product


class NormalisedProjection(Projection):
    """Projection to the vocabulary, with rows g v / |v| of the output matrix."""

    weight = NormalisedLinear.weight  # type: ignore[assignment]

    def __init__(self, input_dim: int, output_dim: int, variance: float) -> None:
        nn.Module.__init__(self)
        layer = NormalisedLinear(input_dim, output_dim, variance)
        self.v_ED, self.g_E, self.bias = layer.v_ED, layer.g_E, layer.bias


class PositionedEmbedding(nn.Module):
    """Embedding of tokens plus learned positions, then dropout."""

    def __init__(self, size: int, dim: int, positions: int, dropout_p: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dim).normal_(0.0, 0.1))
        self.position_PD = nn.Parameter(torch.empty(positions, dim).normal_(0.0, 0.1))
        self.dropout = Dropout(dropout_p)

    def forward(self, tokens_BT: Tensor, offset: int = 0) -> Tensor:
        """Embed tokens at the positions from ``offset`` on. Shape: (B,T) -> (B,T,D)."""
        positions_TD = self.position_PD[offset : offset + tokens_BT.shape[1]]
        embedded: Tensor = self.dropout(F.embedding(tokens_BT, self.weight) + positions_TD)
        return embedded


class Block(nn.Module):
    """A convolution, as a product of the concatenated window, and a gated linear unit."""

    def __init__(self, input_dim: int, width: int, kernel: int, dropout_p: float) -> None:
        super().__init__()
        self.kernel_width = kernel
        self.dropout = Dropout(dropout_p)
        self.convolution = NormalisedLinear(kernel * input_dim, 2 * width, 4.0 * (1.0 - dropout_p))
        self.residual = NormalisedLinear(input_dim, width, 1.0) if input_dim != width else None

    def gated(self, x_BTC: Tensor, before: int) -> Tensor:
        """Convolve, with windows that begin ``before`` positions before each. Shape: (B,T,C) -> (B,T,E)."""
        after, length = self.kernel_width - 1 - before, x_BTC.shape[1]
        filled = F.pad(x_BTC, (0, 0, before, after))
        windows = torch.cat([filled[:, shift : shift + length] for shift in range(self.kernel_width)], dim=2)
        gated: Tensor = F.glu(self.convolution(windows), dim=2)
        return gated

    def onto(self, output_BTE: Tensor, x_BTC: Tensor) -> Tensor:
        """Add the residual connection from the block's input. Shape: (B,T,E), (B,T,C) -> (B,T,E)."""
        return (output_BTE + (x_BTC if self.residual is None else self.residual(x_BTC))) * _HALF


class EncoderBlock(Block):
    """Block whose windows have their position in the middle."""

    def forward(self, x_BSC: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Encode; padding counts as zeros. Shape: (B,S,C) -> (B,S,E)."""
        assert cache is None and not isinstance(context.mask, tuple)
        dropped = self.dropout(x_BSC)
        if context.mask is not None:
            dropped = dropped.masked_fill(~context.mask[:, 0, 0].unsqueeze(2), 0.0)
        return self.onto(self.gated(dropped, self.kernel_width // 2), x_BSC)


class DecoderBlock(Block):
    """Block whose windows end at their position, with attention to the source."""

    def __init__(self, input_dim: int, width: int, kernel: int, dropout_p: float, dim: int) -> None:
        super().__init__(input_dim, width, kernel, dropout_p)
        self.query = NormalisedLinear(width, dim, 1.0)
        self.out = NormalisedLinear(dim, width, 1.0)

    def forward(self, x_BTC: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode whole sentences, (B,T,C) -> (B,T,E), or with ``cache`` the next positions, (R,1,C) -> (R,1,E)."""
        before, dropped = self.kernel_width - 1, self.dropout(x_BTC)
        if cache is None:
            gated_BTE = self.gated(dropped, before)
        else:
            known = cache.state[0] if cache.state else dropped.new_zeros(dropped.shape[0], before, dropped.shape[2])
            window_RKC = torch.cat([known, dropped], dim=1)
            cache.advance(window_RKC[:, 1:])
            gated_BTE = F.glu(self.convolution(window_RKC.flatten(1)).unsqueeze(1), dim=2)
        assert context.embedded_BTD is not None
        query_BTD = (self.query(gated_BTE) + context.embedded_BTD) * _HALF
        attended_BTE = (self.out(_attend(query_BTD, context)) + gated_BTE) * _HALF
        return self.onto(attended_BTE, x_BTC)


def _attend(query_RTD: Tensor, context: Context) -> Tensor:
    """Attend to the source; hypotheses of a sentence are adjacent rows. Shape: (R,T,D) -> (R,T,D)."""
    assert context.memory_BSD is not None and not isinstance(context.mask, tuple)
    keys_BSD, values_BSD = context.memory_BSD.chunk(2, dim=2)
    query_BND = query_RTD.reshape(keys_BSD.shape[0], -1, query_RTD.shape[2])
    score_BNS = query_BND @ keys_BSD.transpose(1, 2)
    score_BNS = score_BNS.to(torch.promote_types(score_BNS.dtype, torch.float32))
    if context.mask is None:
        scale: float | Tensor = math.sqrt(keys_BSD.shape[1])
    else:
        # Not -inf: a row of padding alone must not become NaN.
        score_BNS = score_BNS.masked_fill(~context.mask[:, 0], torch.finfo(score_BNS.dtype).min)
        scale = context.mask[:, 0].sum(dim=2, keepdim=True).to(score_BNS.dtype).sqrt()
    weights_BNS = (score_BNS.softmax(dim=2) * scale).to(values_BSD.dtype)
    attended_BND: Tensor = weights_BNS @ values_BSD
    return attended_BND.reshape(query_RTD.shape)


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class ConvS2S(StackedModel):
    """Encoder and decoder of convolutions. Its :class:`Memory` has keys, then values: states of (B,S,2D)."""

    not_standard = "its layers are convolutions, and no Transformer's"

    def __init__(self, config: ConvS2SConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        dim, p = config.dim, config.dropout
        self.source_embedding = PositionedEmbedding(vocabulary.source.size, dim, config.positions, p)
        self.target_embedding = PositionedEmbedding(vocabulary.size, dim, config.positions, p)
        encoder, decoder = (_widths(groups) for groups in (config.encoder_convolutions, config.decoder_convolutions))
        self.encoder_in = NormalisedLinear(dim, encoder[0][0], 1.0 - p)
        self.encoder = LayerStack([EncoderBlock(*shape, p) for shape in encoder])
        self.encoder_out = NormalisedLinear(encoder[-1][1], dim, 1.0)
        self.decoder_in = NormalisedLinear(dim, decoder[0][0], 1.0 - p)
        self.decoder = LayerStack([DecoderBlock(*shape, p, dim) for shape in decoder])
        self.decoder_out = NormalisedLinear(decoder[-1][1], dim, 1.0)
        self.dropout = Dropout(p)
        self.projection = NormalisedProjection(dim, vocabulary.size, 1.0 - p)
        self.vocab_size, self.pad = vocabulary.size, vocabulary.pad
        self.longest_source = self.longest_target = config.positions

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded)
        embedded_BSD = self.source_embedding(source_BS)
        (states,) = self.encoder(self.encoder_in(embedded_BSD), Context(mask=mask))
        keys_BSD = _ScaledGradient.apply(self.encoder_out(states), 1.0 / self.decoder.applications)  # type: ignore[no-untyped-call]
        return Memory(torch.cat([keys_BSD, (keys_BSD + embedded_BSD) * _HALF], dim=2), mask)

    @override
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        return [self._decode(self.target_embedding(target_input_BT), memory, None)]

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        embedded_R1D = self.target_embedding(tokens_R.unsqueeze(1), offset=cache.length)
        logits: Tensor = self.projection(self._decode(embedded_R1D, memory, cache).squeeze(1))
        return logits

    def _decode(self, embedded_BTD: Tensor, memory: Memory, cache: DecoderCache | None) -> Tensor:
        context = replace(memory.context(), embedded_BTD=embedded_BTD)
        (states,) = self.decoder(self.decoder_in(embedded_BTD), context, None if cache is None else cache.layers)
        top_BTD: Tensor = self.dropout(self.decoder_out(states))
        return top_BTD


def _widths(groups: Convolutions) -> list[tuple[int, int, int]]:
    """Return input width, width and kernel width of each block. The first has the width of its input."""
    blocks = [(width, kernel) for count, width, kernel in groups for _ in range(count)]
    inputs = [blocks[0][0], *(width for width, _ in blocks)]
    return [(below, width, kernel) for below, (width, kernel) in zip(inputs, blocks, strict=False)]


ENTRY = Entry(
    "convs2s",
    ConvS2SConfig,
    lambda config, vocabulary, make_layer: ConvS2S(config, vocabulary),
    SelfTest(
        "convs2s",
        {
            "model": {
                "name": "convs2s",
                "dim": 32,
                "encoder_convolutions": [[2, 32, 3], [1, 48, 1]],
                "decoder_convolutions": [[2, 32, 3], [1, 48, 2]],
                "positions": 64,
            },
        },
    ),
)
