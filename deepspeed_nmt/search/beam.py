"""Beam search.

Each step extends the K live hypotheses of every sentence and ranks the extensions by log-probability. An extension by
EOS that ranks among the first K *finishes*; the best K others live on. (Of 2K extensions at most K end in EOS, one
for each parent, so looking at 2K always leaves K to live.)

A sentence is done as soon as K hypotheses have finished, or at its length limit, where every live hypothesis is
closed with EOS at the price the model asks for it. So live hypotheses always compete at equal length, without a
penalty, and finished ones by log-probability divided by the length penalty. Waiting instead until no live hypothesis
*could* still win would not mean better translations: with a growing penalty that bound is reached late, often at the
length limit, and what the extra steps find is mostly the model's taste for odd lengths. With this rule a beam of 1
is exactly greedy decoding, and a sentence's result depends on nothing but the sentence.

Legend: B sentences still searched, S source length, V vocabulary, K beam, W live hypotheses of a sentence (1 before
the first step, then K), R rows = B x W, C extensions looked at, T target length so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.registry import Config
from deepspeed_nmt.search.length_penalty import LengthPenalty

_BLOCK = 64
"""Logits of which only the largest is looked at first; near the best on CPUs for vocabularies of 4k-64k."""
_CACHE_ELEMENTS = 1 << 20
"""Logits whose sums are formed at once on a CPU: 4 MiB."""


class BeamConfig(Config):
    """Settings of beam search.

    A translation has at most ``int(max_length_ratio * source tokens) + max_length_extra`` tokens, EOS counted on both
    sides, and at least the EOS.
    """

    name: Literal["beam"] = "beam"
    beam: int = Field(default=5, ge=1, description="K, hypotheses followed at once; 1 is greedy decoding")
    length_penalty: str = Field(default="gnmt:0.6", description="gnmt:A, power:A, mean, or none")
    max_length_ratio: float = Field(default=1.5, ge=0.0, le=100.0, description="target tokens for each source token")
    max_length_extra: int = Field(default=10, ge=0, le=100_000, description="target tokens on top of the ratio")

    @field_validator("length_penalty")
    @classmethod
    def _known(cls, value: str) -> str:
        LengthPenalty.parse(value)
        return value


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation.

    Attributes:
        tokens: without BOS and EOS.
        score: ``log_prob`` divided by the length penalty; the higher the better.
        log_prob: log-probability (nats) of the tokens and the EOS after them.
    """

    tokens: list[int]
    score: float
    log_prob: float


@dataclass(frozen=True)
class _Live:
    """The hypotheses still growing; dead slots (fewer than K exist) have a log-probability of -inf.

    Attributes:
        tokens_BWT: what they consist of, BOS first.
        log_prob_BW: fp32.
    """

    tokens_BWT: Tensor
    log_prob_BW: Tensor


class BeamSearch:
    """Beam search with one model.

    Args:
        model: in eval mode when :meth:`search` is called.
        bos: beginning-of-sentence token, which starts every hypothesis; never predicted.
        eos: end-of-sentence token, which finishes one.
        pad: padding token; never predicted.
        config: the settings.
    """

    def __init__(self, model: TranslationModel, bos: int, eos: int, pad: int, config: BeamConfig) -> None:
        self.model = model
        self.bos = bos
        self.eos = eos
        self.pad = pad
        self.config = config
        self.penalty = LengthPenalty.parse(config.length_penalty)

    @torch.inference_mode()
    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Translate a batch of sentences.

        Args:
            source_BS: source tokens on the model's device, each row ending in EOS, padded on the right.
            padded: False promises that no position is padding.

        Returns:
            For each sentence at least one and at most ``beam`` different hypotheses, best first.

        Raises:
            CheckpointError: if the model predicts NaN.

        Shape: (B,S)
        """
        assert not self.model.training, "call model.eval() first: dropout would change the translations"
        if source_BS.shape[0] == 0:
            return []
        beam, eos = self.config.beam, self.eos
        limits = self._limits(source_BS)
        finished: list[list[Hypothesis]] = [[] for _ in limits]
        numbers = list(range(len(limits)))  # Of the sentences still searched, in the order of the rows.
        memory = self.model.encode(source_BS, padded)
        cache = self.model.begin()
        live = _Live(
            tokens_BWT=source_BS.new_full((len(limits), 1, 1), self.bos),
            log_prob_BW=torch.zeros(len(limits), 1, device=source_BS.device),
        )
        for length in count(1):
            logits_RV = self.model.step(live.tokens_BWT[:, :, -1].flatten(), memory, cache)
            log_prob_BC, parent_BC, token_BC = self._extensions(
                live, logits_RV, [limits[number] == length for number in numbers]
            )
            is_eos_BC = token_BC == eos
            ends_BK = is_eos_BC[:, :beam] & log_prob_BC[:, :beam].isfinite()
            ended = ends_BK.nonzero()  # The one time in a step that the host waits for the device.
            if ended.shape[0]:
                sentence_N, rank_N = ended.unbind(1)
                prefix_NT = live.tokens_BWT[sentence_N, parent_BC[sentence_N, rank_N], 1:]
                penalty = self.penalty(length)
                for sentence, tokens, log_prob in zip(
                    sentence_N.tolist(), prefix_NT.tolist(), log_prob_BC[sentence_N, rank_N].tolist(), strict=True
                ):
                    finished[numbers[sentence]].append(Hypothesis(tokens, log_prob / penalty, log_prob))
            kept = [
                row for row, number in enumerate(numbers) if limits[number] > length and len(finished[number]) < beam
            ]
            if not kept:
                break
            # Stable for equal scores, so that the order of extensions is kept.
            log_prob_BK, order_BK = log_prob_BC.masked_fill(is_eos_BC, -torch.inf).topk(beam, dim=1)
            parent_BK, token_BK = parent_BC.gather(1, order_BK), token_BC.gather(1, order_BK)
            kept_B: Tensor | None = None
            first_row_B = torch.arange(len(numbers), device=source_BS.device) * live.tokens_BWT.shape[1]
            if len(kept) < len(numbers):
                numbers = [numbers[row] for row in kept]
                kept_B = torch.tensor(kept, device=source_BS.device)
                memory = memory.select(kept_B)
                first_row_B, parent_BK, token_BK, log_prob_BK = (
                    x.index_select(0, kept_B) for x in (first_row_B, parent_BK, token_BK, log_prob_BK)
                )
            rows_R = (first_row_B.unsqueeze(1) + parent_BK).flatten()
            cache.select(rows_R, kept_B)
            tokens_RT = live.tokens_BWT.flatten(0, 1).index_select(0, rows_R)
            live = _Live(torch.cat([tokens_RT.view(*token_BK.shape, -1), token_BK.unsqueeze(2)], dim=2), log_prob_BK)
        return [self._best(hypotheses) for hypotheses in finished]

    def _limits(self, source_BS: Tensor) -> list[int]:
        """The most tokens each translation may have, EOS included."""
        lengths: list[int] = source_BS.ne(self.pad).sum(dim=1).tolist()
        config = self.config
        return [max(1, int(config.max_length_ratio * length) + config.max_length_extra) for length in lengths]

    def _extensions(self, live: _Live, logits_RV: Tensor, closing: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """The best 2K ways to extend the hypotheses of each sentence, best first.

        Args:
            closing: for each sentence, whether only EOS may follow.

        Returns:
            Log-probability, parent (0..W-1) and token of each; -inf fills up where fewer exist. Shape: (B,2K) each
        """
        sentences, width = live.log_prob_BW.shape
        wanted = 2 * self.config.beam
        logits_RV = logits_RV.float()
        log_sum_R1 = _log_sum_exp(logits_RV)
        eos_log_prob_R1 = logits_RV[:, self.eos : self.eos + 1] - log_sum_R1
        logits_RV[:, self.pad] = -torch.inf
        logits_RV[:, self.bos] = -torch.inf
        best_RC, token_RC = _top(logits_RV, min(wanted, logits_RV.shape[1]))
        log_prob_RC = best_RC - log_sum_R1
        if any(closing):
            closing_R1 = torch.tensor(closing, device=logits_RV.device).repeat_interleave(width).unsqueeze(1)
            only_first = F.pad(eos_log_prob_R1, (0, log_prob_RC.shape[1] - 1), value=-torch.inf)
            log_prob_RC = torch.where(closing_R1, only_first, log_prob_RC)
            token_RC = token_RC.masked_fill(closing_R1, self.eos)
        each = log_prob_RC.shape[1]
        log_prob_BN = (live.log_prob_BW.view(-1, 1) + log_prob_RC).view(sentences, width * each)
        token_BN = token_RC.reshape(sentences, width * each)
        missing = wanted - width * each
        if missing > 0:
            log_prob_BN = F.pad(log_prob_BN, (0, missing), value=-torch.inf)
            token_BN = F.pad(token_BN, (0, missing), value=self.eos)
        log_prob_BC, index_BC = log_prob_BN.topk(wanted, dim=1)
        parent_BC = (index_BC // each).clamp_(max=width - 1)  # What fills up has no parent.
        return log_prob_BC, parent_BC, token_BN.gather(1, index_BC)

    def _best(self, hypotheses: list[Hypothesis]) -> list[Hypothesis]:
        if not hypotheses:
            raise CheckpointError(
                "The model must predict numbers, but predicts NaN or infinity for a sentence; its weights are "
                "damaged or overflow: translate with another checkpoint, or in fp32."
            )
        return sorted(hypotheses, key=lambda hypothesis: hypothesis.score, reverse=True)[: self.config.beam]


def _log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Each row's log of the sum of exponentials: all that is needed of a log-softmax besides a few winners.

    On a CPU a few rows at a time, whose intermediate results stay in the cache: twice as fast.

    Shape: (R,V) -> (R,1)
    """
    rows, vocabulary = logits_RV.shape
    at_once = max(1, _CACHE_ELEMENTS // vocabulary) if logits_RV.device.type == "cpu" else rows
    return torch.cat([part.logsumexp(dim=1, keepdim=True) for part in torch.split(logits_RV, at_once)])


def _top(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` largest entries of each row and where they are, in no particular order.

    The ``k`` blocks with the largest maxima hold them all, so only those blocks (and what the last whole block leaves
    over) are searched: on CPUs two to three times as fast as searching whole rows.

    Shape: (R,V) -> (R,k), (R,k)
    """
    blocks = logits_RV.shape[1] // _BLOCK
    if blocks < 4 * k:
        values, indices = logits_RV.topk(k, dim=1, sorted=False)
        return values, indices
    whole = blocks * _BLOCK
    blocked = logits_RV[:, :whole].view(-1, blocks, _BLOCK)
    block_Rk = blocked.amax(dim=2).topk(k, dim=1, sorted=False).indices
    inside = torch.arange(_BLOCK, device=logits_RV.device)
    index_RN = (block_Rk.unsqueeze(2) * _BLOCK + inside).flatten(1)
    rest = torch.arange(whole, logits_RV.shape[1], device=logits_RV.device)
    index_RN = torch.cat([index_RN, rest.expand(index_RN.shape[0], -1)], dim=1)
    values, chosen = logits_RV.gather(1, index_RN).topk(k, dim=1, sorted=False)
    return values, index_RN.gather(1, chosen)
