"""Beam search against exhaustive and greedy search; results do not depend on the batch; length penalties."""

from itertools import product

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn import cache
from deepspeed_nmt.search.base import LengthPenalty
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.left_to_right import largest
from tests.models import BOS, EOS, PAD, padded, random_sources

SEEDS = [1, 2]


def transformer(seed: int, vocab_size: int = 24, sharpness: float = 3.0) -> TranslationModel:
    """Return a random Transformer whose predictions are far from uniform and depend on the source."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        dim=32, ffn_dim=48, heads=4, encoder_layers=2, decoder_layers=3, share_embeddings="none", dropout=0.3
    )
    model = build_transformer(config, Vocabulary(vocab_size))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "cross_attention" in name:
                parameter.mul_(2.0)
        model.projection.weight.mul_(sharpness)
    return model.eval()


def sources(seed: int, lengths: list[int], vocab_size: int = 24) -> list[list[int]]:
    return random_sources(lengths, vocab_size, seed, least=3)


def beam_search(model: TranslationModel, **settings: object) -> BeamSearch:
    return BeamSearch(BeamConfig.model_validate(settings), model, Vocabulary(model.vocab_size))


def log_probs(model: TranslationModel, source: list[int], prefix: list[int]) -> Tensor:
    """Compute log p(next token | source, prefix) without a cache. Shape: -> (V,)"""
    memory = model.encode(torch.tensor([source]))
    states = model.decode(torch.tensor([[BOS, *prefix]]), memory)[0]
    result: Tensor = model.projection(states[0, -1]).float().log_softmax(dim=0)
    return result


def teacher_forced(model: TranslationModel, source: list[int], tokens: list[int]) -> float:
    """Compute log p(tokens EOS | source) in one uncached pass."""
    states = model.decode(torch.tensor([[BOS, *tokens]]), model.encode(torch.tensor([source])))[0]
    rows = model.projection(states[0]).float().log_softmax(dim=1)
    return float(rows.gather(1, torch.tensor([[*tokens, EOS]]).T).sum())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("penalty", ["gnmt:0.6", "none", "mean"])
def test_a_wide_beam_equals_exhaustive_search(seed: int, penalty: str) -> None:
    model, (source,) = transformer(seed, vocab_size=6), sources(seed, [5], vocab_size=6)
    limit = 4  # number of tokens with EOS: 1 + 3 + 9 + 27 translations over three words
    divide_by = LengthPenalty.parse(penalty)
    expected = []
    with torch.no_grad():
        for length in range(limit):
            for words in product(range(3, 6), repeat=length):
                log_prob = teacher_forced(model, source, list(words))
                expected.append((log_prob / divide_by(length + 1), list(words)))
    expected.sort(reverse=True)
    search = beam_search(model, beam=3**limit, length_penalty=penalty, max_length_ratio=0, max_length_extra=limit)
    (found,) = search.search(torch.tensor([source]))
    assert [hypothesis.tokens for hypothesis in found] == [words for _, words in expected]
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score for score, _ in expected], abs=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_beam_1_is_greedy(seed: int) -> None:
    model, rows = transformer(seed), sources(seed, [3, 9, 6, 2, 12, 7])
    found = beam_search(model, beam=1, max_length_ratio=1.5, max_length_extra=3).search(padded(rows))
    by_length = set()
    for row, hypotheses in zip(rows, found, strict=True):
        limit, tokens, total = int(1.5 * len(row)) + 3, [], 0.0
        with torch.no_grad():
            while True:
                scores = log_probs(model, row, tokens)
                allowed = scores.index_fill(0, torch.tensor([PAD, BOS]), -torch.inf)
                token = int(allowed.argmax()) if len(tokens) + 1 < limit else EOS
                total += float(scores[token])
                if token == EOS:
                    break
                tokens.append(token)
        assert [hypothesis.tokens for hypothesis in hypotheses] == [tokens]
        assert hypotheses[0].log_prob == pytest.approx(total, abs=1e-4)
        by_length.add(len(tokens))
    assert len(by_length) > 1, "equal lengths of all translations test nothing"


@pytest.mark.parametrize("vocab_size", [50, 64 * 80, 64 * 80 + 17])
def test_the_vocabulary_is_searched_whole(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    x_BN = torch.randn(80, 4 * vocab_size)
    x_BN[:10, -12:] += 10.0
    values, indices = largest(x_BN, vocab_size, 10)
    expected = x_BN.topk(10, dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(x_BN.gather(1, indices), values)


def test_positions_of_dropped_hypotheses_leave_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    source_BS = padded(sources(4, [9, 7, 6, 4]))
    search = beam_search(transformer(2), beam=4, max_length_extra=20)
    expected = search.search(source_BS)
    monkeypatch.setattr(cache, "_CROWDED", 8)
    shares = []
    clear = cache.Ancestry.clear

    def watched(ancestry: cache.Ancestry) -> Tensor | None:
        before = ancestry.positions
        if (kept := clear(ancestry)) is not None:
            shares.append(kept.shape[1] / before)
        return kept

    monkeypatch.setattr(cache.Ancestry, "clear", watched)
    found = search.search(source_BS)
    assert shares and max(shares) <= 0.75
    assert [[each.tokens for each in best] for best in found] == [[each.tokens for each in best] for best in expected]
    scores = [[each.score for each in best] for best in found]
    torch.testing.assert_close(scores, [[each.score for each in best] for best in expected], atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        ("gnmt:1", 7, 2.0),
        ("gnmt:0.5", 19, 2.0),
        ("gnmt:0", 30, 1.0),
        ("power:2", 3, 9.0),
        ("power:0.5", 16, 4.0),
        ("mean", 11, 11.0),
        ("none", 11, 1.0),
        ("power:10", 100_000, 1e50),
    ],
)
def test_formulas(text: str, length: int, expected: float) -> None:
    assert LengthPenalty.parse(text)(length) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("text", ["", "gnmt:", "power:-1", "power:nan", "gnmt:11", "mean:2", "wu:0.6"])
def test_errors_name_the_allowed_values(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        LengthPenalty.parse(text)
    message = str(error.value)
    assert f"'{text}'" in message
    assert all(name in message for name in ("gnmt:A", "power:A", "mean", "none"))
