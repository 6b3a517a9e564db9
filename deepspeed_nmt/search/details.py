"""Details of finished translations: the scores of their tokens, and alignments with the source."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.search.alignment import AttentionWatch, Links, source_words, target_words, word_links
from deepspeed_nmt.search.ensemble import members_of, weights_of
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.source_lines import SourceTokenizer


@dataclass(frozen=True)
class Details:
    """Details of one translation.

    Attributes:
        token_scores: log-probability (nats) of each token and of the EOS; None if they were not asked for.
        alignment: links of words; None if it was not asked for.
    """

    token_scores: tuple[float, ...] | None = None
    alignment: Links | None = None


class DetailsReader:
    """Reader of the details of translations, by forced decoding after the search.

    Args:
        model: A model or an ensemble, in eval mode.
        tokenizer: vocabulary of the model.
        token_scores: True to return scores of tokens.
        layers: for each model of the ensemble, the number of the decoder layer whose cross-attention aligns; None to
            align nothing.

    Raises:
        ConfigError: if a layer has no cross-attention.
    """

    def __init__(
        self, model: DecodableModel, tokenizer: SourceTokenizer, token_scores: bool, layers: Sequence[int] | None
    ) -> None:
        self._members, self._weights = members_of(model), weights_of(model)
        self._tokenizer = tokenizer
        self._token_scores = token_scores
        self._aligning: list[tuple[MultiHeadAttention, float]] | None = None
        if layers is not None:
            weights = self._weights or [1.0] * len(self._members)
            self._aligning = [
                (cross_attention(member.cross_attentions(), layer), weight)
                for member, layer, weight in zip(self._members, layers, weights, strict=True)
            ]

    def read(
        self,
        source_BS: Tensor,
        padded: bool,
        sources: Sequence[tuple[str, Sequence[int]]],
        translations: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[Details]]:
        """Return the details of the translations of a batch.

        Args:
            source_BS: source tokens.
            padded: False promises that no position is padding.
            sources: text and tokens of each sentence.
            translations: tokens of the translations of each sentence.
        """
        if not self._token_scores and self._aligning is None:
            return [[Details() for _ in each] for each in translations]
        vocabulary = self._tokenizer.vocabulary
        with ExitStack() as stack:
            watch = None
            if self._aligning is not None:
                watch = AttentionWatch([self._aligning], source_BS, vocabulary)
                stack.enter_context(watch.watching())
            scores = token_log_probs(
                self._members,
                vocabulary,
                source_BS,
                padded,
                translations,
                self._weights,
                *([] if watch is None else [watch.decoded]),
            )
        number, found = 0, []
        for (line, source), each, log_probs in zip(sources, translations, scores, strict=True):
            words = source_words(line, source, self._tokenizer) if watch is not None else []
            details = []
            for tokens, values in zip(each, log_probs, strict=True):
                links = None
                if watch is not None:
                    links = word_links(
                        watch.links(0, number, len(tokens)), words, target_words(tokens, self._tokenizer)
                    )
                details.append(Details(tuple(values) if self._token_scores else None, links))
                number += 1
            found.append(details)
        return found


def cross_attention(attentions: dict[int, MultiHeadAttention], layer: int) -> MultiHeadAttention:
    """Return the cross-attention of a decoder layer.

    Raises:
        ConfigError: if the layer does not exist or has none.
    """
    if layer not in attentions:
        have = ", ".join(map(str, attentions)) or "none"
        raise ConfigError(
            f"{option('alignment_layer')} must be a decoder layer with cross-attention ({have}), but is {layer}"
        )
    return attentions[layer]
