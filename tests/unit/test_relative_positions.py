"""Relative positions: states and gradients are those of the equations, one head and one position at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.relative_positions import RelativePositionsConfig
from deepspeed_nmt.methods.transformer import Transformer, build_transformer
from tests import transformer_equations as equations
from tests.equations import attend, linear
from tests.models import add_noise, assert_as_transcribed, two_pairs

V = Vocabulary(40)
SHAPE = {"dim": 12, "ffn_dim": 20, "heads": 2, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}


def relative(**settings: object) -> Transformer:
    torch.manual_seed(1)
    config = RelativePositionsConfig.model_validate({**SHAPE, "clip_distance": 2, **settings})
    model = build_transformer(config, V).double()
    add_noise(model)  # biases and LayerNorms start at 0 and 1, which would hide mistakes
    return model


def self_attend(part: Any, heads: int, x_TD: Tensor, clip: int, causal: bool) -> Tensor:
    """Compute equations 3 and 4 of Shaw et al. 2018."""
    query, key, value = linear(part.q_proj, x_TD), linear(part.k_proj, x_TD), linear(part.v_proj, x_TD)
    width, rows = x_TD.shape[1] // heads, []
    for i in range(len(x_TD)):
        outputs = []
        for head in range(heads):
            of = slice(head * width, (head + 1) * width)
            edges = head if len(part.key_edges) > 1 else 0
            seen = range(i + 1 if causal else len(x_TD))
            w = [max(-clip, min(clip, j - i)) + clip for j in seen]
            e = [query[i, of] @ (key[j, of] + part.key_edges[edges, d]) for j, d in zip(seen, w, strict=True)]
            alpha = torch.softmax(torch.stack(e) / math.sqrt(width), 0)
            outputs.append(
                sum(a * (value[j, of] + part.value_edges[edges, d]) for a, j, d in zip(alpha, seen, w, strict=True))
            )
        rows.append(torch.cat(outputs))
    return linear(part.out_proj, torch.stack(rows))


def transcribed(model: Transformer, heads: int, clip: int, source_S: Tensor, input_T: Tensor) -> Tensor:
    """Compute the states of a post-norm model for a sentence, whose embeddings have no positions. Shape: -> (T,D)."""
    x, y = (
        embedding.weight[tokens] * math.sqrt(embedding.weight.shape[1])
        for embedding, tokens in ((model.source_embedding, source_S), (model.target_embedding, input_T))
    )
    for layer in model.encoder.layers:
        x = equations.residual(
            layer.self_residual, "post", x, lambda h, f=layer: self_attend(f.self_attention, heads, h, clip, False)
        )
        x = equations.residual(
            layer.feed_forward_residual, "post", x, lambda h, f=layer: equations.network(f.feed_forward, h)
        )
    for layer in model.decoder.layers:
        y = equations.residual(
            layer.self_residual, "post", y, lambda h, f=layer: self_attend(f.self_attention, heads, h, clip, True)
        )
        y = equations.residual(
            layer.cross_residual, "post", y, lambda h, f=layer: attend(f.cross_attention, heads, h, x)
        )
        y = equations.residual(
            layer.feed_forward_residual, "post", y, lambda h, f=layer: equations.network(f.feed_forward, h)
        )
    return y


@pytest.mark.parametrize(
    ("clip", "settings"),
    [
        (2, {}),
        (2, {"edges": "head"}),
        (0, {"edges": "head"}),
        (40, {"heads": 1, "edges": "head", "encoder_layers": 1}),
    ],
)
def test_states_and_gradients_are_those_of_the_equations(clip: int, settings: dict[str, Any]) -> None:
    model, data = relative(clip_distance=clip, norm="post", **settings).train(), two_pairs()
    states = [
        transcribed(model, settings.get("heads", 2), clip, source_S[source_S.ne(0)], input_T[input_T.ne(0)])
        for source_S, input_T in zip(data.source_BS, data.target_input_BT, strict=True)
    ]
    assert_as_transcribed(model, data, states, all_matter=False)


@pytest.mark.parametrize("edges", ["layer", "head"])
@torch.inference_mode()
def test_hypotheses_that_are_dropped_and_continued_keep_their_distances(edges: str) -> None:
    """A cache holds the positions of all hypotheses of a sentence, some of which are removed in a long search."""
    model, sources = relative(edges=edges, clip_distance=7).eval(), two_pairs().source_BS
    memory, cache = model.encode(sources), model.begin()
    tokens_RT, draw = torch.ones(2, 1, dtype=torch.int64), torch.Generator().manual_seed(2)
    for _ in range(40):
        logits_RV = model.step(tokens_RT[:, -1], memory, cache)
        width = len(tokens_RT) // 2
        rows_R = (torch.randint(width, (2, 3), generator=draw) + width * torch.arange(2)[:, None]).flatten()
        cache.select(rows_R, None)
        parents_RT, parents_RV = tokens_RT[rows_R], logits_RV[rows_R]
        tokens_RT = torch.cat([parents_RT, torch.randint(5, 40, (6, 1), generator=draw)], dim=1)
    assert cache.layers[0]._positions < 3 * 39, "dead positions have been removed"
    states = model.decode(parents_RT, memory.select(torch.tensor([0, 0, 0, 1, 1, 1])))[0][:, -1]
    torch.testing.assert_close(parents_RV, model.projection(states), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("millions", "vocabulary", "recipe"), [(210, 33_000, "big")])
def test_parameters_are_those_of_the_papers_table(millions: float, vocabulary: int, recipe: str) -> None:
    shape = {"dim": 1024, "ffn_dim": 4096, "heads": 16, "clip_distance": 8}
    with torch.device("meta"):
        model = build_transformer(RelativePositionsConfig.model_validate(shape), Vocabulary(vocabulary))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.01)


def test_absolute_positions_can_be_left_out_or_added() -> None:
    def top(**model: object) -> Tensor:
        made = build_model(validate({"model": {**SHAPE, **model}}), V).eval()
        return made(two_pairs())

    plain, bag = {"name": "transformer"}, {"name": "transformer", "positions": "none"}
    assert not torch.allclose(top(**plain), top(**bag))
    both = {"name": "relative_positions", "positions": "tensor2tensor"}
    assert not torch.allclose(top(**both), top(name="relative_positions"))
