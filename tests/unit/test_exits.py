"""Orders of shared layers, and the exits of a model."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.core.model import TOP, exit_name
from deepspeed_nmt.core.objective import Objective, Passes, States
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig, _draw
from deepspeed_nmt.methods.recurrent import RecurrentConfig, build_recurrent, layer_order
from deepspeed_nmt.methods.transformer import Transformer, TransformerConfig, build_transformer
from deepspeed_nmt.nn.stack import LayerOrder
from deepspeed_nmt.randomness import Purpose
from tests.models import two_pairs

V = Vocabulary(40)


def transformer(norm: str = "pre", encoder: int = 3, decoder: int = 3) -> Transformer:
    torch.manual_seed(1)
    config = TransformerConfig(
        dim=16, ffn_dim=24, heads=2, encoder_layers=encoder, decoder_layers=decoder, norm=norm, dropout=0.0
    )
    return build_transformer(config, V).double()


def test_layer_orders_of_the_papers() -> None:
    assert layer_order("stacked", 3, 2) == LayerOrder((0, 1, 2, 0, 1, 2), frozenset({3}), (3, 6))
    assert layer_order("closed_chain", 4, 2) == LayerOrder((0, 1, 2, 3, 2, 1, 0), frozenset({4}), (4, 7))
    chain = layer_order("closed_chain", 3, 4)
    assert (
        chain.indices == (0, 1, 2, 1, 0, 1, 2, 1, 0) and chain.inputs_at == {3, 5, 7} and chain.stages == (3, 5, 7, 9)
    )
    assert len(layer_order("closed_chain", 8, 5).indices) == 8 + 4 * 7
    with pytest.raises(ValueError, match="closed_chain needs 2 layers"):
        RecurrentConfig(sharing="closed_chain", encoder_layers=1)
    assert (
        layer_order("stacked", 4, 1)
        == layer_order("closed_chain", 4, 1)
        == LayerOrder((0, 1, 2, 3), frozenset(), (4,))
    )


def recurrent(sharing: str, encoder_loops: int = 3, decoder_loops: int = 2) -> Transformer:
    torch.manual_seed(1)
    config = RecurrentConfig(
        dim=16, ffn_dim=24, heads=2, encoder_layers=2, decoder_layers=3, dropout=0.0, sharing=sharing,
        encoder_loops=encoder_loops, decoder_loops=decoder_loops,
    )  # fmt: skip
    return build_recurrent(config, V).double()


def test_shared_parameters_exist_once_and_one_loop_is_the_vanilla_model() -> None:
    plain, looped, once = transformer(encoder=2), recurrent("stacked"), recurrent("stacked", 1, 1)
    count = sum(p.numel() for p in plain.parameters())
    assert sum(p.numel() for p in looped.parameters()) == count
    data = two_pairs()
    torch.testing.assert_close(once(data), plain(data), rtol=0, atol=0)
    assert not torch.allclose(looped(data), plain(data))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("exit", [(1, 1), (2, 3), (3, 1), (3, 3)])
def test_an_exit_is_a_model_of_the_first_layers(norm: str, exit: tuple[int, int]) -> None:
    model, data = transformer(norm), two_pairs()
    n, m = exit
    small = transformer(norm, n, m)
    small.load_state_dict({k: v for k, v in model.state_dict().items() if k in small.state_dict()})
    name = f"{n}-{m}"
    at_exit = model.at_exit(name)
    torch.testing.assert_close(at_exit(data), small(data), rtol=0, atol=0)
    assert len(at_exit.begin().layers) == m
    passes = Passes(model, data)
    passes.encoder_exits, passes.decoder_exits = [1, 2, 3], [1, 3]
    states = passes.run()
    if m != 2:
        torch.testing.assert_close(states[0][name], small(data), rtol=1e-12, atol=1e-12)
    assert set(states[0]) == {TOP, *(f"{i}-{j}" for i in (1, 2, 3) for j in (1, 3))}
    assert torch.equal(states[0][TOP], states[0]["3-3"])


def test_an_exit_of_a_recurrent_model_is_a_number_of_loops() -> None:
    model, data = recurrent("closed_chain"), two_pairs()
    assert model.stages == (3, 2)
    fewer = recurrent("closed_chain", 2, 1)
    fewer.load_state_dict(model.state_dict())
    torch.testing.assert_close(model.at_exit("2-1")(data), fewer(data), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["4-1", "0-1", "1", "deep", "1-4", "-1"])
def test_an_exit_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="n from 1 to 3 stages of the encoder and m from 1 to 3"):
        transformer().at_exit(name)


@pytest.mark.parametrize("weights", [{}, {"1-1": 0.0, "3-3": 4.0}])
def test_multi_softmax_is_the_mean_over_all_exits(weights: dict[str, float]) -> None:
    model, data = transformer().train(), two_pairs()
    output = Objective(MultiSoftmax(MultiSoftmaxConfig(weights=weights), V.pad))(model, data)
    parameters = list(model.parameters())
    ours = torch.autograd.grad(output.loss, parameters)
    losses, shares = [], []
    for n in (1, 2, 3):
        for m in (1, 2, 3):
            one = Objective(LabelSmoothed(0.1, V.pad))(model.at_exit(f"{n}-{m}"), data)
            losses.append(one.loss)
            shares.append(weights.get(f"{n}-{m}", 1.0))
    loss = sum(share * one for share, one in zip(shares, losses, strict=True)) / sum(shares)
    torch.testing.assert_close(output.loss, loss, rtol=1e-7, atol=1e-7)  # the shares are fp32
    for one, other in zip(ours, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    vanilla = Objective(LabelSmoothed(0.1, V.pad))(model, data)
    torch.testing.assert_close(output.nll, vanilla.nll)


WEIGHTS = {"1-1": 0.0, "3-3": 4.0, "2-4": 2.5}


@pytest.mark.parametrize(
    ("exits", "weights", "full_depth"),
    [
        *(("2x2", {}, True), ("2x3", {}, True), ("3x1", {}, True), ("2x2", WEIGHTS, True)),
        *(("1x1", {}, False), ("1x1", WEIGHTS, False), ("2x3", {}, False)),
    ],
)
def test_the_expected_loss_of_drawn_exits_is_that_of_all(
    exits: str, weights: dict[str, float], full_depth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The distribution of the draws is enumerated: every set of the right size (with the last) is as probable."""
    model = transformer(encoder=3, decoder=4) if full_depth else recurrent("stacked", 3, 4)
    model, data = model.train(), two_pairs()
    drawn = MultiSoftmax(MultiSoftmaxConfig(exits=exits, weights=weights, full_depth=full_depth), V.pad)
    a, b = drawn.config.drawn or (0, 0)
    sets = [
        [[*chosen, *[top] * full_depth] for chosen in combinations(range(1, top + 1 - full_depth), n - full_depth)]
        for top, n in ((3, a), (4, b))
    ]
    parameters = list(model.parameters())
    loss, gradients = torch.zeros((), dtype=torch.float64), [torch.zeros_like(p) for p in parameters]
    for every in product(*sets):
        sides = iter(every)
        monkeypatch.setattr("deepspeed_nmt.methods.multi_softmax._draw", lambda *parts, sides=sides: next(sides))
        one = Objective(drawn)(model, data).loss
        share = 1.0 / (len(sets[0]) * len(sets[1]))
        loss += share * one.detach()
        for mean, gradient in zip(gradients, torch.autograd.grad(one, parameters), strict=True):
            mean += share * gradient
    decoder_exits = range(1, 5) if b > 1 or not full_depth else [4]  # with b = 1 the others are never drawn
    pairs = [(n, m) for n in (1, 2, 3) for m in decoder_exits]
    total = sum(weights.get(f"{n}-{m}", 1.0) for n, m in pairs)
    expected = torch.zeros((), dtype=torch.float64)
    for n, m in pairs:
        of_exit = Objective(LabelSmoothed(0.1, V.pad))(model.at_exit(f"{n}-{m}"), data).loss
        expected = expected + weights.get(f"{n}-{m}", 1.0) / total * of_exit
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    for one, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # the shares are fp32


@pytest.mark.parametrize("full_depth", [True, False])
def test_exits_are_drawn_as_often_as_their_probability_says(full_depth: bool) -> None:
    config = MultiSoftmaxConfig(exits="3x2", full_depth=full_depth)
    counts: Counter[tuple[int, int]] = Counter()
    for update in range(4000):
        sides = [
            _draw(top, n, full_depth, 5, Purpose.EXITS, update, side)
            for side, (top, n) in enumerate(((6, 3), (4, 2)))
        ]
        counts.update(product(*sides))
    for n, m in product(range(1, 7), range(1, 5)):
        expected = (1.0 if n == 6 else 0.4) * (1.0 if m == 4 else 1 / 3) if full_depth else 0.25
        assert config.probability(n, m, (6, 4)) == pytest.approx(expected)
        assert counts[n, m] / 4000 == pytest.approx(expected, abs=0.035)


@pytest.mark.parametrize("divergence", ["kl", "symmetric"])
@pytest.mark.parametrize(
    ("looped", "exits", "weights"),
    [(False, "all", {"1-1": 0.0, "2-3": 4.0}), (False, "2x2", {}), (True, "2x2", {}), (True, "all", {})],
)
def test_the_deep_exit_teaches_the_others(
    looped: bool, exits: str, weights: dict[str, float], divergence: str
) -> None:
    """Sum_e s_e [CE_e + lambda KL(q || p_e)], or the mean of both KLs, in which q is a constant."""
    model, data = (recurrent("stacked", 3, 3) if looped else transformer()).train(), two_pairs()
    settings = {"exits": exits, "weights": weights, "teacher": 0.7, "divergence": divergence}
    likelihood = MultiSoftmax(MultiSoftmaxConfig.model_validate(settings), V.pad)
    output, parameters = Objective(likelihood)(model, data), list(model.parameters())
    targets, counted = data.target_output_BT, data.target_output_BT.ne(0)
    passes = Passes(model, data)
    likelihood.request_passes(passes)
    pairs = list(product(passes.encoder_exits, passes.decoder_exits))
    assert len(pairs) == (9 if exits == "all" else 4)
    q = torch.log_softmax(model.projection(model(data)), 2).detach()
    loss, apart = torch.zeros((), dtype=torch.float64), 0.0
    for (n, m), share in zip(pairs, likelihood.config.shares(pairs, (3, 3)).tolist(), strict=True):
        p = torch.log_softmax(model.projection(model.at_exit(f"{n}-{m}")(data)), 2)
        entropy = -0.9 * p.gather(2, targets.unsqueeze(2)).squeeze(2) - 0.1 * p.mean(2)
        taught = (q.exp() * (q - p)).sum(2)
        if divergence == "symmetric":
            taught = 0.5 * (taught + (p.exp() * (p - q)).sum(2))
        loss = loss + share * ((entropy + 0.7 * taught) * counted).sum()
        apart += share * float((taught * counted).sum().detach())
    torch.testing.assert_close(output.loss, loss, rtol=1e-7, atol=1e-7)
    assert output.metrics["divergence"].item() == pytest.approx(apart, rel=1e-6) and apart > 1e-3
    ours, plain = (torch.autograd.grad(one, parameters) for one in (output.loss, loss))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    validated = Objective(likelihood)(model.eval(), data)
    assert "divergence" not in validated.metrics
    assert torch.equal(validated.loss, Objective(LabelSmoothed(0.1, V.pad))(model, data).loss)


class OfLoops:
    """A regularizer that reads the top states and attention weights, of one loop of each side or of several."""

    name, weight, every = "of_loops", 1.0, 1

    def check_model(self, model: Transformer) -> None:
        return

    def request_passes(self, passes: Passes) -> Callable[[States], Tensor]:
        name = passes.request_attention(2)
        self.shapes: list[torch.Size] = []

        def value(states: States) -> Tensor:
            self.shapes += [states[0][name].shape, states[0][TOP].shape]
            return states[0][name].square().sum() + states[0][TOP].square().sum()

        return value


@pytest.mark.parametrize("settings", [{"exits": "1x1", "full_depth": False}, {"exits": "2x2"}])
def test_regularizers_read_the_deepest_drawn_exit(settings: dict[str, object]) -> None:
    model, reader = recurrent("stacked", 3, 3).train(), OfLoops()
    likelihood = MultiSoftmax(MultiSoftmaxConfig.model_validate(settings), V.pad)
    for seed in range(4):
        data = two_pairs(0)
        passes = Passes(model, replace(data, update=replace(data.update, seed=seed)))
        likelihood.request_passes(passes)
        assert passes.encoder_exits[-1] == passes.decoder_exits[-1] == 3, "plans and probes run the largest update"
    for update in range(1, 4):
        data = two_pairs(update)
        passes = Passes(model, data)
        likelihood.request_passes(passes)
        deepest = exit_name(max(passes.encoder_exits), max(passes.decoder_exits))
        output = Objective(likelihood, [reader])(model, data)
        assert reader.shapes[-2:] == [torch.Size([2, 4, 6]), torch.Size([2, 4, 16])]
        of_exit = Objective(LabelSmoothed(0.1, V.pad), [reader])(model.at_exit(deepest).train(), data)
        torch.testing.assert_close(output.metrics["of_loops"], of_exit.metrics["of_loops"])
        torch.testing.assert_close(output.nll, of_exit.nll)


def test_validation_uses_the_top_even_if_its_weight_in_training_is_zero() -> None:
    model, data = transformer().eval(), two_pairs()
    output = Objective(MultiSoftmax(MultiSoftmaxConfig(weights={"3-3": 0.0}), V.pad))(model, data)
    vanilla = Objective(LabelSmoothed(0.1, V.pad))(model, data)
    torch.testing.assert_close(output.loss, vanilla.loss, rtol=1e-7, atol=1e-7)


def test_multi_softmax_with_r_drop_compares_every_exit_between_paired_passes() -> None:
    model, data = transformer(encoder=2, decoder=2).train(), two_pairs()
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.0
    regularizers = [Consistency(ConsistencyConfig(weight=2.0), encode_twice=True)]
    output = Objective(MultiSoftmax(MultiSoftmaxConfig(), V.pad), regularizers)(model, data)
    plain = Objective(MultiSoftmax(MultiSoftmaxConfig(), V.pad))(model, data)
    torch.testing.assert_close(output.loss, plain.loss)
    assert output.metrics["divergence"].abs().item() < 1e-12
    model.eval()
    validated = Objective(MultiSoftmax(MultiSoftmaxConfig(), V.pad), regularizers)(model, data)
    vanilla = Objective(LabelSmoothed(0.1, V.pad))(model, data)
    torch.testing.assert_close(validated.loss, vanilla.loss, rtol=1e-7, atol=1e-7)
