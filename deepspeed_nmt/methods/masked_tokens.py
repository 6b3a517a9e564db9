"""Masked-token objective: a model guesses masked tokens of the target, given the others and the source.

Ghazvininejad, Levy, Liu, Zettlemoyer: "Mask-Predict: Parallel Decoding of Conditional Masked Language Models", 2019;
equation 5 of the paper that :mod:`deepspeed_nmt.methods.parallel_decoder` implements. (That equation sums
probabilities; their logarithms are meant.)

The decoder reads [CLS] y [SEP], in which m of the n tokens of y are masked, with m uniform in 1..n:

    loss = 2 sum_masked CE(y_t) + length_weight L(n),

where CE is label-smoothed cross-entropy and L that of the target's length. On average (n + 1) / 2 of n + 1 tokens are
masked, so the sum is multiplied by 2 to be comparable per token.

**Noise in training**, as Guo et al. ran IWSLT14 ("Incorporating BERT into Parallel Sequence Decoding with Adapters",
2020); none by default, and none in validation:

- ``replacement: bert``: of the masked tokens 80% become [MASK], 10% a random token, and 10% stay, as in BERT. The
  loss counts all of them.
- ``source_rate``: a contiguous span of this share of each source is masked and replaced in the same way. It is at the
  beginning with probability 0.2, at the end with 0.2, otherwise anywhere, as in MASS (Song et al. 2019).
- ``length_average: tokens``: the length's loss is summed over sentences and divided by target tokens, as the tokens'
  loss is. By default it is a mean over sentences, which weighs more by the mean length of a target.

Every choice is a function of (seed, update, sentence).

Legend: B sentences, S source length, T target length, L lengths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.core.objective import Likelihood, LikelihoodOutput, States
from deepspeed_nmt.core.parts import Parts
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.methods.label_smoothed import LabelSmoothedConfig
from deepspeed_nmt.randomness import Purpose
from deepspeed_nmt.registry import Entry

LENGTH = "length"
"""Name of the length's logits in the output of a pass, and of the metric of their loss."""


class MaskedTokensConfig(LabelSmoothedConfig):
    """Settings of the masked-token objective."""

    length_weight: float = Field(default=0.1, ge=0.0, description="weight of the loss of the predicted length")
    length_average: Literal["sentences", "tokens"] = Field(
        default="sentences", description="divisor of the length's loss: sentences, or target tokens"
    )
    replacement: Literal["mask", "bert"] = Field(
        default="mask",
        description="what masked tokens become in training: mask: [MASK]; bert: 80% [MASK], 10% a random token, 10% "
        "unchanged",
    )
    source_rate: float = Field(
        default=0.0, ge=0.0, le=1.0, description="share of the source's tokens masked in training, as one span"
    )

    def contradictions(self, run: Parts) -> Iterator[str]:
        """Refuse models that predict from left to right."""
        if run.model.left_to_right:
            yield (
                "objective.masked_tokens trains models that guess masked tokens, but "
                f"model.name={run.model.name} predicts from left to right; use objective.label_smoothed"
            )


def mask_token(vocabulary: Vocabulary) -> int:
    """Return the token that replaces masked ones.

    A vocabulary without one occurs in `plan` only; `train` requires those of the BERTs.
    """
    return vocabulary.unk if vocabulary.mask is None else vocabulary.mask


def masked_positions(batch: Batch, vocabulary: Vocabulary) -> Tensor:
    """Choose the tokens of ``batch.target_output_BT`` to mask, never EOS or padding. Shape: -> bool (B,T)."""
    output_BT = batch.target_output_BT
    words_BT = output_BT.ne(vocabulary.pad) & output_BT.ne(vocabulary.eos)
    count_B1 = words_BT.sum(dim=1, keepdim=True)
    masked_B1 = (batch.uniforms(1, Purpose.MASK_COUNT) * count_B1).floor() + 1
    return words_BT & (batch.random_ranks(words_BT, Purpose.MASKED_TARGETS) < masked_B1)


def source_span(batch: Batch, vocabulary: Vocabulary, rate: float) -> Tensor:
    """Choose a span of each source to mask, of max(1, round(rate n)) of its n tokens. Shape: -> bool (B,S).

    [CLS], [SEP] and padding of the source's vocabulary are never chosen.
    """
    source_BS = batch.source_BS
    # A tensor of the three would be copied to the device, and the copy waited for.
    words_BS = source_BS.ne(vocabulary.pad) & source_BS.ne(vocabulary.bos) & source_BS.ne(vocabulary.eos)
    count_B1 = words_BS.sum(dim=1, keepdim=True)
    length_B1 = (rate * count_B1).round().long().clamp(min=1)
    last_B1 = count_B1 - length_B1
    draw_B1 = batch.uniforms(1, Purpose.SOURCE_SPAN)
    anywhere_B1 = ((draw_B1 - 0.4) / 0.6 * (last_B1 + 1)).long().minimum(last_B1)
    start_B1 = torch.where(draw_B1 < 0.4, torch.where(draw_B1 < 0.2, 0, last_B1), anywhere_B1)
    place_BS = words_BS.cumsum(dim=1) - 1
    return words_BS & (place_BS >= start_B1) & (place_BS < start_B1 + length_B1)


def replace_as_bert(
    tokens_BT: Tensor, masked_BT: Tensor, batch: Batch, vocabulary: Vocabulary, purpose: Purpose
) -> Tensor:
    """Replace 80% of the masked tokens by [MASK] and 10% by random ones, which are no special tokens.

    Shape: (B,T), bool (B,T) -> (B,T)
    """
    draws_BT = batch.uniforms(tokens_BT.shape[1], purpose)
    mask = mask_token(vocabulary)
    specials = sorted({vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.unk, mask})
    others = vocabulary.size - len(specials)
    # Of the draws in [0.8, 0.9) each token that is not special gets an equal part.
    random_BT = ((draws_BT - 0.8) * 10.0 * others).long().clamp(0, others - 1)
    for special in specials:
        random_BT = random_BT + (random_BT >= special)
    replaced_BT = torch.where(draws_BT < 0.8, mask, torch.where(draws_BT < 0.9, random_BT, tokens_BT))
    return torch.where(masked_BT, replaced_BT, tokens_BT)


class MaskedTokens(Likelihood):
    """Cross-entropy of masked tokens, and of the target's length."""

    def __init__(self, config: MaskedTokensConfig, vocabulary: Vocabulary) -> None:
        self.config = config
        self.vocabulary = vocabulary

    def corrupted(self, batch: Batch, training: bool) -> Batch:
        """Mask tokens; the model reads [CLS] y [SEP] as ``target_input_BT``, of T + 1 positions."""
        masked_BT = masked_positions(batch, self.vocabulary)
        as_bert = training and self.config.replacement == "bert"

        def replaced(tokens_BT: Tensor, masked_BT: Tensor, vocabulary: Vocabulary, purpose: Purpose) -> Tensor:
            if as_bert:
                return replace_as_bert(tokens_BT, masked_BT, batch, vocabulary, purpose)
            return tokens_BT.masked_fill(masked_BT, mask_token(vocabulary))

        shown_BT = replaced(batch.target_output_BT, masked_BT, self.vocabulary, Purpose.TARGET_REPLACEMENT)
        batch = replace(batch, target_input_BT=torch.cat([batch.target_input_BT[:, :1], shown_BT], dim=1))
        if not training or self.config.source_rate == 0.0:
            return batch
        span_BS = source_span(batch, self.vocabulary.source, self.config.source_rate)
        return replace(
            batch, source_BS=replaced(batch.source_BS, span_BS, self.vocabulary.source, Purpose.SOURCE_REPLACEMENT)
        )

    def __call__(self, model: TranslationModel, passes: States, batch: Batch, divergence: float) -> LikelihoodOutput:
        """Compute the loss of one pass; see :class:`Likelihood`. The metric "length" is the length's loss."""
        (states,) = passes
        output_BT, pad = batch.target_output_BT, self.vocabulary.pad
        targets_BT = output_BT.masked_fill(~masked_positions(batch, self.vocabulary), pad)
        consume = partial(
            projected_cross_entropy,
            targets_N=targets_BT.flatten(),
            smoothing=self.config.smoothing,
            ignore_index=pad,
            row_weights_N=None if (weights_BT := batch.token_weights) is None else weights_BT.flatten(),
        )
        loss, nll_N, _ = model.projection([states[TOP].flatten(0, 1)], consume)
        length = self._length(states[LENGTH], batch)
        loss = 2.0 * loss + self.config.length_weight * length
        return LikelihoodOutput(loss, 2.0 * nll_N, {LENGTH: length.detach()})

    def _length(self, logits_BL: Tensor, batch: Batch) -> Tensor:
        """Sum the length's NLL, scaled so that the engine's division by tokens makes it the configured average."""
        real_BT = batch.target_mask
        length_B = (real_BT.sum(dim=1) - 1).clamp(min=0)
        logits_BL = logits_BL.to(torch.promote_types(logits_BL.dtype, torch.float32))
        losses_B = F.cross_entropy(logits_BL, length_B, reduction="none")
        total = batch.weighted(torch.where(real_BT.any(dim=1), losses_B, 0.0)).sum()
        if self.config.length_average == "tokens":
            return total
        tokens = batch.update.tokens or batch.target_tokens
        sentences = batch.update.sentences or batch.rows
        return total * (tokens / max(1, sentences))


ENTRY = Entry("masked_tokens", MaskedTokensConfig, MaskedTokens)
