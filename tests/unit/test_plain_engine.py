"""16-bit training of the plain engine, norms by layer, and copies of micro-batches to a device."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deepspeed_nmt.core.batch import Batch, UpdateInfo
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import norms, transfer
from deepspeed_nmt.engine.contract import EngineScalars
from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.engine.optimizer import OptimizerConfig
from deepspeed_nmt.engine.plain import GradientSums, PlainEngine
from deepspeed_nmt.engine.transfer import on_device
from deepspeed_nmt.kernels.precision import Precision
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import Saved
from deepspeed_nmt.train.log import norms_by_layer
from deepspeed_nmt.train.optimizers.adafactor import AdafactorConfig
from deepspeed_nmt.train.optimizers.adam import AdamConfig, AdamWConfig
from deepspeed_nmt.train.optimizers.muon import MuonConfig
from tests.support import batch_of, random_corpus

WORLD = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
V = Vocabulary(50)


@pytest.fixture(scope="module")
def update(tmp_path_factory: pytest.TempPathFactory) -> Update:
    """An update of several micro-batches."""
    corpus = random_corpus(tmp_path_factory.mktemp("corpus"), 40, 50, 1)
    batch = BatchConfig(update_tokens=300, micro_tokens=60)
    first = next(TrainLoader.of_corpus(corpus, batch, 1, 0, 1, V).updates(Cursor(), 1))
    assert len(first.micro_batches) > 1
    return first


ADAM = AdamConfig(beta2=0.999, clip_norm=0.0)


def engine(
    precision: Precision = "bf16", weights: dict[str, torch.Tensor] | None = None, method: OptimizerConfig = ADAM
) -> PlainEngine:
    """Return an engine of a model with tied embeddings and a frozen encoder layer."""
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=2, decoder_layers=1, dropout=0.0)
    model = build_transformer(config, V)
    model.encoder.layers[0].requires_grad_(False)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    module = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))
    return PlainEngine(module, method, precision, WORLD)


def weights_of(made: PlainEngine) -> dict[str, torch.Tensor]:
    """Return copies of the weights that an engine saves."""
    return {state.name: state.weight.clone() for state in made.parameters()}


def steps(made: PlainEngine, update: Update, lr: float, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """Repeat an update and yield the saved weights after each."""
    for _ in range(count):
        made.update(update.micro_batches, update.target_tokens, lr)
        yield weights_of(made)


def test_masters_take_steps_that_sixteen_bits_round_away(update: Update) -> None:
    made = engine()
    name = "decoder.final_norm.weight"  # ones, whose neighbours in bf16 are 2^-8 and 2^-7 away
    working = dict(made.module.model.named_parameters())[name]
    after = list(steps(made, update, 1e-4, 5))
    assert working.dtype == torch.bfloat16 and bool((working == 1.0).all())
    moved = [(weights[name] - 1.0).abs().max().item() for weights in after]
    assert moved == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4], rel=0.1)
    *_, last = steps(made, update, 1e-3, 10)
    assert torch.equal(working, last[name].bfloat16()) and not bool((working == 1.0).all())


@pytest.mark.parametrize(
    ("tokens", "good", "scales"), [(1e-30, 0, [2.0, 1.0, 1.0]), (1e6, 998, [4.0, 8.0, 8.0])], ids=["overflow", "none"]
)
def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_updates(
    update: Update, tokens: float, good: int, scales: list[float]
) -> None:
    made = engine("fp16")
    made.restore(Saved(made.state()), EngineScalars(0, 4.0, good))
    results = [made.update(update.micro_batches, tokens, 0.0) for _ in scales]
    assert [result.skipped for result in results] == [tokens < 1] * 3
    assert [result.loss_scale for result in results] == [4.0, *scales[:2]]
    resumed, scalars = engine("fp16"), made.scalars()
    resumed.restore(Saved(made.state()), scalars)
    assert resumed.scalars() == scalars and scalars.loss_scale == scales[2]


def test_a_run_that_resumes_in_fp16_finds_its_own_loss_scale() -> None:
    """A scale of 1, that of every other precision, would lose small gradients for thousands of updates."""
    made = engine("fp16")
    made.restore(Saved(made.state()), EngineScalars())
    assert made.scalars().loss_scale == 2.0**16


def test_a_run_that_resumes_before_its_first_step_has_no_moments_of_weight_decay() -> None:
    made = engine(method=AdamConfig(weight_decay=0.1))
    made.restore(Saved(made.state()), EngineScalars())
    assert not any(state.any() for parameter in made.state() for state in parameter.states.values())


@pytest.mark.parametrize("method", [ADAM, MuonConfig(weight_decay=0.1), AdafactorConfig()])
def test_state_is_fp32_and_resumes_to_the_bit(update: Update, method: OptimizerConfig) -> None:
    made = engine(method=method)
    list(steps(made, update, 1e-3, 3))
    saved, scalars = Saved(made.state()), made.scalars()
    assert scalars == EngineScalars(3)
    trained = [state for state in made.state() if state.states]
    assert {t.dtype for state in trained for t in (state.weight, *state.states.values())} == {torch.float32}
    names = {state.name: tuple(state.states) for state in trained}
    moments, factors = ("exp_avg", "exp_avg_sq"), ("row_var", "col_var")
    expected = {
        "adam": (moments, moments, moments),
        "muon": (moments, ("momentum_buffer",), moments),
        "adafactor": (factors, factors, ("variance",)),
    }
    parts = ("source_embedding.weight", "decoder.layers.0.feed_forward.up_proj.weight", "decoder.final_norm.bias")
    assert tuple(names[part] for part in parts) == expected[method.name]
    held = sum(tensor.numel() for state in trained for tensor in state.states.values())
    assert held == method.state_elements(made.module), "as planned"
    resumed = engine(weights=saved.weights, method=method)
    resumed.restore(saved, scalars)
    for ours, theirs in zip(steps(made, update, 1e-3, 3), steps(resumed, update, 1e-3, 3), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_update_of_muon_is_orthogonal_in_layers_and_that_of_adamw_elsewhere(update: Update) -> None:
    lr, made = 1e-3, engine("fp32", method=MuonConfig(clip_norm=0.0))
    before = weights_of(made)
    (after,) = steps(made, update, lr, 1)
    changes = {name: (weight - before[name]) / lr for name, weight in after.items() if "encoder.layers.0" not in name}
    matrices = [name for name, change in changes.items() if ".layers." in name and change.ndim == 2]
    assert len(matrices) == 16
    for name in matrices:
        singular = torch.linalg.svdvals(changes[name] / (0.2 * max(changes[name].shape) ** 0.5))
        assert singular.max() < 1.3 and singular.median() > 0.6, name  # of Adam's signs the largest are above 5
    others = [name for name, change in changes.items() if name not in matrices and change.any()]
    assert len(others) > 20 and all(changes[name].abs().max() == pytest.approx(1.0, rel=1e-2) for name in others)


def test_frozen_weights_are_saved_as_they_were_and_tied_ones_stay_tied(update: Update) -> None:
    made = engine()
    before = weights_of(engine("fp32"))
    *_, after = steps(made, update, 1e-3, 2)
    frozen = [name for name in before if name.startswith("encoder.layers.0.")]
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    model = made.module.model
    assert model.target_embedding.weight is model.projection.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("precision", "optimizer", "decay"),
    [("fp32", AdamWConfig, 0.5), ("fp32", AdamConfig, 0.5), ("bf16", AdamWConfig, 0.0), ("fp16", AdamWConfig, 0.5)],
)
def test_the_change_is_that_of_the_weights_and_the_gradient_that_before_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision, optimizer: type[AdamConfig], decay: float
) -> None:
    monkeypatch.setattr(norms, "_AT_ONCE", 100)  # most parameters are cut
    torch.manual_seed(1)
    model = build_transformer(TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=2, decoder_layers=1), V)
    model.encoder.layers[0].requires_grad_(False)
    module = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))
    engine = PlainEngine(module, optimizer(weight_decay=decay, clip_norm=0.01), precision, WORLD)
    loader = TrainLoader.of_corpus(
        random_corpus(tmp_path, 40, 50, 1), BatchConfig(update_tokens=300, micro_tokens=60), 1, 0, 1, V
    )
    measured = 0
    for update in loader.updates(Cursor(), 1):
        before = {state.name: state.weight.clone() for state in engine.parameters()}
        result = engine.update(update.micro_batches, update.target_tokens, 2e-3, measure=update.number > 1)
        assert (result.squares is None) == (update.number == 1 or result.skipped)
        if result.squares is not None:
            measured += 1
            after = {state.name: state.weight for state in engine.parameters()}
            trained = [name for name in before if not name.startswith("encoder.layers.0.")]
            expected = {name: float((after[name] - before[name]).norm()) for name in trained}
            found = {name: math.sqrt(value) for name, value in result.squares.change.items()}
            assert found == pytest.approx(expected, rel=1e-3) and min(expected.values()) > 1e-4
            assert list(result.squares.gradient) == trained
            assert math.sqrt(sum(result.squares.gradient.values())) == pytest.approx(result.grad_norm, rel=1e-5)
        if update.number == 4:
            break
    assert measured > 1


@pytest.mark.parametrize("collected_bytes", [0, 100, 1 << 20])  # none, some and all are collected
def test_gradients_of_16_bit_are_added_in_fp32_collected_or_alone(collected_bytes: int) -> None:
    torch.manual_seed(1)
    weights = [nn.Parameter(torch.randn(size, dtype=torch.bfloat16)) for size in (3, 40, 60, 7)]
    masters = {weight: nn.Parameter(weight.detach().float()) for weight in weights}
    sums = GradientSums(masters, collected_bytes)
    slopes = [[torch.randn_like(weight) for weight in weights] for _ in range(3)]
    for micro_batch in slopes:
        sum((weight * slope).sum() for weight, slope in zip(weights, micro_batch, strict=True)).backward()
        sums.flush()
    for weight, *own in zip(weights, *slopes, strict=True):
        assert torch.equal(masters[weight].grad, sum(slope.float() for slope in own)) and weight.grad is None


def test_norms_are_summed_by_layer_under_tags_that_count_from_one() -> None:
    names = ["source_embedding.weight", "encoder.layers.0.a.weight", "encoder.layers.0.b.bias"]
    names += ["decoder.layers.11.a.weight", "decoder.final_norm.weight"]
    squares = Squares(dict(zip(names, (4.0, 9.0, 16.0, 1.0, 0.0), strict=True)), dict.fromkeys(names, 1.0))
    found = norms_by_layer(squares)
    paths = ["source_embedding", "encoder/layer_01", "decoder/layer_12", "decoder/final_norm"]
    assert list(found) == [f"norm/{kind}/{path}" for kind in ("gradient", "update") for path in paths]
    assert [found[f"norm/gradient/{path}"] for path in paths] == [2.0, 5.0, 1.0, 0.0]
    assert found["norm/update/encoder/layer_01"] == pytest.approx(math.sqrt(2.0))


BATCHES = [
    replace(batch_of(*torch.full((3, 2, 2), number)), update=UpdateInfo(micro_batch=number)) for number in range(3)
]


def test_on_a_gpu_the_next_batch_is_copied_before_this_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the calls of CUDA by notes of their order."""
    done: list[str] = []

    def to(batch: Batch, device: torch.device) -> Batch:
        assert device.type == "cuda"
        done.append(f"copy {batch.update.micro_batch}")
        return batch

    computing = SimpleNamespace(wait_stream=lambda stream: done.append("wait"))
    monkeypatch.setattr(Batch, "to", to)
    monkeypatch.setattr(transfer, "_copy_stream", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: done.append("held"))
    for batch in on_device(BATCHES, torch.device("cuda")):
        done.append(f"use {batch.update.micro_batch}")
    assert done.count("held") == 3 * 4, "the caching allocator must know of the second stream"
    assert [each for each in done if each != "held"] == [
        *("copy 0", "wait", "copy 1", "use 0"),
        *("wait", "copy 2", "use 1"),
        *("wait", "use 2"),
    ]


def test_gradients_of_micro_batches_are_added_in_fp32(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    parts: list[torch.Tensor] = []
    weight = made.module.model.decoder.layers[0].feed_forward.up_proj.weight
    weight.register_hook(lambda gradient: parts.append(gradient.clone()))
    found: list[torch.Tensor] = []
    step = made._optimizer.step

    def look() -> None:
        masters = dict(zip(made._named, made._optimizer.param_groups[0]["params"], strict=True))
        found.append(masters["decoder.layers.0.feed_forward.up_proj.weight"].grad.clone())
        step()

    monkeypatch.setattr(made._optimizer, "step", look)
    made.update(update.micro_batches, update.target_tokens, 1e-3)
    assert len(parts) == len(update.micro_batches) and parts[0].dtype == torch.bfloat16
    total = torch.stack([part.float() for part in parts]).sum(0)
    torch.testing.assert_close(found[0], total, rtol=1e-6, atol=0)
    assert not torch.equal(found[0], found[0].bfloat16().float())
    assert weight.grad is None
