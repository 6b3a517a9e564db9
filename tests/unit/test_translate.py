"""Translation of a stream: complete, in order, and in bounded memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import Memory, TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.search import streams as module
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.beam import BeamConfig
from deepspeed_nmt.search.decode_options import DecodeOptions
from deepspeed_nmt.search.lines import warn_of_form
from deepspeed_nmt.text import TextForm, text_of
from tests.models import PAD, Letters


def split(named: dict[str, Any]) -> tuple[DecodeOptions, dict[str, Any]]:
    """Return the options of a translation among named arguments, and the others."""
    options = {name: value for name, value in named.items() if name in DecodeOptions.model_fields}
    return DecodeOptions.of(options), {name: value for name, value in named.items() if name not in options}


def translate_lines(model: Any, tokenizer: Any, lines: Any, config: Any, **named: Any) -> Iterator[list[Translation]]:
    options, others = split(named)
    return module.translate_lines(model, tokenizer, lines, config, options, **others)


@pytest.fixture(scope="module")
def model() -> TranslationModel:
    torch.manual_seed(5)
    config = TransformerConfig(
        dim=32, ffn_dim=32, heads=4, encoder_layers=2, decoder_layers=2, share_embeddings="none"
    )
    model = build_transformer(config, Vocabulary(30))
    with torch.no_grad():
        model.projection.weight.mul_(3.0)
        for name, parameter in model.named_parameters():
            if "cross_attention" in name:
                parameter.mul_(3.0)
    return model.eval()


@pytest.fixture
def shapes(model: TranslationModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Shapes of the batches that are encoded during the test."""
    encode, seen = model.encode, []

    def spy(source_BS: Tensor, padded: bool = True) -> Memory:
        assert padded == bool(source_BS.eq(PAD).any())
        seen.append(tuple(source_BS.shape))
        memory: Memory = encode(source_BS, padded)
        return memory

    monkeypatch.setattr(model, "encode", spy)
    return seen


CONFIG = BeamConfig(beam=3)
LINES = ["hello", "a", "translation", "", "deep", "zz", "somewhat longer".replace(" ", ""), "   ", "b", "model", "x"]


def same(left: list[Translation], right: list[Translation]) -> bool:
    return [t.tokens for t in left] == [t.tokens for t in right] and all(
        abs(a.score - b.score) < 1e-4 for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(("max_tokens", "buffer_lines"), [(1, 1), (20, 4), (1000, 100)])
def test_order_is_kept_with_any_batches(
    model: TranslationModel, shapes: list[tuple[int, int]], max_tokens: int, buffer_lines: int
) -> None:
    alone = [next(translate_lines(model, Letters(), [line], CONFIG, nbest=3)) for line in LINES]
    assert len({translations[0].text for translations in alone}) >= 8, "equal translations would not show the order"
    with_ends = [line + "\n" for line in LINES]
    together = list(
        translate_lines(
            model, Letters(), with_ends, CONFIG, max_tokens=max_tokens, buffer_lines=buffer_lines, nbest=3
        )
    )
    assert len(together) == len(LINES) and sum(rows for rows, _ in shapes) == 2 * (len(LINES) - 2), "none is empty"
    assert all(map(same, together, alone))
    for line, translations in zip(LINES, together, strict=True):
        assert all(translation.text == Letters().decode(translation.tokens) for translation in translations)
        assert len(translations) == 3 if line.strip() else translations == [Translation("", 0.0, [])]
        scores = [translation.score for translation in translations]
        assert scores == sorted(scores, reverse=True)


def test_batches_are_bounded_and_have_similar_lengths(model: TranslationModel, shapes: list[tuple[int, int]]) -> None:
    lines = ["a" * (1 + 7 * number % 20) for number in range(100)]
    list(translate_lines(model, Letters(), lines, CONFIG, max_tokens=64, buffer_lines=1000))
    assert sum(rows for rows, _ in shapes) == 100
    assert all(rows * longest <= 64 for rows, longest in shapes)
    assert [longest for _, longest in shapes] == sorted((longest for _, longest in shapes), reverse=True)
    true_tokens = sum(len(line) + 1 for line in lines)
    assert sum(rows * longest for rows, longest in shapes) < 1.15 * true_tokens


def test_lines_are_read_on_demand(model: TranslationModel) -> None:
    read = []

    def endless() -> Iterator[str]:
        while True:
            read.append("abc")
            yield "abc"

    translations = translate_lines(model, Letters(), endless(), CONFIG, buffer_lines=4)
    assert not read
    for _ in range(4):
        next(translations)
        assert len(read) == 4
    next(translations)
    assert len(read) == 8


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings from now on."""
    seen: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda message, *values: seen.append(message % values))
    return seen


def test_a_very_long_line_is_cut_and_the_others_counted(
    model: TranslationModel, shapes: list[tuple[int, int]], warnings: list[str]
) -> None:
    lines = ["ab", "e" * 60_000, "cd", *["f" * 30] * 6]
    list(translate_lines(model, Letters(), lines, BeamConfig(beam=2, max_length_ratio=0.0), buffer_lines=3))
    assert shapes[0] == (3, 1025), "its beginning and EOS"
    assert warnings == ["line 2 has 60,000 tokens, more than 1,024 (`max_source_tokens`): its end is not translated"]
    warnings.clear()
    cut = list(translate_lines(model, Letters(), lines[2:], CONFIG, buffer_lines=3, max_source_tokens=20))
    assert same(cut[1], next(translate_lines(model, Letters(), ["f" * 20], CONFIG)))
    assert warnings == [
        "line 2 has 30 tokens, more than 20 (`max_source_tokens`): its end is not translated",
        "6 of 7 lines were cut",
    ]


def test_the_rest_of_a_huge_line_is_not_encoded(model: TranslationModel, warnings: list[str]) -> None:
    encoded: list[int] = []

    class Counting(Letters):
        def encode(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode(text.strip())

    (expected,) = translate_lines(model, Letters(), ["fgh" * 10], CONFIG, max_source_tokens=30)
    lines = ["ab", "fgh" * 1_000_000 + "\n", "cd"]
    found = list(translate_lines(model, Counting(), lines, CONFIG, max_source_tokens=30))
    assert same(found[1], expected) and max(encoded) < 100_000
    assert warnings == [
        "line 2 has 65,536 tokens or more, more than 30 (`max_source_tokens`): its end is not translated"
    ]


def test_a_model_may_read_less(model: TranslationModel, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "longest_source", 11)
    (cut,) = translate_lines(model, Letters(), ["f" * 30], CONFIG)
    assert same(cut, next(translate_lines(model, Letters(), ["f" * 10], CONFIG)))
    assert warnings == ["line 1 has 30 tokens, more than 10 (all that the model reads): its end is not translated"]


def test_strict_refuses_a_long_line_when_it_is_read(model: TranslationModel) -> None:
    found = translate_lines(
        model, Letters(), ["ab", "cd", "e" * 9], CONFIG, buffer_lines=2, max_source_tokens=8, strict=True
    )
    assert len([next(found), next(found)]) == 2
    with pytest.raises(DataError, match=r"line 3 .* 9 tokens, more than 8 \(`max_source_tokens`\)"):
        next(found)


NOT_UTF8 = [text_of(line) for line in (b"ab\n", b"c\xe9\n", "c\ufffd\n".encode(), b"d\xff\xfe", b"\x80")]


def test_lines_that_are_not_utf8_are_counted(model: TranslationModel, warnings: list[str]) -> None:
    list(translate_lines(model, Letters(), NOT_UTF8, CONFIG, buffer_lines=2))
    first, count = (each for each in warnings if "UTF-8" in each)
    assert first.startswith("line 2 of the source has bytes that are not UTF-8")
    assert count == "3 of 5 lines have bytes that are not UTF-8", "U+FFFD in the text is no damage"
    found = translate_lines(model, Letters(), NOT_UTF8, CONFIG, buffer_lines=1, strict=True)
    next(found)
    with pytest.raises(DataError, match="line 2 of the source is not UTF-8"):
        next(found)


def test_many_unknown_tokens_are_told_once(model: TranslationModel, warnings: list[str]) -> None:
    rare = ["abcdefghijklmnopqrstu", "猫", "abcdefghijklmnopqrstu", "a"]
    list(translate_lines(model, Letters(), rare, CONFIG))
    assert not warnings, "1 of 44"
    list(translate_lines(model, Letters(), ["日本語です", "ab", *rare, "日本"], CONFIG, buffer_lines=2))
    assert len(warnings) == 1
    assert "5 of the 7 tokens up to line 2 (71%) are unknown to the vocabulary" in warnings[0]


@pytest.mark.parametrize(
    ("text", "lines", "said"),
    [
        (TextForm("moses", "en"), ["A dog sleeps.", "Yes"], "example by `sacremoses -l en tokenize`"),
        (TextForm("moses", "en"), ["A dog sleeps .", "Yes", "Mr. Smith", "and so on etc."], ""),
        (TextForm("raw"), ["A dog sleeps .\n"], "1 of the first 1 lines end in ' .' and look tokenised, but the run"),
        (TextForm("raw"), [*["A dog sleeps."] * 100, *["A dog sleeps ."] * 100], ""),
    ],
)
def test_a_source_of_another_form_than_the_training_text_is_warned_of(
    text: TextForm, lines: list[str], said: str, warnings: list[str]
) -> None:
    assert list(warn_of_form(iter(lines), text)) == lines
    assert [said in each for each in warnings] == [True] * bool(said)
