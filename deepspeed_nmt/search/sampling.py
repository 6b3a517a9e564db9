"""Sampling of translations from the distribution of the model.

The random number of a token is a hash of (seed, line, sample, position). So the samples of a line do not depend on
the batch, on the order of the lines or on the ranks. A token is drawn by inverting the cumulative distribution over
the vocabulary in the order of the tokens' numbers. Rounding errors, which differ between batch sizes, thus change a
token only if its random number falls on the bound between two tokens up to an error of about 1e-6, or if two tokens
at the cut of top-k or top-p have equal probabilities up to that error.

Legend: B sentences, S source length, V vocabulary, W samples of a sentence in progress (1 before the first step), R
rows = B x W, T target length so far (BOS included).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis, Request, check_finite
from deepspeed_nmt.search.left_to_right import LeftToRightSettings, TokenRules, bounded_requests, never_predicted


class SamplingSettings(LeftToRightSettings):
    """Settings of searches that sample."""

    width_setting: ClassVar[str | None] = "samples"
    samples: int = Field(default=1, ge=1, le=MAX_HYPOTHESES, description="translations drawn for each sentence")
    temperature: float = Field(
        default=1.0, ge=1e-3, le=1e3, description="divisor of the logits; below 1: nearer to the most probable token"
    )
    top_k: int = Field(
        default=0, ge=0, le=10_000_000, description="tokens to draw from: the k most probable ones; 0: all"
    )
    top_p: float = Field(
        default=1.0, gt=0.0, le=1.0, description="tokens to draw from: the fewest whose probabilities sum to p"
    )
    seed: int = Field(default=1, ge=0, le=2**63 - 1, description="of the random choices")


class SamplingConfig(SamplingSettings):
    """Samples of the model's distribution."""

    name: Literal["sampling"] = "sampling"


class Sampling:
    """Sampling with one model.

    Temperature, top-k and top-p (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020) apply in this
    order. The score of a sample is its log-probability under the model, without them.

    Args:
        config: settings.
        model: A model, which must be in eval mode when :meth:`search` is called.
        vocabulary: special tokens.
    """

    def __init__(self, config: SamplingSettings, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self._never = never_predicted(vocabulary, model)

    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`RequestSearch.search`.

        Returns:
            All samples of each sentence, the most probable first. Some can be equal.

        Raises:
            CheckpointError: if the model predicts NaN.
        """
        return [sorted(each, key=lambda sample: -sample.score) for each in self.samples(source_BS, padded, requests)]

    @torch.inference_mode()
    def samples(self, source_BS: Tensor, padded: bool, requests: Sequence[Request] | None) -> list[list[Hypothesis]]:
        """Return all samples of each sentence, in the order of their numbers; see :meth:`search`."""
        device, config = source_BS.device, self.config
        requests, limits = bounded_requests(config, self.model, self.vocabulary, source_BS, requests)
        if not limits:
            return []
        rules = TokenRules.of(config, self.vocabulary, requests, device)
        found: list[list[list[int]]] = [[[] for _ in range(config.samples)] for _ in limits]
        log_probs = [[0.0] * config.samples for _ in limits]
        # Of each sentence in progress, in the order of the rows: its number, and the samples of its rows. A sentence
        # with fewer samples in progress than another one repeats its first, so that all have equally many rows.
        numbers = list(range(len(limits)))
        alive = [list(range(config.samples)) for _ in limits]
        memory, cache = self.model.encode(source_BS, padded), self.model.begin()
        tokens_RT = source_BS.new_full((len(limits), 1), self.vocabulary.bos)
        rows_R = torch.arange(len(limits), device=device).repeat_interleave(config.samples)
        keys_R = self._keys(requests, numbers, alive, device)
        for length in count(1):
            logits_RV = self.model.step(tokens_RT[:, -1], memory, cache).float()
            log_sum_R1 = logits_RV.logsumexp(dim=1, keepdim=True)
            end_R = (logits_RV[:, self.vocabulary.eos : self.vocabulary.eos + 1] - log_sum_R1).squeeze(1)
            self._forbid(logits_RV, tokens_RT, rules, numbers)
            if length == 1:  # one row per sentence so far
                logits_RV, log_sum_R1 = logits_RV.index_select(0, rows_R), log_sum_R1.index_select(0, rows_R)
                end_R, tokens_RT = end_R.index_select(0, rows_R), tokens_RT.index_select(0, rows_R)
            token_R = self._draw(logits_RV, randomness.uniform_after(keys_R, length))
            log_p_R = (logits_RV.gather(1, token_R.unsqueeze(1)) - log_sum_R1).squeeze(1)
            tokens, log_ps, ends = token_R.tolist(), log_p_R.tolist(), end_R.tolist()
            width = len(tokens) // len(numbers)
            kept, places, rest = [], [], []
            for row, (number, samples) in enumerate(zip(numbers, alive, strict=True)):
                open_places = []
                for place, sample in enumerate(samples, row * width):
                    last = limits[number] == length
                    token = self.vocabulary.eos if last else tokens[place]
                    log_prob = ends[place] if last else log_ps[place]
                    check_finite(log_prob)
                    log_probs[number][sample] += log_prob
                    if token != self.vocabulary.eos:
                        found[number][sample].append(token)
                        open_places.append((place, sample))
                if open_places:
                    kept.append(row)
                    places.append([place for place, _ in open_places])
                    rest.append([sample for _, sample in open_places])
            if not kept:
                break
            kept_B = None if len(kept) == len(numbers) else torch.tensor(kept, device=device)
            if kept_B is not None:
                numbers = [numbers[row] for row in kept]
                memory = memory.select(kept_B)
            alive = rest
            # One row per sentence would see the cached positions of all samples so far as its own.
            most = max(2 if config.samples > 1 else 1, *map(len, alive))
            places_R = torch.tensor([(each + each[:1] * most)[:most] for each in places], device=device).flatten()
            tokens_RT = torch.cat([tokens_RT, token_R.unsqueeze(1)], dim=1).index_select(0, places_R)
            keys_R = keys_R.index_select(0, places_R)
            # Before the second step the cache has one row per sentence.
            cache.select(rows_R.index_select(0, places_R) if length == 1 else places_R, kept_B)
        return [
            [Hypothesis(tokens, total, total) for tokens, total in zip(each, totals, strict=True)]
            for each, totals in zip(found, log_probs, strict=True)
        ]

    def _keys(
        self,
        requests: Sequence[Request],
        numbers: Sequence[int],
        alive: Sequence[Sequence[int]],
        device: torch.device,
    ) -> Tensor:
        """Return the keys of the random choices of each row. Shape: -> int64 (R,)."""
        seed, purpose = self.config.seed, randomness.Purpose.SAMPLING
        return randomness.key_tensor(
            (
                randomness.key(seed, purpose, requests[number].line, sample)
                for number, samples in zip(numbers, alive, strict=True)
                for sample in samples
            ),
            device,
        )

    def _forbid(self, logits_RV: Tensor, tokens_RT: Tensor, rules: TokenRules | None, numbers: Sequence[int]) -> None:
        """Set the logits of tokens that are never drawn to -inf."""
        logits_RV.index_fill_(1, self._never.to(logits_RV.device), -torch.inf)
        if rules is not None:
            rules.apply(logits_RV, tokens_RT, numbers)

    def _draw(self, logits_RV: Tensor, uniform_R: Tensor) -> Tensor:
        """Draw a token for each row by its random number. Shape: (R,V), fp64 (R,) -> (R,)."""
        config = self.config
        scaled_RV = logits_RV / config.temperature
        if 0 < config.top_k < scaled_RV.shape[1]:
            least_R1 = scaled_RV.topk(config.top_k, dim=1).values[:, -1:]
            scaled_RV = scaled_RV.masked_fill(scaled_RV < least_R1, -torch.inf)
        p_RV = torch.softmax(scaled_RV, dim=1)
        if config.top_p < 1.0:
            sorted_RV = p_RV.sort(dim=1, descending=True).values
            before_RV = sorted_RV.double().cumsum(dim=1) - sorted_RV  # the first token is always among the kept ones
            least_R1 = sorted_RV.masked_fill(before_RV >= config.top_p, math.inf).amin(dim=1, keepdim=True)
            p_RV = p_RV.masked_fill(p_RV < least_R1, 0.0)
        sum_RV = p_RV.double().cumsum(dim=1)
        total_R1 = sum_RV[:, -1:]
        # Rounding up to the total would choose no token.
        bound_R1 = torch.minimum(uniform_R.unsqueeze(1) * total_R1, total_R1 * (1.0 - 1e-15))
        return torch.searchsorted(sum_RV, bound_R1, right=True).clamp_(max=p_RV.shape[1] - 1).squeeze(1)
