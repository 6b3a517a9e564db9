"""Faults: skipped updates, spikes, lack of memory, and devices that contradict one another."""

import itertools
import logging
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpora, CorpusPart
from deepspeed_nmt.data.loader import TrainLoader, Update, collate
from deepspeed_nmt.data.update_order import Cursor, EpochOrder
from deepspeed_nmt.engine.contract import Engine, UpdateResult
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.errors import DataError, DeviceError, TrainingError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.faults import Replay, Witness, attribute, cause_of, check_devices, check_replicas, replay
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from deepspeed_nmt.train.out_of_memory import has_room, probe
from deepspeed_nmt.train.progress import LogState, Progress
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, report_spike, roll_back
from tests.support import random_corpus

ALONE = World(0, 1, 0, torch.device("cpu"))
V = Vocabulary(50)


@pytest.fixture
def train_module() -> TrainModule:
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=1, decoder_layers=2, dropout=0.1)
    return TrainModule(build_transformer(config, V), Objective(LabelSmoothed(0.1, V.pad)))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return Corpora.of(random_corpus(tmp_path_factory.mktemp("corpus"), 40, 50, 1))


@pytest.fixture(scope="module")
def batches(corpora: Corpora) -> Sequence[Batch]:
    """The micro-batches of an update, more than one."""
    config = BatchConfig(update_tokens=300, micro_tokens=60)
    order = EpochOrder(corpora, 1, config.update_tokens)
    return next(TrainLoader(order, config, 0, 1, V).updates(Cursor(), 1)).micro_batches


def witnesses(count: int, **wrong: Sequence[tuple[int, Any]]) -> list[Witness]:
    """Ranks that agree, but for values of some ranks by the field's name."""
    rows: list[dict[str, Any]] = [
        {
            "rank": rank,
            "host": f"host{rank}",
            "device": "H200",
            "weights": 5,
            "first": rank,
            "cause": "",
            "again": Replay(sums=rank, gradients=10 * rank, is_finite=False),
            "previous": Replay(sums=(rank - 1) % count, gradients=10 * ((rank - 1) % count), is_finite=False),
        }
        for rank in range(count)
    ]
    for name, values in wrong.items():
        for rank, value in values:
            rows[rank][name] = value
    return [Witness.model_validate(row) for row in rows]


ODD = Replay(sums=77, gradients=77, is_finite=True)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_that_agree_have_no_faulty_device(count: int) -> None:
    check_devices(witnesses(count))
    check_devices(witnesses(count, previous=[(0, ODD)], device=[(0, "A100")])) if count > 2 else None


@pytest.mark.parametrize(
    ("count", "wrong", "named"),
    [
        (1, {"first": [(0, 7)]}, [0]),
        (4, {"first": [(2, 7)]}, [2]),
        (4, {"weights": [(3, 6)]}, [3]),
        (2, {"weights": [(1, 6)]}, [0, 1]),  # nobody knows which one is right
        (4, {"weights": [(1, 6), (2, 6)]}, [0, 1, 2, 3]),
        (2, {"again": [(1, Replay(sums=1, gradients=9, is_finite=False))]}, [0, 1]),
        # Its own gradient is wrong, and the one that it computed of the rank before it.
        (4, {"again": [(2, Replay(sums=2, gradients=9, is_finite=False))], "previous": [(2, ODD)]}, [2]),
        (4, {"previous": [(2, ODD)]}, [1, 2]),
    ],
)
def test_a_device_that_contradicts_is_named(count: int, wrong: dict[str, Any], named: list[int]) -> None:
    with pytest.raises(DeviceError) as error:
        check_devices(witnesses(count, **wrong))
    assert [rank for rank in range(count) if f"rank {rank} on host{rank} (H200)" in str(error.value)] == named
    assert error.value.status == 71


def test_an_update_computed_again_has_the_same_bits(
    train_module: TrainModule, batches: Sequence[Batch], corpora: Corpora
) -> None:
    first = replay(train_module, batches, 0, 1.0, ALONE.device)
    assert first == replay(train_module, batches, 0, 1.0, ALONE.device) and first.is_finite
    assert first.gradients != replay(train_module, batches, 1, 1.0, ALONE.device).gradients, "another rank's dropout"
    assert all(parameter.grad is None for parameter in train_module.parameters())
    check_replicas(train_module, ALONE)
    name = "decoder.final_norm.weight"
    weight = train_module.model.get_parameter(name).detach()
    weight[5:6].view(torch.int32).bitwise_xor_(1 << 9)
    assert first != replay(train_module, batches, 0, 1.0, ALONE.device), "of a bit in a weight"
    assert not cause_of(train_module, batches, ALONE, corpora)
    weight[5] = torch.nan
    assert cause_of(train_module, batches, ALONE, corpora) == f"the weight {name} is not finite"


def test_the_module_and_the_pairs_at_fault_are_named(
    train_module: TrainModule, batches: Sequence[Batch], corpora: Corpora
) -> None:
    seen: list[Batch] = []
    train_module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    def spoil(layer: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if seen[-1].update.micro_batch == 1 else output

    train_module.model.get_submodule("decoder.layers.0").register_forward_hook(spoil)
    engine = PlainEngine(train_module, AdamConfig(), "fp32", ALONE)
    result = engine.update(batches, batches[0].update.tokens, 1e-3)
    assert result.skipped
    cause = attribute(train_module, lambda rank: batches, result, ALONE, corpora)
    assert "decoder.layers.0" in cause and "rank 0" in cause
    assert f"pairs {min(batches[1].sentence_ids_B.tolist())}" in cause


def test_a_skip_is_a_damaged_gradient_only_if_its_norm_cannot_have_overflowed(
    train_module: TrainModule, batches: Sequence[Batch], corpora: Corpora
) -> None:
    def cause(scale: float) -> str:
        made = PlainEngine(train_module, AdamConfig(), "fp32", ALONE)
        result = made.update(batches, batches[0].update.tokens, 0.0)
        skip = replace(result, grad_norm=torch.inf, skipped=True, loss_scale=scale)
        return attribute(train_module, lambda rank: batches, skip, ALONE, corpora)

    assert "a gradient was damaged on its way" in cause(1.0)
    assert cause(1e25).startswith("the same when computed again, so data or arithmetic: the largest gradient")
    train_module.half()
    assert cause(1.0) == "", "ranks add theirs up in fp16"


def test_pairs_of_a_mixture_are_named_by_their_numbers_in_their_corpora(
    train_module: TrainModule, tmp_path: Path
) -> None:
    corpora = []
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        corpora.append(random_corpus(tmp_path / f"{number}", 40, 50, number))
    mixed = Corpora([CorpusPart("news", (corpora[0], corpora[1])), CorpusPart("crawl", (corpora[2],))])
    rows = np.array([5, 40 + 7, 80 + 2])
    train_module.register_forward_hook(lambda module, inputs, output: output._replace(loss=output.loss * torch.nan))
    cause = cause_of(train_module, [collate(mixed, rows, V)], ALONE, mixed)
    assert cause.endswith("for the pairs 5 of news and the pairs 7 of news and the pairs 2 of crawl")
    with pytest.raises(DataError, match=r"beyond the 5 of its vocabulary, in the pairs 2 of crawl; it was damaged"):
        collate(mixed, rows[2:], Vocabulary(5))


WORLD = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))


def update(number: int = 1, tokens: int = 10) -> Update:
    return Update(
        number=number, micro_batches=[], target_tokens=tokens, padded_positions=0, real_positions=0, after=Cursor()
    )


def result(loss: float, skipped: bool = False, scale: float = 1.0, culprits: tuple[str, ...] = ()) -> UpdateResult:
    return UpdateResult({"loss": torch.tensor(loss), "nll": torch.tensor(1.0)}, 1.0, skipped, scale, culprits)


def engine(precision: str = "fp32") -> PlainEngine:
    """Return the engine of a 3+3-layer model whose second decoder layer has a gradient that is not finite."""
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=3, decoder_layers=3, dropout=0.0)
    model = build_transformer(config, V)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.inf

    model.decoder.layers[1].feed_forward.down_proj.weight.register_hook(spoil)
    module = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))
    return PlainEngine(module, AdamConfig(), precision, WORLD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("precision", "explain", "named"), [("fp32", False, True), ("fp16", False, False), ("fp16", True, True)]
)
def test_culprits_are_named_unless_the_loss_scale_may_be_the_cause(
    tmp_path: Path, precision: str, explain: bool, named: bool
) -> None:
    loader = TrainLoader.of_corpus(
        random_corpus(tmp_path, 40, 50, 1), BatchConfig(update_tokens=300, micro_tokens=300), 1, 0, 1, V
    )
    first = next(loader.updates(Cursor(), 1))
    update = engine(precision).update(first.micro_batches, first.target_tokens, 1e-3, explain)
    assert update.skipped
    assert update.culprits == (("decoder.layers.1.feed_forward.down_proj.weight",) if named else ())


def test_a_skip_names_losses_and_the_first_layers(caplog: pytest.LogCaptureFixture) -> None:
    parameters = [f"decoder.layers.{layer}.x.{kind}" for layer in range(12) for kind in ("weight", "bias")]
    cause = report_skip(update(7), result(torch.nan, True, 1.0, tuple(parameters[6:18])), 3, parameters, WORLD)
    layers = "decoder.layers.8, decoder.layers.7, decoder.layers.6, decoder.layers.5 and 2 more"
    assert cause == f"loss is not finite; the gradient of {layers} is not finite"
    assert f"update 7 skipped: {cause} (loss scale 1, 3 in a row)" in caplog.text
    assert report_skip(update(8), result(1.0, True, 256.0), 1, parameters, WORLD) == "the gradient is not finite"


def test_without_a_checkpoint_or_rollbacks_left_a_run_stops(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    words = r"^20 updates in a row, up to update 30.* \(why\), .* no checkpoint"
    with pytest.raises(TrainingError, match=words) as error:
        roll_back(store, Progress(update=30, skipped=20), "why", 2, 600, WORLD)
    assert "Start in a new --run directory" in str(error.value)
    for retries in (0, 2):
        with pytest.raises(TrainingError, match=rf"training.max_rollbacks is {retries}\..* on the same run"):
            roll_back(store, Progress(update=30, skipped=20, retries=retries), "why", retries, 600, WORLD)


def test_spikes_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = SpikeWatch(2.0)
    losses = [50.0, *[30.0] * 20, 61.0, 59.0, 30.0]
    spikes = [watch(update(number), result(loss), WORLD) for number, loss in enumerate(losses, 1)]
    (spike,) = filter(None, spikes)
    assert watch.count == 1 and spikes[21] is spike
    assert spike.text == (
        "the loss of update 22, 6.100 nats a token, is 2.0 times the median of the last 21 updates, 3"
    )
    with caplog.at_level(logging.WARNING, "deepspeed_nmt"):
        report_spike(spike, update(22), WORLD, attributed="why")
    assert f"{spike.text}; why" in caplog.text
    silent = SpikeWatch(0.0)
    for number in range(30):
        assert silent(update(number), result(1e9 if number == 29 else 1.0), WORLD) is None


def test_losses_of_memorised_text_have_no_spikes() -> None:
    watch = SpikeWatch(2.0)
    assert [watch(update(number), result(float(number == 29)), WORLD) for number in range(30)] == [None] * 30


def test_a_norm_is_a_spike_by_its_own_factor_and_also_after_a_resume() -> None:
    watch = SpikeWatch(0.0, 10.0)
    norms = [*[2.0] * 12, 19.0, 21.0]
    seen = []
    for number, norm in enumerate(norms):
        if number == 7:  # resumed
            watch = SpikeWatch(0.0, 10.0, LogState.model_validate_json(LogState(**watch.state()).model_dump_json()))
        seen.append(watch(update(number), replace(result(5.0), grad_norm=norm), WORLD))
    assert [spike is not None for spike in seen] == [False] * 13 + [True] and watch.count == 1
    assert seen[-1] is not None and seen[-1].details == {"norm": 21.0, "norm_median": 2.0}
    assert "the norm of the gradient of update 13, 21, is 10.5 times" in seen[-1].text


def spike_of(module: TrainModule, batches: Sequence[Batch], corpora: Corpora, damaged: str = "") -> tuple[str, float]:
    """Return the cause of an update that is taken for a spike, and the new sum of a weight."""
    engine, causes = PlainEngine(module, AdamConfig(), "fp32", ALONE), []
    backward, calls = engine._backward, itertools.count()

    def damage(batch: Batch, factor: float) -> Any:
        output = backward(batch, factor)
        if next(calls) == 1 and damaged == "gradient":
            module.model.get_parameter("decoder.final_norm.weight").grad[3] += 100.0  # type: ignore[index]
        return output._replace(loss=output.loss + 1.0) if damaged == "loss" else output

    engine._backward = damage  # type: ignore[method-assign]

    def attributed(result: UpdateResult) -> None:
        causes.append(attribute(module, lambda rank: batches, result, ALONE, corpora))

    engine.update(batches, batches[0].update.tokens, 1e-3, on_gradient=attributed)
    return causes[0], float(module.model.get_parameter("decoder.final_norm.weight").detach().sum())


def test_a_spike_of_data_names_the_pairs_and_changes_no_bit(
    train_module: TrainModule, batches: Sequence[Batch], corpora: Corpora
) -> None:
    same = deepcopy(train_module)
    cause, total = spike_of(train_module, batches, corpora)
    pairs = [f"the pairs {', '.join(map(str, sorted(batch.sentence_ids_B.tolist())[:8]))}" for batch in batches]
    assert cause.startswith("the same when computed again, so data or arithmetic: the largest gradient, of norm ")
    assert sum(name in cause for name in pairs) == 1 and "on rank 0, whose loss is" in cause
    PlainEngine(same, AdamConfig(), "fp32", ALONE).update(batches, batches[0].update.tokens, 1e-3)
    assert total == float(same.model.get_parameter("decoder.final_norm.weight").detach().sum())


@pytest.mark.parametrize(
    ("damaged", "words"), [("gradient", "has damaged a gradient, whose norm is"), ("loss", "computed another loss")]
)
def test_a_spike_that_another_computation_does_not_have_ends_the_run(
    train_module: TrainModule, batches: Sequence[Batch], corpora: Corpora, damaged: str, words: str
) -> None:
    before = train_module.model.get_parameter("decoder.final_norm.weight").detach().clone()
    with pytest.raises(DeviceError, match=rf"^rank 0 on \S+ \(.*\) {words}") as error:
        spike_of(train_module, batches, corpora, damaged)
    assert error.value.status == 71
    assert torch.equal(train_module.model.get_parameter("decoder.final_norm.weight"), before), "before the step"


CPU = torch.device("cpu")
CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB"


def engine_with(error: Exception | None = None) -> mock.Mock:
    """Return an engine whose probe may raise an error."""
    engine: mock.Mock = mock.create_autospec(Engine, instance=True)
    engine.device = CPU
    engine.probe.side_effect = error
    return engine


@pytest.fixture
def loader(tmp_path: Path) -> TrainLoader:
    corpus = random_corpus(tmp_path, pairs=400, vocab=50, seed=2)
    return TrainLoader.of_corpus(corpus, BatchConfig(update_tokens=900, micro_tokens=200), 3, 1, 2, Vocabulary(50))


def test_the_probe_is_the_largest_micro_batch(loader: TrainLoader, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with()
    with caplog.at_level(logging.INFO, "deepspeed_nmt"):
        probe("always", engine, loader)
    (batch,) = engine.probe.call_args.args
    assert engine.probe.call_count == 1
    some = itertools.islice(loader.updates(Cursor(), 1), 20)
    seen = max(batch.padded_tokens for update in some for batch in update.micro_batches)
    assert 0.97 * seen <= batch.padded_tokens <= 200
    assert batch.update == UpdateInfo(seed=batch.update.seed, tokens=batch.target_tokens, sentences=batch.rows)
    assert f"largest micro-batch: {batch.rows} rows x {batch.longest} tokens; peak memory" in caplog.text


def test_a_gpu_that_has_room_for_larger_micro_batches_is_told() -> None:
    config = BatchConfig(update_tokens=32768, micro_tokens=4096)
    assert has_room(config, 1, 8.0, 80.0) and has_room(config, 7, 8.0, 80.0)
    assert not has_room(config, 8, 8.0, 80.0), "an update is one micro-batch of each rank"
    assert not has_room(config, 1, 60.0, 80.0)


def chained() -> Exception:
    """Return an error that was raised while another was handled."""
    try:
        try:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        except RuntimeError as error:
            raise ValueError("backward failed") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "error", [RuntimeError("NCCL error: Call to CUDA function failed: 'out of memory'"), chained()]
)
def test_out_of_memory_is_explained(loader: TrainLoader, error: Exception) -> None:
    with pytest.raises(TrainingError) as caught:
        probe("always", engine_with(error), loader)
    message, batch = str(caught.value), loader.largest()
    assert f"{batch.rows} rows x {batch.longest} tokens, {batch.padded_tokens} of batch.micro_tokens" in message
    assert str(error) in message and "engine.recompute_decoder=1" in message


def test_other_errors_are_not_changed(loader: TrainLoader) -> None:
    with pytest.raises(RuntimeError, match="shapes do not match"):
        probe("always", engine_with(RuntimeError("shapes do not match")), loader)
