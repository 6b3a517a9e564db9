"""Depth growing: a trained Transformer is frozen, and a module on top of it is trained.

Wu, Wang, Xia, Tian, Gao, Qin, Lai, Liu: "Depth Growing for Neural Machine Translation", 2019 (arXiv:1907.01968),
equations 1 to 3.

Stage 1 trains the bottom module, a Transformer with encoder enc1 and decoder dec1. Stage 2 trains the top module,
enc2 and dec2:

    h1 = enc1(x),             h2 = enc2(r(x) + h1)            (eq. 1)
    s1 = dec1(y_<t, h1)                                       (eq. 2)
    s2 = dec2(r(y_<t) + s1, h2)                               (eq. 3)

x and y are the embedded tokens (scaled, with positions and dropout). The second argument of a decoder is the memory
of its cross-attention. r is a LayerNorm, one for each side, that is trained with the top.

Embeddings, enc1, dec1 and the output projection are frozen: they have neither gradients nor optimizer state. The
bottom runs without autograd, except for dec1 if it attends to r(x), which is trained. A pre-norm bottom keeps its
final LayerNorm, and the top has its own.

The model has two exits, which share the output projection: ``shallow`` (enc1 and dec1, the bottom itself) and
``deep``. Stage 2 minimises the loss of the deep exit only, and does not compute shallow logits.

The equations contain no r, which comes from the authors' code; ``residual_norm=false`` replaces it by the identity.
In their code dec1 below the top attends to h1 + r(x), as with ``attend=h1_plus_input``; the shallow exit attends to
h1 in either case. docs/papers/depth-growing.md has all deviations.

Legend: B sentences, S source length, T target length, D model width, R rows = B x beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import TOP, Exits, Memory, SplitDecoder, TranslationModel
from deepspeed_nmt.core.parts import MAX_LAYERS, Parts, Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.kernels.segments import Segments, mask_between
from deepspeed_nmt.methods.transformer import (
    SMALL,
    Transformer,
    TransformerConfig,
    TransformerShape,
    build_stacks,
    build_transformer,
)
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.layers import Context, Draw, LayerNorm, MakeDecoderLayer, make_decoder_layer
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest


class DepthGrowingConfig(TransformerShape):
    """Shape of the bottom, which must equal that of the run it is loaded from, and depth of the top."""

    name: Literal["depth_growing"] = "depth_growing"
    top_encoder_layers: int = Field(default=2, ge=1, le=MAX_LAYERS, description="encoder layers of the top")
    top_decoder_layers: int = Field(default=2, ge=1, le=MAX_LAYERS, description="decoder layers of the top")
    residual_norm: bool = Field(
        default=True, description="LayerNorm on the embeddings that enter the top (r), as in the authors' code"
    )
    frozen_dropout: bool = Field(default=True, description="keep dropout on in the frozen bottom in training")
    attend: Literal["h1", "h1_plus_input"] = Field(
        default="h1",
        description="states to which the bottom's decoder attends below the top: those of the bottom's encoder (the "
        "paper), or their sum with the normalised embeddings (the authors' code)",
    )

    named_exits: ClassVar[tuple[str, ...]] = ("shallow", "deep")
    grown_prefix: ClassVar[str | None] = "bottom."
    learning_fields: ClassVar[frozenset[str]] = TransformerShape.learning_fields | {"frozen_dropout"}

    def custom_layers(self) -> tuple[str, int] | None:
        """Return the setting and number of the top's decoder layers; those of the bottom are standard."""
        return "model.top_decoder_layers", self.top_decoder_layers

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """Return None, because stage 2 trains the deep exit only."""
        return None

    def check_bottom(self, bottom: Parts, where: str) -> None:
        """Refuse all but Transformers of the same shape whose decoder layers all have cross-attention."""
        if not isinstance(bottom.model, TransformerConfig):
            raise ConfigError(
                f"{where} has model.name={bottom.model.name}, which cannot be grown; give --grow-from a run with "
                "model.name=transformer"
            )
        if not all(bottom.layer.attends_to_source(n) for n in range(1, bottom.model.decoder_layers + 1)):
            raise ConfigError(
                f"decoder layers of {where} have no cross-attention (layer.name={bottom.layer.name}), so it cannot "
                "be grown; give --grow-from another run"
            )
        self.check_shape_of(bottom.model, where, self.shape_fields | self.depth_fields)


class DepthGrowing(TranslationModel):
    """Frozen Transformer (enc1, dec1) with a trained module on top (enc2, dec2); see :func:`build_depth_growing`."""

    not_standard = (
        "its deep exit runs two models, and the upper one reads the embedded tokens again; the shallow exit can be "
        "exported (--exit shallow)"
    )

    def __init__(
        self, bottom: Transformer, top_encoder: LayerStack, top_decoder: LayerStack, config: DepthGrowingConfig
    ) -> None:
        super().__init__()
        self.config = config
        self.bottom = bottom.requires_grad_(False)
        self.top_encoder = top_encoder
        self.top_decoder = top_decoder
        self.source_norm, self.target_norm = (  # r
            LayerNorm(config.dim) if config.residual_norm else nn.Identity() for _ in range(2)
        )
        self.projection = bottom.projection
        self.vocab_size = bottom.vocab_size
        self.pad = bottom.pad

    @property
    @override
    def stacks(self) -> tuple[list[LayerStack], list[LayerStack]]:
        decoders = [self.top_decoder]
        if self.config.attend == "h1_plus_input" and self.config.residual_norm:
            decoders.insert(0, self.bottom.decoder)  # the gradient of r(x) passes through it
        return [self.top_encoder], decoders

    def train(self, mode: bool = True) -> DepthGrowing:
        """Set training mode; the bottom enters it only if it keeps dropout."""
        super().train(mode)
        self.bottom.train(mode and self.config.frozen_dropout)
        return self

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded) if segments is None else segments
        context = Context(mask=mask_between(segments, mask))
        with torch.no_grad():
            embedded_BSD = self.bottom.source_embedding(source_BS, segments=segments)
            (below_BSD,) = self.bottom.encoder(embedded_BSD, context)
        entry_BSD = self.source_norm(embedded_BSD) + below_BSD
        (states_BSD,) = self.top_encoder(entry_BSD, context)
        return Memory(states_BSD, mask, below_BSD if self.config.attend == "h1" else entry_BSD)

    @override
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        assert memory.below_BSD is not None
        context = memory.context(draw, segments)
        with torch.set_grad_enabled(torch.is_grad_enabled() and memory.below_BSD.requires_grad):
            embedded_BTD = self.bottom.target_embedding(target_input_BT, segments=segments)
            (below_BTD,) = self.bottom.decoder(embedded_BTD, replace(context, memory_BSD=memory.below_BSD))
        states: list[Tensor] = self.top_decoder(self.target_norm(embedded_BTD) + below_BTD, context)
        return states

    @override
    def begin(self) -> DecoderCache:
        return DecoderCache(self.bottom.decoder.order.indices, self.top_decoder.order.indices)

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        parts = _SplitModules(self)
        return parts.upper(parts.lower(tokens_R, cache.length, memory, cache), memory, cache)

    @override
    def split(self, stage: int) -> SplitDecoder:
        if stage != (stages := self.bottom.stages[1]):
            raise ConfigError(
                f"{option('draft_layers')} is {stage}, but a grown model drafts by its shallow exit; use {stages}"
            )
        return _SplitModules(self)

    @override
    def at_exit(self, name: str) -> TranslationModel:
        if name in (TOP, "deep"):
            return self
        if name == "shallow":
            return self.bottom
        raise ConfigError(f"the exit is '{name}'; use shallow or deep")


class _SplitModules(SplitDecoder):
    """The two decoders of a grown model."""

    def __init__(self, model: DepthGrowing) -> None:
        self._model, self._split = model, model.bottom.decoder.applications

    @property
    @override
    def weights(self) -> tuple[int, int, int]:
        stacks = self._model.bottom.decoder, self._model.top_decoder
        lower, upper = (stack.weights(0, stack.applications) for stack in stacks)
        return lower, upper, self._model.projection.weight.numel()

    @override
    def lower(
        self, tokens_B: Tensor, positions_B: Tensor | int, memory: Memory, cache: DecoderCache
    ) -> tuple[Tensor, ...]:
        model, context = self._model, replace(memory.context(), memory_BSD=memory.below_BSD)
        embedded_B1D = model.bottom.target_embedding(tokens_B.unsqueeze(1), positions_B)
        (below_B1D,) = model.bottom.decoder(embedded_B1D, context, cache.layers[: self._split])
        return below_B1D, embedded_B1D

    @override
    def predict(self, states: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self._model.projection(states[0].squeeze(1))
        return logits

    @override
    def upper(self, states: Sequence[Tensor], memory: Memory, cache: DecoderCache) -> Tensor:
        model, (below_R1D, embedded_R1D) = self._model, states
        entry_R1D = model.target_norm(embedded_R1D) + below_R1D
        return self.predict(model.top_decoder(entry_R1D, memory.context(), cache.layers[self._split :]))


def build_depth_growing(
    config: DepthGrowingConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer = make_decoder_layer
) -> DepthGrowing:
    """Build a top, with the decoder layers of ``make_layer``, on a standard bottom whose weights are to be loaded."""
    bottom = build_transformer(config, vocabulary)
    top = config.model_copy(
        update={"encoder_layers": config.top_encoder_layers, "decoder_layers": config.top_decoder_layers}
    )
    return DepthGrowing(bottom, *build_stacks(top, make_layer), config)


ENTRY = Entry(
    "depth_growing",
    DepthGrowingConfig,
    build_depth_growing,
    SelfTest(
        "growing",
        {
            "model": {
                "name": "depth_growing",
                **SMALL,
                "encoder_layers": 1,
                "decoder_layers": 1,
                "top_encoder_layers": 1,
                "top_decoder_layers": 1,
                "norm": "post",
                "attend": "h1_plus_input",
            }
        },
    ),
)
