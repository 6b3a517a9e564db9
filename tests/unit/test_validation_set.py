"""Batches of the validation set on each rank."""

from pathlib import Path

import numpy as np
import pytest

from deepspeed_nmt.core.batch import UpdateInfo
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import ValidationSet
from tests.support import random_corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return random_corpus(tmp_path, pairs=50, vocab=50, seed=3, split="valid")


def of_rank(corpus: Corpus, rank: int = 0, ranks: int = 1, micro: int = 200) -> ValidationSet:
    return ValidationSet(corpus, Vocabulary(50), BatchConfig(micro_tokens=micro), rank, ranks)


def test_ranks_share_all_sentences_or_a_slice(corpus: Corpus) -> None:
    for sentences in (None, np.array([3, 8, 11, 30])):
        shares = [list(of_rank(corpus, rank, 3).batches(sentences)) for rank in range(3)]
        assert len({len(share) for share in shares}) == 1
        ids = sorted(int(i) for share in shares for batch in share for i in batch.sentence_ids_B if i >= 0)
        chosen = range(50) if sentences is None else sentences.tolist()
        assert ids == list(chosen)
        tokens = int(corpus.target_lengths[ids].sum())
        assert {batch.update for share in shares for batch in share} == {
            UpdateInfo(tokens=tokens, sentences=len(ids))
        }
        assert sum(batch.target_tokens for share in shares for batch in share) == tokens


def test_sources_of_other_sentences_keep_the_targets(corpus: Corpus) -> None:
    sentences = np.arange(0, 50, 2)
    other = {int(i): (int(i) + 2) % 50 for i in sentences}
    valid = of_rank(corpus)
    pairs = list(zip(valid.batches(sentences), valid.batches(sentences, other), strict=True))
    for own, swapped in pairs:
        assert own.target_output_BT.equal(swapped.target_output_BT)
        assert own.sentence_ids_B.equal(swapped.sentence_ids_B)
        for row, sentence in enumerate(own.sentence_ids_B.tolist()):
            source = corpus.source(other[sentence]).tolist()
            assert swapped.source_BS[row, : len(source) + 1].tolist() == [*source, 2]


def test_a_sentence_longer_than_a_micro_batch_is_accepted(corpus: Corpus) -> None:
    longest = int(max(corpus.source_lengths.max(), corpus.target_lengths.max()))
    batches = list(of_rank(corpus, micro=5).batches())
    assert max(batch.padded_tokens for batch in batches) == longest
