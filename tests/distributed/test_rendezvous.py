"""Rendezvous: ranks start together or stop together, whenever a stop is requested."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from deepspeed_nmt.errors import EXIT_STOPPED, ReportedError, TrainingError
from deepspeed_nmt.parallel import world
from deepspeed_nmt.parallel.launched import RankPlace
from deepspeed_nmt.parallel.world import meet
from tests.support import free_port


def never() -> bool:
    return False


def at_once() -> bool:
    return True


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.TCPStore]:
    """A store that no rank hosts, as torchrun's."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield store


@pytest.mark.usefixtures("agent")
@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_comes_after_a_stop_stops_too(first: int) -> None:
    with pytest.raises(ReportedError):
        meet(RankPlace(first, 2, first), 5.0, at_once)
    with pytest.raises(ReportedError) as stopped:
        meet(RankPlace(1 - first, 2, 1 - first), 5.0, never)
    assert stopped.value.status == EXIT_STOPPED


@pytest.mark.usefixtures("agent")
def test_a_stop_comes_too_late_once_another_rank_starts() -> None:
    met = []

    def last_rank_comes() -> bool:
        met.append(meet(RankPlace(1, 2, 1), 5.0, never))
        return True

    met.append(meet(RankPlace(0, 2, 0), 5.0, last_rank_comes))
    met[0].set("from", "rank 1")
    assert met[1].get("from") == b"rank 1"


def test_a_rank_that_rank_0_leaves_waits_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    stores = [world.connect(RankPlace(0, 2, 0), pytest.fail, 5.0)]

    def rank_0_leaves() -> bool:
        stores.clear()
        return not stores and time.monotonic() > began + 0.5

    began = time.monotonic()
    with pytest.raises(ReportedError):
        meet(RankPlace(1, 2, 1), 5.0, rank_0_leaves)


def test_a_port_of_a_program_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        with pytest.raises(TrainingError, match=r"rank 1 .* rank 0 at 127.0.0.1:\d+, which does not answer"):
            meet(RankPlace(1, 2, 1), 0.5, never)
        with pytest.raises(ReportedError):
            meet(RankPlace(1, 2, 1), 600.0, at_once)


def test_a_rank_asks_for_a_number_not_for_each_other_rank() -> None:
    """Rank 0 answers all of them, so that 1,024 ranks would ask it a million times in each round."""
    ranks, store = 1024, dist.HashStore()
    store.add("key/here", ranks - 1)
    requests: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            def request(*arguments: object) -> object:
                requests.append(len(arguments[0]) if isinstance(arguments[0], list) else 1)
                return getattr(store, name)(*arguments)

            return request

    place = RankPlace(ranks - 1, ranks, 0)
    assert world._decide(Counting(), "key", place, world._Wait(place, 5.0, never))
    assert sum(requests) < 8
    assert store.add("key/here", 0) == ranks
    assert world._decide(Counting(), "key", place, world._Wait(place, 5.0, never))  # it came again
    assert store.add("key/here", 0) == ranks
