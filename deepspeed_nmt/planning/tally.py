"""Counter of memory and matrix products of a computation, while it runs.

On the meta device tensors have shapes and no data, so a model of any size can be counted on any machine.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


class _Result(NamedTuple):
    """Result of an operation on meta tensors.

    Attributes:
        outputs: shape, strides and dtype of each tensor; None if the result cannot be repeated.
        single: True if the result is a tensor, False if it is a tuple of tensors.
    """

    outputs: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...] | None
    single: bool

    @classmethod
    def of(cls, result: Any, inputs: list[Tensor]) -> _Result:
        """Describe a result. It cannot be repeated if it shares memory with an input, or is not all tensors."""
        single = isinstance(result, Tensor)
        tensors = (result,) if single else result
        if not isinstance(tensors, tuple) or not all(isinstance(each, Tensor) for each in tensors):
            return cls(None, single)
        shared = {tensor.untyped_storage()._cdata for tensor in inputs}
        if any(each.untyped_storage()._cdata in shared or each.device.type != "meta" for each in tensors):
            return cls(None, single)
        return cls(tuple((each.shape, each.stride(), each.dtype) for each in tensors), single)

    def again(self) -> Any:
        """Return new tensors like those of the result."""
        assert self.outputs is not None
        tensors = tuple(
            torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in self.outputs
        )
        return tensors[0] if self.single else tensors


def _tensors(values: tuple[Any, ...] | list[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, which can be lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


@functools.cache
def _is_pure(func: Any) -> bool:
    """Return True if an operation's declaration says that it changes no tensor and returns no view of one."""
    return not func._schema.is_mutable and all(each.alias_info is None for each in func._schema.returns)


def _described(value: Any) -> Any:
    """Return arguments with the layout of tensors in their place, which can be compared and hashed."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return type(value), value  # True, 1 and 1.0 are equal


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
        self._results: dict[Any, _Result] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        for tensor in inputs:
            self._note(tensor, made_inside=False)
        result = self._result(func, args, kwargs, inputs)
        count = _FLOPS.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args)
        for tensor in _tensors((result,)):
            self._note(tensor, made_inside=True)
        return result

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Any:
        """Call an operation, or repeat its result for meta tensors of the same shapes: layers are much alike.

        torch derives shapes in Python, which takes ten times as long.
        """
        if not _is_pure(func) or any(tensor.device.type != "meta" for tensor in inputs):
            return func(*args, **kwargs)
        key = (func, _described(args), _described(tuple(kwargs.items())))
        made = self._results.get(key)
        if made is None:
            result = func(*args, **kwargs)
            self._results[key] = _Result.of(result, inputs)
            return result
        return made.again() if made.outputs is not None else func(*args, **kwargs)

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
