"""Deep-shallow decoding and ensembles against their definitions."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.depth_growing import DepthGrowing, DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.search.deep_shallow import DeepShallow, DeepShallowConfig
from deepspeed_nmt.search.models import Ensemble
from tests import transformer_equations as equations

Predict = Callable[[tuple[int, ...]], list[float]]
Mean = Callable[[str, tuple[int, ...]], float]
Table = Callable[[str, tuple[int, ...]], list[list[float]]]
V = Vocabulary(20)
SOURCE = torch.tensor([[7, 8, 9, 10, 2], [12, 13, 2, 0, 0], [5, 6, 7, 2, 0]])


def grown(**settings: str) -> DepthGrowing:
    torch.manual_seed(4)
    shape = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 2, "top_decoder_layers": 1}
    config = DepthGrowingConfig.model_validate({**shape, **settings})
    model = build_depth_growing(config, V)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    return model.double().eval()


def plain_beam(predict: Predict, width: int, limit: int, power: float) -> list[tuple[int, ...]]:
    """Search for translations as docs/architecture.md describes it, with every prefix computed anew.

    Args:
        predict: returns log p of the next token of a prefix.
        width: beam size K.
        limit: largest number of tokens, EOS included.
        power: length penalty: length^power divides a log-probability.

    Returns:
        At most K translations without EOS, best first.
    """
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, limit + 1):
        extensions = []
        for prefix, log_p in live:
            row = predict(prefix)
            words = [V.eos] if length == limit else [word for word in range(V.size) if word not in (V.pad, V.bos)]
            extensions += [(prefix, word, log_p + row[word]) for word in words]
        extensions.sort(key=lambda extension: -extension[2])
        finished += [(prefix, log_p / length**power) for prefix, word, log_p in extensions[:width] if word == V.eos]
        live = [((*prefix, word), log_p) for prefix, word, log_p in extensions if word != V.eos][:width]
        if len(finished) >= width:
            break
    return [tokens for tokens, _ in sorted(finished, key=lambda hypothesis: -hypothesis[1])[:width]]


def winner(
    shallow: list[tuple[int, ...]], deep: list[tuple[int, ...]], mean: Mean, alpha: float, exponent: float
) -> tuple[tuple[int, ...], float]:
    """Rerank as Wu et al. (2019) did: the best of each list by its own total, then the better of the two.

    Args:
        shallow: n-best list of the shallow exit.
        deep: n-best list of the deep exit.
        mean: mean log-probability of a translation by an exit.
        alpha: weight of the exit that wrote the list.
        exponent: of the length.
    """
    best = []
    for own, other, candidates in (("shallow", "deep", shallow), ("deep", "shallow", deep)):
        totals = []
        for tokens in candidates:
            mixed = alpha * mean(own, tokens) + (1.0 - alpha) * mean(other, tokens)
            totals.append(mixed / (len(tokens) + 1.0) ** -exponent)
        place = max(range(len(totals)), key=totals.__getitem__)
        best.append((candidates[place], totals[place]))
    return best[0] if best[0][1] > best[1][1] else best[1]


@pytest.mark.parametrize(("alpha", "exponent"), [(0.5, 0.4), (0.1, 1.0)])
@pytest.mark.parametrize("attend", ["h1", "h1_plus_input"])
def test_deep_shallow_decoding_is_the_procedure_of_the_paper(attend: str, alpha: float, exponent: float) -> None:
    """Beams from both exits, scores by both exits, and the choice, all by the equations."""
    model = grown(attend=attend)
    with torch.no_grad():
        for parameter in model.top_decoder.parameters():  # the lists of both exits differ
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    limits = {"max_length_ratio": 1.0, "max_length_extra": 2}
    config = DeepShallowConfig(beam=3, length_penalty="mean", alpha=alpha, exponent=exponent, **limits)
    found = DeepShallow(config, model, V).search(SOURCE)
    weight, differ = model.projection.weight, 0
    for row in range(3):
        source = SOURCE[row][SOURCE[row] != V.pad].tolist()

        @cache
        @torch.no_grad()
        def table(exit: str, tokens: tuple[int, ...], source: tuple[int, ...] = tuple(source)) -> list[list[float]]:
            given = [V.bos, *tokens]
            if exit == "deep":
                states = equations.grown(model, "pre", 2, source, given, attend == "h1_plus_input")
            else:
                states = equations.bottom(model.bottom, "pre", 2, source, given)
            rows: list[list[float]] = equations.log_probs(states, weight).tolist()
            return rows

        def mean(exit: str, tokens: tuple[int, ...], table: Table = table) -> float:
            log_p = [line[token] for line, token in zip(table(exit, tokens), [*tokens, V.eos], strict=True)]
            return sum(log_p) / len(log_p)

        lists = {
            exit: plain_beam(lambda prefix, n=exit, t=table: t(n, prefix)[-1], 3, len(source) + 2, 1.0)
            for exit in ("shallow", "deep")
        }
        tokens, total = winner(lists["shallow"], lists["deep"], mean, alpha, exponent)
        best = found[row][0]
        assert tuple(best.tokens) == tokens and best.score == pytest.approx(total, rel=1e-5)
        assert {tuple(each.tokens) for each in found[row]} == {*lists["shallow"], *lists["deep"]}
        for each in found[row]:
            key = tuple(each.tokens)
            expected = {exit: mean(exit, key) for exit in lists} | {
                f"by_{exit}": float(key in lists[exit]) for exit in lists
            }
            assert each.features == pytest.approx(expected, rel=1e-5)
            assert each.log_prob == pytest.approx(mean("deep", key) * (len(key) + 1), rel=1e-5)
        differ += tokens not in lists["shallow"] or tokens not in lists["deep"]
    assert differ, "a candidate of one list alone must win"


def test_an_ensemble_of_a_model_with_itself_finds_the_same() -> None:
    model, config = grown(), DeepShallowConfig(beam=3, max_length_ratio=1.0, max_length_extra=2)
    alone, twice = (DeepShallow(config, each, V).search(SOURCE) for each in (model, Ensemble([model, model]).eval()))
    for one, other in zip(alone, twice, strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        assert [each.score for each in one] == pytest.approx([each.score for each in other], abs=1e-5)
