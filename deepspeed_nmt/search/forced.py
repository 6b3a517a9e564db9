"""Forced decoding: what models give to the tokens of translations that are known already.

Several models are scored as the ensemble that they decode as: the probability of a token is the mean of theirs.

Legend: B sentences, S source length, T target length, D model width, V vocabulary, N translations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.search.ensemble import mean_of

_LOGITS_AT_ONCE = 1 << 24


@torch.inference_mode()
def token_log_probs(
    models: Sequence[TranslationModel],
    vocabulary: Vocabulary,
    source_BS: Tensor,
    padded: bool,
    translations: Sequence[Sequence[Sequence[int]]],
    weights: Sequence[float] | None = None,
    decoded: Callable[[list[int], Tensor], None] = lambda numbers, rows_N: None,
) -> list[list[list[float]]]:
    """Compute the log-probabilities (nats) of the tokens of translations and of the EOS after them.

    Args:
        models: a model at the exit that is to score, or the models of an ensemble, in eval mode.
        vocabulary: special tokens.
        source_BS: source tokens, as in :meth:`~deepspeed_nmt.search.base.Search.search`.
        padded: False promises that no position is padding.
        translations: for each sentence any number of translations, without BOS and EOS.
        weights: of the models, whose sum is 1; None for equal weights.
        decoded: called after the models have read some of the translations at once, with their numbers, counted over
            all sentences, and their rows in ``source_BS``.

    Returns:
        In the shape of ``translations``, one number for each token and one for the EOS.
    """
    assert not any(model.training for model in models), "call model.eval() first: dropout would change the scores"
    bos, eos, pad = vocabulary.bos, vocabulary.eos, vocabulary.pad
    memories = [model.encode(source_BS, padded) for model in models]
    flat = [(row, tokens) for row, each in enumerate(translations) for tokens in each]
    # Translations of similar length are scored together, so that there is little padding.
    order = sorted(range(len(flat)), key=lambda number: -len(flat[number][1]))
    found: list[list[float]] = [[] for _ in flat]
    start = 0
    while start < len(order):
        length = len(flat[order[start]][1]) + 1
        numbers = order[start : start + max(1, _LOGITS_AT_ONCE // (length * models[0].vocab_size))]
        start += len(numbers)
        inputs_NT, outputs_NT = torch.full((2, len(numbers), length), pad).unbind()
        for place, number in enumerate(numbers):
            tokens = flat[number][1]
            inputs_NT[place, : len(tokens) + 1] = torch.tensor([bos, *tokens])
            outputs_NT[place, : len(tokens) + 1] = torch.tensor([*tokens, eos])
        rows_N = torch.tensor([flat[number][0] for number in numbers], device=source_BS.device)
        inputs_NT, outputs_NT = inputs_NT.to(source_BS.device), outputs_NT.to(source_BS.device)
        each = []
        for model, memory in zip(models, memories, strict=True):
            states_NTD = model.decode(inputs_NT, memory.select(rows_N))[0]
            log_p_NTV = torch.log_softmax(model.projection(states_NTD).float(), dim=2)
            each.append(log_p_NTV.gather(2, outputs_NT.unsqueeze(2)).squeeze(2))
        for number, values in zip(numbers, mean_of(each, weights).tolist(), strict=True):
            found[number] = values[: len(flat[number][1]) + 1]
        decoded(numbers, rows_N)
    results = iter(found)
    return [[next(results) for _ in each] for each in translations]
