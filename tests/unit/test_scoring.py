"""Forced decoding against single sentences: token by token, at exits, by ensembles, over a stream."""

import math
from collections.abc import Sequence

import pytest
import torch

from deepspeed_nmt.api import Translator
from deepspeed_nmt.core.model import DecodableModel, TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.search import forced
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.forced import score_lines, token_log_probs
from deepspeed_nmt.search.mask_predict import MaskPredictConfig
from deepspeed_nmt.search.models import Ensemble
from tests import transformer_equations as equations
from tests.models import Letters

V = Vocabulary(30)
SOURCE = torch.tensor([[7, 8, 9, 10, 2], [12, 13, 2, 0, 0], [5, 6, 7, 2, 0]])
ASKED = [[(4, 5, 6), ()], [(9,)], [(4,), (5, 5), (6, 7, 8, 9)]]


def plain(seed: int) -> TranslationModel:
    torch.manual_seed(seed)
    config = TransformerConfig(
        dim=16, ffn_dim=24, heads=2, encoder_layers=2, decoder_layers=2, share_embeddings="none", norm="post"
    )
    model = build_transformer(config, V)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    return model.double().eval()


@torch.no_grad()
def expected(model: TranslationModel, source: list[int], tokens: Sequence[int]) -> list[float]:
    states = equations.bottom(model, "post", 2, source, [V.bos, *tokens])
    rows = equations.log_probs(states, model.projection.weight)
    return [float(row[token]) for row, token in zip(rows, [*tokens, V.eos], strict=True)]


@pytest.mark.parametrize("at_once", [1, 200, 1 << 24])
def test_token_log_probs_are_those_of_the_equations(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced, "_LOGITS_AT_ONCE", {"cpu": at_once})
    monkeypatch.setattr(forced, "_POSITIONS_AT_ONCE", at_once // 40)
    model = plain(1)
    found = token_log_probs(model, V, SOURCE, True, ASKED)
    for row, each in enumerate(ASKED):
        source = [token for token in SOURCE[row].tolist() if token != V.pad]
        for tokens, log_probs in zip(each, found[row], strict=True):
            assert log_probs == pytest.approx(expected(model, source, tokens), rel=1e-5)
    assert token_log_probs(model, V, SOURCE, True, [[], [], []]) == [[], [], []]


@pytest.mark.parametrize("models", [[1], [1, 2]])
def test_a_search_scores_its_translations_alike(models: list[int]) -> None:
    model: DecodableModel = plain(1) if len(models) == 1 else Ensemble([plain(seed) for seed in models]).eval()
    translator = Translator(model, Letters(), BeamConfig(beam=3), torch.device("cpu"))  # type: ignore[arg-type]
    sources = ["hello", "a", "deep", "zz"]
    for source, found in zip(sources, translator.stream(sources, nbest=3), strict=True):
        scored = list(translator.score([source] * 3, [each.text for each in found]))
        assert [each.tokens for each in scored] == [each.tokens for each in found]
        assert [each.log_prob for each in scored] == pytest.approx([each.log_prob for each in found], rel=1e-5)


@pytest.mark.parametrize(("max_tokens", "buffer_lines"), [(1, 1), (20, 2)])
def test_order_is_kept_with_any_batches(max_tokens: int, buffer_lines: int) -> None:
    model = plain(1)
    sources = ["hello", "hello", "a", "", "somewhat", "deep\n", "b"]
    translations = ["xyz", "", "longertranslation", "a", "", "deep\r\n", "b"]
    options = DecodeOptions(max_tokens=max_tokens, buffer_lines=buffer_lines)
    found = list(score_lines(model, Letters(), sources, translations, options, blind=""))
    for source, text, scored in zip(sources, translations, found, strict=True):
        tokens = Letters().encode(text)
        assert scored.tokens == tokens
        assert scored.log_probs == pytest.approx(
            expected(model, [*Letters().encode(source), V.eos], tokens), rel=1e-5
        )
        unseen = expected(model, [V.eos], tokens)
        assert scored.blind_log_probs == pytest.approx(unseen, rel=1e-5)
        assert scored.reliance == pytest.approx(scored.mean_log_prob - sum(unseen) / len(unseen), rel=1e-4, abs=1e-6)
        assert source.strip() or scored.reliance == pytest.approx(0.0, abs=1e-6)


def test_what_cannot_be_scored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain(1)
    with pytest.raises(DataError, match="1 source and more translations"):
        list(score_lines(model, Letters(), ["a"], ["a", "b"]))
    with pytest.raises(DataError, match="1 translation and more sources"):
        list(score_lines(model, Letters(), ["a", "b"], ["a"]))
    monkeypatch.setattr(model, "longest_target", 4)
    assert len(list(score_lines(model, Letters(), ["a"], ["abc"]))) == 1
    with pytest.raises(DataError, match=r"line 2 .* 4 tokens, more than 3"):
        list(score_lines(model, Letters(), ["a", "a"], ["a", "abcd"]))
    masked = Translator(model, Letters(), MaskPredictConfig(), torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a run that translates from left to right"):
        masked.score(["a"], ["b"])


def test_forced_scores_are_those_of_the_beam() -> None:
    model = plain(3)
    found = BeamSearch(BeamConfig(beam=3), model, V).search(SOURCE)
    again = token_log_probs(model, V, SOURCE, True, [[each.tokens for each in row] for row in found])
    for row, each in zip(found, again, strict=True):
        assert [math.fsum(values) for values in each] == pytest.approx([h.log_prob for h in row], rel=1e-5)
