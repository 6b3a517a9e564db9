"""Checkpoints of fairseq, read without running what a pickle may contain."""

from __future__ import annotations

import argparse
import errno
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_nmt.errors import ConfigError

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
    if not isinstance(weights, Mapping) or not all(isinstance(each, Tensor) for each in weights.values()):
        raise ConfigError(
            f"--from must be a checkpoint of fairseq, but {path} has no weights ('model'); give another"
        )
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
        raise ConfigError(
            f"--from must have its options, as 'args' or 'cfg', but {path} has none; give a checkpoint that "
            "fairseq-train wrote"
        )
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
        raise ConfigError(
            f"--from must be a checkpoint of fairseq, but {path} cannot be read ({error.strerror or error}); check "
            "the path"
        ) from error
    except pickle.UnpicklingError as error:
        if (found := _GLOBAL.search(str(error))) is None:
            raise _unreadable(path, "its pickle is damaged, or has more than data") from error
        name = found[1]
        remedy = _CONVERT if name.split(".")[0] in ("omegaconf", "fairseq") else "get it from a source that you trust"
        raise ConfigError(
            f"--from must hold tensors, numbers, text and options only, but {path} has {name}, which is not created, "
            f"because that could run code of the file; {remedy}"
        ) from error
    except Exception as error:  # a damaged file can raise any error
        raise _unreadable(path, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"--from must be a checkpoint of fairseq, but {path} is none, or damaged ({why}); check the path, or "
        "restore the file"
    )


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
            flat |= {f"{name}_{key}": each for key, each in value.items()}
        else:
            flat[name] = value
    return flat
