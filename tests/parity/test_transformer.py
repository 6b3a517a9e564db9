"""The Transformer against torch's own with copied weights, and its parameter counts against those of the papers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.methods.transformer import Transformer, TransformerConfig, build_transformer
from deepspeed_nmt.nn.attention import MultiHeadAttention
from tests.support import batch_of

PAD = 0


def _copy_attention(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    """Copy the weights. torch's key bias, which ours lacks, gets noise: it must not affect the result."""
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]))
        noise = torch.randn_like(ours.q_proj.bias)
        theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, noise, ours.v_proj.bias]))
    theirs.out_proj.load_state_dict(ours.out_proj.state_dict())


def _reference(model: Transformer, config: TransformerConfig) -> nn.Transformer:
    reference = nn.Transformer(
        config.dim,
        config.heads,
        config.encoder_layers,
        config.decoder_layers,
        config.ffn_dim,
        dropout=0.0,
        batch_first=True,
        norm_first=config.norm == "pre",
    ).double()
    if config.norm == "post":
        reference.encoder.norm = reference.decoder.norm = None
    else:
        reference.encoder.norm.load_state_dict(model.encoder.final_norm.state_dict())
        reference.decoder.norm.load_state_dict(model.decoder.final_norm.state_dict())
    for ours, theirs in zip(model.encoder.layers, reference.encoder.layers, strict=True):
        _copy_attention(ours.self_attention, theirs.self_attn)
        theirs.linear1.load_state_dict(ours.feed_forward.up_proj.state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward.down_proj.state_dict())
        theirs.norm1.load_state_dict(ours.self_residual.norm.state_dict())
        theirs.norm2.load_state_dict(ours.feed_forward_residual.norm.state_dict())
    for ours, theirs in zip(model.decoder.layers, reference.decoder.layers, strict=True):
        _copy_attention(ours.self_attention, theirs.self_attn)
        _copy_attention(ours.cross_attention, theirs.multihead_attn)
        theirs.linear1.load_state_dict(ours.feed_forward.up_proj.state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward.down_proj.state_dict())
        theirs.norm1.load_state_dict(ours.self_residual.norm.state_dict())
        theirs.norm2.load_state_dict(ours.cross_residual.norm.state_dict())
        theirs.norm3.load_state_dict(ours.feed_forward_residual.norm.state_dict())
    return reference


def _tokens(lengths: list[int], vocab: int) -> Tensor:
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.randint(1, vocab, (length,))
    return tokens


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_equals_torch_transformer(norm: str) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=3, decoder_layers=2, norm=norm, dropout=0.0
    )
    model = build_transformer(config, Vocabulary(50)).double()
    for parameter in model.parameters():  # biases and norms differ from their neutral initial values
        parameter.data += 0.1 * torch.randn_like(parameter)
    reference = _reference(model, config)
    source, target = _tokens([5, 9, 2], 50), _tokens([7, 3, 6], 50)
    ours = model.decode(target, model.encode(source))[0]
    theirs = reference(
        model.source_embedding(source),
        model.target_embedding(target),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(target.shape[1]).double(),
        src_key_padding_mask=(source == PAD),
        memory_key_padding_mask=(source == PAD),
        tgt_is_causal=True,
    )
    counted = target != PAD
    torch.testing.assert_close(ours[counted], theirs[counted], rtol=1e-5, atol=1e-5)


def test_embedding_is_scaled_and_positioned() -> None:
    config = TransformerConfig(dim=8, ffn_dim=8, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    model = build_transformer(config, Vocabulary(11))
    embedded = model.target_embedding(torch.tensor([[3, 3]]), offset=4)[0]
    word = model.target_embedding.weight[3] * math.sqrt(8)
    rate = 10000.0 ** (-1 / 3)  # the second of four wavelengths
    assert embedded[1, 1].item() == pytest.approx((word[1] + math.sin(5 * rate)).item(), abs=1e-6)
    assert embedded[1, 5].item() == pytest.approx((word[5] + math.cos(5 * rate)).item(), abs=1e-6)


@pytest.mark.parametrize("norm", ["pre", "post", "deepnorm"])
def test_padding_changes_nothing(norm: str) -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, norm=norm, dropout=0.0
    )
    model = build_transformer(config, Vocabulary(20)).double()
    source, target = _tokens([4], 20), _tokens([3], 20)
    alone = model.decode(target, model.encode(source, padded=False))[0]
    wider_source = torch.cat([torch.nn.functional.pad(source, (0, 5)), _tokens([9], 20)])
    wider_target = torch.cat([torch.nn.functional.pad(target, (0, 4)), _tokens([7], 20)])
    beside = model.decode(wider_target, model.encode(wider_source))[0]
    torch.testing.assert_close(beside[:1, :3], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("share", "matrices"), [("all", 1), ("decoder", 2), ("none", 3)])
def test_shared_embeddings_exist_once(share: str, matrices: int) -> None:
    config = TransformerConfig(dim=8, ffn_dim=8, heads=2, encoder_layers=1, decoder_layers=1, share_embeddings=share)
    model = build_transformer(config, Vocabulary(11))
    assert sum(p.shape == (11, 8) for p in model.parameters()) == matrices


def test_depth_scaled_initialisation_shrinks_with_the_layer() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(dim=64, ffn_dim=64, heads=2, encoder_layers=9, decoder_layers=1, init="depth_scaled")
    layers = build_transformer(config, Vocabulary(11)).encoder.layers
    ratio = layers[0].feed_forward.up_proj.weight.std() / layers[8].feed_forward.up_proj.weight.std()
    assert ratio.item() == pytest.approx(3.0, rel=0.05)


def test_deepnorm_constants() -> None:
    config = TransformerConfig(dim=64, ffn_dim=64, heads=2, encoder_layers=6, decoder_layers=6, norm="deepnorm")
    model = build_transformer(config, Vocabulary(11))
    assert model.decoder.layers[0].self_residual.alpha == pytest.approx(18**0.25)
    assert model.encoder.layers[0].self_residual.alpha == pytest.approx(0.81 * 7776 ** (1 / 16))
    ffn = model.decoder.layers[3].feed_forward.up_proj.weight
    query = model.decoder.layers[3].self_attention.q_proj.weight
    bound = math.sqrt(6 / 128)
    assert ffn.abs().max().item() == pytest.approx(bound * 72**-0.25, rel=0.02)
    assert query.abs().max().item() == pytest.approx(bound / math.sqrt(2), rel=0.02)


# The papers' tables, in millions of parameters. The counts are rounded, and the vocabularies are fitted to them.
@pytest.mark.parametrize(
    ("millions", "vocab", "shape"),
    [
        (63, 36_000, {}),
        (118, 36_000, {"encoder_layers": 24}),
        (194, 36_000, {"encoder_layers": 48}),
        (129, 36_000, {"encoder_layers": 15, "decoder_layers": 15}),
        (217, 36_000, {"encoder_layers": 27, "decoder_layers": 27}),
        (210, 33_000, {"dim": 1024, "ffn_dim": 4096, "heads": 16}),
        (437, 33_000, {"dim": 1024, "ffn_dim": 4096, "heads": 16, "encoder_layers": 24}),
        (475, 33_000, {"dim": 1024, "ffn_dim": 4096, "heads": 16, "encoder_layers": 15, "decoder_layers": 15}),
    ],
)
def test_parameter_counts_are_those_of_the_papers(millions: float, vocab: int, shape: dict[str, int]) -> None:
    with torch.device("meta"):
        model = MODELS["transformer"].build(TransformerConfig(**shape), Vocabulary(vocab))
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, rel=0.015)


def test_forward_is_encode_then_decode() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0)
    model = build_transformer(config, Vocabulary(20))
    source, target = _tokens([4, 2], 20), _tokens([3, 5], 20)
    batch = batch_of(source, target, target, pad=PAD)
    torch.testing.assert_close(model(batch), model.decode(target, model.encode(source))[0])
