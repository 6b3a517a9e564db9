"""Layers, embeddings and the language-model head of a BERT (Devlin et al. 2019).

They compute what BERT computes: post-norm, GELU, residuals, biases, LayerNorm's epsilon, learned positions, token
type 0, and the language-model head (transform, tied output matrix, output bias). The bias of the keys is left out: it
adds the same number to all scores of a query, which the softmax removes. Poolers are left out, too.

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
"""Standard deviation of fresh weights."""


def attention(shape: BertShape, pair: BertPair) -> MultiHeadAttention:
    """An attention of a BERT's shape."""
    return MultiHeadAttention(shape.dim, shape.heads, pair.attention_dropout)


def feed_forward(shape: BertShape) -> FeedForward:
    """A feed-forward network of a BERT's shape."""
    return FeedForward(shape.dim, shape.ffn_dim, shape.activation)


def residual(shape: BertShape, pair: BertPair, style: Literal["pre", "post"] = "post") -> Residual:
    """The connection around one of them, LayerNorm included."""
    return Residual(shape.dim, style, pair.dropout, eps=shape.norm_eps)


def bert_layer(shape: BertShape, pair: BertPair) -> EncoderLayer:
    """A layer that reads both ways."""
    return EncoderLayer(attention(shape, pair), residual(shape, pair), feed_forward(shape), residual(shape, pair))


def embedding(shape: BertShape, pair: BertPair, vocabulary: Vocabulary) -> LearnedEmbedding:
    """Embeddings of a BERT's shape."""
    weight_VD = torch.empty(vocabulary.size, shape.dim).normal_(0.0, _STD)
    weight_VD[vocabulary.pad] = 0.0
    return LearnedEmbedding(nn.Parameter(weight_VD), shape.positions, pair.dropout, shape.norm_eps)


def head(
    shape: BertShape, embedded: LearnedEmbedding, tied: bool, vocabulary: Vocabulary
) -> tuple[PredictionTransform, Projection]:
    """The language-model head; its output matrix is the embedding matrix, or one that starts as a copy."""
    weight_VD = embedded.weight if tied else nn.Parameter(torch.empty_like(embedded.weight).normal_(0.0, _STD))
    bias_V = nn.Parameter(torch.zeros(vocabulary.size))
    return PredictionTransform(shape.dim, shape.activation, shape.norm_eps), Projection(weight_VD, bias_V)


def initialise(module: nn.Module) -> None:
    """As BERT starts: normal with a deviation of 0.02, no biases."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, 0.0, _STD)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
