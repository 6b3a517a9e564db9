"""Counter of memory and matrix products of a computation, while it runs.

On the meta device tensors have shapes and no data, so a model of any size can be counted on any machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_aten = torch.ops.aten


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of tensor memory and of matrix products inside its ``with`` block.

    Tensors made before the block are not counted; gradients made inside are.

    Attributes:
        bytes: memory held now by tensors made inside.
        peak_bytes: maximum of ``bytes``.
        flops: operations of matrix products; a multiplication and an addition count as two.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak_bytes = 0
        self.flops = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._note(tensor, made_inside=False)
        result = func(*args, **(kwargs or {}))
        count = _FLOPS.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args)
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._note(tensor, made_inside=True)
        return result

    def _note(self, tensor: Tensor, made_inside: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if made_inside else 0
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.bytes -= size
        self._known.discard(key)


def _product(a: Tensor, b: Tensor, *rest: Any) -> int:
    """Count the operations of (..., n, k) times (..., k, m)."""
    return 2 * a.numel() * b.shape[-1]


def _added_product(c: Tensor, a: Tensor, b: Tensor, *rest: Any) -> int:
    return _product(a, b)


_FLOPS: dict[Any, Callable[..., int]] = {
    _aten.mm: _product,
    _aten.bmm: _product,
    _aten.addmm: _added_product,
    _aten.addmm_: _added_product,
    _aten.baddbmm: _added_product,
}
