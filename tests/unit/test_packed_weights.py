"""Decoding with packed weights, and products by oneDNN: the same results as by torch's BLAS."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.kernels.onednn_ops import PackedWeight
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.native import library as native
from deepspeed_nmt.nn.embedding import Projection
from deepspeed_nmt.nn.linear import pack_weights, packing_of
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.models import prepare_to_decode

pytestmark = pytest.mark.skipif(onednn_ops.obstacle("fp32") is not None, reason=f"{onednn_ops.obstacle('fp32')}")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 12), (2, 5, 12)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_by_onednn_have_the_results_and_gradients_of_blas(
    shape: tuple[int, ...], precision: str, bias: bool
) -> None:
    if reason := onednn_ops.obstacle(precision):
        pytest.skip(reason)
    torch.manual_seed(1)
    leaves = [torch.randn(shape), torch.randn(9, 12), *([torch.randn(9)] if bias else [])]
    leaves = [x.to(DTYPES[precision]).requires_grad_() for x in leaves]
    upstream = torch.randn(*shape[:-1], 9, dtype=DTYPES[precision])
    found, expected = onednn_ops.linear(leaves[0], leaves[1], leaves[2] if bias else None), F.linear(*leaves)
    assert found.grad_fn is not None and "Linear" in found.grad_fn.name() and found.grad_fn.name() != "AddmmBackward0"
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_a_packed_weight_multiplies(rows: int) -> None:
    torch.manual_seed(2)
    x, weight, bias = torch.randn(rows, 1, 48), torch.randn(40, 48), torch.randn(40)
    plain = F.linear(x, weight, bias)
    with torch.inference_mode():
        torch.testing.assert_close(PackedWeight(weight, bias)(x), plain, atol=1e-4, rtol=0.0)
        torch.testing.assert_close(PackedWeight(weight, None)(x), plain - bias, atol=1e-4, rtol=0.0)


SOURCE_BS = torch.tensor([[5, 9, 11, 4, 2], [7, 6, 2, 0, 0], [8, 2, 0, 0, 0]])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "encoder.layers.0.feed_forward.up_proj.weight",
        "decoder.layers.1.feed_forward.up_proj.bias",
        "decoder.layers.0.cross_residual.norm.weight",
    ],
)
def test_nan_in_a_weight_ends_a_search(name: str, int8: bool) -> None:
    if int8 and (reason := native.obstacle()):
        pytest.skip(reason)
    vocabulary = Vocabulary(40)
    config = TransformerConfig(dim=32, ffn_dim=48, heads=4, encoder_layers=2, decoder_layers=2)
    model = build_transformer(config, vocabulary).eval()
    model.get_parameter(name).data.view(-1)[3] = torch.nan
    with pytest.raises(CheckpointError, match="NaN"):
        pack_weights(model, int8, native.library() if int8 else None)
        BeamSearch(BeamConfig(beam=3), model, vocabulary).search(SOURCE_BS)


@pytest.mark.parametrize("natively", [False, True])
def test_weights_that_are_loaded_decode(natively: bool) -> None:
    if natively and (reason := native.obstacle()):
        pytest.skip(reason)
    vocabulary = Vocabulary(40)
    config = TransformerConfig(dim=32, ffn_dim=48, heads=4, encoder_layers=1, decoder_layers=1)
    models = [build_transformer(config, vocabulary).eval() for _ in range(2)]
    for model in models:
        prepare_to_decode(model, torch.device("cpu"), "fp32", natively)
    searches = [BeamSearch(BeamConfig(beam=2), model, vocabulary) for model in models]
    before, expected = (search.search(SOURCE_BS) for search in searches)
    models[0].load_state_dict(models[1].state_dict())
    assert before != expected == searches[0].search(SOURCE_BS)


def test_nan_in_states_reaches_the_logits_of_int8() -> None:
    if reason := native.obstacle():
        pytest.skip(reason)
    projection = Projection(nn.Parameter(torch.randn(40, 32)))
    pack_weights(projection, True, native.library())
    states = torch.randn(3, 1, 32)
    with torch.inference_mode():
        logits = projection(states)
        for bad in (torch.nan, torch.inf, -torch.inf):
            states[1, 0, 4] = bad
            found = projection(states)
            assert found[1].isnan().all() and torch.equal(found[[0, 2]], logits[[0, 2]])


def test_weights_are_packed_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = Vocabulary(40)
    config = TransformerConfig(dim=32, ffn_dim=48, heads=4, encoder_layers=1, decoder_layers=1)
    for reason in (None, "this CPU has no products of packed weights"):
        monkeypatch.setattr(onednn_ops, "obstacle", lambda precision, reason=reason: reason)
        model = build_transformer(config, vocabulary).eval()
        prepare_to_decode(model, torch.device("cpu"), "fp32")
        assert (packing_of(model) is None) == (reason is not None)
        assert not model.encode(torch.tensor([[5, 6, 7]]), None).states_BSD.requires_grad  # it would lack some
