"""The methods, one file per paper, and the tables a run's configuration names them by.

To add a paper: write its file with a Config class and a build function, and add its line here.
"""

from __future__ import annotations

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Likelihood, Regularizer
from deepspeed_nmt.methods.abnet import AbNetConfig, MaskedTokensConfig, build_abnet, build_masked_tokens
from deepspeed_nmt.methods.ald import ALDConfig, build_ald
from deepspeed_nmt.methods.consistency import ConsistencyConfig, build_ddr, build_r_drop
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.methods.label_smoothed import LabelSmoothedConfig, build_label_smoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmaxConfig, build_multi_softmax
from deepspeed_nmt.methods.parallel_decoder import BertDecoderConfig, build_bert_decoder
from deepspeed_nmt.methods.recurrent import RecurrentConfig, build_recurrent
from deepspeed_nmt.methods.transformer import (
    StandardLayerConfig,
    TransformerConfig,
    build_standard_layer,
    build_transformer,
)
from deepspeed_nmt.nn.layers import DecoderLayer
from deepspeed_nmt.registry import Entry, Registry

# name, configuration, builder: (config, vocabulary, make_layer) -> model
MODELS: Registry[TranslationModel] = Registry(
    "model",
    [
        Entry("transformer", TransformerConfig, build_transformer),
        Entry("recurrent", RecurrentConfig, build_recurrent),
        Entry("depth_growing", DepthGrowingConfig, build_depth_growing),
        Entry("bert", BertDecoderConfig, build_bert_decoder),
        Entry("abnet", AbNetConfig, build_abnet),
    ],
)

# name, configuration, builder: (config, number, parts) -> decoder layer
LAYERS: Registry[DecoderLayer] = Registry(
    "layer",
    [
        Entry("standard", StandardLayerConfig, build_standard_layer),
        Entry("cross_attention_drop", CrossAttentionDropConfig, build_cross_attention_drop),
    ],
)

# name, configuration, builder: (config, vocabulary) -> likelihood; an objective has one
LIKELIHOODS: Registry[Likelihood] = Registry(
    "likelihood",
    [
        Entry("label_smoothed", LabelSmoothedConfig, build_label_smoothed),
        Entry("multi_softmax", MultiSoftmaxConfig, build_multi_softmax),
        Entry("masked_tokens", MaskedTokensConfig, build_masked_tokens),
    ],
)

# name, configuration, builder: (config, vocabulary) -> term; an objective has any number
REGULARIZERS: Registry[Regularizer] = Registry(
    "term",
    [
        Entry("ddr", ConsistencyConfig, build_ddr),
        Entry("r_drop", ConsistencyConfig, build_r_drop),
        Entry("ald", ALDConfig, build_ald),
    ],
)
