"""Beam search on a GPU, in steps that do not wait for the host.

The search is that of :mod:`deepspeed_nmt.search.beam`, with the same results. But the host does not look at each
step: it starts them ahead of the GPU, asks every few steps which sentences are done, and reads the hypotheses at the
end from the log of all steps. A done sentence costs time until it is removed; it changes nothing else, so it does not
matter how late that is. When a quarter of the sentences of a bucket are done, the others move to a smaller one. When
its positions are used up, they move to a longer one.

On a GPU each step is one CUDA graph, recorded once for each bucket (:mod:`deepspeed_nmt.search.replay`).

Memory does not grow with the text. The tensors of all buckets share the memory of the largest; the log of a batch is
16 bytes for each hypothesis and step.

Legend: B sentences of a batch, N those of a bucket, K beam, T steps, E finished hypotheses, S source length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.nn.linear import UsesPackedWeights
from deepspeed_nmt.nn.static_cache import StaticAncestry, Store
from deepspeed_nmt.search.base import Hypothesis, Request
from deepspeed_nmt.search.length_penalty import LengthPenalty
from deepspeed_nmt.search.replay import CudaGraphs, Record, Replays
from deepspeed_nmt.search.rules import LeftToRightSettings
from deepspeed_nmt.search.static_step import (
    ENDED,
    ENDED_PARENT,
    LEAST_POSITIONS,
    PARENT,
    TOKEN,
    StaticStep,
    positions_of_bucket,
    sentences_of_bucket,
)


@dataclass(frozen=True)
class Pacing:
    """The sizes of buckets, and the moments at which the host asks for the sentences that are done.

    Attributes:
        every: steps from one question to the next; more if an answer is still awaited.
        lag: steps that are started before the answer is awaited; so many the GPU always has ahead.
        least_positions: least positions of a bucket.
    """

    every: int = 4
    lag: int = 1
    least_positions: int = LEAST_POSITIONS


class _Question(NamedTuple):
    """A copy of flags or of a log on its way to the host.

    Attributes:
        answer: in the host's memory.
        arrival: an event on the GPU after the copy; None if it has arrived.
        step: number of the step after which it was asked.
    """

    answer: Tensor
    arrival: torch.cuda.Event | None
    step: int


class _Logged(NamedTuple):
    """The log of steps in one bucket.

    Attributes:
        steps: the steps.
        numbers: of the sentences in the bucket.
        question: for the log, (4,T,N,K).
    """

    steps: slice
    numbers: list[int]
    question: _Question


class StaticBeamSearch:
    """Beam search with a model whose steps are functions of tensors.

    Args:
        config: settings of the search.
        beam: K.
        penalty: by which the log-probabilities of finished hypotheses are divided.
        model: the model, in eval mode, for which :meth:`serves` is True.
        vocabulary: special tokens.
        device: of the model.
        pacing: of the host.
        record: records steps to be replayed; None to run each step by itself.

    Attributes:
        device: of the model.
        step: the state and the step.
        replays: recordings of the step.
    """

    def __init__(
        self,
        config: LeftToRightSettings,
        beam: int,
        penalty: LengthPenalty,
        model: DecodableModel,
        vocabulary: Vocabulary,
        device: torch.device,
        pacing: Pacing | None = None,
        record: Record | None = None,
    ) -> None:
        self._beam, self._penalty, self._model = beam, penalty, model
        self._pacing = pacing or Pacing()
        self.device = device
        self._store = Store(device)
        ancestry = StaticAncestry(self._store, beam)
        cache = model.begin_static(ancestry)
        assert cache is not None, "the model has no cache of constant sizes"
        self.step = StaticStep(config, beam, model, vocabulary, self._store, ancestry, cache)
        self.replays = Replays(self.step.run, record)

    @staticmethod
    def serves(model: DecodableModel) -> bool:
        """Return True if the steps of the model can be functions of tensors."""
        return model.begin_static(StaticAncestry(Store(torch.device("cpu")), 1)) is not None

    def search(
        self, source_BS: Tensor, padded: bool, requests: Sequence[Request], limits: Sequence[int]
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences.

        Args:
            source_BS: source tokens.
            padded: False promises that no position is padding.
            requests: one for each sentence.
            limits: most tokens of the translations of each, EOS included.

        Returns:
            For each sentence all hypotheses that finish, in the order in which they do.
        """
        step, pacing = self.step, self._pacing
        numbers, logged = list(range(len(limits))), []
        last, started, first = max(limits), 0, 0
        question: _Question | None = None
        # Translations are hardly longer than their sources at first.
        ahead = min(last, source_BS.shape[1])
        prefixes = [request.prefix for request in requests]
        step.begin(self._model.encode(source_BS, padded), limits, prefixes, pacing.least_positions, ahead)
        weights = _addresses(self._model)
        while started < last:
            if started == step.bucket.positions:
                logged.append(self._read_log(first, started, numbers))
                first = started
                step.move(positions_of_bucket(started + 1, pacing.least_positions), None)
            self.replays.at((self._store.moves, *weights))
            self.replays.run(step.key)
            started += 1
            if question is None and started % pacing.every == 0:
                question = self._ask(step.done_B, started)
            if question is None or started - question.step < pacing.lag:
                continue
            done = self._answer(question).tolist()
            question = None
            kept = [row for row in range(len(numbers)) if not done[row]]
            last = max((limits[numbers[row]] for row in kept), default=0)
            if started < last and sentences_of_bucket(len(kept)) < step.bucket.sentences:
                logged.append(self._read_log(first, started, numbers))
                first, numbers = started, [numbers[row] for row in kept]
                step.move(step.bucket.positions, kept)
        logged.append(self._read_log(first, started, numbers))
        return self._hypotheses(logged, len(limits), started)

    def _read_log(self, first: int, end: int, numbers: list[int]) -> _Logged:
        """Ask for the log of the steps from ``first`` to ``end`` of the sentences ``numbers``, without waiting."""
        log = self.step.log[:, first:end, : len(numbers)]
        return _Logged(slice(first, end), numbers, self._ask(log, end))

    def _ask(self, values: Tensor, step: int) -> _Question:
        """Copy values to the host, without waiting for them."""
        if values.device.type != "cuda":
            return _Question(values.clone(), None, step)
        answer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record()
        return _Question(answer, arrival, step)

    def _answer(self, question: _Question) -> Tensor:
        """Wait for values."""
        if question.arrival is not None:
            question.arrival.synchronize()
        return question.answer

    def _hypotheses(self, logged: Sequence[_Logged], sentences: int, steps: int) -> list[list[Hypothesis]]:
        """Read the finished hypotheses of each sentence from the log."""
        log = np.zeros((4, steps, sentences, self._beam), dtype=np.int32)
        log[ENDED] = np.float32(-np.inf).view(np.int32)
        for part in logged:
            log[:, part.steps, part.numbers] = self._answer(part.question).numpy()
        log_prob_TBK = log[ENDED].view(np.float32)
        step_E, sentence_E, rank_E = np.nonzero(np.isfinite(log_prob_TBK))
        tokens_ET = np.zeros((len(step_E), steps), dtype=np.int32)
        row_E = log[ENDED_PARENT][step_E, sentence_E, rank_E]
        for step in reversed(range(steps)):
            # Step t chooses token t; the hypothesis that ends in step t has the tokens before it.
            (at,) = np.nonzero(step_E > step)
            tokens_ET[at, step] = log[TOKEN, step, sentence_E[at], row_E[at]]
            row_E[at] = log[PARENT, step, sentence_E[at], row_E[at]]
        found: list[list[Hypothesis]] = [[] for _ in range(sentences)]
        log_prob_E = log_prob_TBK[step_E, sentence_E, rank_E].tolist()
        for sentence, length, tokens, log_prob in zip(
            sentence_E, step_E.tolist(), tokens_ET, log_prob_E, strict=True
        ):
            score = log_prob / self._penalty(length + 1)
            found[sentence].append(Hypothesis(tokens[:length].tolist(), score, log_prob))
        return found


def _addresses(model: DecodableModel) -> tuple[object, ...]:
    """Return a key that differs if weights have moved, or are joined anew."""
    joined = {module.packed for module in model.modules() if isinstance(module, UsesPackedWeights)}
    return hash(tuple(parameter.data_ptr() for parameter in model.parameters())), frozenset(joined)


def static_search(
    config: LeftToRightSettings,
    beam: int,
    penalty: LengthPenalty,
    model: DecodableModel,
    vocabulary: Vocabulary,
    device: torch.device,
    graphs: bool,
) -> StaticBeamSearch:
    """Return the search; on a GPU with ``graphs`` it records its steps as CUDA graphs."""
    record = CudaGraphs(device) if graphs and device.type == "cuda" else None
    return StaticBeamSearch(config, beam, penalty, model, vocabulary, device, record=record)
