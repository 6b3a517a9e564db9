"""Sampled segmentations: pure functions of (seed, pair, side, number), with the right probabilities."""

import io
import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import cast

import pytest
import sentencepiece

from deepspeed_nmt.data import sentencepiece as pieces
from deepspeed_nmt.data.sentencepiece import BpeSampler, SentencePieceTokenizer, UnigramSampler, sampler_of
from deepspeed_nmt.data.tokenizer import ALPHA, SampledSegmentations
from deepspeed_nmt.data.vocabulary_training import VocabularyType, adopt_models, train_subwords
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.sample import sentence_pairs
from tests.support import ROOT

PAIRS = list(itertools.islice(sentence_pairs(3), 300))
LINES = [source for source, _ in PAIRS[:60]]
SYMBOLS = ("<bt>", "<num>")
TYPES: tuple[VocabularyType, ...] = ("bpe", "unigram")


def made(kind: VocabularyType) -> SentencePieceTokenizer:
    """Return a vocabulary of a type."""
    lines = [line for pair in PAIRS for line in pair]
    return train_subwords(lines, 300, vocabulary_type=kind, symbols=SYMBOLS)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, SentencePieceTokenizer]:
    """A vocabulary of each type."""
    return {kind: made(kind) for kind in TYPES}


@pytest.mark.parametrize("kind", TYPES)
def test_samples_are_other_segmentations_of_the_same_text(
    kind: str, tokenizers: dict[str, SentencePieceTokenizer]
) -> None:
    tokenizer, sampling = tokenizers[kind], SampledSegmentations(3, ALPHA[kind], 7)
    samples = [tokenizer.sample_batch(LINES, "source", sampling, number, 0) for number in range(3)]
    plain = tokenizer.encode_batch(LINES)
    for each in samples:
        assert [tokenizer.decode(tokens) for tokens in each] == LINES
        assert sum(a != b for a, b in zip(each, plain, strict=True)) > len(LINES) / 4
    assert all(a != b for a, b in itertools.combinations(samples, 2))
    again = SampledSegmentations(3, ALPHA[kind], 8)
    assert tokenizer.sample_batch(LINES, "source", again, 0, 0) != samples[0]
    assert tokenizer.sample_batch(LINES, "target", sampling, 0, 0) != samples[0]
    same = tokenizer.sample_batch([LINES[0]] * 40, "source", sampling, 0, 0)
    assert len(set(map(tuple, same))) > 5, "equal sentences of different pairs have samples of their own"


@pytest.mark.parametrize("kind", TYPES)
def test_samples_do_not_depend_on_the_process_or_the_batch(
    kind: str, tokenizers: dict[str, SentencePieceTokenizer], tmp_path: Path
) -> None:
    tokenizer, sampling = tokenizers[kind], SampledSegmentations(2, ALPHA[kind], 7)
    whole = tokenizer.sample_batch(LINES, "source", sampling, 1, 100)
    parts = [tokenizer.sample_batch(LINES[at : at + 5], "source", sampling, 1, 100 + at) for at in (30, 10, 35, 0)]
    assert parts == [whole[at : at + 5] for at in (30, 10, 35, 0)]
    tokenizer.save(tmp_path)
    program = f"""
from pathlib import Path
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.data.tokenizer import SampledSegmentations
print(open_tokenizer(Path({str(tmp_path)!r})).sample_batch({LINES!r}, "source", {sampling!r}, 1, 100))
"""
    # SentencePiece's own sampling would differ here: each process salts its generator.
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert other.stdout.strip() == str(whole)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_word_is_sampled_up_to_a_length_and_remembered_up_to_a_shorter_one(
    kind: str, tokenizers: dict[str, SentencePieceTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line without spaces is a word: the time to sample one grows with its square."""
    tokenizer, text, sampling = tokenizers[kind], "".join(LINES).replace(" ", ""), SampledSegmentations(2, 0.5, 7)
    longer, shorter = [text, 9 * text], [text[:150]] * 9
    assert tokenizer.sample_batch(longer, "source", sampling, 1, 0) == tokenizer.encode_batch(longer)
    drawn = tokenizer.sample_batch(shorter, "source", sampling, 1, 0)
    assert len(set(map(tuple, drawn))) > 1
    monkeypatch.setattr(pieces, "_CACHED_CHARACTERS", 999)
    assert tokenizer.sample_batch(shorter, "source", sampling, 1, 0) == drawn


def test_dropout_has_its_probabilities(tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizers["bpe"].model)
    dropout = 0.3
    sampler = cast(BpeSampler, sampler_of(tokenizers["bpe"].model, processor, dropout))
    for word in {word for line in LINES for word in line.split()}:
        tokens = tuple(processor.encode(word))
        kept, places = sampler._merges(tokens)
        assert len(kept) == len("\u2581" + word) - len(tokens)
        # All merges in their order give what SentencePiece gives.
        assert sampler._draw(tokens, cast(Random, _Fixed([0.0]))) == tokens
        skipped = sampler._draw(tokens, cast(Random, _Fixed([1.0 - 1e-9, *[0.0] * 999])))
        assert not places or len(skipped) == len(kept) + len(tokens)  # all merges are skipped
    word = tuple(processor.encode("near"))
    expected = _exact(sampler, word, dropout)
    random = Random(3)
    draws = 20_000
    counts = Counter(tuple(sampler._draw(word, random)) for _ in range(draws))
    assert counts.keys() <= expected.keys() and sum(expected.values()) == pytest.approx(1.0)
    for segmentation, probability in expected.items():
        deviation = math.sqrt(probability * (1 - probability) / draws)
        assert abs(counts[segmentation] / draws - probability) < 5 * deviation + 1e-9, segmentation


class _Fixed:
    """A generator of given numbers."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


def _exact(sampler: BpeSampler, word: tuple[int, ...], dropout: float) -> dict[tuple[int, ...], float]:
    """Return the probability of each segmentation, by all sequences of merges made and skipped."""
    found: Counter[tuple[int, ...]] = Counter()
    states = [(1.0, list("".join(sampler._texts[number] for number in word)))]
    while states:
        probability, parts = states.pop()
        pairs = [(-sampler._scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts))
                 if a + b in sampler._scores]  # fmt: skip
        for skipped, (_, at) in enumerate(sorted(pairs)):
            merged = [*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]]
            states.append((probability * dropout**skipped * (1 - dropout), merged))
        found[tuple(sampler._numbers[part] for part in parts)] += probability * dropout ** len(pairs)
    return found


def test_a_unigram_model_draws_by_its_probabilities(tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizers["unigram"].model)
    alpha = 0.3
    sampler = cast(UnigramSampler, sampler_of(tokenizers["unigram"].model, processor, alpha))
    text = max({word for line in LINES for word in line.split()}, key=lambda word: (len(word), word))
    word = tuple(processor.encode(text))
    best = processor.nbest_encode(text, nbest_size=64, return_type="proto").nbests
    weights = {tuple(piece.id for piece in each.pieces): math.exp(alpha * each.score) for each in best}
    random, draws = Random(4), 20_000
    counts = Counter(tuple(sampler._draw(word, random)) for _ in range(draws))
    assert len(counts) > 3
    for segmentation, weight in weights.items():
        probability = weight / sum(weights.values())
        deviation = math.sqrt(probability * (1 - probability) / draws)
        assert abs(counts[segmentation] / draws - probability) < 5 * deviation + 1e-9


@pytest.mark.parametrize("kind", TYPES)
def test_symbols_and_unknown_characters_stay_whole(kind: str, tokenizers: dict[str, SentencePieceTokenizer]) -> None:
    tokenizer = tokenizers[kind]
    text = "<bt> the <num> house 猫 near<num>the river"
    plain = tokenizer.encode(text)
    for number in range(50):
        (tokens,) = tokenizer.sample_batch([text], "source", SampledSegmentations(50, 0.5, 1), number, 0)
        assert [token for token in tokens if token < 6] == [token for token in plain if token < 6]
        assert tokens[0] == 4 and tokenizer.decode(tokens) == tokenizer.decode(plain)


@pytest.mark.parametrize("settings", [{"add_dummy_prefix": False}, {"treat_whitespace_as_suffix": True}], ids=str)
def test_a_unigram_model_without_marks_before_words_is_refused(settings: dict[str, bool], tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, model_type="unigram", vocab_size=200, minloglevel=4,
        hard_vocab_limit=False, **settings,
    )  # fmt: skip
    (tmp_path / "own.model").write_bytes(model.getvalue())
    with pytest.raises(DataError, match="need a unigram model that sets its mark of a space before each word"):
        adopt_models([tmp_path / "own.model"]).sample_batch([], "source", SampledSegmentations(2, 0.2, 1), 0, 0)
