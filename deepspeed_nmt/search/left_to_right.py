"""Steps that searches from left to right share: bounds of a batch, rules of the next token, and best extensions.

A rule forbids tokens after the tokens of a hypothesis so far. It does not change the probabilities of the others: the
log-probability of a translation is that of the model, with or without rules.

Legend: B sentences, W live hypotheses of a sentence, R rows = B x W, S source length, T target length so far (BOS
included), V vocabulary, K beam, C = 2K extensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY, Vocabulary
from deepspeed_nmt.errors import option, shown
from deepspeed_nmt.search.base import Hypothesis, Request, length_bound, not_finite, or_default


class LeftToRightSettings(SearchConfig):
    """Settings of searches that decode one token after another.

    A translation has at least ``min_length`` tokens and at most ``int(max_length_ratio * source tokens) +
    max_length_extra``, and never more than ``max_length``. EOS counts on both sides.
    """

    takes: ClassVar[frozenset[str]] = frozenset({"line", "prefix"})
    max_length_ratio: float = Field(
        default=1.5, ge=0.0, le=100.0, description="longest translation: target tokens for each source token"
    )
    max_length_extra: int = Field(
        default=10, ge=0, le=100_000, description="longest translation: target tokens on top of the ratio"
    )
    max_length: int = Field(
        default=0, ge=0, le=1_000_000, description="longest translation in target tokens, EOS included; 0: no bound"
    )
    min_length: int = Field(
        default=1, ge=1, le=4096, description="shortest translation in target tokens, EOS included"
    )
    no_repeat_ngram: int = Field(
        default=0, ge=0, le=1_000, description="n: no n-gram of tokens occurs twice in a translation; 0: allowed"
    )
    suppress_unknown: bool = Field(default=False, description="never predict the unknown token")
    suppress_tokens: tuple[int, ...] = Field(
        default=(), max_length=100_000, description="numbers of tokens that are never predicted"
    )

    @model_validator(mode="after")
    def _check(self) -> LeftToRightSettings:
        if 0 < self.max_length < self.min_length:
            raise ValueError(
                f"{option('min_length')} must be at most {option('max_length')}, which is {self.max_length}, but is "
                f"{self.min_length}; change one of them"
            )
        wrong = [token for token in self.suppress_tokens if not 0 <= token < MAX_VOCABULARY]
        if wrong:
            raise ValueError(
                f"{option('suppress_tokens')} must be numbers of tokens, from 0 to {MAX_VOCABULARY - 1:,}, but has "
                f"{shown(wrong[0])}; {option('suppress')} of `translate` takes text"
            )
        return self


def length_limits(
    settings: LeftToRightSettings, lengths: Sequence[int], most: int | None, requests: Sequence[Request]
) -> list[int]:
    """Return the most tokens that each translation may have, EOS included.

    A bound is raised to the shortest translation that is possible: ``min_length``, or the prefix, the constraints and
    EOS.

    Args:
        settings: of the search.
        lengths: tokens of each source, EOS included.
        most: most tokens that the model reads; None if unlimited.
        requests: one for each sentence.
    """
    limits = []
    for length, request in zip(lengths, requests, strict=True):
        limit = length_bound(length, settings.max_length_ratio, settings.max_length_extra, settings.max_length)
        needed = len(request.prefix) + sum(map(len, request.constraints)) + 1
        limit = max(limit, settings.min_length, needed)
        limits.append(limit if most is None else min(limit, most))
    return limits


class TokenRules:
    """Rules of the next token for a batch of sentences.

    The prefix has precedence over all other rules. A hypothesis after which every token is forbidden ends.

    Args:
        settings: of the search.
        vocabulary: special tokens.
        requests: one for each sentence.
        device: of the logits.
    """

    def __init__(
        self,
        settings: LeftToRightSettings,
        vocabulary: Vocabulary,
        requests: Sequence[Request],
        device: torch.device,
    ) -> None:
        self._eos = vocabulary.eos
        self._least = settings.min_length
        self._ngram = settings.no_repeat_ngram
        suppressed = {*settings.suppress_tokens, *([vocabulary.unk] if settings.suppress_unknown else [])}
        suppressed = {token for token in suppressed if token < vocabulary.size} - {vocabulary.eos}
        self._suppressed = torch.tensor(sorted(suppressed), device=device) if suppressed else None
        self._prefixes = [request.prefix for request in requests]
        self._longest_prefix = max(map(len, self._prefixes), default=0)

    @classmethod
    def of(
        cls,
        settings: LeftToRightSettings,
        vocabulary: Vocabulary,
        requests: Sequence[Request],
        device: torch.device,
    ) -> TokenRules | None:
        """Return the rules, or None if they forbid nothing, so that they cost nothing."""
        rules = cls(settings, vocabulary, requests, device)
        forbids = rules._least > 1 or rules._ngram or rules._longest_prefix or rules._suppressed is not None
        return rules if forbids else None

    def after(self, tokens_RT: Tensor, numbers: Sequence[int]) -> Callable[[Tensor], None]:
        """Return :meth:`apply` for given hypotheses, as a function of the logits."""
        return partial(self.apply, tokens_RT=tokens_RT, numbers=numbers)

    def apply(self, logits_RV: Tensor, tokens_RT: Tensor, numbers: Sequence[int]) -> None:
        """Set the logits of forbidden tokens to -inf.

        Args:
            logits_RV: logits of the next tokens; overwritten.
            tokens_RT: tokens of each hypothesis, BOS first.
            numbers: of the sentences of the rows; each has equally many rows, which are adjacent.
        """
        length, size = tokens_RT.shape[1] - 1, self._ngram
        forced_R1 = self._forced(length, numbers, logits_RV.shape[0], logits_RV.device)
        ngrams_RTN, again_RT = None, None
        if size and length >= size:
            ngrams_RTN = tokens_RT[:, 1:].unfold(1, size, 1)
            last_R1N = tokens_RT[:, length - size + 2 :].unsqueeze(1)
            again_RT = (ngrams_RTN[:, :, : size - 1] == last_R1N).all(dim=2)
        eos = self._eos
        if forced_R1 is not None:
            forced_logit_R1 = logits_RV.gather(1, forced_R1.clamp(min=0))
        end_R1 = logits_RV[:, eos : eos + 1].clone()
        if self._suppressed is not None:
            logits_RV.index_fill_(1, self._suppressed, -torch.inf)
        if length + 1 < self._least:
            logits_RV[:, eos] = -torch.inf
        if ngrams_RTN is not None and again_RT is not None:
            bound_RT = torch.where(again_RT, -torch.inf, torch.inf).to(logits_RV.dtype)
            logits_RV.scatter_reduce_(1, ngrams_RTN[:, :, -1], bound_RT, "amin")
        dead_R1 = logits_RV.amax(dim=1, keepdim=True) == -torch.inf
        logits_RV[:, eos : eos + 1] = torch.where(dead_R1, end_R1, logits_RV[:, eos : eos + 1])
        if forced_R1 is not None:
            is_forced_R1 = forced_R1 >= 0
            logits_RV.masked_fill_(is_forced_R1, -torch.inf)
            index_R1 = forced_R1.clamp(min=0)
            logits_RV.scatter_(1, index_R1, torch.where(is_forced_R1, forced_logit_R1, logits_RV.gather(1, index_R1)))

    def _forced(self, length: int, numbers: Sequence[int], rows: int, device: torch.device) -> Tensor | None:
        """Return the token of its prefix that each row must continue with, -1 where any may. Shape: -> (R,1)."""
        if length >= self._longest_prefix:
            return None
        prefixes = [self._prefixes[number] for number in numbers]
        forced = [prefix[length] if length < len(prefix) else -1 for prefix in prefixes]
        return torch.tensor(forced, device=device).repeat_interleave(rows // len(numbers)).unsqueeze(1)


@dataclass(frozen=True)
class Extensions:
    """The best extensions of each sentence's hypotheses by one token, best first.

    Attributes:
        log_prob_BC: log-probability of the extended hypothesis, fp32; -inf where fewer than C exist.
        parent_BC: number of the hypothesis that is extended, 0..W-1.
        token_BC: the new token.
        is_eos_BC: True if the new token is EOS.
    """

    log_prob_BC: Tensor
    parent_BC: Tensor
    token_BC: Tensor
    is_eos_BC: Tensor


def best_extensions(log_prob_RV: Tensor, sentences: int, beam: int, eos: int) -> Extensions:
    """Find the best 2K extensions of each sentence.

    Args:
        log_prob_RV: log-probability of each extended hypothesis.
        sentences: B.
        beam: K.
        eos: token after which a hypothesis is finished.
    """
    rows, each = log_prob_RV.shape
    log_prob_BC, index_BC = largest(log_prob_RV.view(sentences, rows // sentences * each), each, 2 * beam)
    parent_BC = torch.div(index_BC, each, rounding_mode="floor")
    token_BC = index_BC - parent_BC * each
    return Extensions(log_prob_BC, parent_BC, token_BC, token_BC == eos)


def survivors(extensions: Extensions, beam: int) -> tuple[Tensor, Tensor, Tensor]:
    """Select the best K unfinished extensions of each sentence.

    Args:
        extensions: best first.
        beam: K.

    Returns:
        Log-probability, new token and parent of each. Shape: -> three of (B,K)
    """
    open_BC = extensions.log_prob_BC.masked_fill(extensions.is_eos_BC, -torch.inf)
    log_prob_BK, order_BK = open_BC.topk(beam, dim=1)
    return log_prob_BK, extensions.token_BC.gather(1, order_BK), extensions.parent_BC.gather(1, order_BK)


def largest(x_BN: Tensor, period: int, k: int) -> tuple[Tensor, Tensor]:
    """Find the ``k`` largest entries of each row and their indices, largest first.

    The ``k`` blocks with the largest maxima hold them all, so only those blocks are searched. On a CPU with a
    vocabulary of 8,000 this is three times as fast as searching whole rows.

    Args:
        x_BN: the entries.
        period: a number that divides N; blocks divide it.
        k: entries to find. If there are fewer, the last one found has no value: -inf at index 0.

    Shape: (B,N) -> (B,k), (B,k)
    """
    rows, entries = x_BN.shape
    if k > entries:
        values, index = largest(x_BN, period, entries)
        return F.pad(values, (0, k - entries), value=-torch.inf), F.pad(index, (0, k - entries))
    size = _block_size(period)
    if size == 1 or entries // size < 2 * k:
        return x_BN.topk(k, dim=1)
    blocked = x_BN.view(rows, -1, size)
    block_Bk = blocked.amax(dim=2).topk(k, dim=1, sorted=False).indices
    first_Bk1 = block_Bk.unsqueeze(2)
    inside = blocked.gather(1, first_Bk1.expand(-1, -1, size)).flatten(1)
    values, chosen = inside.topk(k, dim=1)
    return values, block_Bk.gather(1, chosen // size) * size + chosen % size


@cache
def _block_size(period: int) -> int:
    """Return the divisor of a number that is nearest to 64, from 16 to 256; 1 if there is none."""
    divisors = [size for size in range(16, 257) if period % size == 0]
    return min(divisors, key=lambda size: abs(size - 64), default=1)


Forbid = Callable[[Tensor], object]
"""Sets the log-probabilities of tokens that a rule forbids to -inf. Shape: (R,V)"""


def never_predicted(vocabulary: Vocabulary, model: DecodableModel) -> Tensor:
    """Return the tokens that no translation of the model contains, such as padding, BOS and the mask."""
    never = {*vocabulary.unpredicted, *(() if model.mask is None else (model.mask,))}
    return torch.tensor(sorted(never), dtype=torch.long)


def bounded_requests(
    settings: LeftToRightSettings,
    model: DecodableModel,
    vocabulary: Vocabulary,
    source_BS: Tensor,
    requests: Sequence[Request] | None,
) -> tuple[Sequence[Request], list[int]]:
    """Return the requests of a batch, and the most tokens of each translation, EOS included; none without sentences.

    Args:
        settings: of the search.
        model: the model, which must be in eval mode.
        vocabulary: special tokens.
        source_BS: source tokens.
        requests: one for each sentence, or None; see :meth:`RequestSearch.search`.
    """
    assert not model.training, "call model.eval() first: dropout would change the translations"
    requests = or_default(requests, source_BS.shape[0])
    lengths: list[int] = source_BS.ne(vocabulary.pad).sum(dim=1).tolist()
    return requests, length_limits(settings, lengths, model.longest_target, requests)


def rows_of(closing: Sequence[bool], width: int, device: torch.device) -> Tensor | None:
    """Return flags of sentences as flags of their ``width`` rows each, (R,); None if all are False."""
    return torch.tensor(closing, device=device).repeat_interleave(width) if any(closing) else None


def extended(
    logits_RV: Tensor,
    log_prob_R: Tensor,
    never: Tensor,
    eos: int,
    forbid: Forbid | None = None,
    closing_R: Tensor | None = None,
) -> Tensor:
    """Return the log-probability, fp32, of each hypothesis extended by each token; -inf for what is forbidden.

    Args:
        logits_RV: logits of the next tokens.
        log_prob_R: log-probability of each hypothesis.
        never: numbers of the tokens that are never predicted.
        eos: token after which a hypothesis is finished.
        forbid: the rules of the next token; None if there are none.
        closing_R: True for hypotheses at their length limit, after which only EOS may follow; None if there are none.
            No rule forbids that EOS.
    """
    log_prob_RV = torch.log_softmax(logits_RV.float(), dim=1)
    log_prob_RV.index_fill_(1, never, -torch.inf)
    if closing_R is None:
        if forbid is not None:
            forbid(log_prob_RV)
        log_prob_RV += log_prob_R.unsqueeze(1)
        return log_prob_RV
    eos_R = log_prob_RV[:, eos].clone()
    if forbid is not None:
        forbid(log_prob_RV)
    log_prob_RV += log_prob_R.masked_fill(closing_R, -torch.inf).unsqueeze(1)
    # Other hypotheses of the batch are not at their limits: their rules may forbid EOS.
    log_prob_RV[:, eos] = torch.where(closing_R, eos_R + log_prob_R, log_prob_RV[:, eos])
    return log_prob_RV


def best_of(hypotheses: Iterable[Hypothesis], most: int) -> list[Hypothesis]:
    """Return at most ``most`` of a sentence's finished hypotheses, best first.

    Raises:
        CheckpointError: if there is none, because the model predicts NaN.
    """
    found = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:most]
    if not found:
        raise not_finite()
    return found
