"""Steps that searches from left to right share: the bounds of a batch, its next tokens, and the best hypotheses.

Legend: B sentences, S source length, R rows (live hypotheses), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.base import Hypothesis, Request, not_finite, or_default
from deepspeed_nmt.search.rules import LeftToRightSettings, length_limits

Forbid = Callable[[Tensor], object]
"""Sets the log-probabilities of tokens that a rule forbids to -inf. Shape: (R,V)"""


def never_predicted(vocabulary: Vocabulary, model: DecodableModel, device: torch.device | str = "cpu") -> Tensor:
    """Return the tokens that no translation of the model contains, such as padding, BOS and the mask."""
    never = {*vocabulary.unpredicted, *(() if model.mask is None else (model.mask,))}
    return torch.tensor(sorted(never), dtype=torch.long, device=device)


def bounded_requests(
    settings: LeftToRightSettings,
    model: DecodableModel,
    vocabulary: Vocabulary,
    source_BS: Tensor,
    requests: Sequence[Request] | None,
) -> tuple[Sequence[Request], list[int]]:
    """Return the requests of a batch, and the most tokens of each translation, EOS included; none without sentences.

    Args:
        settings: of the search.
        model: the model, which must be in eval mode.
        vocabulary: special tokens.
        source_BS: source tokens.
        requests: one for each sentence, or None; see :meth:`RequestSearch.search`.
    """
    assert not model.training, "call model.eval() first: dropout would change the translations"
    requests = or_default(requests, source_BS.shape[0])
    lengths: list[int] = source_BS.ne(vocabulary.pad).sum(dim=1).tolist()
    return requests, length_limits(settings, lengths, model.longest_target, requests)


def rows_of(closing: Sequence[bool], width: int, device: torch.device) -> Tensor | None:
    """Return flags of sentences as flags of their ``width`` rows each, (R,); None if all are False."""
    return torch.tensor(closing, device=device).repeat_interleave(width) if any(closing) else None


def extended(
    logits_RV: Tensor,
    log_prob_R: Tensor,
    never: Tensor,
    eos: int,
    forbid: Forbid | None = None,
    closing_R: Tensor | None = None,
) -> Tensor:
    """Return the log-probability, fp32, of each hypothesis extended by each token; -inf for what is forbidden.

    Args:
        logits_RV: logits of the next tokens.
        log_prob_R: log-probability of each hypothesis.
        never: numbers of the tokens that are never predicted.
        eos: token after which a hypothesis is finished.
        forbid: the rules of the next token; None if there are none.
        closing_R: True for hypotheses at their length limit, after which only EOS may follow; None if there are none.
            No rule forbids that EOS.
    """
    log_prob_RV = torch.log_softmax(logits_RV.float(), dim=1)
    log_prob_RV.index_fill_(1, never, -torch.inf)
    if closing_R is None:
        if forbid is not None:
            forbid(log_prob_RV)
        log_prob_RV += log_prob_R.unsqueeze(1)
        return log_prob_RV
    eos_R = log_prob_RV[:, eos].clone()
    if forbid is not None:
        forbid(log_prob_RV)
    log_prob_RV += log_prob_R.masked_fill(closing_R, -torch.inf).unsqueeze(1)
    # Other hypotheses of the batch are not at their limits: their rules may forbid EOS.
    log_prob_RV[:, eos] = torch.where(closing_R, eos_R + log_prob_R, log_prob_RV[:, eos])
    return log_prob_RV


def best_of(hypotheses: Iterable[Hypothesis], most: int) -> list[Hypothesis]:
    """Return at most ``most`` of a sentence's finished hypotheses, best first.

    Raises:
        CheckpointError: if there is none, because the model predicts NaN.
    """
    found = sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)[:most]
    if not found:
        raise not_finite()
    return found
