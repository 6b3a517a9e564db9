"""Sampled segmentations of the training text: which ones, and the seeds that they are drawn with."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_nmt.core.vocabulary import SIDES, Side

ALPHA = {"bpe": 0.1, "unigram": 0.2}
"""Default of :attr:`SampledSegmentations.alpha` by the type of a vocabulary.

Sentences become a fifth to a third longer.
"""


@dataclass(frozen=True)
class SampledSegmentations:
    """Sampled segmentations of a text.

    Each is a function of (seed, number of the pair, side, number of the segmentation), so that it does not depend on
    the processes that encode the text.

    Attributes:
        count: number of segmentations of each sentence.
        alpha: of BPE the probability that a merge is skipped (Provilkov, Emelianenko and Voita 2020: BPE-Dropout); of
            a unigram model the exponent of the segmentations' probabilities (Kudo 2018: Subword Regularization).
        seed: seed of all of them.
    """

    count: int
    alpha: float
    seed: int

    def seeds(self, number: int, side: Side, first: int, pairs: int) -> list[int]:
        """Return the seeds of successive sentences.

        Args:
            number: of the segmentation, from 0.
            side: of the sentences.
            first: number of the first pair in the clean text, from 0.
            pairs: number of sentences.

        Returns:
            Numbers of 64 bits. Length: pairs
        """
        from deepspeed_nmt.randomness import Purpose, keys  # imports torch, which a tokenizer does without

        parts = self.seed, Purpose.SEGMENTATION, number, SIDES.index(side)
        seeds: list[int] = keys(pairs, *parts, start=first).tolist()
        return seeds


def split_name(number: int) -> str:
    """Return the name of the training split with a segmentation: ``train``, ``train.1``, ``train.2`` and so on."""
    return f"train.{number}" if number else "train"
