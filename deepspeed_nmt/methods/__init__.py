"""Methods, and the registries that map their names in a configuration to their settings and builders.

A new method is a file with a configuration class and a build function, and an entry of a registry.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Likelihood, Regularizer
from deepspeed_nmt.methods import (
    abnet,
    ald,
    consistency,
    cross_attention_drop,
    depth_growing,
    label_smoothed,
    masked_tokens,
    multi_softmax,
    parallel_decoder,
    recurrent,
    transformer,
    transparent_attention,
)
from deepspeed_nmt.nn.layers import DecoderLayer
from deepspeed_nmt.registry import Entry, Registry, SelfTest

# The first entry of a registry is the default.

# Builder: (config, vocabulary, make_layer) -> model.
MODELS: Registry[TranslationModel] = Registry(
    "model",
    [
        Entry("transformer", transformer.TransformerConfig, transformer.build_transformer, transformer.SELF_TEST),
        Entry("recurrent", recurrent.RecurrentConfig, recurrent.build_recurrent),
        Entry(
            "depth_growing",
            depth_growing.DepthGrowingConfig,
            depth_growing.build_depth_growing,
            depth_growing.SELF_TEST,
        ),
        Entry(
            "bert",
            parallel_decoder.BertDecoderConfig,
            parallel_decoder.build_bert_decoder,
            parallel_decoder.SELF_TEST,
        ),
        Entry("abnet", abnet.AbNetConfig, abnet.build_abnet, abnet.SELF_TEST),
        Entry(
            "transparent_attention",
            transparent_attention.TransparentAttentionConfig,
            transparent_attention.build_transparent_attention,
            transparent_attention.SELF_TEST,
        ),
    ],
)

# Builder: (config, number, parts) -> decoder layer.
LAYERS: Registry[DecoderLayer] = Registry(
    "layer",
    [
        Entry("standard", transformer.StandardLayerConfig, transformer.build_standard_layer),
        Entry(
            "cross_attention_drop",
            cross_attention_drop.CrossAttentionDropConfig,
            cross_attention_drop.build_cross_attention_drop,
            cross_attention_drop.SELF_TEST,
            cross_attention_drop.COLLAPSE_REMEDY,
        ),
    ],
)

# Builder: (config, vocabulary) -> likelihood. An objective has one likelihood.
LIKELIHOODS: Registry[Likelihood] = Registry(
    "likelihood",
    [
        Entry("label_smoothed", label_smoothed.LabelSmoothedConfig, label_smoothed.build_label_smoothed),
        Entry(
            "multi_softmax",
            multi_softmax.MultiSoftmaxConfig,
            multi_softmax.build_multi_softmax,
            multi_softmax.SELF_TEST,
        ),
        Entry("masked_tokens", masked_tokens.MaskedTokensConfig, masked_tokens.MaskedTokens),
    ],
)

# Builder: (config, vocabulary) -> regularizer. An objective has any number of regularizers.
REGULARIZERS: Registry[Regularizer] = Registry(
    "regularizer",
    [
        Entry("ddr", consistency.ConsistencyConfig, consistency.build_ddr, collapse_remedy="objective.ddr.weight=1"),
        Entry("r_drop", consistency.ConsistencyConfig, consistency.build_r_drop),
        Entry("ald", ald.ALDConfig, ald.ALD, collapse_remedy="objective.ald.weight=1"),
    ],
)


def _entries() -> Iterator[Entry[object]]:
    for table in (MODELS, LAYERS, LIKELIHOODS, REGULARIZERS):
        yield from table.entries  # type: ignore[misc]


def self_tests() -> dict[str, SelfTest]:
    """Return the `selftest` cases of all methods, by name."""
    return {entry.selftest.name: entry.selftest for entry in _entries() if entry.selftest is not None}


def collapse_remedies() -> list[str]:
    """Return the settings that methods recommend for a decoder that ignores its source."""
    return [entry.collapse_remedy for entry in _entries() if entry.collapse_remedy]
