"""Triton's JIT without a GPU: launches are bound, specialised and looked up as on a GPU, but none takes place.

Triton's interpreter must be off (TRITON_INTERPRET=0) when the kernels are imported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class StubDriver:
    """What the JIT asks a driver for, of a GPU of sm_90. Specialisation is the same for all NVIDIA GPUs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """What the JIT would compile for a launch.

    Attributes:
        kernel: the JIT function.
        signature: type by parameter.
        constants: value by place of the parameter.
        attributes: such as divisibility by 16, by place of the parameter.
        num_warps: of a program.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    num_warps: int

    @property
    def flags(self) -> dict[str, Any]:
        """Constants that the kernel declares, by name: not the arguments that are None or 1."""
        named = {self.kernel.arg_names[place[0]]: value for place, value in self.constants.items()}
        return {name: value for name, value in named.items() if name.isupper()}

    @property
    def kinds(self) -> list[tuple[str, Any]]:
        """Flags that do not depend on sizes."""
        return [flag for flag in self.flags.items() if flag[0] not in ("ROWS", "BLOCK")]

    @property
    def source(self) -> tuple[object, ...]:
        """Kernel, flags and types: variants that share them differ in the alignment of arguments alone."""
        return self.kernel.fn.__name__, *self.flags.items(), *self.signature.items(), self.num_warps

    @property
    def rows_are_aligned(self) -> bool:
        """True if all rows of a matrix are known to begin at addresses divisible by 16 elements."""
        name = next(name for name in ("stride", "width", "keys") if name in self.signature)
        return bool(self.attributes.get((self.kernel.arg_names.index(name),)))

    @property
    def unaligned(self) -> list[str]:
        """Tensors whose addresses are not known to be divisible by 16."""
        aligned = {self.kernel.arg_names[place[0]] for place, value in self.attributes.items() if value}
        return [name for name, kind in self.signature.items() if kind.startswith("*") and name not in aligned]


@dataclass
class Launches:
    """The launches since the last :meth:`clear`.

    Attributes:
        counts: launches by kernel.
        variants: by kernel and by the JIT's key.
    """

    counts: Counter[str] = field(default_factory=Counter)
    variants: dict[str, dict[str, Variant]] = field(default_factory=dict)

    def clear(self) -> None:
        """Begin to count."""
        self.counts.clear()
        self.variants.clear()

    def record(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Take a variant that the JIT is about to compile; True tells it not to, so it comes at each launch."""
        name = fn.jit_function.fn.__name__
        self.counts[name] += 1
        self.variants.setdefault(name, {})[key] = Variant(
            fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0], compile["num_warps"]
        )
        return True


def record_launches() -> Launches:
    """Have all launches of this process recorded instead of carried out."""
    launches = Launches()
    driver.set_active(StubDriver())
    triton.knobs.runtime.jit_cache_hook = launches.record
    return launches
