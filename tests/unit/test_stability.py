"""Messages about skipped updates, the parameters that cause them, and spikes of the loss."""

import logging
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import UpdateResult
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.errors import TrainingError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.stability import SpikeWatch, report_skip, roll_back, worth_explaining
from tests.support import random_corpus

WORLD = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
V = Vocabulary(50)


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


def test_only_unusual_skips_are_explained() -> None:
    assert [worth_explaining(skipped, 1.0) for skipped in (0, 1)] == [False, True]
    assert [worth_explaining(skipped, 1024.0) for skipped in (0, 1, 4, 5)] == [False, False, False, True]


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
