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
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.search.base import Hypothesis, Request, check_finite
from deepspeed_nmt.search.left_to_right import Extensions, LeftToRightSearch, LeftToRightSettings, Live, Sentence


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


@dataclass
class SampledSentence(Sentence):
    """A sentence in progress.

    Attributes:
        keys: of the random choices of each sample.
        samples: numbers of the samples of its rows. A sentence with fewer samples in progress than another one
            repeats its first, so that all have equally many rows.
        finished: finished samples by number.
    """

    keys: list[int]
    samples: list[int]
    finished: dict[int, Hypothesis]


class Sampling(LeftToRightSearch[SampledSentence]):
    """Sampling with one model; see :class:`LeftToRightSearch` for its arguments.

    Temperature, top-k and top-p (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020) apply in this
    order. The score of a sample is its log-probability under the model, without them. Some samples can be equal.
    """

    config: SamplingSettings

    def start(self, number: int, limit: int, request: Request) -> SampledSentence:
        """Return a sentence all of whose samples are in progress."""
        seed, samples = self.config.seed, list(range(self.config.samples))
        keys = [randomness.key(seed, randomness.Purpose.SAMPLING, request.line, sample) for sample in samples]
        return SampledSentence(number, limit, request, keys, samples, {})

    def finish(self, sentence: SampledSentence) -> list[Hypothesis]:
        """Return all samples of a sentence, the most probable first."""
        return sorted(self.in_order(sentence), key=lambda sample: -sample.score)

    def in_order(self, sentence: SampledSentence) -> list[Hypothesis]:
        """Return all samples of a sentence in the order of their numbers."""
        return [sentence.finished[sample] for sample in range(self.config.samples)]

    def extend(self, live: Live[SampledSentence], logits_RV: Tensor) -> Extensions:
        """Draw the next token of each sample; see :meth:`LeftToRightSearch.extend`."""
        eos, device, sentences = self.vocabulary.eos, logits_RV.device, live.sentences
        log_sum_R1 = logits_RV.logsumexp(dim=1, keepdim=True)
        end_R = (logits_RV[:, eos : eos + 1] - log_sum_R1).squeeze(1)
        live.forbid(logits_RV)
        row_R, log_prob_R = torch.arange(logits_RV.shape[0], device=device), live.log_prob_RT[:, -1].double()
        if live.length == 1:  # one row per sentence so far
            row_R = row_R.repeat_interleave(self.config.samples)
            logits_RV, log_sum_R1, end_R, log_prob_R = (x[row_R] for x in (logits_RV, log_sum_R1, end_R, log_prob_R))
        keys = [sentence.keys[sample] for sentence in sentences for sample in sentence.samples]
        token_R = self._draw(logits_RV, randomness.uniform_after(randomness.key_tensor(keys, device), live.length))
        total_R = log_prob_R + (logits_RV.gather(1, token_R.unsqueeze(1)) - log_sum_R1).squeeze(1)
        tokens, totals, ends = token_R.tolist(), total_R.tolist(), (log_prob_R + end_R).tolist()
        width = len(tokens) // len(sentences)
        alive: list[dict[int, int]] = [{} for _ in sentences]  # samples of each sentence that live on, and their rows
        finished = []
        for number, sentence in enumerate(sentences):
            at_limit = sentence.limit == live.length
            for row, sample in enumerate(dict.fromkeys(sentence.samples), number * width):
                total = ends[row] if at_limit else totals[row]
                check_finite(total)
                if at_limit or tokens[row] == eos:
                    finished.append((sentence, sample, row, total))
                else:
                    alive[number][sample] = row
        ended = live.ended(row_R[[row for *_, row, _ in finished]], [total for *_, total in finished])
        for (sentence, sample, _, total), (sampled, by_token) in zip(finished, ended, strict=True):
            sentence.finished[sample] = Hypothesis(sampled, total, total, token_log_probs=by_token)
        most = max(1, *map(len, alive))
        for sentence, going_on in zip(sentences, alive, strict=True):
            sentence.samples = filled(list(going_on), most)
        row_BW = torch.tensor([filled(list(going_on.values()), most) for going_on in alive], device=device)
        unfinished = [len(going_on) > 0 for going_on in alive]
        return live.extended(unfinished, row_R[row_BW], token_R[row_BW], total_R[row_BW])

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


def filled(values: list[int], size: int) -> list[int]:
    """Repeat the first value (0 if there is none) behind the others until there are ``size``."""
    return values + (values[:1] or [0]) * (size - len(values))
