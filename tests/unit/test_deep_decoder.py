"""Cross-attention drop, DDR, R-Drop and ALD against their formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP
from deepspeed_nmt.core.objective import Objective, Passes, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods.ald import ALD, ALDConfig, contrastive_loss, sentence_states
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.cross_attention_drop import (
    CrossAttentionDropConfig,
    CrossAttentionDropLayer,
    build_cross_attention_drop,
)
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import Transformer, TransformerConfig, build_transformer
from deepspeed_nmt.nn.layers import Context, DecoderLayer, Draw, LayerParts
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning.counting import Tally
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import batch_of

V = Vocabulary(40)


def model(drop: CrossAttentionDropConfig | None = None, dropout: float = 0.0, layers: int = 4) -> Transformer:
    torch.manual_seed(3)
    config = TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=layers, dropout=dropout)
    config_of_layer = drop or CrossAttentionDropConfig()

    def make_layer(number: int, parts: LayerParts) -> DecoderLayer:
        return build_cross_attention_drop(config_of_layer, number, parts)

    return build_transformer(config, V, make_layer).double()


def batch(update: int = 1, seed: int = 5) -> Batch:
    torch.manual_seed(1)
    source = torch.tensor([[7, 8, 9, 10, 11, 2], [12, 13, 14, 2, 0, 0], [15, 2, 0, 0, 0, 0]])
    output = torch.tensor([[17, 18, 19, 2], [22, 2, 0, 0], [23, 24, 2, 0]])
    inputs = torch.tensor([[1, 17, 18, 19], [1, 22, 0, 0], [1, 23, 24, 0]])
    return batch_of(source, inputs, output, ids=[30, 4, 1], seed=seed, update=update)


def log_p(module: Transformer, states_BTD: Tensor) -> Tensor:
    return torch.log_softmax(states_BTD @ module.projection.weight.t(), dim=2)


# Cross-attention drop.


def test_cross_attention_is_skipped_at_its_rate_and_other_sublayers_are_not() -> None:
    """The expectation over draws is p_l [self, ffn] + (1 - p_l) [self, cross, ffn] (section 3.3)."""
    drop = CrossAttentionDropConfig(drop_depth=1, drop_ratio=0.7)
    layer = model(drop, layers=2).decoder.layers[0].train()
    assert isinstance(layer, CrossAttentionDropLayer)
    torch.manual_seed(0)
    x, memory = torch.randn(2, 3, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)

    def run(update: int) -> Tensor:
        return layer(x, Context(memory_BSD=memory, draw=Draw(1, update)))

    with_cross = layer.eval()(x, Context(memory_BSD=memory))
    layer.train()
    state = layer.self_residual(x, lambda h: layer.self_attention(h, h, causal=True))
    without = layer.feed_forward_residual(state, layer.feed_forward)
    kinds = []
    for update in range(4000):
        result = run(update)
        dropped = torch.equal(result, without)
        assert dropped or torch.allclose(result, with_cross, rtol=1e-12, atol=1e-12)
        kinds.append(dropped)
    assert sum(kinds) / 4000 == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 4000))


def test_draws_differ_between_layers_passes_and_updates_and_use_no_generator() -> None:
    purpose = randomness.Purpose.CROSS_ATTENTION_DROP
    draws = {
        (update, layer, number): draw
        for update in (1, 2)
        for layer in (1, 2)
        for number, draw in enumerate(Draw(9, update, (0, 1, 2)).uniform(purpose, layer))
    }
    assert len(set(draws.values())) == 12
    torch.manual_seed(99)
    assert Draw(9, 2, (1,)).uniform(purpose, 2) == [draws[2, 2, 1]]


def test_passes_in_one_batch_equal_separate_passes() -> None:
    """Each pass is a block of rows with its own draws, and does not depend on the other passes."""
    module = model(CrossAttentionDropConfig(drop_depth=4, drop_ratio=0.5, beyond=0.5)).train()
    data = batch()
    memory = module.encode(data.source_BS)
    seen = set()
    for update in range(12):
        thrice = type(memory)(memory.states_BSD.repeat(3, 1, 1), memory.mask.repeat(3, 1, 1, 1))
        together = module.decode(data.target_input_BT.repeat(3, 1), thrice, Draw(2, update, (0, 1, 2)))[0]
        for number, block in enumerate(together.split(3)):
            alone = module.decode(data.target_input_BT, memory, Draw(2, update, (number,)))[0]
            torch.testing.assert_close(block, alone, rtol=1e-12, atol=1e-12)
            seen.add(tuple(Draw(2, update, (number,)).uniform(randomness.Purpose.CROSS_ATTENTION_DROP, 1)))
    assert len(seen) == 36


def test_a_rate_of_one_removes_cross_attention() -> None:
    module = model(CrossAttentionDropConfig(drop_depth=2, drop_ratio=1.0)).eval()
    names = [name for name, _ in module.named_parameters() if "cross" in name]
    assert names and not any(name.startswith(("decoder.layers.0", "decoder.layers.1")) for name in names)
    cache = module.begin()
    module.step(torch.tensor([1, 1, 1]), module.encode(batch().source_BS), cache)
    assert [layer.source.projected is None for layer in cache.layers] == [True, True, False, False]


def test_neutral_settings_equal_vanilla_to_the_bit() -> None:
    torch.manual_seed(3)
    config = TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=4, dropout=0.1)
    vanilla = build_transformer(config, V).double()
    neutral = model(CrossAttentionDropConfig(drop_depth=4, drop_ratio=0.0), dropout=0.1)
    likelihood = LabelSmoothed(0.1, V.pad)
    regularizers = [
        Consistency(ConsistencyConfig(weight=0.0), encode_twice=False),
        ALD(ALDConfig(weight=0.0), V),
        Consistency(ConsistencyConfig(weight=1.0, every=2), encode_twice=True),  # not in update 1
    ]
    results = []
    for module, objective in ((vanilla, Objective(likelihood)), (neutral, Objective(likelihood, regularizers))):
        torch.manual_seed(8)
        module.train()
        output = objective(module, batch(update=1))
        output.loss.backward()
        results.append((output.loss, output.metrics, [p.grad for p in module.parameters()]))
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1] == {}
    for one, other in zip(results[0][2], results[1][2], strict=True):
        assert torch.equal(one, other)


def test_a_dropped_layers_moments_decay_as_under_a_zero_gradient() -> None:
    """The gradient is zero, not None: with None, Adam would skip the layer and keep stale moments."""
    drop = CrossAttentionDropConfig(drop_depth=1, drop_ratio=0.999)
    module = model(drop, layers=2).float()
    parameter = module.decoder.layers[0].cross_attention.out_proj.weight
    purpose = randomness.Purpose.CROSS_ATTENTION_DROP
    kept = next(u for u in range(1, 100_000) if Draw(5, u).uniform(purpose, 1)[0] >= 0.999)
    world = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
    engine = PlainEngine(
        TrainModule(module, Objective(LabelSmoothed(0.1, 0))), AdamConfig(clip_norm=0.0), "fp32", world
    )
    optimizer = engine._optimizer
    engine.update([batch(kept)], 9, 0.01)
    moment = optimizer.state[parameter]["exp_avg"].clone()
    assert moment.any()
    for later in range(1, 4):
        before = parameter.detach().clone()
        engine.update([batch(kept + later)], 9, 0.01)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], moment * 0.9**later)
        assert not torch.equal(parameter, before), "momentum still updates it"


# DDR and R-Drop.


@pytest.mark.parametrize("encode_twice", [False, True])
def test_consistency_follows_the_formula_of_the_paper(encode_twice: bool) -> None:
    """1/2 (NLL_1 + NLL_2) + lambda/2 [KL(P1||P2) + KL(P2||P1)] per target token, gradients included."""
    drop = CrossAttentionDropConfig(drop_depth=4, drop_ratio=0.5, beyond=0.5)
    module, data = model(drop).train(), batch(update=2)
    objective = Objective(
        LabelSmoothed(0.0, V.pad), [Consistency(ConsistencyConfig(weight=1.7), encode_twice=encode_twice)]
    )
    output = objective(module, data)
    parameters = [p for p in module.parameters() if p.requires_grad]
    ours = torch.autograd.grad(output.loss, parameters)

    def direct(number: int) -> Tensor:
        memory = module.encode(data.source_BS)
        return log_p(module, module.decode(data.target_input_BT, memory, Draw(5, 2, (number,)))[0])

    first, second = direct(0), direct(1)
    assert not torch.allclose(first, second), "the passes have different draws"
    real = data.target_output_BT != 0
    nll = [-x.gather(2, data.target_output_BT.unsqueeze(2)).squeeze(2)[real].sum() for x in (first, second)]
    p, q = first.exp(), second.exp()
    kl = 0.5 * ((p * (first - second)).sum(2) + (q * (second - first)).sum(2))[real].sum()
    loss = 0.5 * (nll[0] + nll[1]) + 1.7 * kl
    torch.testing.assert_close(output.loss, loss, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(output.metrics["divergence"], kl, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(output.nll, 0.5 * (nll[0] + nll[1]), rtol=1e-10, atol=1e-10)
    for one, other in zip(ours, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("encode_twice", "rows"), [(False, 3), (True, 6)])
def test_ddr_encodes_once_and_r_drop_twice(encode_twice: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = model().train(), []
    encode = module.encode
    monkeypatch.setattr(
        module, "encode", lambda s, *rest, **more: (seen.append(s.shape[0]), encode(s, *rest, **more))[1]
    )
    objective = Objective(LabelSmoothed(0.1, 0), [Consistency(ConsistencyConfig(), encode_twice=encode_twice)])
    objective(module, batch())
    assert seen == [rows]
    module.eval()
    objective(module, batch())
    assert seen == [rows, 3], "validation has one pass"


# ALD.


def test_sources_are_masked_at_the_rates_of_the_paper_without_special_tokens() -> None:
    ald = ALD(ALDConfig(p_ald=0.4), V)
    length = 50
    source = torch.arange(4, 36).repeat(2)[:length].repeat(400, 1)
    source = torch.cat([source, torch.full((400, 1), V.eos), torch.zeros(400, 3, dtype=torch.long)], dim=1)
    data = replace(batch(), source_BS=source, sentence_ids_B=torch.arange(400))
    fuller, emptier = ald.mask(data)
    lost_fuller, lost_emptier = ((x == V.unk) for x in (fuller, emptier))
    assert torch.equal(fuller[~lost_fuller], source[~lost_fuller])
    assert torch.equal(emptier[~lost_emptier], source[~lost_emptier])
    assert not lost_fuller[:, length:].any() and not lost_emptier[:, length:].any()
    counts = lost_fuller.sum(1)
    assert torch.equal(counts + lost_emptier.sum(1), torch.full((400,), length)), "gamma n and (1 - gamma) n"
    gamma = counts.double() / length
    assert gamma.min() >= 0.0 and gamma.max() <= 0.4
    assert gamma.mean().item() == pytest.approx(0.2, abs=0.02) and len(set(counts.tolist())) > 15
    # All positions are equally likely to be masked.
    share = lost_fuller[:, :length].double().mean(0)
    assert (share - 0.2).abs().max().item() < 0.1
    expected = [0.4 * randomness.uniform(5, randomness.Purpose.MASK_RATIO, 1, i, 0) for i in range(400)]
    assert counts.tolist() == [round(x * length) for x in expected]


def test_the_mask_of_a_sentence_does_not_depend_on_its_row() -> None:
    ald, data = ALD(ALDConfig(), V), batch()
    turned = replace(
        data,
        source_BS=torch.nn.functional.pad(data.source_BS.flip(0), (0, 2)),
        sentence_ids_B=data.sentence_ids_B.flip(0),
    )
    for one, other in zip(ald.mask(data), ald.mask(turned), strict=True):
        assert torch.equal(one, other.flip(0)[:, :6])
    assert not torch.equal(ald.mask(data)[1], ald.mask(replace(data, update=replace(data.update, number=7)))[1])


def test_the_contrastive_loss_is_infonce_with_two_candidates() -> None:
    torch.manual_seed(4)
    whole, fuller, emptier = (torch.randn(7, 16, dtype=torch.float64) for _ in range(3))
    for row, value in enumerate(contrastive_loss(whole, fuller, emptier, 0.1)):
        s_plus = (whole[row] @ fuller[row]) / (whole[row].norm() * fuller[row].norm())
        s_minus = (whole[row] @ emptier[row]) / (whole[row].norm() * emptier[row].norm())
        positive, negative = (s_plus / 0.1).exp(), (s_minus / 0.1).exp()
        assert value.item() == pytest.approx(-math.log(positive / (positive + negative)), rel=1e-10)


def test_sentence_state_is_the_mean_over_real_positions() -> None:
    states = torch.randn(2, 3, 4, dtype=torch.float64)
    real = torch.tensor([[True, True, False], [False, False, False]])
    means = sentence_states(states, real)
    torch.testing.assert_close(means[0], states[0, :2].mean(0))
    assert not means[1].any(), "zero, not NaN, for a sentence of padding"
    packed = states.flatten(0, 1)[[0, 1, 3, 5]].unsqueeze(0).requires_grad_()  # the last one is the tail
    segments = Segments.of([2, 1], 4)
    ours = sentence_states(packed, torch.tensor([[True, True, False, True]]), segments)
    torch.testing.assert_close(ours, means)
    (gradient,) = torch.autograd.grad(ours.sum(), packed)
    assert gradient[0, :, 0].tolist() == [0.5, 0.5, 0.0, 0.0]


def test_sentence_states_of_packed_rows_take_no_padded_rows() -> None:
    """One sentence of 500 tokens among 500 of one: in rows they would be 250 times as many."""
    segments = Segments.of([500] + [1] * 500, 1000).to(lambda tensor: tensor.to("meta"))
    states = torch.empty(1, 1000, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Tally() as tally:
        sentence_states(states, torch.ones(1, 1000, dtype=torch.bool, device="meta"), segments).sum().backward()
    assert tally.peak_bytes < 4 * 4 * states.numel()


def test_ald_is_averaged_over_the_updates_sentences() -> None:
    """The loss divided by the update's tokens is NLL per token + weight x the mean over its sentences."""
    module, data = model().train(), batch(update=3)
    weight = 0.5
    output = Objective(LabelSmoothed(0.0, 0), [ALD(ALDConfig(weight=weight), V)])(module, data)
    fuller, emptier = ALD(ALDConfig(), V).mask(data)
    real = data.target_output_BT != 0
    states = [
        module.decode(data.target_input_BT, module.encode(source), Draw(5, 3))[0]
        for source in (data.source_BS, fuller, emptier)
    ]
    mean = contrastive_loss(*(sentence_states(x, real) for x in states), 0.1).mean()
    nll = -log_p(module, states[0]).gather(2, data.target_output_BT.unsqueeze(2)).squeeze(2)[real].mean()
    torch.testing.assert_close(output.loss / 9, nll + weight * mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(output.metrics["ald"] / 9, mean, rtol=1e-9, atol=1e-9)
    assert not output.metrics["ald"].requires_grad


def test_regularizers_run_at_every_kth_update_and_share_one_decoder_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = model().train(), []
    decode = module.decode
    monkeypatch.setattr(module, "decode", lambda t, *rest: (calls.append(t.shape[0]), decode(t, *rest))[1])
    regularizers = [Consistency(ConsistencyConfig(), encode_twice=False), ALD(ALDConfig(every=3), V)]
    objective = Objective(LabelSmoothed(0.1, 0), regularizers)
    reported = [set(objective(module, batch(update)).metrics) for update in (1, 2, 3)]
    assert calls == [6, 6, 12]
    assert reported == [{"divergence"}, {"divergence"}, {"divergence", "ald"}]


def test_passes_return_the_states_of_each_pass() -> None:
    module, data = model().train(), batch()
    passes = Passes(module, data)
    other = passes.add_source(data.source_BS.flip(0))
    assert (passes.add_pass(other), passes.add_pass(0)) == (1, 2)
    states = passes.run()
    for number, source in ((0, data.source_BS), (1, data.source_BS.flip(0)), (2, data.source_BS)):
        alone = module.decode(data.target_input_BT, module.encode(source), Draw(5, 1, (number,)))[0]
        torch.testing.assert_close(states[number][TOP], alone, rtol=1e-12, atol=1e-12)
