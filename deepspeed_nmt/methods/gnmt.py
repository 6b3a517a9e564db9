"""Google's Neural Machine Translation system: stacked LSTMs with attention from the lowest decoder layer.

Wu, Schuster, Chen, Le, Norouzi, Macherey, Krikun, et al.: "Google's Neural Machine Translation System: Bridging the
Gap between Human and Machine Translation", 2016. It is a baseline of "Recurrent multiple shared layers in Depth for
Neural Machine Translation" (Li and Li, 2021), table 1.

**Encoder (3.2).** The first of N layers reads the source in both directions, the others from left to right. From the
third layer on, residual connections surround the layers (eq. 6): with LSTM_i without its output layer and m^1 the
concatenation of both directions,

    m^2 = LSTM_2(m^1),    x^i = LSTM_i(x^{i-1}) + x^{i-1}.

**Attention (eq. 4).** With y_t the output of the lowest decoder layer and x_1 .. x_S the encoder's states, a network
with one hidden layer scores, and the context a_t goes to all further decoder layers:

    s_ti = v . tanh(W_q y_t + W_k x_i + b),    p_t = softmax_i(s_t),    a_t = sum_i p_ti x_i.

**Decoder.** Layer 1 reads the embedded target alone, layer j the concatenation of the output of layer j - 1 and a_t,
with residual connections around the outputs from the third layer on. So training runs each layer over whole
sentences.

a_t is computed from y_t, the output at the same position, as in the code that Google published; equation 4 prints y
of the position before. All states begin with zeros. Dropout is applied to the input of each LSTM, not between
positions (Zaremba, Sutskever, Vinyals: "Recurrent Neural Network Regularization", 2014). Source, target and output
have a matrix each. All weights begin uniform within ``init_range``. Reinforcement learning, the coverage penalty and
quantised inference are left out.

The state of a hypothesis is two vectors a layer, whatever its length.

Legend: B sentences, S source length, T target length, D model width, E input width, R rows = B x W, W hypotheses of a
sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import Exits, Memory, StackedModel
from deepspeed_nmt.core.parts import MAX_LAYERS, MAX_WIDTH, ModelConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.nn.cache import DecoderCache, KeysValues, LayerCache
from deepspeed_nmt.nn.embedding import Projection
from deepspeed_nmt.nn.layers import Context, Draw, Dropout
from deepspeed_nmt.nn.linear import Linear
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest


class GnmtConfig(ModelConfig):
    """Settings of GNMT. The defaults are the paper's."""

    name: Literal["gnmt"] = "gnmt"
    dim: int = Field(default=1024, ge=1, le=MAX_WIDTH, description="width of embeddings and LSTMs (D)")
    encoder_layers: int = Field(
        default=8, ge=2, le=MAX_LAYERS, description="layers of the encoder (N); the first reads in both directions"
    )
    decoder_layers: int = Field(default=8, ge=2, le=MAX_LAYERS, description="layers of the decoder (M)")
    dropout: float = Field(default=0.2, ge=0.0, lt=1.0, description="dropout of the inputs of the LSTMs")
    init_range: float = Field(
        default=0.04,
        gt=0.0,
        le=10.0,
        description="bound of the uniform initialisation of all weights; narrower models than the paper's learn "
        "sooner with more, in proportion to 1 / sqrt(dim)",
    )

    sliceable: ClassVar[bool] = False
    learning_fields: ClassVar[frozenset[str]] = frozenset({"dropout", "init_range"})
    shape_fields: ClassVar[frozenset[str]] = frozenset({"dim"})
    depth_fields: ClassVar[frozenset[str]] = frozenset({"encoder_layers", "decoder_layers"})


class RecurrentLayer(nn.Module):
    """An LSTM from left to right, with dropout of its input and, if ``residual``, a residual connection."""

    def __init__(self, input_dim: int, dim: int, dropout_p: float, residual: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_dim, dim, batch_first=True)
        self.dropout = Dropout(dropout_p)
        self.residual = residual

    def forward(self, x_BTE: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Read whole sentences, (B,T,E) -> (B,T,D), or with ``cache`` the next positions, (R,1,E) -> (R,1,D)."""
        output_BTD = self.run(x_BTE, cache)
        return output_BTD + x_BTE[..., : output_BTD.shape[2]] if self.residual else output_BTD

    def run(self, x_BTE: Tensor, cache: LayerCache | None) -> Tensor:
        """Run the LSTM, from the state that ``cache`` keeps for each hypothesis. Shape: -> (B,T,D)."""
        x_BTE = self.dropout(x_BTE)
        state = None if cache is None or not cache.state else tuple(x_RD.unsqueeze(0) for x_RD in cache.state)
        output_BTD, newest = _run(self.lstm, x_BTE, state)
        if cache is not None:
            cache.advance(*(x_1RD.squeeze(0) for x_1RD in newest))
        return output_BTD


class BidirectionalLayer(nn.Module):
    """Two LSTMs that read the sentences from left to right and from right to left; their outputs are concatenated."""

    def __init__(self, dim: int, dropout_p: float) -> None:
        super().__init__()
        self.forwards, self.backwards = (nn.LSTM(dim, dim, batch_first=True) for _ in range(2))
        self.dropout = Dropout(dropout_p)

    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Read sources, padded on the right, which affects no token. Shape: (B,S,D) -> (B,S,2D)."""
        assert cache is None
        x_BSD = self.dropout(x_BSD)
        right_BSD, _ = _run(self.forwards, x_BSD)
        left_BSD, _ = _run(self.backwards, _reversed(x_BSD, context))
        return torch.cat([right_BSD, _reversed(left_BSD, context)], dim=2)


def _run(lstm: nn.LSTM, x_BTE: Tensor, state: Sequence[Tensor] | None = None) -> tuple[Tensor, Sequence[Tensor]]:
    """Run an LSTM over whole sentences, from zeros if ``state`` is None: (B,T,E) -> (B,T,D) and two of (1,B,D).

    On the meta device, which plans count, all positions are one step of as many sentences: the same products and
    tensors, without the minutes that torch takes there for each position.
    """
    output_BTD: Tensor
    if x_BTE.is_meta:
        before_1ND = x_BTE.new_zeros(1, x_BTE.shape[0] * x_BTE.shape[1], lstm.hidden_size, requires_grad=True)
        output_N1D, _ = lstm(x_BTE.flatten(0, 1).unsqueeze(1), (before_1ND, before_1ND))
        return output_N1D.view(*x_BTE.shape[:2], -1), ()
    output_BTD, newest = lstm(x_BTE, state)
    return output_BTD, newest


def _reversed(x_BSD: Tensor, context: Context) -> Tensor:
    """Reverse the order of each sentence's positions; padding stays in its place. Shape: (B,S,D) -> (B,S,D)."""
    if context.mask is None:
        return x_BSD.flip(1)
    assert isinstance(context.mask, Tensor), "settings refuse the packed layout"
    place_S = torch.arange(x_BSD.shape[1], device=x_BSD.device)
    length_B1 = context.mask[:, 0, 0].sum(dim=1, keepdim=True)
    source_BS = torch.where(place_S < length_B1, length_B1 - 1 - place_S, place_S)
    return x_BSD.gather(1, source_BS.unsqueeze(2).expand_as(x_BSD))


class AdditiveAttention(nn.Module):
    """Attention whose scores are computed by a network with one hidden layer of width D (eq. 4)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj = Linear(dim, dim, bias=False)
        self.k_proj = Linear(dim, dim)
        self.score_D = nn.Parameter(torch.empty(dim))

    def project(self, memory_BSD: Tensor) -> KeysValues:
        """Project the encoder's states, for any number of calls. Shape: (B,S,D) -> two of (B,S,D)."""
        return KeysValues(self.k_proj(memory_BSD), memory_BSD)

    def forward(self, query_RTD: Tensor, memory: KeysValues, mask: Tensor | None) -> Tensor:
        """Return the context of each query; hypotheses of a sentence are adjacent rows. Shape: (R,T,D) -> (R,T,D)."""
        sentences = memory.keys.shape[0]
        query_BND = self.q_proj(query_RTD).reshape(sentences, -1, query_RTD.shape[2])
        score_BNS = torch.tanh(query_BND.unsqueeze(2) + memory.keys.unsqueeze(1)) @ self.score_D
        if mask is not None:
            # Not -inf: a row of padding alone must not become NaN.
            score_BNS = score_BNS.masked_fill(~mask[:, 0], torch.finfo(score_BNS.dtype).min)
        weights_BNS = score_BNS.to(torch.promote_types(score_BNS.dtype, torch.float32)).softmax(dim=2)
        context_BND: Tensor = weights_BNS.to(memory.values.dtype) @ memory.values
        return context_BND.reshape(query_RTD.shape)


class AttendingLayer(RecurrentLayer):
    """The lowest decoder layer: an LSTM from whose outputs the source is attended to."""

    def __init__(self, dim: int, dropout_p: float) -> None:
        super().__init__(dim, dim, dropout_p, residual=False)
        self.attention = AdditiveAttention(dim)

    @override
    def forward(self, x_BTE: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode, and append the attended source to the output. Shape: (B,T,D) -> (B,T,2D)."""
        output_BTD, memory_BSD = self.run(x_BTE, cache), context.memory_BSD
        assert memory_BSD is not None and not isinstance(context.mask, tuple)
        project = self.attention.project
        memory = project(memory_BSD) if cache is None else cache.source.of(project, memory_BSD)
        return torch.cat([output_BTD, self.attention(output_BTD, memory, context.mask)], dim=2)


class UpperLayer(RecurrentLayer):
    """A decoder layer that reads the output of the layer below and the attended source, and hands on the latter."""

    def __init__(self, dim: int, dropout_p: float, residual: bool, is_top: bool) -> None:
        super().__init__(2 * dim, dim, dropout_p, residual)
        self.is_top = is_top

    @override
    def forward(self, x_BTE: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode. Shape: (B,T,2D) -> (B,T,2D), of the top layer (B,T,D)."""
        output_BTD = super().forward(x_BTE, context, cache)
        return output_BTD if self.is_top else torch.cat([output_BTD, x_BTE[..., output_BTD.shape[2] :]], dim=2)


class Gnmt(StackedModel):
    """Encoder and decoder of LSTMs."""

    not_standard = "its layers are LSTMs, and no Transformer's"

    def __init__(self, config: GnmtConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        dim, p = config.dim, config.dropout
        self.source_embedding = nn.Embedding(vocabulary.source.size, dim)
        self.target_embedding = nn.Embedding(vocabulary.size, dim)
        upper = [RecurrentLayer(2 * dim, dim, p, residual=False)]
        upper += [RecurrentLayer(dim, dim, p, residual=True) for _ in range(config.encoder_layers - 2)]
        self.encoder = LayerStack([BidirectionalLayer(dim, p), *upper])
        top = config.decoder_layers
        decoder = [UpperLayer(dim, p, number > 2, number == top) for number in range(2, top + 1)]
        self.decoder = LayerStack([AttendingLayer(dim, p), *decoder])
        self.projection = Projection(nn.Parameter(torch.empty(vocabulary.size, dim)))
        self.vocab_size, self.pad = vocabulary.size, vocabulary.pad
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -config.init_range, config.init_range)

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded)
        (states_BSD,) = self.encoder(self.source_embedding(source_BS), Context(mask=mask))
        return Memory(states_BSD, mask)

    @override
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        states: list[Tensor] = self.decoder(self.target_embedding(target_input_BT), memory.context(draw))
        return states

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        embedded_R1D = self.target_embedding(tokens_R.unsqueeze(1))
        (states_R1D,) = self.decoder(embedded_R1D, memory.context(), cache.layers)
        logits: Tensor = self.projection(states_R1D.squeeze(1))
        return logits


ENTRY = Entry(
    "gnmt",
    GnmtConfig,
    lambda config, vocabulary, make_layer: Gnmt(config, vocabulary),
    SelfTest(
        "gnmt",
        {"model": {"name": "gnmt", "dim": 32, "encoder_layers": 3, "decoder_layers": 3, "init_range": 0.2}},
    ),
)
