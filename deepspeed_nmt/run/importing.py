"""Import of MarianMT models of `transformers` as runs, to be grown, cut at exits, or trained further."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.data.marian_tokenizer import MarianTokenizer
from deepspeed_nmt.engine.base import ParameterState
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.export.huggingface_weights import own_names, shared_embeddings
from deepspeed_nmt.huggingface import MarianFiles, load_marian
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.nn.embedding import POSITIONS
from deepspeed_nmt.run.imported import check_new, write_run
from deepspeed_nmt.text import TextForm

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
"""Activations by their names there."""
_TOLERANCE = 1e-5
"""Largest difference of a position from those that this program computes."""


def import_marian(name: str, out: Path) -> RunConfig:
    """Write a MarianMT model as a run with one checkpoint, which is its best and its last.

    Args:
        name: a folder, or a name on the Hugging Face hub.
        out: directory of the run.

    Returns:
        Settings of the run.

    Raises:
        ConfigError: if the directory is not new, or the model has what this program has not.
        OSError: if a file cannot be written; then nothing is left in the directory.
    """
    check_new(out)
    files = load_marian(name, "--from")
    config = validate({"model": _model_settings(files, name), "search": _search_settings(files)})
    tokenizer = _tokenizer(files, name)
    model = build_meta_model(config, tokenizer.vocabulary)
    states = list(_states(model, files, name))
    write_run(out, config, tokenizer, states, name, TextForm("raw"))
    return config


def _model_settings(files: MarianFiles, name: str) -> dict[str, Any]:
    """Return the settings of the model.

    Raises:
        ConfigError: if it has what this program has not; all such properties at once.
    """
    config = files.config
    problems = []
    for setting, there in (("ffn_dim", "ffn_dim"), ("heads", "attention_heads")):
        sides = [config[f"{side}_{there}"] for side in ("encoder", "decoder")]
        if sides[0] != sides[1]:
            problems.append(
                f"--from must have the same {setting} on both sides, but {name} has {sides[0]} and {sides[1]}"
            )
    if not config.get("scale_embedding", False):
        problems.append(f"--from must scale its embeddings (scale_embedding), but {name} does not")
    if config["activation_function"] not in _ACTIVATIONS:
        problems.append(
            f"--from must have an activation_function of {', '.join(_ACTIVATIONS)}, but that of {name} is "
            f"{config['activation_function']}"
        )
    positions = _positions(files)
    if positions is None:
        problems.append(f"--from must have sinusoidal positions, but those of {name} are others")
    if problems:
        raise ConfigError(problems)
    return {
        "name": MODELS.default,
        "dim": config["d_model"],
        "ffn_dim": config["encoder_ffn_dim"],
        "heads": config["encoder_attention_heads"],
        "encoder_layers": config["encoder_layers"],
        "decoder_layers": config["decoder_layers"],
        "norm": "post",
        "share_embeddings": shared_embeddings(config),
        "activation": _ACTIVATIONS[config["activation_function"]],
        "positions": positions,
        "output_bias": True,
        "dropout": config.get("dropout", 0.1),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "activation_dropout": config.get("activation_dropout", 0.0),
    }


def _positions(files: MarianFiles) -> str | None:
    """Return the name of the model's positions; None if it has others."""
    tables = [files.weights[f"model.{side}.embed_positions.weight"] for side in ("encoder", "decoder")]
    for name, function in POSITIONS.items():
        if all(_close(table, function(table.shape[0], table.shape[1], None)) for table in tables):
            return name
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    # Angles of thousands of radians are rounded differently.
    return bool((one - other).abs().max() <= _TOLERANCE * max(1.0, len(one) / 100))


def _search_settings(files: MarianFiles) -> dict[str, Any]:
    """Return the settings of the search: those that `generate` has, with a limit for each sentence."""
    beams = files.config.get("num_beams")
    return {"name": "beam", "beam": int(beams) if beams else 5, "length_penalty": "power:1"}


def _tokenizer(files: MarianFiles, name: str) -> MarianTokenizer:
    """Return the tokenizer.

    Raises:
        ConfigError: if its tokens are not those of the embeddings.
    """
    config = files.config
    numbers = (files.numbers, files.target_numbers)
    shared = config.get("share_encoder_decoder_embeddings", True)
    sizes = (config["vocab_size"], config["vocab_size"] if shared else config["decoder_vocab_size"])
    if (have := tuple(map(len, numbers))) != sizes:
        raise ConfigError(
            f"--from must have a token for each row of its embeddings, but {name} has {have[0]:,} and {have[1]:,} "
            f"tokens for {sizes[0]:,} and {sizes[1]:,} rows; use a model whose vocabulary fits"
        )
    special = {
        "pad": files.special["pad"],
        "bos": files.special["decoder_start"],
        "eos": files.special["eos"],
        "unk": files.numbers["<unk>"],
    }
    try:
        return MarianTokenizer(files.models, numbers, special)
    except DataError as error:
        raise ConfigError(f"--from {name}: {error}") from error


def _states(model: TranslationModel, files: MarianFiles, name: str) -> Iterator[ParameterState]:
    """Yield the parameters.

    Raises:
        ConfigError: if one is missing, or has another shape.
    """
    parameters = dict(model.named_parameters())
    for own, there in own_names(list(parameters)).items():
        weight = files.weights.get(there)
        if own == "projection.bias" and weight is not None:
            weight = weight.reshape(-1)
        if weight is None or weight.shape != parameters[own].shape:
            what = "lacks it" if weight is None else f"has it as {tuple(weight.shape)}"
            raise ConfigError(
                f"--from must have {there} as {tuple(parameters[own].shape)}, but {name} {what}; use another model"
            )
        yield ParameterState(own, weight.to(torch.float32).contiguous(), {})
