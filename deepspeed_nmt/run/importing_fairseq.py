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
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from pydantic import ConfigDict, Field, ValidationError, create_model
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
from deepspeed_nmt.export.huggingface_weights import name_there
from deepspeed_nmt.files import read_regular
from deepspeed_nmt.methods import MODELS
from deepspeed_nmt.run.importing import check_new, imported_state, write_run
from deepspeed_nmt.text import TextForm

_INDEX = re.compile(r"\w+\.([^.-]+)-([^.-]+)\.([^.-]+)\.idx")
SEARCH = {
    "name": "beam",
    "beam": 5,
    "length_penalty": "power:1",
    "min_length": 2,
    "max_length_ratio": 0.0,
    "max_length_extra": 201,
}
"""Defaults of `fairseq-generate`, which does not count EOS: at least one token, at most 200."""


class _Unread:
    """Stand-in for the arrays, numbers and bytes of numpy, which describe no model: it holds nothing of the file."""

    def __init__(self, *arguments: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...

    def __repr__(self) -> str:
        return "an object that describes no model"


_NUMPY = (
    "ndarray",
    "dtype",
    *(f"{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(f"dtypes.{name}DType" for name in ("Float64", "Float32", "Int64")),
)
_STAND_INS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "_codecs.encode": _Unread,
    **{f"numpy.{name}": _Unread for name in _NUMPY},
    **{f"fairseq.meters.{name}Meter": _Unread for name in ("Average", "Time", "Stopwatch")},  # before 0.9
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
    "cfg = state.get('cfg'); "
    "cfg = cfg and OmegaConf.to_container(OmegaConf.create(cfg), resolve=True, enum_to_str=True); "
    "state = {'cfg': cfg, 'args': state.get('args'), 'model': state['model']}; "
    'torch.save(state, sys.argv[2])" CHECKPOINT COPY'
)
"""Way to write the settings of a checkpoint as plain values."""
_STACKS = ("encoder", "decoder")
_WIDTHS = ("embed_dim", "ffn_embed_dim", "attention_heads")
_REQUIRED = {"encoder_layers", "decoder_layers", *(f"encoder_{name}" for name in _WIDTHS)}
_SWITCHES = (
    *("adaptive_input", "character_embeddings", "encoder_learned_pos", "decoder_learned_pos", "layernorm_embedding"),
    *("no_token_positional_embeddings", "no_scale_embedding", "no_cross_attention", "cross_self_attention"),
    *("no_decoder_final_norm", "scale_attn", "scale_fc", "scale_heads", "scale_resids"),
)
"""Options that other models have."""
_Width = Annotated[int, Field(ge=1, le=MAX_INNER_WIDTH)]
_TYPES: dict[str, Any] = {
    "arch": str,
    "activation_fn": Literal["relu", "gelu", "swish"],
    # Parts of the names of files.
    **dict.fromkeys(("source_lang", "target_lang"), Annotated[str, Field(pattern=r"^[^/\x00]*$", max_length=64)]),
    **{f"{side}_layers": Annotated[int, Field(ge=1, le=MAX_LAYERS)] for side in _STACKS},
    **{f"{side}_{name}": _Width for side in _STACKS for name in _WIDTHS},
    **dict.fromkeys(("decoder_input_dim", "decoder_output_dim"), _Width),
    **{f"{side}_normalize_before": bool for side in _STACKS},
    **dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed"), bool),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "label_smoothing"),
        Annotated[float, Field(ge=0.0, lt=1.0)],
    ),
    **dict.fromkeys(_SWITCHES, Literal[False]),
    "adaptive_softmax_cutoff": Literal[""] | tuple[()],
    **{f"{side}_layers_to_keep": Literal[""] for side in _STACKS},
    "moe_freq": Literal[0],
}
"""Types of the options that decide on a model; older versions know nothing of most, which are then None."""
_FIELDS: Any = {name: (kind, ... if name in _REQUIRED else None) for name, kind in _TYPES.items()}
_Options = create_model("_Options", __config__=ConfigDict(strict=True, allow_inf_nan=False), **_FIELDS)
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
_MATRICES = {
    "source_embedding.weight": "encoder.embed_tokens.weight",
    "target_embedding.weight": "decoder.embed_tokens.weight",
    "projection.weight": "decoder.output_projection.weight",
}
"""Matrices of which some can be tied, by their names here."""


class Languages(NamedTuple):
    """Languages of a model or a corpus, as fairseq's files name them."""

    source: str
    target: str


class FairseqCheckpoint(NamedTuple):
    """Options of `fairseq-train` that decide on a model, as attributes (None if not given), and weights by name."""

    options: Any
    weights: dict[str, Tensor]


def find_languages(
    directory: Path, source: str | None, target: str | None, checkpoint: FairseqCheckpoint | None = None
) -> Languages:
    """Return the languages that are given, those of a checkpoint, or those of the directory's only pair."""
    if checkpoint is not None:
        source, target = source or checkpoint.options.source_lang, target or checkpoint.options.target_lang
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
    """Read the dictionaries `dict.LANG.txt` of both sides, and their SentencePiece models if text is raw."""
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
    """Write the model of a checkpoint as a run in a new directory, and return its settings."""
    check_new(out)
    options = checkpoint.options
    settings: dict[str, Any] = {"model": _model_settings(checkpoint, str(path)), "search": SEARCH}
    if options.label_smoothing is not None:
        settings["objective"] = {"label_smoothed": {"smoothing": options.label_smoothing}}
    config = validate(settings)
    if options.share_all_embeddings and tokenizer.vocabulary.own_source is not None:
        raise ConfigError(
            f"{path} shares all embeddings, but the dictionaries of --data-bin differ; give the directory that the "
            "model was trained on"
        )
    model = build_meta_model(config, tokenizer.vocabulary)
    write_run(out, config, tokenizer, list(_states(model, checkpoint, str(path))), str(path.resolve()), text)
    return config


def read_checkpoint(path: Path) -> FairseqCheckpoint:
    """Read a checkpoint, of which only tensors, containers and Namespaces are created; all else is a ConfigError."""
    content = _load(path)
    state = content if isinstance(content, Mapping) else {}
    weights = state.get("model")
    if not isinstance(weights, Mapping) or not all(
        type(name) is str and isinstance(weight, Tensor) for name, weight in weights.items()
    ):
        raise ConfigError(f"{path} has no weights ('model'); give a checkpoint that fairseq-train wrote")
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
        names = "model", "task", "criterion"
        model, task, loss = (_plain(cfg.get(name)) if isinstance(cfg, Mapping) else None for name in names)
        options = None if model is None else {**(loss or {}), **(task or {}), **_flat(model)}
        if options is not None:
            options |= {key: task[key] for key in ("source_lang", "target_lang") if task and task.get(key)}
            options.setdefault("arch", options.get("_name"))
    if options is None:
        raise ConfigError(f"{path} has no options ('args' or 'cfg'); give a checkpoint that fairseq-train wrote")
    given = {name: options[name] for name in _TYPES if options.get(name) is not None}
    if missing := sorted(_REQUIRED - given.keys()):
        raise ConfigError(f"{path} has no option {missing[0]}, as a Transformer has; use another model")
    try:
        return FairseqCheckpoint(_Options.model_validate(given), dict(weights))
    except ValidationError as error:
        wrong = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors())
        raise ConfigError(
            f"{path} has {name}={shown(given[name])}, which no model of this program has; use another model"
            for name in wrong
        ) from error


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


def _model_settings(checkpoint: FairseqCheckpoint, origin: str) -> dict[str, Any]:
    """Return the settings of a model; a ConfigError lists all that it has and this program has not."""
    options, weights = checkpoint
    depths = {side: getattr(options, f"{side}_layers") for side in _STACKS}
    for side, depth in depths.items():
        layers = {match[1] for name in weights if (match := re.match(rf"{side}\.layers\.(\d+)\.", name))}
        if len(layers) != depth:
            raise ConfigError(
                f"{origin} has {side}_layers={depth}, but weights of {len(layers)} layers; use another model"
            )
    problems = []
    for name in _WIDTHS:
        one, other = (getattr(options, f"{side}_{name}") for side in _STACKS)
        if one != other:
            problems.append(f"{origin} has encoder_{name}={one} and decoder_{name}={other}, which must be equal")
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if (width := getattr(options, name)) not in (None, options.decoder_embed_dim):
            problems.append(f"{origin} has {name}={width}, other than decoder_embed_dim={options.decoder_embed_dim}")
    norms = ["pre" if getattr(options, f"{side}_normalize_before") else "post" for side in _STACKS]
    versions = [weights.get(f"{side}.version", torch.zeros(1)) for side in _STACKS]
    if any(
        norm == "pre" and (version.numel() != 1 or float(version) < 3)
        for norm, version in zip(norms, versions, strict=True)
    ):
        problems.append(
            f"{origin} is pre-norm and older than fairseq 0.7, so that its stacks may end without a LayerNorm; load "
            "and save it with a newer fairseq"
        )
    if problems:
        raise ConfigError(problems)
    if not _ARCHITECTURES.fullmatch(str(options.arch)):
        logger.warning(
            "%s: the architecture %s is not one of fairseq's own Transformers, and is taken for one, because its "
            "options and weights are; compare its translations with those of fairseq-generate",
            origin,
            options.arch,
        )
    shared = "decoder" if options.share_decoder_input_output_embed else "none"
    return {
        "name": MODELS.default,
        "dim": options.encoder_embed_dim,
        "ffn_dim": options.encoder_ffn_embed_dim,
        "heads": options.encoder_attention_heads,
        **{f"{side}_layers": depth for side, depth in depths.items()},
        "norm": norms[0],
        "decoder_norm": None if norms[0] == norms[1] else norms[1],
        "share_embeddings": "all" if options.share_all_embeddings else shared,
        "activation": options.activation_fn or "relu",
        "positions": "fairseq",
        "dropout": options.dropout or 0.0,
        "attention_dropout": options.attention_dropout or 0.0,
        "activation_dropout": options.activation_dropout or options.relu_dropout or 0.0,
    }


def _states(model: TranslationModel, checkpoint: FairseqCheckpoint, origin: str) -> Iterator[ParameterState]:
    """Yield the parameters of a model with the settings that :func:`_model_settings` has returned."""
    weights = dict(_current(checkpoint.weights, origin))
    names = {own: name_there(own, _MATRICES, prefix="") for own, _ in model.named_parameters()}
    used = set(names.values())
    matrices = set(_MATRICES.values()) & weights.keys()
    kept = [weights[name] for name in matrices & used]
    tied = {name for name in matrices - used if any(torch.equal(weights[name], matrix) for matrix in kept)}
    unknown = sorted(name for name in weights.keys() - used - tied if not _UNUSED.fullmatch(name))
    if unknown:
        raise ConfigError(
            f"{origin} has {len(unknown):,} weights that a Transformer lacks, among them {unknown[0]}; use "
            "another model"
        )
    for own, parameter in model.named_parameters():
        there = names[own]
        remedy = "give the dictionaries of the model" if "embed_tokens" in there else "use another model"
        yield imported_state(own, parameter, there, weights.get(there), origin, remedy)


def _current(weights: Mapping[str, Tensor], origin: str) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by the names that versions 0.10 and 0.12 give them; those of older ones are renamed."""
    for name, weight in weights.items():
        if name == "decoder.embed_out":
            yield _MATRICES["projection.weight"], weight
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
    """Write binarised text as text of the same tokens, and return the files by names such as ``train_source``."""
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

    A directory of the reverse direction has the same text. Training and validation text must be there.
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
    try:
        return {path.name for path in directory.iterdir()}
    except OSError as error:
        raise ConfigError(f"{directory} cannot be read ({error.strerror or error}); check --data-bin") from error
