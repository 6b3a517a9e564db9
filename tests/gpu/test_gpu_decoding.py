"""Beam search on a GPU against beam search on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed_nmt.build import build_model
from deepspeed_nmt.parallel.hardware import prepare_gpu
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.models import prepare_to_decode

pytestmark = pytest.mark.gpu
LEFT_TO_RIGHT = [method for method in methods() if settings_of(method).model.left_to_right]
RULES = {"min_length": 4, "no_repeat_ngram": 2, "suppress_unknown": True}


@pytest.mark.parametrize("settings", [{"beam": 1}, {"beam": 4, **RULES}], ids=["1", "4"])
@pytest.mark.parametrize("method", LEFT_TO_RIGHT)
def test_a_gpu_finds_what_a_cpu_finds(method: str, settings: dict[str, Any]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_gpu(device)
    torch.manual_seed(3)
    model, config = build_model(settings_of(method), VOCABULARY).eval(), BeamConfig.model_validate(settings)
    with torch.no_grad():
        model.projection.weight.mul_(4.0)
    tokens = torch.randint(VOCABULARY.unk + 1, VOCABULARY.size, (3, 12, 9))
    for batch, row in ((batch, row) for batch in range(3) for row in range(12)):
        tokens[batch, row, 8 - row % 8 :] = VOCABULARY.pad
        tokens[batch, row, 8 - row % 8] = VOCABULARY.eos
    expected = [BeamSearch(config, model, VOCABULARY).search(batch) for batch in tokens]
    prepare_to_decode(model, device, "fp32")
    search = BeamSearch(config, model, VOCABULARY)
    found = [search.search(batch.to(device)) for batch in tokens]
    for ours, theirs in zip(found, expected, strict=True):
        assert [[each.tokens for each in one] for one in ours] == [[each.tokens for each in one] for one in theirs]
        scores = [[each.score for one in lists for each in one] for lists in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4, rel=1e-5)
