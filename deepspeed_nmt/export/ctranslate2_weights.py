"""Weights of plain Transformers in the format of CTranslate2.

Legend: V vocabulary, D model width, E output width, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from deepspeed_nmt.core.plain import PlainAttention, PlainLayer, PlainLinear, PlainNorm, PlainStack, PlainTransformer
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_search import import_ctranslate2
from deepspeed_nmt.export.folding import fill_cross_attention, fold_deepnorm

Precision = Literal["fp32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
_TYPES = {"fp32": "float32", "int8": "int8"}
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}


def write_ctranslate2(
    directory: Path,
    model: PlainTransformer,
    vocabulary: Vocabulary,
    pieces: tuple[Sequence[str], Sequence[str]],
    longest: int,
    precision: Precision,
) -> None:
    """Write a model as CTranslate2 reads it: ``model.bin``, ``config.json`` and ``*_vocabulary.json``.

    Args:
        directory: an existing one.
        model: the model.
        vocabulary: special tokens.
        pieces: text of each token of the source and of the target.
        longest: positions of the longest sentence that the model reads or writes, T.
        precision: of the matrices; int8 has one scale for each row.

    Raises:
        ConfigError: if CTranslate2 is not installed.
        OSError: if a file cannot be written.
    """
    import_ctranslate2()
    from ctranslate2 import specs
    from ctranslate2.specs import common_spec

    # The decoder's first layer decides for all layers whether they have cross-attention.
    model = fill_cross_attention(fold_deepnorm(model))
    spec = specs.TransformerSpec.from_config(
        (len(model.encoder.layers), len(model.decoder.layers)),
        model.heads,
        pre_norm=model.norm == "pre",
        no_final_norm=model.encoder.final_norm is None,
        activation=getattr(common_spec.Activation, _ACTIVATIONS[model.activation]),
    )
    positions_TD = model.positions(longest).cpu()
    sides = ((spec.encoder, model.encoder, model.source_VD), (spec.decoder, model.decoder, model.target_VD))
    for side, stack, weight_VD in sides:
        embeddings = side.embeddings[0] if side is spec.encoder else side.embeddings
        embeddings.weight = _array(weight_VD)
        side.scale_embeddings = model.scale * stack.input_scale
        side.position_encodings.encodings = _array(positions_TD * stack.input_scale)
        _set_stack(side, stack)
    _set_linear(spec.decoder.projection, model.output)
    config = spec.config
    for name, number in (("unk", vocabulary.unk), ("bos", vocabulary.bos), ("eos", vocabulary.eos)):
        setattr(config, f"{name}_token", pieces[1][number])
    config.decoder_start_token = pieces[1][vocabulary.bos]
    config.add_source_eos = True
    config.layer_norm_epsilon = model.norm_eps
    spec.register_source_vocabulary(list(pieces[0]))
    spec.register_target_vocabulary(list(pieces[1]))
    spec.validate()
    spec.optimize(quantization=_TYPES[precision])
    spec.save(str(directory))


def _set_stack(spec: Any, stack: PlainStack) -> None:
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _set_layer(layer_spec, layer)
    if stack.final_norm is not None:
        _set_norm(spec.layer_norm, stack.final_norm)


def _set_layer(spec: Any, layer: PlainLayer) -> None:
    own, cross, network = layer.self_attention, layer.cross_attention, layer.feed_forward
    _set_norm(spec.self_attention.layer_norm, own.norm)
    _set_linear(spec.self_attention.linear[0], _joined(own.query, own.key, own.value))
    _set_linear(spec.self_attention.linear[1], own.output)
    if cross is not None:
        _set_cross(spec.attention, cross)
    _set_norm(spec.ffn.layer_norm, network.norm)
    _set_linear(spec.ffn.linear_0, network.up)
    _set_linear(spec.ffn.linear_1, network.down)


def _set_cross(spec: Any, cross: PlainAttention) -> None:
    _set_norm(spec.layer_norm, cross.norm)
    _set_linear(spec.linear[0], cross.query)
    _set_linear(spec.linear[1], _joined(cross.key, cross.value))
    _set_linear(spec.linear[2], cross.output)


def _joined(*layers: PlainLinear) -> PlainLinear:
    """Return one matrix product for several of the same input; a bias that is missing is zero."""
    biases = [
        layer.weight_ED.new_zeros(layer.weight_ED.shape[0]) if layer.bias_E is None else layer.bias_E
        for layer in layers
    ]
    return PlainLinear(torch.cat([layer.weight_ED for layer in layers]), torch.cat(biases))


def _set_linear(spec: Any, linear: PlainLinear) -> None:
    spec.weight = _array(linear.weight_ED)
    if linear.bias_E is not None:
        spec.bias = _array(linear.bias_E)


def _set_norm(spec: Any, norm: PlainNorm) -> None:
    spec.gamma, spec.beta = _array(norm.weight_D), _array(norm.bias_D)


def _array(tensor: Tensor) -> Any:
    # A copy: the quantisation changes arrays in place.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


def longest_positions(longest_source: int, max_length_ratio: float, max_length_extra: int) -> int:
    """Return the number of positions that an export needs: that of the longest source or translation, rounded up.

    Args:
        longest_source: tokens of the longest source, EOS included.
        max_length_ratio: of the search.
        max_length_extra: of the search.
    """
    longest = max(longest_source, int(max_length_ratio * longest_source) + max_length_extra) + 1
    return 1 << math.ceil(math.log2(longest))
