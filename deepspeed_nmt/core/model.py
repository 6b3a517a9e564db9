"""Interface of translation models.

Legend: B sentences, S source length, T target length, D model width, V vocabulary, R rows = B x beam.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.description import NotStandardError, StandardTransformer
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.kernels.segments import Segments, mask_between
from deepspeed_nmt.native.decoder import NativeDecoder, NativeSplit
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.nn.compiled import compile_layers
from deepspeed_nmt.nn.embedding import Projection
from deepspeed_nmt.nn.layers import AttentionRecord, Context, DecoderBlock, Draw
from deepspeed_nmt.nn.linear import pack_weights, packing_of
from deepspeed_nmt.nn.stack import LayerStack

Exits = Sequence[int] | None
"""Stages of an encoder or decoder, counted from 1; None: the last alone."""
TOP = "top"
"""Name of the exit after the last layers of encoder and decoder, which every model has."""


def exit_name(encoder: int, decoder: int) -> str:
    """Return the name of the exit after stage ``encoder`` of the encoder and stage ``decoder`` of the decoder."""
    return f"{encoder}-{decoder}"


@dataclass(frozen=True)
class Memory:
    """The encoded source.

    Attributes:
        states_BSD: states of the encoder.
        mask: bool (B,1,1,S), True for positions that are not padding; the sentences of packed rows; None if no
            position is padding.
        below_BSD: states to which the bottom decoder attends, for a model of two modules; None for other models.
        record: the decoder layers whose attention weights are to be recorded; None for none.
    """

    states_BSD: Tensor
    mask: Tensor | Segments | None
    below_BSD: Tensor | None = None
    record: AttentionRecord | None = None

    def select(self, sentences_B: Tensor) -> Memory:
        """Return the memory of the sentences (in the packed layout, the rows) with the given indices."""
        return Memory(
            self.states_BSD.index_select(0, sentences_B),
            self.mask.index_select(0, sentences_B) if isinstance(self.mask, Tensor) else self.mask,
            None if self.below_BSD is None else self.below_BSD.index_select(0, sentences_B),
        )

    def context(self, draw: Draw | None = None, segments: Segments | None = None) -> Context:
        """Return what the layers of a decoder share; ``segments`` are the sentences of packed targets."""
        target_mask = mask_between(segments, segments)
        return Context(mask_between(segments, self.mask), self.states_BSD, draw, target_mask, record=self.record)


class Rates(NamedTuple):
    """Factors of a parameter on the settings of the optimizer that have the same names."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


class SplitDecoder(ABC):
    """A decoder in two parts: its layers up to an exit, which predicts as well, and those above it.

    The lower part may be several positions ahead of the upper one, which then reads them all at once.
    """

    @property
    @abstractmethod
    def weights(self) -> tuple[int, int, int]:
        """Numbers of weights of the lower part, of the upper part, and of the projection after each of them."""

    def natively(self, steps: int, memory: Memory, cache: DecoderCache) -> NativeSplit | None:
        """Return native code that decodes one sentence by both parts, which have read the same positions.

        There is room for ``steps`` positions more. None if the model has none. Afterwards call ``cache.take``.
        """
        return None

    @abstractmethod
    def lower(self, tokens_B: Tensor, positions_B: Tensor, memory: Memory, cache: DecoderCache) -> tuple[Tensor, ...]:
        """Read the next token of each sentence at its position, and return the states that the upper part reads.

        Shape: (B,), (B,) -> (B,1,D) each
        """

    @abstractmethod
    def predict(self, states: Sequence[Tensor]) -> Tensor:
        """Compute the logits of the exit. Shape: (B,1,D) each -> (B,V)."""

    @abstractmethod
    def upper(self, states: Sequence[Tensor], memory: Memory, cache: DecoderCache) -> Tensor:
        """Compute the logits of the whole decoder, after ``cache.as_block``. Shape: (R,1,D) each -> (R,V)."""


class DecodableModel(nn.Module, ABC):
    """A model as a search uses it: it encodes sources and returns logits, one position after another.

    Attributes:
        vocab_size: size of the target's vocabulary, V.
        longest_source: largest number of source positions; None if unlimited.
        longest_target: largest number of target positions; None if unlimited.
    """

    vocab_size: int
    pad: int
    longest_source: int | None = None
    longest_target: int | None = None

    @override
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load weights, by which a model with packed ones decodes from then on, too."""
        keys = super().load_state_dict(*arguments, **options)
        if (packing := packing_of(self)) is not None:
            pack_weights(self, packing.int8, packing.native)
        return keys

    @abstractmethod
    def encode(self, source_BS: Tensor, padded: bool = True) -> Memory:
        """Encode source tokens; the mask is omitted if no position is ``padded``. Shape: (B,S) -> (B,S,D)."""

    @abstractmethod
    def begin(self) -> DecoderCache:
        """Return an empty cache for :meth:`step`."""

    @abstractmethod
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        """Compute the logits of the next token of each hypothesis.

        Shape: (R,) -> (R,V)

        Args:
            tokens_R: last token of each hypothesis. At the first step each sentence has one row. Later, after
                ``cache.select``, each sentence has the same number of rows, which are adjacent.
            cache: keys and values of the positions before; the step appends to it.
        """

    def natively(self, rows: int, beam: int, steps: int, memory: Memory, cache: DecoderCache) -> NativeDecoder | None:
        """Return native code that takes the next ``steps``, to the bit as :meth:`step` does.

        The first has ``rows`` hypotheses, and the others ``beam`` for each sentence.

        None if there is none for the model, or not for so many rows. Afterwards call ``cache.take``.
        """
        return None

    @abstractmethod
    def at_exit(self, name: str) -> DecodableModel:
        """Return the model that decodes from an exit, with the same weights and without the layers above it."""

    def split(self, stage: int) -> SplitDecoder:
        """Return the decoder in two parts, the lower of which ends at ``stage``, counted from 1.

        Raises:
            ConfigError: if it has no exit there below its top.
        """
        raise ConfigError(
            f"{option('draft_layers')} is {stage}, but this model has no such exit below its top; use another search"
        )


class TranslationModel(DecodableModel):
    """An encoder, a decoder with one or more exits, and a projection to the vocabulary.

    An *exit* is a pair of an encoder depth and a decoder depth whose decoder states the projection can turn into
    predictions. An objective may average over exits; a search decodes from one. ``not_standard`` is the reason why
    other programs cannot express the model; a clause.
    """

    projection: Projection
    not_standard: ClassVar[str] = "its method has no description as a standard Transformer"

    @property
    def stages(self) -> tuple[int, int]:
        """Number of stages of encoder and decoder: layers, or loops over shared layers. Each ends at an exit."""
        return 1, 1

    @property
    def stacks(self) -> tuple[list[LayerStack], list[LayerStack]]:
        """Stacks of the encoder and of the decoder through which gradients pass."""
        return [], []

    @abstractmethod
    def encode(
        self, source_BS: Tensor, padded: bool = True, exits: Exits = None, segments: Segments | None = None
    ) -> Memory:
        """Encode source tokens.

        Shape: (B,S) -> (B,S,D), or (E B,S,D) for E exits

        Args:
            padded: False if no position is padding. The mask is then omitted.
            exits: stages whose states are returned as blocks of rows.
            segments: sentences of each row in the packed layout; None in the padded layout.
        """

    @abstractmethod
    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Exits = None,
        segments: Segments | None = None,
    ) -> list[Tensor]:
        """Compute the decoder states of whole sentences (teacher forcing) at each exit.

        Shape: (B,T) -> (B,T,D) each

        Args:
            target_input_BT: BOS and the target tokens.
            draw: arguments of a method's random choices; required in training.
            exits: stages whose states are returned.
            segments: sentences of each row in the packed layout; None in the padded layout.
        """

    @override
    def at_exit(self, name: str) -> TranslationModel:
        if name != TOP:
            names = map(option, ("exit", "encoder_layers", "decoder_layers"))
            raise ConfigError(
                f"the model has no exit but its top, the whole of both stacks, and cannot decode from '{name}'; "
                f"leave {', '.join(names)} out"
            )
        return self

    def rates(self) -> Mapping[nn.Parameter, Rates]:
        """Return the rates of parameters that have others than 1."""
        return {}

    def all_layers(self) -> Iterator[nn.Module]:
        """Yield the layers of all stacks, those of frozen parts as well."""
        for module in self.modules():
            if isinstance(module, LayerStack):
                yield from module.layers

    def recompute(self, encoder_every: int, decoder_every: int) -> None:
        """Recompute every k-th layer application in the backward pass, k of either side; see :class:`LayerStack`."""
        for stacks, every in zip(self.stacks, (encoder_every, decoder_every), strict=True):
            for stack in stacks:
                stack.recompute_every = every

    def recomputes_all_layers(self) -> bool:
        """Return True if every layer application is run again in the backward pass."""
        return {stack.recompute_every for stacks in self.stacks for stack in stacks} == {1}

    def compile_layers(self) -> None:
        """Have each layer compiled for training; see :func:`~deepspeed_nmt.nn.compiled.compile_layers`."""
        compile_layers(self.all_layers())

    def cross_attending(self) -> dict[int, DecoderBlock]:
        """Return each decoder layer that has cross-attention, by its number, from 1."""
        layers = (module for module in self.modules() if isinstance(module, DecoderBlock))
        return {number: layer for number, layer in enumerate(layers, 1) if layer.cross_attention is not None}

    def set_drop_ratio(self, ratio: float) -> None:
        """Set the probability with which the layers that adapt theirs skip cross-attention in training."""
        for part in self.modules():  # a layer of a stack may hold another one
            if isinstance(part, DecoderBlock):
                part.set_drop_ratio(ratio)

    def cross_attentions(self) -> dict[int, MultiHeadAttention]:
        """Return the cross-attention of each decoder layer that has one, by its number, from 1."""
        layers = self.cross_attending()
        return {
            number: layer.cross_attention for number, layer in layers.items() if layer.cross_attention is not None
        }

    def attention_layers(self) -> dict[int, nn.Module]:
        """Return each layer of the decoder's stacks whose attention weights training can read, by its number, from 1.

        Its cross-attention is applied in every update.
        """
        layers = [layer for stack in self.stacks[1] for layer in stack.layers]
        layer_of = {part: layer for layer in layers for part in layer.modules()}
        return {
            number: layer_of[block]
            for number, block in self.cross_attending().items()
            if block in layer_of and block.always_attends
        }

    def attention_layer(self, number: int) -> nn.Module:
        """Return one of :meth:`attention_layers`, or raise a ConfigError."""
        layers = self.attention_layers()
        if number not in layers:
            raise ConfigError(
                f"decoder layer {number} does not hand over attention weights in every update; those that do are "
                f"{', '.join(map(str, layers)) or 'none'}"
            )
        return layers[number]

    def source_mask(self, source_BS: Tensor, padded: bool) -> Tensor | None:
        """Return the mask of a :class:`Memory` in the padded layout. Shape: (B,S) -> (B,1,1,S)."""
        return source_BS.ne(self.pad)[:, None, None, :] if padded else None

    def described(self) -> StandardTransformer:
        """Describe the model as a standard Transformer, with the same weights, or raise NotStandardError."""
        raise NotStandardError(self.not_standard)

    def load_pretrained(self) -> bool:
        """Load the pretrained weights of a new run, or raise ConfigError. Return True if there are any."""
        return False

    def single_pass(self, batch: Batch) -> dict[str, Tensor]:
        """Run one pass: the decoder states, (B,T,D), as TOP, and further outputs for the model's likelihood."""
        return {TOP: self(batch)}

    def forward(self, batch: Batch) -> Tensor:
        """Compute the decoder states at the top exit (teacher forcing). Shape: -> (B,T,D)."""
        memory = self.encode(batch.source_BS, padded=batch.source_padded, segments=batch.source_segments)
        update = batch.update
        draw = Draw(update.seed, update.number, micro_batch=update.micro_batch)
        return self.decode(batch.target_input_BT, memory, draw, segments=batch.target_segments)[0]


class StackedModel(TranslationModel):
    """A model with one stack of layers on each side."""

    encoder: LayerStack
    decoder: LayerStack

    @property
    @override
    def stacks(self) -> tuple[list[LayerStack], list[LayerStack]]:
        return [self.encoder], [self.decoder]

    @override
    def begin(self) -> DecoderCache:
        return DecoderCache(self.decoder.order.indices)


class MaskedModel(StackedModel):
    """A model that guesses masked tokens of a target, in whose place it reads ``mask``, given the others."""

    mask: int

    @abstractmethod
    def lengths(self, memory: Memory) -> Tensor:
        """Compute logits of the number of target tokens, without BOS and EOS. Shape: -> (B,L)."""

    @abstractmethod
    def guess(self, tokens_RT: Tensor, chosen_RT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Guess the most probable token at each chosen position of BOS, partly masked tokens and EOS, row by row.

        Special tokens are never guessed. Returns tokens and log-probabilities (nats).

        Shape: (R,T), bool (R,T) -> (N,), (N,)
        """

    @override
    def begin(self) -> DecoderCache:
        raise ConfigError("the model does not translate from left to right; use search.name=mask_predict")

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        raise AssertionError("no search begins")
