"""Parts of parameters that a rank holds under ZeRO 1 and 2, as DeepSpeed records them with the parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed_nmt.engine.base import WEIGHT

GRADIENT = "gradient"
"""Name of a parameter's gradient, beside WEIGHT and the names of its moments."""


def shard(parameter: Any, which: str) -> Tensor | None:
    """Return this rank's part of a trained parameter, flat; None if it holds none.

    DeepSpeed's accessor for whole gradients is a collective, but a rank enters it only if it holds a part.

    Args:
        parameter: the parameter.
        which: WEIGHT or one of MOMENTS, fp32; or GRADIENT, between the last backward pass and the step.
    """
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    part: Tensor
    if which != GRADIENT:
        part = mapping.get_hp_fragment(None if which == WEIGHT else which)
        return part
    part = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    share = mapping.lp_fragment_address
    # In bf16 at stage 1 each rank has the whole gradient.
    return part.narrow(0, share.start, share.numel) if part.numel() == parameter.numel() else part
