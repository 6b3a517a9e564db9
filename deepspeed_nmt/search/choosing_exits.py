"""Exits that choose: how deep a decoder translates a sentence is decided by what its shallower exits wrote.

A model with decoder exits m_1 < m_2 < ... (:mod:`deepspeed_nmt.methods.multi_softmax`, or exits added afterwards)
encodes once. Two rules climb from exit to exit, each a beam search of its own, and stop at the first y_i that they
accept, or at the last exit:

- ``confidence``: log p_i(y_i) / |y_i| >= threshold, the mean log-probability (nats) of a token, EOS included;
- ``agreement``: r(y_i, y_{i-1}) >= threshold, with r the share of common tokens, 2 matches / (|a| + |b|), matched in
  blocks, the longest first (Ratcliff and Obershelp, Python's difflib). It saves time from three exits on.

Two others translate at all exits:

- ``rerank``: the y_i with the best score of the last exit, by its log-probability and the length penalty;
- ``consensus``: the y_i with the largest mean r to those of the other exits. Of equal ones the deepest wins.

Depth that depends on the sentence is Elbayad, Gu, Grave, Auli: "Depth-Adaptive Transformer", 2020, who train what
chooses it. Stopping by a threshold of the confidence, fitted on other text, is Schuster, Fisch, Gupta, Dehghani,
Bahri, Tran, Tay, Metzler: "Confident Adaptive Language Modeling", 2022, token by token. Stopping when exits agree is
Zhou, Xu, Ge, McAuley, Xu, Wei: "BERT Loses Patience", 2020, in classification. The other two rules are new here.

Legend: B sentences, S source length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.model import DecodableModel, TranslationModel, exit_name
from deepspeed_nmt.core.parts import ExitStages, Parts
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty, Request, Translation
from deepspeed_nmt.search.beam import BeamSearch, ExitsSettings
from deepspeed_nmt.search.forced import token_log_probs

StoppingRule = Literal["confidence", "agreement"]


class ChoosingExitsConfig(ExitsSettings):
    """Settings of the choice among exits."""

    name: Literal["choosing_exits"] = "choosing_exits"
    exits: ExitStages = Field(
        default=(1,),
        description="decoder stages to choose from, shallowest first",
    )
    rule: Literal[StoppingRule, "rerank", "consensus"] = Field(
        default="confidence",
        description="confidence or agreement: stop at the first exit that they accept; rerank or consensus: the best "
        "of all exits",
    )
    threshold: float = Field(
        default=0.0,
        ge=-1e6,
        le=1.0,
        description="confidence: least mean log-probability of a token; agreement: least share of common tokens with "
        "the exit before",
    )

    @override
    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse exits that the model lacks, and a choice of one."""
        if len(self.exits) < 2:
            yield (
                f"search.exits is {list(self.exits)}, and search.name={self.name} chooses among several; give two or "
                "more, or the file of a rule (translate --choose-exits)"
            )
        stages = parts.model.exit_stages()
        if stages is None:
            yield (
                f"search.name={self.name} chooses among exits, but model.name={parts.model.name} has only the one at "
                "its top; use another search"
            )
        elif self.exits[-1] > stages[1].total:
            yield (
                f"search.exits has {self.exits[-1]}, but model.{stages[1].setting} is {stages[1].total}; give "
                f"numbers up to {stages[1].total}"
            )


def common_share(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the share of common tokens, r."""
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def accepts(
    rule: StoppingRule, threshold: float, here: Hypothesis | Translation, before: Hypothesis | Translation | None
) -> bool:
    """Return True if a rule stops at an exit, given what it and the exit before propose; None if it is the first."""
    if rule == "confidence":
        return here.log_prob / (len(here.tokens) + 1) >= threshold
    return before is not None and common_share(here.tokens, before.tokens) >= threshold


class ChoosingExits:
    """Beam searches from several exits of a model, of which a rule chooses; see the module.

    Raises:
        ConfigError: if the model is an ensemble.
    """

    def __init__(self, config: ChoosingExitsConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        if not isinstance(model, TranslationModel):
            raise ConfigError(f"search.name={config.name} chooses among the exits of one model; give one run")
        self.config = config
        self.vocabulary = vocabulary
        self.models = [model.at_exit(exit_name(model.stages[0], number)) for number in config.exits]
        self.searches = [BeamSearch(config, exit, vocabulary) for exit in self.models]

    @torch.inference_mode()
    def search(
        self, source_BS: Tensor, padded: bool = True, requests: Sequence[Request] | None = None
    ) -> list[list[Hypothesis]]:
        """Translate a batch of sentences; see :meth:`RequestSearch.search`.

        The feature ``exit`` of a hypothesis is the decoder stage that proposed it.
        """
        requests = requests or [Request(line) for line in range(source_BS.shape[0])]
        memory, rule = self.models[0].encode(source_BS, padded), self.config.rule
        proposed: list[list[list[Hypothesis]]] = [[] for _ in requests]
        """By sentence and exit, hypotheses."""
        climbing = list(range(len(requests)))
        for number, search in zip(self.config.exits, self.searches, strict=True):
            rows_B = torch.tensor(climbing, device=source_BS.device)
            chosen = [requests[row] for row in climbing]
            beams = search.search(source_BS[rows_B], padded, chosen, memory.select(rows_B))
            for row, beam in zip(climbing, beams, strict=True):
                # Details of a translation are those of one model, whichever exit has proposed it.
                here = {"exit": float(number)}
                proposed[row].append([replace(one, features=here, token_log_probs=None) for one in beam])
            if rule == "confidence" or rule == "agreement":
                climbing = [row for row in climbing if not self._stops(rule, proposed[row])]
            if not climbing:
                break
        if rule == "rerank":
            return self._reranked(source_BS, padded, [[beam[0] for beam in beams] for beams in proposed])
        if rule == "consensus":
            return [_by_consensus([beam[0] for beam in beams]) for beams in proposed]
        return [beams[-1] for beams in proposed]

    def _stops(self, rule: StoppingRule, beams: Sequence[Sequence[Hypothesis]]) -> bool:
        before = beams[-2][0] if len(beams) > 1 else None
        return accepts(rule, self.config.threshold, beams[-1][0], before)

    def _reranked(
        self, source_BS: Tensor, padded: bool, of_sentences: Sequence[Sequence[Hypothesis]]
    ) -> list[list[Hypothesis]]:
        """Score the different translations of each sentence by the last exit, and return them best first."""
        penalty = LengthPenalty.parse(self.config.length_penalty)
        different = [{tuple(one.tokens): one for one in of}.values() for of in of_sentences]
        texts = [[one.tokens for one in of] for of in different]
        scores = token_log_probs(self.models[-1], self.vocabulary, source_BS, padded, texts)
        return [
            sorted(
                (
                    replace(one, log_prob=math.fsum(log_probs), score=math.fsum(log_probs) / penalty(len(log_probs)))
                    for one, log_probs in zip(of, log_probs_of, strict=True)
                ),
                key=lambda one: -one.score,
            )
            for of, log_probs_of in zip(different, scores, strict=True)
        ]


def _by_consensus(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the different ones of some hypotheses, shallowest first, by their mean share with all, best first."""
    shares = {
        tuple(one.tokens): sum(common_share(one.tokens, other.tokens) for other in hypotheses) / len(hypotheses)
        for one in hypotheses
    }
    deepest = {tuple(one.tokens): one for one in hypotheses}
    ranked = sorted(deepest, key=lambda tokens: (-shares[tokens], -deepest[tokens].features["exit"]))
    return [replace(deepest[tokens], score=shares[tokens]) for tokens in ranked]
