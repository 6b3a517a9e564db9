"""Attribution of faults: what the ranks' results say, and that computing an update again gives the same bits."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.errors import DeviceError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.faults import Replay, Witness, attribute, cause_of, check_devices, check_replicas, replay
from deepspeed_nmt.train.optimizers.adam import AdamConfig
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
