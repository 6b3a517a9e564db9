"""Steps whose kernels are recorded once and replayed: CUDA graphs.

A graph is tied to the sizes and addresses of the tensors of a step. So there is one for each bucket; all share a pool
of memory for what a step computes on the way, because only one of them runs at a time and none leaves anything there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from deepspeed_nmt.console import logger

Replay = Callable[[], object]
"""Runs what was recorded."""
Record = Callable[[Callable[[], object]], Replay]
"""Records a step without running it."""

MOST_GRAPHS = 128
"""Most recorded steps that are kept; a graph of 54 layers needs some megabytes."""
WARM_UP = 3
"""Steps that run before one of their sizes is recorded. They prepare kernels, and what is made when it is first used;
and a recording costs as much as some steps, which sizes that occur less often would not save."""


class Replays:
    """A step that is recorded once for each key, and replayed from then on.

    Args:
        step: a function of tensors at constant addresses; it returns whatever else its recording reads, which is kept
            as long as the recording.
        record: records it; None to run it each time.
        most: most recordings that are kept.

    Attributes:
        steps: number of steps that ran.
        replayed: number of them that were replayed.
    """

    def __init__(self, step: Callable[[], object], record: Record | None, most: int = MOST_GRAPHS) -> None:
        self.steps = self.replayed = 0
        self._step = step
        self._record = record
        self._most = most
        self._recorded: OrderedDict[Hashable, tuple[Replay, object]] = OrderedDict()
        self._ran: Counter[Hashable] = Counter()
        self._addresses: Hashable = None

    def __len__(self) -> int:
        """Return the number of recordings."""
        return len(self._recorded)

    def at(self, addresses: Hashable) -> None:
        """Drop all recordings if addresses have changed.

        Args:
            addresses: a number, or several, that differ if any tensor that the step reads has moved.
        """
        if addresses != self._addresses:
            self._addresses = addresses
            self._recorded.clear()
            self._ran.clear()

    def run(self, key: Hashable) -> None:
        """Run the step.

        Args:
            key: the sizes of its tensors.
        """
        self.steps += 1
        found = self._recorded.get(key)
        if found is None and self._record is not None and self._ran[key] >= WARM_UP:
            found = self._recording(self._record)
            if found is not None:
                self._recorded[key] = found
                if len(self._recorded) > self._most:
                    self._recorded.popitem(last=False)
        if found is None:
            self._ran[key] += 1
            self._step()
            return
        self._recorded.move_to_end(key)
        self.replayed += 1
        found[0]()

    def _recording(self, record: Record) -> tuple[Replay, object] | None:
        """Record the step; None, and no further attempt, if that fails."""
        kept: list[object] = []
        try:
            return record(lambda: kept.append(self._step())), kept
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            logger.warning("CUDA graphs cannot be captured, so decoding is slower: %s", reason)
            self._record = None
            return None


class CudaGraphs:
    """Records steps as CUDA graphs of one device, which share a pool of memory as long as any of them is kept.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None
        self._kept: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def __call__(self, step: Callable[[], object]) -> Replay:
        """Record a step.

        Raises:
            RuntimeError: if it does something that cannot be recorded, such as waiting for the GPU.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if not self._kept:
                self._begin_pool()
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                # torch.cuda.graph would empty the allocator's cache before each of some hundred captures. Other
                # threads may use the GPU meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                except BaseException:
                    with suppress(RuntimeError):  # it fails as well, and does not know the reason
                        graph.capture_end()
                    raise
                graph.capture_end()
            current.wait_stream(self._stream)
        self._kept.add(graph)
        return graph.replay

    def _begin_pool(self) -> None:
        """Begin a pool: torch refuses to capture into one whose graphs are all gone."""
        if self._pool is not None:
            torch.cuda.empty_cache()  # returns the memory of the pool before, which nothing else would use
        self._pool = torch.cuda.graph_pool_handle()
