"""A forward pass copies nothing from the host to the device, for which it would wait."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from deepspeed_nmt.build import build_meta_model, build_objective
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of
from tests.support import batch_of


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
