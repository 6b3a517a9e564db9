"""Weights of pretrained BERTs, by their names in `transformers`' BertForMaskedLM.

Legend: D model width, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from deepspeed_nmt import huggingface
from deepspeed_nmt.console import logger
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform, Projection
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.layers import EncoderLayer
from deepspeed_nmt.nn.sublayer import Residual

Weights = Mapping[str, Tensor]
_PADDED_ROWS = 128
"""Bound on the rows of an embedding matrix beyond the vocabulary. Some BERTs pad the matrix to a round number."""


class Loader:
    """Copies the weights of a BERT into modules. Layers are counted from 0.

    Args:
        name: folder of the BERT, or its name on the Hugging Face hub.
        side: side of the BERT, for messages.

    Attributes:
        has_head: True if the BERT was saved with its language-model head.

    Raises:
        ConfigError: if the BERT is not set or cannot be read. Methods raise it if a weight does not fit.
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
        """Load the embeddings, of which only token type 0 is used.

        Raises:
            ConfigError: if the size of the vocabulary differs.
        """
        prefix = "bert.embeddings"
        words_VD = self._weights[f"{prefix}.word_embeddings.weight"]
        size = to.weight.shape[0]
        if not size <= words_VD.shape[0] < size + _PADDED_ROWS:
            raise ConfigError(
                f"{self._option} must have the vocabulary of the data, {to.weight.shape[0]:,} tokens, but "
                f"{self._name} has {words_VD.shape[0]:,}; prepare the data with --tokenizer hf:SOURCE,TARGET, the "
                "names of these BERTs"
            )
        self._put(to.weight, words_VD[:size])
        self._put(to.position_PD, self._weights[f"{prefix}.position_embeddings.weight"])
        self._put(to.type_D, self._weights[f"{prefix}.token_type_embeddings.weight"][0])
        self._norm(to.norm, f"{prefix}.LayerNorm")

    def attention(self, to: MultiHeadAttention, around: Residual | None, layer: int) -> None:
        """Load the self-attention of layer ``layer``, and the LayerNorm of the connection around it."""
        prefix = f"bert.encoder.layer.{layer}.attention"
        for ours, theirs in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            self._linear(getattr(to, ours), f"{prefix}.self.{theirs}")
        self._linear(to.out_proj, f"{prefix}.output.dense")
        if around is not None:
            self._norm(around.norm, f"{prefix}.output.LayerNorm")

    def feed_forward(self, to: FeedForward, around: Residual | None, layer: int) -> None:
        """Load the feed-forward network of layer ``layer``, and the LayerNorm of the connection around it."""
        prefix = f"bert.encoder.layer.{layer}"
        self._linear(to.up_proj, f"{prefix}.intermediate.dense")
        self._linear(to.down_proj, f"{prefix}.output.dense")
        if around is not None:
            self._norm(around.norm, f"{prefix}.output.LayerNorm")

    def layer(self, to: EncoderLayer, layer: int) -> None:
        """Load layer ``layer``."""
        self.attention(to.self_attention, to.self_residual, layer)
        self.feed_forward(to.feed_forward, to.feed_forward_residual, layer)

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
                f"{self._option} must have the shape set by model.source and model.target, but a weight of "
                f"{self._name} is {tuple(weight.shape)} instead of {tuple(to.shape)}; omit those settings"
            )
        with torch.no_grad():
            to.copy_(weight)
