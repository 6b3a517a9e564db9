"""A toy model: bags of words.

With m the mean of the source's embeddings, and c_t that of the target's up to position t, the decoder state is

    h_t = tanh(W (m + c_t) + b).

The file shows what a model needs: a configuration class, the methods of :class:`TranslationModel`, a build function,
a case for `selftest`, and the registry entry.

Legend: B sentences, S source length, T target length, D model width, R rows = B x W, W beam
width, P positions so far.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import Exits, Memory, TranslationModel
from deepspeed_nmt.core.parts import ModelConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.nn.cache import DecoderCache, KeysValues
from deepspeed_nmt.nn.embedding import Projection, TokenEmbedding
from deepspeed_nmt.nn.layers import Draw, MakeDecoderLayer
from deepspeed_nmt.registry import Entry, SelfTest


class ToyModelConfig(ModelConfig):
    """Settings of the toy model."""

    name: Literal["toy"] = "toy"
    dim: int = Field(default=16, ge=2, description="D, model width")


class ToyModel(TranslationModel):
    """Bags of words. Built by :func:`build_toy_model`.

    Args:
        config: settings.
        vocabulary: vocabulary of both sides.
    """

    def __init__(self, config: ToyModelConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(nn.Parameter(torch.empty(vocabulary.size, config.dim).normal_(0, 0.1)), 0.0)
        self.mix = nn.Linear(config.dim, config.dim)
        self.projection = Projection(self.embedding.weight)
        self.vocab_size, self.pad = vocabulary.size, vocabulary.pad

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        real_BS1 = source_BS.ne(self.pad).unsqueeze(2)
        bag_BD = (self.embedding(source_BS) * real_BS1).sum(dim=1) / real_BS1.sum(dim=1)
        return Memory(bag_BD.unsqueeze(1), self.source_mask(source_BS, padded))

    @override
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        embedded_BTD = self.embedding(target_input_BT)
        count_T1 = torch.arange(1, embedded_BTD.shape[1] + 1, device=embedded_BTD.device).unsqueeze(1)
        return [torch.tanh(self.mix(memory.states_BSD + embedded_BTD.cumsum(dim=1) / count_T1))]

    @override
    def begin(self) -> DecoderCache:
        return DecoderCache([0])

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        new_R1D = self.embedding(tokens_R.unsqueeze(1), offset=cache.length)
        new_R11D = new_R1D.unsqueeze(1)  # The cache stores heads; here there is one.
        seen, mask = cache.layers[0].append(KeysValues(new_R11D, new_R11D))
        sentences = seen.keys.shape[0]
        width = tokens_R.shape[0] // sentences
        visible_BWP = torch.ones_like(seen.keys[..., 0]).expand(-1, width, -1) if mask is None else mask.squeeze(1)
        visible_BWP = visible_BWP.to(seen.keys.dtype)
        mean_BWD = visible_BWP @ seen.keys.squeeze(1) / visible_BWP.sum(dim=2, keepdim=True)
        states_BWD = torch.tanh(self.mix(memory.states_BSD + mean_BWD))
        logits: Tensor = self.projection(states_BWD.flatten(0, 1))
        return logits


def build_toy_model(config: ToyModelConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer) -> ToyModel:
    """Build a freshly initialised toy model. It has no layers, so ``make_layer`` is not used."""
    return ToyModel(config, vocabulary)


ENTRY = Entry("toy", ToyModelConfig, build_toy_model, SelfTest("toy", {"model": {"name": "toy"}}))
