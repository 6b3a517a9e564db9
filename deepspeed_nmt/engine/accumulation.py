"""Addition of the micro-batches' 16-bit gradients to fp32 gradients, by few kernels.

Added as soon as it is there, each gradient takes a kernel of its own: 15 in an encoder layer and micro-batch, most of
which take less time than their launch. On a GPU the small ones are collected instead, and added together. The sums
are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

COLLECTED_BYTES = 16 * 2**20
"""Most bytes of 16-bit gradients that are collected on a GPU."""
BUFFER_BYTES = 3 * COLLECTED_BYTES
"""Most memory that gradients take on a GPU while they are collected and added: in 16 bit, and then also in fp32."""
_ALONE_BYTES = COLLECTED_BYTES // 4
"""Bytes of a 16-bit gradient from which on it is added on its own: that takes longer than a launch."""


class GradientSums:
    """Adder of the gradients of 16-bit weights to the fp32 gradients of their masters.

    It takes a weight's gradient as soon as the backward pass has it, and frees it once it is added. Call
    :meth:`flush` after each backward pass.

    Args:
        masters: the fp32 copy of each weight.
        collected_bytes: most bytes of gradients to collect; 0 adds each on its own.
    """

    def __init__(self, masters: Mapping[nn.Parameter, nn.Parameter], collected_bytes: int) -> None:
        self._masters = masters
        self._most = collected_bytes
        self._collected: dict[nn.Parameter, Tensor] = {}
        self._bytes = 0
        for weight in masters:
            weight.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Add the gradients that are collected."""
        first = [(master, new) for master, new in self._collected.items() if master.grad is None]
        later = [(master, new) for master, new in self._collected.items() if master.grad is not None]
        self._collected, self._bytes = {}, 0
        if first:
            self._widen(first, [_own_gradient(master) for master, _ in first])
        if later:
            # Lists of tensors are added by few kernels if all have one dtype, but copied whatever theirs.
            wide = [torch.empty_like(master) for master, _ in later]
            self._widen(later, wide)
            torch._foreach_add_([_own_gradient(master) for master, _ in later], wide)

    def _take(self, weight: Tensor) -> None:
        """Collect or add the new gradient of a weight."""
        assert isinstance(weight, nn.Parameter) and weight.grad is not None
        master, new = self._masters[weight], weight.grad
        weight.grad = None
        if new.nbytes >= min(_ALONE_BYTES, self._most):
            if master.grad is None:
                master.grad = new.to(master.dtype)
            else:
                master.grad.add_(new)
            return
        if self._bytes + new.nbytes > self._most:
            self.flush()
        self._collected[master] = new
        self._bytes += new.nbytes

    @staticmethod
    def _widen(pairs: Sequence[tuple[nn.Parameter, Tensor]], wide: list[Tensor]) -> None:
        torch._foreach_copy_(wide, [new for _, new in pairs])


def _own_gradient(master: nn.Parameter) -> Tensor:
    """Return the gradient of a master, which is allocated if there is none."""
    if master.grad is None:
        master.grad = torch.empty_like(master)
    return master.grad
