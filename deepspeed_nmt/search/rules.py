"""Rules of the next token, which all searches from left to right respect.

A rule forbids tokens after the tokens of a hypothesis so far. It does not change the probabilities of the others: the
log-probability of a translation is that of the model, with or without rules.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, T target length so far (BOS included), V vocabulary,
P length of the longest prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY, Vocabulary
from deepspeed_nmt.errors import option, shown
from deepspeed_nmt.search.base import Request
from deepspeed_nmt.search.length_penalty import length_bound


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
        default=1, ge=1, le=1_000_000, description="shortest translation in target tokens, EOS included"
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
        self._forbid(logits_RV, forced_R1, length + 1 < self._least, ngrams_RTN, again_RT)

    def _forbid(
        self,
        logits_RV: Tensor,
        forced_R1: Tensor | None,
        too_short: bool | Tensor,
        ngrams_RTN: Tensor | None,
        again_RT: Tensor | None,
    ) -> None:
        """Set the logits of forbidden tokens to -inf.

        Args:
            logits_RV: logits of the next tokens; overwritten.
            forced_R1: the token of its prefix that each row must continue with, -1 where any may; None for no
                prefixes.
            too_short: True if EOS must not follow yet; a tensor (1,) if the host does not know.
            ngrams_RTN: n-grams of each row; None for no rule of repetition.
            again_RT: True for n-grams whose last token would complete them for the second time.
        """
        eos = self._eos
        if forced_R1 is not None:
            forced_logit_R1 = logits_RV.gather(1, forced_R1.clamp(min=0))
        end_R1 = logits_RV[:, eos : eos + 1].clone()
        if self._suppressed is not None:
            logits_RV.index_fill_(1, self._suppressed, -torch.inf)
        if isinstance(too_short, Tensor):
            logits_RV[:, eos : eos + 1] = end_R1.masked_fill(too_short, -torch.inf)
        elif too_short:
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


class StaticRules(TokenRules):
    """The same rules as a function of tensors of constant sizes; see :mod:`deepspeed_nmt.search.static_step`.

    Args:
        settings: of the search.
        vocabulary: special tokens.
        device: of the logits.

    Attributes:
        ngram: n of the n-grams that must not occur twice; 0: the rules do not depend on earlier tokens.
    """

    def __init__(self, settings: LeftToRightSettings, vocabulary: Vocabulary, device: torch.device) -> None:
        super().__init__(settings, vocabulary, (), device)
        self.ngram = self._ngram
        self._always = self._least > 1 or self._ngram > 0 or self._suppressed is not None

    def apply_at(
        self, logits_RV: Tensor, length_1: Tensor, history_RL: Tensor | None, prefix_BL: Tensor | None
    ) -> None:
        """Set the logits of forbidden tokens to -inf.

        Args:
            logits_RV: logits of the next tokens; overwritten.
            length_1: number of tokens of each hypothesis, without BOS.
            history_RL: these tokens, and any others after them, for rules of repetition; L is at least their number.
            prefix_BL: tokens of the prefixes, -1 after them; None for no prefixes.
        """
        if not self._always and prefix_BL is None:
            return
        forced_R1, ngrams_RTN, again_RT = None, None, None
        if prefix_BL is not None:
            most = prefix_BL.shape[1]
            forced_B1 = prefix_BL.index_select(1, length_1.clamp(max=most - 1)).masked_fill(length_1 >= most, -1)
            forced_R1 = forced_B1.repeat_interleave(logits_RV.shape[0] // prefix_BL.shape[0], dim=0)
        size = self._ngram
        if history_RL is not None and 0 < size <= history_RL.shape[1]:
            ngrams_RTN = history_RL.unfold(1, size, 1)
            ends_T = torch.arange(size, history_RL.shape[1] + 1, device=history_RL.device)
            last_N = (length_1 + torch.arange(1 - size, 0, device=history_RL.device)).clamp(min=0)
            last_R1N = history_RL.index_select(1, last_N).unsqueeze(1)
            again_RT = (ngrams_RTN[:, :, : size - 1] == last_R1N).all(dim=2) & (ends_T <= length_1)
        self._forbid(logits_RV, forced_R1, length_1 + 1 < self._least, ngrams_RTN, again_RT)
