"""Recurrent stacks against a plain transcription of the paper in float64, and what applications of a layer share."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor, nn

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.recurrent import LoopMaps, RecurrentConfig, build_recurrent
from deepspeed_nmt.methods.transformer import Transformer
from deepspeed_nmt.nn.layers import DecoderLayer, make_decoder_layer
from deepspeed_nmt.nn.stack import LayerStack
from tests import transformer_equations as equations
from tests.models import add_noise, assert_as_transcribed, two_pairs

V = Vocabulary(40)


def recurrent(
    drop: CrossAttentionDropConfig | None = None, dtype: torch.dtype = torch.float64, **settings: object
) -> Transformer:
    torch.manual_seed(1)
    shape = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 3, "decoder_layers": 2, "dropout": 0.0}
    loops = {"encoder_loops": 3, "decoder_loops": 2}
    config = RecurrentConfig.model_validate({**shape, **loops, **settings})
    make_layer = make_decoder_layer if drop is None else partial(build_cross_attention_drop, drop)
    model = build_recurrent(config, V, make_layer).to(dtype)
    add_noise(model)  # biases and LayerNorms start at 0 and 1, which would hide mistakes
    return model


def looped(
    stack: LayerStack, loops: int, sharing: str, x: Tensor, F: Callable[..., Tensor], again: bool = True
) -> Tensor:
    """B_0 = x, B_t = block(B_{t-1}) + x; or the layers there and back, with x added at each turn, if it is at all.

    With maps of the loops, block(B) has U_t V_t block(B) added.
    """
    layers = stack.layers
    block_input = x
    for t in range(loops):
        if t == 0 or sharing == "stacked":
            block = list(layers)
        else:
            block = list(layers)[1:] if t % 2 == 0 else list(layers)[-2::-1]
        state = block_input
        for layer in block:
            state = F(layer, state)
        if isinstance(stack.links, LoopMaps):
            own = stack.links.maps[t]
            state = state + torch.einsum("dr,re,te->td", own.up_DR, own.down_RD, state)
        block_input = state + x if again else state
    return state


def transcribed(
    model: Transformer, data: Batch, norm: str, sharing: str, loops: tuple[int, int], again: bool
) -> Iterator[Tensor]:
    """Yield each sentence's decoder states at the top, by equation 7 and the chain of figure 1. Shape: (T,D)"""

    def final(side: str, x: Tensor) -> Tensor:
        stack = getattr(model, side)
        return equations.norm(stack.final_norm, x) if equations.style_of(side, norm) == "pre" else x

    for row in range(len(data.source_BS)):
        x = model.source_embedding(data.source_BS)[row][data.source_BS[row].ne(0)]
        y = model.target_embedding(data.target_input_BT)[row][data.target_input_BT[row].ne(0)]
        encode = lambda layer, h: equations.encoder_layer(layer, norm, 2, h)  # noqa: E731
        encoded = looped(model.encoder, loops[0], sharing, x, encode, again)
        decode = partial(decoded, norm, final("encoder", encoded))
        yield final("decoder", looped(model.decoder, loops[1], sharing, y, decode, again))


def decoded(norm: str, memory: Tensor, layer: nn.Module, y: Tensor) -> Tensor:
    return equations.decoder_layer(layer, norm, 2, y, memory)


@pytest.mark.parametrize("norm", ["pre", "post", "pre/post"])
@pytest.mark.parametrize(
    ("sharing", "loops", "again", "rank"),
    [
        *(("stacked", (3, 2), True, 0), ("closed_chain", (3, 2), True, 4), ("closed_chain", (2, 4), True, 0)),
        *(("stacked", (1, 3), True, 3), ("stacked", (3, 2), False, 0), ("closed_chain", (2, 3), False, 0)),
    ],
)
def test_states_and_gradients_are_those_of_a_plain_transcription(
    norm: str, sharing: str, loops: tuple[int, int], again: bool, rank: int
) -> None:
    settings = {"encoder_loops": loops[0], "decoder_loops": loops[1], "repeat_input": again, "loop_rank": rank}
    model = recurrent(**equations.norms(norm), sharing=sharing, **settings).train()
    data = two_pairs()
    assert_as_transcribed(model, data, list(transcribed(model, data, norm, sharing, loops, again)))


# The source's keys and values are projected once for all applications of a layer.


def per_application(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each application project the source itself."""
    monkeypatch.setattr(DecoderLayer, "project_source", lambda self, context: None)


DROP = CrossAttentionDropConfig(drop_depth=2, drop_ratio=0.5)
OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "plain": lambda: Objective(LabelSmoothed(0.1, V.pad)),
    "ddr": lambda: Objective(LabelSmoothed(0.1, V.pad), [Consistency(ConsistencyConfig(), encode_twice=False)]),
    "exits": lambda: Objective(MultiSoftmax(MultiSoftmaxConfig(), V.pad)),
}


@pytest.mark.parametrize(("sharing", "recompute"), [("stacked", 1), ("closed_chain", 0)])
@pytest.mark.parametrize(("objective", "drop"), [("plain", None), ("ddr", DROP), ("exits", None)])
def test_results_are_those_of_a_projection_per_application(
    monkeypatch: pytest.MonkeyPatch,
    sharing: str,
    recompute: int,
    objective: str,
    drop: CrossAttentionDropConfig | None,
) -> None:
    model = recurrent(drop, sharing=sharing, dropout=0.1, attention_dropout=0.1).train()
    model.recompute(recompute, recompute)

    def step(update: int) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        torch.manual_seed(2)
        loss = OBJECTIVES[objective]()(model, two_pairs(update)).loss
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    once = [step(update) for update in range(1 if drop is None else 4)]  # of which some drop
    per_application(monkeypatch)
    for update, (loss, gradients) in enumerate(once):
        other, others = step(update)
        if drop is None:
            assert torch.equal(loss, other), "the states are equal to the bit"
        torch.testing.assert_close(loss, other, rtol=1e-12, atol=0)
        for one, each in zip(gradients, others, strict=True):
            torch.testing.assert_close(one, each, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings", [{"loop_rank": 5}, {"sharing": "closed_chain"}, {"norm": "post", "repeat_input": False}]
)
def test_decoding_step_by_step_is_teacher_forcing_at_each_number_of_loops(settings: dict[str, object]) -> None:
    model, data = recurrent(encoder_loops=2, decoder_loops=3, **settings).eval(), two_pairs()
    tops = []
    with torch.no_grad():
        for n, m in product((1, 2), (1, 2, 3)):
            at_exit = model.at_exit(f"{n}-{m}")
            fewer_loops = recurrent(encoder_loops=n, decoder_loops=m, **settings)
            assert at_exit.state_dict().keys() == fewer_loops.state_dict().keys()
            states_BTD = at_exit(data)
            memory, cache = at_exit.encode(data.source_BS), at_exit.begin()
            steps = [at_exit.step(tokens_B, memory, cache) for tokens_B in data.target_input_BT.T]
            logits_BTV = torch.stack(steps, 1)
            torch.testing.assert_close(logits_BTV[0], at_exit.projection(states_BTD)[0], rtol=1e-9, atol=1e-9)
            tops.append(states_BTD[0])
    assert all(not torch.allclose(one, other) for one, other in pairwise(tops)), "each loop matters"


# Constants by depth.


def test_layer_scale_begins_by_applications() -> None:
    model = build_recurrent(RecurrentConfig(dim=8, ffn_dim=8, heads=2, norm="layer_scale", encoder_loops=5), V)
    for stack, start in ((model.encoder, 1e-6), (model.decoder, 0.1)):  # 30 and 12 applications of 6 layers
        assert stack.layers[0].self_residual.output_scale[0].item() == pytest.approx(start)


@pytest.mark.parametrize(("sharing", "n", "m"), [("stacked", 9, 4), ("closed_chain", 7, 3)])
def test_deepnorm_counts_applications(sharing: str, n: int, m: int) -> None:
    settings = {"dim": 64, "ffn_dim": 64, "norm": "deepnorm", "sharing": sharing, "encoder_layers": 3}
    model = recurrent(dtype=torch.float32, **settings)
    assert model.encoder.layers[0].self_residual.alpha == pytest.approx(0.81 * (n**4 * m) ** (1 / 16))
    assert model.decoder.layers[1].cross_residual.alpha == pytest.approx((3 * m) ** 0.25)
    torch.manual_seed(1)
    config = RecurrentConfig.model_validate({**settings, "heads": 2, "decoder_layers": 2, "encoder_loops": 3})
    fresh = build_recurrent(config, V)
    bound = math.sqrt(6 / 128)
    for stack, beta in ((fresh.encoder, 0.87 * (n**4 * m) ** (-1 / 16)), (fresh.decoder, (12 * m) ** -0.25)):
        assert stack.layers[0].feed_forward.up_proj.weight.abs().max().item() == pytest.approx(bound * beta, rel=0.02)


def test_maps_of_more_than_full_rank_are_refused() -> None:
    assert recurrent(loop_rank=16).decoder.links is not None
    with pytest.raises(ValueError, match="loop_rank is 17, more than dim=16; lower it"):
        recurrent(loop_rank=17)
