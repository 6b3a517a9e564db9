"""AB-Net: two frozen BERTs with trained adapters, which translate non-autoregressively.

Guo, Zhang, Xu, Wei, Chen, Chen: "Incorporating BERT into Parallel Sequence Decoding with Adapters", 2020. Serial and
parallel adapters are compared in table 2 of the paper that :mod:`deepspeed_nmt.methods.parallel_decoder` implements.

S and F are the self-attention and feed-forward sub-layers of a frozen BERT layer, as in that module, but with
bidirectional self-attention. LN is a LayerNorm, C cross-attention to the encoder's states, and W a network
W_2 relu(W_1 x). An encoder layer computes

    X = F(S(H))                H' = X + W(LN(X))

and a decoder layer, with ``adapter_norm: pre``,

    serial      X = F(S(H)),   A = X + C(LN(X)),      H' = A + W(LN(A))
    parallel                   A = S(H) + C(LN(H)),   H' = F(A) + W(LN(A))

or with ``adapter_norm: post``, as the authors trained,

    serial      X = F(S(H)),   A = LN(X + C(X)),      H' = LN(A + W(A))
    parallel                   A = LN(S(H) + C(H)),   H' = LN(F(A) + W(A)).

Each LN has weights of its own. Only cross-attention, adapters (W and LN) and the prediction of the target's length
are trained. With ``length_from: cls`` a linear layer predicts the length from the encoder's state at [CLS]. With
``token``, the authors' choice, from that at a learned token before the source, which has no position and no
LayerNorm, and to which the decoder does not attend. The objective is :mod:`deepspeed_nmt.methods.masked_tokens`.

docs/papers/parallel-decoder.md has the differences from the authors' code that remain in ``abnet_original_*``.

Legend: B sentences, S source length, T target length, D model width, L lengths, R rows = B x candidate lengths, N
positions to predict, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, Exits, MaskedModel, Memory
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, MAX_WIDTH, Parts
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods import bert
from deepspeed_nmt.methods.bert import SMALL_BERTS, BertPair, Loader
from deepspeed_nmt.methods.masked_tokens import LENGTH, MaskedTokensConfig, mask_token
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.embedding import PredictionTransform
from deepspeed_nmt.nn.layers import Context, DecoderBlock, Draw, EncoderLayer, FeedForward, Residual
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest

_LOGITS_AT_ONCE = 1 << 24
"""Bound on the elements of a matrix of logits in decoding."""


class AbNetConfig(BertPair):
    """Settings of AB-Net."""

    name: Literal["abnet"] = "abnet"
    adapters: Literal["serial", "parallel"] = Field(
        default="serial", description="place of the decoder's adapters: behind the frozen sub-layers, or beside them"
    )
    adapter_dim: int = Field(default=2048, ge=1, le=MAX_INNER_WIDTH, description="inner width of the adapters")
    adapter_norm: Literal["pre", "post"] = Field(
        default="pre", description="place of the LayerNorms of the decoder's cross-attention and adapters"
    )
    cross_heads: int = Field(
        default=0, ge=0, le=MAX_WIDTH, description="heads of cross-attention; 0: as many as the target's BERT"
    )
    length_from: Literal["cls", "token"] = Field(
        default="cls", description="state that predicts the target's length: at [CLS], or at a learned token"
    )

    @model_validator(mode="after")
    def _divisible(self) -> AbNetConfig:
        if self.cross_heads and self.target.dim % self.cross_heads:
            raise ValueError(
                f"cross_heads is {self.cross_heads}, which does not divide target.dim {self.target.dim}; use another"
            )
        return self

    left_to_right: ClassVar[bool] = False
    sliceable: ClassVar[bool] = False

    def contradictions(self, run: Parts) -> Iterator[str]:
        """Refuse objectives and searches that predict from left to right."""
        if not any(isinstance(part, MaskedTokensConfig) for part in run.objective.values()):
            yield (
                "model.name=abnet is trained by objective.masked_tokens; set that, and the other likelihood to null"
            )
        for name in run.active_regularizers():
            yield (
                f"objective.{name} compares predictions from left to right, but model.name=abnet guesses masked "
                f"tokens; set objective.{name} to null"
            )
        if run.search.left_to_right:
            yield "model.name=abnet is decoded by search.name=mask_predict; set that"


class AdaptedEncoderLayer(nn.Module):
    """Frozen BERT layer, followed by an adapter."""

    def __init__(self, config: AbNetConfig) -> None:
        super().__init__()
        shape = config.source
        self.layer = EncoderLayer(bert.layer_parts(shape, config))
        self.adapter = FeedForward(shape.dim, config.adapter_dim)
        self.adapter_residual = bert.layer_parts(shape, config, "pre").residual()

    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the frozen layer and the adapter. An encoder caches nothing. Shape: (B,S,D) -> (B,S,D)."""
        adapted: Tensor = self.adapter_residual(self.layer(x_BSD, context), self.adapter)
        return adapted


class AdaptedDecoderLayer(DecoderBlock):
    """Frozen BERT layer with cross-attention and an adapter, after it (serial) or beside it (parallel)."""

    def __init__(self, config: AbNetConfig) -> None:
        super().__init__()
        shape = config.target
        parts = bert.layer_parts(shape, config, config.adapter_norm, config.cross_heads)
        self.layer = EncoderLayer(bert.layer_parts(shape, config))
        self.cross_attention: MultiHeadAttention = parts.attention()
        self.cross_residual: Residual = parts.residual()
        self.adapter = FeedForward(shape.dim, config.adapter_dim)
        self.adapter_residual = parts.residual()
        self.parallel = config.adapters == "parallel"

    @property
    def self_residual(self) -> Residual:  # type: ignore[override]
        """Residual connection of the frozen self-attention."""
        return self.layer.self_residual

    @property
    def feed_forward_residual(self) -> Residual:  # type: ignore[override]
        """Residual connection of the frozen feed-forward network."""
        return self.layer.feed_forward_residual

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the layer to whole sentences, without a cache. Shape: (B,T,D) -> (B,T,D)."""
        bidirectional = Context(mask=context.target_mask)
        if not self.parallel:
            sum_BTD, onto_BTD = self.cross(self.layer(x_BTD, bidirectional), context, cache), None
        else:
            frozen = self.layer
            attended_BTD = frozen.self_residual(x_BTD, lambda h: frozen.self_attention(h, h, context.target_mask))
            sum_BTD = self.cross(x_BTD, context, cache, attended_BTD)
            onto_BTD = frozen.feed_forward_residual(sum_BTD, frozen.feed_forward)
        adapted: Tensor = self.adapter_residual(sum_BTD, self.adapter, onto_BTD)
        return adapted


class LengthToken(nn.Module):
    """Learned token before each source, at whose state the target's length is predicted."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim).normal_(0.0, 0.02))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Put the token before embedded sources. Shape: (B,S,D) -> (B,1+S,D)."""
        return torch.cat([self.weight.to(x_BSD.dtype).expand(x_BSD.shape[0], 1, -1), x_BSD], dim=1)


class AbNet(MaskedModel):
    """Model that predicts masked tokens. Its BERTs are loaded by :meth:`load_pretrained`."""

    def __init__(self, config: AbNetConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = bert.embedding(config.source, config, vocabulary.source)
        self.target_embedding = bert.embedding(config.target, config, vocabulary)
        transform, self.projection = bert.head(config.target, self.target_embedding, True, vocabulary)
        self.encoder = LayerStack([AdaptedEncoderLayer(config) for _ in range(config.source.layers)])
        decoder = [AdaptedDecoderLayer(config) for _ in range(config.target.layers)]
        self.decoder = LayerStack(decoder, final_norm=transform)
        by_token = config.length_from == "token"
        self.length_token = LengthToken(config.source.dim) if by_token else None
        self.length = nn.Linear(config.source.dim, config.target.positions, bias=not by_token)
        self.vocabulary = vocabulary
        self.vocab_size, self.pad = vocabulary.size, vocabulary.pad
        self.mask = mask_token(vocabulary)
        self.longest_source, self.longest_target = config.source.positions, config.target.positions - 1
        bert.initialise(self)
        frozen = [self.source_embedding, self.target_embedding, transform, self.projection]
        for module in [*frozen, *_berts_layers(self.encoder), *_berts_layers(self.decoder)]:
            module.requires_grad_(False)

    @override
    def attention_layers(self) -> dict[int, nn.Module]:
        return {}  # a pass has the logits of lengths, too

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask, embedded_BSD = self.source_mask(source_BS, padded), self.source_embedding(source_BS)
        if self.length_token is None:
            (states_BSD,) = self.encoder(embedded_BSD, Context(mask=mask))
            return Memory(states_BSD, mask)
        words = F.pad(source_BS.ne(self.pad), (1, 0))[:, None, None, :]
        seen = None if mask is None else F.pad(mask, (1, 0), value=True)
        (states_BSD,) = self.encoder(self.length_token(embedded_BSD), Context(mask=seen))
        return Memory(states_BSD, words)

    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        """Compute the states of [CLS] y [SEP] with masked tokens, bidirectionally. Shape: (B,T) -> (B,T,D)."""
        seen_BT = target_input_BT.ne(self.pad)
        seen_BT[:, 0] = True
        context = replace(memory.context(draw), target_mask=seen_BT[:, None, None, :])
        states: list[Tensor] = self.decoder(self.target_embedding(target_input_BT), context)
        return states

    @override
    def lengths(self, memory: Memory) -> Tensor:
        logits_BL: Tensor = self.length(memory.states_BSD[:, 0])
        return logits_BL

    @override
    def guess(self, tokens_RT: Tensor, chosen_RT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        states_ND = self.decode(tokens_RT, memory)[0][chosen_RT]
        never = [self.pad, self.vocabulary.bos, self.vocabulary.eos, self.mask]
        best = []
        for part_ND in torch.split(states_ND, max(1, _LOGITS_AT_ONCE // self.vocab_size)):
            logits_NV: Tensor = self.projection(part_ND)
            log_p_NV = torch.log_softmax(logits_NV.float(), dim=1)
            log_p_NV[:, never] = -torch.inf
            best.append(log_p_NV.max(dim=1))
        return torch.cat([part.indices for part in best]), torch.cat([part.values for part in best])

    @override
    def single_pass(self, batch: Batch) -> dict[str, Tensor]:
        memory = self.encode(batch.source_BS, padded=batch.source_padded)
        return {TOP: self.decode(batch.target_input_BT, memory)[0][:, 1:], LENGTH: self.lengths(memory)}

    @override
    def forward(self, batch: Batch) -> Tensor:
        return self.single_pass(batch)[TOP]

    @override
    def load_pretrained(self) -> bool:
        assert isinstance(self.decoder.final_norm, PredictionTransform)
        Loader(self.config.source_encoder, "source").encoder(self.source_embedding, _berts_layers(self.encoder))
        target = Loader(self.config.target_encoder, "target")
        if not target.has_head:
            raise ConfigError(
                f"{self.config.target_encoder} was saved without its language-model head, and model.name=abnet does "
                "not train one; name another BERT as model.target_encoder"
            )
        target.encoder(self.target_embedding, _berts_layers(self.decoder))
        target.head(self.decoder.final_norm, self.projection)
        return True


def _berts_layers(stack: LayerStack) -> list[EncoderLayer]:
    """Return the frozen layers within those of a stack."""
    adapted = (layer for layer in stack.layers if isinstance(layer, (AdaptedEncoderLayer, AdaptedDecoderLayer)))
    return [layer.layer for layer in adapted]


ENTRY = Entry(
    "abnet",
    AbNetConfig,
    lambda config, vocabulary, make_layer: AbNet(config, vocabulary),
    SelfTest(
        "abnet",
        {
            "model": {
                "name": "abnet",
                **SMALL_BERTS,
                "adapters": "parallel",
                "adapter_dim": 48,
                "length_from": "token",
            },
            "objective": {"masked_tokens": {"replacement": "bert", "source_rate": 0.1}},
            "search": {"name": "mask_predict"},
        },
    ),
)
