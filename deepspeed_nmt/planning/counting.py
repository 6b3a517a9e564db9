"""Work and activations of a model, counted while an update of it runs.

Nothing is estimated: updates of the run's own model and objective run forward and backward on the meta device.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.kernels.precision import DTYPES, Precision
from deepspeed_nmt.parallel.tensor import Exchange, parallelize
from deepspeed_nmt.parallel.world import World

RecomputedLayers = tuple[int, int]
"""Every k-th layer application of encoder and decoder is recomputed; 0 none."""
LENGTH = 32
"""Tokens of each sentence in the micro-batches that are counted, or as many as the model has positions for."""
_COUNTED = (1024, 4096, 8192, 16384)
"""Sizes in tokens of the micro-batches that are counted; other sizes are interpolated. Up to 4,096 the loss of a GPU
holds all logits at once, from there on a chunk of them (:func:`deepspeed_nmt.kernels.cross_entropy.chunk_rows`),
which may take more with the gradients that are beside it."""


def sizes(model: TranslationModel) -> tuple[int, int]:
    """Return the numbers of trained and of frozen parameters."""
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return trained, sum(parameter.numel() for parameter in parameters) - trained


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of tensor memory and of matrix products inside its ``with`` block; older tensors are not counted.

    Attributes:
        bytes: memory held now by tensors made inside.
        peak_bytes: maximum of ``bytes``.
        flops: operations of matrix products; a multiplication and an addition count as two.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak_bytes = self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note((*args, *kwargs.values()), made_inside=False)
        result = func(*args, **kwargs)
        if (factors := _FACTORS.get(func.overloadpacket)) is not None:
            a, b = (args[index] for index in factors)
            self.flops += 2 * a.numel() * b.shape[-1]
        self._note((result,), made_inside=True)
        return result

    def _note(self, values: Iterable[Any], made_inside: bool) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._note(value, made_inside)
            elif isinstance(value, Tensor):
                storage = value.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    size = storage.nbytes() if made_inside else 0
                    self.bytes += size
                    self.peak_bytes = max(self.peak_bytes, self.bytes)
                    weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.bytes -= size
        self._known.discard(key)


_aten = torch.ops.aten
_FACTORS = {
    **dict.fromkeys((_aten.mm, _aten.bmm), (0, 1)),
    **dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm), (1, 2)),
}
"""Positions of the factors (..., n, k) and (..., k, m) among the arguments of a matrix product."""


@dataclass(frozen=True)
class Work:
    """Memory and work of one micro-batch of ``tokens`` target tokens, and as many source tokens.

    Attributes:
        activations: bytes that the forward pass keeps for the backward pass.
        logits: bytes on top of those, for the projection, the loss, and temporary tensors of the backward pass.
        flops: of the model's matrix products, forward and backward.
        exchanged: bytes that tensor-parallel ranks add up.
    """

    tokens: int
    activations: int
    logits: int
    flops: int
    exchanged: int = 0


def count_update(
    model: TranslationModel,
    objective: Objective,
    vocabulary: Vocabulary,
    tokens: int,
    recompute: RecomputedLayers,
    exchange: Exchange | None = None,
) -> Work:
    """Run a micro-batch of so many padded target and source tokens on the meta device, in the dtype of training."""
    model.recompute(*recompute)
    module = TrainModule(model, objective).train()
    for parameter in model.parameters():
        # Gradients exist already, as in the second micro-batch of an update.
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    length = min(tokens, _within(LENGTH, model.longest_source), _within(LENGTH, model.longest_target))
    batch = _batch(max(1, tokens // length), length, length, vocabulary, 0)  # the largest that an objective asks for
    kept: list[int] = []
    exchange = exchange or Exchange()
    exchange.bytes = 0
    with Tally() as tally:
        hook = model.projection.register_forward_pre_hook(lambda *_: kept.append(tally.bytes))
        module(batch).loss.backward()
        hook.remove()
    for parameter in model.parameters():
        parameter.grad = None
    model.recompute(0, 0)
    return Work(batch.target_tokens, kept[0], tally.peak_bytes - kept[0], tally.flops, exchange.bytes)


_UPDATES = 1000
"""Updates of which is counted how often regularizers are due that are not computed in all of them, and how deep they
run if that is drawn."""


def count_rates(model: TranslationModel, objective: Objective, vocabulary: Vocabulary) -> tuple[float, float]:
    """Return the operations of training for each source and each target token, as the mean over updates.

    They are counted on the meta device, forward and backward, without recomputation. Of updates with the same
    regularizers and depth two are run, whose random choices differ, and stand for all of these. If depths are drawn,
    only the extreme ones are run: work is affine in the depths of encoder and decoder.
    """
    module = TrainModule(model, objective).train()
    rows, target, source = 8, _within(LENGTH, model.longest_target), _within(2 * LENGTH, model.longest_source)
    alike: dict[tuple[str, ...], dict[tuple[int, int], list[int]]] = {}
    for update in range(1, _UPDATES + 1):
        names = tuple(part.name for part in objective.due(update))
        depth = objective.deepest(model, _batch(1, target, source, vocabulary, update))
        alike.setdefault(names, {}).setdefault(depth, []).append(update)
    flops = []
    for source_length in (source // 2, source):
        total = 0.0
        for by_depth in alike.values():
            swapped = [(decoder, -encoder) for encoder, decoder in by_depth]
            corners = {min(by_depth), max(by_depth), *((-e, d) for d, e in (min(swapped), max(swapped)))}
            works = []
            for depth in corners:
                with Tally() as tally:
                    for update in (run := by_depth[depth][:2]):
                        module(_batch(rows, target, source_length, vocabulary, update)).loss.backward()
                works.append(tally.flops / len(run))
            plane, *_ = np.linalg.lstsq([(1, *depth) for depth in corners], works, rcond=None)
            total += sum(len(updates) * float(plane @ (1, *depth)) for depth, updates in by_depth.items())
        flops.append(total / _UPDATES)
    by_source = (flops[1] - flops[0]) / (rows * (source - source // 2))
    return by_source, (flops[0] - by_source * rows * (source // 2)) / (rows * target)


def _within(length: int, longest: int | None) -> int:
    """Return a length that a model has positions for."""
    return length if longest is None else min(length, longest)


def _batch(rows: int, length: int, source_length: int, vocabulary: Vocabulary, update: int) -> Batch:
    count = rows * length
    of = functools.partial(torch.zeros, dtype=torch.int64, device="meta")
    # One source position counts as padding: batches without any are rare.
    return Batch(
        source_BS=of(rows, source_length),
        target_input_BT=of(rows, length),
        target_output_BT=of(rows, length),
        sentence_ids_B=of(rows),
        source_tokens=rows * source_length - 1,
        target_tokens=count,
        pad=vocabulary.pad,
        update=UpdateInfo(seed=1, number=update, tokens=count, sentences=rows),
    )


WorkOf = Callable[[int, RecomputedLayers], Work]
Samples = tuple[Work, ...]
"""Work of two or more micro-batches, from the smallest to the largest."""


def interpolated(none: Samples, encoder: Samples, decoder: Samples, applications: tuple[int, int]) -> WorkOf:
    """Return a function from micro-batch size and recomputation to work, interpolated between counts.

    The counts are without recomputation, with all of the encoder, and with all of the decoder recomputed. Everything
    is affine in the number of tokens between two counts, and beyond the first and the last. If every k-th of n
    applications is recomputed, n // k of them save their share.
    """

    def line(tokens: int, counts: Samples, what: str) -> float:
        segments = list(itertools.pairwise(counts))
        small, large = next((pair for pair in segments if tokens <= pair[1].tokens), segments[-1])
        slope = (getattr(large, what) - getattr(small, what)) / (large.tokens - small.tokens)
        return float(getattr(small, what) + slope * (tokens - small.tokens))

    def work(tokens: int, recompute: RecomputedLayers) -> Work:
        sides = [
            (count // every / count, counts)
            for count, every, counts in zip(applications, recompute, (encoder, decoder), strict=True)
            if every and count // every
        ]

        def changed(what: str) -> int:
            start = line(tokens, none, what)
            return int(start + sum(share * (line(tokens, counts, what) - start) for share, counts in sides))

        logits = max(int(line(tokens, counts, "logits")) for counts in [none, *(counts for _, counts in sides)])
        return Work(tokens, changed("activations"), logits, changed("flops"), changed("exchanged"))

    return work


@dataclass(frozen=True)
class Counts:
    """Counts of a model on one rank that all its plans share: work of a micro-batch, and numbers of parameters.

    ``states`` are elements that the optimizer keeps for each trained parameter, on average.
    """

    work: WorkOf
    trained: int
    frozen: int
    states: float = 2.0


def count_model(
    model: TranslationModel, objective: Objective, vocabulary: Vocabulary, precision: Precision, tensor_ranks: int
) -> Counts:
    """Count a model on the meta device with kernels planned for the GPUs, which is sliced and converted here.

    Raises:
        ConfigError: if ``tensor_ranks`` does not divide the model.
    """
    exchange = Exchange()
    parallelize(model, World(0, tensor_ranks, 0, torch.device("meta"), tensor_ranks, exchange))
    trained, frozen = sizes(model)
    model.to(DTYPES[precision])

    def counted(recompute: RecomputedLayers) -> tuple[Work, ...]:
        return tuple(count_update(model, objective, vocabulary, tokens, recompute, exchange) for tokens in _COUNTED)

    encoder, decoder = (sum(stack.applications for stack in side) for side in model.stacks)
    work = interpolated(counted((0, 0)), counted((1, 0)), counted((0, 1)), (encoder, decoder))
    return Counts(work, trained, frozen)
