"""Margins of decisions: how close a search was to another translation.

Legend: B sentences (here 1), C extensions, K beam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.length_penalty import LengthPenalty


class _Traced(BeamSearch):
    """Beam search that records the smallest margin by which it preferred a hypothesis of the beam to another."""

    smallest = math.inf

    @override
    def _extend(self, live, logits_RV, closing, forbid=None):  # type: ignore[no-untyped-def]
        extensions = super()._extend(live, logits_RV, closing, forbid)
        if not any(closing):
            beam = self.config.beam
            log_probs, ends = extensions.log_prob_BC[0], extensions.is_eos_BC[0]
            opened = log_probs[~ends]
            pairs = [(opened[beam - 1], opened[beam])] if len(opened) > beam else []
            if len(log_probs) > beam and bool(ends[beam - 1]) != bool(ends[beam]):
                pairs.append((log_probs[beam - 1], log_probs[beam]))
            gaps = [float(better - worse) for better, worse in pairs if bool(worse.isfinite())]
            self.smallest = min([self.smallest, *gaps])
        return extensions


@torch.inference_mode()
def smallest_margin(
    model: TranslationModel,
    vocabulary: Vocabulary,
    source: Sequence[int],
    here: Sequence[int],
    there: Sequence[int],
    config: BeamConfig,
) -> tuple[float, str]:
    """Return the smallest margin (nats) by which a search preferred one translation to another, and its kind.

    Args:
        model: on the CPU, in eval mode.
        vocabulary: special tokens.
        source: tokens of the sentence, without EOS.
        here: tokens that the search found.
        there: tokens that another program found.
        config: settings of the search.
    """
    source_BS: Tensor = torch.tensor([[*source, vocabulary.source.eos]])
    scored = token_log_probs([model], vocabulary, source_BS, False, [[list(here), list(there)]])[0]
    penalty = LengthPenalty.parse(config.length_penalty)
    scores = [math.fsum(each) / penalty(len(each)) for each in scored]
    margins = {"the two translations": abs(scores[0] - scores[1])}
    ended = ([*here, vocabulary.eos], [*there, vocabulary.eos])
    at = next(place for place, (one, other) in enumerate(zip(*ended, strict=False)) if one != other)
    margins["their first different tokens"] = abs(scored[0][at] - scored[1][at])
    if config.beam > 1:
        search = _Traced(config, model, vocabulary)
        search.search(source_BS, False)
        margins["hypotheses of the beam"] = search.smallest
    kind = min(margins, key=lambda name: margins[name])
    return margins[kind], kind
