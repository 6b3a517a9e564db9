"""The loop of all searches from left to right, their settings, and the rules of the next token.

A rule forbids tokens after the tokens of a hypothesis so far. It does not change the probabilities of the others: the
log-probability of a translation is that of the model, with or without rules.

Legend: B sentences in progress, W live hypotheses of a sentence (1 before the first step), R rows = B x W, S source
length, T target length so far (BOS included), V vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel, Memory
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY, Vocabulary
from deepspeed_nmt.errors import option, shown
from deepspeed_nmt.native.library import Library
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.linear import packing_of
from deepspeed_nmt.search.base import Hypothesis, Request, check_finite, length_bound


class LeftToRightSettings(SearchConfig):
    """Settings of searches that decode one token after another.

    A translation has at least ``min_length`` tokens and at most ``int(max_length_ratio * source tokens) +
    max_length_extra``, and never more than ``max_length``. EOS counts on both sides, a target's tag does not.
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
        default=(),
        max_length=100_000,
        description="numbers of tokens that are never predicted; EOS and numbers beyond the vocabulary are ignored",
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

    def limit(self, source_tokens: int, request: Request, most: int | None) -> int:
        """Return the most tokens that a translation may have, EOS and tags included.

        The bound is raised to the shortest translation that is possible: ``min_length``, or the prefix, the
        constraints and EOS. The model reads at most ``most`` tokens (None: any number).
        """
        bound = length_bound(source_tokens, self.max_length_ratio, self.max_length_extra, self.max_length)
        needed = len(request.prefix) + sum(map(len, request.constraints)) + 1
        limit = max(request.tags + max(bound, self.min_length), needed)
        return limit if most is None else min(limit, most)


class TokenRules:
    """Rules of the next token for a batch of sentences, one for each request.

    Padding, BOS and the mask are never predicted. The prefix has precedence over all other rules. A hypothesis after
    which every token is forbidden ends.

    Attributes:
        never: tokens that are never predicted.
    """

    def __init__(
        self,
        settings: LeftToRightSettings,
        vocabulary: Vocabulary,
        requests: Sequence[Request],
        device: torch.device,
    ) -> None:
        self._eos = vocabulary.eos
        self._least = settings.min_length + min((request.tags for request in requests), default=0)
        self._ngram = settings.no_repeat_ngram
        suppressed = {*settings.suppress_tokens, *([vocabulary.unk] if settings.suppress_unknown else [])}
        suppressed = {token for token in suppressed if token < vocabulary.size} - {vocabulary.eos}
        self._prefixes = [request.prefix for request in requests]
        self._longest_prefix = max(map(len, self._prefixes), default=0)
        unpredicted = set(vocabulary.unpredicted)
        if not self._longest_prefix:  # which could contain suppressed tokens
            unpredicted, suppressed = unpredicted | suppressed, set()
        self.never = torch.tensor(sorted(unpredicted), device=device)
        self._suppressed = torch.tensor(sorted(suppressed), device=device) if suppressed else None

    def read_tokens(self, length: int) -> bool:
        """Return True if more may be forbidden to hypotheses of ``length`` tokens after the step, or longer ones."""
        return (
            bool(self._ngram)
            or length < self._least
            or self._suppressed is not None
            or length <= self._longest_prefix
        )

    def apply(self, logits_RV: Tensor, tokens_RT: Tensor, numbers: Sequence[int]) -> None:
        """Set the logits of forbidden tokens to -inf in place; see :class:`Live` for the arguments."""
        logits_RV.index_fill_(1, self.never, -torch.inf)
        if not self.read_tokens(tokens_RT.shape[1]):
            return
        length, size = tokens_RT.shape[1] - 1, self._ngram
        forced_R1 = self._forced(length, numbers, logits_RV.shape[0], logits_RV.device)
        if forced_R1 is not None:
            index_R1 = forced_R1.clamp(min=0)
            forced_logit_R1 = logits_RV.gather(1, index_R1)
        eos = self._eos
        end_R1 = logits_RV[:, eos : eos + 1].clone()
        if self._suppressed is not None:
            logits_RV.index_fill_(1, self._suppressed, -torch.inf)
        if length + 1 < self._least:
            logits_RV[:, eos] = -torch.inf
        if size and length >= size:
            ngrams_RTN = tokens_RT[:, 1:].unfold(1, size, 1)
            last_R1N = tokens_RT[:, length - size + 2 :].unsqueeze(1)
            again_RT = (ngrams_RTN[:, :, : size - 1] == last_R1N).all(dim=2)
            bound_RT = torch.where(again_RT, -torch.inf, torch.inf).to(logits_RV.dtype)
            logits_RV.scatter_reduce_(1, ngrams_RTN[:, :, -1], bound_RT, "amin")
        dead_R1 = logits_RV.amax(dim=1, keepdim=True) == -torch.inf
        logits_RV[:, eos : eos + 1] = torch.where(dead_R1, end_R1, logits_RV[:, eos : eos + 1])
        if forced_R1 is not None:
            is_forced_R1 = forced_R1 >= 0
            logits_RV.masked_fill_(is_forced_R1, -torch.inf)
            logits_RV.scatter_(1, index_R1, torch.where(is_forced_R1, forced_logit_R1, logits_RV.gather(1, index_R1)))

    def _forced(self, length: int, numbers: Sequence[int], rows: int, device: torch.device) -> Tensor | None:
        """Return the token of its prefix that each row must continue with, -1 where any may. Shape: -> (R,1)."""
        if length >= self._longest_prefix:
            return None
        prefixes = [self._prefixes[number] for number in numbers]
        forced = [prefix[length] if length < len(prefix) else -1 for prefix in prefixes]
        return torch.tensor(forced, device=device).repeat_interleave(rows // len(numbers)).unsqueeze(1)


@dataclass
class Sentence:
    """A sentence in progress: its number in the batch, and the most tokens of its translations, EOS included."""

    number: int
    limit: int
    request: Request


S = TypeVar("S", bound=Sentence)


@dataclass(frozen=True)
class Live(Generic[S]):
    """The unfinished hypotheses before a step.

    Attributes:
        sentences: in the order of the rows; each has equally many rows, which are adjacent.
        tokens_RT: their tokens, BOS first.
        log_prob_RT: their log-probabilities up to each token; 0 for BOS, -inf in rows without a hypothesis.
        rules: of the next token.
    """

    sentences: list[S]
    tokens_RT: Tensor
    log_prob_RT: Tensor
    rules: TokenRules

    @property
    def length(self) -> int:
        """Number of tokens of a hypothesis after the step."""
        return self.tokens_RT.shape[1]

    @property
    def width(self) -> int:
        """Rows of a sentence, W."""
        return self.tokens_RT.shape[0] // len(self.sentences)

    def ended(
        self, rows: Sequence[int] | Tensor, log_probs: Iterable[float]
    ) -> list[tuple[list[int], tuple[float, ...]]]:
        """Return the tokens of hypotheses that end, and the log-probability of each and of EOS, given that of all."""
        tokens, totals = self.tokens_RT[rows, 1:].tolist(), self.log_prob_RT[rows].tolist()
        return [
            (of_row, tuple(after - before for before, after in pairwise([*upto, log_prob])))
            for of_row, upto, log_prob in zip(tokens, totals, log_probs, strict=True)
        ]

    def extended(
        self, unfinished: Sequence[bool], row_BW: Tensor, token_BW: Tensor, log_prob_BW: Tensor
    ) -> Extensions:
        """Return the extensions of rows by tokens, given the log-probabilities of the extended hypotheses."""
        joined = (
            torch.cat([before_RT[row_BW], next_BW.unsqueeze(2)], dim=2)
            for before_RT, next_BW in ((self.tokens_RT, token_BW), (self.log_prob_RT, log_prob_BW))
        )
        return Extensions(unfinished, row_BW, *joined)

    def forbid(self, logits_RV: Tensor) -> None:
        """Set the logits, or log-probabilities, of the next tokens that the rules forbid to -inf."""
        self.rules.apply(logits_RV, self.tokens_RT, [sentence.number for sentence in self.sentences])


class Extensions(NamedTuple):
    """The hypotheses with which a search goes on. Here W is the number of rows of a sentence in the next step.

    Attributes:
        unfinished: True for each sentence that is searched on; the values of the others do not matter.
        row_BW: rows of the hypotheses that are extended.
        tokens_BWT: tokens of the extended hypotheses, BOS first.
        log_prob_BWT: their log-probabilities up to each token.
    """

    unfinished: Sequence[bool]
    row_BW: Tensor
    tokens_BWT: Tensor
    log_prob_BWT: Tensor


class SentenceSearch(ABC, Generic[S]):
    """A search from left to right by a loop of its own.

    The model must be in eval mode when :meth:`search` is called.
    """

    def __init__(self, config: LeftToRightSettings, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self.native: Library | None = None
        """Code by which the model decodes; None if torch alone does."""

    @torch.inference_mode()
    def search(
        self,
        source_BS: Tensor,
        padded: bool = True,
        requests: Sequence[Request] | None = None,
        memory: Memory | None = None,
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`RequestSearch.search`.

        ``memory`` is the encoded source if the caller has encoded it.

        Raises:
            CheckpointError: if the model predicts NaN.
        """
        model, packing = self.model, packing_of(self.model)
        self.native = None if packing is None else packing.native
        assert not model.training, "call model.eval() first: dropout would change the translations"
        if requests is None:
            requests = [Request(line) for line in range(source_BS.shape[0])]
        assert len(requests) == source_BS.shape[0], "every sentence needs a request"
        if not requests:
            return []
        lengths = source_BS.ne(self.vocabulary.pad).sum(dim=1).tolist()
        sentences = [
            self.start(number, self.config.limit(length, request, model.longest_target), request)
            for number, (length, request) in enumerate(zip(lengths, requests, strict=True))
        ]
        rules = TokenRules(self.config, self.vocabulary, requests, source_BS.device)
        self.decode(sentences, memory or model.encode(source_BS, padded), rules)
        return [self.finish(sentence) for sentence in sentences]

    @abstractmethod
    def start(self, number: int, limit: int, request: Request) -> S:
        """Return the state of a sentence before the first step."""

    @abstractmethod
    def decode(self, sentences: list[S], memory: Memory, rules: TokenRules) -> None:
        """Decode a batch of sentences until all are finished."""

    @abstractmethod
    def finish(self, sentence: S) -> list[Hypothesis]:
        """Return the hypotheses of a sentence, best first."""


class LeftToRightSearch(SentenceSearch[S]):
    """A search that extends hypotheses token by token. Finished sentences leave the batch."""

    def decode(self, sentences: list[S], memory: Memory, rules: TokenRules) -> None:
        """Decode a batch of sentences step by step."""
        device, cache = memory.states_BSD.device, self.model.begin()
        live = Live(
            sentences,
            tokens_RT=torch.full((len(sentences), 1), self.vocabulary.bos, device=device),
            log_prob_RT=torch.zeros(len(sentences), 1, dtype=torch.float32, device=device),
            rules=rules,
        )
        while True:
            unfinished, *extensions = self.step(live, memory, cache)
            kept = [row for row, searched in enumerate(unfinished) if searched]
            if not kept:
                return
            kept_B: Tensor | None = None
            if len(kept) < len(unfinished):
                kept_B = torch.tensor(kept, device=device)
                memory = memory.select(kept_B)
                extensions = [x.index_select(0, kept_B) for x in extensions]
            row_R, tokens_RT, log_prob_RT = (x.flatten(0, 1) for x in extensions)
            live = Live([live.sentences[row] for row in kept], tokens_RT, log_prob_RT, live.rules)
            cache.select(row_R, kept_B)

    def step(self, live: Live[S], memory: Memory, cache: DecoderCache) -> Extensions:
        """Take a step, or several of which only the last one finishes hypotheses."""
        return self.extend(live, self.model.step(live.tokens_RT[:, -1], memory, cache).float())

    @abstractmethod
    def extend(self, live: Live[S], logits_RV: Tensor) -> Extensions:
        """Record the hypotheses that finish with the next token, and return those that live on.

        ``logits_RV``, the fp32 logits of the next tokens, may be overwritten.
        """


def largest(x_BN: Tensor, period: int, k: int) -> tuple[Tensor, Tensor]:
    """Find the ``k`` largest entries of each row and their indices, largest first; missing ones are -inf at index 0.

    The ``k`` blocks with the largest maxima hold them all, so only those blocks are searched. On a CPU with a
    vocabulary of 8,000 this is three times as fast as searching whole rows. Blocks divide ``period``, which divides
    N.

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


def best_of(hypotheses: Iterable[Hypothesis], most: int) -> list[Hypothesis]:
    """Return at most ``most`` of a sentence's finished hypotheses, best first; a CheckpointError if there is none."""
    best = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:most]
    check_finite(best[0].score if best else math.nan)
    return best
