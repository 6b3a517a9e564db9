"""Minimum Bayes risk decoding: utilities are sacreBLEU's, and the sample of the highest expected utility wins."""

from collections.abc import Sequence

import numpy as np
import pytest
from sacrebleu.metrics.chrf import CHRF

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.search.base import Hypothesis, Translation
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.lines import LineInputs
from deepspeed_nmt.search.mbr import MinimumBayesRisk, MinimumBayesRiskConfig, pairwise
from deepspeed_nmt.search.sampling import SamplingConfig, SamplingSettings
from deepspeed_nmt.search.streams import translate_lines
from deepspeed_nmt.text import Tags
from tests.models import Letters, sharp_transformer

TEXTS = [
    "Der Hund schläft im Garten, nicht im Haus.",
    "Der Hund schläft im Haus.",
    "der hund",
    "Eine Katze, eine Katze, eine Katze!",
    "",
    "?",
    "Der Hund schläft im Garten",
]
CHRF2 = CHRF()


def test_utilities_are_those_of_sacrebleu() -> None:
    expected = [[CHRF2.sentence_score(text, [other]).score for other in TEXTS] for text in TEXTS]
    np.testing.assert_allclose(pairwise(TEXTS), expected, rtol=1e-9, atol=1e-9)


def search(**settings: object) -> MinimumBayesRisk:
    model = build_transformer(
        TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=1, decoder_layers=1), Vocabulary(20)
    )
    return MinimumBayesRisk(MinimumBayesRiskConfig.model_validate(settings), model.eval(), Vocabulary(20))


def test_texts_are_ranked_by_expected_utility() -> None:
    samples = [0, 1, 1, 3, 6, 0, 0, 2]
    hypotheses = [Hypothesis([place], -float(place), -float(place)) for place, _ in enumerate(samples)]
    texts = [TEXTS[number] for number in samples]
    ranked = [(one, texts[one.tokens[0]]) for one in search().rank(hypotheses, texts)]
    expected = {
        TEXTS[number]: sum(CHRF2.sentence_score(TEXTS[number], [TEXTS[other]]).score for other in samples) / 8
        for number in samples
    }
    assert [text for _, text in ranked] == sorted(expected, key=lambda text: -expected[text])
    assert [each.score for each, _ in ranked] == pytest.approx(sorted(expected.values(), reverse=True))
    assert {text: each.features["samples"] for each, text in ranked} == {
        TEXTS[0]: 3, TEXTS[1]: 2, TEXTS[3]: 1, TEXTS[6]: 1, TEXTS[2]: 1,
    }  # fmt: skip
    best = {text: each.log_prob for each, text in ranked}
    assert best[TEXTS[0]] == 0.0 and best[TEXTS[1]] == -1.0, "the most probable sample of a text stands for it"


def test_a_tag_that_is_not_written_is_not_compared() -> None:
    class Tagging(Letters):
        def decode(self, tokens: Sequence[int]) -> str:
            return super().decode(tokens).replace("z", "z ", 1)

    model, drawn = sharp_transformer(1, Letters.vocabulary.size, 1.5), {"samples": 12, "max_length": 6}

    def translated(config: SamplingSettings) -> list[Translation]:
        options, inputs = DecodeOptions(nbest=12), LineInputs(tags=Tags(target="z"))
        (best,) = translate_lines(model, Tagging(), ["abc"], config, options, inputs=inputs)
        return best

    samples = [one.text for one in translated(SamplingConfig(**drawn))]
    expected = dict(zip(samples, pairwise(samples).mean(axis=1), strict=True))
    assert len(expected) > 3 and not any(text.startswith("z ") for text in samples)
    ranked = translated(MinimumBayesRiskConfig(**drawn))
    assert {one.text: one.score for one in ranked} == pytest.approx(expected)
