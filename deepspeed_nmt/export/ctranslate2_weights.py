"""Format of CTranslate2: weights as it reads them, and its translation of an export.

Legend: V vocabulary, D model width, E output width, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.description import LinearWeights, NormWeights, StackWeights, StandardTransformer
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_search import (
    EXTRA,
    CTranslate2Search,
    ExportBeamSettings,
    import_ctranslate2,
)
from deepspeed_nmt.export.formats import MAX_TOKENS, Advance, Format, Sentences, Subject, no_progress, standardise
from deepspeed_nmt.search.base import Hypothesis

_TYPES = {"fp32": "float32", "int8": "int8"}
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}


class CTranslate2Format(Format):
    """CTranslate2, by the search that `translate --runtime ctranslate2` uses."""

    name = package = "ctranslate2"
    install = EXTRA

    def __init__(self, directory: Path, subject: Subject) -> None:
        self._search = CTranslate2Search(
            directory, subject.vocabulary, subject.pieces, subject.longest, subject.precision
        )

    @override
    @staticmethod
    def check(model: TranslationModel) -> None:
        model.described()

    @override
    @staticmethod
    def write(directory: Path, subject: Subject) -> None:
        model = subject.model.described()
        write_ctranslate2(directory, model, subject.vocabulary, subject.pieces, subject.longest, subject.precision)

    @override
    def translate(
        self, sources: Sentences, settings: ExportBeamSettings, advance: Advance = no_progress
    ) -> list[Hypothesis]:
        best = {}
        for number, hypotheses in self._search.search(sources, settings, MAX_TOKENS):
            best[number] = hypotheses[0]
            advance(1)
        return [best[number] for number in range(len(sources))]

    @override
    def token_log_probs(self, sources: Sentences, targets: Sentences) -> list[list[float]]:
        return self._search.token_log_probs(sources, targets, MAX_TOKENS)


def write_ctranslate2(
    directory: Path,
    model: StandardTransformer,
    vocabulary: Vocabulary,
    pieces: tuple[Sequence[str], Sequence[str]],
    longest: int,
    precision: str,
) -> None:
    """Write a model as CTranslate2 reads it: ``model.bin``, ``config.json`` and ``*_vocabulary.json``.

    Args:
        directory: an existing one.
        model: the model.
        vocabulary: special tokens.
        pieces: text of each token of the source and of the target.
        longest: positions of the longest sentence that the model reads or writes, T.
        precision: of the matrices: fp32, or int8 with one scale for each row.

    Raises:
        ConfigError: if CTranslate2 is not installed.
        OSError: if a file cannot be written.
    """
    import_ctranslate2()
    from ctranslate2 import specs
    from ctranslate2.specs import common_spec

    # The decoder's first layer decides for all layers whether they have cross-attention.
    model = standardise(model)
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


def _set_stack(spec: Any, stack: StackWeights) -> None:
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        own, cross, network = layer.self_attention, layer.cross_attention, layer.feed_forward
        _set_attention(layer_spec.self_attention, own.norm, _joined(own.query, own.key, own.value), own.output)
        if cross is not None:
            source = _joined(cross.key, cross.value)
            _set_attention(layer_spec.attention, cross.norm, cross.query, source, cross.output)
        _set_norm(layer_spec.ffn.layer_norm, network.norm)
        _set_linear(layer_spec.ffn.linear_0, network.up)
        _set_linear(layer_spec.ffn.linear_1, network.down)
    if stack.final_norm is not None:
        _set_norm(spec.layer_norm, stack.final_norm)


def _set_attention(spec: Any, norm: NormWeights, *layers: LinearWeights) -> None:
    _set_norm(spec.layer_norm, norm)
    for linear_spec, layer in zip(spec.linear, layers, strict=True):
        _set_linear(linear_spec, layer)


def _joined(*layers: LinearWeights) -> LinearWeights:
    """Return one matrix product for several of the same input; a bias that is missing is zero."""
    biases = [
        layer.weight_ED.new_zeros(layer.weight_ED.shape[0]) if layer.bias_E is None else layer.bias_E
        for layer in layers
    ]
    return LinearWeights(torch.cat([layer.weight_ED for layer in layers]), torch.cat(biases))


def _set_linear(spec: Any, linear: LinearWeights) -> None:
    spec.weight = _array(linear.weight_ED)
    if linear.bias_E is not None:
        spec.bias = _array(linear.bias_E)


def _set_norm(spec: Any, norm: NormWeights) -> None:
    spec.gamma, spec.beta = _array(norm.weight_D), _array(norm.bias_D)


def _array(tensor: Tensor) -> Any:
    # A copy: the quantisation changes arrays in place.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
