"""The model whole, on every rank: what is judged is never the engine's own, perhaps sharded, module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.engine.base import Engine


class Replica:
    """A copy of the model that no engine has sharded, in eval mode. It is on the engine's device only while in use.

    Args:
        model: the copy; its weights are overwritten.
        engine: whose weights are copied.
    """

    def __init__(self, model: TranslationModel, engine: Engine) -> None:
        self._model = model.cpu().eval()
        self._engine = engine
        self._update: int | None = None

    @contextmanager
    def at(self, update: int) -> Iterator[TranslationModel]:
        """The model after ``update``, the engine's newest. All ranks ask together; asking again gathers nothing."""
        if self._update != update:
            own = dict(self._model.named_parameters())
            with torch.no_grad():
                for state in self._engine.parameters():
                    own[state.name].copy_(state.weight)
            self._update = update
        self._model.to(self._engine.device)
        try:
            yield self._model
        finally:
            self._model.cpu()
