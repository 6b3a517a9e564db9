"""Beam search on a GPU, in CUDA graphs, against beam search on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_nmt.build import build_model
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.precision import prepare_to_decode
from deepspeed_nmt.search.static_beam import StaticBeamSearch
from deepspeed_nmt.selftest.models import VOCABULARY, methods, settings_of

pytestmark = pytest.mark.gpu
LEFT_TO_RIGHT = [method for method in methods() if settings_of(method).model.left_to_right]
RULES = {"min_length": 4, "no_repeat_ngram": 2, "suppress_unknown": True}


@pytest.mark.parametrize("settings", [{"beam": 1}, {"beam": 4, **RULES}], ids=["1", "4"])
@pytest.mark.parametrize("method", LEFT_TO_RIGHT)
def test_graphs_find_what_a_cpu_finds(method: str, settings: dict[str, Any]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(3)
    model, config = build_model(settings_of(method), VOCABULARY).eval(), BeamConfig.model_validate(settings)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    tokens = torch.randint(VOCABULARY.unk + 1, VOCABULARY.size, (3, 12, 9))
    for batch, row in ((batch, row) for batch in range(3) for row in range(12)):
        tokens[batch, row, 8 - row % 8 :] = VOCABULARY.pad
        tokens[batch, row, 8 - row % 8] = VOCABULARY.eos
    expected = [BeamSearch(config, model, VOCABULARY).search(batch) for batch in tokens]
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_to_decode(model, device, "fp32")
    search = BeamSearch(config, model, VOCABULARY)
    found = [search.search(batch.to(device)) for batch in tokens]
    for ours, theirs in zip(found, expected, strict=True):
        assert [[each.tokens for each in one] for one in ours] == [[each.tokens for each in one] for one in theirs]
        scores = [[each.score for one in lists for each in one] for lists in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4, rel=1e-5)
    static = search._static
    assert isinstance(static, StaticBeamSearch) and len(static.replays) > 0, "no graph was captured"
    with torch.inference_mode():
        static.step.move(2 * static.step.bucket.positions, None)  # room for a step after the last
        torch.cuda.set_sync_debug_mode("error")
        try:
            static.step.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_graphs_are_recorded_again_after_the_caches_have_grown() -> None:
    torch.manual_seed(4)
    model = build_model(settings_of("vanilla"), VOCABULARY).eval()
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_to_decode(model, device, "fp32")
    search = BeamSearch(BeamConfig(beam=2), model, VOCABULARY)
    moves = []
    for sentences, length in ((2, 6), (12, 20), (40, 50)):
        tokens = torch.randint(VOCABULARY.unk + 1, VOCABULARY.size, (sentences, length), device=device)
        tokens[:, -1] = VOCABULARY.eos
        for _ in range(3):
            search.search(tokens)
        static = search._static
        assert isinstance(static, StaticBeamSearch)
        assert len(static.replays) > 0, f"no graph was captured for {sentences} sentences"
        before = static.replays.replayed
        search.search(tokens)
        assert static.replays.replayed > before
        moves.append(static._store.moves)
    assert moves[0] < moves[1] < moves[2], "the caches must grow between the batches"
