"""Norms of an update by layer, for the log.

Tags end in the path of the layer or module in the model, ``encoder/layer_01``, ``source_embedding`` or
``decoder/final_norm``. Layers are counted from 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.train.stability import layer_of

GRADIENT, CHANGE = "norm/gradient", "norm/update"


def norms_by_layer(squares: Squares) -> dict[str, float]:
    """Return the norms of gradient and change of each layer, by tag."""
    return {**_norms(GRADIENT, squares.gradient), **_norms(CHANGE, squares.change)}


def _norms(prefix: str, squares: Mapping[str, float]) -> dict[str, float]:
    total: dict[str, float] = {}
    for name, value in squares.items():
        tag = f"{prefix}/{_path(layer_of(name))}"
        total[tag] = total.get(tag, 0.0) + value
    return {tag: math.sqrt(value) for tag, value in total.items()}


def _path(layer: str) -> str:
    """Return the end of a tag for a layer or module, by its name in the model."""
    return re.sub(r"layers\.(\d+)", lambda found: f"layer_{int(found[1]) + 1:02}", layer).replace(".", "/")
