"""Two BERTs (Devlin et al. 2019) as encoder and decoder: shapes, parts, and where their weights go.

What BERT computes is kept: post-norm, GELU, residuals, biases, LayerNorm's epsilon, learned positions, token type 0,
and the language-model head (transform, tied output matrix, output bias). One vector in it has no effect and no place
here: the bias of the keys shifts all of a query's scores alike, which the softmax removes. Poolers are left out.

Legend: D model width, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from deepspeed_nmt import huggingface
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform, Projection
from deepspeed_nmt.nn.feedforward import Activation, FeedForward
from deepspeed_nmt.nn.layers import EncoderLayer
from deepspeed_nmt.nn.sublayer import Residual
from deepspeed_nmt.registry import Config

Weights = Mapping[str, Tensor]
_STD = 0.02
_PADDED_ROWS = 128
"""An embedding matrix has fewer rows too many than this: some are filled up to a round number."""


class BertShape(Config):
    """Shape of a BERT; the default is bert-base."""

    dim: int = Field(default=768, ge=2, description="D, model width")
    layers: int = Field(default=12, ge=1, description="layers")
    heads: int = Field(default=12, ge=1, description="attention heads; must divide dim")
    ffn_dim: int = Field(default=3072, ge=1, description="inner width of the feed-forward networks")
    positions: int = Field(default=512, ge=2, description="longest sentence, special tokens included")
    norm_eps: float = Field(default=1e-12, gt=0.0, description="epsilon of LayerNorm")
    activation: Activation = Field(default="gelu", description="non-linearity")

    @model_validator(mode="after")
    def _check(self) -> BertShape:
        if self.dim % self.heads:
            raise ValueError(f"heads must divide dim, but dim is {self.dim} and heads is {self.heads}")
        return self


class BertPair(Config):
    """The two BERTs that a model is made of."""

    source_encoder: str = Field(default="", description="BERT of the source language: a folder, or a name on the hub")
    target_encoder: str = Field(default="", description="BERT of the target language: a folder, or a name on the hub")
    source: BertShape = Field(default=BertShape(), description="shape of the source's BERT, as its folder says")
    target: BertShape = Field(default=BertShape(), description="shape of the target's BERT, as its folder says")
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="on embeddings and sub-layer outputs")
    attention_dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="on attention weights")

    @model_validator(mode="after")
    def _one_width(self) -> BertPair:
        if self.source.dim != self.target.dim:
            raise ValueError(
                "source.dim and target.dim must be equal, because layers of one attend to states of the other, but "
                f"are {self.source.dim} and {self.target.dim}; use two BERTs of one width"
            )
        return self

    def resolved(self, before: Config | None = None) -> BertPair:
        """With the shapes that the folders say, or those that a run began with."""
        if isinstance(before, BertPair):
            same = (before.source_encoder, before.target_encoder) == (self.source_encoder, self.target_encoder)
            if same and (self.source, self.target) in ((BertShape(), BertShape()), (before.source, before.target)):
                return self.model_copy(update={"source": before.source, "target": before.target})
        named = {"source": self.source_encoder, "target": self.target_encoder}
        found = {side: huggingface.load_shape(name, f"model.{side}_encoder") for side, name in named.items() if name}
        for side, shape in found.items():
            given: BertShape = getattr(self, side)
            if given not in (BertShape(), BertShape(**shape)):
                raise ConfigError(
                    f"model.{side} must be the shape of model.{side}_encoder, but {named[side]} has "
                    f"{BertShape(**shape)}; leave model.{side} out"
                )
        try:
            return type(self).model_validate({**self.model_dump(), **found})
        except ValidationError as error:
            raise ConfigError(
                f"the BERTs of model.source_encoder and model.target_encoder do not fit: "
                f"{str(problem['msg']).removeprefix('Value error, ')}"
                for problem in error.errors()
            ) from error


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


class Loader:
    """Puts the weights of one BERT where they belong.

    Args:
        name: a folder, or a name on the hub.
        side: source or target, for messages.

    Raises:
        ConfigError: if the BERT cannot be had.
    """

    def __init__(self, name: str, side: Literal["source", "target"]) -> None:
        self._option = f"model.{side}_encoder"
        if not name:
            raise ConfigError(
                f"{self._option} is required: the folder of a BERT, or its name on the Hugging Face hub"
            )
        self._name = name
        self._weights: Weights = huggingface.load_weights(name, self._option)
        self.has_head = any(key.startswith("cls.") for key in self._weights)

    def embedding(self, to: LearnedEmbedding) -> None:
        """Raises ConfigError if the vocabulary is another one."""
        prefix = "bert.embeddings"
        words_VD = self._weights[f"{prefix}.word_embeddings.weight"]
        size = to.weight.shape[0]
        if not size <= words_VD.shape[0] < size + _PADDED_ROWS:
            raise ConfigError(
                f"{self._option} must have the vocabulary of the data, {to.weight.shape[0]:,} tokens, but "
                f"{self._name} has {words_VD.shape[0]:,}; prepare the data with --tokenizer hf:SOURCE,TARGET of "
                "these very BERTs"
            )
        self._put(to.weight, words_VD[:size])
        self._put(to.position_PD, self._weights[f"{prefix}.position_embeddings.weight"])
        self._put(to.type_D, self._weights[f"{prefix}.token_type_embeddings.weight"][0])
        self._norm(to.norm, f"{prefix}.LayerNorm")

    def attention(self, to: MultiHeadAttention, around: Residual | None, layer: int) -> None:
        """The attention of layer ``layer``, from 0, and the connection around it."""
        prefix = f"bert.encoder.layer.{layer}.attention"
        for ours, theirs in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            self._linear(getattr(to, ours), f"{prefix}.self.{theirs}")
        self._linear(to.out_proj, f"{prefix}.output.dense")
        if around is not None:
            self._norm(around.norm, f"{prefix}.output.LayerNorm")

    def feed_forward(self, to: FeedForward, around: Residual | None, layer: int) -> None:
        """The feed-forward network of layer ``layer``, from 0, and the connection around it."""
        prefix = f"bert.encoder.layer.{layer}"
        self._linear(to.up_proj, f"{prefix}.intermediate.dense")
        self._linear(to.down_proj, f"{prefix}.output.dense")
        if around is not None:
            self._norm(around.norm, f"{prefix}.output.LayerNorm")

    def layer(self, to: EncoderLayer, layer: int) -> None:
        """A whole layer."""
        self.attention(to.self_attention, to.self_residual, layer)
        self.feed_forward(to.feed_forward, to.feed_forward_residual, layer)

    def head(self, transform: PredictionTransform, projection: Projection) -> None:
        """The language-model head, where the BERT was saved with one; the output matrix in any case."""
        size = projection.weight.shape[0]
        self._put(projection.weight, self._weights["bert.embeddings.word_embeddings.weight"][:size])
        if not self.has_head:
            logger.warning(
                "%s was saved without its language-model head; that of the new model starts fresh", self._name
            )
            return
        assert projection.bias is not None
        self._put(projection.bias, self._weights["cls.predictions.bias"][:size])
        self._linear(transform.dense, "cls.predictions.transform.dense")
        self._norm(transform.norm, "cls.predictions.transform.LayerNorm")

    def _linear(self, to: nn.Linear, name: str) -> None:
        self._put(to.weight, self._weights[f"{name}.weight"])
        if to.bias is not None:
            self._put(to.bias, self._weights[f"{name}.bias"])

    def _norm(self, to: nn.Module, name: str) -> None:
        for part in ("weight", "bias"):
            self._put(getattr(to, part), self._weights[f"{name}.{part}"])

    def _put(self, to: Tensor, weight: Tensor) -> None:
        if to.shape != weight.shape:
            raise ConfigError(
                f"{self._option} must have the shape that model.source and model.target say, but a weight of "
                f"{self._name} is {tuple(weight.shape)} instead of {tuple(to.shape)}; leave those settings out"
            )
        with torch.no_grad():
            to.copy_(weight)
