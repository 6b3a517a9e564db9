"""A stack of layers: weights plus an order.

Legend: B batch, T length, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.layers import Context
from deepspeed_nmt.nn.sublayer import LayerNorm


class LayerStack(nn.Module):
    """Applies layers in a given order; a layer named twice is applied twice with the same weights.

    Args:
        layers: the layers that have weights of their own.
        order: which of them to apply, one after the other; default each once.
        final_norm: applied to the state at every exit (pre-norm stacks need it), or None.
    """

    def __init__(
        self, layers: Sequence[nn.Module], order: Sequence[int] | None = None, final_norm: LayerNorm | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.order = tuple(range(len(layers)) if order is None else order)
        assert all(0 <= index < len(layers) for index in self.order)
        self.final_norm = final_norm

    @property
    def applications(self) -> int:
        """How many layers an input passes through."""
        return len(self.order)

    def forward(
        self,
        x_BTD: Tensor,
        context: Context,
        cache: DecoderCache | None = None,
        exits: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The states after the given numbers of applications (default: after all), each normalised.

        Only as many layers as the deepest exit needs are run.

        Shape: (B,T,D) -> one (B,T,D) per exit
        """
        wanted = (self.applications,) if exits is None else tuple(exits)
        states: dict[int, Tensor] = {0: x_BTD}
        for number, index in enumerate(self.order[: max(wanted)], 1):
            x_BTD = self.layers[index](x_BTD, context, None if cache is None else cache.layers[number - 1])
            if number in wanted:
                states[number] = x_BTD
        return [states[number] if self.final_norm is None else self.final_norm(states[number]) for number in wanted]
