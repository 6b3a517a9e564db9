"""CUDA graphs keep being recorded after all of them were dropped, by torch's rules for their pools of memory."""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import nullcontext
from itertools import count
from typing import Any

import pytest
import torch

from deepspeed_nmt.search.replay import WARM_UP, CudaGraphs, Replays


class Allocator:
    """A stand-in for torch's pools of memory for graphs, with its assertion that a known pool is in use."""

    def __init__(self) -> None:
        self.handles = count(1)
        self.users: Counter[int] = Counter()
        self.emptied = 0

    def empty(self) -> None:
        self.emptied += 1

    def graph(self) -> Graph:
        return Graph(self)


class Graph:
    """A stand-in for torch's graph, which uses a pool from the begin of its capture to its own end."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator, self._pool = allocator, 0

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        if pool in self._allocator.users and self._allocator.users[pool] == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._allocator.users[pool] += 1
        self._pool = pool

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def __del__(self) -> None:
        if self._pool:
            self._allocator.users[self._pool] -= 1


class Stream:
    """A stand-in for a stream."""

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """Return the allocator of a machine that has no GPU."""
    made = Allocator()
    replaced: dict[str, Any] = {
        "device": nullcontext,
        "stream": nullcontext,
        "Stream": Stream,
        "current_stream": Stream,
        "CUDAGraph": made.graph,
        "graph_pool_handle": lambda: next(made.handles),
        "empty_cache": made.empty,
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return made


def record_all(replays: Replays, *keys: str) -> None:
    for key in keys:
        for _ in range(WARM_UP + 1):
            replays.run(key)


def test_graphs_share_a_pool_and_get_another_one_after_all_were_dropped(
    allocator: Allocator, caplog: pytest.LogCaptureFixture
) -> None:
    replays = Replays(lambda: None, CudaGraphs(torch.device("cuda", 0)))
    replays.at(1)
    record_all(replays, "a", "b")
    assert len(replays) == 2 and allocator.users == {1: 2}
    for moves in (2, 3):
        replays.at(moves)
        gc.collect()
        assert len(replays) == 0 and allocator.users[moves - 1] == 0
        record_all(replays, "a", "b")
        assert len(replays) == 2 and allocator.users[moves] == 2
    assert allocator.emptied == 2, "the memory of a pool that is left is returned"
    assert not caplog.records, "graphs were given up"


def test_a_pool_is_kept_while_any_of_its_graphs_is(allocator: Allocator) -> None:
    replays = Replays(lambda: None, CudaGraphs(torch.device("cuda", 0)), most=1)
    record_all(replays, "a", "b", "c")
    gc.collect()
    assert len(replays) == 1 and allocator.users == {1: 1} and allocator.emptied == 0


def test_a_failed_capture_gives_its_first_reason(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    def step() -> None:
        ran.append(len(ran))
        if len(ran) == WARM_UP + 1:
            raise RuntimeError("operation not permitted when stream is capturing")

    def end(graph: Graph) -> None:
        raise RuntimeError("the capture has been invalidated")

    monkeypatch.setattr(Graph, "capture_end", end)
    replays = Replays(step, CudaGraphs(torch.device("cuda", 0)))
    record_all(replays, "a")
    assert [each.getMessage().rpartition(": ")[2] for each in caplog.records] == [
        "operation not permitted when stream is capturing"
    ]
    assert len(ran) == WARM_UP + 2, "a step that is not recorded must run"


def test_steps_are_counted(allocator: Allocator) -> None:
    replays = Replays(lambda: None, CudaGraphs(torch.device("cuda", 0)))
    record_all(replays, "a")
    replays.run("a")
    assert (replays.steps, replays.replayed) == (WARM_UP + 2, 2)
