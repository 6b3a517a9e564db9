"""The Transformer, with the normalisation and initialisation of deep ones.

Vaswani, Shazeer, Parmar, Uszkoreit, Jones, Gomez, Kaiser, Polosukhin: "Attention Is All You Need", 2017.

- Normalisation: post-norm, LN(x + f(x)); pre-norm, x + f(LN(x)), with a final LayerNorm on each stack (Wang, Li,
  Xiao, Zhu, Li, Wong, Chao: "Learning Deep Transformer Models for Machine Translation", 2019); or DeepNorm, LN(alpha
  x + f(x)) (Wang, Ma, Dong, Huang, Zhang, Wei: "DeepNet: Scaling Transformers to 1,000 Layers", 2022). Encoder and
  decoder may be one pre-norm and one post-norm. Others are in :mod:`~deepspeed_nmt.methods.stabilisers`.
- Initialisation: Xavier uniform; or depth-scaled, with the weights of layer l multiplied by 1/sqrt(l) (Zhang, Titov,
  Sennrich: "Improving Deep Transformer with Depth-Scaled Initialization and Merged Attention", 2019, DS-Init with
  alpha = 1).

Legend: B sentences, S source length, T target length, D model width, V vocabulary, R rows = B x beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.description import NotStandardError, StandardTransformer, describe
from deepspeed_nmt.core.model import TOP, Exits, Memory, Rates, SplitDecoder, StackedModel, TranslationModel
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, MAX_LAYERS, MAX_WIDTH, LayerConfig, ModelConfig, Stages
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.segments import Segments, mask_between
from deepspeed_nmt.methods.stabilisers import (
    BASE_LAYERS,
    BY_DEPTH,
    KEEPS_STATE,
    NEEDS_FINAL_NORM,
    PLAIN,
    Norm,
    Transfer,
    make_residual,
    profile,
)
from deepspeed_nmt.native.decoder import NativeDecoder, NativeSplit
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PositionName, Projection, TokenEmbedding, native_ends
from deepspeed_nmt.nn.layers import (
    Activation,
    Context,
    Draw,
    EncoderLayer,
    FeedForward,
    LayerNorm,
    LayerParts,
    MakeDecoderLayer,
    make_decoder_layer,
)
from deepspeed_nmt.nn.stack import LayerOrder, LayerStack
from deepspeed_nmt.registry import Entry, SelfTest

Side = Literal["encoder", "decoder"]


class TransformerShape(ModelConfig):
    """Shape, dropout and initialisation of a Transformer. The defaults are those of BASE."""

    dim: int = Field(default=512, ge=2, le=MAX_WIDTH, description="width of the states (D)")
    ffn_dim: int = Field(
        default=2048, ge=1, le=MAX_INNER_WIDTH, description="inner width of the feed-forward networks"
    )
    heads: int = Field(default=8, ge=1, le=MAX_WIDTH, description="attention heads; must divide dim")
    encoder_layers: int = Field(default=6, ge=1, le=MAX_LAYERS, description="layers of the encoder (N)")
    decoder_layers: int = Field(default=6, ge=1, le=MAX_LAYERS, description="layers of the decoder (M)")
    norm: Norm = Field(
        default="pre",
        description="LayerNorm before the sub-layer (pre) or after (post); deepnorm: post, with a weighted residual; "
        "b2t: post, with the layer's input added before its last norm; admin: post, with a learned weight of the "
        "residual; layernorm_scaling: pre, divided by the root of the layer's number; peri: before and after; "
        "layer_scale: pre, with a learned scale of what is added; completep: pre, with a constant one",
    )
    decoder_norm: Literal["pre", "post"] | None = Field(
        default=None, description="place of the decoder's LayerNorms, if other than that of the encoder's"
    )
    layer_scale: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="start of the scales of norm=layer_scale; 0: every layer begins as the identity; by default 0.1, "
        "in stacks of more than 18 layers 1e-5, and of more than 24 layers 1e-6",
    )
    base_layers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_LAYERS,
        description="depth at which the learning rate was chosen, for norm=completep (B): what a sub-layer adds in a "
        "stack of L layers is multiplied by B/L; by default 6",
    )
    base_dim: int | None = Field(
        default=None,
        ge=2,
        le=MAX_WIDTH,
        description="width at which the learning rate was chosen, for norm=completep (D0): learning rates, weight "
        "decay and eps of Adam follow dim/D0; keep dim/heads; by default dim",
    )
    init: Literal["xavier", "depth_scaled"] = Field(default="xavier", description="initialisation of the layers")
    share_embeddings: Literal["all", "decoder", "none"] = Field(
        default="all",
        description="all: one matrix for source, target and output (if the source has a vocabulary of its own, as "
        "decoder); decoder: one for target and output; none: three",
    )
    activation: Activation = Field(default="relu", description="activation of the feed-forward networks")
    positions: PositionName = Field(
        default="tensor2tensor",
        description="wavelengths of the sinusoidal positions; marian: those of Marian NMT; "
        "fairseq: positions begin at 2; none: no positions",
    )
    output_bias: bool = Field(default=False, description="bias of the projection to the vocabulary")
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0, description="dropout of embeddings and sub-layer outputs")
    attention_dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="dropout of attention weights")
    activation_dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="dropout after the activation")

    packed: ClassVar[bool] = True
    known_norms: ClassVar[frozenset[str]] = frozenset(PLAIN)
    """Values of ``norm`` that the model has a meaning for."""
    learning_fields: ClassVar[frozenset[str]] = frozenset(
        {"layer_scale", "base_dim", "init", "dropout", "attention_dropout", "activation_dropout"}
    )
    shape_fields: ClassVar[frozenset[str]] = frozenset(
        {
            "dim",
            "ffn_dim",
            "heads",
            "norm",
            "base_layers",
            "decoder_norm",
            "share_embeddings",
            "activation",
            "positions",
            "output_bias",
        }
    )
    depth_fields: ClassVar[frozenset[str]] = frozenset({"encoder_layers", "decoder_layers"})

    @model_validator(mode="after")
    def _check(self) -> TransformerShape:
        if self.dim % self.heads:
            divisors = [n for n in range(1, self.dim + 1) if self.dim % n == 0]
            nearest = " or ".join(map(str, sorted(sorted(divisors, key=lambda n: abs(n - self.heads))[:2])))
            raise ValueError(f"heads is {self.heads}, which does not divide dim {self.dim}; use {nearest}")
        if self.norm not in self.known_norms:
            *some, last = [norm for norm in get_args(Norm) if norm in self.known_norms]
            raise ValueError(
                f"norm is {self.norm}, which model.name={self.name} does not have; use {', '.join(some)} or {last}"
            )
        if self.norm in ("deepnorm", "layernorm_scaling", "completep") and self.init != "xavier":
            raise ValueError(
                f"init is {self.init}, but norm={self.norm} is a scaling by depth of its own; set init=xavier"
            )
        if self.norm not in ("pre", "post") and self.decoder_norm is not None:
            raise ValueError(
                f"decoder_norm is {self.decoder_norm}, but norm={self.norm} is for both stacks; remove decoder_norm, "
                "or set norm to pre or post"
            )
        if self.norm != "layer_scale" and self.layer_scale is not None:
            raise ValueError(f"layer_scale is a setting of norm=layer_scale only, and norm is {self.norm}")
        for name in ("base_layers", "base_dim"):
            if self.norm != "completep" and getattr(self, name) is not None:
                raise ValueError(f"{name} is a setting of norm=completep only, and norm is {self.norm}")
        return self

    @override
    def meant(self) -> dict[str, Any]:
        return {**super().meant(), "decoder_norm": self.norms()[1], "base_layers": self.base_layers or BASE_LAYERS}

    def norms(self) -> tuple[Norm, Norm]:
        """Return the places of the LayerNorms of encoder and decoder."""
        return self.norm, self.decoder_norm or self.norm

    def applications(self) -> tuple[int, int]:
        """Return the numbers of layers that encoder and decoder apply (N and M), for constants by depth."""
        return self.encoder_layers, self.decoder_layers

    @override
    def composition_differences(self, other: ModelConfig) -> list[str]:
        differences = super().composition_differences(other)
        if isinstance(other, TransformerShape) and self.norm in BY_DEPTH:
            there, here = ("+".join(map(str, of.applications())) for of in (other, self))
            if there != here:
                differences.append(
                    f"constants of model.norm={self.norm} are for {there} layers there and {here} here"
                )
        return differences

    def custom_layers(self) -> tuple[str, int] | None:
        """Return the setting and number of the decoder layers, all of which are built by ``layer``."""
        return "model.decoder_layers", self.decoder_layers

    def self_attention(self, side: Side) -> Callable[..., MultiHeadAttention]:
        """Return what makes the self-attention of a side's layers, given width, heads and dropout."""
        return MultiHeadAttention

    def exit_stages(self) -> tuple[Stages, Stages] | None:
        """Return the layers of encoder and decoder as stages."""
        return Stages("encoder_layers", self.encoder_layers, 1), Stages("decoder_layers", self.decoder_layers, 1)


class TransformerConfig(TransformerShape):
    """Settings of a Transformer that applies each layer once."""

    name: Literal["transformer"] = "transformer"

    known_norms: ClassVar[frozenset[str]] = frozenset(get_args(Norm))

    @override
    def ways_to_grow(self) -> Sequence[str]:
        keeps_state = {*self.norms()} <= KEEPS_STATE
        return ("stack", "adjacent", "interpolate", "zero") if keeps_state else ("stack", "adjacent", "interpolate")


class StandardLayerConfig(LayerConfig):
    """Standard decoder layers (Vaswani et al. 2017), which have no settings."""

    name: Literal["standard"] = "standard"


# The gradient of a ReLU is discontinuous at 0: rounding differences between engines would change gradients.
SMALL = {"dim": 32, "ffn_dim": 64, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "activation": "gelu"}
"""Shape of the Transformers in self-tests."""


class Transformer(StackedModel):
    """Encoder-decoder Transformer. Built by :func:`build_transformer`."""

    has_exits: ClassVar[bool] = True
    """False if the top is the only exit, because decoder layers read more of the encoder than its top."""
    transfer: Transfer | None = None
    """Rules of CompleteP for the optimizer, if the model has them."""

    def __init__(
        self,
        source_embedding: TokenEmbedding | LearnedEmbedding,
        target_embedding: TokenEmbedding | LearnedEmbedding,
        encoder: LayerStack,
        decoder: LayerStack,
        projection: Projection,
        pad: int,
    ) -> None:
        super().__init__()
        self.source_embedding = source_embedding
        self.target_embedding = target_embedding
        self.encoder = encoder
        self.decoder = decoder
        self.projection = projection
        self.vocab_size = projection.weight.shape[0]
        self.pad = pad
        self.longest_source, self.longest_target = source_embedding.positions, target_embedding.positions

    @property
    @override
    def stages(self) -> tuple[int, int]:
        return (self.encoder.stages, self.decoder.stages) if self.has_exits else super().stages

    @override
    def rates(self) -> Mapping[nn.Parameter, Rates]:
        if self.transfer is None:
            return {}
        exits = (norm for norm in self.decoder.exits.modules() if isinstance(norm, LayerNorm))
        parts = (self.source_embedding, self.target_embedding, self.decoder.final_norm, *exits)
        weights = [p for part in parts if part is not None for p in part.parameters()]
        return self.transfer.rates(self, [*weights, self.projection.weight])

    @override
    def train(self, mode: bool = True) -> Transformer:
        """Set training mode; a model whose added exits are trained runs as in inference, which they learn from."""
        super().train(mode)
        if self.decoder.exits:
            for part in self.children():
                part.eval()
        return self

    @override
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        mask = self.source_mask(source_BS, padded) if segments is None else segments
        embedded_BSD = self.source_embedding(source_BS, segments=segments)
        states = self.encoder(embedded_BSD, Context(mask=mask_between(segments, mask)), exits=exits)
        if len(states) == 1:
            return Memory(states[0], mask)
        return Memory(torch.cat(states), mask.repeat(len(states), 1, 1, 1) if isinstance(mask, Tensor) else mask)

    @override
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        embedded_BTD = self.target_embedding(target_input_BT, segments=segments)
        exits = exits if self.has_exits else None
        states: list[Tensor] = self.decoder(embedded_BTD, memory.context(draw, segments), exits=exits)
        return states

    @override
    def at_exit(self, name: str) -> TranslationModel:
        if name == TOP or not self.has_exits:
            return super().at_exit(name)
        encoder, _, decoder = name.partition("-")
        n, m = (int(part) if part.isascii() and part.isdecimal() else 0 for part in (encoder, decoder))
        if not (1 <= n <= self.encoder.stages and 1 <= m <= self.decoder.stages):
            raise ConfigError(
                f"the exit is '{name}'; use n-m with n from 1 to {self.encoder.stages} stages of the encoder and m "
                f"from 1 to {self.decoder.stages} of the decoder"
            )
        stacks = (self.encoder.until(n), self.decoder.until(m))
        cut = Transformer(self.source_embedding, self.target_embedding, *stacks, self.projection, self.pad)
        return cut.train(self.training)

    @override
    def described(self) -> StandardTransformer:
        if type(self) is not Transformer:
            return super().described()
        source, target = self.source_embedding, self.target_embedding
        if not (isinstance(source, TokenEmbedding) and isinstance(target, TokenEmbedding)):
            raise NotStandardError("its embeddings are those of a BERT, with learned positions")
        if type(self.projection) is not Projection:
            raise NotStandardError("its projection is not that of a standard Transformer")
        fixed = {"source_embedding": source, "target_embedding": target, "projection": self.projection}
        described = describe(fixed, target.scale, target.table, self.encoder, self.decoder)
        if described.relative and target.wavelengths != "none":
            raise NotStandardError("it has both relative and absolute positions")
        return described

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        embedded = self.target_embedding(tokens_R.unsqueeze(1), offset=cache.length)
        (states_R1D,) = self.decoder(embedded, memory.context(), cache.layers)
        logits: Tensor = self.projection(states_R1D.squeeze(1))
        return logits

    @override
    def natively(self, rows: int, beam: int, steps: int, memory: Memory, cache: DecoderCache) -> NativeDecoder | None:
        widest = beam * len(memory.states_BSD)
        ends = native_ends(self.target_embedding, self.projection, cache.length, steps, widest)
        if ends is None or type(self).step is not Transformer.step:
            return None
        bound = self.decoder.bind(memory.context(), cache.layers, widest, beam * steps)
        return None if bound is None else NativeDecoder(bound, *ends, *cache.next(rows, bound))

    @override
    def split(self, stage: int) -> SplitDecoder:
        if not 1 <= stage < self.stages[1]:
            return super().split(stage)
        return _SplitStack(self, stage)


class _SplitStack(SplitDecoder):
    """The decoder of a Transformer, split at an exit."""

    def __init__(self, model: Transformer, stage: int) -> None:
        self._model, self._stage = model, stage
        self._split, self._end = model.decoder.order.stages[stage - 1], model.decoder.applications

    @property
    @override
    def weights(self) -> tuple[int, int, int]:
        lower, upper = (self._model.decoder.weights(*at) for at in ((0, self._split), (self._split, self._end)))
        return lower, upper, self._model.projection.weight.numel()

    @override
    def natively(self, steps: int, memory: Memory, cache: DecoderCache) -> NativeSplit | None:
        model, context, layers = self._model, memory.context(), cache.layers
        ends = native_ends(model.target_embedding, model.projection, 0, cache.length + steps, 1)
        lower = None if ends is None else model.decoder.bind(context, layers, 1, steps, 0, self._stage)
        upper = None if lower is None else model.decoder.bind(context, layers, 1, steps, self._split)
        if ends is None or lower is None or upper is None:
            return None
        return NativeSplit(lower, upper, *ends, cache.next(1, lower)[0])

    @override
    def lower(self, tokens_B: Tensor, positions_B: Tensor, memory: Memory, cache: DecoderCache) -> tuple[Tensor, ...]:
        embedded = self._model.target_embedding(tokens_B.unsqueeze(1), positions_B)
        return self._model.decoder.advance((embedded, embedded), memory.context(), cache.layers, 0, self._split)

    @override
    def predict(self, states: Sequence[Tensor]) -> Tensor:
        return self._project(states, self._stage)

    @override
    def upper(self, states: Sequence[Tensor], memory: Memory, cache: DecoderCache) -> Tensor:
        decoder = self._model.decoder
        states = decoder.advance(states, memory.context(), cache.layers, self._split, self._end)
        return self._project(states, decoder.stages)

    def _project(self, states: Sequence[Tensor], stage: int) -> Tensor:
        logits: Tensor = self._model.projection(self._model.decoder.read(states[0], stage).squeeze(1))
        return logits


def build_transformer(
    config: TransformerShape,
    vocabulary: Vocabulary,
    make_layer: MakeDecoderLayer = make_decoder_layer,
    orders: tuple[LayerOrder | None, LayerOrder | None] = (None, None),
) -> Transformer:
    """Build a Transformer, initialised from torch's global generator; see :func:`build_stacks`."""
    source, target, projection = build_embeddings(config, vocabulary)
    encoder, decoder = build_stacks(config, make_layer, orders)
    model = Transformer(source, target, encoder, decoder, projection, vocabulary.pad)
    if config.norm == "completep":
        base = config.base_layers or BASE_LAYERS
        depths = (config.encoder_layers / base, config.decoder_layers / base)
        model.transfer = Transfer(config.dim / (config.base_dim or config.dim), depths)
        assert isinstance(decoder.final_norm, LayerNorm)
        nn.init.constant_(decoder.final_norm.weight, model.transfer.width**-0.5)
    if config.norm == "admin" and not projection.weight.is_meta:
        profile(model, vocabulary.source.size, vocabulary.size)
    return model


def build_embeddings(
    config: TransformerShape, vocabulary: Vocabulary
) -> tuple[TokenEmbedding, TokenEmbedding, Projection]:
    """Build the embeddings of source and target, and the projection, which share matrices as the settings say."""
    target_weight = _embedding(vocabulary, config.dim)
    all_shared = config.share_embeddings == "all" and vocabulary.own_source is None
    source_weight = target_weight if all_shared else _embedding(vocabulary.source, config.dim)
    output_weight = _embedding(vocabulary, config.dim) if config.share_embeddings == "none" else target_weight
    source, target = (
        TokenEmbedding(weight, config.dropout, config.positions) for weight in (source_weight, target_weight)
    )
    bias = nn.Parameter(torch.zeros(vocabulary.size)) if config.output_bias else None
    return source, target, Projection(output_weight, bias)


def build_stacks(
    config: TransformerShape,
    make_layer: MakeDecoderLayer = make_decoder_layer,
    orders: tuple[LayerOrder | None, LayerOrder | None] = (None, None),
) -> tuple[LayerStack, LayerStack]:
    """Build freshly initialised stacks of encoder and decoder layers; the latter are made by ``make_layer``.

    ``orders`` are those in which encoder and decoder apply their layers; None: each layer once.
    """
    n, m = config.encoder_layers, config.decoder_layers
    encoder = [EncoderLayer(layer_parts(config, "encoder", number)) for number in range(1, n + 1)]
    decoder = [make_layer(number, layer_parts(config, "decoder", number)) for number in range(1, m + 1)]
    initialise_layers(encoder, config, "encoder")
    initialise_layers(decoder, config, "decoder")
    final_norms = [LayerNorm(config.dim) if norm in NEEDS_FINAL_NORM else None for norm in config.norms()]
    return LayerStack(encoder, orders[0], final_norms[0]), LayerStack(decoder, orders[1], final_norms[1])


def initialise_layers(layers: Sequence[nn.Module], config: TransformerShape, side: Side) -> None:
    """Initialise the layers of a stack."""
    _, beta = _deepnorm(config, side)
    for number, layer in enumerate(layers, 1):
        _initialise(layer, beta, 1.0 / math.sqrt(number) if config.init == "depth_scaled" else 1.0)


def _embedding(vocabulary: Vocabulary, dim: int) -> nn.Parameter:
    weight_VD = torch.empty(vocabulary.size, dim).normal_(0.0, dim**-0.5)
    weight_VD[vocabulary.pad] = 0.0
    return nn.Parameter(weight_VD)


def layer_parts(config: TransformerShape, side: Side, number: int = 1) -> LayerParts:
    """Return the makers of the parts of layer ``number``, from 1."""
    alpha, _ = _deepnorm(config, side)
    norm = config.norms()[side == "decoder"]
    depth = config.applications()[side == "decoder"]
    return LayerParts(
        attention=lambda kind=MultiHeadAttention: kind(config.dim, config.heads, config.attention_dropout),
        feed_forward=lambda: FeedForward(config.dim, config.ffn_dim, config.activation, config.activation_dropout),
        residual=lambda: make_residual(
            norm,
            config.dim,
            config.dropout,
            number,
            depth,
            alpha=alpha,
            start=config.layer_scale,
            base_layers=config.base_layers or BASE_LAYERS,
        ),
        self_attention=lambda: config.self_attention(side)(config.dim, config.heads, config.attention_dropout),
    )


def _deepnorm(config: TransformerShape, side: Side) -> tuple[float, float]:
    """Return DeepNorm's residual weight alpha and initialisation gain beta (Wang et al. 2022, table 1).

    Both are 1 for other kinds of normalisation.
    """
    if config.norm != "deepnorm":
        return 1.0, 1.0
    n, m = config.applications()
    if side == "encoder":
        return 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    return (3 * m) ** 0.25, (12 * m) ** -0.25


def _initialise(layer: nn.Module, beta: float, depth_scale: float) -> None:
    """Initialise matrices with Xavier uniform times ``depth_scale``, and biases with zeros.

    All but those of queries and keys are multiplied by DeepNorm's ``beta``, too. Those of queries, keys and values
    have a gain of 1/sqrt(2), as parts of one D x 3D matrix would have.
    """
    for name, module in layer.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        kind = name.rsplit(".", 1)[-1]
        gain = 1.0 / math.sqrt(2.0) if kind in ("q_proj", "k_proj", "v_proj") else 1.0
        if kind not in ("q_proj", "k_proj"):
            gain *= beta
        nn.init.xavier_uniform_(module.weight, gain * depth_scale)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


ENTRY = Entry(
    "transformer",
    TransformerConfig,
    build_transformer,
    SelfTest("vanilla", {"model": {"name": "transformer", **SMALL}}),
)
STANDARD_LAYER = Entry(
    "standard", StandardLayerConfig, lambda config, number, parts: make_decoder_layer(number, parts)
)
