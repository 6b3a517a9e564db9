"""Beam search with lexical constraints: phrases that every translation contains.

Dynamic beam allocation of Post and Vilar, "Fast Lexically Constrained Decoding with Dynamic Beam Allocation for
Neural Machine Translation" (2018), after the grid beam search of Hokamp and Liu (2017). Besides the best extensions
of all hypotheses, each step looks at the best extension of each hypothesis and at its extensions by the next tokens
of unmet phrases. The places of the beam are divided among *banks* by the number of constraint tokens that a
hypothesis has met. EOS may follow only when all are met. A phrase counts once its tokens follow one another: a
hypothesis that leaves it before its end has met none of it.

A sentence without constraints has one bank, which is beam search. A beam of fewer places than a sentence has
constraint tokens, plus one, prefers hypotheses that have met most.

Legend: B sentences, S source length, V vocabulary, K beam, W live hypotheses of a sentence (1 before the first step,
then K), R rows = B x W, T target length so far (BOS included), C extensions looked at, N next tokens of phrases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty, Request
from deepspeed_nmt.search.beam import BeamSettings
from deepspeed_nmt.search.left_to_right import TokenRules, best_of, bounded_requests, never_predicted

Phrases = tuple[tuple[int, ...], ...]


class ConstrainedBeamConfig(BeamSettings):
    """Settings of beam search with lexical constraints."""

    takes: ClassVar[frozenset[str]] = BeamSettings.takes | {"constraints"}
    name: Literal["constrained_beam"] = "constrained_beam"


@dataclass(frozen=True)
class ConstraintProgress:
    """The part of a sentence's constraints that a hypothesis has met.

    Attributes:
        met: numbers of the phrases that it contains.
        phrase: number of the phrase that its last tokens begin; None if there is none.
        position: number of tokens of that phrase so far.
    """

    met: frozenset[int] = frozenset()
    phrase: int | None = None
    position: int = 0

    def after(self, token: int, phrases: Phrases) -> ConstraintProgress:
        """Return the progress after another token."""
        if self.phrase is not None and phrases[self.phrase][self.position] == token:
            return self._at(self.phrase, self.position + 1, phrases)
        for number, phrase in enumerate(phrases):
            if number not in self.met and phrase[0] == token:
                return self._at(number, 1, phrases)
        return ConstraintProgress(self.met)

    def _at(self, phrase: int, position: int, phrases: Phrases) -> ConstraintProgress:
        if position == len(phrases[phrase]):
            return ConstraintProgress(self.met | {phrase})
        return ConstraintProgress(self.met, phrase, position)

    def next_tokens(self, phrases: Phrases) -> list[int]:
        """Return the tokens that meet more: the next one of the phrase that is begun, or the first of each unmet."""
        if self.phrase is not None:
            return [phrases[self.phrase][self.position]]
        return list(dict.fromkeys(phrase[0] for number, phrase in enumerate(phrases) if number not in self.met))

    def tokens(self, phrases: Phrases) -> int:
        """Return the number of constraint tokens that are met."""
        return sum(len(phrases[number]) for number in self.met) + self.position


@dataclass(frozen=True)
class _Candidate:
    """An extension of a hypothesis by a token.

    Attributes:
        log_prob: of the extended hypothesis.
        parent: number of the hypothesis.
        token: the new token.
        progress: after the token.
        met: number of constraint tokens that are met.
    """

    log_prob: float
    parent: int
    token: int
    progress: ConstraintProgress
    met: int


@dataclass
class _Sentence:
    """A sentence in progress.

    Attributes:
        number: of the sentence in the batch.
        limit: most tokens of its translations, EOS included.
        phrases: its constraints.
        live: progress of each live hypothesis.
        tokens: number of tokens of its constraints.
        finished: hypotheses that have finished.
    """

    number: int
    limit: int
    phrases: Phrases
    live: list[ConstraintProgress] = field(default_factory=lambda: [ConstraintProgress()])
    tokens: int = 0
    finished: list[Hypothesis] = field(default_factory=list)


class ConstrainedBeam:
    """Beam search with lexical constraints, with one model.

    Args:
        config: settings.
        model: A model, which must be in eval mode when :meth:`search` is called.
        vocabulary: special tokens.
    """

    def __init__(self, config: ConstrainedBeamConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        self.config = config
        self.model = model
        self.vocabulary = vocabulary
        self.penalty = LengthPenalty.parse(config.length_penalty)
        self._never = never_predicted(vocabulary, model)

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`RequestSearch.search`.

        Returns:
            For each sentence at least one and at most ``beam`` different hypotheses, best first. All contain the
            constraints, unless the model cannot read as many tokens.

        Raises:
            CheckpointError: if the model predicts NaN.
        """
        requests, limits = bounded_requests(self.config, self.model, self.vocabulary, source_BS, requests)
        if not limits:
            return []
        device, beam = source_BS.device, self.config.beam
        rules = TokenRules.of(self.config, self.vocabulary, requests, device)
        everything = [
            _Sentence(number, limit, request.constraints, tokens=sum(map(len, request.constraints)))
            for number, (limit, request) in enumerate(zip(limits, requests, strict=True))
        ]
        sentences = everything
        memory, cache = self.model.encode(source_BS, padded), self.model.begin()
        tokens_RT = source_BS.new_full((len(limits), 1), self.vocabulary.bos)
        log_prob_R1 = torch.zeros(len(limits), 1, device=device)
        for length in count(1):
            logits_RV = self.model.step(tokens_RT[:, -1], memory, cache).float()
            in_prefix = [length <= len(requests[each.number].prefix) for each in sentences]
            found = self._candidates(logits_RV, log_prob_R1, tokens_RT, sentences, rules, in_prefix, length)
            survivors = [
                self._advance(sentence, candidates, tokens_RT, row * len(sentence.live), length)
                for row, (sentence, candidates) in enumerate(zip(sentences, found, strict=True))
            ]
            kept = [
                row
                for row, each in enumerate(sentences)
                if each.limit > length and len(each.finished) < beam and survivors[row]
            ]
            if not kept:
                break
            width = tokens_RT.shape[0] // len(sentences)
            kept_B = None if len(kept) == len(sentences) else torch.tensor(kept, device=device)
            memory = memory if kept_B is None else memory.select(kept_B)
            filled = [(row, self._filled(survivors[row])) for row in kept]
            sentences = [sentences[row] for row in kept]
            for sentence, (_, chosen) in zip(sentences, filled, strict=True):
                sentence.live = [each.progress for each in chosen]
            rows_R = torch.tensor([row * width + each.parent for row, chosen in filled for each in chosen]).to(device)
            last_R1 = torch.tensor([[each.token] for _, chosen in filled for each in chosen]).to(device)
            log_prob_R1 = torch.tensor([[each.log_prob] for _, chosen in filled for each in chosen]).to(device)
            tokens_RT = torch.cat([tokens_RT.index_select(0, rows_R), last_R1], dim=1)
            cache.select(rows_R, kept_B)
        return [best_of(each.finished, beam) for each in everything]

    def _filled(self, chosen: list[_Candidate]) -> list[_Candidate]:
        """Fill the beam up with hypotheses that cannot live on."""
        dead = _Candidate(-inf, chosen[0].parent, self.vocabulary.eos, ConstraintProgress(), 0)
        return chosen + [dead] * (self.config.beam - len(chosen))

    def _candidates(
        self,
        logits_RV: Tensor,
        log_prob_R1: Tensor,
        tokens_RT: Tensor,
        sentences: Sequence[_Sentence],
        rules: TokenRules | None,
        in_prefix: Sequence[bool],
        length: int,
    ) -> list[list[_Candidate]]:
        """Return the extensions of each sentence's hypotheses to look at, the most probable first.

        Args:
            logits_RV: logits of the next tokens.
            log_prob_R1: log-probabilities of the hypotheses.
            tokens_RT: tokens of the hypotheses.
            sentences: in progress.
            rules: of the next token; None if there are none.
            in_prefix: for each sentence, True if its prefix determines the next token.
            length: of the extended hypotheses.
        """
        eos, vocabulary = self.vocabulary.eos, logits_RV.shape[1]
        total_RV = torch.log_softmax(logits_RV, dim=1) + log_prob_R1
        states = [(sentence, progress) for sentence in sentences for progress in sentence.live]
        wanted = [progress.next_tokens(sentence.phrases) for sentence, progress in states]
        most = max(map(len, wanted))
        wanted_RN = torch.tensor([each + [eos] * (most - len(each)) for each in wanted], dtype=torch.long)
        # Read before the rules apply: constraints have precedence over all rules but the prefix.
        wanted_totals = total_RV.gather(1, wanted_RN.to(total_RV.device)).tolist()
        ends = total_RV[:, eos].tolist()
        unmet = [progress.tokens(sentence.phrases) < sentence.tokens for sentence, progress in states]
        total_RV.index_fill_(1, self._never.to(total_RV.device), -torch.inf)
        total_RV[:, eos].masked_fill_(torch.tensor(unmet, device=total_RV.device), -torch.inf)
        if rules is not None:
            rules.apply(total_RV, tokens_RT, [sentence.number for sentence in sentences])
        best = total_RV.max(dim=1)
        best_totals, best_tokens = best.values.tolist(), best.indices.tolist()
        total_BN = total_RV.view(len(sentences), -1)
        top = total_BN.topk(min(2 * self.config.beam, total_BN.shape[1]), dim=1)
        top_totals, top_indices = top.values.tolist(), top.indices.tolist()
        width, found = len(states) // len(sentences), []
        for row, sentence in enumerate(sentences):
            places = range(row * width, (row + 1) * width)
            if sentence.limit == length:
                closing = [at for at in places if not unmet[at]] or list(places)
                totals = {(at - places.start, eos): ends[at] for at in closing}
            else:
                indices = (divmod(index, vocabulary) for index in top_indices[row])
                totals = dict(zip(indices, top_totals[row], strict=True))
                for place, at in enumerate(places):
                    totals[place, best_tokens[at]] = best_totals[at]
                    if not in_prefix[row]:
                        pairs = zip(wanted[at], wanted_totals[at], strict=False)  # the row is filled up
                        totals |= {(place, token): total for token, total in pairs}
            found.append(self._sorted(sentence, totals, length))
        return found

    def _sorted(self, sentence: _Sentence, totals: dict[tuple[int, int], float], length: int) -> list[_Candidate]:
        """Return the possible extensions of a sentence, the most probable first.

        Args:
            sentence: in progress.
            totals: log-probability of extensions by hypothesis and token.
            length: of the extended hypotheses.
        """
        candidates = []
        for (parent, token), log_prob in totals.items():
            if log_prob > -inf:
                before = sentence.live[parent]
                progress = before if token == self.vocabulary.eos else before.after(token, sentence.phrases)
                candidates.append(_Candidate(log_prob, parent, token, progress, progress.tokens(sentence.phrases)))
        # Of those that live on, the tokens that are left must suffice for the unmet ones and EOS.
        left = sentence.limit - length - 1
        possible = [each for each in candidates if sentence.tokens - each.met <= max(left, 0)]
        return sorted(possible or candidates, key=lambda each: (-each.log_prob, each.parent, each.token))

    def _advance(
        self, sentence: _Sentence, candidates: Sequence[_Candidate], tokens_RT: Tensor, first: int, length: int
    ) -> list[_Candidate]:
        """Record the hypotheses that finish, and return those that live on.

        Args:
            sentence: in progress.
            candidates: the most probable first.
            tokens_RT: tokens of all hypotheses.
            first: row of the sentence's first hypothesis.
            length: of the extended hypotheses.
        """
        eos, beam = self.vocabulary.eos, self.config.beam
        ready = (
            candidates if sentence.limit == length else [each for each in candidates if each.met == sentence.tokens]
        )
        for each in ready[:beam]:
            if each.token == eos:
                tokens = tokens_RT[first + each.parent, 1:].tolist()
                hypothesis = Hypothesis(tokens, each.log_prob / self.penalty(length), each.log_prob)
                sentence.finished.append(hypothesis)
        return allocate([each for each in candidates if each.token != eos], beam, sentence.tokens)


def allocate(candidates: Sequence[_Candidate], beam: int, tokens: int) -> list[_Candidate]:
    """Divide the places of a beam among banks by the number of met constraint tokens.

    Every bank has as many places; those that are left over go to the bank of the most tokens. Places that a bank does
    not fill go to the other banks, those of more tokens first.

    Args:
        candidates: the most probable first.
        beam: number of places.
        tokens: number of constraint tokens.

    Returns:
        At most ``beam`` candidates, the most probable first.
    """
    banks: list[list[_Candidate]] = [[] for _ in range(tokens + 1)]
    for each in candidates:
        banks[each.met].append(each)
    places = [beam // len(banks)] * len(banks)
    places[-1] += beam % len(banks)
    chosen = [bank[:size] for bank, size in zip(banks, places, strict=True)]
    free = beam - sum(map(len, chosen))
    for bank, taken in zip(reversed(banks), reversed(chosen), strict=True):
        more = bank[len(taken) :][:free]
        taken += more
        free -= len(more)
    return sorted((each for bank in chosen for each in bank), key=lambda each: -each.log_prob)
