"""Deep-shallow decoding and ensembles against their definitions."""

from __future__ import annotations

import pytest
import torch

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.depth_growing import DepthGrowing, DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.deep_shallow import DeepShallow, DeepShallowConfig, mean_log_probs
from deepspeed_nmt.search.ensemble import Ensemble

V = Vocabulary(20)
SOURCE = torch.tensor([[7, 8, 9, 10, 2], [12, 13, 2, 0, 0], [5, 6, 7, 2, 0]])


def grown() -> DepthGrowing:
    torch.manual_seed(4)
    config = DepthGrowingConfig(dim=16, ffn_dim=24, heads=2, encoder_layers=1, decoder_layers=2, top_decoder_layers=1)
    model = build_depth_growing(config, V)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    return model.double().eval()


def plain(seed: int) -> TranslationModel:
    torch.manual_seed(seed)
    config = TransformerConfig(
        dim=16, ffn_dim=24, heads=2, encoder_layers=1, decoder_layers=2, share_embeddings="none"
    )
    model = build_transformer(config, V)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    return model.double().eval()


def log_prob(model: TranslationModel, row: int, tokens: list[int]) -> float:
    source = SOURCE[row][SOURCE[row] != 0].unsqueeze(0)
    states = model.decode(torch.tensor([[V.bos, *tokens]]), model.encode(source))[0]
    log_p = torch.log_softmax(model.projection(states)[0], dim=1)
    return sum(log_p[t, token].item() for t, token in enumerate([*tokens, V.eos]))


def test_mean_log_probs_equal_those_of_single_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_nmt.search.deep_shallow._LOGITS_AT_ONCE", 200)
    model = plain(1)
    candidates = [[(4, 5, 6), ()], [(9,)], [(4,), (5, 5), (6, 7, 8, 9)]]
    found = mean_log_probs(model, V, SOURCE, True, candidates)
    for row, each in enumerate(candidates):
        expected = [log_prob(model, row, list(tokens)) / (len(tokens) + 1) for tokens in each]
        assert found[row] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_the_best_hypothesis_of_both_nets_is_chosen_by_the_total_score(alpha: float) -> None:
    model = grown()
    deep, shallow = model, model.at_exit("shallow")
    config = DeepShallowConfig(beam=3, alpha=alpha, max_length_ratio=1.0, max_length_extra=3)
    found = DeepShallow(config, model, V).search(SOURCE)
    beams = [
        BeamSearch(BeamConfig(beam=3, max_length_ratio=1.0, max_length_extra=3), net, V).search(SOURCE)
        for net in (deep, shallow)
    ]
    assert any(d[0].tokens != s[0].tokens for d, s in zip(*beams, strict=True)), "the nets must disagree"
    for row in range(3):
        totals: dict[tuple[int, ...], float] = {}
        for own, other, beam in ((deep, shallow, beams[0][row]), (shallow, deep, beams[1][row])):
            for hypothesis in beam:
                count = len(hypothesis.tokens) + 1
                means = [log_prob(net, row, hypothesis.tokens) / count for net in (own, other)]
                total = (alpha * means[0] + (1 - alpha) * means[1]) * count**0.4
                key = tuple(hypothesis.tokens)
                totals[key] = max(total, totals.get(key, total))
        assert {tuple(h.tokens): h.score for h in found[row]} == pytest.approx(totals, rel=1e-5)
        assert found[row][0].score == max(h.score for h in found[row])


def test_an_ensemble_of_two_copies_equals_the_model() -> None:
    model, config = plain(1), BeamConfig(beam=3)
    alone = BeamSearch(config, model, V).search(SOURCE)
    twice = BeamSearch(config, Ensemble([model, model]).eval(), V).search(SOURCE)
    assert [[h.tokens for h in each] for each in twice] == [[h.tokens for h in each] for each in alone]
    assert twice[0][0].score == pytest.approx(alone[0][0].score, rel=1e-5)


def test_an_exit_of_an_ensemble_decodes() -> None:
    models, config = [plain(1), plain(2)], BeamConfig(beam=3)
    found = BeamSearch(config, Ensemble(models).eval().at_exit("1-1"), V).search(SOURCE)
    cut = Ensemble([model.at_exit("1-1") for model in models]).eval()
    assert found == BeamSearch(config, cut, V).search(SOURCE)
    assert Ensemble(models).train().at_exit("1-1").training


def test_an_ensemble_averages_probabilities() -> None:
    models = [plain(1), plain(2)]
    both = Ensemble(models).eval()
    memory, cache = both.encode(SOURCE), both.begin()
    logits = both.step(torch.full((3,), V.bos), memory, cache)
    p = [torch.softmax(m.step(torch.full((3,), V.bos), m.encode(SOURCE), m.begin()), dim=1) for m in models]
    torch.testing.assert_close(logits.exp(), ((p[0] + p[1]) / 2).float(), rtol=1e-5, atol=1e-7)
    found = BeamSearch(BeamConfig(beam=4), both, V).search(SOURCE)
    for row in range(3):  # the beam reorders the caches of both models
        alone = BeamSearch(BeamConfig(beam=4), both, V).search(SOURCE[row : row + 1])
        assert [h.tokens for h in alone[0]] == [h.tokens for h in found[row]]
