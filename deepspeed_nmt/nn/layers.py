"""Encoder and decoder layers, and their sub-layers.

Legend: B sentences, S source length, T target length, D model width, F inner width, R rows = B x beam, P passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from deepspeed_nmt import randomness
from deepspeed_nmt.kernels import torch_ops
from deepspeed_nmt.kernels.choice import UsesKernels
from deepspeed_nmt.kernels.segments import Mask
from deepspeed_nmt.native.decoder import AroundSublayer, BoundLayers, NativeLayer, Past, Source
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues, LayerCache
from deepspeed_nmt.nn.linear import Linear, PackedWeights, Product, Sliceable, UsesPackedWeights

NormStyle = Literal["pre", "post", "deepnorm"]
Activation = Literal["relu", "gelu", "swish"]
_LONGEST_WHOLE = 512
"""Positions of whole sentences up to which a layer is native: its memory and time grow with their square."""


class LayerNorm(nn.Module, UsesKernels):
    """Layer normalisation (Ba et al. 2016) with statistics in fp32."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise. Shape: (..., D) -> (..., D)."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)


class Dropout(nn.Module):
    """Dropout whose masks are cheap on a CPU."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training. Shape: any -> the same."""
        return torch_ops.dropout(x, self.p if self.training else 0.0)


class LowRank(nn.Module):
    """x + U V x of rank R; U is zero at first."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        # No linear layers, which tensor parallelism would slice.
        self.down_RD = nn.Parameter(torch.empty(rank, dim).normal_(0.0, dim**-0.5))  # V
        self.up_DR = nn.Parameter(torch.zeros(dim, rank))  # U

    def forward(self, x: Tensor) -> Tensor:
        """Map. Shape: (..., D) -> (..., D)."""
        return x + (x @ self.down_RD.t()) @ self.up_DR.t()


class FeedForward(nn.Module, UsesKernels, Sliceable):
    """max(0, x W1 + b1) W2 + b2 (Vaswani et al. 2017, eq. 2), or with GELU or swish; dropout of the inner units."""

    def __init__(self, dim: int, ffn_dim: int, activation: Activation = "relu", dropout_p: float = 0.0) -> None:
        super().__init__()
        self.up_proj = Linear(dim, ffn_dim)
        self.down_proj = Linear(ffn_dim, dim)
        self.activation = activation
        self.dropout_p = dropout_p

    def forward(self, x: Tensor) -> Product:
        """Apply the network. Shape: (..., D) -> (..., D)."""
        return self.down_proj.product(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """Compute the outputs of the inner units. Shape: (..., D) -> (..., F)."""
        x, p = self.ranks.copy(x), self.dropout_p if self.training else 0.0
        with self.ranks.drawing(p):
            if self.activation == "swish":  # has no fused kernel: only imported models have it
                return torch_ops.dropout(F.silu(self.up_proj(x)), p)
            operation = f"bias_{self.activation}_dropout"
            product, bias = self.up_proj.product(x, operation)
            activate: Callable[..., Tensor] = getattr(self.kernels, operation)
            return activate(product, bias, p)


Sublayer = Callable[[Tensor], Tensor | Product]
"""Attention or a feed-forward network, as a function of its input (..., D), which returns (..., D)."""


class Residual(nn.Module, UsesKernels):
    """The residual connection around a sub-layer f.

    - pre:      x + dropout(f(norm(x)))
    - post:     norm(x + dropout(f(x)))
    - deepnorm: norm(alpha x + dropout(f(x)))   (Wang et al. 2022)

    Attributes:
        not_standard: why a layer with it is none that other programs know; empty if it is one.
        watch: called with every output of the sub-layer, before dropout; None: not called.
    """

    not_standard: ClassVar[str] = ""

    def __init__(self, dim: int, style: NormStyle, dropout_p: float, alpha: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        assert style == "deepnorm" or alpha == 1.0
        self.norm = LayerNorm(dim, eps)
        self.dropout_p = dropout_p
        self.style = style
        self.alpha = alpha
        self.watch: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor, sublayer: Sublayer, onto: Tensor | None = None) -> Tensor:
        """Apply the sub-layer within the connection, whose residual branch is ``onto``, by default ``x``.

        The bias of a :class:`Product` that ``sublayer`` returns is added in the kernel of the sum.

        Shape: (..., D) -> (..., D)
        """
        kernels, eps, p = self.kernels, self.norm.eps, self.dropout_p if self.training else 0.0
        weight, norm_bias = self.norm_weights()
        branch = x if onto is None else onto
        if self.style == "pre" and onto is None:
            branch, x = kernels.branch_layer_norm(x, weight, norm_bias, eps)
        elif self.style == "pre":
            x = kernels.layer_norm(x, weight, norm_bias, eps)
        value, bias = self.output_of(sublayer(x))
        if self.watch is not None:
            self.watch(value if bias is None else value + bias)
        if self.style == "pre":
            return kernels.bias_dropout_add(value, bias, branch, p)
        return kernels.bias_dropout_add_layer_norm(value, bias, branch, weight, norm_bias, p, self.alpha, eps)[1]

    def norm_weights(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the LayerNorm, (D) each."""
        return self.norm.weight, self.norm.bias

    def output_of(self, output: Tensor | Product) -> tuple[Tensor, Tensor | None]:
        """Return what is added to the residual branch, and its bias. Shape: (..., D) -> (..., D), (D)."""
        return (output.value, output.bias) if isinstance(output, Product) else (output, None)

    def branch_of(self, x: Tensor, bottom: Tensor) -> Tensor | None:
        """Return the residual branch around the last sub-layer of a layer; None if it is ``x``, its input.

        ``bottom`` is the input of the layer. Shape: (..., D) -> (..., D)
        """
        return None

    def fold(self, weights: dict[str, Tensor], own: str, output: str) -> None:
        """Multiply its scales into weights of its layer, in place, so that it is pre-norm or post-norm without them.

        ``own`` is its name within the layer, ``output`` that of the last product of its sub-layer.
        """


@dataclass(frozen=True)
class Draw:
    """The numbers that determine the random choices of layers: the same on every rank, and in recomputation.

    ``passes`` are those over the same sentences whose rows, in equal blocks, make up the batch. ``micro_batch`` is
    the number of the micro-batch within the update on its rank, from 0.
    """

    seed: int
    update: int
    passes: tuple[int, ...] = (0,)
    micro_batch: int = 0

    def uniform(self, purpose: int, *key: int) -> list[float]:
        """Draw a number in [0, 1) for each pass, a function of (seed, purpose, update, pass, *key)."""
        return [randomness.uniform(self.seed, purpose, self.update, number, *key) for number in self.passes]


@dataclass(frozen=True)
class Context:
    """The input that all layers of a stack share.

    Attributes:
        mask: source positions that attention sees: bool (B,1,1,S), True for those that are not padding; or those of
            the same sentence in packed rows; None for all. In an encoder it masks self-attention, in a decoder
            cross-attention.
        memory_BSD: the encoder's states, for a decoder.
        draw: determines random choices; in training, layers that make such need it.
        target_mask: the same for a decoder's self-attention; in the padded layout None if it is causal.
        kept: indices of the passes whose rows attend to the source in a layer; None if it has not chosen them yet.
        source: keys and values that a layer projects ``memory_BSD`` to, for all its applications; None if each
            application projects them.
        record: the layers whose attention weights a stack is to record; None for none.
        weights: receives the attention weights of the layer that is applied; None if they are not recorded.
        embedded_BTD: the embedded target, for decoder layers that read it again; None for others.
    """

    mask: Mask = None
    memory_BSD: Tensor | None = None
    draw: Draw | None = None
    target_mask: Mask = None
    kept: tuple[int, ...] | None = None
    source: KeysValues | None = None
    record: AttentionRecord | None = None
    weights: list[Tensor] | None = None
    embedded_BTD: Tensor | None = None

    def of_passes(self, kept: Sequence[int]) -> Context:
        """Return the context of the rows of some of the passes, given by their indices, without a draw."""
        assert self.memory_BSD is not None and self.draw is not None
        count, source = len(self.draw.passes), self.source
        if source is not None:
            source = KeysValues(*(select_blocks(x, count, kept) for x in (source.keys, source.values)))
        mask = select_blocks(self.mask, count, kept) if isinstance(self.mask, Tensor) else self.mask
        return Context(mask, select_blocks(self.memory_BSD, count, kept), source=source)


def select_blocks(x: Tensor, count: int, kept: Sequence[int]) -> Tensor:
    """Select some of ``count`` equal blocks of rows; a view if adjacent. Shape: (P B, ...) -> (fewer, ...)."""
    rows = x.shape[0] // count
    if list(kept) == list(range(kept[0], kept[-1] + 1)):
        return x[kept[0] * rows : (kept[-1] + 1) * rows]
    return torch.cat([x[index * rows : (index + 1) * rows] for index in kept])


class AttentionRecord:
    """Weights of the cross-attention of some decoder layers, with their gradient; those of its newest application.

    They are :meth:`MultiHeadAttention.weights`: the mean of the heads, a row for each sentence in either layout.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.layers = frozenset(layers)
        self.weights: dict[nn.Module, Tensor] = {}


class EncoderLayer(nn.Module, UsesPackedWeights):
    """Self-attention, then feed-forward, each within a residual connection."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.self_attention = (parts.self_attention or parts.attention)()
        self.self_residual = parts.residual()
        self.feed_forward = parts.feed_forward()
        self.feed_forward_residual = parts.residual()

    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Encode. An encoder caches nothing. Shape: (B,S,D) -> (B,S,D)."""
        assert cache is None
        if (step := _whole_step(self, x_BSD, context)) is not None:
            assert isinstance(context.mask, Tensor | None)
            return step.whole(x_BSD, context, context.mask)
        bottom_BSD, last = x_BSD, self.feed_forward_residual
        x_BSD = self.self_residual(x_BSD, lambda h: self.self_attention(h, h, context.mask))
        x_BSD = last(x_BSD, self.feed_forward, last.branch_of(x_BSD, bottom_BSD))
        return x_BSD

    def in_inference(self) -> EncoderLayer | None:
        """Return this layer. A class derived from it computes something else."""
        return self if type(self) is EncoderLayer else None


class DecoderBlock(nn.Module):
    """Base of decoder layers, whose sub-layers can be observed; a layer may lack some of them.

    Attributes:
        always_attends: False if the layer may skip its cross-attention in training.
    """

    always_attends: ClassVar[bool] = True
    cross_attention: MultiHeadAttention | None
    self_residual: Residual | None
    cross_residual: Residual | None
    feed_forward_residual: Residual | None

    def set_drop_ratio(self, ratio: float) -> None:
        """Set the probability of skipping cross-attention in training, if the layer adapts it."""

    def cross(
        self, x_BTD: Tensor, context: Context, cache: LayerCache | None, onto_BTD: Tensor | None = None
    ) -> Tensor:
        """Apply cross-attention, if there is any, within its residual connection; shapes as in a decoder's layer."""
        attention = self.cross_attention
        if attention is None or self.cross_residual is None:
            return x_BTD
        memory = context.memory_BSD if context.source is None else context.source
        if cache is not None:
            memory = cache.source.of(attention.project, context.memory_BSD)
        assert memory is not None
        if context.weights is not None and not isinstance(memory, KeysValues):
            memory = attention.project(memory)

        def attend(h_BTD: Tensor) -> Product:
            if context.weights is not None:
                context.weights.append(attention.weights(h_BTD, memory, context.mask))
            return self.attend_to_source(h_BTD, memory, context, cache)

        crossed: Tensor = self.cross_residual(x_BTD, attend, onto_BTD)
        return crossed

    def attend_to_source(
        self, h_BTD: Tensor, memory: Tensor | KeysValues, context: Context, cache: LayerCache | None
    ) -> Product:
        """Attend from the input of cross-attention to the source's states, or their keys and values."""
        assert self.cross_attention is not None
        product: Product = self.cross_attention(h_BTD, memory, context.mask)
        return product

    def choose(self, context: Context) -> Context:
        """Return the context with the layer's random choices in training, which compiled code cannot make."""
        return context

    def project_source(self, context: Context) -> KeysValues | None:
        """Project the source for all applications of the layer; None if none of them attends to it."""
        assert context.memory_BSD is not None
        return None if self.cross_attention is None else self.cross_attention.project(context.memory_BSD)

    def in_inference(self) -> DecoderLayer | None:
        """Return the standard layer with the same weights that computes the same in inference; None if none does."""
        return None


class DecoderLayer(DecoderBlock, UsesPackedWeights):
    """Causal self-attention, cross-attention if there is one, feed-forward, each within a residual connection."""

    def __init__(
        self,
        self_attention: MultiHeadAttention,
        self_residual: Residual,
        cross_attention: MultiHeadAttention | None,
        cross_residual: Residual | None,
        feed_forward: FeedForward,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        self.self_attention = self_attention
        self.self_residual: Residual = self_residual
        self.cross_attention = cross_attention
        self.cross_residual = cross_residual
        self.feed_forward = feed_forward
        self.feed_forward_residual: Residual = feed_forward_residual

    @classmethod
    def of(cls, parts: LayerParts, crosses: bool = True) -> Self:
        """Make a layer of a model's parts, with cross-attention or without."""
        return cls(
            (parts.self_attention or parts.attention)(),
            parts.residual(),
            parts.attention() if crosses else None,
            parts.residual() if crosses else None,
            parts.feed_forward(),
            parts.residual(),
        )

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Decode whole sentences, (B,T,D) -> (B,T,D), or with ``cache`` the next positions, (R,1,D) -> (R,1,D)."""
        if cache is not None and (step := native_step(self, x_BTD.shape[0])) is not None:
            return decode_natively([step], x_BTD, context, [cache])
        if cache is None and (step := _whole_step(self, x_BTD, context)) is not None:
            length = x_BTD.shape[1]
            return step.whole(x_BTD, context, x_BTD.new_ones(length, length, dtype=torch.bool).tril())
        bottom_BTD, last = x_BTD, self.feed_forward_residual
        x_BTD = self.self_residual(x_BTD, lambda h: self.self_attention(h, h, context.target_mask, True, cache))
        x_BTD = self.cross(x_BTD, context, cache)
        x_BTD = last(x_BTD, self.feed_forward, last.branch_of(x_BTD, bottom_BTD))
        return x_BTD

    def in_inference(self) -> DecoderLayer | None:
        """Return this layer. A class derived from it computes something else unless it says otherwise."""
        return self if type(self) is DecoderLayer else None


def native_step(layer: EncoderLayer | DecoderLayer, rows: int) -> NativeStep | None:
    """Return the native step of a standard layer with packed weights; None if there is none for so many rows."""
    packed = layer.packed
    if packed is None or packed.native is None or layer._forward_hooks or layer._forward_pre_hooks:
        return None
    if layer not in packed.steps:
        standard = layer.in_inference()
        packed.steps[layer] = None if standard is None or not _is_standard(standard) else NativeStep(standard, packed)
    step: NativeStep | None = packed.steps[layer]
    return step if step is not None and packed.steps_natively(rows, step.largest) else None


def _whole_step(layer: EncoderLayer | DecoderLayer, x_BTD: Tensor, context: Context) -> NativeStep | None:
    """Return the native step for whole sentences; None if there is none, or hooks look at a part of the layer."""
    is_plain = context.target_mask is None and context.weights is None and isinstance(context.mask, Tensor | None)
    if layer.packed is None or layer.training or not is_plain or x_BTD.shape[1] > _LONGEST_WHOLE:
        return None
    if any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return None
    return native_step(layer, x_BTD.shape[0] * x_BTD.shape[1])


def _is_standard(layer: EncoderLayer | DecoderLayer) -> bool:
    """Return True if all parts of a layer have exactly the classes whose arithmetic :class:`NativeStep` repeats."""
    kinds = (EncoderLayer, DecoderLayer, MultiHeadAttention, FeedForward, Residual, LayerNorm, Linear)
    parts = list(layer.modules())
    widths = {part.head_dim for part in parts if isinstance(part, MultiHeadAttention)}
    dtypes = {weight.dtype for weight in layer.parameters()}
    is_plain = all(type(part) in kinds and is_bare(part) for part in parts)
    return is_plain and len(widths) == 1 and dtypes == {torch.float32}


def is_bare(module: nn.Module) -> bool:
    """Return True if nothing but its class says what a module computes, and nobody looks at it by a hook."""
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


class NativeStep:
    """Weights and caches of a standard layer, as native code reads them; see :func:`decode_natively`.

    Attributes:
        largest: elements of the largest weight.
        norms: what native code needs of LayerNorms that follow the layer; None if they are not standard.
    """

    def __init__(self, layer: EncoderLayer | DecoderLayer, weights: PackedWeights) -> None:
        self.norms: dict[LayerNorm, AroundSublayer | None] = {}
        own = layer.self_attention
        self.largest = layer.feed_forward.up_proj.weight.numel()
        self._layer, self._weights = layer, weights
        self._head_dim, self._heads = own.head_dim, own.q_proj.out_features // own.head_dim
        self._cross = layer.cross_attention if isinstance(layer, DecoderLayer) else None

    def reserve(self, rows: int, cache: LayerCache, like: Tensor) -> Tensor:
        """Make room in the cache for the next position of each hypothesis; see :meth:`LayerCache.reserve`."""
        return cache.reserve(rows, self._heads, self._head_dim, like)

    def reserve_positions(self, more: int, sentences: int, cache: LayerCache, like: Tensor) -> Tensor:
        """Make room in the cache for so many positions; see :meth:`LayerCache.reserve_positions`."""
        return cache.reserve_positions(more, sentences, self._heads, self._head_dim, like)

    def source(self, context: Context, cache: LayerCache) -> Source | None:
        """Return the keys and values of the source; None if the layer has no cross-attention."""
        if self._cross is None:
            return None
        projected, mask = cache.source.of_places(self._cross.project, context.memory_BSD), context.mask
        assert mask is None or isinstance(mask, Tensor), "a search reads padded sources"
        made = cache.source.native
        if made is None or made.keys_NHSK is not projected.keys or made.seen_B11S is not mask:
            made = cache.source.native = Source(projected.keys, projected.values, mask)
        return made

    def whole(self, x_BTD: Tensor, context: Context, mask_B1TT: Tensor | None) -> Tensor:
        """Apply the layer to whole sentences, whose positions are hypotheses that see one another by a mask.

        Shape: (B,T,D) -> (B,T,D)
        """
        sentences, length, dim = x_BTD.shape
        seen_B1TT = None if mask_B1TT is None else mask_B1TT.expand(sentences, 1, length, length).contiguous()
        past = Past(sentences, sentences * length, length, seen_B1TT, None, sentences, length)
        cache_2BHTK, source = x_BTD.new_empty(2, sentences, self._heads, length, self._head_dim), None
        if self._cross is not None:
            assert context.memory_BSD is not None and isinstance(context.mask, Tensor | None)
            projected = context.source or self._cross.project(context.memory_BSD)
            source = Source(projected.keys, projected.values, context.mask)
        bound = BoundLayers([self.weights], [cache_2BHTK], [source])
        return bound.decode(x_BTD.reshape(-1, 1, dim), past).view(x_BTD.shape)

    @cached_property
    def weights(self) -> NativeLayer:
        """The weights of the layer as native code reads them."""
        layer, of, library = self._layer, self._weights.of, self._weights.native
        own, cross, network = layer.self_attention, self._cross, layer.feed_forward
        products = [of(own.k_proj, own.v_proj, own.q_proj), of(own.out_proj)]
        around = [layer.self_residual]
        if cross is not None and isinstance(layer, DecoderLayer) and layer.cross_residual is not None:
            products += [of(cross.q_proj), of(cross.out_proj)]
            around.append(layer.cross_residual)
        products += [of(network.up_proj), of(network.down_proj)]
        around.append(layer.feed_forward_residual)
        assert library is not None
        return NativeLayer(
            library,
            self._heads,
            network.activation,
            [_around(x.norm, x.alpha, x.style == "pre") for x in around],
            [product.panels for product in products],
        )


def _around(norm: LayerNorm, alpha: float = 1.0, is_pre: bool = True) -> AroundSublayer:
    return AroundSublayer(norm.weight.detach(), norm.bias.detach(), norm.eps, alpha, is_pre)


def native_norm(norm: nn.Module | None, steps: Sequence[NativeStep]) -> AroundSublayer | None:
    """Return what native code needs to apply a standard LayerNorm after some layers; None if it must not."""
    if type(norm) is not LayerNorm or not is_bare(norm):
        return None
    kept = steps[-1].norms
    if norm not in kept:
        kept[norm] = _around(norm) if norm.weight.dtype == torch.float32 else None
    return kept[norm]


def decode_natively(
    steps: Sequence[NativeStep],
    x_R1D: Tensor,
    context: Context,
    caches: Sequence[LayerCache],
    norm: AroundSublayer | None = None,
    input_R1D: Tensor | None = None,
    adds_input: Sequence[bool] = (),
) -> Tensor:
    """Decode the next position of each hypothesis by standard layers and a LayerNorm, in one call of native code.

    The arithmetic is that of the layers in eval mode, and the caches keep the position. For a few hypotheses the
    products of oneDNN take longer than it takes to read the weights, and looking up modules, hooks and kernels as
    long as the arithmetic between them.

    Shape: (R,1,D) -> (R,1,D)
    """
    buffers = [step.reserve(len(x_R1D), cache, x_R1D) for step, cache in zip(steps, caches, strict=True)]
    bound = bind_natively(steps, buffers, context, caches, norm, adds_input)
    return bound.decode(x_R1D, caches[0].past(len(x_R1D), buffers[0]), input_R1D)


def bind_natively(
    steps: Sequence[NativeStep],
    buffers: Sequence[Tensor],
    context: Context,
    caches: Sequence[LayerCache],
    norm: AroundSublayer | None,
    adds_input: Sequence[bool] = (),
) -> BoundLayers:
    """Return layers and a LayerNorm for one call of native code, given what :meth:`NativeStep.reserve` returned."""
    sources = [step.source(context, cache) for step, cache in zip(steps, caches, strict=True)]
    parts = [step.weights for step in steps], buffers, sources, norm, adds_input
    lowest = caches[0]
    if lowest.bound is None or not lowest.bound.is_of(*parts):
        lowest.bound = BoundLayers(*parts)
    return lowest.bound


@dataclass(frozen=True)
class LayerParts:
    """Functions that make freshly initialised parts of a layer; ``attention`` may be given another class.

    Attributes:
        self_attention: of a model that has another self-attention; None: as ``attention``.
    """

    attention: Callable[..., MultiHeadAttention]
    feed_forward: Callable[[], FeedForward]
    residual: Callable[[], Residual]
    self_attention: Callable[[], MultiHeadAttention] | None = None


MakeDecoderLayer = Callable[[int, LayerParts], DecoderBlock]
"""Makes a decoder layer, given its number, from 1 at the bottom, and makers of its parts."""


def make_decoder_layer(number: int, parts: LayerParts) -> DecoderLayer:
    """Make the decoder layer of Vaswani et al. 2017."""
    return DecoderLayer.of(parts)
