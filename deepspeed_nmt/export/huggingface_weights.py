"""Plain Transformers as models of Hugging Face's `transformers`, and back.

Post-norm models are MarianMT models, pre-norm ones Pegasus models: these classes read their sinusoidal positions from
the weights, so they can have any wavelengths.

Legend: V vocabulary, D model width, T positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_nmt.core.plain import (
    NotPlainError,
    PlainAttention,
    PlainLinear,
    PlainNorm,
    PlainStack,
    PlainTransformer,
)
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.folding import fill_cross_attention, fold_deepnorm

WEIGHTS_FILE = "model.safetensors"
_CLASSES = {"post": ("marian", "MarianMTModel"), "pre": ("pegasus", "PegasusForConditionalGeneration")}
_EPS = 1e-5
"""Eps of the LayerNorms of both classes."""
LAYER_NAMES = {
    "self_attention": "self_attn",
    "self_residual.norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "feed_forward.up_proj": "fc1",
    "feed_forward.down_proj": "fc2",
    "feed_forward_residual.norm": "final_layer_norm",
}
"""Modules of a layer here, and their names there."""


def check_class(model: PlainTransformer) -> None:
    """Check that a class of ``transformers`` can have a model.

    Raises:
        NotPlainError: if none can.
    """
    if model.norm_eps != _EPS:
        raise NotPlainError(
            f"its LayerNorms have eps {model.norm_eps:g}, and those of transformers' classes {_EPS:g}"
        )
    if model.norm == "pre" and len(model.source_VD) != len(model.target_VD):
        raise NotPlainError("it is pre-norm and has two vocabularies, and transformers' Pegasus has one")


def write_huggingface(directory: Path, model: PlainTransformer, vocabulary: Vocabulary, longest: int) -> None:
    """Write a model as ``transformers`` reads it: weights, ``config.json`` and ``generation_config.json``.

    Args:
        directory: an existing one.
        model: the model.
        vocabulary: special tokens.
        longest: positions of the longest sentence, T.

    Raises:
        NotPlainError: if no class can have the model.
        OSError: if a file cannot be written.
    """
    check_class(model)
    model = fill_cross_attention(fold_deepnorm(model))
    kind, name = _CLASSES[model.norm]
    state = dict(_state(model, longest))
    tied = _tie(model, state)
    config = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": len(model.source_VD),
        "decoder_vocab_size": len(model.target_VD),
        "share_encoder_decoder_embeddings": tied,
        "tie_word_embeddings": tied,
        "d_model": model.dim,
        **{f"{side}_layers": len(getattr(model, side).layers) for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": model.heads for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": model.ffn_dim for side in ("encoder", "decoder")},
        "activation_function": model.activation,
        "scale_embedding": True,
        "max_position_embeddings": longest,
        "static_position_embeddings": True,
        "is_encoder_decoder": True,
        "dropout": 0.1,
        "torch_dtype": "float32",
        "forced_eos_token_id": None,
        **_special(vocabulary),
    }
    generation = {
        **_special(vocabulary),
        "suppress_tokens": list(vocabulary.unpredicted),
        "forced_eos_token_id": None,
        "early_stopping": True,
        "num_beams": 5,
        "max_length": longest,
    }
    for file, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    try:
        save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error


def _special(vocabulary: Vocabulary) -> dict[str, int]:
    return {
        "pad_token_id": vocabulary.pad,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
        "decoder_start_token_id": vocabulary.bos,
    }


def _tie(model: PlainTransformer, state: dict[str, Tensor]) -> bool:
    """Return True if one matrix serves as embeddings and output, and then keep one copy of it in a state."""
    scales = {model.encoder.input_scale, model.decoder.input_scale}
    matrices = (model.source_VD, model.target_VD, model.output.weight_ED)
    if scales != {1.0} or len({matrix.data_ptr() for matrix in matrices}) > 1:
        return False
    for name in ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"):
        del state[name]
    return True


def _state(model: PlainTransformer, longest: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by their names there."""
    positions_TD = model.positions(longest).cpu()
    # The scale there is sqrt(D); whatever else scales the embedded tokens is in the matrices.
    excess = model.scale / math.sqrt(model.dim)
    for side, stack, weight_VD in (
        ("encoder", model.encoder, model.source_VD),
        ("decoder", model.decoder, model.target_VD),
    ):
        factor = excess * stack.input_scale
        yield f"model.{side}.embed_tokens.weight", _copy(weight_VD * factor)
        if side == "decoder":
            yield "model.shared.weight", _copy(weight_VD * factor)
        yield f"model.{side}.embed_positions.weight", _copy(positions_TD * stack.input_scale)
        yield from _stack_state(stack, f"model.{side}")
    yield "lm_head.weight", _copy(model.output.weight_ED)
    bias = model.output.bias_E
    yield "final_logits_bias", _copy(torch.zeros(len(model.target_VD)) if bias is None else bias).unsqueeze(0)


def _stack_state(stack: PlainStack, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for number, layer in enumerate(stack.layers):
        where = f"{prefix}.layers.{number}"
        yield from _attention_state(layer.self_attention, f"{where}.self_attn")
        if layer.cross_attention is not None:
            yield from _attention_state(layer.cross_attention, f"{where}.encoder_attn")
        network = layer.feed_forward
        yield from _linear_state(network.up, f"{where}.fc1")
        yield from _linear_state(network.down, f"{where}.fc2")
        yield from _norm_state(network.norm, f"{where}.final_layer_norm")
    if stack.final_norm is not None:
        yield from _norm_state(stack.final_norm, f"{prefix}.layer_norm")


def _attention_state(attention: PlainAttention, where: str) -> Iterator[tuple[str, Tensor]]:
    yield from _linear_state(attention.query, f"{where}.q_proj")
    yield from _linear_state(attention.key, f"{where}.k_proj")
    yield from _linear_state(attention.value, f"{where}.v_proj")
    yield from _linear_state(attention.output, f"{where}.out_proj")
    yield from _norm_state(attention.norm, f"{where}_layer_norm")


def _linear_state(linear: PlainLinear, where: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{where}.weight", _copy(linear.weight_ED)
    bias = linear.bias_E
    yield f"{where}.bias", _copy(linear.weight_ED.new_zeros(len(linear.weight_ED)) if bias is None else bias)


def _norm_state(norm: PlainNorm, where: str) -> Iterator[tuple[str, Tensor]]:
    yield f"{where}.weight", _copy(norm.weight_D)
    yield f"{where}.bias", _copy(norm.bias_D)


def _copy(tensor: Tensor) -> Tensor:
    # Tensors that share memory cannot be saved in one file.
    return tensor.detach().to("cpu", torch.float32).clone().contiguous()


def own_names(names: Sequence[str]) -> dict[str, str]:
    """Return the name there of each parameter of a Transformer of this program.

    Args:
        names: of the parameters here.
    """
    fixed = {
        "source_embedding.weight": "model.encoder.embed_tokens.weight",
        "target_embedding.weight": "model.decoder.embed_tokens.weight",
        "projection.weight": "lm_head.weight",
        "projection.bias": "final_logits_bias",
    }
    found = {}
    for name in names:
        if name in fixed:
            found[name] = fixed[name]
            continue
        there = f"model.{name}"
        for part, other in LAYER_NAMES.items():
            there = there.replace(f".{part}.", f".{other}.")
        found[name] = there
    return found


def shared_embeddings(config: Mapping[str, Any]) -> str:
    """Return the value of ``model.share_embeddings`` for a configuration of MarianMT."""
    if not config.get("share_encoder_decoder_embeddings", True):
        return "decoder" if config.get("tie_word_embeddings", True) else "none"
    return "all" if config.get("tie_word_embeddings", True) else "none"
