"""Layers, embeddings and language-model head of a BERT.

Devlin, Chang, Lee, Toutanova: "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
2019.

All parts compute the same as in BERT: post-norm layers with GELU and biases, LayerNorm's epsilon, learned positions,
token type 0, and a head of a transform, an output matrix tied to the embeddings, and a bias.

Deviations: keys have no bias, because it adds the same number to all scores of a query, which leaves the softmax
unchanged. There is no pooler, because translation does not use it.

Legend: D model width, V vocabulary, P positions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.bert.config import BertPair, BertShape
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform, Projection
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.layers import EncoderLayer
from deepspeed_nmt.nn.sublayer import Residual

_STD = 0.02
"""Standard deviation of random weights."""


def attention(shape: BertShape, pair: BertPair, heads: int = 0) -> MultiHeadAttention:
    """Make self- or cross-attention of a BERT's width, with ``heads`` heads; 0: as many as the BERT."""
    return MultiHeadAttention(shape.dim, heads or shape.heads, pair.attention_dropout)


def feed_forward(shape: BertShape) -> FeedForward:
    """Make a feed-forward network of a BERT's shape."""
    return FeedForward(shape.dim, shape.ffn_dim, shape.activation)


def residual(shape: BertShape, pair: BertPair, style: Literal["pre", "post"] = "post") -> Residual:
    """Make the residual connection around a sub-layer, with its LayerNorm."""
    return Residual(shape.dim, style, pair.dropout, eps=shape.norm_eps)


def bert_layer(shape: BertShape, pair: BertPair) -> EncoderLayer:
    """Make a layer with bidirectional self-attention."""
    return EncoderLayer(attention(shape, pair), residual(shape, pair), feed_forward(shape), residual(shape, pair))


def embedding(shape: BertShape, pair: BertPair, vocabulary: Vocabulary) -> LearnedEmbedding:
    """Make the embeddings of a BERT: tokens, positions and token type."""
    weight_VD = torch.empty(vocabulary.size, shape.dim).normal_(0.0, _STD)
    weight_VD[vocabulary.pad] = 0.0
    return LearnedEmbedding(nn.Parameter(weight_VD), shape.positions, pair.dropout, shape.norm_eps)


def head(
    shape: BertShape, embedded: LearnedEmbedding, tied: bool, vocabulary: Vocabulary
) -> tuple[PredictionTransform, Projection]:
    """Make the language-model head.

    Args:
        shape: shape of the BERT.
        embedded: embeddings of the BERT.
        tied: True if the output matrix is that of the embeddings; False if it is a matrix of its own, which starts as
            a copy when a BERT is loaded.
        vocabulary: vocabulary of the target.
    """
    weight_VD = embedded.weight if tied else nn.Parameter(torch.empty_like(embedded.weight).normal_(0.0, _STD))
    bias_V = nn.Parameter(torch.zeros(vocabulary.size))
    return PredictionTransform(shape.dim, shape.activation, shape.norm_eps), Projection(weight_VD, bias_V)


def initialise(module: nn.Module) -> None:
    """Initialise as BERT: normal weights with a standard deviation of 0.02, zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0.0, _STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
