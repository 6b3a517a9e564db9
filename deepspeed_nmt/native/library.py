"""The native code of encoding and decoding on a CPU: built at its first use on a machine, called with tensors.

`layers.cpp` is compiled by the compiler that is there, for the vectors of this CPU. The library is kept in a
directory of this user alone, under a name that is a hash of source, compiler and flags, and ends in a hash of its
content. Without a compiler, or where no such directory can be made, there is no native code, and torch decodes.

The code starts no threads, and has no state. Rows and sentences are shared among as many threads as torch uses.

Legend: B sentences, W hypotheses of a sentence, R rows = B x W, D model width, E outputs, H heads, K head width,
P positions of a sentence, C capacity of a cache in positions, S source length.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from ctypes import c_double, c_float, c_int64, c_uint8, c_void_p
from functools import cache
from itertools import pairwise
from operator import is_
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.files import atomic_write_bytes, read_regular

FEW_ROWS = 16
"""Rows up to which the products are faster than oneDNN's in any case."""
_SOURCE = Path(__file__).with_name("layers.cpp")
_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-Wno-psabi", "-O3", "-fopenmp-simd", "-ffp-contract=fast")
_FLAG_OF_GCC = "-fno-tree-pre"
"""Without it GCC keeps the sums of products in memory. Clang refuses it, and does not."""
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma")
CAPABILITIES = {
    "AVX512_VNNI": (*_AVX512, "-mavx512vnni"),
    "AVX512": _AVX512,
    "AVX2": ("-mavx2", "-mfma"),
    "DEFAULT": (),
}
"""Flags of the compiler by what a CPU has; vectors of other CPUs are the compiler's default."""
_COMPILERS = ("g++", "c++", "clang++")
_BUILD_S = 300.0
"""Seconds after which a compiler is given up."""
_GROUP, _OFFSET = 4, 128
"""Inputs of an output that are adjacent in int8, and what is added to weights, as in the code."""
_MOST_INPUTS = 1 << 17
"""Inputs of a product in int8 up to which no sum is beyond 32 bits."""
_WIDE = 16
"""Outputs of a panel of AVX2's vectors."""
_ACTIVATIONS = ("relu", "gelu", "swish")
_CHUNK, _LINE = 1 << 25, 64
"""Least bytes for weights that are taken from the system at once, and of what each of them begins at a multiple."""
_ROWS_OF_A_THREAD = 16
"""Rows of a step or a product for which it pays to wake a thread."""


class NativeError(Exception):
    """The reason why there is no native code here; a clause."""


class _Product(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "is_int8")),
    )


class _Residual(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_double) for name in ("epsilon", "alpha")),
        ("is_pre", c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("dim", "inner", "heads", "activation", "has_source")),
        *((name, _Residual) for name in ("around_self", "around_source", "around_network")),
        *((name, _Product) for name in ("keys_values_query", "self_out", "query", "source_out", "up", "down")),
    )


class _States(ctypes.Structure):
    _fields_ = (
        ("first", c_void_p),
        *((name, c_int64) for name in ("of_place", "of_head", "of_position")),
    )


class _Past(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("sentences", "hypotheses", "places")),
        ("place", c_void_p),
        *((name, c_int64) for name in ("capacity", "positions")),
        ("seen", c_void_p),
    )


class _Source(ctypes.Structure):
    _fields_ = (
        *((name, _States) for name in ("keys", "values")),
        ("positions", c_int64),
        ("seen", c_void_p),
    )


class _Hypotheses(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "log_sums", "log_probs", "tokens", "never")),
        *((name, c_int64) for name in ("sentences", "rows", "length", "entries", "nevers")),
    )


class _Extended(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("rows", "tokens", "ended_rows", "log_probs", "ended_log_probs"))


class _Decoder(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("layers", "sources", "caches", "adds_input")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("norm", "table", "positions")),
        ("entries", c_int64),
        ("scale", c_double),
        ("projection", c_void_p),
    )


class _Changing(ctypes.Structure):
    _fields_ = tuple((name, c_void_p * 2) for name in ("tokens", "log_probs", "seen"))


class _Drafted(ctypes.Structure):
    _fields_ = (
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("count", "limit")),
        ("log_prob", c_double),
        *((name, c_int64) for name in ("drafted", "compared", "accepted", "gained")),
    )


class Extended(NamedTuple):
    """Rows that end, and their log-probabilities, EOS included; those that live on, and what they are extended to."""

    ended: list[int]
    ended_log_probs: list[float]
    row_BK: Tensor
    tokens_BKT: Tensor
    log_prob_BKT: Tensor


class _Found:
    """What extensions of B sentences with K hypotheses each are written into."""

    def __init__(self, sentences: int, beam: int) -> None:
        self._row_BK = torch.empty(sentences, beam, dtype=torch.int64, device="cpu")
        self._ended, self._log_probs = (c_int64 * (sentences * beam))(), (c_float * (sentences * beam))()

    def structure(self, tokens: int | None = None, log_probs: int | None = None) -> _Extended:
        """Return the addresses, with those of tokens and log-probabilities of the extended hypotheses."""
        of_ended = ctypes.addressof(self._ended), log_probs, ctypes.addressof(self._log_probs)
        return _Extended(self._row_BK.data_ptr(), tokens, *of_ended)

    def extended(self, count: int, tokens_BKT: Tensor, log_prob_BKT: Tensor) -> Extended:
        """Return what has been found, if so many hypotheses end, or raise what a negative number means."""
        if count < 0:
            raise MemoryError("no memory for a step of decoding") if count == -1 else IndexError("no such token")
        return Extended(self._ended[:count], self._log_probs[:count], self._row_BK, tokens_BKT, log_prob_BKT)


class Lookup(NamedTuple):
    """An embedding of tokens: rows of a table, (E,D), times a scale, plus the positions of the next steps, (T,D)."""

    table_ED: Tensor
    scale: float
    positions_TD: Tensor


class Library:
    """The compiled code, from a file.

    Attributes:
        panel_outputs: outputs of a panel.
        is_wide: True if its vectors are those of AVX2 or AVX-512.

    Raises:
        NativeError: if a file is no such library, or computes something else.
    """

    def __init__(self, file: Path) -> None:
        try:
            self.file, code = file, ctypes.CDLL(str(file))
            self.decode_layers, self.multiply_rows = code.decode_layers, code.multiply_rows
            self._extend, self._log_sums = code.extend_hypotheses, code.log_sums_of_rows
            self._embed, self.take_steps, self.take_passes = code.embed_tokens, code.take_steps, code.take_passes
            functions = self.decode_layers, self.multiply_rows, self._extend, self._embed, self.take_steps
            for function in (code.panel_outputs, *functions, self.take_passes):
                function.restype = c_int64
            self._log_sums.restype = None
            self.panel_outputs = int(code.panel_outputs())
            self.is_wide = self.panel_outputs >= _WIDE
        except (OSError, AttributeError) as error:  # such as a file system from which nothing may be run
            raise NativeError(f"the compiled code cannot be loaded ({error})") from error
        past, pointers, range_ = ctypes.POINTER(_Past), [c_void_p] * 4, [c_int64] * 2
        self.decode_layers.argtypes = (*pointers, c_int64, c_void_p, past, c_void_p, c_void_p, *range_)
        self.multiply_rows.argtypes = (ctypes.POINTER(_Product), c_void_p, c_int64, c_void_p)
        known, found = ctypes.POINTER(_Hypotheses), ctypes.POINTER(_Extended)
        self._extend.argtypes = (known, c_int64, c_int64, found)
        of_search = past, known, ctypes.POINTER(_Changing)
        self.take_steps.argtypes = (ctypes.POINTER(_Decoder), *of_search, *range_, c_int64, found, c_void_p)
        self._embed.argtypes = (c_void_p, *range_, c_void_p, *range_, c_double, c_void_p, c_void_p)
        decoder = ctypes.POINTER(_Decoder)
        self.take_passes.argtypes = (decoder, decoder, past, known, ctypes.POINTER(_Drafted), c_int64, *range_)
        self._log_sums.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
        self._lock, self._free = Lock(), torch.empty(0, dtype=torch.uint8, device="cpu")
        x = torch.arange(35, dtype=torch.float32, device="cpu").view(7, 5)
        weight = (x.flatten()[:15] - 7.0).repeat(9)[:130].view(26, 5)
        if not torch.equal(Panels(self, weight, None)(x), x @ weight.t()):
            raise NativeError("the compiled code multiplies wrongly")

    def kept(self, x: Tensor) -> Tensor:
        """Return a contiguous copy in large pages, if the system has them: fewer addresses to look up."""
        size = x.numel() * x.element_size()
        with self._lock:
            if size > len(self._free):
                memory = mmap.mmap(-1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(AttributeError, OSError):
                    memory.madvise(mmap.MADV_HUGEPAGE)
                self._free = torch.frombuffer(memory, dtype=torch.uint8)
            taken, self._free = self._free[:size], self._free[-(-size // _LINE) * _LINE :]
        return taken.view(x.dtype).view(x.shape).copy_(x)

    def log_sums(self, x_RV: Tensor) -> Tensor:
        """Compute log sum_v exp x_v of each row. Shape: fp32 (R,V) -> (R,)."""
        log_sums_R = x_RV.new_empty(len(x_RV))
        self._log_sums(_pointer(x_RV, x_RV.shape), *x_RV.shape, log_sums_R.data_ptr())
        return log_sums_R

    def embed(self, tokens_R1: Tensor, lookup: Lookup) -> Tensor:
        """Embed tokens at one position. Shape: -> fp32 (R,1,D)."""
        table_ED, scale, position_1D = lookup
        rows, (entries, dim) = len(tokens_R1), table_ED.shape
        if tokens_R1.shape != (rows, 1) or tokens_R1.dtype != torch.int64 or not tokens_R1.is_cpu:
            raise ValueError(f"{tokens_R1.dtype} {tuple(tokens_R1.shape)} in place of a token for each row")
        states_R1D = position_1D.new_empty(rows, 1, dim)
        table, position = _pointer(table_ED, (entries, dim)), _pointer(position_1D, (1, dim))
        of_tokens = tokens_R1.data_ptr(), rows, tokens_R1.stride(0)
        if self._embed(*of_tokens, table, entries, dim, scale, position, states_R1D.data_ptr()):
            raise IndexError("no such token")
        return states_R1D

    def extend(
        self,
        logits_RV: Tensor,
        log_sum_R: Tensor | None,
        tokens_RT: Tensor,
        log_prob_RT: Tensor,
        never: Tensor,
        sentences: int,
        beam: int,
        eos: int,
    ) -> Extended:
        """Find the 2K most probable extensions of each sentence's hypotheses, the first of equal ones first.

        Those by EOS among the first K end, if they are above -inf; the first K of the others live on. Logits of
        tokens that are ``never`` predicted become -inf; if others have, ``log_sum_R`` are the log-sums from before.
        ``tokens_RT`` and ``log_prob_RT`` are those of the hypotheses so far.
        """
        (rows, entries), length = logits_RV.shape, tokens_RT.shape[1]
        hypotheses = rows // sentences
        if rows != sentences * hypotheses or not hypotheses <= beam <= hypotheses * entries // 2:
            raise ValueError(f"{beam} extensions of {rows} x {entries} for {sentences} sentences")
        known = _Hypotheses(
            _pointer(logits_RV, (rows, entries)),
            None if log_sum_R is None else _pointer(log_sum_R, (rows,)),
            _pointer(log_prob_RT, (rows, length)),
            _pointer(tokens_RT, (rows, length), torch.int64),
            _pointer(never, (len(never),), torch.int64),
            *(sentences, rows, length, entries, len(never)),
        )
        tokens_BKT = tokens_RT.new_empty(sentences, beam, length + 1)
        log_prob_BKT, found = log_prob_RT.new_empty(tokens_BKT.shape), _Found(sentences, beam)
        count = self._extend(known, beam, eos, found.structure(tokens_BKT.data_ptr(), log_prob_BKT.data_ptr()))
        return found.extended(count, tokens_BKT, log_prob_BKT)


class Panels:
    """A weight (E,D) and a bias or None, in panels.

    In int8 the weight is rounded with a scale for each output, and the input with one for each row.
    """

    def __init__(self, library: Library, weight_ED: Tensor, bias_E: Tensor | None, int8: bool = False) -> None:
        weight, self._library = weight_ED.detach().float(), library
        self.outputs, self.inputs = weight.shape
        if int8 and self.inputs > _MOST_INPUTS:
            raise ValueError(f"a product of {self.inputs} inputs is beyond the integers of int8")
        scale_E, group = weight.new_ones(self.outputs), _GROUP if int8 else 1
        if int8:
            scale_E = (weight.abs().amax(dim=1) / 127.0).clamp(min=1e-12)
            weight = (weight / scale_E.unsqueeze(1)).round()
        rest = -self.outputs % library.panel_outputs
        padded = F.pad(weight, (0, -self.inputs % group, 0, rest))
        panels = padded.view(len(padded) // library.panel_outputs, library.panel_outputs, -1, group).transpose(1, 2)
        self._weight = library.kept((panels + _OFFSET).to(torch.uint8) if int8 else panels)
        self._scale = F.pad(scale_E, (0, rest))
        bias_E = weight_ED.new_zeros(self.outputs) if bias_E is None else bias_E.detach()
        self._bias = F.pad(bias_E.float(), (0, rest))
        pointers = (x.data_ptr() for x in (self._weight, self._scale, self._bias))
        self.structure = _Product(*pointers, self.inputs, self.outputs, int8)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x W^T + b. Shape: fp32 (..., D) -> (..., E)."""
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.outputs)
        rows = y.numel() // self.outputs
        of_x, of_y = _pointer(x.view(-1, self.inputs), (rows, self.inputs)), _pointer(y, y.shape)

        def multiply(first: int, end: int, kept: Any = (x, y)) -> int:
            part = self.structure, of_x + 4 * first * self.inputs, end - first, of_y + 4 * first * self.outputs
            return int(self._library.multiply_rows(*part))

        if _in_threads(multiply, rows, _ROWS_OF_A_THREAD):
            raise MemoryError("no memory for a product")
        return y


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
        seen = None if seen_B1WP is None else _pointer(seen_B1WP, (sentences, 1, hypotheses, positions), torch.bool)
        place = None if places_B is None else _pointer(places_B, (sentences,), torch.int64)
        self.structure = _Past(sentences, hypotheses, places, place, capacity, positions, seen)


class Source:
    """Keys and values of the source in N places; True where a position of a sentence is no padding, None for all."""

    def __init__(self, keys_NHSK: Tensor, values_NHSK: Tensor, seen_B11S: Tensor | None) -> None:
        self.keys_NHSK, self.seen_B11S, self._values = keys_NHSK, seen_B11S, values_NHSK
        self.shape, length = keys_NHSK.shape, keys_NHSK.shape[2]
        self.sentences = None if seen_B11S is None else len(seen_B11S)
        seen = None if seen_B11S is None else _pointer(seen_B11S, (len(seen_B11S), 1, 1, length), torch.bool)
        self._structure = _Source(*(_strided(x, self.shape) for x in (keys_NHSK, values_NHSK)), length, seen)
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
        structures = [one.structure for one in (joint, out, *of_source)]
        if not has_source:
            residuals.insert(1, _Residual())
            structures += [_Product(), _Product()]
        structures += [up.structure, down.structure]
        numbers = (dim, up.outputs, heads, _ACTIVATIONS.index(activation), has_source)
        self._structure = _Layer(*numbers, *residuals, *structures)
        self.address = ctypes.addressof(self._structure)


_NO_SOURCE = _Source()


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
            of_caches.append(_pointer(cache_2NHCK, (2, self.places, layer.heads, self.capacity, width)))
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
        pointers = (_pointer(each, (past.rows, 1, self.dim)) for each in (input_R1D, states))
        arguments = *self.arguments, past.structure, *pointers
        call = self.library.decode_layers

        def decode_sentences(first: int, end: int, kept: Any = (self, past, input_R1D, states)) -> int:
            return int(call(*arguments, first, end))

        problem = _in_threads(decode_sentences, past.sentences, -(-_ROWS_OF_A_THREAD * past.sentences // past.rows))
        if problem:
            raise MemoryError("no memory for a step of decoding") if problem == 1 else IndexError("no such place")
        return states

    def check(self, past: Past) -> None:
        """Raise a ValueError unless sources and caches are those of these sentences."""
        fits = self._sentences <= {past.sentences} and (past.places, past.capacity) == (self.places, self.capacity)
        if not fits:
            raise ValueError(f"caches of {self.places} places do not fit {past.sentences} sentences")


class Steps(NamedTuple):
    """Steps of a search.

    Attributes:
        taken: number of steps.
        tokens_RT: the hypotheses before the last step, and their log-probabilities up to each token.
        log_prob_RT: see there.
        seen_RP: the positions that they see in it, bool; None for all.
        extended: what the last step extends them to.
    """

    taken: int
    tokens_RT: Tensor
    log_prob_RT: Tensor
    seen_RP: Tensor | None
    extended: Extended


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
        steps, width = len(lookup.positions_TD), past.rows // past.sentences
        layers.check(past)
        if past.positions + (steps - 1) * width > past.capacity:
            raise ValueError(f"{steps} steps do not fit the caches")
        if seen_RP is None and width > 1:
            seen_RP = torch.ones(past.rows, past.positions - width, dtype=torch.bool, device="cpu")
        self._structure = _decoder(layers, lookup, projection)
        self._parts, self._seen_RP = (layers, lookup, projection, past), seen_RP

    def take_steps(self, tokens_RT: Tensor, log_prob_RT: Tensor, never: Tensor, eos: int) -> Steps:
        """Take steps up to one in which a hypothesis ends, or as many as there are positions.

        The arguments are those of :meth:`Library.extend`; a sentence has as many hypotheses before as after a step.
        """
        layers, lookup, projection, past = self._parts
        rows, beam = past.rows, past.rows // past.sentences
        steps, length, before = len(lookup.positions_TD), tokens_RT.shape[1], past.positions - beam
        if 2 * beam > beam * projection.outputs or tokens_RT.shape[0] != rows:
            raise ValueError(f"{beam} extensions of {rows} x {projection.outputs} for {past.sentences} sentences")
        tokens = _Pair(tokens_RT, (rows, length), length + steps, torch.int64)
        log_probs = _Pair(log_prob_RT, (rows, length), length + steps)
        seen = self._seen_RP
        tables = None if seen is None else _Pair(seen, (rows, before), before + steps * beam, torch.bool)
        logits_RV = log_prob_RT.new_empty(rows, projection.outputs)
        of_never = _pointer(never, (len(never),), torch.int64)
        sizes = past.sentences, rows, length, projection.outputs, len(never)
        known = _Hypotheses(logits_RV.data_ptr(), None, None, None, of_never, *sizes)
        unseen = (c_void_p * 2)()
        changing = _Changing(tokens.pointers, log_probs.pointers, unseen if tables is None else tables.pointers)
        found, count = _Found(past.sentences, beam), c_int64()
        of_search = past.structure, known, changing, beam, eos, steps, found.structure(), ctypes.addressof(count)
        ended, taken = layers.library.take_steps(self._structure, *of_search), count.value
        after = (x.of(taken - 1, length + taken).view(past.sentences, beam, -1) for x in (tokens, log_probs))
        extended = found.extended(ended, *after)
        tokens_RT, log_prob_RT = (x.of(taken, length + taken - 1) for x in (tokens, log_probs))
        seen_RP = None if tables is None else tables.of(taken - 1, before + taken * beam)
        return Steps(taken, tokens_RT, log_prob_RT, seen_RP, extended)


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
        if min(end, limit) > min(past.capacity, len(lookup.positions_TD)):
            raise ValueError(f"{end} positions do not fit the caches")
        buffer = (c_int64 * (limit + 1))(*tokens)
        logits = (c_float * ((most + 1) * projection.outputs))()
        sizes = 1, 1, 1, projection.outputs, len(never)
        of_never = _pointer(never, (len(never),), torch.int64)
        known = _Hypotheses(ctypes.addressof(logits), None, None, None, of_never, *sizes)
        found = _Drafted(ctypes.addressof(buffer), len(tokens), limit)
        taken = lower.library.take_passes(*self._structures, past.structure, known, found, most, eos, passes)
        if taken < 0:
            raise MemoryError("no memory for a pass") if taken == -1 else IndexError("no such token")
        counts = {"passes": taken, "tokens": found.gained, "drafted": found.drafted}
        counts |= {"compared": found.compared, "accepted": found.accepted}
        return buffer[len(tokens) : found.count], found.log_prob, counts


def _decoder(layers: BoundLayers, lookup: Lookup, projection: Panels) -> _Decoder:
    (table_ED, scale, positions_TD), dim = lookup, layers.dim
    if projection.inputs != dim:
        raise ValueError(f"a projection of {projection.inputs} inputs does not fit layers of a width of {dim}")
    table, positions = (_pointer(x, (len(x), dim)) for x in (table_ED, positions_TD))
    of_table = table, positions, len(table_ED), scale
    return _Decoder(*layers.arguments, *of_table, ctypes.addressof(projection.structure))


class _Pair:
    """Two copies of a table that grows in each step, which reads one, at first the second, and writes the other."""

    def __init__(
        self, x_RN: Tensor, shape: tuple[int, int], longest: int, dtype: torch.dtype = torch.float32
    ) -> None:
        _pointer(x_RN, shape, dtype)
        self._both = x_RN.new_empty(2, shape[0] * longest)
        self._both[1, : x_RN.numel()] = x_RN.flatten()
        self._rows = shape[0]
        self.pointers = (c_void_p * 2)(self._both.data_ptr(), self._both[1].data_ptr())

    def of(self, number: int, columns: int) -> Tensor:
        """Return the first copy, for an even number, or the second, with so many columns."""
        return self._both[number % 2, : self._rows * columns].view(self._rows, columns)


def in_one_thread(rows: int) -> bool:
    """Return True if all that is done for so many rows is done in one thread."""
    return torch.get_num_threads() == 1 or rows < 2 * _ROWS_OF_A_THREAD


def _in_threads(call: Callable[[int, int], int], count: int, of_a_thread: int) -> int:
    """Call for the range from 0 to ``count`` in as many threads as torch uses, each for at least ``of_a_thread``.

    Return the largest result. Ctrl+C leaves the threads at work, so ``call`` must refer to all memory that it uses.
    """
    parts = max(1, min(torch.get_num_threads(), count // of_a_thread))
    bounds = [count * part // parts for part in range(parts + 1)]
    if parts == 1:
        return call(0, count)
    futures = [_threads().submit(call, *pair) for pair in pairwise(bounds)]
    return max(future.result() for future in futures)


class _Threads:
    """Threads that make calls until the process ends; an executor takes none once the main thread has ended."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[int], Callable[[int, int], int], int, int]] = SimpleQueue()
        for _ in range(count):
            Thread(target=self._work, name="native", daemon=True).start()

    def submit(self, call: Callable[[int, int], int], first: int, end: int) -> Future[int]:
        future: Future[int] = Future()
        self._calls.put((future, call, first, end))
        return future

    def _work(self) -> None:
        while True:
            future, call, *bounds = self._calls.get()
            try:
                future.set_result(call(*bounds))
            except BaseException as error:
                future.set_exception(error)
            del future, call  # and what it refers to


@cache
def _threads() -> _Threads:
    return _Threads(torch.get_num_threads())


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of the threads


def _residual(around: AroundSublayer, dim: int) -> _Residual:
    weight_D, bias_D, *rest = around
    return _Residual(_pointer(weight_D, (dim,)), _pointer(bias_D, (dim,)), *rest)


def _pointer(x: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
    """Return the address of a tensor of exactly this shape and dtype, contiguous on the CPU."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"{x.dtype} {tuple(x.shape)} on {x.device} in place of contiguous {dtype} {tuple(shape)}")
    return x.data_ptr()


def _strided(x_BHSK: Tensor, shape: Sequence[int]) -> _States:
    """Return where keys or values of this shape are, of which those of a head at a position are contiguous."""
    *strides, last = x_BHSK.stride()
    if x_BHSK.shape != shape or x_BHSK.dtype != torch.float32 or last != 1 or not x_BHSK.is_cpu:
        raise ValueError(f"{x_BHSK.dtype} {tuple(x_BHSK.shape)} in place of keys or values {tuple(shape)}")
    return _States(x_BHSK.data_ptr(), *strides)


@cache
def library() -> Library:
    """Return the code for this CPU, which is compiled if need be.

    Raises:
        NativeError: if there is none.
    """
    return build(capability(), kept_directory())


def capability() -> str:
    """Return the first of :data:`CAPABILITIES` that this CPU has, as torch may use it."""
    name = torch.backends.cpu.get_cpu_capability()
    if name == "AVX512" and torch.cpu._is_vnni_supported():
        return "AVX512_VNNI"
    return name if name in CAPABILITIES else "DEFAULT"


@cache
def obstacle() -> str | None:
    """Return the reason why there is no native code here, or None."""
    try:
        library()
    except NativeError as error:
        return str(error)
    return None


def build(capability: str, directory: Path) -> Library:
    """Return the code for one of :data:`CAPABILITIES` from a directory, after it is compiled if need be.

    Raises:
        NativeError: if it cannot be compiled, kept or loaded, or computes something else.
    """
    compiler = _compiler()
    try:
        _make_private(directory)
        version, source = _output_of([*compiler, "--version"]), _SOURCE.read_text(encoding="utf-8")
        own = () if "clang" in version.lower() else (_FLAG_OF_GCC,)
        command = [*compiler, *_FLAGS, *own, *CAPABILITIES[capability], str(_SOURCE)]
        made_of = [platform.machine(), version, *command[:-1], source]
        file = directory / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]}.so"
        if not _is_whole(file):
            logger.info("the code of decoding is compiled for this CPU, once: %s", file)
            with TemporaryDirectory() as scratch:
                new = Path(scratch) / file.name
                _output_of([*command, "-o", str(new)])
                content = new.read_bytes()
            atomic_write_bytes(file, content + hashlib.sha256(content).digest())
    except OSError as error:
        reason = error.strerror or error
        raise NativeError(f"{directory} cannot keep compiled code ({reason}); set XDG_CACHE_HOME") from error
    return Library(file)


def kept_directory() -> Path:
    """Return the directory that keeps compiled code."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed_nmt"
    except RuntimeError as error:
        raise NativeError("there is no home directory to keep compiled code in; set XDG_CACHE_HOME") from error


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    path = next(filter(None, map(shutil.which, given[:1] or _COMPILERS)), None)
    if path is None:
        raise NativeError("there is no C++ compiler; install g++" if not given else f"CXX is {given[0]}, no program")
    return [path, *given[1:]]


def _output_of(command: Sequence[str]) -> str:
    """Run a compiler and return its output; a NativeError if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_BUILD_S).stdout
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), f"status {error.returncode}")
        raise NativeError(f"{command[0]} fails: {reason.strip()}") from error
    except (subprocess.TimeoutExpired, OSError, UnicodeDecodeError) as error:
        raise NativeError(f"{command[0]} fails: {error}") from error


def _make_private(directory: Path) -> None:
    """Make a directory in which only this user writes; a NativeError if it is another's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NativeError(
            f"{directory} is another user's, or others may write to it; remove it or set XDG_CACHE_HOME"
        )


def _is_whole(file: Path) -> bool:
    """Return True if a file is this user's library as it was written."""
    try:
        status, content = file.lstat(), read_regular(file)
    except OSError:
        return False
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return own and hashlib.sha256(content[:-32]).digest() == content[-32:]
