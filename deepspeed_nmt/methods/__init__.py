"""Methods, and the registries that map their names in a configuration to their settings and builders.

A new method is a file with a configuration class, a builder and an entry, and the line of its entry here.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Likelihood, Regularizer
from deepspeed_nmt.methods import (
    abnet,
    added_exits,
    ald,
    consistency,
    convs2s,
    coordination,
    cross_attention_drop,
    depth_growing,
    dlcl,
    gnmt,
    guided_alignment,
    label_smoothed,
    masked_tokens,
    merged_attention,
    msc,
    multi_softmax,
    parallel_decoder,
    recurrent,
    relative_positions,
    sdt,
    transformer,
    transparent_attention,
)
from deepspeed_nmt.nn.layers import DecoderBlock
from deepspeed_nmt.registry import Entry, Registry, SelfTest

# The first entry of a registry is the default.

# Builder: (config, vocabulary, make_layer) -> model.
MODELS: Registry[TranslationModel] = Registry(
    "model",
    [
        transformer.ENTRY,
        recurrent.ENTRY,
        depth_growing.ENTRY,
        parallel_decoder.ENTRY,
        abnet.ENTRY,
        transparent_attention.ENTRY,
        gnmt.ENTRY,
        convs2s.ENTRY,
        coordination.ENTRY,
        dlcl.ENTRY,
        relative_positions.ENTRY,
        sdt.ENTRY,
        msc.ENTRY,
    ],
)
# Builder: (config, number, parts) -> decoder layer.
LAYERS: Registry[DecoderBlock] = Registry(
    "layer", [transformer.STANDARD_LAYER, cross_attention_drop.ENTRY, merged_attention.ENTRY]
)
# Builder: (config, vocabulary) -> likelihood. An objective has one likelihood.
LIKELIHOODS: Registry[Likelihood] = Registry(
    "likelihood", [label_smoothed.ENTRY, multi_softmax.ENTRY, masked_tokens.ENTRY, added_exits.ENTRY]
)
# Builder: (config, vocabulary) -> regularizer. An objective has any number of regularizers.
REGULARIZERS: Registry[Regularizer] = Registry(
    "regularizer", [consistency.DDR, consistency.R_DROP, ald.ENTRY, guided_alignment.ENTRY]
)


def _entries() -> Iterator[Entry[object]]:
    for table in (MODELS, LAYERS, LIKELIHOODS, REGULARIZERS):
        yield from table.values()


def self_tests() -> dict[str, SelfTest]:
    """Return the `selftest` cases of all methods, by name."""
    return {entry.selftest.name: entry.selftest for entry in _entries() if entry.selftest is not None}


def collapse_remedies() -> list[str]:
    """Return the settings that methods recommend for a decoder that ignores its source."""
    return [entry.collapse_remedy for entry in _entries() if entry.collapse_remedy]
