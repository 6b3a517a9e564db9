"""Keep torch._dynamo, which takes more than a second to import, out of processes that compile nothing.

torch and DeepSpeed decorate functions in case somebody compiles them. The decorators import torch._dynamo when such a
function is first called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def eager(optimizer: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return a class of torch's optimizers as it is beneath its decorators."""
    names = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), {**methods, "step": step})


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Apply no such decorators in this block, unless the process compiles something already."""

    def undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
        return function if callable(function) else undecorated

    if "torch._dynamo" in sys.modules:
        yield
        return
    with (
        mock.patch.multiple(torch, _disable_dynamo=undecorated, compile=undecorated),
        mock.patch.object(torch.compiler, "disable", undecorated),
    ):
        yield
