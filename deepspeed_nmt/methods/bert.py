"""BERT: what models of two BERTs share, their settings, layers, embeddings, heads and pretrained weights.

Devlin, Chang, Lee, Toutanova: "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding",
2019.

All parts compute the same as in BERT: post-norm layers with GELU and biases, LayerNorm's epsilon, learned positions,
token type 0, and a head of a transform, an output matrix tied to the embeddings, and a bias.

Deviations: keys have no bias, because it adds the same number to all scores of a query, which leaves the softmax
unchanged. There is no pooler, because translation does not use it.

Legend: D model width, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from deepspeed_nmt import huggingface
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, MAX_LAYERS, MAX_WIDTH, DataVocabulary, ModelConfig
from deepspeed_nmt.core.vocabulary import Side, Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform, Projection
from deepspeed_nmt.nn.layers import EncoderLayer, FeedForward, LayerParts, Residual
from deepspeed_nmt.registry import Config, problems_of

_STD = 0.02
"""Standard deviation of random weights."""
_PADDED_ROWS = 128
"""Bound on the rows of an embedding matrix beyond the vocabulary. Some BERTs pad the matrix to a round number."""


class BertShape(Config):
    """Shape of a BERT. The defaults are those of bert-base."""

    dim: int = Field(default=768, ge=2, le=MAX_WIDTH, description="width of the states (D)")
    layers: int = Field(default=12, ge=1, le=MAX_LAYERS, description="number of layers")
    heads: int = Field(default=12, ge=1, le=MAX_WIDTH, description="attention heads; must divide dim")
    ffn_dim: int = Field(
        default=3072, ge=1, le=MAX_INNER_WIDTH, description="inner width of the feed-forward networks"
    )
    positions: int = Field(
        default=512, ge=2, le=MAX_INNER_WIDTH, description="maximum length of a sentence, special tokens included"
    )
    norm_eps: float = Field(default=1e-12, gt=0.0, description="epsilon of LayerNorm")
    activation: Literal["relu", "gelu"] = Field(default="gelu", description="activation of the feed-forward networks")

    @model_validator(mode="after")
    def _check(self) -> BertShape:
        if self.dim % self.heads:
            raise ValueError(f"heads is {self.heads}, which does not divide dim {self.dim}; use another number")
        return self


class BertPair(ModelConfig):
    """Settings of a model of two BERTs, one for each language."""

    source_encoder: str = Field(default="", description="BERT of the source language: a folder, or a name on the hub")
    target_encoder: str = Field(default="", description="BERT of the target language: a folder, or a name on the hub")
    source: BertShape = Field(default=BertShape(), description="shape of the source's BERT, read from its folder")
    target: BertShape = Field(default=BertShape(), description="shape of the target's BERT, read from its folder")
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="dropout of embeddings and sub-layer outputs")
    attention_dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="dropout of attention weights")

    @model_validator(mode="after")
    def _one_width(self) -> BertPair:
        if self.source.dim != self.target.dim:
            raise ValueError(
                f"source.dim is {self.source.dim} and target.dim {self.target.dim}, but layers of one BERT attend to "
                "states of the other; use two of the same width"
            )
        return self

    learning_fields: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "attention_dropout", "freeze", "pretrained", "source_encoder", "target_encoder"}
    )
    shape_fields: ClassVar[frozenset[str]] = frozenset({"source", "target"})

    @property
    def berts(self) -> dict[Side, str]:
        """Folder or name of the BERT of each side; "" if not set."""
        return {"source": self.source_encoder, "target": self.target_encoder}

    def own_vocabulary(self) -> Vocabulary | None:
        """Return the vocabularies of the two BERTs; None unless both are set."""
        if not all(self.berts.values()):
            return None
        option = "model.source_encoder and model.target_encoder"
        source, target = (huggingface.load_vocabulary(name, option) for name in self.berts.values())
        vocabulary = Vocabulary.of_bert(target.size, target.special)
        if source.content == target.content:
            return vocabulary
        return replace(vocabulary, own_source=Vocabulary.of_bert(source.size, source.special))

    def check_data(self, tokenizer: DataVocabulary) -> None:
        """Refuse data whose tokens are not those of the BERTs, from which training would learn badly."""
        for side, name in self.berts.items():
            if not name:
                continue  # Loading the weights raises the error.
            bert = huggingface.load_vocabulary(name, f"model.{side}_encoder")
            if not tokenizer.matches_bert(bert.content, bert.special, side):
                raise ConfigError(
                    f"model.{side}_encoder, {name}, has another vocabulary than the data's {side} side; prepare the "
                    f"data with --tokenizer hf:{self.source_encoder},{self.target_encoder}, or set the BERTs that it "
                    "was prepared with"
                )

    def resolved(self, before: Config | None = None) -> BertPair:
        """Return the settings with the shapes of the BERTs' folders, or of the run that is resumed.

        A run can thus be resumed without the folders.

        Raises:
            ConfigError: if a folder cannot be read, or a shape that is set differs from its folder's.
        """
        if isinstance(before, BertPair) and before.berts == self.berts:
            kept = {"source": before.source, "target": before.target}
            if (self.source, self.target) in ((BertShape(), BertShape()), tuple(kept.values())):
                return self.model_copy(update=kept)
        shapes: dict[str, Any] = {}
        for side, name in self.berts.items():
            if name:
                shapes[side] = huggingface.load_shape(name, f"model.{side}_encoder")
                if getattr(self, side) not in (BertShape(), BertShape(**shapes[side])):
                    raise ConfigError(
                        f"model.{side} is not the shape of model.{side}_encoder, {name}, which is "
                        f"{BertShape(**shapes[side])}; omit model.{side}"
                    )
        try:
            return type(self).model_validate({**self.model_dump(), **shapes})
        except ValidationError as error:
            problems = problems_of(error, lambda place: f"model.{place}", "model")
            raise ConfigError(f"the BERTs do not fit: {problem}" for problem in problems) from error


_SMALL = {"dim": 32, "layers": 2, "heads": 4, "ffn_dim": 64, "positions": 64}
SMALL_BERTS: Mapping[str, Any] = {"source": _SMALL, "target": _SMALL, "attention_dropout": 0.0}
"""Settings of the models in self-tests."""


def layer_parts(
    shape: BertShape, pair: BertPair, style: Literal["pre", "post"] = "post", heads: int = 0
) -> LayerParts:
    """Return makers of the parts of layers of a BERT's width, with ``heads`` heads; 0: as many as the BERT."""
    return LayerParts(
        attention=lambda: MultiHeadAttention(shape.dim, heads or shape.heads, pair.attention_dropout),
        feed_forward=lambda: FeedForward(shape.dim, shape.ffn_dim, shape.activation),
        residual=lambda: Residual(shape.dim, style, pair.dropout, eps=shape.norm_eps),
    )


def embedding(shape: BertShape, pair: BertPair, vocabulary: Vocabulary) -> LearnedEmbedding:
    """Make the embeddings of a BERT: tokens, positions and token type."""
    weight_VD = torch.empty(vocabulary.size, shape.dim).normal_(0.0, _STD)
    weight_VD[vocabulary.pad] = 0.0
    return LearnedEmbedding(nn.Parameter(weight_VD), shape.positions, pair.dropout, shape.norm_eps)


def head(
    shape: BertShape, embedded: LearnedEmbedding, tied: bool, vocabulary: Vocabulary
) -> tuple[PredictionTransform, Projection]:
    """Make the language-model head, whose output matrix is that of the embeddings if ``tied``."""
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


class Loader:
    """Copies the weights of a BERT, by its folder or name on the hub, into modules. Layers are counted from 0.

    Raises:
        ConfigError: if the BERT is not set or cannot be read, or if a weight does not fit.
    """

    def __init__(self, name: str, side: Side) -> None:
        self._option = f"model.{side}_encoder"
        if not name:
            raise ConfigError(
                f"{self._option} is required: the folder of a BERT, or its name on the Hugging Face hub"
            )
        self._name = name
        self._weights = huggingface.load_weights(name, self._option)
        self.has_head = any(key.startswith("cls.") for key in self._weights)

    def embedding(self, to: LearnedEmbedding) -> None:
        """Load the embeddings, of which only token type 0 is used."""
        prefix = "bert.embeddings"
        words_VD = self._weights[f"{prefix}.word_embeddings.weight"]
        size = to.weight.shape[0]
        if not size <= words_VD.shape[0] < size + _PADDED_ROWS:
            raise ConfigError(
                f"{self._option}, {self._name}, has {words_VD.shape[0]:,} tokens, and the data {size:,}; prepare the "
                "data with --tokenizer hf:SOURCE,TARGET, the names of these BERTs"
            )
        self._put(to.weight, words_VD[:size])
        self._put(to.position_PD, self._weights[f"{prefix}.position_embeddings.weight"])
        self._put(to.type_D, self._weights[f"{prefix}.token_type_embeddings.weight"][0])
        self._load({f"{prefix}.LayerNorm": to.norm})

    def attention(self, to: MultiHeadAttention, around: Residual, layer: int) -> None:
        """Load the self-attention of layer ``layer``, and the LayerNorm of the connection around it."""
        prefix = f"bert.encoder.layer.{layer}.attention"
        self._load(
            {
                f"{prefix}.self.query": to.q_proj,
                f"{prefix}.self.key": to.k_proj,
                f"{prefix}.self.value": to.v_proj,
                f"{prefix}.output.dense": to.out_proj,
                f"{prefix}.output.LayerNorm": around.norm,
            }
        )

    def feed_forward(self, to: FeedForward, around: Residual, layer: int) -> None:
        """Load the feed-forward network of layer ``layer``, and the LayerNorm of the connection around it."""
        prefix = f"bert.encoder.layer.{layer}"
        self._load(
            {
                f"{prefix}.intermediate.dense": to.up_proj,
                f"{prefix}.output.dense": to.down_proj,
                f"{prefix}.output.LayerNorm": around.norm,
            }
        )

    def encoder(self, embedded: LearnedEmbedding, layers: Iterable[EncoderLayer]) -> None:
        """Load the embeddings and all layers."""
        self.embedding(embedded)
        for number, layer in enumerate(layers):
            self.attention(layer.self_attention, layer.self_residual, number)
            self.feed_forward(layer.feed_forward, layer.feed_forward_residual, number)

    def head(self, transform: PredictionTransform, projection: Projection) -> None:
        """Load the output matrix, and the rest of the language-model head if the BERT was saved with one."""
        size = projection.weight.shape[0]
        self._put(projection.weight, self._weights["bert.embeddings.word_embeddings.weight"][:size])
        if not self.has_head:
            logger.warning(
                "%s was saved without its language-model head; the head of the new model is random", self._name
            )
            return
        assert projection.bias is not None
        self._put(projection.bias, self._weights["cls.predictions.bias"][:size])
        prefix = "cls.predictions.transform"
        self._load({f"{prefix}.dense": transform.dense, f"{prefix}.LayerNorm": transform.norm})

    def _load(self, modules: Mapping[str, nn.Module]) -> None:
        """Load weights and biases of matrices and LayerNorms, by their names there."""
        for name, module in modules.items():
            for part, parameter in module.named_parameters():
                self._put(parameter, self._weights[f"{name}.{part}"])

    def _put(self, to: Tensor, weight: Tensor) -> None:
        if to.shape != weight.shape:
            raise ConfigError(
                f"a weight of {self._option}, {self._name}, is {tuple(weight.shape)} instead of {tuple(to.shape)}, "
                "the shape set by model.source and model.target; omit those settings"
            )
        with torch.no_grad():
            to.copy_(weight)
