"""Runs made of other programs' models, and the import of MarianMT models of `transformers`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.core.parts import MAX_HYPOTHESES
from deepspeed_nmt.data.marian_tokenizer import MarianTokenizer
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.engine.contract import EngineScalars, ParameterState
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.export.huggingface_weights import name_there
from deepspeed_nmt.files import atomic_write_text, check_utf8_name
from deepspeed_nmt.huggingface import MarianFiles, load_marian
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.nn.embedding import POSITIONS
from deepspeed_nmt.registry import problems_of
from deepspeed_nmt.run.directory import (
    CHECKPOINTS,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    DataRecord,
    replace_files,
)
from deepspeed_nmt.run.start import environment
from deepspeed_nmt.search.base import MAX_EXPONENT
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.progress import Progress

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "swish", "silu": "swish"}
"""Activations by their names there."""
_TOLERANCE = 1e-5
"""Largest difference of a position from those that this program computes."""


def check_new(out: Path) -> None:
    """Refuse a run directory that exists and has files."""
    check_utf8_name(out, "--run")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} has files; give another --run")


def write_run(
    out: Path, config: RunConfig, tokenizer: Tokenizer, states: Sequence[ParameterState], origin: str, text: TextForm
) -> None:
    """Write a run with one checkpoint, its best and its last, into a new directory, or leave nothing on an error.

    ``origin`` is the name of the other program's model, recorded in place of the data.
    """
    vocabulary = tokenizer.files()
    records = {file: FileRecord.of(content) for file, content in vocabulary.items()}
    data = DataRecord(path=origin, fingerprint=tokenizer.digest, text=text, common_text=text)
    out.mkdir(parents=True, exist_ok=True)
    try:
        replace_files(
            out, {CONFIG_FILE: config.to_yaml().encode(), DATA_FILE: data.model_dump_json().encode(), **vocabulary}
        )
        atomic_write_text(out / ENVIRONMENT_FILE, json.dumps(environment(), indent=1))
        store = CheckpointStore(out / CHECKPOINTS, record=data.for_checkpoints(config, records))
        store.save(Progress(best_score=0.0, best_by="import"), EngineScalars(), states)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(out)
        raise


def import_marian(name: str, out: Path) -> RunConfig:
    """Write a MarianMT model, a folder or a name on the Hugging Face hub, as a run, and return its settings."""
    check_new(out)
    files = load_marian(name, "--from")
    config = validate({"model": _model_settings(files, name), "search": _search_settings(files, name)})
    tokenizer = _tokenizer(files, name)
    states = []
    for own, parameter in build_meta_model(config, tokenizer.vocabulary).named_parameters():
        weight = files.weights.get(there := name_there(own))
        if own == "projection.bias" and weight is not None:
            weight = weight.reshape(-1)
        states.append(imported_state(own, parameter, there, weight, name))
    write_run(out, config, tokenizer, states, name, TextForm("raw"))
    return config


def _model_settings(files: MarianFiles, name: str) -> dict[str, Any]:
    """Return the settings of the model; a ConfigError lists all that it has and this program has not."""
    config = files.config
    problems = []
    for setting in ("ffn_dim", "attention_heads"):
        encoder, decoder = (getattr(config, f"{side}_{setting}") for side in ("encoder", "decoder"))
        if encoder != decoder:
            problems.append(f"{name} has {setting} {encoder} in its encoder and {decoder} in its decoder")
    if not config.scale_embedding:
        problems.append(f"{name} does not scale its embeddings (scale_embedding)")
    if config.activation_function not in _ACTIVATIONS:
        problems.append(
            f"{name} has the activation_function {config.activation_function}, none of {', '.join(_ACTIVATIONS)}"
        )
    positions = _positions(files)
    if positions is None:
        problems.append(f"{name} has positions that are not sinusoidal")
    if problems:
        raise ConfigError(problems)
    shared = "all" if config.share_encoder_decoder_embeddings else "decoder"
    return {
        "name": MODELS.default,
        "dim": config.d_model,
        "ffn_dim": config.encoder_ffn_dim,
        "heads": config.encoder_attention_heads,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        "norm": "post",
        "share_embeddings": shared if config.tie_word_embeddings else "none",
        "activation": _ACTIVATIONS[config.activation_function],
        "positions": positions,
        "output_bias": True,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.activation_dropout,
    }


class _Generation(BaseModel):
    """Settings of `generate` that a search has; the others are left out."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    num_beams: int | None = Field(default=None, ge=1, le=MAX_HYPOTHESES)
    length_penalty: float | None = Field(default=None, ge=0.0, le=MAX_EXPONENT)


def _search_settings(files: MarianFiles, name: str) -> dict[str, Any]:
    """Return the settings of the search: those of `generate`, but a beam of 5 where the model names none."""
    try:
        known = _Generation.model_validate(files.generation)
    except ValidationError as error:
        where = f"--from: the generation_config.json of {name}"
        raise ConfigError(f"{where}: {problem}" for problem in problems_of(error)) from error
    exponent = 1.0 if known.length_penalty is None else round(known.length_penalty, 4)
    return {"name": "beam", "beam": known.num_beams or 5, "length_penalty": f"power:{exponent:g}"}


def _positions(files: MarianFiles) -> str | None:
    """Return the name of the model's positions; None if it has others."""
    tables_TD = [files.weights[f"model.{side}.embed_positions.weight"] for side in ("encoder", "decoder")]
    for name, function in POSITIONS.items():
        positions = [function(table_TD.shape[0], table_TD.shape[1], None) for table_TD in tables_TD]
        differences = [float((a - b).abs().max()) for a, b in zip(tables_TD, positions, strict=True)]
        # Angles of thousands of radians are rounded differently.
        if max(differences) <= _TOLERANCE * max(1.0, len(tables_TD[0]) / 100):
            return name
    return None


def _tokenizer(files: MarianFiles, name: str) -> MarianTokenizer:
    config = files.config
    numbers = (files.numbers, files.target_numbers)
    own_target = None if config.share_encoder_decoder_embeddings else config.decoder_vocab_size
    sizes = (config.vocab_size, own_target or config.vocab_size)
    if (have := tuple(map(len, numbers))) != sizes:
        raise ConfigError(
            f"{name} has {have[0]:,} and {have[1]:,} tokens for {sizes[0]:,} and {sizes[1]:,} rows of its "
            "embeddings; use a model whose vocabulary fits"
        )
    if "<unk>" not in files.numbers:
        raise ConfigError(f"{name} has no token <unk>; use another model")
    ends = ({piece for piece, number in side.items() if number == config.eos_token_id} for side in numbers)
    if files.target_numbers.get("<unk>") != files.numbers["<unk>"] or not set.intersection(*ends):
        raise ConfigError(f"the vocabularies of {name} have other numbers for <unk> or EOS; use another model")
    special = {
        "pad": config.pad_token_id,
        "bos": config.decoder_start_token_id,
        "eos": config.eos_token_id,
        "unk": files.numbers["<unk>"],
    }
    if special["pad"] == special["eos"]:
        raise ConfigError(f"{name} has {special['pad']} as pad_token_id and as eos_token_id; use another model")
    try:
        return MarianTokenizer(files.models, numbers, special)
    except DataError as error:
        raise ConfigError(f"{name}: {error}") from error


def imported_state(
    own: str, parameter: Tensor, there: str, weight: Tensor | None, origin: str, remedy: str = "use another model"
) -> ParameterState:
    """Return a parameter with the weight `there` of another program's model `origin`, which may lack it."""
    if weight is None or weight.shape != parameter.shape:
        shape = "" if weight is None else f" as {tuple(weight.shape)}, not as {tuple(parameter.shape)}"
        raise ConfigError(f"{origin} {'has' if shape else 'lacks'} {there}{shape}; {remedy}")
    weight = weight.to(torch.float32, copy=True).contiguous()  # several of the file may share memory
    if not torch.isfinite(weight).all():
        raise ConfigError(f"{origin} has numbers in {there} that are NaN or infinite; use another model")
    return ParameterState(own, weight, {})
