"""Transformers of fairseq as models of this program: their options as settings, their weights as parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.engine.base import ParameterState
from deepspeed_nmt.errors import ConfigError, shown
from deepspeed_nmt.export.huggingface_weights import LAYER_NAMES
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.run.fairseq_checkpoint import FairseqCheckpoint

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish"}
"""Activations by their names there."""
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "adaptive_softmax_cutoff": (None, "", ()),
    "adaptive_input": (False,),
    "character_embeddings": (False,),
    "encoder_learned_pos": (False,),
    "decoder_learned_pos": (False,),
    "no_token_positional_embeddings": (False,),
    "no_scale_embedding": (False,),
    "layernorm_embedding": (False,),
    "no_cross_attention": (False,),
    "cross_self_attention": (False,),
    "no_decoder_final_norm": (False,),
    "encoder_layers_to_keep": (None, ""),
    "decoder_layers_to_keep": (None, ""),
    "scale_attn": (False,),
    "scale_fc": (False,),
    "scale_heads": (False,),
    "scale_resids": (False,),
    "moe_freq": (0,),
}
"""Options that must have one of these values, in an older checkpoint also None or none at all."""
_BOTH_SIDES = ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before")
_ARCHITECTURES = re.compile(r"transformer(_(iwslt|wmt|vaswani|tiny|align|wmt_en_de)\w*)?")
"""Architectures of fairseq's own that are plain Transformers."""
_UNUSED = re.compile(
    r"(en|de)coder\.(version|embed_positions\._float_tensor)|.*\.k_proj\.bias|"
    r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)
"""Weights that change no output.

A bias of keys adds the same number to all scores of a query. Version 0.12.2 has further matrices in encoder layers,
to which its fast path copies the others.
"""
_OLD_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
"""Names of `layer_norms.0`, `layer_norms.1` and so on, of versions before 0.6."""
_OUTPUT, _OLD_OUTPUT = "decoder.output_projection.weight", "decoder.embed_out"


def model_settings(checkpoint: FairseqCheckpoint, origin: str) -> dict[str, Any]:
    """Return the settings of the model.

    Args:
        checkpoint: the model.
        origin: its file, for messages.

    Raises:
        ConfigError: if it has what this program has not; all such properties at once.
    """
    options = checkpoint.options
    if missing := [name for name in ("encoder_layers", "decoder_layers") if not isinstance(options.get(name), int)]:
        raise ConfigError(
            f"--from must be a Transformer with an encoder and a decoder, but {origin} has no option {missing[0]}; "
            "use another model"
        )
    problems = [
        f"--from must not have {name}, which this program lacks, but {origin} has {name}={shown(value)}"
        for name, allowed in _REQUIRED.items()
        if (value := options.get(name)) not in allowed and value is not None
    ]
    for name in _BOTH_SIDES:
        one, other = (options.get(f"{side}_{name}") for side in ("encoder", "decoder"))
        if (one or False) != (other or False):
            problems.append(
                f"--from must have the same encoder_{name} and decoder_{name}, but {origin} has {one} and {other}"
            )
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if options.get(name) not in (None, options.get("decoder_embed_dim")):
            problems.append(
                f"--from must have {name} equal to decoder_embed_dim, but {origin} has {options[name]} and "
                f"{options.get('decoder_embed_dim')}"
            )
    versions = [checkpoint.weights.get(f"{side}.version", torch.zeros(1)) for side in ("encoder", "decoder")]
    if options.get("encoder_normalize_before") and any(each.numel() != 1 or float(each) < 3 for each in versions):
        problems.append(
            f"--from must be written by fairseq 0.7 or newer if it is pre-norm, but {origin} is older, and may end "
            "its stacks without a LayerNorm; load and save it with a newer fairseq"
        )
    activation = options.get("activation_fn") or "relu"
    if activation not in _ACTIVATIONS:
        problems.append(
            f"--from must have an activation_fn of {', '.join(_ACTIVATIONS)}, but that of {origin} is {activation}"
        )
    if problems:
        raise ConfigError(problems)
    architecture = str(options.get("arch"))
    if not _ARCHITECTURES.fullmatch(architecture):
        logger.warning(
            "%s: the architecture %s is not one of fairseq's own Transformers, and is taken for one, because its "
            "options and weights are; compare its translations with those of fairseq-generate",
            origin,
            architecture,
        )
    if options.get("share_all_embeddings"):
        shared = "all"
    else:
        shared = "decoder" if options.get("share_decoder_input_output_embed") else "none"
    return {
        "name": MODELS.default,
        "dim": options["encoder_embed_dim"],
        "ffn_dim": options["encoder_ffn_embed_dim"],
        "heads": options["encoder_attention_heads"],
        "encoder_layers": options["encoder_layers"],
        "decoder_layers": options["decoder_layers"],
        "norm": "pre" if options.get("encoder_normalize_before") else "post",
        "share_embeddings": shared,
        "activation": _ACTIVATIONS[activation],
        "positions": "fairseq",
        "dropout": options.get("dropout") or 0.0,
        "attention_dropout": options.get("attention_dropout") or 0.0,
        "activation_dropout": options.get("activation_dropout") or options.get("relu_dropout") or 0.0,
    }


def states(model: TranslationModel, checkpoint: FairseqCheckpoint, origin: str) -> Iterator[ParameterState]:
    """Yield the parameters of a model.

    Args:
        model: model with the settings that :func:`model_settings` has returned.
        checkpoint: the model of fairseq.
        origin: its file, for messages.

    Raises:
        ConfigError: if a weight is missing, has another shape, or has no place in the model.
    """
    weights = dict(_current(checkpoint.weights))
    names = {own: _name(own) for own, _ in model.named_parameters()}
    tied = _tied(weights, names.values())
    unknown = sorted(name for name in weights.keys() - set(names.values()) - tied if not _UNUSED.fullmatch(name))
    if unknown:
        raise ConfigError(
            f"--from must have the weights of a Transformer only, but {origin} has {len(unknown):,} others, among "
            f"them {unknown[0]}; use another model"
        )
    for own, parameter in model.named_parameters():
        weight = weights.get(names[own])
        if weight is None or weight.shape != parameter.shape:
            what = "lacks it" if weight is None else f"has it as {tuple(weight.shape)}"
            remedy = "give the dictionaries of the model" if "embed_tokens" in names[own] else "use another model"
            raise ConfigError(
                f"--from must have {names[own]} as {tuple(parameter.shape)}, but {origin} {what}; {remedy}"
            )
        yield ParameterState(own, weight.to(torch.float32).contiguous(), {})


def _name(own: str) -> str:
    """Return the name there of a parameter."""
    fixed = {
        "source_embedding.weight": "encoder.embed_tokens.weight",
        "target_embedding.weight": "decoder.embed_tokens.weight",
        "projection.weight": _OUTPUT,
    }
    there = fixed.get(own, own).replace(".final_norm.", ".layer_norm.")
    for part, other in LAYER_NAMES.items():
        there = there.replace(f".{part}.", f".{other}.")
    return there


def _tied(weights: Mapping[str, Tensor], used: Sequence[str] | Any) -> set[str]:
    """Return the names of embeddings and outputs that are equal to a matrix that is used."""
    matrices = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _OUTPUT} & weights.keys()
    kept = [weights[name] for name in matrices & set(used)]
    return {
        name
        for name in matrices - set(used)
        if any(weights[name].shape == each.shape and torch.equal(weights[name], each) for each in kept)
    }


def _current(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names that versions 0.10 and 0.12 give them; those of older ones are renamed."""
    for name, weight in weights.items():
        if name == _OLD_OUTPUT:
            yield _OUTPUT, weight
        elif found := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):
            for part, each in zip("qkv", weight.chunk(3), strict=True):
                yield f"{found[1]}{part}_proj.{found[2]}", each
        elif found := re.fullmatch(r"((en|de)coder\.layers\.\d+\.)layer_norms\.(\d)(\..*)", name):
            yield f"{found[1]}{_OLD_NORMS[found[2] + 'coder'][int(found[3])]}{found[4]}", weight
        else:
            yield name, weight
