"""Self-speculative decoding: greedy translations by fewer passes through the whole decoder.

An exit of the decoder drafts tokens one after another. The layers above it then read all drafted positions at once,
from the states at the exit, and predict what follows each of them. The draft is kept as far as the whole decoder
would have chosen it, and the decoder's own choice follows. With d_1 .. d_k the draft, and y_i the most probable token
of the whole decoder after d_1 .. d_(i-1),

    a = max {i : d_1 = y_1, .., d_i = y_i},    accepted: d_1 .. d_a, then y_(a+1).

So every token is the one that greedy decoding chooses, under the same rules. Both parts share the cache of the lower
layers, whose work is not repeated (Elhoushi, Shrivastava, Liskovich, Hosmer, Wasti, Lai, Mahmoud, Acun, Agarwal,
Roman, Aly, Chen, Wu: "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", 2024; drafts of a
model of its own: Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", 2023).

k follows the acceptance so far. If a drafted token is accepted with probability alpha, a draft gives E(k) tokens.
The cost, in steps of one row through the whole decoder, follows from the numbers of weights: l is the share of
the lower layers, p that of the projection. For B sentences, k maximises E(k) / cost(k), where

    E(k) = 1 + alpha + .. + alpha^k,
    cost(k) = ((k + 1) l + k p) c(B) + (1 - l) c(B (k + 1)),    c(R) = max(1, R / F).

F rows take as long as one (Leviathan et al., theorem 3.8, where F is infinite). k is 0, which is plain greedy
decoding, where drafts do not pay: in large batches, or if few are accepted. alpha is counted anew for each batch, so
that a translation does not depend on the batches before.

**Exits by token.** With ``draft_confidence`` c < 1 the most probable token of the exit stands where its probability
there is c or more, whatever the whole decoder says; each other token is y_i. So drafts only decide how many tokens
the layers above read at once. They read all that stand, and their keys and values are complete. Stopping by
confidence is Schuster, Fisch, Gupta, Dehghani, Bahri, Tran, Tay, Metzler: "Confident Adaptive Language Modeling",
2022; reading the tokens that left early together is Bae, Ko, Song, Yun: "Fast and Robust Early-Exiting Framework for
Autoregressive Language Models with Synchronized Parallel Decoding", 2023.

Legend: B sentences in progress, W = k + 1 positions of a block, R rows = B x W, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.model import DecodableModel, Memory
from deepspeed_nmt.core.parts import MAX_LAYERS, Parts
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.linear import packing_of
from deepspeed_nmt.search.base import PENALTY_NAMES, Hypothesis, LengthPenalty, PenaltyName, Request, check_finite
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.left_to_right import LeftToRightSettings, Sentence, SentenceSearch, TokenRules

_ALPHA, _EVIDENCE = 0.8, 4.0
"""Acceptance that is expected of a batch at first, and the number of drafted tokens that this counts for."""


_PASSES = 4
"""Passes that one call of native code takes at most, with drafts of one length: Ctrl+C waits for it."""


class SpeculativeConfig(LeftToRightSettings):
    """Greedy decoding by drafts of an exit of the model itself."""

    name: Literal["speculative"] = "speculative"
    draft_layers: int = Field(
        default=1, ge=1, le=MAX_LAYERS, description="layers or loops of the decoder, from the first, that draft"
    )
    draft_tokens: int = Field(
        default=8, ge=0, le=64, description="most tokens that are drafted at once; 0: plain greedy decoding"
    )
    draft_confidence: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="least probability at which a drafted token stands, whatever the whole decoder says; 1: none "
        "does, and the translation is that of greedy decoding",
    )
    length_penalty: PenaltyName = Field(default="gnmt:0.6", description=PENALTY_NAMES)

    def without_drafts(self) -> BeamConfig:
        """Return the settings of greedy decoding, for a decoder without an exit below its top that could draft."""
        return BeamConfig(beam=1, **self.model_dump(include={*BeamConfig.model_fields}, exclude={"name"}))

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Refuse an exit that the model lacks, or that is its top."""
        yield from super().contradictions(parts)
        stages = parts.model.exit_stages()
        if stages is None and not parts.model.named_exits:
            yield (
                f"search.name={self.name} drafts by an exit below the top, and model.name={parts.model.name} has "
                "none; use another search"
            )
        if stages is not None and self.draft_layers >= stages[1].total:
            yield (
                f"search.draft_layers is {self.draft_layers}, but model.{stages[1].setting} is {stages[1].total}; "
                "lower it, since a draft takes fewer"
            )


@dataclass
class DraftedSentence(Sentence):
    """A sentence in progress: its tokens, and their log-probability under the model (nats)."""

    tokens: list[int]
    log_prob: float


class Speculative(SentenceSearch[DraftedSentence]):
    """Greedy decoding by drafts; see :class:`SentenceSearch` for its arguments.

    Attributes:
        counts: since the search was made: tokens ``drafted`` and ``accepted``, all ``tokens``, and the ``passes``
            through the whole decoder that sentences took part in.

    Raises:
        ConfigError: if the model has no such exit below its top.
    """

    config: SpeculativeConfig

    def __init__(self, config: SpeculativeConfig, model: DecodableModel, vocabulary: Vocabulary) -> None:
        super().__init__(config, model, vocabulary)
        self.counts = Counter[str]()
        self._greedy: BeamSearch | None = None  # once it is known that native code serves the model
        self._parts, self._penalty = model.split(config.draft_layers), LengthPenalty.parse(config.length_penalty)
        lower, upper, projection = self._parts.weights
        self._lower, self._projection = (each / (lower + upper + projection) for each in (lower, projection))

    @override
    def start(self, number: int, limit: int, request: Request) -> DraftedSentence:
        return DraftedSentence(number, limit, request, [], 0.0)

    @override
    def finish(self, sentence: DraftedSentence) -> list[Hypothesis]:
        check_finite(sentence.log_prob)
        score = sentence.log_prob / self._penalty(len(sentence.tokens))
        return [Hypothesis(sentence.tokens[:-1], score, sentence.log_prob)]

    @override
    def decode(self, sentences: list[DraftedSentence], memory: Memory, rules: TokenRules) -> None:
        device, cache, eos = memory.states_BSD.device, self.model.begin(), self.vocabulary.eos
        compared, accepted = 0, 0
        if len(sentences) == 1 and self._decode_natively(sentences[0], memory, rules, cache):
            return
        if len(sentences) > 1 and self._decode_greedily(sentences, memory, rules):
            return
        while True:
            k = self._draft_length(compared, accepted, sentences)
            drafts, stand, states = self._draft(k, sentences, memory, rules, cache)
            width = len(states)
            cache.as_block(width)
            block = [torch.cat(parts, dim=1).view(-1, 1, parts[0].shape[2]) for parts in zip(*states, strict=True)]
            logits_RV = self._parts.upper(block, memory, cache).float()
            if any(layer.state for layer in cache.layers):
                raise ConfigError(
                    f"{option('draft_layers')} is for decoder layers that keep all positions, but those of this "
                    "model keep a state from which none can be removed; leave it out"
                )
            kept, lengths = [], []
            chosen = self._choose(logits_RV.view(len(sentences), width, -1), sentences, drafts, stand, rules)
            for row, (sentence, draft, tokens, log_probs) in enumerate(zip(sentences, drafts, *chosen, strict=True)):
                # The last token, unless it is EOS, was only drafted in case it stands: no position follows it.
                draft = draft if draft[-1:] == [eos] else draft[: width - 1]
                right = 0  # tokens of the draft that are followed by others
                while right < min(len(draft), width - 1) and draft[right] == tokens[right] != eos:
                    right += 1
                lengths.append(right + 1)
                sentence.tokens += tokens[: right + 1]
                sentence.log_prob += math.fsum(log_probs[: right + 1])
                same = right + (draft[right : right + 1] == [tokens[right]])
                compared, accepted = compared + min(right + 1, len(draft)), accepted + same
                self.counts.update(drafted=len(draft), accepted=same, tokens=right + 1, passes=1)
                if tokens[right] != eos:
                    kept.append(row)
            cache.keep_first(lengths, width)
            if not kept:
                return
            rows_B, has_finished = torch.tensor(kept, device=device), len(kept) < len(sentences)
            cache.select(rows_B, rows_B if has_finished else None)
            if has_finished:
                sentences, memory = [sentences[row] for row in kept], memory.select(rows_B)

    def _draft_length(self, compared: int, accepted: int, sentences: Sequence[DraftedSentence]) -> int:
        """Return the number of tokens to draft, given how many were compared with the decoder's and accepted."""
        alpha = (_EVIDENCE * _ALPHA + accepted) / (_EVIDENCE + compared)
        most = max(sentence.limit - len(sentence.tokens) for sentence in sentences) - 1
        return self.draft_length(alpha, len(sentences), min(most, self.config.draft_tokens), rows_for_one(self.model))

    def _decode_natively(
        self, sentence: DraftedSentence, memory: Memory, rules: TokenRules, cache: DecoderCache
    ) -> bool:
        """Decode one sentence, several passes in each call of native code; return False if that cannot be."""
        bos, eos, compared, accepted = self.vocabulary.bos, self.vocabulary.eos, 0, 0
        if self.native is None or self.config.draft_confidence < 1.0 or rules.read_tokens(1):
            return False
        while sentence.tokens[-1:] != [eos]:
            k = self._draft_length(compared, accepted, [sentence])
            parts = self._parts.natively(_PASSES * (k + 1), memory, cache)
            if parts is None:
                return False
            known = [bos, *sentence.tokens], sentence.limit
            tokens, log_prob, counts = parts.take_passes(*known, k, _PASSES, rules.never, eos)
            cache.take(len(tokens), len(tokens), None)
            sentence.tokens += tokens
            sentence.log_prob += log_prob
            compared, accepted = compared + counts["compared"], accepted + counts["accepted"]
            self.counts.update({name: counts[name] for name in ("drafted", "accepted", "tokens", "passes")})
        return True

    def _decode_greedily(self, sentences: Sequence[DraftedSentence], memory: Memory, rules: TokenRules) -> bool:
        """Decode a batch in which drafts do not pay; return False if they do, or native code cannot."""
        if self.native is None or self.config.draft_confidence < 1.0 or self._draft_length(0, 0, sentences):
            return False
        if self._greedy is None:
            if self.model.natively(len(sentences), 1, 1, memory, self.model.begin()) is None:
                return False
            self._greedy = BeamSearch(self.config.without_drafts(), self.model, self.vocabulary)
        greedy, self._greedy.native = self._greedy, self.native
        found = [greedy.start(sentence.number, sentence.limit, sentence.request) for sentence in sentences]
        greedy.decode(found, memory, rules)
        for sentence, ended in zip(sentences, found, strict=True):
            (best,) = greedy.finish(ended)
            sentence.tokens, sentence.log_prob = [*best.tokens, self.vocabulary.eos], best.log_prob
            self.counts.update(tokens=len(sentence.tokens), passes=len(sentence.tokens))
        return True

    def draft_length(self, alpha: float, sentences: int, most: int, free_rows: float) -> int:
        """Return the number of tokens to draft (k), at most ``most``, given the acceptance and F."""

        def cost(rows: int) -> float:
            return max(1.0, rows / free_rows)

        def tokens_by_cost(k: int) -> float:
            draft = ((k + 1) * self._lower + k * self._projection) * cost(sentences)
            whole = (1.0 - self._lower) * cost(sentences * (k + 1))
            return math.fsum(alpha**power for power in range(k + 1)) / (draft + whole)

        return max(range(most + 1), key=tokens_by_cost)

    def _draft(
        self, k: int, sentences: Sequence[DraftedSentence], memory: Memory, rules: TokenRules, cache: DecoderCache
    ) -> tuple[list[list[int]], list[list[bool]], list[tuple[Tensor, ...]]]:
        """Return the draft of each sentence, up to EOS, which of its tokens stand, and the states at the exit.

        The states are those of all positions of the block; the draft may have a token after the last of them, too.
        """
        device, bos, eos = memory.states_BSD.device, self.vocabulary.bos, self.vocabulary.eos
        drafts: list[list[int]] = [[] for _ in sentences]
        stand: list[list[bool]] = [[] for _ in sentences]
        asks, bound = self.config.draft_confidence < 1.0, math.log(self.config.draft_confidence)
        token_B = torch.tensor(
            [sentence.tokens[-1] if sentence.tokens else bos for sentence in sentences], device=device
        )
        first_B = torch.tensor([len(sentence.tokens) for sentence in sentences], device=device)
        last_B = torch.tensor([sentence.limit - 1 for sentence in sentences], device=device)
        states: list[tuple[Tensor, ...]] = []
        while True:
            position_B = torch.minimum(first_B + len(states), last_B)  # beyond, nothing is accepted
            states.append(self._parts.lower(token_B, position_B, memory, cache))
            if len(states) > k and not asks:
                return drafts, stand, states
            logits_BV = self._parts.predict(states[-1]).float()
            log_sum_B = self._log_sums(logits_BV) if asks else 0.0
            self._forbid(logits_BV.unsqueeze(1), sentences, drafts, rules, len(states) - 1)
            logit_B, token_B = logits_BV.max(dim=1)
            probable = (logit_B - log_sum_B >= bound).tolist() if asks else [False] * len(sentences)
            going = False
            for row, token in enumerate(token_B.tolist()):
                if drafts[row][-1:] != [eos]:
                    drafts[row].append(token)
                    stand[row].append(probable[row])
                    going |= token != eos
            if len(states) > k or not going:
                return drafts, stand, states

    def _choose(
        self,
        logits_BWV: Tensor,
        sentences: Sequence[DraftedSentence],
        drafts: Sequence[Sequence[int]],
        stand: Sequence[Sequence[bool]],
        rules: TokenRules,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the token after each position of a block, and its log-probability.

        It is the most probable one, or the drafted one if that stands.
        """
        eos, (rows, width, entries) = self.vocabulary.eos, logits_BWV.shape
        logits_RV = logits_BWV.view(-1, entries)
        log_sum_R = self._log_sums(logits_RV)
        end_BW = logits_BWV[:, :, eos].clone()
        self._forbid(logits_BWV, sentences, drafts, rules)
        lasts = [sentence.limit - len(sentence.tokens) - 1 for sentence in sentences]  # where only EOS may follow
        for row, last in enumerate(lasts):
            if last < width:
                logits_BWV[row, last] = -torch.inf
                logits_BWV[row, last, eos] = end_BW[row, last]
        token_BW = logits_BWV.argmax(dim=2)
        for row, last in enumerate(lasts):
            token_BW[row, last:] = eos  # also if that is impossible
            for place, token in enumerate(drafts[row][:last]):
                if stand[row][place]:
                    token_BW[row, place] = token
        logit_R = logits_RV.gather(1, token_BW.view(-1, 1)).squeeze(1)
        return token_BW.tolist(), (logit_R - log_sum_R).view(rows, width).tolist()

    def _log_sums(self, logits_RV: Tensor) -> Tensor:
        return logits_RV.logsumexp(dim=1) if self.native is None else self.native.log_sums(logits_RV)

    def _forbid(
        self,
        logits_BWV: Tensor,
        sentences: Sequence[DraftedSentence],
        drafts: Sequence[Sequence[int]],
        rules: TokenRules,
        first: int = 0,
    ) -> None:
        """Set the logits of forbidden tokens to -inf, those after ``first`` or more tokens of each draft."""
        if not rules.read_tokens(1 + first + min(len(sentence.tokens) for sentence in sentences)):
            logits_BWV.index_fill_(2, rules.never, -torch.inf)
            return
        for logits_WV, sentence, draft in zip(logits_BWV, sentences, drafts, strict=True):
            for place, logits_V in enumerate(logits_WV, first):
                tokens = [self.vocabulary.bos, *sentence.tokens, *draft[:place]]
                rules.apply(logits_V[None], torch.tensor([tokens], device=logits_V.device), [sentence.number])


def rows_for_one(model: nn.Module) -> float:
    """Return the number of rows whose step takes about as long as that of one (F).

    Those of CPUs are from tokens a second at batches of 1 and 32 in `benchmarks/results/decode_native.json`. A GPU
    reads the weights for many more; it has not been measured.
    """
    if next(model.parameters()).device.type != "cpu":
        return math.inf
    packing = packing_of(model)
    if packing is None or packing.native is None or torch.get_num_threads() > 1:
        return 12.0
    return 3.0 if packing.int8 else 6.0
