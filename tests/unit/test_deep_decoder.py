"""Cross-attention drop, DDR, R-Drop and ALD against their formulas in float64."""

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods.ald import ALD, ALDConfig, sentence_states
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.cross_attention_drop import (
    CrossAttentionDropConfig,
    build_cross_attention_drop,
)
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import Transformer, TransformerConfig, build_transformer
from deepspeed_nmt.nn.layers import DecoderLayer, Draw, LayerParts
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


# ALD.


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


def test_regularizers_run_at_every_kth_update_and_share_one_decoder_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module, calls = model().train(), []
    decode = module.decode
    monkeypatch.setattr(module, "decode", lambda t, *rest: (calls.append(t.shape[0]), decode(t, *rest))[1])
    regularizers = [Consistency(ConsistencyConfig(), encode_twice=False), ALD(ALDConfig(every=3), V)]
    objective = Objective(LabelSmoothed(0.1, 0), regularizers)
    reported = [set(objective(module, batch(update)).metrics) for update in (1, 2, 3)]
    assert calls == [6, 6, 12]
    assert reported == [{"divergence"}, {"divergence"}, {"divergence", "ald"}]
