"""A stack of layers: weights plus the order in which they are applied.

Legend: B batch, T length, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed_nmt.native.decoder import BoundLayers
from deepspeed_nmt.native.library import in_one_thread
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.layers import (
    Context,
    DecoderBlock,
    DecoderLayer,
    NativeStep,
    bind_natively,
    decode_natively,
    is_bare,
    native_norm,
    native_step,
)


@dataclass(frozen=True)
class LayerOrder:
    """The order in which a stack's layers are applied; a layer may be applied several times.

    Attributes:
        indices: of the layers, in order of application.
        inputs_at: applications, from 0, before which the stack's input is added to the state again.
        stages: numbers of applications after which the state can be read (the *exits*), ascending; the last is all
            of them.
    """

    indices: tuple[int, ...]
    inputs_at: frozenset[int]
    stages: tuple[int, ...]

    @classmethod
    def straight(cls, layers: int) -> LayerOrder:
        """Return the order of each layer once, from the lowest to the highest, with an exit after each."""
        return cls(tuple(range(layers)), frozenset(), tuple(range(1, layers + 1)))

    def until(self, stage: int) -> LayerOrder:
        """Return the order up to exit ``stage``, counted from 1."""
        return LayerOrder(self.indices[: self.stages[stage - 1]], self.inputs_at, self.stages[:stage])


class Links(nn.Module, ABC):
    """Connections between the layers of a stack, besides that of each layer with the one below."""

    @abstractmethod
    def read(self, x_BTD: Tensor, number: int, kept: list[Tensor]) -> Tensor:
        """Return what the next layer, and an exit here, read in place of the state.

        It is not ``forward``, because hooks of ZeRO-3 hand copies of lists to that; parameters are those of modules
        that it calls.

        Args:
            x_BTD: state after so many applications.
            number: of applications so far: 0 at the embedding.
            kept: what this method has kept of the states of this pass, to be appended to.

        Shape: (B,T,D) -> (B,T,D)
        """

    @abstractmethod
    def until(self, number: int) -> Links:
        """Return the connections up to so many applications, with the same weights."""

    def changes(self, number: int) -> bool:
        """Return True if :meth:`read` may return another state after so many applications, or keep one."""
        return True


class LayerStack(nn.Module):
    """Apply layers in a given order, by default each once.

    Attributes:
        final_norm: applied to the state at every exit (a LayerNorm after pre-norm stacks), or None.
        exits: modules that take the place of ``final_norm`` at other exits than the top, by the exit's number.
        links: what the layers and exits read instead of the state below; None: that.
        recompute_every: k; in training, every k-th application keeps only its input and is run again in the backward
            pass, with the same random choices: 1 all, 0 none. Results are bit-identical.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        order: LayerOrder | None = None,
        final_norm: nn.Module | None = None,
        links: Links | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = LayerOrder.straight(len(layers)) if order is None else order
        assert all(0 <= index < len(layers) for index in self.order.indices)
        assert self.order.stages[-1] == len(self.order.indices)
        self.final_norm = final_norm
        self.exits = nn.ModuleDict()
        self.links = links
        self.recompute_every = 0

    @property
    def applications(self) -> int:
        """Number of layer applications."""
        return len(self.order.indices)

    @property
    def stages(self) -> int:
        """Number of exits, the top included."""
        return len(self.order.stages)

    def until(self, stage: int) -> LayerStack:
        """Return a stack with the same weights, and the exits below, that ends at exit ``stage``, counted from 1."""
        order = self.order.until(stage)
        links = None if self.links is None else self.links.until(len(order.indices))
        cut = LayerStack(list(self.layers)[: max(order.indices) + 1], order, self.norm_at(stage), links)
        cut.exits.update({number: norm for number, norm in self.exits.items() if int(number) < stage})
        return cut

    def norm_at(self, stage: int) -> nn.Module | None:
        """Return the module that is applied to the state at exit ``stage``, counted from 1; None for none."""
        number = str(stage)
        if number in self.exits:
            return self.exits[number]
        return self.final_norm

    def forward(
        self,
        x_BTD: Tensor,
        context: Context,
        caches: Sequence[LayerCache] | None = None,
        exits: Sequence[int] | None = None,
        first: int = 0,
    ) -> list[Tensor]:
        """Apply the layers, up to the deepest of the given exits.

        Args:
            caches: one for each application, when decoding position by position, from the top.
            exits: counted from 1; default the top.
            first: application, from 0, with which to begin, in a stack without links.

        Shape: (B,T,D) -> one (B,T,D) per exit
        """
        if caches is not None:
            norm = self.norm_at(self.stages)
            return [self.advance((x_BTD, x_BTD), context, caches, 0, self.applications, norm)[0]]
        exits = exits or (self.stages,)
        stages = [self.order.stages[exit - 1] for exit in exits]
        indices = self.order.indices[: max(stages)]
        input_BTD, kept = x_BTD, list[Tensor]()
        if self.links is not None:
            x_BTD = self.links.read(x_BTD, 0, kept)
        states: dict[int, Tensor] = {}
        every = self.recompute_every if self.training and torch.is_grad_enabled() else 0
        contexts = self._contexts(context, indices)
        for number, index in enumerate(indices[first:], first):
            if number in self.order.inputs_at:
                x_BTD = x_BTD + input_BTD
            layer, shared = self.layers[index], contexts.get(index, context)
            recomputed = every > 0 and (number + 1) % every == 0
            if shared.record is not None and layer in shared.record.layers:
                apply = partial(checkpoint, _with_weights, use_reentrant=False) if recomputed else _with_weights
                x_BTD, shared.record.weights[layer] = apply(layer, x_BTD, shared)
            elif recomputed:
                x_BTD = checkpoint(layer, x_BTD, shared, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD, shared, None)
            if self.links is not None:
                x_BTD = self.links.read(x_BTD, number + 1, kept)
            if number + 1 in stages:
                states[number + 1] = x_BTD
        return [self.read(states[at], exit) for at, exit in zip(stages, exits, strict=True)]

    def advance(
        self,
        states: Sequence[Tensor],
        context: Context,
        caches: Sequence[LayerCache],
        first: int,
        end: int,
        norm: nn.Module | None = None,
    ) -> tuple[Tensor, ...]:
        """Apply the applications from ``first`` to before ``end``, then ``norm``, to the next positions in decoding.

        ``states``, which are also returned, are the state, the stack's input and what the links have kept; before
        the first application the input twice. Each cache keeps the source's keys and values itself.

        Shape: (R,1,D) each -> (R,1,D) each
        """
        x_R1D, input_R1D, *kept = states
        if self.links is not None and first == 0:
            x_R1D = self.links.read(x_R1D, 0, kept)
        # Between two places where links are read there are only layers, and the stack's input.
        read = [at for at in range(first + 1, end) if self._is_linked_at(at)]
        for start, stop in pairwise([first, *read, end]):
            of_step = norm if stop == end and self.links is None else None
            x_R1D = self._step(x_R1D, input_R1D, context, caches[start:stop], start, of_step)
            if self.links is not None:
                x_R1D = self.links.read(x_R1D, stop, kept)
        if self.links is not None and norm is not None:
            x_R1D = norm(x_R1D)
        return (x_R1D, input_R1D, *kept)

    def _is_linked_at(self, number: int) -> bool:
        return self.links is not None and self.links.changes(number)

    def _adds_input(self, start: int, end: int) -> list[bool]:
        return [number in self.order.inputs_at for number in range(start, end)]

    def _step(
        self,
        x_R1D: Tensor,
        input_R1D: Tensor,
        context: Context,
        caches: Sequence[LayerCache],
        start: int,
        norm: nn.Module | None,
    ) -> Tensor:
        """Apply applications from ``start`` on, one for each cache, then ``norm``, in one native call if possible."""
        layers = list(self.layers)
        applied = [layers[index] for index in self.order.indices[start : start + len(caches)]]
        steps, adds_input = _native_steps(applied, len(x_R1D)), self._adds_input(start, start + len(caches))
        if steps:
            fused = native_norm(norm, steps)
            x_R1D = decode_natively(steps, x_R1D, context, caches, fused, input_R1D, adds_input)
            norm = norm if fused is None else None
        else:
            for layer, cache, adds in zip(applied, caches, adds_input, strict=True):
                x_R1D = layer(x_R1D + input_R1D if adds else x_R1D, context, cache)
        return x_R1D if norm is None else norm(x_R1D)

    def bind(
        self,
        context: Context,
        caches: Sequence[LayerCache],
        rows: int,
        positions: int,
        start: int = 0,
        stage: int | None = None,
    ) -> BoundLayers | None:
        """Return layers from ``start`` to an exit, with its LayerNorm, for native code; None if it must not be used.

        It is for up to ``rows`` hypotheses, and the caches get room for ``positions`` more of each sentence.
        ``stage`` is counted from 1; default the top.
        """
        stage = stage or self.stages
        end, norm = self.order.stages[stage - 1], self.norm_at(stage)
        memory_BSD = context.memory_BSD
        if self.links is not None or not is_bare(self) or not in_one_thread(rows) or memory_BSD is None:
            return None
        own = _native_steps([self.layers[index] for index in self.order.indices[start:end]], rows)
        fused = native_norm(norm, own) if own else None
        if not own or (norm is not None and fused is None):
            return None
        caches, adds_input = caches[start:end], self._adds_input(start, end)
        pairs = zip(own, caches, strict=True)
        buffers = [step.reserve_positions(positions, len(memory_BSD), cache, memory_BSD) for step, cache in pairs]
        return bind_natively(own, buffers, context, caches, fused, adds_input)

    def read(self, x_BTD: Tensor, stage: int) -> Tensor:
        """Return the state as exit ``stage``, counted from 1, gives it out. Shape: (B,T,D) -> (B,T,D)."""
        norm = self.norm_at(stage)
        return x_BTD if norm is None else norm(x_BTD)

    def weights(self, first: int, end: int) -> int:
        """Return the number of weights of some applications, those of a repeated layer counted as often."""
        layers = (self.layers[index] for index in self.order.indices[first:end])
        return sum(weight.numel() for layer in layers for weight in layer.parameters())

    def _contexts(self, context: Context, indices: Sequence[int]) -> dict[int, Context]:
        """Return the contexts of the layers that are applied several times, with the source's keys and values.

        Those are equal in all applications, and projected outside of recomputation, because they outlive one.
        """
        return {
            index: replace(context, source=layer.project_source(context))
            for index, count in Counter(indices).items()
            if count > 1 and isinstance(layer := self.layers[index], DecoderBlock)
        }


def _native_steps(layers: Sequence[nn.Module], rows: int) -> list[NativeStep]:
    """Return the native steps of all layers; of none if one of them has none."""
    steps = [native_step(layer, rows) if isinstance(layer, DecoderLayer) else None for layer in layers]
    return [step for step in steps if step] if all(steps) else []


def _with_weights(layer: nn.Module, x_BTD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Apply a layer, and return its attention weights too, so that recomputation repeats both. Shape: -> (B,T,S)."""
    weights: list[Tensor] = []
    x_BTD = layer(x_BTD, replace(context, weights=weights))
    return x_BTD, weights[0]
