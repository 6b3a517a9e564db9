"""ALD, anti-LM degradation: a contrastive loss on the part of the source that the decoder sees.

Li, Wang, Utiyama, Sumita, Zhao, Watanabe: "What Works and Doesn't Work, A Deep Decoder for Neural Machine
Translation", Findings of ACL 2022, section 3.4.

For each sentence pair (X, Y) draw gamma ~ U[0, p_ald) with p_ald < 0.5. X+ is X with a fraction gamma of its tokens
replaced by UNK, and X- is X with a fraction 1 - gamma replaced. EOS and padding are never replaced. G(X, Y) is the
mean of the top decoder states over target positions. With the temperature tau,

    s+ = cos(G(X, Y), G(X+, Y)),    s- = cos(G(X, Y), G(X-, Y)),
    L = -log( e^{s+/tau} / (e^{s+/tau} + e^{s-/tau}) ) = softplus((s- - s+) / tau)

per sentence, averaged over sentences.

In a sentence of n tokens, round(gamma n) and round((1 - gamma) n) are replaced, both the first of one random order,
so X- lacks every token that X+ lacks. gamma and the order are functions of (seed, update, sentence). The top states
are those that the projection reads, after the final LayerNorm of a pre-norm decoder. Choices where the paper is
silent are in docs/papers/deep-decoder.md.

Legend: B sentences, S source length, T target length, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP
from deepspeed_nmt.core.objective import Passes, Regularizer, States
from deepspeed_nmt.core.parts import RegularizerConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.randomness import Purpose
from deepspeed_nmt.registry import Entry


class ALDConfig(RegularizerConfig):
    """Settings of ALD."""

    weight: float = Field(default=1.0, ge=0.0, description="factor in the loss (lambda); 0 disables ALD")
    p_ald: float = Field(
        default=0.4, gt=0.0, lt=0.5, description="upper bound of the fraction of tokens masked (gamma)"
    )
    tau: float = Field(default=0.1, gt=0.0, description="temperature of the contrastive loss")
    every: int = Field(default=1, ge=1, description="k: apply ALD in every k-th update")


class ALD(Regularizer):
    """Contrastive loss on two passes with masked sources."""

    name = "ald"

    def __init__(self, config: ALDConfig, vocabulary: Vocabulary) -> None:
        self.weight = config.weight
        self.every = config.every
        self.p_ald = config.p_ald
        self.tau = config.tau
        self.vocabulary = vocabulary.source

    def request_passes(self, passes: Passes) -> Callable[[States], Tensor]:
        """Request passes from X+ and X-, and return the function that contrasts them with pass 0."""
        batch = passes.batch
        fuller, emptier = (passes.add_pass(passes.add_source(source_BS)) for source_BS in self.mask(batch))

        def contrast(states: States) -> Tensor:
            real_BT = batch.target_output_BT.ne(batch.pad)
            whole_BD, fuller_BD, emptier_BD = (
                sentence_states(states[number][TOP], real_BT, batch.target_segments)
                for number in (0, fuller, emptier)
            )
            losses_B = contrastive_loss(whole_BD, fuller_BD, emptier_BD, self.tau)
            # The engine divides by the tokens of the update; this factor makes it a mean over sentences.
            per_sentence = batch.update.tokens / max(1, batch.update.sentences)
            return batch.weighted(torch.where(batch.target_mask.any(dim=1), losses_B, 0.0)).sum() * per_sentence

        return contrast

    def mask(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Replace tokens of the source by UNK, and return X+ and X-, in the layout of the batch.

        Shape: -> (B,S), (B,S)
        """
        source_BS = batch.source_rows()
        gamma_B = self.p_ald * batch.uniforms(1, Purpose.MASK_RATIO).squeeze(1)
        pad, bos, eos = self.vocabulary.pad, self.vocabulary.bos, self.vocabulary.eos
        # A tensor of the three would be copied to the device, and the copy waited for.
        words_BS = source_BS.ne(pad) & source_BS.ne(bos) & source_BS.ne(eos)
        count_B = words_BS.sum(dim=1)
        place_BS = batch.random_ranks(words_BS, Purpose.MASKED_TOKENS)

        def masked(fraction_B: Tensor) -> Tensor:
            lost_B1 = (fraction_B * count_B).round().unsqueeze(1)
            return batch.laid_out_source(source_BS.masked_fill(words_BS & (place_BS < lost_B1), self.vocabulary.unk))

        return masked(gamma_B), masked(1.0 - gamma_B)


def sentence_states(states_BTD: Tensor, real_BT: Tensor, segments: Segments | None = None) -> Tensor:
    """Compute G: the mean state of each sentence over its real positions, in fp32 or wider.

    Shape: (B,T,D), (B,T), in the layout of a batch -> (B,D)
    """
    states_BTD = states_BTD.to(torch.promote_types(states_BTD.dtype, torch.float32))
    if segments is not None:
        counts_B1 = segments.sums(states_BTD.new_ones(real_BT.shape[1], 1), real_BT[0])
        return segments.sums(states_BTD[0], real_BT[0]) / counts_B1.clamp(min=1.0)
    weights_BT1 = real_BT.unsqueeze(2).to(states_BTD.dtype)
    return (states_BTD * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1).clamp(min=1.0)


def contrastive_loss(whole_BD: Tensor, fuller_BD: Tensor, emptier_BD: Tensor, tau: float) -> Tensor:
    """Compute softplus((s- - s+) / tau) of each sentence from G(X, Y), G(X+, Y) and G(X-, Y).

    Shape: (B,D), (B,D), (B,D) -> (B,)
    """
    closer_B = F.cosine_similarity(whole_BD, fuller_BD, dim=1)
    farther_B = F.cosine_similarity(whole_BD, emptier_BD, dim=1)
    return F.softplus((farther_B - closer_B) / tau)


ENTRY = Entry("ald", ALDConfig, ALD, collapse_remedy="objective.ald.weight=1")
