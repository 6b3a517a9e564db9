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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, create_model
from torch import Tensor, _weights_only_unpickler

from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.console import logger, progress
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, MAX_LAYERS
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.fairseq import BinarisedText, FairseqTokenizer, read_dictionary
from deepspeed_nmt.engine.contract import ParameterState
from deepspeed_nmt.errors import ConfigError, DataError, shown
from deepspeed_nmt.export.huggingface_weights import layer_name
from deepspeed_nmt.files import read_regular
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.registry import problem_of
from deepspeed_nmt.run.importing import check_new, imported_state, write_run
from deepspeed_nmt.text import TextForm

_INDEX = re.compile(r"\w+\.([^.-]+)-([^.-]+)\.([^.-]+)\.idx")
SEARCH = {"name": "beam", "beam": 5, "length_penalty": "power:1", "max_length_ratio": 0.0, "max_length_extra": 201}
"""Defaults of `fairseq-generate`, which does not count EOS."""


class _Unread:
    """Stand-in for the arrays, numbers and bytes of numpy, which describe no model: it holds nothing of the file."""

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __repr__(self) -> str:
        return "an object of numpy"


_NUMPY = (
    "ndarray",
    "dtype",
    *(f"{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
)
_STAND_INS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "_codecs.encode": _Unread,
    **{f"numpy.{name}": _Unread for name in _NUMPY},
    **{f"numpy.dtypes.{name}DType": _Unread for name in ("Float64", "Float32", "Int64")},
}
"""Classes that are created besides those of tensors, by their names there; fairseq's arguments are a Namespace."""
_OF_TENSORS = re.compile(
    r"collections\.OrderedDict|builtins\.set|torch\.Size|torch\.nn\.parameter\.Parameter|"
    r"torch\._utils\._rebuild_(tensor|tensor_v2|parameter)|torch\.(bool|bfloat16|u?int\d+|float(16|32|64))|"
    r"torch\.(cuda\.)?(Bool|Byte|Char|Short|Int|Long|Half|BFloat16|Float|Double)Storage"
)
"""Those of torch that are created. Others make tensors of other kinds, or memory of any size."""
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
_SWITCHES = (
    *("adaptive_input", "character_embeddings", "encoder_learned_pos", "decoder_learned_pos", "layernorm_embedding"),
    *("no_token_positional_embeddings", "no_scale_embedding", "no_cross_attention", "cross_self_attention"),
    *("no_decoder_final_norm", "scale_attn", "scale_fc", "scale_heads", "scale_resids"),
)
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "adaptive_softmax_cutoff": (None, "", ()),
    "encoder_layers_to_keep": (None, ""),
    "decoder_layers_to_keep": (None, ""),
    "moe_freq": (0,),
    **dict.fromkeys(_SWITCHES, (False,)),
}
"""Options that must have one of these values, in an older checkpoint also None or none at all."""
_COMPARED = (bool, int, float, str, list, tuple)
_STACKS = ("encoder", "decoder")
_BOTH_SIDES = ("embed_dim", "ffn_embed_dim", "attention_heads")
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


class Languages(NamedTuple):
    """Languages of a model or a corpus, as fairseq's files name them."""

    source: str
    target: str


def find_languages(
    directory: Path, source: str | None, target: str | None, options: dict[str, Any] | None = None
) -> Languages:
    """Find the languages: those given, those of a checkpoint's options, or those of the directory's only pair.

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
        raise ConfigError(
            f"{directory} has {len(pairs)} pairs of languages in its binarised text; give --source-lang and "
            "--target-lang, the names in its dict.LANG.txt"
        )
    return Languages(*pairs[0])


def open_dictionaries(directory: Path, languages: Languages, models: Sequence[Path] = ()) -> FairseqTokenizer:
    """Read the dictionaries `dict.LANG.txt` of both sides, and their SentencePiece models if text is not segmented.

    Raises:
        DataError: if a file is missing or damaged.
        ConfigError: if there are more than two models.
    """
    source, target = (read_dictionary(directory / f"dict.{language}.txt") for language in languages)
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
    """Write the model of a checkpoint as a run with one checkpoint, which is its best and its last.

    Returns:
        Settings of the run.

    Raises:
        ConfigError: if the directory is not new, or the model has what this program has not.
        OSError: if a file cannot be written; then nothing is left in the directory.
    """
    check_new(out)
    settings: dict[str, Any] = {"model": model_settings(checkpoint, str(path)), "search": SEARCH}
    if (smoothing := checkpoint.options.get("label_smoothing")) is not None:
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


def _check_file_name(language: str | None) -> str | None:
    if language is not None and ("/" in language or "\0" in language or len(language) > 64):
        raise ValueError(f"is {shown(language)}, which cannot be a part of the name of a dictionary")
    return language


_Layers = Annotated[int | None, Field(ge=1, le=MAX_LAYERS)]
_Width = Annotated[int | None, Field(ge=1, le=MAX_INNER_WIDTH)]
_Rate = Annotated[float | None, Field(ge=0.0, lt=1.0)]
_Language = Annotated[str | None, AfterValidator(_check_file_name)]


_KINDS: Any = {
    **dict.fromkeys(("arch", "activation_fn"), str | None),
    **dict.fromkeys(("source_lang", "target_lang"), _Language),
    **{f"{side}_layers": _Layers for side in _STACKS},
    **{f"{side}_{name}": _Width for side in _STACKS for name in ("embed_dim", "ffn_embed_dim", "attention_heads")},
    **dict.fromkeys(("decoder_input_dim", "decoder_output_dim"), _Width),
    **{f"{side}_normalize_before": bool | None for side in _STACKS},
    **dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed"), bool | None),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "label_smoothing"), _Rate),
}
"""Types of the options that decide on a model, of any of which older versions know nothing."""
_FIELDS: Any = {name: (kind, None) for name, kind in _KINDS.items()}
_Options = create_model(
    "_Options", __config__=ConfigDict(strict=True, extra="ignore", allow_inf_nan=False), **_FIELDS
)


class FairseqCheckpoint(NamedTuple):
    """Options of `fairseq-train` for a model, with `source_lang` and `target_lang`, and its weights; by name."""

    options: dict[str, Any]
    weights: dict[str, Tensor]


def read_checkpoint(path: Path) -> FairseqCheckpoint:
    """Read a checkpoint. Only tensors, containers and Namespaces are created.

    Raises:
        ConfigError: if it cannot be read, holds anything else, or is no checkpoint of fairseq.
    """
    state = _load(path)
    weights = state.get("model") if isinstance(state, Mapping) else None
    if not isinstance(weights, Mapping) or not all(
        type(name) is str and isinstance(weight, Tensor) for name, weight in weights.items()
    ):
        raise ConfigError(f"{path} has no weights ('model'); give a checkpoint that fairseq-train wrote")
    assert isinstance(state, Mapping)
    for name, weight in weights.items():
        # A view can claim more numbers than there are bytes.
        if not weight.is_floating_point() or weight.nbytes > weight.untyped_storage().nbytes():
            raise ConfigError(
                f"{path} has {name} as {weight.dtype} of shape {tuple(weight.shape)}; use another model"
            )
    cfg, args = state.get("cfg"), state.get("args")
    if isinstance(args, argparse.Namespace) and cfg is None:
        options = _plain(args)
    else:
        model, task = (_plain(cfg.get(name)) if isinstance(cfg, Mapping) else None for name in ("model", "task"))
        options = None if model is None else {**(task or {}), **_flat(model)}
        if options is not None:
            options |= {key: task[key] for key in ("source_lang", "target_lang") if task and task.get(key)}
            options.setdefault("arch", options.get("_name"))
    if options is None:
        raise ConfigError(f"{path} has no options ('args' or 'cfg'); give a checkpoint that fairseq-train wrote")
    try:
        _Options.model_validate(options)
    except ValidationError as error:
        problems = [problem_of(one, f"the option {one['loc'][0]} of {path}") for one in error.errors()]
        raise ConfigError(problems) from error
    return FairseqCheckpoint(options, dict(weights))


def _load(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is not a regular file; check the path")
    of_torch = _weights_only_unpickler._get_allowed_globals()
    allowed = {name: made for name, made in of_torch.items() if _OF_TENSORS.fullmatch(name)} | _STAND_INS
    # torch has no option for a shorter list.
    tables: dict[str, Any] = {"_get_allowed_globals": lambda: allowed, "_get_user_allowed_globals": dict}
    try:
        with patch.multiple(_weights_only_unpickler, **tables), warnings.catch_warnings():
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
    """Return a section of the settings as a dictionary; None if it is none, or has names that are no text."""
    content = vars(section) if isinstance(section, argparse.Namespace) else section
    return dict(content) if isinstance(content, Mapping) and all(type(name) is str for name in content) else None


def _flat(model: dict[str, Any]) -> dict[str, Any]:
    """Return a model's settings with those of its sides as `encoder_layers` instead of a section `encoder`."""
    flat: dict[str, Any] = {}
    for name, value in model.items():
        nested = name in _STACKS and isinstance(value, Mapping)
        flat |= {f"{name}_{key}": option for key, option in value.items()} if nested else {name: value}
    return flat


def model_settings(checkpoint: FairseqCheckpoint, origin: str) -> dict[str, Any]:
    """Return the settings of a model, which came from the file `origin`.

    Raises:
        ConfigError: if it has what this program has not; all such properties at once.
    """
    options = checkpoint.options
    needed = ("embed_dim", "ffn_embed_dim", "attention_heads")
    for name in ("encoder_layers", "decoder_layers", *(f"encoder_{name}" for name in needed)):
        if options.get(name) is None:
            raise ConfigError(f"{origin} has no option {name}, as a Transformer has; use another model")
    for side in _STACKS:
        layers = {match[1] for name in checkpoint.weights if (match := re.match(rf"{side}\.layers\.(\d+)\.", name))}
        if len(layers) != options[f"{side}_layers"]:
            raise ConfigError(
                f"{origin} has {side}_layers={options[f'{side}_layers']}, but weights of {len(layers)} layers; use "
                "another model"
            )
    problems = [
        f"{origin} has {name}={shown(value)}, which this program lacks"
        for name, allowed in _REQUIRED.items()
        if (value := options.get(name)) is not None and (not isinstance(value, _COMPARED) or value not in allowed)
    ]
    for name in _BOTH_SIDES:
        one, other = (options.get(f"{side}_{name}") for side in _STACKS)
        if (one or False) != (other or False):
            problems.append(f"{origin} has encoder_{name}={one} and decoder_{name}={other}, which must be equal")
    width = options.get("decoder_embed_dim")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if options.get(name) not in (None, width):
            problems.append(f"{origin} has {name}={options[name]}, other than decoder_embed_dim={width}")
    norms = ["pre" if options.get(f"{side}_normalize_before") else "post" for side in _STACKS]
    versions = [checkpoint.weights.get(f"{side}.version", torch.zeros(1)) for side in _STACKS]
    if any(
        norm == "pre" and (version.numel() != 1 or float(version) < 3)
        for norm, version in zip(norms, versions, strict=True)
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
    shared = "decoder" if options.get("share_decoder_input_output_embed") else "none"
    return {
        "name": MODELS.default,
        "dim": options["encoder_embed_dim"],
        "ffn_dim": options["encoder_ffn_embed_dim"],
        "heads": options["encoder_attention_heads"],
        **{f"{side}_layers": options[f"{side}_layers"] for side in _STACKS},
        "norm": norms[0],
        "decoder_norm": None if norms[0] == norms[1] else norms[1],
        "share_embeddings": "all" if options.get("share_all_embeddings") else shared,
        "activation": _ACTIVATIONS[activation],
        "positions": "fairseq",
        "dropout": options.get("dropout") or 0.0,
        "attention_dropout": options.get("attention_dropout") or 0.0,
        "activation_dropout": options.get("activation_dropout") or options.get("relu_dropout") or 0.0,
    }


def states(model: TranslationModel, checkpoint: FairseqCheckpoint, origin: str) -> Iterator[ParameterState]:
    """Yield the parameters of a model with the settings that :func:`model_settings` has returned.

    Raises:
        ConfigError: if a weight is missing, has another shape, or has no place in the model.
    """
    weights = dict(_current(checkpoint.weights, origin))
    names = {own: _name(own) for own, _ in model.named_parameters()}
    tied = _tied(weights, names.values())
    unknown = sorted(name for name in weights.keys() - set(names.values()) - tied if not _UNUSED.fullmatch(name))
    if unknown:
        raise ConfigError(
            f"{origin} has {len(unknown):,} weights that a Transformer lacks, among them {unknown[0]}; use "
            "another model"
        )
    for own, parameter in model.named_parameters():
        there = names[own]
        remedy = "give the dictionaries of the model" if "embed_tokens" in there else "use another model"
        yield imported_state(own, parameter, there, weights.get(there), origin, remedy)


def _name(own: str) -> str:
    """Return the name there of a parameter."""
    fixed = {
        "source_embedding.weight": "encoder.embed_tokens.weight",
        "target_embedding.weight": "decoder.embed_tokens.weight",
        "projection.weight": _OUTPUT,
    }
    return layer_name(fixed.get(own, own))


def _tied(weights: Mapping[str, Tensor], used: Iterable[str]) -> set[str]:
    """Return the names of embeddings and outputs that are equal to a matrix that is used."""
    matrices = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _OUTPUT} & weights.keys()
    kept = [weights[name] for name in matrices & set(used)]
    return {name for name in matrices - set(used) if any(torch.equal(weights[name], matrix) for matrix in kept)}


def _current(weights: Mapping[str, Tensor], origin: str) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names that versions 0.10 and 0.12 give them; those of older ones are renamed."""
    for name, weight in weights.items():
        if name == _OLD_OUTPUT:
            yield _OUTPUT, weight
        elif match := re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name):
            if weight.ndim == 0 or len(weight) == 0 or len(weight) % 3:
                raise ConfigError(
                    f"{origin} has {name} as {tuple(weight.shape)}, not three matrices; use another model"
                )
            for part, third in zip("qkv", weight.chunk(3), strict=True):
                yield f"{match[1]}{part}_proj.{match[2]}", third
        else:
            yield name, weight


def write_text(
    directory: Path, languages: Languages, tokenizer: FairseqTokenizer, out: Path
) -> dict[str, list[Path]]:
    """Write binarised text as text, one sentence a line, from which the tokenizer makes the same numbers.

    Returns:
        The files by names such as ``train_source``.

    Raises:
        DataError: if files are missing, damaged, or not aligned.
    """
    written: dict[str, list[Path]] = {}
    for split, stem in _binarised(directory, languages):
        source, target = (
            BinarisedText.open(stem.with_name(f"{stem.name}.{language}"), len(tokenizer.all_pieces(side)))
            for side, language in zip(SIDES, languages, strict=True)
        )
        if source.lines != target.lines:
            raise DataError(
                f"{stem} has {source.lines:,} lines of source and {target.lines:,} of target; binarise the text again"
            )
        for side, text in zip(SIDES, (source, target), strict=True):
            file = out / text.path.name
            rows = progress(text.rows(), f"{split} {side}", "lines", total=text.lines)
            with file.open("w", encoding="utf-8", newline="\n") as stream:
                stream.writelines(f"{tokenizer.spelt(row, side)}\n" for row in rows)
            written.setdefault(f"{split}_{side}", []).append(file)
    return written


def _binarised(directory: Path, languages: Languages) -> Iterator[tuple[str, Path]]:
    """Yield splits with their files without ``.SIDE.bin``: of train there may be train1 and so on.

    A directory of the reverse direction has the same text.

    Raises:
        DataError: if there is no training or no validation text, also if there is other text.
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
                others = sorted({name.partition(".")[0] for name in names if _INDEX.fullmatch(name)})
                lacking = f"{directory} has no binarised text {stems[0]}.{languages.source}.idx"
                if others:
                    raise DataError(
                        f"{lacking}, which a data directory needs, but that of {' and '.join(others)} only; run "
                        f"fairseq-preprocess with --{split}pref and its dictionaries (--srcdict, --tgtdict), or "
                        "import the model alone (--run without --out)"
                    )
                raise DataError(f"{lacking}; give the directory that fairseq-preprocess has made")
            else:
                break


def _names(directory: Path) -> set[str]:
    """Return the names of a directory's files."""
    try:
        return {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read ({error.strerror or error}); check --data-bin") from error
