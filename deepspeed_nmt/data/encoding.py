"""Encoding of sentence pairs: tags in front, and any number of sampled segmentations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.segmentation import SampledSegmentations
from deepspeed_nmt.data.tokenizer import Tokenizer, TokenLists
from deepspeed_nmt.text import NO_TAGS, Tags

EncodedPairs = dict[Side, TokenLists]
"""Tokens of several pairs by side, without EOS."""


@dataclass(frozen=True)
class PairEncoder:
    """Encoder of the pairs of a corpus. It can be pickled; what it returns depends on its arguments only.

    Attributes:
        tokenizer: vocabularies of both sides.
        tags: symbols in front of all sentences; an empty sentence gets none.
        sampling: segmentations to draw; None for the one that the vocabulary gives.
    """

    tokenizer: Tokenizer
    tags: Tags = NO_TAGS
    sampling: SampledSegmentations | None = None

    def check(self) -> None:
        """Check that the vocabularies have the tags, and several segmentations if they are to be drawn.

        Raises:
            DataError: if not.
        """
        for side in SIDES:
            self._tag(side)
        if self.sampling is not None:
            self.tokenizer.sample_batch([], "source", self.sampling, 0, 0)

    def encode(self, pairs: Sequence[tuple[str, str]], first: int = 0, threads: int = 1) -> list[EncodedPairs]:
        """Encode successive pairs.

        Args:
            pairs: source and target text.
            first: number of the first pair in the clean text, from 0. Sampled segmentations depend on it.
            threads: number of threads; sampling takes this one.

        Returns:
            The pairs in each segmentation.
        """
        texts: dict[Side, list[str]] = {"source": [pair[0] for pair in pairs], "target": [pair[1] for pair in pairs]}
        sampling = self.sampling
        if sampling is None:
            return [
                {side: self._tagged(self.tokenizer.encode_batch(texts[side], side, threads), side) for side in SIDES}
            ]
        return [
            {
                side: self._tagged(self.tokenizer.sample_batch(texts[side], side, sampling, number, first), side)
                for side in SIDES
            }
            for number in range(sampling.count)
        ]

    def texts(self, texts: Iterable[str], side: Side) -> Iterable[str]:
        """Return lines of one side as encoding and decoding should keep them: with the tag in front."""
        tag = self.tags.of(side)
        return texts if tag is None else (f"{tag} {text}" if text else text for text in texts)

    def _tag(self, side: Side) -> int | None:
        tag = self.tags.of(side)
        return None if tag is None else self.tokenizer.symbol(side, tag)

    def _tagged(self, sentences: TokenLists, side: Side) -> TokenLists:
        tag = self._tag(side)
        return sentences if tag is None else [[tag, *each] if each else each for each in sentences]


def longest(segmentations: Sequence[EncodedPairs], side: Side) -> list[int]:
    """Return the length of each sentence of a side in the segmentation in which it is longest."""
    return [max(map(len, sentences)) for sentences in zip(*(each[side] for each in segmentations), strict=True)]
