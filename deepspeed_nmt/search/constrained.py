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
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty, Request
from deepspeed_nmt.search.beam import BeamSettings
from deepspeed_nmt.search.left_to_right import Extensions, LeftToRightSearch, Live, Sentence, best_of

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
        begun: the most of its last tokens with which an unmet phrase begins.
    """

    met: frozenset[int] = frozenset()
    begun: tuple[int, ...] = ()

    def after(self, token: int, phrases: Phrases) -> ConstraintProgress:
        """Return the progress after another token."""
        seen = (*self.begun, token)
        for begun in (seen[start:] for start in range(len(seen))):
            if numbers := self._beginning(begun, phrases):
                is_whole = phrases[numbers[0]] == begun
                return ConstraintProgress(self.met | {numbers[0]}) if is_whole else replace(self, begun=begun)
        return ConstraintProgress(self.met)

    def _beginning(self, tokens: tuple[int, ...], phrases: Phrases) -> list[int]:
        """Return the numbers of the unmet phrases that begin with some tokens, the shortest first."""
        unmet = (number for number in range(len(phrases)) if number not in self.met)
        numbers = [number for number in unmet if phrases[number][: len(tokens)] == tokens]
        return sorted(numbers, key=lambda number: len(phrases[number]))

    def next_tokens(self, phrases: Phrases) -> list[int]:
        """Return the tokens that meet more: the next ones of phrases that are begun, or the first of each unmet."""
        return list(dict.fromkeys(phrases[n][len(self.begun)] for n in self._beginning(self.begun, phrases)))

    def tokens(self, phrases: Phrases) -> int:
        """Return the number of constraint tokens that are met."""
        return sum(len(phrases[number]) for number in self.met) + len(self.begun)


@dataclass(frozen=True)
class Candidate:
    """An extension of hypothesis number ``parent`` by a token, after which ``met`` constraint tokens are met."""

    log_prob: float
    parent: int
    token: int
    progress: ConstraintProgress = ConstraintProgress()
    met: int = 0


@dataclass
class ConstrainedSentence(Sentence):
    """A sentence in progress, with the progress of each live hypothesis."""

    live: list[ConstraintProgress]
    finished: list[Hypothesis]

    @property
    def phrases(self) -> Phrases:
        """The constraints."""
        return self.request.constraints

    @property
    def tokens(self) -> int:
        """Number of tokens of the constraints."""
        return sum(map(len, self.phrases))


class ConstrainedBeam(LeftToRightSearch[ConstrainedSentence]):
    """Beam search with lexical constraints, with one model; see :class:`LeftToRightSearch` for its arguments.

    For each sentence there is at least one, and at most ``beam`` different hypotheses. All contain the constraints,
    unless the model cannot read as many tokens.
    """

    def __init__(self, config: ConstrainedBeamConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        super().__init__(config, model, vocabulary)
        self.beam, self.penalty = config.beam, LengthPenalty.parse(config.length_penalty)

    def start(self, number: int, limit: int, request: Request) -> ConstrainedSentence:
        """Return a sentence with one hypothesis, which has met nothing."""
        return ConstrainedSentence(number, limit, request, [ConstraintProgress()], [])

    def finish(self, sentence: ConstrainedSentence) -> list[Hypothesis]:
        """Return the best hypotheses."""
        return best_of(sentence.finished, self.beam)

    def extend(self, live: Live[ConstrainedSentence], logits_RV: Tensor) -> Extensions:
        """Record the candidates that finish, and divide the beams among the others."""
        unfinished, chosen, width, candidates_B = [], [], live.width, self._candidates(live, logits_RV)
        for row, sentence in enumerate(live.sentences):
            candidates = candidates_B[row]
            at_limit = sentence.limit == live.length
            ready = [candidate for candidate in candidates if at_limit or candidate.met == sentence.tokens]
            for candidate in ready[: self.beam]:
                if candidate.token == self.vocabulary.eos:
                    log_prob = candidate.log_prob
                    ((tokens, by_token),) = live.ended([row * width + candidate.parent], [log_prob])
                    score = log_prob / self.penalty(live.length)
                    sentence.finished.append(Hypothesis(tokens, score, log_prob, token_log_probs=by_token))
            going_on = [candidate for candidate in candidates if candidate.token != self.vocabulary.eos]
            beam = allocate(going_on, self.beam, sentence.tokens)
            unfinished.append(not at_limit and len(sentence.finished) < self.beam and len(beam) > 0)
            # Places that are left over are filled with hypotheses of probability 0.
            beam += [Candidate(-inf, beam[0].parent if beam else 0, self.vocabulary.eos)] * (self.beam - len(beam))
            sentence.live = [candidate.progress for candidate in beam]
            chosen.append(beam)
        columns = (
            (width * row + new.parent, new.token, new.log_prob) for row, beam in enumerate(chosen) for new in beam
        )
        kinds = torch.long, torch.long, torch.float32
        row_R, token_R, log_prob_R = (
            torch.tensor(column, dtype=kind) for column, kind in zip(zip(*columns, strict=True), kinds, strict=True)
        )
        shape, device = (len(chosen), self.beam), logits_RV.device
        return live.extended(unfinished, *(x_R.view(shape).to(device) for x_R in (row_R, token_R, log_prob_R)))

    def _candidates(self, live: Live[ConstrainedSentence], logits_RV: Tensor) -> list[list[Candidate]]:
        """Return the extensions of each sentence's hypotheses to look at, the most probable first."""
        eos, sentences, device = self.vocabulary.eos, live.sentences, logits_RV.device
        width, vocabulary = live.width, logits_RV.shape[1]
        total_RV = torch.log_softmax(logits_RV, dim=1) + live.log_prob_RT[:, -1].unsqueeze(1)
        states = [(sentence, progress) for sentence in sentences for progress in sentence.live]
        helpful = [progress.next_tokens(sentence.phrases) for sentence, progress in states]
        most = max(map(len, helpful))
        helpful_RN = torch.tensor([tokens + [eos] * (most - len(tokens)) for tokens in helpful], dtype=torch.long)
        # Read before the rules apply: constraints have precedence over all rules but the prefix.
        helpful_totals = total_RV.gather(1, helpful_RN.to(device)).tolist()
        ends = total_RV[:, eos].tolist()
        unmet = [progress.tokens(sentence.phrases) < sentence.tokens for sentence, progress in states]
        total_RV[:, eos].masked_fill_(torch.tensor(unmet, device=device), -inf)
        live.forbid(total_RV)
        best_totals, best_tokens = (x_R.tolist() for x_R in total_RV.max(dim=1))
        total_BN = total_RV.view(len(sentences), -1)
        top_totals, top_indices = (x.tolist() for x in total_BN.topk(min(2 * self.beam, total_BN.shape[1]), dim=1))
        candidates = []
        for row, sentence in enumerate(sentences):
            rows = range(row * width, (row + 1) * width)
            if sentence.limit == live.length:
                closing = [at for at in rows if not unmet[at]] or list(rows)
                totals = {(at - rows.start, eos): ends[at] for at in closing}
            else:
                indices = (divmod(index, vocabulary) for index in top_indices[row])
                totals = dict(zip(indices, top_totals[row], strict=True))
                for parent, at in enumerate(rows):
                    totals[parent, best_tokens[at]] = best_totals[at]
                    if live.length > len(sentence.request.prefix):
                        pairs = zip(helpful[at], helpful_totals[at], strict=False)  # the row is filled up
                        totals |= {(parent, token): total for token, total in pairs}
            candidates.append(self._sorted(sentence, totals, live.length))
        return candidates

    def _sorted(
        self, sentence: ConstrainedSentence, totals: dict[tuple[int, int], float], length: int
    ) -> list[Candidate]:
        """Return the possible ones of extensions, given by hypothesis and token, the most probable first."""
        candidates = []
        for (parent, token), log_prob in totals.items():
            if log_prob > -inf:
                before = sentence.live[parent]
                progress = before if token == self.vocabulary.eos else before.after(token, sentence.phrases)
                candidates.append(Candidate(log_prob, parent, token, progress, progress.tokens(sentence.phrases)))
        # Of those that live on, the tokens that are left must suffice for the unmet ones and EOS.
        left = max(sentence.limit - length - 1, 0)
        possible = [candidate for candidate in candidates if sentence.tokens - candidate.met <= left]
        return sorted(
            possible or candidates, key=lambda candidate: (-candidate.log_prob, candidate.parent, candidate.token)
        )


def allocate(candidates: Sequence[Candidate], beam: int, tokens: int) -> list[Candidate]:
    """Divide the places of a beam among banks by the number of met constraint ``tokens``.

    Every bank has as many places; those that are left over go to the bank of the most tokens. Places that a bank does
    not fill go to the other banks, those of more tokens first. The most probable candidates are first, as before.
    """
    banks: list[list[Candidate]] = [[] for _ in range(tokens + 1)]
    for candidate in candidates:
        banks[candidate.met].append(candidate)
    places = [beam // len(banks)] * len(banks)
    places[-1] += beam % len(banks)
    chosen = [bank[:size] for bank, size in zip(banks, places, strict=True)]
    free = beam - sum(map(len, chosen))
    for bank, taken in zip(reversed(banks), reversed(chosen), strict=True):
        more = bank[len(taken) :][:free]
        taken += more
        free -= len(more)
    return sorted((candidate for bank in chosen for candidate in bank), key=lambda candidate: -candidate.log_prob)
