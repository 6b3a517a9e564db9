"""The structures that `layers.cpp` reads and writes, field by field; see there for what they mean."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p


class Product(ctypes.Structure):
    """A matrix product."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("inputs", "outputs", "is_int8")),
    )


class Residual(ctypes.Structure):
    """A residual connection."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_double) for name in ("epsilon", "alpha")),
        ("is_pre", c_int64),
    )


class Layer(ctypes.Structure):
    """A layer of an encoder or decoder."""

    _fields_ = (
        *((name, c_int64) for name in ("dim", "inner", "heads", "activation", "has_source")),
        *((name, Residual) for name in ("around_self", "around_source", "around_network")),
        *((name, Product) for name in ("keys_values_query", "self_out", "query", "source_out", "up", "down")),
    )


class States(ctypes.Structure):
    """Keys, or values."""

    _fields_ = (
        ("first", c_void_p),
        *((name, c_int64) for name in ("of_place", "of_head", "of_position")),
    )


class Past(ctypes.Structure):
    """The positions of a step that all layers share."""

    _fields_ = (
        *((name, c_int64) for name in ("sentences", "hypotheses", "places")),
        ("place", c_void_p),
        *((name, c_int64) for name in ("capacity", "positions")),
        ("seen", c_void_p),
    )


class Source(ctypes.Structure):
    """Keys and values of the source."""

    _fields_ = (
        *((name, States) for name in ("keys", "values")),
        ("positions", c_int64),
        ("seen", c_void_p),
    )


class Hypotheses(ctypes.Structure):
    """Hypotheses so far, and their next logits."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "log_sums", "log_probs", "tokens", "never")),
        *((name, c_int64) for name in ("sentences", "rows", "length", "entries", "nevers")),
    )


class Extended(ctypes.Structure):
    """Buffers for extensions."""

    _fields_ = tuple((name, c_void_p) for name in ("rows", "tokens", "ended_rows", "log_probs", "ended_log_probs"))


class Decoder(ctypes.Structure):
    """All between tokens and logits."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "sources", "caches", "adds_input")),
        ("count", c_int64),
        *((name, c_void_p) for name in ("norm", "table", "positions")),
        ("entries", c_int64),
        ("scale", c_double),
        ("projection", c_void_p),
    )


class Changing(ctypes.Structure):
    """Pairs of buffers, of which a step reads one and writes the other."""

    _fields_ = tuple((name, c_void_p * 2) for name in ("tokens", "log_probs", "seen"))


class Ended(ctypes.Structure):
    """Hypotheses that end."""

    _fields_ = (
        *((name, c_void_p) for name in ("sentences", "lengths", "tokens", "log_probs", "totals", "counts")),
        *((name, c_int64) for name in ("longest", "number")),
    )


class Drafted(ctypes.Structure):
    """A sentence that is decoded by drafts."""

    _fields_ = (
        ("tokens", c_void_p),
        *((name, c_int64) for name in ("count", "limit")),
        ("log_prob", c_double),
        *((name, c_int64) for name in ("drafted", "compared", "accepted", "gained")),
    )
