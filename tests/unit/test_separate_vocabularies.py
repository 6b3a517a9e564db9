"""Models of all families with a vocabulary for each side."""

import math
from pathlib import Path

import pytest
import torch

from deepspeed_nmt import parity as models
from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.loader import Cursor
from deepspeed_nmt.parallel.world import World

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
