"""Waits of the host for a GPU, recorded on CPU tensors."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave")
"""Parts of the names of operators that wait for the device."""
COPIES = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)
PACKAGES = tuple(Path(str(find_spec(name).origin)).parent for name in ("deepspeed_nmt", "deepspeed"))  # type: ignore[union-attr]


class HostWaits(TorchDispatchMode):
    """Record the operators that would wait for a GPU, with the lines of the packages that call them.

    What has been copied to the host, and what is computed from that alone, is waited for no more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.is_paused = False
        self._on_host: dict[int, Tensor] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((arguments, options)) if isinstance(leaf, Tensor)]
        is_on_host = bool(inputs) and all(id(leaf) in self._on_host for leaf in inputs)
        name = str(function)
        if not self.is_paused and not is_on_host and any(part in name for part in WAITS):
            self.record(name)
        result = function(*arguments, **(options or {}))
        if is_on_host:
            self.keep_on_host(result)
        return result

    def record(self, name: str) -> None:
        """Record a wait."""
        frames = reversed(traceback.extract_stack())
        places = (
            f"{Path(frame.filename).relative_to(package.parent)}:{frame.lineno}"
            for frame in frames
            for package in PACKAGES
            if package in Path(frame.filename).parents
        )
        self.places.append(f"{name} {next(places, 'autograd')}")

    def keep_on_host(self, result: Any) -> None:
        """Take tensors for copies on the host."""
        self._on_host |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}

    def is_on_host(self, tensor: Any) -> bool:
        """Return True for a copy on the host."""
        return id(tensor) in self._on_host

    @contextmanager
    def paused(self) -> Any:
        """Leave out what runs inside."""
        self.is_paused = True
        yield
        self.is_paused = False


class HostCopies(TorchFunctionMode):
    """Record methods of tensors that copy to the host without an operator."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        if function in COPIES and not self._waits.is_paused:
            if not self._waits.is_on_host(arguments[0]):
                self._waits.record(function.__name__)
            self._waits.keep_on_host(result)
        return result
