"""Validation in 16 bit: loss and search of each method with a copy in bf16."""

import copy

import pytest
import torch

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of
from deepspeed_nmt.search import SEARCHES
from tests.support import batch_of

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
