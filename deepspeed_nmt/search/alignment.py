"""Alignments of translations with their sources, from the weights of cross-attention.

The target token at position t is linked to the source token with the largest weight, averaged over the heads of a
layer, at the decoder position that *predicts* it (Garg et al., "Jointly Learning to Align and Translate with
Transformer Models", 2019, section 4.1 describes this use of attention weights). EOS, and the token that begins a
BERT's source, are no candidates. The weights come from forced decoding of finished translations, so that the search
costs nothing more. Padding and special tokens are left out.

Links of tokens become links of words: word i of the source, as it was given, and word j of the translation, as it is
written, are linked if any of their tokens are. Words are separated by white space and counted from 0.

Legend: N translations, T target length, S source length, B sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.search.base import Links
from deepspeed_nmt.search.lines import LineTokenizer
from deepspeed_nmt.search.reliance import COVERED
from deepspeed_nmt.text import NO_TAGS, Tags

_MAX_WORD = 1 << 16
"""Characters of a word that are encoded; the tokens of its rest belong to it all the same."""
Weighted = Sequence[tuple[MultiHeadAttention, float]]
"""Cross-attentions, one of each model, and the models' weights."""


@contextmanager
def watched(attentions: Iterable[MultiHeadAttention]) -> Iterator[dict[MultiHeadAttention, Tensor]]:
    """Watch cross-attention over whole sentences during the block.

    Yields the weights of each in its newest application, as the mean of the heads. Shape: (N,T,S) each
    """
    seen: dict[MultiHeadAttention, Tensor] = {}

    def see(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(attention, MultiHeadAttention)
        query_NTD, memory, mask = (*args, kwargs.get("mask"))[:3]
        seen[attention] = attention.weights(query_NTD, memory, mask)

    hooks = [attention.register_forward_pre_hook(see, with_kwargs=True) for attention in dict.fromkeys(attentions)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class AttentionWatch:
    """Watch of the cross-attention during forced decoding.

    Args:
        combinations: each gives one link for every token, by the weighted sum of its attention weights.
        source_BS: source tokens.
        vocabulary: special tokens.
    """

    def __init__(self, combinations: Sequence[Weighted], source_BS: Tensor, vocabulary: Vocabulary) -> None:
        self._combinations = combinations
        source = vocabulary.source
        special = torch.tensor([source.pad, source.eos, source.bos], device=source_BS.device)
        self._special_BS = torch.isin(source_BS, special)
        self._seen: dict[MultiHeadAttention, Tensor] = {}
        self._links: list[dict[int, list[int]]] = [{} for _ in combinations]
        self._coverage: list[dict[int, float]] = [{} for _ in combinations]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during the block. Of a layer that is applied several times, the last application counts."""
        with watched(attention for combination in self._combinations for attention, _ in combination) as self._seen:
            yield

    def decoded(self, numbers: list[int], rows_N: Tensor, real_NT: Tensor) -> None:
        """Record the links of translations that were decoded at once; see :func:`token_log_probs`."""
        special_NS = self._special_BS.index_select(0, rows_N)
        words_N = (~special_NS).sum(dim=1).clamp(min=1)
        for place, combination in enumerate(self._combinations):
            parts = [self._seen[attention] * weight for attention, weight in combination]
            total_NTS = torch.stack(parts).sum(dim=0)
            best_NT = total_NTS.masked_fill(special_NS.unsqueeze(1), -1.0).argmax(dim=2)
            mass_NS = (total_NTS * real_NT.unsqueeze(2)).sum(dim=1) / sum(weight for _, weight in combination)
            covered_N = ((mass_NS >= COVERED) & ~special_NS).sum(dim=1) / words_N
            self._links[place] |= zip(numbers, best_NT.tolist(), strict=True)
            self._coverage[place] |= zip(numbers, covered_N.tolist(), strict=True)
        self._seen.clear()

    def links(self, combination: int, number: int, tokens: int) -> list[int]:
        """Return the source position to which each of the ``tokens`` tokens of a translation is linked."""
        return self._links[combination][number][:tokens]

    def coverage(self, combination: int, number: int) -> float:
        """Return the share of its source tokens that a translation covers; see :class:`Reliance`."""
        return self._coverage[combination][number]


def word_links(links: Sequence[int], source_words: Sequence[int], target_words: Sequence[int | None]) -> Links:
    """Return the links of words, given the source position of each target token and the word of each token."""
    pairs = {
        (source_words[position], word)
        for position, word in zip(links, target_words, strict=True)
        if word is not None and position < len(source_words)
    }
    return tuple(sorted(pairs))


def without_tags(links: Links | None, tags: Tags, text: str) -> Links | None:
    """Return the links of a translation, the tagged ``text``, as if there were no tags on either side."""
    if links is None or tags == NO_TAGS:
        return links
    before = int(tags.source is not None), int(tags.untagged(text) != text)
    shifted = ((source - before[0], target - before[1]) for source, target in links)
    return tuple((source, target) for source, target in shifted if min(source, target) >= 0)


def source_words(line: str, tokens: Sequence[int], tokenizer: LineTokenizer) -> list[int]:
    """Return the number of the word that each source token belongs to; the tokens may be cut.

    A token belongs to the first word up to which the line has that many tokens.
    """
    begins = int(list(tokens[:1]) == [tokenizer.vocabulary.source.bos])  # of a BERT's source
    numbers = [0] * begins
    for number, word in enumerate(re.finditer(r"\S+", line)):
        if len(numbers) >= len(tokens):  # the line was cut
            break
        end = min(word.end(), word.start() + _MAX_WORD)
        numbers += [number] * (len(tokenizer.encode(line[:end])) - len(numbers))
    last = numbers[-1] if numbers else 0
    return (numbers + [last] * len(tokens))[: len(tokens)]


def target_words(tokens: Sequence[int], tokenizer: LineTokenizer) -> list[int | None]:
    """Return the number of the word, in the decoded text, that each target token belongs to; None if it has no text.

    A token without a letter of its own, such as a mere space, belongs to the word that it begins.
    """
    words: list[int] = []
    text, waiting = "", 0
    for end in range(1, len(tokens) + 1):
        longer = tokenizer.decode(list(tokens[:end]))
        if "".join(longer.split()) == "".join(text.split()):
            waiting += 1
        else:
            newest = len(longer.split()) - 1
            # A BERT's words around an apostrophe become one word when the second one comes.
            words = [*(min(word, newest) for word in words), *[newest] * (waiting + 1)]
            waiting = 0
        text = longer
    return [*words, *[None] * waiting]


def cross_attention(attentions: dict[int, MultiHeadAttention], layer: int) -> MultiHeadAttention:
    """Return the cross-attention of a decoder layer, or raise a ConfigError if it has none."""
    if layer not in attentions:
        have = ", ".join(map(str, attentions)) or "none"
        raise ConfigError(
            f"{option('alignment_layer')} is {layer}, no decoder layer with cross-attention; those are {have}"
        )
    return attentions[layer]
