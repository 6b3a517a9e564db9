"""Layers whose residual adds and norms are fused, in Triton's interpreter, against torch's own operations."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_nmt.kernels.choice import Kernels, use_kernels
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.layers import (
    Context,
    DecoderLayer,
    Draw,
    EncoderLayer,
    FeedForward,
    LayerParts,
    NormStyle,
    Residual,
    make_decoder_layer,
)
from tests.toy.toy_layer import GatedLayerConfig, build_gated_layer

triton_ops = pytest.importorskip("deepspeed_nmt.kernels.triton_ops", reason="needs triton")
DIM = 8


def parts(style: NormStyle) -> LayerParts:
    return LayerParts(
        attention=lambda: MultiHeadAttention(DIM, 2),
        feed_forward=lambda: FeedForward(DIM, 12, "gelu"),
        residual=lambda: Residual(DIM, style, 0.0),
    )


def encoder_layer(style: NormStyle) -> EncoderLayer:
    made = parts(style)
    return EncoderLayer(made)


def dropping(style: NormStyle) -> DecoderLayer:
    config = CrossAttentionDropConfig(drop_depth=1, drop_ratio=0.5)
    return build_cross_attention_drop(config, 1, parts(style))


LAYERS: dict[str, Callable[[NormStyle], nn.Module]] = {
    "encoder": encoder_layer,
    "decoder": lambda style: make_decoder_layer(1, parts(style)),
    "without cross-attention": lambda style: DecoderLayer(
        parts(style).attention(),
        parts(style).residual(),
        None,
        None,
        parts(style).feed_forward(),
        parts(style).residual(),
    ),
    "dropping": dropping,
    "gated": lambda style: build_gated_layer(GatedLayerConfig(gate=0.5), 1, parts(style)),
}


def trained(layer: nn.Module, update: int, device: torch.device) -> list[Tensor]:
    """Return the output of a layer, and the gradients of its inputs and parameters."""
    torch.manual_seed(2)
    x, memory = torch.randn(2, 4, 3, DIM, device=device).requires_grad_().unbind()
    context = Context(memory_BSD=memory, draw=Draw(seed=1, update=update, passes=(0, 1)))
    out = layer(x, context)
    wanted = [x, memory, *layer.parameters()]
    return [out, *torch.autograd.grad(out.square().sum(), wanted, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("style", ["pre", "post"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_fused_sublayers_equal_those_of_torch(name: str, style: NormStyle, device: torch.device) -> None:
    torch.manual_seed(1)
    layer = LAYERS[name](style).to(device)
    # Of the two passes, both attend to the source, one does, none does.
    for update in (1, 2, 6) if name == "dropping" else (1,):
        use_kernels(layer, Kernels.only("torch"))
        expected = trained(layer, update, device)
        use_kernels(layer, Kernels.only("triton"))
        for ours, theirs in zip(trained(layer, update, device), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("style", "norms", "sums"), [("pre", {False: 3}, 3), ("post", {True: 3}, 0)])
def test_a_sublayer_launches_a_norm_and_a_sum_or_both_as_one(
    style: NormStyle, norms: dict[bool, int], sums: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS["decoder"](style).to(device)
    use_kernels(layer, Kernels.only("triton"))
    launched: Counter[tuple[str, bool]] = Counter()

    def count(kernel: Any, grid: Any, *_: Any, **options: Any) -> None:
        launched[kernel.fn.__name__, bool(options.get("HAS_RESIDUAL"))] += 1

    monkeypatch.setattr(triton_ops, "_launch", count)
    trained(layer, 1, device)
    assert {adds: number for (name, adds), number in launched.items() if name == "norm_forward"} == norms
    assert launched["pointwise_forward", True] == sums
