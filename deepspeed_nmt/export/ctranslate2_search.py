"""Beam search of CTranslate2 with the rules of :mod:`deepspeed_nmt.search.beam`. Nothing here imports torch.

CTranslate2, too, stops a sentence when K hypotheses have finished. All K are requested, and ranked here by any length
penalty. Two rules differ:

- It has one length limit for a whole batch, and cuts hypotheses off there. So a sentence that it searches beyond the
  limit of its own is searched again, alone, until one token before this limit; the unfinished hypotheses are then
  extended by EOS, at its log-probability.
- It may predict padding and BOS. A sentence with a hypothesis that contains them is searched again without them. They
  can displace other hypotheses of the beam, too; this happens with models that have learnt little.

Legend: K beam.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from deepspeed_nmt.core.parts import MAX_HYPOTHESES, SearchConfig
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, import_optional
from deepspeed_nmt.search.base import Hypothesis, LengthPenalty, PenaltyName, length_bound
from deepspeed_nmt.search.lines import length_buckets

EXTRA = "pip install 'ctranslate2>=4.5,<5'"
"""Command that installs CTranslate2, for messages."""
_EXTREME = 8.0
"""Exponent by which CTranslate2 prefers long hypotheses to short ones, whatever their log-probabilities."""
_USUAL_BEAM, _SHARE = 8, 4
"""Batches with a larger beam are smaller by this factor: a signal is answered only between two batches."""
_NO_PENALTY = 1e-6
"""Exponent in place of 0, with which CTranslate2 would stop before K hypotheses have finished."""
RULES: Mapping[str, object] = {
    "min_length": 1,
    "no_repeat_ngram": 0,
    "suppress_unknown": False,
    "suppress_tokens": (),
}
"""Settings of a run's search that are rules of the next token, each with the value that forbids nothing.

CTranslate2 has such rules, too, but divides the probability of forbidden tokens among the others, so that it finds
other translations.
"""


def import_ctranslate2() -> Any:
    """Import CTranslate2, and return the module, or raise a ConfigError."""
    return import_optional("ctranslate2", "an export for CTranslate2", EXTRA)


class ExportBeamSettings(SearchConfig):
    """Settings of a beam search; those of :class:`deepspeed_nmt.search.beam.BeamSettings`."""

    width_setting: ClassVar[str | None] = "beam"
    name: Literal["beam"] = "beam"
    beam: int = Field(ge=1, le=MAX_HYPOTHESES)
    length_penalty: PenaltyName
    max_length_ratio: float = Field(ge=0.0, le=100.0)
    max_length_extra: int = Field(ge=0, le=100_000)
    max_length: int = Field(default=0, ge=0, le=1_000_000)

    def limit(self, source_tokens: int, longest: int) -> int:
        """Return the most tokens of a translation, given those of the source (both with EOS) and the positions."""
        bound = length_bound(source_tokens, self.max_length_ratio, self.max_length_extra, self.max_length)
        return min(longest, bound)


class CTranslate2Search:
    """Beam search with an exported model of ``longest`` positions, in fp32 or int8, on the device auto, cpu or cuda.

    ``self.device`` is cpu or cuda.
    """

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, longest: int, precision: str, device: str = "cpu"
    ) -> None:
        self._vocabulary, self._longest = tokenizer.vocabulary, longest
        self._source_pieces, self._target_pieces = (tokenizer.all_pieces(side) for side in SIDES)
        self._numbers = {piece: number for number, piece in enumerate(self._target_pieces)}
        compute_type = "int8_float32" if precision == "int8" else "float32"
        ctranslate2 = import_ctranslate2()
        try:
            self._model: Any = ctranslate2.Translator(str(directory), device=device, compute_type=compute_type)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"CTranslate2 cannot read {directory} on {device}: {error}") from error
        self.device: str = self._model.device

    def search(
        self, sources: Sequence[Sequence[int]], settings: ExportBeamSettings, max_tokens: int
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yield the number and the translations, best first, of each sentence, the longest first; none is empty."""
        lengths = [len(source) + 1 for source in sources]  # with EOS
        special = set(self._vocabulary.unpredicted)
        width = settings.beam if settings.beam <= _USUAL_BEAM else _SHARE * settings.beam
        for numbers in length_buckets(lengths, max_tokens, width):
            limits = [settings.limit(lengths[number], self._longest) for number in numbers]
            batch = self._translate([sources[number] for number in numbers], settings, max(limits), False)
            for number, limit, hypotheses in zip(numbers, limits, batch, strict=True):
                best = hypotheses
                if any(not special.isdisjoint(one.tokens) for one in best):
                    best = self._translate([sources[number]], settings, limit, True)[0]
                    if all(len(one.tokens) < limit for one in best):
                        # Without these tokens, the probabilities of the others are larger there.
                        best = self._scored(sources[number], [one.tokens for one in best], settings)
                if any(len(one.tokens) >= limit for one in best):
                    best = self._until(sources[number], settings, limit)
                yield number, sorted(best, key=lambda one: one.score, reverse=True)

    def token_log_probs(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], max_tokens: int = 0
    ) -> list[list[float]]:
        """Compute the log-probabilities (nats) of the tokens of translations and of the EOS after them.

        Batches have at most ``max_tokens``; 0 for one batch.
        """
        scored = self._model.score_batch(
            [[self._source_pieces[token] for token in source] for source in sources],
            [[self._target_pieces[token] for token in target] for target in targets],
            max_batch_size=max_tokens,
            batch_type="tokens",
            max_input_length=0,
        )
        return [list(score.log_probs) for score in scored]

    def _translate(
        self, sources: Sequence[Sequence[int]], settings: ExportBeamSettings, longest: int, suppress: bool
    ) -> list[list[Hypothesis]]:
        """Translate one batch; hypotheses of ``longest`` tokens have no EOS."""
        penalty = LengthPenalty.parse(settings.length_penalty)
        exponent = penalty.exponent or _NO_PENALTY
        return [
            [_hypothesis(tokens, score * (len(tokens) + 1) ** exponent, penalty) for tokens, score in hypotheses]
            for hypotheses in self._run(sources, settings.beam, exponent, longest, suppress)
        ]

    def _run(
        self, sources: Sequence[Sequence[int]], beam: int, exponent: float, longest: int, suppress: bool
    ) -> list[list[tuple[list[int], float]]]:
        """Return the tokens and scores of CTranslate2's search: the best K finished hypotheses by its own penalty."""
        special = self._vocabulary.unpredicted
        results = self._model.translate_batch(
            [[self._source_pieces[token] for token in source] for source in sources],
            beam_size=beam,
            num_hypotheses=beam,
            length_penalty=exponent,
            max_decoding_length=longest,
            min_decoding_length=0,
            max_input_length=0,
            return_scores=True,
            suppress_sequences=[[self._target_pieces[token]] for token in special] if suppress else None,
        )
        return [
            [
                ([self._numbers[piece] for piece in pieces], score)
                for pieces, score in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]

    def _until(self, source: Sequence[int], settings: ExportBeamSettings, limit: int) -> list[Hypothesis]:
        """Translate a sentence whose hypotheses reach its limit, and extend them there by EOS.

        CTranslate2 returns K hypotheses of those that have finished and those that it cuts off. With one extreme
        penalty these are the finished ones, with the other those cut off one token before the limit. Of hypotheses
        that are cut off at the limit, the tokens before the last one are such hypotheses, too.
        """
        cut = limit - 1
        unfinished: dict[tuple[int, ...], None] = {} if cut else {(): None}
        for longest, exponent in ((cut, -_EXTREME), (cut, _EXTREME), (limit, _EXTREME)) if cut else ():
            (hypotheses,) = self._run([source], settings.beam, exponent, longest, True)
            for tokens, _ in hypotheses:
                if longest == cut or len(tokens) == limit:
                    unfinished[tuple(tokens[:cut])] = None
        best = self._scored(source, list(unfinished), settings)
        return sorted(best, key=lambda hypothesis: hypothesis.score, reverse=True)[: settings.beam]

    def _scored(
        self, source: Sequence[int], hypotheses: Sequence[Sequence[int]], settings: ExportBeamSettings
    ) -> list[Hypothesis]:
        """Score translations of a sentence by the probabilities of all tokens, EOS included."""
        penalty = LengthPenalty.parse(settings.length_penalty)
        scored = self.token_log_probs([source] * len(hypotheses), hypotheses)
        pairs = zip(hypotheses, scored, strict=True)
        return [_hypothesis(list(tokens), math.fsum(log_probs), penalty) for tokens, log_probs in pairs]


def _hypothesis(tokens: list[int], log_prob: float, penalty: LengthPenalty) -> Hypothesis:
    return Hypothesis(tokens, log_prob / penalty(len(tokens) + 1), log_prob)
