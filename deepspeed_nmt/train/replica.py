"""Unsharded copy of the model on every rank, for validation: the engine's own module may be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.engine.base import Engine


class Replica:
    """Unsharded copy of the model in eval mode; it is on the engine's device only while it is in use.

    Args:
        model: the copy; its weights are overwritten.
        engine: source of the weights.
        dtype: of the copy's weights.
    """

    def __init__(self, model: TranslationModel, engine: Engine, dtype: torch.dtype = torch.float32) -> None:
        assert not list(model.buffers()), "weights are all that the engine gives"
        self._model = model.to("cpu", dtype).eval()
        self._engine = engine
        self._update: int | None = None

    @contextmanager
    def at(self, update: int) -> Iterator[TranslationModel]:
        """Yield the model after ``update``, the engine's newest; weights are gathered once for each update.

        All ranks call it together.
        """
        device = self._engine.device
        try:
            if self._update != update:
                self._update = None
                if device.type != "cpu":  # old weights are not copied to a GPU, only to be overwritten there
                    self._model.to_empty(device=device)
                own = dict(self._model.named_parameters())
                with torch.no_grad():
                    for state in self._engine.parameters():
                        own[state.name].copy_(state.weight)
                self._update = update
            self._model.to(device)
            yield self._model
        finally:
            self._model.cpu()
