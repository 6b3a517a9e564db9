"""Format of CTranslate2: weights as it reads them, and its translation of an export.

Legend: V vocabulary, D model width, E output width, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from deepspeed_nmt.core.description import StandardTransformer
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_search import EXTRA, CTranslate2Search, ExportBeamSettings, import_ctranslate2
from deepspeed_nmt.export.formats import MAX_TOKENS, Format, Sentences, Subject, standardise
from deepspeed_nmt.search.base import Hypothesis

_TYPES = {"fp32": "float32", "int8": "int8"}
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swish": "SWISH"}


class CTranslate2Format(Format):
    """CTranslate2, by the search that `translate --runtime ctranslate2` uses."""

    name = package = "ctranslate2"
    install = EXTRA

    def __init__(self, directory: Path, subject: Subject) -> None:
        self._search = CTranslate2Search(directory, subject.tokenizer, subject.longest, subject.precision)

    @override
    @staticmethod
    def check(model: TranslationModel) -> None:
        model.described()

    @override
    @staticmethod
    def write(directory: Path, subject: Subject) -> None:
        model, tokenizer = subject.model.described(), subject.tokenizer
        pieces = tokenizer.all_pieces("source"), tokenizer.all_pieces("target")
        write_ctranslate2(directory, model, tokenizer.vocabulary, pieces, subject.longest, subject.precision)

    @override
    def translate(self, sources: Sentences, settings: ExportBeamSettings) -> list[Hypothesis]:
        best = {number: hypotheses[0] for number, hypotheses in self._search.search(sources, settings, MAX_TOKENS)}
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

    ``longest`` is the number of positions, T. In int8, a matrix has one scale for each row.
    """
    import_ctranslate2()
    from ctranslate2 import specs
    from ctranslate2.specs import common_spec

    # The decoder's first layer decides for all layers whether they have cross-attention.
    model = standardise(model)
    kinds = specs.TransformerEncoderSpec, specs.TransformerDecoderSpec
    spec = specs.TransformerSpec(
        *(
            kind(
                depth,
                model.heads,
                relative_position=model.relative,
                pre_norm=norm == "pre",
                no_final_norm=f"{side}.final_norm.weight" not in model.weights,
                activation=getattr(common_spec.Activation, _ACTIVATIONS[model.activation]),
            )
            for kind, side, depth, norm in zip(kinds, ("encoder", "decoder"), model.depths, model.norms, strict=True)
        )
    )
    positions_TD = model.positions(longest).cpu()
    sides = (spec.encoder, spec.encoder.embeddings[0], "source"), (spec.decoder, spec.decoder.embeddings, "target")
    for (side, embeddings, name), scale in zip(sides, model.input_scales, strict=True):
        embeddings.weight = _array(model.weights[f"{name}_embedding.weight"])
        side.scale_embeddings = model.scale * scale
        if not model.relative:
            side.position_encodings.encodings = _array(positions_TD * scale)
    _set_stack(spec.encoder, model.weights, "encoder")
    _set_stack(spec.decoder, model.weights, "decoder")
    _set_linear(spec.decoder.projection, model.weights, "projection")
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


def _set_stack(spec: Any, weights: Mapping[str, Tensor], side: str) -> None:
    for number, layer in enumerate(spec.layer):
        where = f"{side}.layers.{number}"
        own, (read, written) = f"{where}.self_attention", layer.self_attention.linear
        _set_linear(read, weights, f"{own}.q_proj", f"{own}.k_proj", f"{own}.v_proj")
        _set_linear(written, weights, f"{own}.out_proj")
        if f"{own}.key_edges" in weights:
            layer.self_attention.relative_position_keys = _array(weights[f"{own}.key_edges"][0])
            layer.self_attention.relative_position_values = _array(weights[f"{own}.value_edges"][0])
        _set_norm(layer.self_attention.layer_norm, weights, f"{where}.self_residual.norm")
        if side == "decoder":
            cross, (query, source, written) = f"{where}.cross_attention", layer.attention.linear
            _set_linear(query, weights, f"{cross}.q_proj")
            _set_linear(source, weights, f"{cross}.k_proj", f"{cross}.v_proj")
            _set_linear(written, weights, f"{cross}.out_proj")
            _set_norm(layer.attention.layer_norm, weights, f"{where}.cross_residual.norm")
        _set_norm(layer.ffn.layer_norm, weights, f"{where}.feed_forward_residual.norm")
        _set_linear(layer.ffn.linear_0, weights, f"{where}.feed_forward.up_proj")
        _set_linear(layer.ffn.linear_1, weights, f"{where}.feed_forward.down_proj")
    if f"{side}.final_norm.weight" in weights:
        _set_norm(spec.layer_norm, weights, f"{side}.final_norm")


def _set_linear(spec: Any, weights: Mapping[str, Tensor], *names: str) -> None:
    """Set one matrix product for several of the same input. A bias that is missing beside others is zero."""
    matrices = [weights[f"{name}.weight"] for name in names]
    spec.weight = _array(torch.cat(matrices))
    if any(f"{name}.bias" in weights for name in names):
        biases = [
            weights.get(f"{name}.bias", matrix.new_zeros(len(matrix)))
            for name, matrix in zip(names, matrices, strict=True)
        ]
        spec.bias = _array(torch.cat(biases))


def _set_norm(spec: Any, weights: Mapping[str, Tensor], name: str) -> None:
    spec.gamma, spec.beta = _array(weights[f"{name}.weight"]), _array(weights[f"{name}.bias"])


def _array(tensor: Tensor) -> Any:
    # A copy: the quantisation changes arrays in place.
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()
