"""Guided alignment: the cross-attention of a decoder layer learns given word alignments.

- Chen, Matusov, Khadivi, Peter: "Guided Alignment Training for Topic-Aware Neural Machine Translation", 2016.
- Garg, Peitz, Nallasamy, Paulik: "Jointly Learning to Align and Translate with Transformer Models", 2019.

Let a_ts be the attention of target position t, which predicts token t, to source position s: the mean over the heads
of the layer, as `translate --alignment` reads it. A has the links (s, t) of tokens: all tokens of two linked words
are linked. With the T target tokens of the update, the loss is

    L = -1/T sum_{t: A_t is not empty} log sum_{s in A_t} a_ts,    A_t = {s: (s, t) in A}.

Tokens without links, such as EOS, and pairs without alignments add nothing. The papers take the cross-entropy
between a_t and the even distribution over A_t, which is the same for tokens with one link; the attention mass leaves
open how it is divided among linked tokens. Garg et al. guide one head of the last but one layer, and lambda = 0.05.

Legend: B sentences, S source length, T target length, L links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Passes, Regularizer, States
from deepspeed_nmt.core.parts import MAX_LAYERS, RegularizerConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.registry import Entry

_LEAST = 1e-30
"""Attention mass below which a position has no gradient, so that fp32 holds that of the logarithm."""


class GuidedAlignmentConfig(RegularizerConfig):
    """Settings of guided alignment."""

    weight: float = Field(default=0.05, ge=0.0, description="factor in the loss (lambda); 0 disables it")
    layer: int | None = Field(
        default=None,
        ge=1,
        le=MAX_LAYERS,
        description="decoder layer whose attention is guided, from 1 at the bottom; null: the last but one",
    )

    reads_links: ClassVar[bool] = True


class GuidedAlignment(Regularizer):
    """Negative logarithm of the attention mass on linked source tokens, in pass 0."""

    name = "guided_alignment"

    def __init__(self, config: GuidedAlignmentConfig, vocabulary: Vocabulary) -> None:
        self.weight, self.layer = config.weight, config.layer

    def check_model(self, model: TranslationModel) -> None:
        """Refuse a model whose layer does not hand over its attention."""
        model.attention_layer(self._layer_of(model))

    def request_passes(self, passes: Passes) -> Callable[[States], Tensor]:
        """Request the attention weights, and return the function that computes the loss from those of pass 0."""
        batch, name = passes.batch, passes.request_attention(self._layer_of(passes.model))
        links_L3 = batch.links_L3
        if links_L3 is None:
            links_L3 = batch.sentence_ids_B.new_empty(0, 3)
        return lambda states: batch.weighted(alignment_loss(states[0][name], links_L3)).sum()

    def _layer_of(self, model: TranslationModel) -> int:
        layers = list(model.attention_layers()) or [1]
        return self.layer or layers[-2:][0]


def alignment_loss(attention_BTS: Tensor, links_L3: Tensor) -> Tensor:
    """Compute -sum_t log sum_{s in A_t} a_ts of each sentence, given its number and positions t and s in each link.

    Shape: (B,T,S), int64 (L,3) -> (B,)
    """
    linked_BTS = torch.zeros_like(attention_BTS, dtype=torch.bool)
    linked_BTS[links_L3[:, 0], links_L3[:, 1], links_L3[:, 2]] = True
    mass_BT = attention_BTS.masked_fill(~linked_BTS, 0.0).sum(dim=2)
    return -mass_BT.clamp(min=_LEAST).log().masked_fill(~linked_BTS.any(dim=2), 0.0).sum(dim=1)


ENTRY = Entry("guided_alignment", GuidedAlignmentConfig, GuidedAlignment)
