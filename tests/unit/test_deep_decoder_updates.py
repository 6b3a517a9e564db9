"""Whole updates of a deep decoder with all of its paper's methods, against a transcription of the paper in float64.

The transcription takes sentences one by one, without padding, and computes each pass by itself with plain matrix
products. From the project it takes the initial weights, and the random numbers of :mod:`deepspeed_nmt.randomness`.

Legend: S source length, T target length, D model width, H heads, K head width.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.randomness import Purpose, key, uniform

V = Vocabulary(31)
DIM, HEADS, LAYERS = 12, 3, 4
SEED, RATES = 11, [1.0, 0.4, 0.4, 0.4]  # p_l of each decoder layer: one without cross-attention, three with coins
DDR, ALD, P_ALD, TAU, SMOOTHING = 0.7, 0.6, 0.45, 0.2, 0.1
BETAS, EPS, LEARNING_RATES = (0.9, 0.98), 1e-9, [2e-3, 4e-3, 3e-3]
LENGTHS = [(5, 3), (1, 2), (7, 4), (3, 1), (4, 6), (2, 5)]


class Pair(NamedTuple):
    """A sentence pair without BOS and EOS, and its number in the corpus."""

    number: int
    source: list[int]
    target: list[int]


def pairs_of(update: int) -> list[Pair]:
    """Return the pairs of an update, of random words."""

    def words(count: int, *parts: int) -> list[int]:
        return [4 + key(*parts, position) % (V.size - 4) for position in range(count)]

    return [
        Pair(100 * update + index, words(source, update, index, 0), words(target, update, index, 1))
        for index, (source, target) in enumerate(LENGTHS)
    ]


def positions(length: int) -> Tensor:
    """Compute sinusoidal positions (sines, then cosines). Shape: -> (length, D)."""
    rates = [10000.0 ** (-i / (DIM // 2 - 1)) for i in range(DIM // 2)]
    rows = [[f(t * rate) for f in (math.sin, math.cos) for rate in rates] for t in range(length)]
    return torch.tensor(rows, dtype=torch.float64)


class Transcription:
    """Model, objective and optimizer of the paper.

    Args:
        weights: initial weights by name, which are copied.
        coins: micro_batch if each micro-batch has coins of its own.
    """

    def __init__(self, weights: dict[str, Tensor], coins: str) -> None:
        self.w = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        self.m = {name: torch.zeros_like(weight) for name, weight in self.w.items()}
        self.v = {name: torch.zeros_like(weight) for name, weight in self.w.items()}
        self.coins = coins
        self.seen: set[bool] = set()

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        scaled = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.w[f"{name}.weight"].t()
        return out + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else out

    def attention(self, query_TD: Tensor, memory_SD: Tensor, name: str, causal: bool) -> Tensor:
        q, k, v = (
            self.linear(x, f"{name}.{which}_proj")
            for x, which in ((query_TD, "q"), (memory_SD, "k"), (memory_SD, "v"))
        )
        width, heads = DIM // HEADS, []
        for head in range(HEADS):
            own = slice(head * width, (head + 1) * width)
            scores_TS = q[:, own] @ k[:, own].t() / math.sqrt(width)
            if causal:
                later = torch.ones(len(q), len(k)).triu(1).bool()
                scores_TS = scores_TS.masked_fill(later, -math.inf)
            heads.append(scores_TS.softmax(dim=1) @ v[:, own])
        return self.linear(torch.cat(heads, dim=1), f"{name}.out_proj")

    def feed_forward(self, x: Tensor, layer: str) -> Tensor:
        h = self.norm(x, f"{layer}.feed_forward_residual.norm")
        h = self.linear(h, f"{layer}.feed_forward.up_proj").clamp(min=0.0)
        return x + self.linear(h, f"{layer}.feed_forward.down_proj")

    def self_attention(self, x: Tensor, layer: str, causal: bool) -> Tensor:
        h = self.norm(x, f"{layer}.self_residual.norm")
        return x + self.attention(h, h, f"{layer}.self_attention", causal)

    def embed(self, tokens: list[int]) -> Tensor:
        return self.w["source_embedding.weight"][tokens] * math.sqrt(DIM) + positions(len(tokens))

    def encode(self, source: list[int]) -> Tensor:
        x = self.embed([*source, V.eos])
        for number in range(2):
            layer = f"encoder.layers.{number}"
            x = self.feed_forward(self.self_attention(x, layer, causal=False), layer)
        return self.norm(x, "encoder.final_norm")

    def decode(self, target: list[int], memory_SD: Tensor, update: int, number: int, micro_batch: int) -> Tensor:
        """Compute the top states of a pass. Shape: -> (T,D)."""
        x = self.embed([V.bos, *target])
        for index in range(LAYERS):
            layer, rate = f"decoder.layers.{index}", RATES[index]
            x = self.self_attention(x, layer, causal=True)
            tossed = (SEED, Purpose.CROSS_ATTENTION_DROP, update, number, index + 1)
            coin = uniform(*tossed, micro_batch) if self.coins == "micro_batch" else uniform(*tossed)
            if rate < 1.0:
                self.seen.add(coin < rate)
            if coin >= rate:
                h = self.norm(x, f"{layer}.cross_residual.norm")
                x = x + self.attention(h, memory_SD, f"{layer}.cross_attention", causal=False)
            x = self.feed_forward(x, layer)
        return self.norm(x, "decoder.final_norm")

    def masked(self, pair: Pair, update: int) -> tuple[list[int], list[int]]:
        """Return X+ and X-: the source with a fraction gamma, and 1 - gamma, of its words replaced by UNK."""
        gamma = P_ALD * uniform(SEED, Purpose.MASK_RATIO, update, pair.number, 0)
        count = len(pair.source)
        order = sorted(
            range(count), key=lambda place: uniform(SEED, Purpose.MASKED_TOKENS, update, pair.number, place)
        )
        fuller, emptier = list(pair.source), list(pair.source)
        for source, fraction in ((fuller, gamma), (emptier, 1.0 - gamma)):
            for place in order[: round(fraction * count)]:
                source[place] = V.unk
        return fuller, emptier

    def losses(self, pair: Pair, update: int, micro_batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the smoothed likelihood, the DDR loss, both summed over tokens, and the ALD loss of a pair."""
        sources = [pair.source, pair.source, *self.masked(pair, update)]
        tops = [
            self.decode(pair.target, self.encode(source), update, number, micro_batch)
            for number, source in enumerate(sources)
        ]
        likelihood = ddr = torch.zeros((), dtype=torch.float64)
        log_p = [(top @ self.w["source_embedding.weight"].t()).log_softmax(dim=1) for top in tops[:2]]
        for place, token in enumerate([*pair.target, V.eos]):
            one, two = log_p[0][place], log_p[1][place]
            for each in (one, two):
                smoothed = (1.0 - SMOOTHING) * -each[token] + SMOOTHING / V.size * -each.sum()
                likelihood = likelihood + smoothed / 2.0
            ddr = ddr + 0.5 * ((one.exp() * (one - two)).sum() + (two.exp() * (two - one)).sum())
        g, fuller, emptier = tops[0].mean(dim=0), tops[2].mean(dim=0), tops[3].mean(dim=0)
        plus, minus = (((g @ x) / (g.norm() * x.norm()) / TAU).exp() for x in (fuller, emptier))
        return likelihood, ddr, -(plus / (plus + minus)).log()

    def update(self, micro_batches: list[list[Pair]], number: int, lr: float) -> list[float]:
        """Make an update with Adam (Kingma and Ba 2015), and return its loss and regularizers, per token or pair."""
        parts = [
            self.losses(pair, number, index) for index, pairs in enumerate(micro_batches) for pair in pairs
        ]  # fmt: skip
        tokens = sum(len(pair.target) + 1 for pairs in micro_batches for pair in pairs)
        likelihood, ddr, ald = (sum(each) for each in zip(*parts, strict=True))
        loss = likelihood / tokens + DDR * ddr / tokens + ALD * ald / len(parts)
        gradients = torch.autograd.grad(loss, list(self.w.values()), allow_unused=True)
        for (name, weight), gradient in zip(self.w.items(), gradients, strict=True):
            gradient = torch.zeros_like(weight) if gradient is None else gradient
            self.m[name] = BETAS[0] * self.m[name] + (1.0 - BETAS[0]) * gradient
            self.v[name] = BETAS[1] * self.v[name] + (1.0 - BETAS[1]) * gradient**2
            mean, square = self.m[name] / (1.0 - BETAS[0] ** number), self.v[name] / (1.0 - BETAS[1] ** number)
            weight.data -= lr * mean / (square.sqrt() + EPS)
        return [float(loss.detach()), float(ddr.detach()) / tokens, float(ald.detach()) / len(parts)]


def collated(pairs: list[Pair], info: UpdateInfo) -> Batch:
    """Pad pairs into a micro-batch."""

    def padded(rows: list[list[int]]) -> Tensor:
        width = max(map(len, rows))
        return torch.tensor([[*row, *[V.pad] * (width - len(row))] for row in rows])

    sources = [[*pair.source, V.eos] for pair in pairs]
    outputs = [[*pair.target, V.eos] for pair in pairs]
    return Batch(
        source_BS=padded(sources),
        target_input_BT=padded([[V.bos, *pair.target] for pair in pairs]),
        target_output_BT=padded(outputs),
        sentence_ids_B=torch.tensor([pair.number for pair in pairs]),
        source_tokens=sum(map(len, sources)),
        target_tokens=sum(map(len, outputs)),
        pad=V.pad,
        update=info,
    )


def engine_of(coins: str) -> PlainEngine:
    """Return an engine over a small model in float64, by way of the settings of a run."""
    config = validate(
        {
            "model": {"dim": DIM, "ffn_dim": 20, "heads": HEADS, "encoder_layers": 2, "decoder_layers": LAYERS}
            | {"norm": "pre", "dropout": 0.0},
            "layer": {"name": "cross_attention_drop", "drop_depth": 1, "drop_ratio": 1.0, "beyond": 0.4}
            | {"coins": coins},
            "objective": {
                "label_smoothed": {"smoothing": SMOOTHING},
                "ddr": {"weight": DDR},
                "ald": {"weight": ALD, "p_ald": P_ALD, "tau": TAU},
            },
            "optimizer": {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS, "clip_norm": 0.0},
            "training": {"seed": SEED},
        }
    )
    module = TrainModule(build_model(config, V), build_objective(config, V)).double()
    for embedding in (module.model.source_embedding, module.model.target_embedding):
        torch.testing.assert_close(embedding._positions(9)[:9], positions(9), rtol=0, atol=1e-6)
        embedding._positions_TD = positions(256)  # the model computes them in fp32
    world = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
    return PlainEngine(module, config.optimizer, "fp32", world)


def cut(pairs: list[Pair], micro_batches: int) -> list[list[Pair]]:
    """Cut the pairs of an update into equally many for each micro-batch."""
    each = len(pairs) // micro_batches
    return [pairs[start : start + each] for start in range(0, len(pairs), each)]


def trained(coins: str, micro_batches: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Make the updates with this project, and return what :meth:`Transcription.update` does, and the weights."""
    engine, reported = engine_of(coins), []
    for number, lr in enumerate(LEARNING_RATES, 1):
        groups = cut(pairs_of(number), micro_batches)
        tokens, sentences = sum(target + 1 for _, target in LENGTHS), len(LENGTHS)
        batches = [
            collated(group, UpdateInfo(seed=SEED, number=number, micro_batch=k, tokens=tokens, sentences=sentences))
            for k, group in enumerate(groups)
        ]
        sums = engine.update(batches, tokens, lr).sums
        reported.append([float(sums[name]) / tokens for name in ("loss", "divergence", "ald")])
    return reported, {name: weight.detach() for name, weight in engine.module.model.named_parameters()}


@pytest.mark.parametrize("coins", ["update", "micro_batch"])
def test_updates_of_several_micro_batches_follow_the_paper(coins: str) -> None:
    paper = Transcription(dict(engine_of(coins).module.model.named_parameters()), coins)
    expected = [paper.update(cut(pairs_of(number), 3), number, lr) for number, lr in enumerate(LEARNING_RATES, 1)]
    assert paper.seen == {True, False}, "some coins drop, others keep"
    losses, weights = trained(coins, 3)
    for ours, theirs in zip(losses, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    for name, weight in weights.items():
        difference = float((weight - paper.w[name].detach()).abs().max())
        assert difference < 1e-9, name


def test_coins_for_each_update_do_not_depend_on_the_micro_batches_and_others_do() -> None:
    for coins, same in (("update", True), ("micro_batch", False)):
        (one, _), (several, _) = trained(coins, 1), trained(coins, 3)
        assert (one == [pytest.approx(losses, rel=1e-9) for losses in several]) == same
