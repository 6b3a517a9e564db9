"""Faults: skipped updates, spikes, lack of memory, and devices that contradict one another."""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import Engine, UpdateResult
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.errors import DeviceError, TrainingError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.faults import Replay, Witness, attribute, cause_of, check_devices, check_replicas, replay
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from deepspeed_nmt.train.out_of_memory import probe
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, roll_back
from tests.support import random_corpus

ALONE = World(0, 1, 0, torch.device("cpu"))
V = Vocabulary(50)


@pytest.fixture
def train_module() -> TrainModule:
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=1, decoder_layers=2, dropout=0.1)
    return TrainModule(build_transformer(config, V), Objective(LabelSmoothed(0.1, V.pad)))


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Batch]:
    """The micro-batches of an update, more than one."""
    corpus = random_corpus(tmp_path_factory.mktemp("corpus"), 40, 50, 1)
    config = BatchConfig(update_tokens=300, micro_tokens=60)
    return next(TrainLoader.of_corpus(corpus, config, 1, 0, 1, V).updates(Cursor(), 1)).micro_batches


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


def test_an_update_computed_again_has_the_same_bits(train_module: TrainModule, batches: Sequence[Batch]) -> None:
    first = replay(train_module, batches, 0, 1.0, ALONE.device)
    assert first == replay(train_module, batches, 0, 1.0, ALONE.device) and first.is_finite
    assert first.gradients != replay(train_module, batches, 1, 1.0, ALONE.device).gradients, "another rank's dropout"
    assert all(parameter.grad is None for parameter in train_module.parameters())
    check_replicas(train_module, ALONE)
    name = "decoder.final_norm.weight"
    weight = train_module.model.get_parameter(name).detach()
    weight[5:6].view(torch.int32).bitwise_xor_(1 << 9)
    assert first != replay(train_module, batches, 0, 1.0, ALONE.device), "of a bit in a weight"
    assert not cause_of(train_module, batches, ALONE)
    weight[5] = torch.nan
    assert cause_of(train_module, batches, ALONE) == f"the weight {name} is not finite"


def test_the_module_and_the_pairs_at_fault_are_named(train_module: TrainModule, batches: Sequence[Batch]) -> None:
    seen: list[Batch] = []
    train_module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))

    def spoil(layer: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if seen[-1].update.micro_batch == 1 else output

    train_module.model.get_submodule("decoder.layers.0").register_forward_hook(spoil)
    engine = PlainEngine(train_module, AdamConfig(), "fp32", ALONE)
    result = engine.update(batches, batches[0].update.tokens, 1e-3)
    assert result.skipped
    cause = attribute(train_module, lambda rank: batches, result, ALONE)
    assert "decoder.layers.0" in cause and "rank 0" in cause
    assert f"pairs {min(batches[1].sentence_ids_B.tolist())}" in cause


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
        roll_back(store, Progress(update=30, skipped=20), "why", 2, WORLD)
    assert "Start in a new --run directory" in str(error.value)
    for retries in (0, 2):
        with pytest.raises(TrainingError, match=rf"training.max_rollbacks is {retries}\..* on the same run"):
            roll_back(store, Progress(update=30, skipped=20, retries=retries), "why", retries, WORLD)


def test_spikes_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    watch = SpikeWatch(2.0)
    losses = [50.0, *[30.0] * 20, 61.0, 59.0, torch.nan, 30.0]
    with caplog.at_level(logging.WARNING, "deepspeed_nmt"):
        for number, loss in enumerate(losses, 1):
            watch(update(number), result(loss, skipped=loss != loss), WORLD)
    assert watch.count == 1 and len(caplog.records) == 1
    assert "the loss of update 22, 6.100 nats a token, is 2.0 times the median of the last 21 updates" in caplog.text
    silent = SpikeWatch(0.0)
    for number in range(30):
        silent(update(number), result(1e9 if number == 29 else 1.0), WORLD)
    assert silent.count == 0


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
