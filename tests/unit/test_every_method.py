"""Every method: recomputation, weights in 16 bit, no waits for a device, and a vocabulary for each side."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from deepspeed_nmt import parity as models
from deepspeed_nmt.build import build_meta_model, build_model, build_objective
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.loader import Cursor
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of
from deepspeed_nmt.search.searches import SEARCHES
from tests.models import two_pairs
from tests.support import batch_of

V = Vocabulary(40)


def built(method: str) -> tuple[TranslationModel, Objective]:
    """Return model and objective of a case of `selftest`, with dropout."""
    config = settings_of(method, dropout=0.2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention_dropout": 0.1})})
    torch.manual_seed(1)
    return build_model(config, V), build_objective(config, V)


def gradients(method: str, every: tuple[int, int], update: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    model, objective = built(method)
    model.recompute(*every)
    assert model.recomputes_all_layers() == (every == (1, 1)), "when ZeRO-3 takes torch's own products"
    torch.manual_seed(2)
    loss = objective(model.train(), two_pairs(update)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", methods())
@pytest.mark.parametrize(("every", "update"), [((1, 1), 1), ((1, 1), 2), ((2, 0), 2), ((0, 2), 2)])
def test_loss_and_gradients_are_the_same_bits(method: str, every: tuple[int, int], update: int) -> None:
    loss, plain = gradients(method, (0, 0), update)
    again, recomputed = gradients(method, every, update)
    assert torch.equal(loss, again)
    for name, gradient in plain.items():
        if gradient is None:
            assert recomputed[name] is None
        else:
            assert recomputed[name] is not None and torch.equal(gradient, recomputed[name]), name


ROWS, LENGTH = 6, 7


@pytest.mark.parametrize("method", methods())
def test_loss_and_search_with_weights_in_bf16(method: str) -> None:
    config = settings_of(method)
    model = build_model(config, VOCABULARY).eval()
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    tokens = torch.randint(VOCABULARY.unk + 1, VOCABULARY.size, (2, ROWS, LENGTH))
    tokens[0, 1:, -2:] = VOCABULARY.pad
    batch = batch_of(tokens[0], tokens[1], tokens[1], pad=VOCABULARY.pad)
    objective = build_objective(config, VOCABULARY)
    with torch.no_grad():
        losses = [float(objective(each, batch).loss) for each in (model, narrow)]
        found = SEARCHES[config.search.name].build(config.search, narrow, VOCABULARY).search(batch.source_BS)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert len(found) == ROWS and all(hypotheses for hypotheses in found)


class CopiesFromHost(TorchFunctionMode):
    """Record calls that copy values, except single numbers, from the host to the meta device, instead of a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        first = arguments[0] if arguments else None
        from_host = first.device.type == "cpu" if isinstance(first, torch.Tensor) else function is torch.tensor
        if from_host and isinstance(out, torch.Tensor) and out.is_meta and out.dim() > 0:
            self.found.append(str(function))
        return out


@pytest.mark.parametrize("method", methods())
def test_a_micro_batch_runs_without_copies_from_the_host(method: str) -> None:
    config = settings_of(method)
    module = TrainModule(build_meta_model(config, VOCABULARY), build_objective(config, VOCABULARY)).train()
    tokens = torch.randint(VOCABULARY.unk + 1, VOCABULARY.size, (2, 6, 7))
    for update in (1, 2, 3):
        batch = batch_of(*tokens, tokens[1], pad=VOCABULARY.pad, update=update).to(torch.device("meta"))
        with CopiesFromHost() as copies:
            module(batch)
        assert not copies.found


SEPARATE = Vocabulary(47, own_source=Vocabulary(61))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of tokens that both vocabularies have."""
    path = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "VOCABULARY", Vocabulary(47))
        models.write_corpus(path, pairs=60, longest=12)
    return path


@pytest.mark.parametrize("method", models.methods())
def test_every_family_trains(method: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "VOCABULARY", SEPARATE)
    world = World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu"))
    engine = models.build(method, "plain", world, corpus)
    before = {state.name: state.weight.clone() for state in engine.state()}
    rows = {each.shape[0] for name, each in before.items() if "source_embedding" in name and "position" not in name}
    assert SEPARATE.source.size in rows and SEPARATE.size not in rows
    trained = models.train(engine, models.loader_of(corpus, world), world, 1, 2, Cursor())
    assert len(trained["loss"]) == 2 and all(map(math.isfinite, trained["loss"]))
    assert any((each.weight != before[each.name]).any() for each in engine.state())


def test_embeddings_are_tied_as_the_vocabularies_allow() -> None:
    shape = {"dim": 8, "ffn_dim": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    for shared in ("all", "decoder", "none"):
        config = validate({"model": {"name": "transformer", **shape, "share_embeddings": shared}})
        for vocabulary in (Vocabulary(47), SEPARATE):
            model = build_model(config, vocabulary)
            source, target = model.source_embedding.weight, model.target_embedding.weight
            joint = vocabulary.own_source is None and shared == "all"
            assert (source is target) == joint
            assert source.shape[0] == vocabulary.source.size and target.shape[0] == 47
            assert (model.projection.weight is not target) == (shared == "none")
