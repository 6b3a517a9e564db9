"""Parameters of the Transformer: shared matrices, initialisation, and counts against those of the papers."""

from __future__ import annotations

import math

import pytest
import torch

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer


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


def test_decoder_norm_is_that_of_the_encoder_unless_set() -> None:
    shape = {"dim": 8, "ffn_dim": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    for settings, styles in (
        ({}, ["pre", "pre"]),
        ({"norm": "post"}, ["post", "post"]),
        ({"decoder_norm": "post"}, ["pre", "post"]),
        ({"norm": "post", "decoder_norm": "pre"}, ["post", "pre"]),
    ):
        model = build_transformer(TransformerConfig.model_validate({**shape, **settings}), Vocabulary(11))
        stacks = (model.encoder, model.decoder)
        assert [stack.layers[0].feed_forward_residual.style for stack in stacks] == styles
        assert [stack.final_norm is not None for stack in stacks] == [style == "pre" for style in styles]
    with pytest.raises(ValueError, match=r"decoder_norm is pre.*deepnorm.*remove decoder_norm"):
        TransformerConfig(norm="deepnorm", decoder_norm="pre")


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
