"""Effect of the two inputs of an untrained model, and gradients of its layers.

How well these numbers foretell whether a stack trains was measured on narrow models only. On pairs of random tokens,
:func:`probe` measures

    source, prefix   RMS of the change of the decoder's top states if each sentence gets the source, or the prefix, of
                     another one, over that of states whose inputs have nothing in common: 0 if an input is ignored
    likeness         mean cosine between the top states of two positions: 1 if they are all the same
    gradients        norm of the loss's gradient by layer

Legend: B sentences, T target length, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.model import MaskedModel, TranslationModel
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary

_PAIRS, _LENGTH = 16, 16
"""Of the pairs, which are shorter for a model with fewer positions."""
_FIRST_WORD = 4
"""The lowest token that is no special one."""


@dataclass(frozen=True)
class Probe:
    """Measurements of an untrained model; see the module.

    Attributes:
        prefix: None if the model predicts masked tokens, from no prefix.
        encoder, decoder: norms of gradients from the lowest layer up; the layers of several stacks one after another.
    """

    source: float
    prefix: float | None
    likeness: float
    encoder: list[float]
    decoder: list[float]

    def __str__(self) -> str:
        prefix = "" if self.prefix is None else f", the prefix by {self.prefix:.0%}"
        lines = [
            f"untrained, on {_PAIRS} random pairs of {_LENGTH} tokens: the source moves the decoder's top state by "
            f"{self.source:.0%} of what unrelated inputs would{prefix}; cosine between positions {self.likeness:.2f}"
        ]
        for side, norms in (("encoder", self.encoder), ("decoder", self.decoder)):
            shown = " ".join(f"{norm:.2g}" for norm in norms)
            lines.append(f"gradient norms of the {side}'s layers, from the lowest: {shown}")
        return "\n".join(lines)


def probe(config: RunConfig, vocabulary: Vocabulary) -> Probe:
    """Build the model of a run, and measure it before its first update, on this machine's CPU."""
    config = config.for_update(0)
    model = build_model(config, vocabulary)
    module = TrainModule(model, build_objective(config, vocabulary))
    generator = torch.Generator().manual_seed(config.training.seed)
    length = min(_LENGTH, model.longest_source or _LENGTH, model.longest_target or _LENGTH)

    def words(size: int) -> Tensor:
        return torch.randint(min(_FIRST_WORD, size - 1), size, (_PAIRS, length - 1), generator=generator)

    end = torch.full((_PAIRS, 1), vocabulary.eos)
    source_BS = torch.cat([words(vocabulary.source.size), torch.full((_PAIRS, 1), vocabulary.source.eos)], dim=1)
    target = words(vocabulary.size)
    tokens = _PAIRS * length
    batch = Batch(
        source_BS=source_BS,
        target_input_BT=torch.cat([torch.full((_PAIRS, 1), vocabulary.bos), target], dim=1),
        target_output_BT=torch.cat([target, end], dim=1),
        sentence_ids_B=torch.arange(_PAIRS),
        source_tokens=tokens,
        target_tokens=tokens,
        pad=vocabulary.pad,
        update=UpdateInfo(seed=config.training.seed, number=1, tokens=tokens, sentences=_PAIRS),
    )
    source, prefix, likeness = _states(model.eval(), batch)
    (module.train()(batch).loss / tokens).backward()
    encoder, decoder = (
        [_norm(layer.parameters()) for stack in side for layer in stack.layers] for side in model.stacks
    )
    return Probe(source, None if isinstance(model, MaskedModel) else prefix, likeness, encoder, decoder)


@torch.no_grad()
def _states(model: TranslationModel, batch: Batch) -> tuple[float, float, float]:
    """Return how far source and prefix move the top states, and the likeness of positions."""

    def top(source_BS: Tensor, target_BT: Tensor) -> Tensor:
        return model.decode(target_BT, model.encode(source_BS, padded=False))[-1]

    def moved(states_BTD: Tensor) -> float:
        return float((states_BTD - true_BTD).square().mean().sqrt()) / max(unrelated, 1e-30)

    true_BTD = top(batch.source_BS, batch.target_input_BT)
    unrelated = math.sqrt(2.0) * float((true_BTD - true_BTD.mean(dim=(0, 1))).square().mean().sqrt())
    source = moved(top(batch.source_BS.roll(1, 0), batch.target_input_BT))
    prefix = moved(top(batch.source_BS, batch.target_input_BT.roll(1, 0)))
    unit_BTD = nn.functional.normalize(true_BTD, dim=2)
    positions = unit_BTD.shape[1]
    total = float(unit_BTD.sum(dim=1).square().sum(dim=1).mean())
    return source, prefix, (total - positions) / (positions * (positions - 1))


def _norm(parameters: Iterable[nn.Parameter]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return float(nn.utils.get_total_norm(gradients)) if gradients else 0.0
