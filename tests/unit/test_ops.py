"""Projected cross-entropy, dropout and joined products against references in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.kernels import cross_entropy, torch_ops
from deepspeed_nmt.kernels.choice import Kernels, use_kernels
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.parallel import tensor
from deepspeed_nmt.parallel.world import World
from tests.equations import projected_cross_entropy_ref


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 300])
def test_projected_cross_entropy_equals_reference(
    monkeypatch: pytest.MonkeyPatch, rows: int, smoothing: float
) -> None:
    monkeypatch.setitem(cross_entropy._CHUNK_BYTES, "cpu", 64 * 101 * 8)  # several chunks, the last one ragged
    torch.manual_seed(rows)
    states = torch.randn(rows, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(101, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 101, (rows,))
    targets[::3] = 0
    loss, nll, _ = projected_cross_entropy([states], weight, targets, smoothing, 0)
    gradients = torch.autograd.grad(loss * 0.37, (states, weight))
    expected_loss, expected_nll, _ = projected_cross_entropy_ref([states], weight, targets, smoothing, 0)
    expected = torch.autograd.grad(expected_loss * 0.37, (states, weight))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(nll, expected_nll, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_ranks_with_slices_of_different_size_take_the_same_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 10 and 11 tokens: ranks that disagreed on the chunks would wait for one another for ever."""
    monkeypatch.setitem(cross_entropy._CHUNK_BYTES, "cpu", 30 * 4)
    exchanges: dict[int, int] = {}

    class Slice:
        def __init__(self, rank: int) -> None:
            part = tensor.Slice(0, 21, World(rank, 2, rank, torch.device("cpu"), 2))
            self.start, self.size, self.largest, self.rank = part.start, part.size, part.largest, rank
            self.held = part.stop - part.start

        def sum(self, x: torch.Tensor) -> None:
            exchanges[self.rank] = exchanges.get(self.rank, 0) + 1

        max = sum

    held = []
    for part in (Slice(0), Slice(1)):
        weight = torch.randn(part.held, 4)
        projected_cross_entropy(
            [torch.randn(6, 4)], weight, torch.ones(6, dtype=torch.int64), 0.1, 0, vocabulary=part
        )
        held.append(part.held)
    assert held == [10, 11] and exchanges[0] == exchanges[1]


@pytest.mark.parametrize("rows", [1, 300])
def test_loss_of_two_predictions(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The loss is the NLL averaged over both + w/2 [KL(P1||P2) + KL(P2||P1)]."""
    monkeypatch.setitem(cross_entropy._CHUNK_BYTES, "cpu", 64 * 101 * 8)
    torch.manual_seed(rows)
    p, q = (torch.randn(rows, 16, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(101, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, 101, (rows,))
    targets[1::3] = 0
    ours = projected_cross_entropy([p, q], weight, targets, 0.1, 0, 0.7)
    p1, p2 = torch.softmax(p @ weight.t(), 1), torch.softmax(q @ weight.t(), 1)
    counted = targets != 0
    picked = [x[torch.arange(rows), targets].log() for x in (p1, p2)]
    nll = -0.5 * (picked[0] + picked[1])[counted].sum()
    smooth = -0.5 * (p1.log() + p2.log()).mean(1)[counted].sum()
    kl = 0.5 * (p1 * (p1 / p2).log() + p2 * (p2 / p1).log()).sum(1)[counted].sum()
    theirs = (0.9 * nll + 0.1 * smooth + 0.7 * kl, torch.where(counted, -0.5 * (picked[0] + picked[1]), 0.0), kl)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    inputs = (p, q, weight)
    for one, other in zip(
        torch.autograd.grad(ours[0] * 0.37, inputs), torch.autograd.grad(theirs[0] * 0.37, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    reference = projected_cross_entropy_ref([p, q], weight, targets, 0.1, 0, 0.7)
    torch.testing.assert_close(reference, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("predictions", "taught"), [(1, None), (2, None), (2, "kl"), (2, "symmetric")])
def test_rows_can_be_weighted(monkeypatch: pytest.MonkeyPatch, predictions: int, taught: str | None) -> None:
    """One prediction, two alike, or one that the other teaches, which then has no gradient."""
    monkeypatch.setitem(cross_entropy._CHUNK_BYTES, "cpu", 8 * 21 * 8)
    torch.manual_seed(2)
    states = [torch.randn(30, 6, dtype=torch.float64, requires_grad=True) for _ in range(predictions)]
    weight = torch.randn(21, 6, dtype=torch.float64, requires_grad=True)
    arguments = (states, weight, torch.randint(0, 21, (30,)), 0.1, 0, 0.3, torch.rand(30, dtype=torch.float64))
    ours = projected_cross_entropy(*arguments, taught=taught)
    theirs = projected_cross_entropy_ref(*arguments, taught=taught)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    learning = [weight, *(states[:1] if taught else states)]
    gradients = (torch.autograd.grad(one[0], learning, retain_graph=True) for one in (ours, theirs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    if taught:
        assert torch.autograd.grad(ours[0], states[1], allow_unused=True) == (None,)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("predictions", [1, 2])
def test_logits_may_have_a_bias(
    monkeypatch: pytest.MonkeyPatch, predictions: int, frozen: bool, device_type: str
) -> None:
    """The bias has a gradient even if the output matrix, a frozen embedding, has none. A GPU pads both."""
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda *_: 3)
    monkeypatch.setattr(Kernels, "device_type", lambda self, x: device_type)
    torch.manual_seed(0)
    states = [torch.randn(7, 5, dtype=torch.float64, requires_grad=True) for _ in range(predictions)]
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=not frozen)
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 0, 3, 10, 0, 2, 5])
    found = []
    for function in (projected_cross_entropy, projected_cross_entropy_ref):
        loss, nll, divergence = function(states, weight, targets, 0.1, 0, divergence_weight=0.7, bias=bias)
        wanted = [*states, bias] if frozen else [*states, bias, weight]
        found.append((loss.detach(), nll.detach(), divergence.detach(), *torch.autograd.grad(loss * 1.5, wanted)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert torch.equal(projected_cross_entropy(states, weight, targets, 0.1, 0, 0.7, bias=bias)[0], found[0][0])


def test_touch_gives_a_gradient_of_zero() -> None:
    x, weight = torch.randn(3, 2, requires_grad=True), torch.tensor([float("inf"), 1.0], requires_grad=True)
    y = torch_ops.touch(x, weight[1:] * 2.0)
    assert torch.equal(y, x)
    (y * 3.0).sum().backward()
    assert x.grad is not None and bool((x.grad == 3.0).all())
    assert weight.grad is not None and not weight.grad.any()


def test_small_weights_of_rows_lose_no_gradient_in_fp16() -> None:
    """Gradients of logits are rounded to fp16, whose smallest number is 6e-8; that of a token that is not the target
    is 0.1 / V times the weight of the row."""
    torch.manual_seed(0)
    weight_VD, targets = torch.randn(8000, 32) / 6, torch.randint(0, 8000, (6,))
    states_ND, found = weight_VD[targets] * 14, []
    for share in (1.0, 1 / 64):
        states, weight = (x.half().requires_grad_() for x in (states_ND, weight_VD))
        loss, *_ = projected_cross_entropy([states], weight, targets, 0.1, -1, row_weights_N=torch.full((6,), share))
        (loss * 1024 / share).backward()
        found.append((loss / share, weight.grad, states.grad))
    assert all(map(torch.equal, *found))


def test_projected_cross_entropy_of_only_padding_is_zero_with_zero_gradients() -> None:
    states = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    loss, nll, _ = projected_cross_entropy([states], weight, torch.zeros(3, dtype=torch.long), 0.1, 0)
    loss.backward()
    assert loss.item() == 0.0 and not nll.any()
    assert states.grad is not None and not states.grad.any()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_has_its_mean_and_rate(p: float) -> None:
    torch.manual_seed(3)
    x = torch.ones(1_000_001, requires_grad=True)
    y = torch_ops.dropout(x, p)
    share = (y == 0).double().mean().item()
    assert abs(share - p) < 4 * (p * (1 - p) / x.numel()) ** 0.5 + 1e-5
    assert abs(y.double().mean().item() - 1.0) < 0.005
    # The four elements that share one draw are dropped at the same rate and independently.
    lanes = (y[: y.numel() // 4 * 4].view(-1, 4) == 0).double()
    assert (lanes.mean(0) - p).abs().max().item() < 0.005
    correlation = torch.corrcoef(lanes.t()) - torch.eye(4)
    assert correlation.abs().max().item() < 0.01
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def test_a_rate_that_rounds_to_one_keeps_a_few_elements() -> None:
    torch.manual_seed(3)
    x = torch.ones(1_000_000, requires_grad=True)
    for operation in (torch_ops.dropout, lambda x, p: torch_ops.bias_relu_dropout(x, None, p)):
        y = operation(x, 0.999995)
        y.sum().backward()
        assert set(y.unique().tolist()) == {0.0, 65536.0} and x.grad is not None and torch.equal(x.grad, y)
        x.grad = None


def test_dropout_is_off_outside_training_and_follows_the_seed() -> None:
    x = torch.randn(37)
    assert torch_ops.dropout(x, 0.0) is x
    torch.manual_seed(5)
    first = torch_ops.dropout(x, 0.5)
    torch.manual_seed(5)
    assert torch.equal(first, torch_ops.dropout(x, 0.5))


class Joining(Kernels):
    """Kernels that join products on a CPU, too."""

    def joins_products(self, x: Tensor) -> bool:
        return torch.is_grad_enabled()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights of all products so far."""
    seen = []
    linear = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    return seen


def attend(attention: MultiHeadAttention, across: bool) -> list[Tensor]:
    """Return the output, and the gradients of the inputs and of all parameters."""
    torch.manual_seed(2)
    x, memory = torch.randn(2, 2, 5, 12, dtype=torch.float64).requires_grad_().unbind()
    out = attention(x, memory if across else x).total()
    inputs = [x, memory] if across else [x]
    return [out, *torch.autograd.grad(out.square().sum(), [*inputs, *attention.parameters()])]


@pytest.mark.parametrize("across", [False, True])
def test_one_product_equals_several(across: bool, products: list[tuple[int, ...]]) -> None:
    torch.manual_seed(1)
    attention = MultiHeadAttention(12, 3).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    apart = attend(attention, across)
    use_kernels(attention, Joining())
    products.clear()
    for ours, theirs in zip(attend(attention, across), apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert products == ([(24, 12), (12, 12), (12, 12)] if across else [(36, 12), (12, 12)])
    products.clear()
    with torch.no_grad():  # Nothing is gained without a backward pass.
        attention(*[torch.randn(1, 4, 12, dtype=torch.float64)] * 2)
    assert products == [(12, 12)] * 4
