"""Growth of stacks in the course of a run: more layers from an update on, with the same data, schedule and log.

After the updates ``growth.at`` a stack of n layers goes on as one of N. Layer i of these, counted from 0, begins as

- ``stack``:       layer i if i < n, otherwise layer n - p + (i - n) mod p, with p = min(n, N - n): copies of the
  uppermost layers (Gong, He, Li, Qin, Wang, Liu: "Efficient Training of BERT by Progressively Stacking", 2019, with
  N = 2n);
- ``adjacent``:    layer floor(i n / N), so that copies are neighbours;
- ``interpolate``: (1 - f) layer k + f layer (k + 1), with k + f = i (n - 1) / (N - 1);
- ``zero``:        layer i if i < n, otherwise a fresh layer whose sub-layers end in a product with zeros: the grown
  model computes what it did (as in Chen, Goodfellow, Shlens: "Net2Net: Accelerating Learning via Knowledge Transfer",
  2016).

The optimizer's states begin as the same sums; those of fresh parameters are zero. Its steps go on to count, so that
Adam does not correct the bias of the moments that begin at zero.

A growth is a restart within the process. A checkpoint of update u has the layers with which u was made, and what
continues from it those of u + 1: so a run that is stopped at a growth resumes to the bit.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from deepspeed_nmt.core.parts import LikelihoodConfig, ModelConfig, Parts
from deepspeed_nmt.engine.contract import SavedState
from deepspeed_nmt.registry import Section, problems_of

By = Literal["stack", "adjacent", "interpolate", "zero"]
SIDES = ("encoder_layers", "decoder_layers")
_Positive = Annotated[int, Field(ge=1)]
_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")
_LAST_PRODUCT = re.compile(r"\.(out_proj|down_proj)\.")


class GrowthConfig(Section):
    """Growth of the encoder and the decoder in the course of a run, up to the depths of ``model``."""

    at: tuple[_Positive, ...] = Field(default=(), description="updates after which the model grows; []: it does not")
    encoder_layers: tuple[_Positive, ...] = Field(
        default=(), description="layers of the encoder before each growth; []: always model.encoder_layers"
    )
    decoder_layers: tuple[_Positive, ...] = Field(
        default=(), description="layers of the decoder before each growth; []: always model.decoder_layers"
    )
    by: By = Field(
        default="stack",
        description="stack: new layers on top are copies of the uppermost old ones; adjacent: each copy is beside "
        "its original; interpolate: all layers lie on lines between old ones; zero: new layers on top add nothing at "
        "first",
    )

    @model_validator(mode="after")
    def _check(self) -> GrowthConfig:
        if any(first >= second for first, second in pairwise(self.at)):
            raise ValueError(f"at is {list(self.at)}; give ascending updates")
        depths = [(name, getattr(self, name)) for name in SIDES if getattr(self, name)]
        for name, numbers in depths:
            if len(numbers) != len(self.at):
                raise ValueError(
                    f"{name} has {len(numbers)} depths, but at has {len(self.at)} growths; give one before each"
                )
            if any(first > second for first, second in pairwise(numbers)):
                raise ValueError(f"{name} is {list(numbers)}; a stack only grows: give ascending depths")
        if self.at and not depths:
            raise ValueError(f"at is {list(self.at)}, but no depths are given; give encoder_layers or decoder_layers")
        return self

    def model_of(self, model: ModelConfig, update: int) -> ModelConfig:
        """Return the model with which an update is made, that of a run's start for 0."""
        number = bisect_left(self.at, update)
        if number == len(self.at):
            return model
        depths = {name: getattr(self, name)[number] for name in SIDES if getattr(self, name)}
        return type(model).model_validate({**model.model_dump(), **depths})

    def contradictions(self, parts: Parts) -> Iterator[str]:
        """Yield a sentence for each reason why a run's model cannot grow so."""
        if not self.at:
            return
        model, ways = parts.model, parts.model.ways_to_grow()
        if self.by not in ways:
            if ways:
                cannot, remedy = f"cannot grow by {self.by}", f"use growth.by={' or '.join(ways)}"
            else:
                cannot, remedy = "cannot grow", "remove growth.at, growth.encoder_layers and growth.decoder_layers"
            yield f"a model.name={model.name} of these settings {cannot}; {remedy}"
            return
        depths = {name: (*getattr(self, name), getattr(model, name)) for name in SIDES if getattr(self, name)}
        for name, (*_, before, last) in depths.items():
            if before > last:
                yield f"growth.{name} ends with {before}, above model.{name}={last}, to which it grows; lower it"
        if any(before == after for before, after in pairwise(zip(*depths.values(), strict=True))):
            yield "growth.encoder_layers and growth.decoder_layers have a growth that adds no layer; leave it out"
        if any(
            isinstance(part, LikelihoodConfig) and _trains_exits(part, model) for part in parts.objective.values()
        ):
            yield "growth.at is set, but the objective trains exits at depths that move; train the top alone"
        made = model.custom_layers()
        if (
            made
            and self.decoder_layers
            and self.decoder_layers[0] < made[1]
            and not all(parts.layer.attends_to_source(number) for number in range(1, made[1] + 1))
        ):
            yield "growth.at is set, but some decoder layers have no cross-attention; give them all some"
        for update in self.at:
            try:
                of_stage = replace(parts, model=self.model_of(model, update)).contradictions()
            except ValidationError as error:
                of_stage = [problem.strip() for problem in problems_of(error, lambda name: f"model.{name}")]
            yield from (f"before update {update}, {problem}" for problem in of_stage if problem)


def _trains_exits(part: LikelihoodConfig, model: ModelConfig) -> bool:
    stages = model.exit_stages()
    if stages is None:
        return False
    n, m = (side.total for side in stages)
    pairs = ((i, j) for i in range(1, n + 1) for j in range(1, m + 1))
    return any(part.trains_exit(*pair, (n, m)) for pair in pairs if pair != (n, m))


def begins_as(layer: int, before: int, after: int, by: By) -> dict[int, float]:
    """Return the layers of a stack of ``before`` layers, with factors, as whose sum one of ``after`` layers begins.

    Layers are counted from 0; a fresh one begins as none.
    """
    if by == "adjacent":
        return {layer * before // after: 1.0}
    if by == "interpolate" and after > 1:
        number, rest = divmod(layer * (before - 1), after - 1)
        share = rest / (after - 1)
        return {number: 1.0 - share, **({number + 1: share} if rest else {})}
    if layer < before:
        return {layer: 1.0}
    if by == "zero":
        return {}
    period = min(before, after - before)
    return {before - period + (layer - before) % period: 1.0}


class Grown:
    """Weights and optimizer states of a model as a deeper one begins; a :class:`SavedState`.

    A model's own rule (``ModelConfig.begins_as``) comes before that of ``by``. What neither knows is fresh.

    Args:
        names: parameters that ``saved`` has.
        model: the deeper model, freshly initialised.
    """

    def __init__(
        self,
        saved: SavedState,
        names: Collection[str],
        model: nn.Module,
        *,
        before: ModelConfig,
        after: ModelConfig,
        by: By,
    ) -> None:
        self._saved, self._before, self._after, self._by = saved, before, after, by
        parameters = dict(model.named_parameters())
        self._sums = {name: self._sum(name, name in names) for name in parameters}
        self._fresh = {name: parameters[name].detach().clone() for name, of in self._sums.items() if not of}
        # Fresh layers that add zero times what they compute, as with model.layer_scale=0, must not compute zero as
        # well: no factor would have a gradient.
        adds_zero = any(name.endswith(".output_scale") and not weight.any() for name, weight in self._fresh.items())
        for name, weight in self._fresh.items():
            if by == "zero" and not adds_zero and _LAST_PRODUCT.search(name):
                weight.zero_()

    def __str__(self) -> str:
        old, new = ("+".join(str(getattr(of, name)) for name in SIDES) for of in (self._before, self._after))
        return f"the model grows from {old} to {new} layers (growth.by={self._by})"

    def _sum(self, name: str, is_known: bool) -> dict[str, float]:
        own = name if is_known else self._after.begins_as(name, self._before)
        match = _LAYER.match(name)
        if match is None or (own is not None and not is_known):
            return {own: 1.0} if own else {}
        before, after = (getattr(config, f"{match[1]}_layers") for config in (self._before, self._after))
        sums = begins_as(int(match[2]), before, after, self._by)
        return {f"{match[1]}.layers.{number}.{name[match.end() :]}": factor for number, factor in sums.items()}

    def weight(self, name: str) -> Tensor:
        """Return the whole parameter ``name``, fp32, on the CPU."""
        terms = [self._saved.weight(other) * factor for other, factor in self._sums[name].items()]
        return sum(terms[1:], terms[0]) if terms else self._fresh[name]

    def optimizer_state(self, name: str, which: str) -> Tensor:
        """Return the whole state ``which`` of the parameter ``name``, fp32, on the CPU."""
        terms = [self._saved.optimizer_state(other, which) * factor for other, factor in self._sums[name].items()]
        if terms:
            return sum(terms[1:], terms[0])
        match = _LAYER.match(name)  # a state may have another shape than its parameter
        lowest = match and self._saved.optimizer_state(f"{match[1]}.layers.0.{name[match.end() :]}", which)
        return torch.zeros_like(self._fresh[name] if lowest is None else lowest)

    @torch.no_grad()
    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into the deeper model."""
        for name, parameter in model.named_parameters():
            parameter.copy_(self.weight(name))
