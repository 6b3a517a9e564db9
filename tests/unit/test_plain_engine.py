"""16-bit training of the plain engine: fp32 masters, fp32 gradients, tied and frozen weights."""

from collections.abc import Iterator

import pytest
import torch

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import EngineScalars
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.kernels.precision import Precision
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import Saved
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import random_corpus

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


def engine(precision: Precision = "bf16", weights: dict[str, torch.Tensor] | None = None) -> PlainEngine:
    """Return an engine of a model with tied embeddings and a frozen encoder layer."""
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=2, decoder_layers=1, dropout=0.0)
    model = build_transformer(config, V)
    model.encoder.layers[0].requires_grad_(False)
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    module = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))
    return PlainEngine(module, AdamConfig(beta2=0.999, clip_norm=0.0), precision, WORLD)


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


def test_state_is_fp32_and_resumes_to_the_bit(update: Update) -> None:
    made = engine()
    list(steps(made, update, 1e-3, 3))
    saved, scalars = Saved(made.state()), made.scalars()
    assert scalars == EngineScalars(3, 1.0, 0)
    trained = [state for state in made.state() if state.states]
    assert {t.dtype for state in trained for t in (state.weight, *state.states.values())} == {torch.float32}
    resumed = engine(weights=saved.weights)
    resumed.restore(saved, scalars)
    for ours, theirs in zip(steps(made, update, 1e-3, 3), steps(resumed, update, 1e-3, 3), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_frozen_weights_are_saved_as_they_were_and_tied_ones_stay_tied(update: Update) -> None:
    made = engine()
    before = weights_of(engine("fp32"))
    *_, after = steps(made, update, 1e-3, 2)
    frozen = [name for name in before if name.startswith("encoder.layers.0.")]
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    model = made.module.model
    assert model.target_embedding.weight is model.projection.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("most", [300, 10**6])
def test_collected_gradients_have_the_same_sums(update: Update, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Some are added on their own, some in several groups; or all together."""
    one, other = engine(), engine()
    assert other._sums is not None
    other._sums._most = most
    groups: list[int] = []
    flush = other._sums.flush

    def count() -> None:
        assert other._sums is not None and other._sums._bytes <= most
        groups.append(len(other._sums._collected))
        flush()

    monkeypatch.setattr(other._sums, "flush", count)
    for batch in update.micro_batches:
        for made in (one, other):
            made._backward(batch, 1.0 / update.target_tokens)
    for ours, theirs in zip(one._gradients(), other._gradients(), strict=True):
        assert torch.equal(ours, theirs)
    trained = len(one._named)
    if most > 300:
        assert groups == [trained] * len(update.micro_batches)
    else:
        assert len(groups) > len(update.micro_batches) and max(groups) > 2 and sum(groups) < len(groups) * trained
    assert all(weight.grad is None for weight in other._named.values()) and not other._sums._collected
