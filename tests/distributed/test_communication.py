"""Collectives of 8, 64 and 256 ranks, of which one or two are there: their order, dtypes and bytes.

The bytes are those by which `plan` estimates communication.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest

from deepspeed_nmt import parity
from deepspeed_nmt.build import build_meta_model, build_objective
from deepspeed_nmt.planning import counting
from deepspeed_nmt.planning.communication import Communication, communication, on_links, ring_bytes
from deepspeed_nmt.planning.counting import Counts, count_model
from deepspeed_nmt.planning.gpus import GPUS
from deepspeed_nmt.planning.memory import Layout
from tests.distributed.fake_world_worker import COMMANDS, DEEP, ENGINES, RANKS, SCALED, SHARED, TOKENS
from tests.support import prepare_sample, run_ranks

Collectives = list[list[Any]]
PASSES = {"allreduce_": 2}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("fake")
    prepare_sample(directory, 200, train=400, valid=300, test=20)
    out = directory / "report.json"
    (said,) = run_ranks(["-m", "tests.distributed.fake_world_worker", str(directory), str(out)], 1, directory)
    read: dict[str, Any] = json.loads(out.read_text())
    assert None not in read.values(), said
    return read


def sent(collectives: Collectives) -> float:
    """Return the bytes that a rank sends in a ring."""
    return sum(ring_bytes(size, ranks, PASSES.get(name, 1)) for name, _, size, ranks in collectives)


@cache
def counts_of(tensor_ranks: int, precision: str, is_deep: bool) -> tuple[Counts, list[int]]:
    """Return the counts of the model that the worker trains, and the sizes of its parameters."""
    config = parity.settings_of("vanilla")
    config = config.model_copy(update={"model": config.model.model_copy(update=DEEP if is_deep else {})})
    model = build_meta_model(config, parity.VOCABULARY)
    objective = build_objective(config, parity.VOCABULARY)
    sizes = [parameter.numel() for parameter in model.parameters()]
    with mock.patch.object(counting, "_COUNTED", (TOKENS, 2 * TOKENS)):
        return count_model(model, objective, parity.VOCABULARY, precision, tensor_ranks), sizes  # type: ignore[arg-type]


def expected(engine: str, ranks: int, tensor_ranks: int) -> Communication:
    name, _, precision = engine.partition("+")[0].partition(":")
    stage = int(name[-1]) if name != "plain" else None
    counts, sizes = counts_of(tensor_ranks, precision or "fp32", stage == 3)
    if stage == 3:  # each parameter is padded to equal parts, which matters if it is as small as these
        counts = replace(counts, trained=sum(-(-size // ranks) * ranks for size in sizes))
    layout = Layout(stage, ranks, tensor_ranks, 16 if precision else 32, SCALED)
    recompute = (1, 1) if "recompute" in engine else (0, 0)
    exchanged = counts.work(TOKENS, recompute).exchanged
    return communication(counts.trained, counts.frozen, exchanged, layout, 2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("engine", [*(f"{name} x1" for name in ENGINES), *(f"{name} x2" for name in SHARED)])
def test_bytes_of_an_update_are_those_of_theory(report: dict[str, Any], engine: str, ranks: int) -> None:
    update: Collectives = report[f"views {ranks} 0"][engine]["update"]
    name, _, tensor_ranks = engine.partition(" x")
    theory = expected(name, ranks, int(tensor_ranks))
    assert sent(update) == pytest.approx(theory.total, rel=0.05)
    gradients = [
        c for c in update if c[0] in ("allreduce_", "_reduce_scatter_base_") and c[3] == ranks // int(tensor_ranks)
    ]
    assert sent(gradients) == pytest.approx(theory.gradients, rel=0.05)
    # ZeRO-1 reduces the sums of an update in fp32, ZeRO 2 and 3 each micro-batch in the precision of training.
    large = max(gradients, key=lambda c: c[2])
    assert large[1] == ("bfloat16" if name.startswith(("zero2:bf16", "zero3:bf16")) else "float32")


def test_an_update_waits_once_for_the_device(report: dict[str, Any]) -> None:
    """Under ZeRO-2; elsewhere DeepSpeed looks at the norm by itself: ZeRO-3 once, ZeRO-1 in bf16 twice."""
    engines = report[f"views {RANKS[0]} 0"]
    waits = {engine: engines[engine]["waits"] for engine in engines.keys() - {"groups"}}
    own = {engine: [place for place in places if "deepspeed_nmt/" in place] for engine, places in waits.items()}
    assert all(len(places) == 1 for places in own.values()), own
    theirs = {engine: len(places) - 1 for engine, places in waits.items()}
    assert theirs == {engine: {"zero3": 1, "zero1": 2}.get(engine[:5], 0) for engine in theirs}, waits


def test_first_and_last_rank_have_the_same_collectives_in_the_same_order(report: dict[str, Any]) -> None:
    ranks = RANKS[0]
    first, last = (report[f"views {ranks} {rank}"] for rank in (0, ranks - 1))
    for engine in first.keys() - {"groups"}:
        for part in ("start", "update"):
            # Two ranks share 61 tokens as 30 and 31, so their slices differ in size.
            one, other = (
                [
                    (name, dtype, size if engine.endswith("x1") else 0, of)
                    for name, dtype, size, of in view[engine][part]
                ]
                for view in (first, last)
            )
            assert one == other, (engine, part)
    ranks = COMMANDS[0][0]
    first, last = (report[f"command {ranks} {rank}"] for rank in (0, ranks - 1))
    until_loss = without_messages(last["all"])
    assert until_loss == without_messages(first["all"])[: len(until_loss)]
    assert any(name == "_allgather_base_" and ranks == size for name, _, _, size in until_loss), "it made an update"


def without_messages(collectives: Collectives) -> Collectives:
    """Leave out what rank 0 tells the others, a size and bytes, which nobody receives here, and lengths of texts."""
    sizes = {number for number, one in enumerate(collectives) if one[:2] == ["broadcast_", "int64"]}
    kept = (one for number, one in enumerate(collectives) if number not in sizes and number - 1 not in sizes)
    return [
        [name, dtype, 0 if name == "_allgather_base_" and dtype == "uint8" else size, of]
        for name, dtype, size, of in kept
    ]


def test_nothing_at_the_start_grows_with_the_square_of_the_ranks(report: dict[str, Any]) -> None:
    """A rank sends and receives a constant at the start, but for texts of some bytes of each rank."""
    views = [report[f"views {ranks} 0"] for ranks in RANKS]
    assert {view["groups"] for view in views} == {views[0]["groups"]} and views[0]["groups"] < 8
    for engine in views[0].keys() - {"groups"}:
        starts = [sum(c[2] for c in view[engine]["start"]) for view in views]
        padding = 1.35 if "zero3" in engine else 1.05  # it pads parameters, as small as these, to parts for all ranks
        assert max(starts) <= padding * min(starts), engine
    few, many = RANKS[1:]  # 8 ranks have more micro-batches
    commands = [report[f"command {ranks} 0"]["all"] for ranks in (few, many)]
    assert len(commands[0]) == len(commands[1])
    less, more = (sum(c[2] for c in collectives) for collectives in commands)
    assert more - less < 400 * (many - few)


def test_an_estimate_names_the_bottleneck() -> None:
    gpu, million = GPUS["a100-80g"], 1_000_000

    def of(stage: int, micro_batches: int, exchanged: int = 0, tensor_ranks: int = 1) -> Communication:
        zero = {"overlap_comm": True, "stage3_max_reuse_distance": 0}
        return communication(755 * million, 0, exchanged, Layout(stage, 8, tensor_ranks, zero=zero), micro_batches)

    slow = [on_links(of(*case), gpu, 0.01, 10.0)[0] for case in ((1, 4), (2, 4), (3, 4), (1, 1, 10**10, 2))]
    words = ("batch.update_tokens", "each micro-batch", "ZeRO-3's weights", "tensor parallelism")
    assert all(word in one.bottleneck for word, one in zip(words, slow, strict=True))
    assert all(0.5 < one.share < 1.0 and one.efficiency == 1.0 - one.share for one in slow)
    links = {one.link: one for one in on_links(of(2, 4), gpu, 1.0)}
    assert links["NVLink"].bottleneck == "arithmetic" and links["NVLink"].share < links["PCIe"].share
    # 8 GPUs send 2 x 7/8 of 2 bytes for each of 755M gradients in a micro-batch, and 7/8 of the weights once.
    assert of(2, 4).total == pytest.approx(755e6 * 2 * 7 / 8 * (2 * 4 + 1))
