"""Residual connections with which very deep stacks train, besides pre-norm, post-norm and DeepNorm.

With f a sub-layer of layer l, counted from 1 in its stack, x its input, and LN a LayerNorm:

- ``b2t``: LN(x + f(x)), and around a layer's last sub-layer LN(x + x_l + f(x)), with x_l the input of the layer
  (Takase, Kiyono, Kobayashi, Suzuki: "B2T Connection: Serving Stability and Performance in Deep Transformers", 2022).
- ``admin``: LN(w * x + f(x)), with w a learned vector. A profiling pass through the fresh model sets it in the order
  of computation: w_1 = 1, w_{i+1}^2 = Var[w_i * x_i] + Var[f_i(x_i)] (Liu, Liu, Gao, Chen, Han: "Understanding the
  Difficulty of Training Transformers", 2020).
- ``layernorm_scaling``: x + f(LN(x) / sqrt(l)) (Sun, Song, Li, Yin, Zheng, Liu: "The Curse of Depth in Large Language
  Models", 2025).
- ``peri``: x + LN'(f(LN(x))) (Kim, Lee, Park, Oh, Kim, Yoo, Shin, Han, Shin, Yoo: "Peri-LN: Revisiting Normalization
  Layer in the Transformer Architecture", 2025), without a LayerNorm of the embeddings, which the paper leaves open.
- ``layer_scale``: x + w * f(LN(x)), with w a learned vector that begins small: at 0.1, in stacks of more than 18
  layers at 1e-5, and of more than 24 at 1e-6, or at ``model.layer_scale`` (Touvron, Cord, Sablayrolles, Synnaeve,
  Jégou: "Going Deeper with Image Transformers", 2021). At 0 it begins as ReZero does (Bachlechner, Majumder, Mao,
  Cottrell, McAuley: "ReZero is All You Need", 2020): every layer is the identity.
- ``completep``: x + (B / L) f(LN(x)), with L the layers of the stack and B ``model.base_layers``, the depth at which
  the learning rate was chosen: it is meant to hold at any other, and at any width with :class:`Transfer` (Dey, Zhang,
  Noci, Li, Bordelon, Bergsma, Pehlevan, Hanin, Hestness: "Don't be Lazy: CompleteP Enables Compute-Efficient Deep
  Transformers", 2025, with alpha = 1).

Legend: D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import Rates, TranslationModel
from deepspeed_nmt.nn.layers import LayerNorm, NormStyle, Residual, Sublayer
from deepspeed_nmt.nn.linear import Product

Norm = Literal["pre", "post", "deepnorm", "b2t", "admin", "layernorm_scaling", "peri", "layer_scale", "completep"]
PLAIN: tuple[str, ...] = get_args(NormStyle)
"""Those that a :class:`Residual` computes."""
NEEDS_FINAL_NORM = frozenset({"pre", "layernorm_scaling", "peri", "layer_scale", "completep"})
"""Those that normalise the input of a sub-layer, and not the state: a stack of them ends in a LayerNorm."""
KEEPS_STATE = frozenset({"pre", "layernorm_scaling", "layer_scale"})
"""Those that leave the state as it is if a sub-layer computes zero, whatever the number of layers."""
BY_DEPTH = frozenset({"deepnorm", "completep"})
"""Those with constants that depend on the number of layers."""
BASE_LAYERS = 6
"""Depth at which the settings of most recipes were chosen."""
_PROFILED_PAIRS, _PROFILED_LENGTH = 64, 32


class BottomToTop(Residual):
    """The connection of ``b2t``."""

    not_standard = "its layers add their input again before their last LayerNorm"

    def __init__(self, dim: int, dropout_p: float) -> None:
        super().__init__(dim, "post", dropout_p)

    @override
    def branch_of(self, x: Tensor, bottom: Tensor) -> Tensor:
        return x + bottom


class Admin(Residual):
    """The connection of ``admin``."""

    not_standard = "each unit of its residual branches has a weight of its own"

    def __init__(self, dim: int, dropout_p: float) -> None:
        super().__init__(dim, "post", dropout_p)
        self.branch_scale = nn.Parameter(torch.ones(dim))

    @override
    def forward(self, x: Tensor, sublayer: Sublayer, onto: Tensor | None = None) -> Tensor:
        """Apply the sub-layer within the connection. Shape: (..., D) -> (..., D)."""
        branch = x if onto is None else onto
        return super().forward(x, sublayer, branch * self.branch_scale.to(branch.dtype))


class ScaledNorm(Residual):
    """The connection of ``layernorm_scaling`` in layer ``number``, from 1."""

    def __init__(self, dim: int, dropout_p: float, number: int) -> None:
        super().__init__(dim, "pre", dropout_p)
        self.norm_scale = number**-0.5

    @override
    def norm_weights(self) -> tuple[Tensor, Tensor]:
        return self.norm.weight * self.norm_scale, self.norm.bias * self.norm_scale

    @override
    def fold(self, weights: dict[str, Tensor], own: str, output: str) -> None:
        for part in ("weight", "bias"):
            weights[f"{own}.norm.{part}"] = weights[f"{own}.norm.{part}"] * self.norm_scale


class Peri(Residual):
    """The connection of ``peri``."""

    not_standard = "its sub-layers have a LayerNorm at their end, too"

    def __init__(self, dim: int, dropout_p: float) -> None:
        super().__init__(dim, "pre", dropout_p)
        self.output_norm = LayerNorm(dim)

    @override
    def output_of(self, output: Tensor | Product) -> tuple[Tensor, Tensor | None]:
        value, bias = super().output_of(output)
        return self.output_norm(value if bias is None else value + bias), None


class LayerScale(Residual):
    """The connection of ``layer_scale``, whose weights begin at ``start``."""

    def __init__(self, dim: int, dropout_p: float, start: float) -> None:
        super().__init__(dim, "pre", dropout_p)
        self.output_scale = nn.Parameter(torch.full((dim,), start))

    @override
    def output_of(self, output: Tensor | Product) -> tuple[Tensor, Tensor | None]:
        value, bias = super().output_of(output)
        scale = self.output_scale.to(value.dtype)
        return value * scale, None if bias is None else bias * scale

    @override
    def fold(self, weights: dict[str, Tensor], own: str, output: str) -> None:
        scale = weights.pop(f"{own}.output_scale")
        weights[f"{output}.weight"] = weights[f"{output}.weight"] * scale.unsqueeze(1)
        weights[f"{output}.bias"] = weights[f"{output}.bias"] * scale


class CompleteP(Residual):
    """The connection of ``completep``, which adds ``output_scale`` times what the sub-layer computes."""

    def __init__(self, dim: int, dropout_p: float, output_scale: float) -> None:
        super().__init__(dim, "pre", dropout_p)
        self.output_scale = output_scale

    @override
    def output_of(self, output: Tensor | Product) -> tuple[Tensor, Tensor | None]:
        value, bias = super().output_of(output)
        return value * self.output_scale, None if bias is None else bias * self.output_scale

    @override
    def fold(self, weights: dict[str, Tensor], own: str, output: str) -> None:
        for part in ("weight", "bias"):
            weights[f"{output}.{part}"] = weights[f"{output}.{part}"] * self.output_scale


class Transfer(NamedTuple):
    """Adam's settings by CompleteP in a model m = D / D0 times as wide, and L / B times as deep, as its base.

    Dey et al. 2025, table 1, with learning rate r, decoupled weight decay d and eps e of the base:

    | parameters | learning rate | weight decay | eps |
    |---|---|---|---|
    | matrices of layers | r / m | d m | e / m B / L |
    | others of layers: biases, LayerNorms, vectors of distances | r | d | e / m B / L |
    | embeddings, final LayerNorm of the decoder | r / sqrt(m) | d sqrt(m) | e / sqrt(m) |
    | others | r | d | e / m |

    Logits are those of the paper's model, divided by m, though its embeddings have the same variance at every width,
    and ours that of 1 / D: a final LayerNorm that begins at 1 / sqrt(m) supplies the rest of the factor, and the
    learning rates of both are smaller by the factor by which their effect is larger.

    Attributes:
        width: m.
        depths: L / B of encoder and decoder.
    """

    width: float
    depths: tuple[float, float]

    def rates(self, model: TranslationModel, scaled: Iterable[nn.Parameter]) -> dict[nn.Parameter, Rates]:
        """Return the rates of a model; ``scaled`` are its embeddings and the final LayerNorm of its decoder."""
        m = self.width
        rates = dict.fromkeys(model.parameters(), Rates(eps=1 / m))
        rates |= dict.fromkeys(scaled, Rates(m**-0.5, m**0.5, m**-0.5))
        for stacks, depth in zip(model.stacks, self.depths, strict=True):
            for parameter in (p for stack in stacks for p in stack.layers.parameters()):
                eps = 1 / (m * depth)
                rates[parameter] = Rates(1 / m, m, eps) if parameter.ndim == 2 else Rates(eps=eps)
        return rates


def make_residual(
    norm: Norm,
    dim: int,
    dropout_p: float,
    number: int,
    depth: int,
    *,
    alpha: float = 1.0,
    start: float | None = None,
    base_layers: int = BASE_LAYERS,
) -> Residual:
    """Make a freshly initialised connection of layer ``number``, from 1, of a stack of ``depth`` layers.

    Args:
        alpha: weight of DeepNorm's residual branch.
        start: of LayerScale's weights; None: by the depth.
        base_layers: of CompleteP.
    """
    if norm == "pre" or norm == "post" or norm == "deepnorm":
        return Residual(dim, norm, dropout_p, alpha)
    makers: dict[str, Callable[[], Residual]] = {
        "b2t": lambda: BottomToTop(dim, dropout_p),
        "admin": lambda: Admin(dim, dropout_p),
        "layernorm_scaling": lambda: ScaledNorm(dim, dropout_p, number),
        "peri": lambda: Peri(dim, dropout_p),
        "layer_scale": lambda: LayerScale(dim, dropout_p, _start(depth) if start is None else start),
        "completep": lambda: CompleteP(dim, dropout_p, base_layers / depth),
    }
    return makers[norm]()


def _start(depth: int) -> float:
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


@torch.no_grad()
def profile(model: TranslationModel, source_vocabulary: int, target_vocabulary: int) -> None:
    """Set the weights of Admin's residual branches in a pass through a fresh model, in the order of computation.

    The authors profile on batches of the training data, with dropout. Here they are sentences of tokens drawn from
    torch's global generator, without dropout, so that the weights of a model depend on its settings and seed, and on
    the CPU only by its rounding.
    """
    variances: dict[str, Tensor] = {}

    def set_scale(connection: nn.Module, inputs: tuple[Tensor, ...], side: str) -> None:
        assert isinstance(connection, Admin)
        if side in variances:
            connection.branch_scale.fill_(float(variances[side].sqrt()))
        variances[side] = (inputs[0] * connection.branch_scale).var(correction=0)

    def add_output(output: Tensor, side: str) -> None:
        variances[side] = variances[side] + output.var(correction=0)

    training, hooks = model.training, []
    connections = [(name, part) for name, part in model.named_modules() if isinstance(part, Admin)]
    for name, connection in connections:
        side = name.partition(".")[0]
        hooks.append(connection.register_forward_pre_hook(partial(set_scale, side=side)))
        connection.watch = partial(add_output, side=side)
    size = (_PROFILED_PAIRS, _PROFILED_LENGTH)
    model.eval()
    memory = model.encode(torch.randint(source_vocabulary, size), padded=False)
    model.decode(torch.randint(target_vocabulary, size), memory)
    model.train(training)
    for hook in hooks:
        hook.remove()
    for _, connection in connections:
        connection.watch = None
