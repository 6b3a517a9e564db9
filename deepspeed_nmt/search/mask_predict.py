"""Mask-predict, which guesses all tokens of a translation at once and the least probable ones again.

Ghazvininejad et al., "Mask-Predict: Parallel Decoding of Conditional Masked Language Models" (2019). For each of the
l most probable lengths N, start from N masks. In iteration t = 1..T guess the masked tokens, then mask the
n = floor(N (T - t) / T) least probable ones. Candidates are compared by the sum of their tokens' log-probabilities,
divided by a length penalty: by default N, which gives the mean.

Legend: B sentences, S source length, T target length, L lengths tried, R rows = B x L, N tokens guessed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel, MaskedModel, Memory
from deepspeed_nmt.core.parts import MAX_HYPOTHESES, Parts, SearchConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.search.base import PENALTY_NAMES, Hypothesis, LengthPenalty, PenaltyName, check_finite


class MaskPredictConfig(SearchConfig):
    """Settings of mask-predict."""

    left_to_right: ClassVar[bool] = False
    width_setting: ClassVar[str | None] = "length_beam"
    name: Literal["mask_predict"] = "mask_predict"
    iterations: int = Field(default=10, ge=1, le=1000, description="rounds of prediction (T)")
    length_beam: int = Field(default=5, ge=1, le=MAX_HYPOTHESES, description="lengths tried for each sentence (l)")
    length_penalty: PenaltyName = Field(default="mean", description=PENALTY_NAMES)

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse models that predict from left to right."""
        if parts.model.left_to_right:
            yield (
                "search.name=mask_predict decodes models that guess masked tokens, but "
                f"model.name={parts.model.name} predicts from left to right; use search.name=beam"
            )


class MaskPredict:
    """Mask-predict with one model.

    Raises:
        ConfigError: if the model does not guess masked tokens.
    """

    def __init__(self, config: MaskPredictConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        if not isinstance(model, MaskedModel):
            raise ConfigError(
                "search.name=mask_predict guesses masked tokens, but the model does not; use search.name=beam"
            )
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self.penalty = LengthPenalty.parse(config.length_penalty)

    @torch.inference_mode()
    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`Search.search`.

        Returns:
            For each sentence a candidate of each length tried, best first.

        Raises:
            CheckpointError: if the model predicts NaN.
        """
        assert not self.model.training, "call model.eval() first: dropout would change the translations"
        if source_BS.shape[0] == 0:
            return []
        memory = self.model.encode(source_BS, padded)
        length_BL = self._lengths(memory)
        tried = length_BL.shape[1]
        rows_R = torch.arange(source_BS.shape[0], device=source_BS.device).repeat_interleave(tried)
        tokens_RT, log_p_RT = self._fill(length_BL.flatten(), memory.select(rows_R))
        sums = log_p_RT.sum(dim=1).view(-1, tried).tolist()
        tokens = tokens_RT.view(-1, tried, tokens_RT.shape[1]).tolist()
        return [
            sorted(map(self._hypothesis, *columns), key=lambda hypothesis: -hypothesis.score)
            for columns in zip(tokens, length_BL.tolist(), sums, strict=True)
        ]

    def _hypothesis(self, tokens: list[int], length: int, log_prob: float) -> Hypothesis:
        check_finite(log_prob)
        return Hypothesis(tokens[1 : length + 1], log_prob / self.penalty(length), log_prob)

    def _lengths(self, memory: Memory) -> Tensor:
        """Find the most probable lengths, from one token to as many as the model can read. Shape: -> (B,L)."""
        logits_BN = self.model.lengths(memory).float()
        longest = logits_BN.shape[1] - 1 if self.model.longest_target is None else self.model.longest_target - 1
        best = logits_BN[:, 1 : longest + 1].topk(min(self.config.length_beam, longest), dim=1)
        for most_probable in best.values[:, 0].tolist():
            check_finite(most_probable)
        return best.indices + 1

    def _fill(self, length_R: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Guess ``length_R`` tokens for each row, between BOS and EOS, and their log-probabilities, 0 elsewhere.

        Shape: (R,) -> (R,T), (R,T)
        """
        vocabulary = self.vocabulary
        place_T = torch.arange(int(length_R.max()) + 2, device=length_R.device)
        length_R1 = length_R.unsqueeze(1)
        words_RT = (place_T >= 1) & (place_T <= length_R1)
        tokens_RT = torch.full(words_RT.shape, vocabulary.pad, device=length_R.device)
        tokens_RT[:, 0] = vocabulary.bos
        tokens_RT.masked_fill_(place_T == length_R1 + 1, vocabulary.eos)
        masked_RT = words_RT
        log_p_RT = torch.zeros(words_RT.shape, dtype=torch.float32, device=length_R.device)
        total = self.config.iterations
        for iteration in range(1, total + 1):
            tokens_RT = tokens_RT.masked_fill(masked_RT, self.model.mask)
            tokens_RT[masked_RT], log_p_RT[masked_RT] = self.model.guess(tokens_RT, masked_RT, memory)
            doubtful_R1 = length_R1 * (total - iteration) // total
            if not bool(doubtful_R1.any()):
                break
            order_RT = log_p_RT.masked_fill(~words_RT, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
            masked_RT = words_RT & (order_RT < doubtful_R1)
        return tokens_RT, log_p_RT
