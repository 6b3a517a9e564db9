"""What every translation model can do, whatever is inside it.

Legend: B sentences, S source length, T target length, D model width, V vocabulary, R rows = B x beam.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.embedding import Projection
from deepspeed_nmt.nn.layers import CrossAttending, Draw
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.nn.sublayer import Residual

TOP = "top"
"""Name of the exit at the top of encoder and decoder, which every model has."""


def exit_name(encoder: int, decoder: int) -> str:
    """Name of the exit after so many stages of the encoder and of the decoder."""
    return f"{encoder}-{decoder}"


@dataclass(frozen=True)
class Memory:
    """The encoded source.

    Attributes:
        states_BSD: the encoder's states.
        mask: bool (B,1,1,S), True where a position is not padding; None when none is.
        below_BSD: states that lower decoder layers attend to instead, where a model has two modules.
    """

    states_BSD: Tensor
    mask: Tensor | None
    below_BSD: Tensor | None = None

    def select(self, sentences_B: Tensor) -> Memory:
        """The memory of some of the sentences, in the given order."""
        return Memory(
            self.states_BSD.index_select(0, sentences_B),
            None if self.mask is None else self.mask.index_select(0, sentences_B),
            None if self.below_BSD is None else self.below_BSD.index_select(0, sentences_B),
        )


class DecodableModel(nn.Module, ABC):
    """What a search needs: it encodes a source, then gives the next token's logits, position by position.

    Attributes:
        vocab_size: V.
        pad: the padding token.
        mask: the token that stands for one to be guessed, which is never predicted; None where there is none.
        longest_source, longest_target: the most positions that a sentence may have; None: any number.
    """

    vocab_size: int
    pad: int
    mask: int | None = None
    longest_source: int | None = None
    longest_target: int | None = None

    @abstractmethod
    def encode(self, source_BS: Tensor, padded: bool = True) -> Memory:
        """Encode sources. Shape: (B,S) -> (B,S,D)

        Args:
            padded: False promises that no position is padding.
        """

    @abstractmethod
    def begin(self) -> DecoderCache:
        """An empty cache for :meth:`step`."""

    @abstractmethod
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        """Logits of the token after ``tokens_R``, the newest tokens of each hypothesis.

        The first step takes one row per sentence; ``cache.select`` then widens it to several, which stay adjacent and
        equally many for every sentence. Shape: (R,) -> (R,V)
        """

    @abstractmethod
    def at_exit(self, name: str) -> DecodableModel:
        """The model that decodes from an exit: it shares the weights, and has no more layers than it needs.

        Raises:
            ConfigError: if there is no such exit.
        """


class TranslationModel(DecodableModel):
    """An encoder, a decoder with one or more exits, and a projection to the vocabulary.

    An *exit* is a place where decoder states can be read as predictions. Objectives sum over exits, a search decodes
    from one.

    Attributes:
        projection: from decoder states to the vocabulary, shared by all exits.
    """

    projection: Projection

    @property
    @abstractmethod
    def stages(self) -> tuple[int, int]:
        """How many exits the encoder and the decoder have: after each layer, or each loop over shared layers."""

    @property
    @abstractmethod
    def stacks(self) -> tuple[list[LayerStack], list[LayerStack]]:
        """The stacks that are trained, of the encoder's side and of the decoder's."""

    @abstractmethod
    def encode(self, source_BS: Tensor, padded: bool = True, exits: Sequence[int] | None = None) -> Memory:
        """Encode sources. Shape: (B,S) -> (B,S,D), or (E B,S,D) for E exits

        Args:
            padded: False promises that no position is padding.
            exits: stages, from 1, whose states are wanted, as blocks of rows; default the top.
        """

    @abstractmethod
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Decoder states of whole sentences at each exit. Shape: (B,T) -> (B,T,D) each

        Args:
            draw: what the random choices of a method are functions of; needed in training.
            exits: stages, from 1, whose states are wanted; default the top.
        """

    @abstractmethod
    def at_exit(self, name: str) -> TranslationModel: ...

    def recompute(self, encoder_every: int, decoder_every: int) -> None:
        """Have every so manieth layer application recomputed in the backward pass; see :class:`LayerStack`."""
        for stacks, every in zip(self.stacks, (encoder_every, decoder_every), strict=True):
            for stack in stacks:
                stack.recompute_every = every

    def cross_attending(self) -> dict[int, tuple[Residual | None, Residual, Residual | None]]:
        """For each decoder layer that has cross-attention, by its number from 1: the connections around its
        self-attention, its cross-attention and its feed-forward network. Shape of what these add: (B,T,D)
        """
        layers = [module for module in self.modules() if isinstance(module, CrossAttending)]
        return {
            number: (layer.self_residual, layer.cross_residual, layer.feed_forward_residual)
            for number, layer in enumerate(layers, 1)
            if layer.cross_residual is not None
        }

    def source_mask(self, source_BS: Tensor, padded: bool) -> Tensor | None:
        """What :class:`Memory` has as its mask. Shape: (B,S) -> (B,1,1,S)"""
        return source_BS.ne(self.pad)[:, None, None, :] if padded else None

    def load_pretrained(self) -> bool:
        """Load weights that a new run starts with and that were trained elsewhere; whether there are any.

        Raises:
            ConfigError: if they cannot be had, or do not fit.
        """
        return False

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """What one pass over a micro-batch gives, by name: the decoder states at TOP, (B,T,D), and whatever else the
        model's likelihood asks for.
        """
        return {TOP: self(batch)}

    def forward(self, batch: Batch) -> Tensor:
        """Decoder states at the top, teacher-forced. Shape: -> (B,T,D)"""
        memory = self.encode(batch.source_BS, padded=batch.source_padded)
        return self.decode(batch.target_input_BT, memory, Draw(batch.update.seed, batch.update.number))[0]
