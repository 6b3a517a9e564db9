"""Parts of all formats of exports: the model to export, the program that reads an export, and rewritten models.

Legend: B sentences, S source length, D model width, E output width.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch

from deepspeed_nmt.core.description import StandardTransformer
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.export.ctranslate2_search import ExportBeamSettings
from deepspeed_nmt.search.base import Hypothesis
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.forced import pad_sources, token_log_probs
from deepspeed_nmt.search.lines import length_buckets
from deepspeed_nmt.search.models import prepare_to_decode
from deepspeed_nmt.text import NO_TAGS, Tags

MAX_TOKENS = 4096
"""Sentences times the longest source of a batch."""
_STANDARD_GAIN = 1024.0
"""Gain of a LayerNorm that is followed by another one; a power of two, so that it adds no rounding."""
_READS_STATE = re.compile(r"self_attention\.[qkv]_proj\.weight|cross_attention\.q_proj\.weight|up_proj\.weight")
"""Matrices that are applied to the state of a stack."""
Sentences = Sequence[Sequence[int]]
"""Tokens of sentences, without EOS."""


@dataclass(frozen=True)
class Subject:
    """A model to export: at its exit, in eval mode, on the CPU, with the positions of the longest sentence."""

    model: TranslationModel
    tokenizer: Tokenizer
    longest: int
    precision: str
    tags: Tags = NO_TAGS
    dropouts: Mapping[str, float] = field(default_factory=dict)
    """Probabilities of dropout in its training, by the names of the settings."""


class Format(ABC):
    """A format of exports. An instance is an export in a directory that the format's own program has opened.

    ``install`` is the command that installs the program's package; ``length_penalty`` the only one that it has, or
    None.
    """

    name: ClassVar[str]
    length_penalty: ClassVar[str | None] = None
    package: ClassVar[str]
    install: ClassVar[str]

    @abstractmethod
    def __init__(self, directory: Path, subject: Subject) -> None: ...

    @abstractmethod
    def translate(self, sources: Sentences, settings: ExportBeamSettings) -> list[Hypothesis]:
        """Return the best translation of each sentence. A score may be NaN."""

    @abstractmethod
    def token_log_probs(self, sources: Sentences, targets: Sentences) -> list[list[float]]:
        """Return the log-probabilities (nats) of the tokens of given translations and of the EOS after them."""

    @staticmethod
    @abstractmethod
    def check(model: TranslationModel) -> None:
        """Check that the format can express a model, whose parameters need no data, or raise NotStandardError."""

    @staticmethod
    @abstractmethod
    def write(directory: Path, subject: Subject) -> None:
        """Write the files of a model that has been checked, or raise an OSError."""


class OwnProgram:
    """Beam search of this program with a model in eval mode, on the CPU, with the methods of a format."""

    def __init__(self, model: TranslationModel, vocabulary: Vocabulary) -> None:
        prepare_to_decode(model, torch.device("cpu"), "fp32")
        self._model, self._vocabulary = model, vocabulary

    def translate(self, sources: Sentences, settings: ExportBeamSettings) -> list[Hypothesis]:
        """Return the best translation of each sentence."""
        search = BeamSearch(BeamConfig(**settings.model_dump()), self._model, self._vocabulary)
        translations: dict[int, Hypothesis] = {}
        for numbers in length_buckets([len(source) + 1 for source in sources], MAX_TOKENS):
            rows = [[*sources[number], self._vocabulary.source.eos] for number in numbers]
            source_BS, padded = pad_sources(rows, self._vocabulary.pad, "cpu")
            for number, best in zip(numbers, search.search(source_BS, padded), strict=True):
                translations[number] = best[0]
        return [translations[number] for number in range(len(sources))]

    def token_log_probs(self, sources: Sentences, targets: Sentences) -> list[list[float]]:
        """Return the log-probabilities (nats) of the tokens of given translations and of the EOS after them."""
        result = []
        for source, target in zip(sources, targets, strict=True):
            source_BS = torch.tensor([[*source, self._vocabulary.source.eos]])
            scored = token_log_probs(self._model, self._vocabulary, source_BS, False, [[list(target)]])
            result.append(scored[0][0])
        return result


def standardise(model: StandardTransformer) -> StandardTransformer:
    """Rewrite a model for programs that know only layers with cross-attention, in pre-norm or post-norm.

    What it computes stays the same. Decoder layers without cross-attention get one whose output is zero. In pre-norm
    the state passes it unchanged. In post-norm it meets a second LayerNorm in a row: the first one then only
    standardises, and the second one has the weights of both. The first one's gain is large, so that the eps of the
    second one adds nothing. What remains is the eps of the first one, undone by the second: a relative error of
    eps / (2 variance) of the state.
    """
    model = fold_deepnorm(model)
    weights = dict(model.weights)
    for number in range(model.depths[1]):
        layer = f"decoder.layers.{number}"
        if f"{layer}.cross_attention.q_proj.weight" in weights:
            continue
        own, cross = f"{layer}.self_residual.norm", f"{layer}.cross_residual.norm"
        dim = len(weights[f"{own}.weight"])
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights[f"{layer}.cross_attention.{part}.weight"] = torch.zeros(dim, dim)
            weights[f"{layer}.cross_attention.{part}.bias"] = torch.zeros(dim)
        weights[f"{cross}.weight"], weights[f"{cross}.bias"] = torch.ones(dim), torch.zeros(dim)
        if model.norms[1] == "post":
            for part, standard in (("weight", torch.full((dim,), _STANDARD_GAIN)), ("bias", torch.zeros(dim))):
                weights[f"{cross}.{part}"], weights[f"{own}.{part}"] = weights[f"{own}.{part}"], standard
    return replace(model, weights=weights)


def fold_deepnorm(model: StandardTransformer) -> StandardTransformer:
    """Return the post-norm model that computes the same as a DeepNorm model; return other models unchanged.

    A sub-layer of DeepNorm computes LN(alpha x + f(x)). The rewritten one carries y = alpha x from sub-layer to
    sub-layer: its matrices that read the state are divided by alpha, the output of its LayerNorm is multiplied by
    alpha. It computes alpha LN(y + f(y / alpha)), which is post-norm with the same sums. The last LayerNorm of a
    stack keeps its output.
    """
    if "deepnorm" not in model.norms:
        return model
    weights = dict(model.weights)
    for side, depth, alpha in zip(("encoder", "decoder"), model.depths, model.alphas, strict=True):
        last = f"{side}.layers.{depth - 1}.feed_forward_residual."
        for name, weight in model.weights.items():
            if name.startswith(f"{side}.") and _READS_STATE.search(name):
                weights[name] = weight / alpha
            elif name.startswith(f"{side}.") and "_residual.norm." in name and not name.startswith(last):
                weights[name] = weight * alpha
    return replace(model, norms=("post", "post"), weights=weights, input_scales=model.alphas)
