"""Layers, steps and whole searches in native code: what it needs to know of tensors, which is checked here.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, D model width, H heads, K head width, P positions of
a sentence, N places and C capacity of a cache in positions, S source length, V vocabulary, T target length.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int64, c_uint8, c_void_p
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_nmt.native import structures
from deepspeed_nmt.native.library import (
    ROWS_OF_A_THREAD,
    Found,
    Library,
    Lookup,
    Panels,
    checked,
    in_threads,
    pointer,
)

_ACTIVATIONS = ("relu", "gelu", "swish")


class AroundSublayer(NamedTuple):
    """A residual connection: x + f(norm(x)) if ``is_pre``, else norm(alpha x + f(x))."""

    weight_D: Tensor
    bias_D: Tensor
    epsilon: float
    alpha: float
    is_pre: bool


class Past:
    """The cached positions that the hypotheses of a step see, the newest included; all layers share it.

    Args:
        rows: R.
        positions: P; the last W of P are the newest.
        seen_B1WP: True where a hypothesis sees a position; None if all see all.
        places_B: places of the sentences in caches; None: the first ones, in order.
        places: of a cache, N.
        capacity: of a cache, C.
    """

    def __init__(
        self,
        sentences: int,
        rows: int,
        positions: int,
        seen_B1WP: Tensor | None,
        places_B: Tensor | None,
        places: int,
        capacity: int,
    ) -> None:
        hypotheses = rows // sentences
        if rows != sentences * hypotheses or not 0 < hypotheses <= positions <= capacity or sentences > places:
            raise ValueError(f"{rows} rows do not fit {sentences} sentences and {positions} of {capacity} positions")
        self.rows, self.sentences, self.places, self.capacity = rows, sentences, places, capacity
        self.positions = positions
        self._kept = seen_B1WP, places_B  # the structure points to their memory
        seen = None if seen_B1WP is None else pointer(seen_B1WP, (sentences, 1, hypotheses, positions), torch.bool)
        place = None if places_B is None else pointer(places_B, (sentences,), torch.int64)
        self.structure = structures.Past(sentences, hypotheses, places, place, capacity, positions, seen)


class Source:
    """Keys and values of the source in N places; True where a position of a sentence is no padding, None for all."""

    def __init__(self, keys_NHSK: Tensor, values_NHSK: Tensor, seen_B11S: Tensor | None) -> None:
        self.keys_NHSK, self.seen_B11S, self._values = keys_NHSK, seen_B11S, values_NHSK
        self.shape, length = keys_NHSK.shape, keys_NHSK.shape[2]
        self.sentences = None if seen_B11S is None else len(seen_B11S)
        seen = None if seen_B11S is None else pointer(seen_B11S, (len(seen_B11S), 1, 1, length), torch.bool)
        self._structure = structures.Source(
            *(_strided(x, self.shape) for x in (keys_NHSK, values_NHSK)), length, seen
        )
        self.address = ctypes.addressof(self._structure)


class NativeLayer:
    """The weights of a layer of self-attention, cross-attention if there is one, and feed-forward.

    Args:
        library: the compiled code.
        heads: H.
        activation: of the feed-forward network: relu, gelu or swish.
        around: the residual connections of the sub-layers in this order.
        products: keys, values and query of self-attention in one, and its output; query of cross-attention, and its
            output; the two of feed-forward.
    """

    def __init__(
        self,
        library: Library,
        heads: int,
        activation: str,
        around: Sequence[AroundSublayer],
        products: Sequence[Panels],
    ) -> None:
        joint, out, *of_source, up, down = products
        dim, has_source = joint.inputs, len(around) == 3
        self.library, self.dim, self.heads, self.has_source = library, dim, heads, has_source
        # The structure points to their memory, which a parameter leaves when it changes its dtype or device.
        self._kept = [(one.weight_D.detach(), one.bias_D.detach()) for one in around], tuple(products)
        shapes = [(3 * dim, dim), *[(dim, dim)] * (3 if has_source else 1), (up.outputs, dim), (dim, up.outputs)]
        if [(one.outputs, one.inputs) for one in products] != shapes or dim % heads:
            raise ValueError("the weights of a layer do not fit one another")
        residuals = [_residual(one, dim) for one in around]
        of_products = [one.structure for one in (joint, out, *of_source)]
        if not has_source:
            residuals.insert(1, structures.Residual())
            of_products += [structures.Product(), structures.Product()]
        of_products += [up.structure, down.structure]
        numbers = (dim, up.outputs, heads, _ACTIVATIONS.index(activation), has_source)
        self._structure = structures.Layer(*numbers, *residuals, *of_products)
        self.address = ctypes.addressof(self._structure)


_NO_SOURCE = structures.Source()


class BoundLayers:
    """Layers of one width, one after another, with the caches, (2,N,H,C,K) each, and sources of a search.

    The source of a layer with cross-attention has its sentences in the places of the caches. ``norm``, if there is
    one, is applied to what the highest layer returns; only its weight, bias and epsilon count. ``adds_input`` says
    before which layers an input is added to the state; default none.

    Raises:
        ValueError: if they do not fit one another.
    """

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        caches: Sequence[Tensor],
        sources: Sequence[Source | None],
        norm: AroundSublayer | None = None,
        adds_input: Sequence[bool] = (),
    ) -> None:
        self._parts = layers, caches, sources, [norm], adds_input
        self.library, self.dim = layers[0].library, layers[0].dim
        self._sentences: set[int] = set()
        _, self.places, _, self.capacity, _ = caches[0].shape
        addresses, of_caches, of_sources = [], [], []
        for layer, cache_2NHCK, source in zip(layers, caches, sources, strict=True):
            width, of_source = self.dim // layer.heads, ctypes.addressof(_NO_SOURCE)
            if layer.dim != self.dim:
                raise ValueError(f"layers of a width of {self.dim} and {layer.dim} do not fit one another")
            if layer.has_source:
                assert source is not None
                if source.shape[:2] != (self.places, layer.heads) or source.shape[3] != width:
                    raise ValueError(f"a source of {tuple(source.shape)} does not fit {self.places} places")
                of_source = source.address
                if source.sentences is not None:
                    self._sentences.add(source.sentences)
            addresses.append(layer.address)
            of_caches.append(pointer(cache_2NHCK, (2, self.places, layer.heads, self.capacity, width)))
            of_sources.append(of_source)
        pointers, self._norm = c_void_p * len(layers), None if norm is None else _residual(norm, self.dim)
        of_norm = None if self._norm is None else ctypes.addressof(self._norm)
        self._tables: list[Any] = [pointers(*each) for each in (addresses, of_sources, of_caches)]
        self._tables.append((c_uint8 * len(layers))(*adds_input))
        self.arguments = (*map(ctypes.addressof, self._tables), len(layers), of_norm)

    def is_of(
        self,
        layers: Sequence[NativeLayer],
        caches: Sequence[Tensor],
        sources: Sequence[Source | None],
        norm: AroundSublayer | None,
        adds_input: Sequence[bool],
    ) -> bool:
        """Return True if it was made of exactly these."""
        parts = zip(self._parts, (layers, caches, sources, [norm], adds_input), strict=True)
        return all(len(own) == len(other) and all(map(is_, own, other)) for own, other in parts)

    def decode(self, x_R1D: Tensor, past: Past, input_R1D: Tensor | None = None) -> Tensor:
        """Decode the newest position of each hypothesis, whose keys and values are written into the caches.

        Shape: fp32 (R,1,D) -> (R,1,D)
        """
        self.check(past)
        states = x_R1D.clone(memory_format=torch.contiguous_format)
        input_R1D = states if input_R1D is None else input_R1D.contiguous()
        pointers = (pointer(each, (past.rows, 1, self.dim)) for each in (input_R1D, states))
        arguments = *self.arguments, past.structure, *pointers
        call = self.library.decode_layers

        def decode_sentences(first: int, end: int, kept: Any = (self, past, input_R1D, states)) -> int:
            return int(call(*arguments, first, end))

        problem = in_threads(decode_sentences, past.sentences, -(-ROWS_OF_A_THREAD * past.sentences // past.rows))
        if problem:
            raise MemoryError("no memory for a step of decoding") if problem == 1 else IndexError("no such place")
        return states

    def check(self, past: Past) -> None:
        """Raise a ValueError unless sources and caches are those of these sentences."""
        fits = self._sentences <= {past.sentences} and (past.places, past.capacity) == (self.places, self.capacity)
        if not fits:
            raise ValueError(f"caches of {self.places} places do not fit {past.sentences} sentences")


class Ended(NamedTuple):
    """A hypothesis that ends: its sentence, its tokens after BOS, the log-probabilities up to each and to EOS."""

    sentence: int
    tokens: list[int]
    log_probs: list[float]


class Steps(NamedTuple):
    """Steps of a search.

    Attributes:
        taken: number of steps.
        ended: the hypotheses that have ended.
        seen_RP: the positions that hypotheses see in the last step, bool; None for all.
        row_BK: rows of the last step that live on, and the tokens and log-probabilities of what they are extended to.
        tokens_BKT: see there.
        log_prob_BKT: see there.
    """

    taken: int
    ended: list[Ended]
    seen_RP: Tensor | None
    row_BK: Tensor
    tokens_BKT: Tensor
    log_prob_BKT: Tensor


class NativeDecoder:
    """All of a decoder: an embedding, layers and the product that makes logits, for the next steps of a search.

    Each step is one of :meth:`Library.embed`, :class:`BoundLayers`, :class:`Panels` and :meth:`Library.extend`, to
    the bit. What a search does between them in Python takes as long as a step of a small model.

    Args:
        layers: their caches have room for the steps.
        lookup: with positions of as many steps as may be taken.
        projection: (V,D).
        past: of the first step, without a mask.
        seen_RP: the positions before that step that hypotheses see, bool; None for all.
    """

    def __init__(
        self, layers: BoundLayers, lookup: Lookup, projection: Panels, past: Past, seen_RP: Tensor | None
    ) -> None:
        layers.check(past)
        self._structure = _decoder(layers, lookup, projection)
        self._parts, self._seen_RP = (layers, lookup, projection, past), seen_RP

    def take_steps(
        self, tokens_RT: Tensor, log_prob_RT: Tensor, never: Tensor, counts: Sequence[int], beam: int, eos: int
    ) -> Steps:
        """Take steps up to one after which ``beam`` hypotheses of a sentence have ended, or as many as are prepared.

        ``counts`` of each sentence have ended before; the other arguments are those of :meth:`Library.extend`.
        """
        layers, lookup, projection, past = self._parts
        rows, sentences, steps, seen_RP = past.rows, past.sentences, len(lookup.positions_TD), self._seen_RP
        hypotheses, widest, length = rows // sentences, sentences * beam, tokens_RT.shape[1]
        before, longest = past.positions - hypotheses, length + steps
        positions = before + hypotheses + (steps - 1) * beam
        if (
            rows != len(tokens_RT)
            or not hypotheses <= beam <= hypotheses * projection.outputs // 2
            or min(counts) < 0
        ):
            raise ValueError(f"{beam} extensions of {rows} x {projection.outputs} for {sentences} sentences")
        if steps < 1 or positions > past.capacity or len(counts) != sentences or max(counts) >= beam:
            raise ValueError(f"{steps} steps do not fit the caches, or {sentences} sentences")
        tokens = _Pair(tokens_RT, (rows, length), widest * longest, torch.int64)
        log_probs, tables = _Pair(log_prob_RT, (rows, length), widest * longest), None
        if seen_RP is None and beam > 1:
            seen_RP = tokens_RT.new_ones(rows, before, dtype=torch.bool)
        if seen_RP is not None:
            tables = _Pair(seen_RP, (rows, before), widest * positions, torch.bool)
        logits_RV = log_prob_RT.new_empty(widest, projection.outputs)
        of_never = pointer(never, (len(never),), torch.int64)
        sizes = sentences, rows, length, projection.outputs, len(never)
        known = structures.Hypotheses(logits_RV.data_ptr(), None, None, None, of_never, *sizes)
        of_tables = (c_void_p * 2)() if tables is None else tables.pointers
        changing = structures.Changing(tokens.pointers, log_probs.pointers, of_tables)
        most = 2 * widest  # of each sentence fewer than `beam` hypotheses end before the last step, and as many in it
        numbers_2E, tokens_ET = tokens_RT.new_empty(2, most), tokens_RT.new_empty(most, longest)
        totals_E, log_prob_ET = log_prob_RT.new_empty(most), log_prob_RT.new_empty(most, longest)
        of_ended = (x.data_ptr() for x in (*numbers_2E, tokens_ET, log_prob_ET, totals_E))
        of_counts = (c_int64 * sentences)(*counts)
        ended, found = structures.Ended(*of_ended, ctypes.addressof(of_counts), longest), Found(sentences, beam)
        of_search = past.structure, known, changing, beam, eos, steps, found.structure(), ended
        taken = checked(layers.library.take_steps(self._structure, *of_search))
        shape, last_rows = (sentences, beam, length + taken), rows if taken == 1 else widest
        tokens_BKT, log_prob_BKT = tokens.of(taken - 1, *shape), log_probs.of(taken - 1, *shape)
        seen_RP = None if tables is None else tables.of(taken - 1, last_rows, positions - (steps - taken) * beam)
        parts = (*numbers_2E, tokens_ET, log_prob_ET, totals_E)
        all_ended = [
            Ended(sentence, own_tokens[1:end], [*own_log_probs[:end], total])
            for sentence, end, own_tokens, own_log_probs, total in zip(
                *(x[: ended.number].tolist() for x in parts), strict=True
            )
        ]
        return Steps(taken, all_ended, seen_RP, found.row_BK, tokens_BKT, log_prob_BKT)


class NativeSplit:
    """A decoder in two parts, all of it native code, which decodes one sentence by drafts of the lower part.

    Args:
        lower: with the LayerNorm after which it predicts.
        upper: the same for the whole decoder.
        lookup: with all positions.
        projection: (V,D).
        past: of the next position, without a mask; all positions before it are seen.
    """

    def __init__(
        self, lower: BoundLayers, upper: BoundLayers, lookup: Lookup, projection: Panels, past: Past
    ) -> None:
        for part in (lower, upper):
            part.check(past)
        if past.rows > 1:
            raise ValueError(f"{past.rows} rows in place of one")
        self._structures = _decoder(lower, lookup, projection), _decoder(upper, lookup, projection)
        self._parts = lower, upper, lookup, projection, past

    def take_passes(
        self, tokens: list[int], limit: int, most: int, passes: int, never: Tensor, eos: int
    ) -> tuple[list[int], float, Mapping[str, int]]:
        """Take passes with drafts of at most ``most`` tokens after BOS and ``tokens``, up to EOS.

        Return the tokens that follow, of which there are at most ``limit`` in all; their log-probability (nats); and
        the numbers of passes, of tokens, and of those drafted, compared and accepted.
        """
        lower, _, lookup, projection, past = self._parts
        end = len(tokens) - 1 + passes * (most + 1)  # the most positions that are written
        if len(tokens) != past.positions or not len(tokens) <= limit or most < 0:
            raise ValueError(f"{len(tokens)} tokens do not fit {past.positions} positions and {limit} tokens")
        if not 0 <= eos < projection.outputs:
            raise IndexError(f"{eos} is no token of {projection.outputs}")
        if min(end, limit) > min(past.capacity, len(lookup.positions_TD)):
            raise ValueError(f"{end} positions do not fit the caches")
        buffer = (c_int64 * (limit + 1))(*tokens)
        logits = (c_float * ((most + 1) * projection.outputs))()
        sizes = 1, 1, 1, projection.outputs, len(never)
        of_never = pointer(never, (len(never),), torch.int64)
        known = structures.Hypotheses(ctypes.addressof(logits), None, None, None, of_never, *sizes)
        found = structures.Drafted(ctypes.addressof(buffer), len(tokens), limit)
        of_pass = past.structure, known, found, most, eos, passes
        taken = checked(lower.library.take_passes(*self._structures, *of_pass))
        counts = {"passes": taken, "tokens": found.gained, "drafted": found.drafted}
        counts |= {"compared": found.compared, "accepted": found.accepted}
        return buffer[len(tokens) : found.count], found.log_prob, counts


def _decoder(layers: BoundLayers, lookup: Lookup, projection: Panels) -> structures.Decoder:
    (table_ED, scale, positions_TD), dim = lookup, layers.dim
    if projection.inputs != dim:
        raise ValueError(f"a projection of {projection.inputs} inputs does not fit layers of a width of {dim}")
    table, positions = (pointer(x, (len(x), dim)) for x in (table_ED, positions_TD))
    of_table = table, positions, len(table_ED), scale
    return structures.Decoder(*layers.arguments, *of_table, ctypes.addressof(projection.structure))


class _Pair:
    """Two copies of a table that grows in each step, which reads one, at first the second, and writes the other."""

    def __init__(self, x_RN: Tensor, shape: tuple[int, int], most: int, dtype: torch.dtype = torch.float32) -> None:
        pointer(x_RN, shape, dtype)
        self._both = x_RN.new_empty(2, most)
        self._both[1, : x_RN.numel()] = x_RN.flatten()
        self.pointers = (c_void_p * 2)(*(x.data_ptr() for x in self._both))

    def of(self, number: int, *shape: int) -> Tensor:
        """Return the first copy, for an even number, or the second, in the shape that it has."""
        return self._both[number % 2, : math.prod(shape)].view(shape)


def _residual(around: AroundSublayer, dim: int) -> structures.Residual:
    weight_D, bias_D, *rest = around
    return structures.Residual(pointer(weight_D, (dim,)), pointer(bias_D, (dim,)), *rest)


def _strided(x_BHSK: Tensor, shape: Sequence[int]) -> structures.States:
    """Return where keys or values of this shape are, of which those of a head at a position are contiguous."""
    *strides, last = x_BHSK.stride()
    if x_BHSK.shape != shape or x_BHSK.dtype != torch.float32 or last != 1 or not x_BHSK.is_cpu:
        raise ValueError(f"{x_BHSK.dtype} {tuple(x_BHSK.shape)} in place of keys or values {tuple(shape)}")
    return structures.States(x_BHSK.data_ptr(), *strides)
