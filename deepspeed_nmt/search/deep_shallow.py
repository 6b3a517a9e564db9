"""Deep-shallow decoding of Wu et al., "Depth Growing for Neural Machine Translation" (2019).

A deep and a shallow net propose candidates, and both judge them. A beam search with each net gives two lists. Both
nets score every candidate by the mean log-probability of its tokens and EOS. The candidate of the union with the
highest

    (alpha own + (1 - alpha) other) (length + 1)^exponent

wins, where *own* is the score of the net that proposed it, *other* that of the other net, and length + 1 counts the
EOS. A candidate that both nets proposed gets the higher of its two totals.

Legend: B sentences, S source length, T target length, N candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import Memory, TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis
from deepspeed_nmt.search.beam import BeamSearch, BeamSettings
from deepspeed_nmt.search.length_penalty import MAX_EXPONENT

_LOGITS_AT_ONCE = 1 << 24


class DeepShallowConfig(BeamSettings):
    """Settings of deep-shallow decoding."""

    needs_exits: ClassVar[tuple[str, ...]] = ("deep", "shallow")
    name: Literal["deep_shallow"] = "deep_shallow"
    alpha: float = Field(default=0.5, ge=0.0, le=1.0, description="weight of the exit that proposed a candidate")
    exponent: float = Field(
        default=0.4, ge=-MAX_EXPONENT, le=MAX_EXPONENT, description="exponent of length + 1 in the total"
    )


class DeepShallow:
    """Deep-shallow decoding with a model that has the exits ``deep`` and ``shallow``.

    Args:
        config: settings.
        model: A model, which must be in eval mode when :meth:`search` is called.
        vocabulary: special tokens.

    Raises:
        ConfigError: if the model has no such exits.
    """

    def __init__(self, config: DeepShallowConfig, model: TranslationModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.nets = [model.at_exit(name) for name in config.needs_exits]
        self.searches = [BeamSearch(config, net, vocabulary) for net in self.nets]
        self.vocabulary = vocabulary

    @torch.inference_mode()
    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Translate a batch of sentences into the candidates of both nets, best first; see :meth:`Search.search`."""
        lists = [search.search(source_BS, padded) for search in self.searches]
        results: list[list[Hypothesis]] = [[] for _ in range(source_BS.shape[0])]
        union = [sorted({tuple(h.tokens) for found in lists for h in found[row]}) for row in range(len(results))]
        scores = [mean_log_probs(net, self.vocabulary, source_BS, padded, union) for net in self.nets]
        for row, candidates in enumerate(union):
            for number, tokens in enumerate(candidates):
                means = [score[row][number] for score in scores]
                totals = [
                    (self.config.alpha * means[own] + (1.0 - self.config.alpha) * means[1 - own])
                    * (len(tokens) + 1) ** self.config.exponent
                    for own in range(2)
                    if any(tuple(hypothesis.tokens) == tokens for hypothesis in lists[own][row])
                ]
                results[row].append(Hypothesis(list(tokens), max(totals), means[0] * (len(tokens) + 1)))
        return [sorted(found, key=lambda hypothesis: -hypothesis.score) for found in results]


@torch.inference_mode()
def mean_log_probs(
    model: TranslationModel,
    vocabulary: Vocabulary,
    source_BS: Tensor,
    padded: bool,
    candidates: Sequence[Sequence[tuple[int, ...]]],
) -> list[list[float]]:
    """Compute the mean log-probability (nats) of the tokens and EOS of each sentence's candidates.

    Args:
        model: the net that scores.
        vocabulary: special tokens.
        source_BS: source tokens, as in :meth:`Search.search`.
        padded: False promises that no position is padding.
        candidates: candidates of each sentence, without BOS and EOS.

    Returns:
        Means in the shape of ``candidates``.
    """
    bos, eos, pad = vocabulary.bos, vocabulary.eos, vocabulary.pad
    memory = model.encode(source_BS, padded)
    flat = [(row, tokens) for row, each in enumerate(candidates) for tokens in each]
    length = max((len(tokens) for _, tokens in flat), default=0) + 1
    at_once = max(1, _LOGITS_AT_ONCE // (length * model.vocab_size))
    means: list[list[float]] = [[] for _ in candidates]
    for start in range(0, len(flat), at_once):
        part = flat[start : start + at_once]
        inputs_NT = torch.full((len(part), length), pad)
        outputs_NT = torch.full((len(part), length), pad)
        for place, (_, tokens) in enumerate(part):
            inputs_NT[place, : len(tokens) + 1] = torch.tensor([bos, *tokens])
            outputs_NT[place, : len(tokens) + 1] = torch.tensor([*tokens, eos])
        inputs_NT, outputs_NT = inputs_NT.to(source_BS.device), outputs_NT.to(source_BS.device)
        for (row, _), value in zip(part, _means(model, memory, part, inputs_NT, outputs_NT), strict=True):
            means[row].append(value)
    return means


def _means(
    model: TranslationModel,
    memory: Memory,
    part: Sequence[tuple[int, tuple[int, ...]]],
    inputs_NT: Tensor,
    outputs_NT: Tensor,
) -> list[float]:
    rows_N = torch.tensor([row for row, _ in part], device=inputs_NT.device)
    states_NTD = model.decode(inputs_NT, memory.select(rows_N))[0]
    logits_NTV: Tensor = model.projection(states_NTD)
    log_p_NTV = torch.log_softmax(logits_NTV.float(), dim=2)
    real_NT = torch.arange(outputs_NT.shape[1], device=outputs_NT.device) <= torch.tensor(
        [len(tokens) for _, tokens in part], device=outputs_NT.device
    ).unsqueeze(1)
    chosen_NT = log_p_NTV.gather(2, outputs_NT.unsqueeze(2)).squeeze(2)
    values: list[float] = (torch.where(real_NT, chosen_NT, 0.0).sum(dim=1) / real_NT.sum(dim=1)).tolist()
    return values
