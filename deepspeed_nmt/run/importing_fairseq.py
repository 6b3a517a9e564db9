"""Import of fairseq's models as runs, and of its binarised text as data directories.

A checkpoint is a pickle, which is read without running what it may contain.
"""

from __future__ import annotations

import argparse
import errno
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.console import logger, progress
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import SIDES, Side
from deepspeed_nmt.data.fairseq import BinarisedText, FairseqTokenizer, read_dictionary
from deepspeed_nmt.engine.contract import ParameterState
from deepspeed_nmt.errors import ConfigError, DataError, shown
from deepspeed_nmt.export.huggingface_weights import layer_names
from deepspeed_nmt.files import read_regular
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.run.importing import check_new, write_run
from deepspeed_nmt.text import TextForm

_INDEX = re.compile(r"\w+\.([^.-]+)-([^.-]+)\.([^.-]+)\.idx")
SEARCH = {"name": "beam", "beam": 5, "length_penalty": "power:1", "max_length_ratio": 0.0, "max_length_extra": 201}
"""Defaults of `fairseq-generate`, which does not count EOS."""

_RECONSTRUCT, _SCALAR = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]
"""Functions that numpy's pickles call."""
ALLOWED: tuple[Any, ...] = (
    argparse.Namespace,
    *(np.ndarray, np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType, np.dtypes.Int64DType),
    # These functions only make arrays and numbers. The second name is that of numpy 1.
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("_core", "core")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("_core", "core")),
)
"""Classes and functions that a checkpoint may name besides those of tensors and containers.

None of them runs code of the file. fairseq saves its arguments as a Namespace, and counts of BLEU as arrays.
"""
_GLOBAL = re.compile(r"\b(?:GLOBAL|class) ([\w.]+)")
_CONVERT = (
    'write a copy where fairseq is installed: python -c "import sys, torch; from omegaconf import OmegaConf; '
    "state = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "state = {'cfg': OmegaConf.to_container(OmegaConf.create(state['cfg']), resolve=True, enum_to_str=True), "
    "'model': state['model']}; torch.save(state, sys.argv[2])\" CHECKPOINT COPY"
)
"""Way to write the settings of a checkpoint as plain values."""
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
_OUTPUT, _OLD_OUTPUT = "decoder.output_projection.weight", "decoder.embed_out"


@dataclass(frozen=True)
class Languages:
    """Languages of a model or a corpus, as fairseq's files name them."""

    source: str
    target: str

    def of(self, side: Side) -> str:
        """Return the language of a side."""
        return self.source if side == "source" else self.target


def find_languages(
    directory: Path, source: str | None, target: str | None, options: dict[str, Any] | None = None
) -> Languages:
    """Find the languages: those that are given, those of a checkpoint, or those of the directory's only pair.

    Args:
        directory: made by fairseq-preprocess.
        source: language of the source; None to find it.
        target: language of the target; None to find it.
        options: those of a checkpoint.

    Raises:
        ConfigError: if they are not clear.
    """
    known = options or {}
    source, target = source or known.get("source_lang"), target or known.get("target_lang")
    if source and target:
        return Languages(source, target)
    known_pairs = {match.groups()[:2] for file in _names(directory) if (match := _INDEX.fullmatch(file))}
    pairs = [pair for pair in known_pairs if source in (None, pair[0]) and target in (None, pair[1])]
    if len(pairs) != 1:
        what = f"has {len(pairs)} pairs of languages" if pairs else "has no binarised text that names them"
        dictionaries = [file for file in _names(directory) if file.startswith("dict.") and file.endswith(".txt")]
        if len(dictionaries) < 2:
            what += (
                f", and of dictionaries only {dictionaries[0]}" if dictionaries else ", and no dictionaries either"
            )
        raise ConfigError(f"{directory} {what}; give --source-lang and --target-lang, the names in its dict.LANG.txt")
    return Languages(*pairs[0])


def open_dictionaries(directory: Path, languages: Languages, models: Sequence[Path] = ()) -> FairseqTokenizer:
    """Read the dictionaries of both sides.

    Args:
        directory: with `dict.LANG.txt` of both languages.
        languages: of both sides.
        models: SentencePiece model of both sides, or of source and target; none for segmented text.

    Raises:
        DataError: if a file is missing or damaged.
        ConfigError: if there are more than two models.
    """
    source, target = (read_dictionary(directory / f"dict.{languages.of(side)}.txt") for side in SIDES)
    if len(models) > 2:
        raise ConfigError(f"--sentencepiece has {len(models)} models; give one, or two for source and target")
    try:
        contents = [read_regular(path) for path in models]
    except OSError as error:
        raise DataError(f"a model of --sentencepiece cannot be read ({error}); check the path") from error
    return FairseqTokenizer((source, target), (contents[0], contents[-1]) if contents else None)


def import_model(
    path: Path, checkpoint: FairseqCheckpoint, tokenizer: FairseqTokenizer, out: Path, text: TextForm
) -> RunConfig:
    """Write a model of fairseq as a run with one checkpoint, which is its best and its last.

    Args:
        path: file of the checkpoint, for messages and the run's record.
        checkpoint: its content.
        tokenizer: its dictionaries.
        out: directory of the run.
        text: form of the text.

    Returns:
        Settings of the run.

    Raises:
        ConfigError: if the directory is not new, or the model has what this program has not.
        OSError: if a file cannot be written; then nothing is left in the directory.
    """
    check_new(out)
    settings: dict[str, Any] = {"model": model_settings(checkpoint, str(path)), "search": SEARCH}
    smoothing = checkpoint.options.get("label_smoothing")
    if isinstance(smoothing, float):
        settings["objective"] = {"label_smoothed": {"smoothing": smoothing}}
    config = validate(settings)
    shared = tokenizer.vocabulary.own_source is None
    if checkpoint.options.get("share_all_embeddings") and not shared:
        raise ConfigError(
            f"{path} shares all embeddings, but the dictionaries of --data-bin differ; give the directory that the "
            "model was trained on"
        )
    model = build_meta_model(config, tokenizer.vocabulary)
    write_run(out, config, tokenizer, list(states(model, checkpoint, str(path))), str(path.resolve()), text)
    return config


class FairseqCheckpoint(NamedTuple):
    """The parts of a checkpoint that describe its model.

    Attributes:
        options: options of `fairseq-train` for the model, by name, with `source_lang` and `target_lang`.
        weights: by their names there.
    """

    options: dict[str, Any]
    weights: dict[str, Tensor]


def read_checkpoint(path: Path) -> FairseqCheckpoint:
    """Read a checkpoint. Only :data:`ALLOWED` and what `torch.load(weights_only=True)` allows are created.

    Raises:
        ConfigError: if it cannot be read, holds anything else, or is no checkpoint of fairseq.
    """
    state = _load(path)
    weights = state.get("model") if isinstance(state, Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise ConfigError(f"{path} has no weights ('model'); give a checkpoint that fairseq-train wrote")
    assert isinstance(state, Mapping)
    cfg, args = state.get("cfg"), state.get("args")
    if isinstance(args, argparse.Namespace) and cfg is None:
        options = vars(args)
    elif isinstance(cfg, Mapping) and _plain(cfg.get("model")) is not None:
        task = _plain(cfg.get("task")) or {}
        options = {**task, **_flat(_plain(cfg["model"]) or {})}
        options |= {key: task[key] for key in ("source_lang", "target_lang") if task.get(key)}
        options.setdefault("arch", options.get("_name"))
    else:
        raise ConfigError(f"{path} has no options ('args' or 'cfg'); give a checkpoint that fairseq-train wrote")
    return FairseqCheckpoint(options, dict(weights))


def _load(path: Path) -> Any:
    """Read the file.

    Raises:
        ConfigError: if it cannot be read, or holds other objects than those that are allowed.
    """
    try:
        with torch.serialization.safe_globals(list(ALLOWED)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's version, before the error that follows
            # A checkpoint also has the optimizer's state, which need not be in memory.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        if error.errno == errno.EINVAL:  # its end is missing, so that it cannot be mapped
            raise _unreadable(path, "it is cut off") from error
        raise ConfigError(f"{path} cannot be read ({error.strerror or error}); check the path") from error
    except pickle.UnpicklingError as error:
        if (match := _GLOBAL.search(str(error))) is None:
            raise _unreadable(path, "its pickle is damaged, or has more than data") from error
        name = match[1]
        remedy = _CONVERT if name.split(".")[0] in ("omegaconf", "fairseq") else "get it from a source that you trust"
        raise ConfigError(
            f"{path} has {name}, which is not created, because that could run code of the file; {remedy}"
        ) from error
    except Exception as error:  # a damaged file can raise any error
        raise _unreadable(path, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is no checkpoint of fairseq, or damaged ({why}); check the path, or restore the file")


def _plain(section: Any) -> dict[str, Any] | None:
    """Return a section of the settings as a dictionary; None if it is none."""
    if isinstance(section, argparse.Namespace):
        return dict(vars(section))
    return dict(section) if isinstance(section, Mapping) else None


def _flat(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's settings with those of its sides as `encoder_layers` instead of a section `encoder`."""
    flat: dict[str, Any] = {}
    for name, value in model.items():
        if name in ("encoder", "decoder") and isinstance(value, Mapping):
            flat |= {f"{name}_{key}": option for key, option in value.items()}
        else:
            flat[name] = value
    return flat


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
        raise ConfigError(f"{origin} has no option {missing[0]}, as a Transformer has; use another model")
    problems = [
        f"{origin} has {name}={shown(value)}, which this program lacks"
        for name, allowed in _REQUIRED.items()
        if (value := options.get(name)) not in allowed and value is not None
    ]
    for name in _BOTH_SIDES:
        one, other = (options.get(f"{side}_{name}") for side in ("encoder", "decoder"))
        if (one or False) != (other or False):
            problems.append(f"{origin} has encoder_{name}={one} and decoder_{name}={other}, which must be equal")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if options.get(name) not in (None, options.get("decoder_embed_dim")):
            width = options.get("decoder_embed_dim")
            problems.append(f"{origin} has {name}={options[name]}, other than decoder_embed_dim={width}")
    versions = [checkpoint.weights.get(f"{side}.version", torch.zeros(1)) for side in ("encoder", "decoder")]
    if options.get("encoder_normalize_before") and any(
        version.numel() != 1 or float(version) < 3 for version in versions
    ):
        problems.append(
            f"{origin} is pre-norm and older than fairseq 0.7, so that its stacks may end without a LayerNorm; load "
            "and save it with a newer fairseq"
        )
    activation = options.get("activation_fn") or "relu"
    if activation not in _ACTIVATIONS:
        problems.append(f"{origin} has activation_fn={activation}, none of {', '.join(_ACTIVATIONS)}")
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
            f"{origin} has {len(unknown):,} weights that a Transformer lacks, among them {unknown[0]}; use "
            "another model"
        )
    for own, parameter in model.named_parameters():
        weight = weights.get(names[own])
        if weight is None or weight.shape != parameter.shape:
            what = f"lacks {names[own]}" if weight is None else f"has {names[own]} as {tuple(weight.shape)}"
            remedy = "give the dictionaries of the model" if "embed_tokens" in names[own] else "use another model"
            raise ConfigError(f"{origin} {what}, not as {tuple(parameter.shape)}; {remedy}")
        yield ParameterState(own, weight.to(torch.float32).contiguous(), {})


def _name(own: str) -> str:
    """Return the name there of a parameter."""
    fixed = {
        "source_embedding.weight": "encoder.embed_tokens.weight",
        "target_embedding.weight": "decoder.embed_tokens.weight",
        "projection.weight": _OUTPUT,
    }
    return layer_names(fixed.get(own, own).replace(".final_norm.", ".layer_norm."))


def _tied(weights: Mapping[str, Tensor], used: Sequence[str] | Any) -> set[str]:
    """Return the names of embeddings and outputs that are equal to a matrix that is used."""
    matrices = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _OUTPUT} & weights.keys()
    kept = [weights[name] for name in matrices & set(used)]
    return {
        name
        for name in matrices - set(used)
        if any(weights[name].shape == matrix.shape and torch.equal(weights[name], matrix) for matrix in kept)
    }


def _current(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names that versions 0.10 and 0.12 give them; those of older ones are renamed."""
    for name, weight in weights.items():
        if name == _OLD_OUTPUT:
            yield _OUTPUT, weight
        elif match := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):
            for part, third in zip("qkv", weight.chunk(3), strict=True):
                yield f"{match[1]}{part}_proj.{match[2]}", third
        else:
            yield name, weight


def write_text(
    directory: Path, languages: Languages, tokenizer: FairseqTokenizer, out: Path
) -> dict[str, list[Path]]:
    """Write binarised text as text, one sentence a line, from which the tokenizer makes the same numbers.

    Args:
        directory: made by fairseq-preprocess.
        languages: of both sides.
        tokenizer: its dictionaries.
        out: existing directory for the text.

    Returns:
        The files by names such as ``train_source``.

    Raises:
        DataError: if files are missing, damaged, or not aligned.
    """
    written: dict[str, list[Path]] = {}
    sizes = {side: len(tokenizer.all_pieces(side)) for side in SIDES}
    for split, stem in _binarised(directory, languages):
        paths = {side: stem.with_name(f"{stem.name}.{languages.of(side)}") for side in SIDES}
        texts = {side: BinarisedText.open(paths[side], sizes[side]) for side in SIDES}
        counts = [texts[side].lines for side in SIDES]
        if counts[0] != counts[1]:
            raise DataError(
                f"{stem} has {counts[0]:,} lines of source and {counts[1]:,} of target; binarise the text again"
            )
        for side, text in texts.items():
            file = out / paths[side].name
            rows = progress(text.rows(), f"{split} {side}", "lines", total=text.lines)
            with file.open("w", encoding="utf-8", newline="\n") as stream:
                stream.writelines(f"{tokenizer.spelt(row, side)}\n" for row in rows)
            written.setdefault(f"{split}_{side}", []).append(file)
    return written


def _binarised(directory: Path, languages: Languages) -> Iterator[tuple[str, Path]]:
    """Yield splits with their files without ``.SIDE.bin``: of train there may be train1 and so on.

    A directory of the reverse direction has the same text.

    Raises:
        DataError: if there is no training or no validation text.
    """
    names = _names(directory)
    pairs = [f"{languages.source}-{languages.target}", f"{languages.target}-{languages.source}"]
    for split in ("train", "valid", "test"):
        for number in range(len(names) if split == "train" else 1):
            stems = [f"{split}{number or ''}.{pair}" for pair in pairs]
            stem = next((name for name in stems if f"{name}.{languages.source}.idx" in names), None)
            if stem is not None:
                yield split, directory / stem
            elif number == 0 and split != "test":
                raise DataError(
                    f"{directory} has no binarised text {stems[0]}.{languages.source}.idx; give the directory that "
                    "fairseq-preprocess has made"
                )
            else:
                break


def _names(directory: Path) -> set[str]:
    """Return the names of a directory's files.

    Raises:
        ConfigError: if it is none.
    """
    try:
        return {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read ({error.strerror or error}); check --data-bin") from error
