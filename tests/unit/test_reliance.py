"""Signs of doubt: equal to scores of given translations, by every search; flags; the filter of pairs."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deepspeed_nmt.api import Translator
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.search.alignment import watched
from deepspeed_nmt.search.forced import blind_log_probs, token_log_probs
from deepspeed_nmt.search.models import Ensemble, members_of
from deepspeed_nmt.search.reliance import COVERED, Reliance, ScoredTranslation, repetition
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.text import Tags, join_segments, shared_words
from tests.models import Letters, sharp_transformer, sharpened

LINES = ["hello", "a", "translation", "", "deep", "zz", "longer", "model"]


def opened(name: str, **settings: Any) -> Translator:
    found = SEARCHES[name].config.model_validate({"name": name, **settings})
    assert isinstance(found, SearchConfig)
    model = sharp_transformer(vocab_size=30, factor=2.0)
    if name == "deep_shallow":
        torch.manual_seed(4)
        shape = {"dim": 16, "ffn_dim": 24, "heads": 2, "encoder_layers": 1, "decoder_layers": 2}
        config = DepthGrowingConfig.model_validate({**shape, "top_decoder_layers": 1})
        model = sharpened(build_depth_growing(config, Vocabulary(30)), 2.0)
    return Translator(model, Letters(), found, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "mask_predict"])
def test_every_search_reports_what_forced_decoding_measures(name: str) -> None:
    others: dict[str, dict[str, Any]] = {"sampling": {"samples": 4}, "mbr": {"samples": 4}, "speculative": {}}
    others["choosing_exits"] = {"beam": 2, "exits": (1, 2), "rule": "confidence", "threshold": -2.5}
    translator = opened(name, **others.get(name, {"beam": 2}))
    if name == "beam":
        translator.model = Ensemble([translator.model, sharp_transformer(2, vocab_size=30)], [0.7, 0.3]).eval()
    extra: dict[str, Any] = {"constraints": [["b"]] * len(LINES)} if name == "constrained_beam" else {}
    found = [best[0] for best in translator.stream(LINES, reliance=True, token_scores=True, **extra)]
    given = translator.score(LINES, [one.text for one in found], reliance=True)
    by_line = list(translator.stream(LINES, reliance=True, max_tokens=1, **extra))
    for line, one, scored, (alone, *_) in zip(LINES, found, given, by_line, strict=True):
        assert one.reliance is not None and alone.reliance is not None
        if not line:
            assert one.reliance == Reliance([], [], []) and one.reliance.reliance == 0.0 and not one.reliance.flags
            continue
        assert one.reliance.tokens == one.tokens == scored.tokens
        assert tuple(one.reliance.log_probs) == one.token_scores
        assert one.reliance.log_probs == pytest.approx(scored.log_probs, abs=1e-4)
        assert one.reliance.token_reliance == pytest.approx(scored.token_reliance, abs=1e-4)
        assert alone.tokens == one.tokens and alone.token_scores is None
        assert alone.reliance.token_reliance == pytest.approx(one.reliance.token_reliance, abs=1e-4)
        assert one.reliance.coverage is None
    moved = [abs(one.reliance.reliance or 0.0) for one in found if one.reliance is not None]
    assert max(moved) > 0.01, "a source that changes nothing tests nothing"


class Begun(Letters):
    """A tokenizer whose sources begin with BOS, unless they are empty, as those of BERTs do."""

    def encode_batch(self, texts: Sequence[str], side: str) -> list[list[int]]:
        tokens = super().encode_batch(texts, side)
        return [[1, *each] if each and side == "source" else each for each in tokens]


def test_the_source_without_words_begins_as_others_do() -> None:
    model, vocabulary = sharp_transformer(1), Letters.vocabulary
    for tokenizer, source in ((Letters(), [2]), (Begun(), [1, 2])):
        blind = blind_log_probs(model, tokenizer, "", [[5, 6]], "cpu")
        assert blind == token_log_probs(model, vocabulary, torch.tensor([source]), False, [[[5, 6]]])[0]


def test_details_can_be_had_together() -> None:
    translator = opened("beam", beam=2)
    details: dict[str, Any] = {"reliance": True, "alignment": True, "alignment_layer": 2, "nbest": 2}
    plain = translator.translate(LINES, nbest=2)
    for line, best, others in zip(LINES, translator.stream(LINES, **details), plain, strict=True):
        assert [one.tokens for one in best] == [one.tokens for one in others]
        assert all(one.reliance is None and one.token_scores is None for one in others)
        for one in best:
            assert one.reliance is not None and (one.reliance.coverage is None) == (not line)
            assert one.reliance.log_prob == pytest.approx(one.log_prob, abs=1e-4)


def test_the_tag_of_a_target_covers_no_source() -> None:
    translator = opened("beam", beam=2, max_length=2)
    translator.tags = Tags(target="z")
    (model,), sources = members_of(translator.model), ["translation", "hello"]
    attention, vocabulary = model.cross_attentions()[2], translator.tokenizer.vocabulary
    found = translator.translate(sources, reliance=True, alignment=True, alignment_layer=2)
    for source, one in zip(sources, found, strict=True):
        source_1S = torch.tensor([[*translator.tokenizer.encode(source), vocabulary.source.eos]])
        with torch.inference_mode(), watched([attention]) as seen:
            model.decode(torch.tensor([[vocabulary.bos, *one.tokens]]), model.encode(source_1S))
        words_TS = seen[attention][0, 1:, :-1]
        assert one.reliance is not None
        assert one.reliance.coverage == pytest.approx((words_TS.sum(dim=0) >= COVERED).float().mean().item())


def test_copies_are_counted_in_whole_words_where_text_is_segmented() -> None:
    class Segmented(Letters):
        def reference(self, text: str) -> str:
            return join_segments(text)

    translator = opened("beam", beam=1, max_length=6)
    translator.tokenizer = Segmented()  # type: ignore[assignment]
    (one,) = translator.translate(["he@@ llo"], prefix=["hello"], reliance=True)
    assert one.text == "hello" and one.reliance is not None and one.reliance.copy == 1.0


def relying(end: float = -0.1, seen: float = -1.0, tokens: int = 9, period: int = 99, source: int = 99) -> Reliance:
    """Return the signs of tokens, repeated with a period, with a log-probability each, that are -4 without source."""
    scored = ScoredTranslation(
        [4 + place % period for place in range(tokens)], [*[seen] * tokens, end], [-4.0] * (tokens + 1)
    )
    source_tokens = [4 + place % source for place in range(tokens)]
    return Reliance.of(scored, "ein Hund und 3 Katzen", ("Ein Hund , 3 cats", source_tokens), 0.5)


def test_flags_and_their_measures() -> None:
    assert relying().flags == () and relying().copy == pytest.approx(2 / 5)
    assert relying(seen=-2.2).flags == () and relying(seen=-2.2).source_share == pytest.approx(1 - 19.9 / 40)
    assert relying(seen=-2.3).flags == ("detached",) and relying(seen=-5.0).flags == ("detached",)
    assert relying(seen=-2.3).reliance == pytest.approx((9 * 1.7 + 3.9) / 10)
    assert relying(end=math.log(0.009), seen=-2.0).flags == ("detached", "truncated")
    assert relying(end=math.log(0.009)).flags == ("truncated",)
    shares = [ScoredTranslation([], [0.0], blind).source_share for blind in ([0.0], None)]
    assert shares == [0.0, None]
    assert relying(period=2).flags == ("repeating",) and relying(period=2).repetition == pytest.approx(6 / 8)
    assert relying(period=2, source=2).repetition == 0.0, "the source repeats itself, too"
    assert [repetition(tokens) for tokens in ([], [4], [4, 5, 4, 5])] == [0.0, 0.0, pytest.approx(1 / 3)]
    assert shared_words("12 , 3", "12") == 0.0


def test_a_line_of_the_file() -> None:
    fields = relying(end=-13.0, seen=-2.0).fields(["▁a", "b"]).split("\t")
    numbers = [float(field) for field in fields[:6]]
    assert numbers == pytest.approx([0.9, 0.9 / 4.0, -3.1, 0.5, 0.0, 0.4])
    assert fields[6:8] == ["detached,truncated", "▁a b"]
    assert [len(field.split()) for field in fields[8:]] == [10, 10] and fields[9].split()[-1] == "-9"
    assert Reliance([], [], []).fields([]) == "\t".join(["0", "0", "0", "", "0", "0", "", "", "", ""])
