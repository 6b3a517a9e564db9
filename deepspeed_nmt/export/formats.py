"""Formats of exports: writing one, and translating with the program that reads it.

Legend: B sentences, S source length, T target length, K beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from deepspeed_nmt import huggingface
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.export import ctranslate2_search
from deepspeed_nmt.export.ctranslate2_search import CTranslate2Search, ExportBeamSettings, Found
from deepspeed_nmt.export.ctranslate2_weights import PRECISIONS, write_ctranslate2
from deepspeed_nmt.export.huggingface_weights import WEIGHTS_FILE, check_class, write_huggingface
from deepspeed_nmt.export.tokenizers import write_marian_tokenizer
from deepspeed_nmt.huggingface import TranslationProgram
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.buckets import length_buckets
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.length_penalty import LengthPenalty
from deepspeed_nmt.search.precision import prepare_to_decode
from deepspeed_nmt.text import NO_TAGS, Tags

MAX_TOKENS = 4096
"""Sentences times the longest source of a batch."""
Advance = Callable[[int], object]
"""Function that is called with the number of further sentences that are done."""


def _silent(more: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Subject:
    """A model to export.

    Attributes:
        model: at the exit to export, in eval mode, on the CPU.
        tokenizer: of the run.
        longest: positions of the longest sentence.
        precision: of the matrices.
        rebuild: function that builds a fresh model of the same settings and the same exit.
        tags: symbols in front of the sentences of the run's data.
    """

    model: TranslationModel
    tokenizer: Tokenizer
    longest: int
    precision: str
    rebuild: Callable[[], TranslationModel]
    tags: Tags = NO_TAGS

    def decode(self, tokens: list[int]) -> str:
        """Return the text of a translation, without its tag."""
        return self.tags.untagged(self.tokenizer.decode(tokens))

    @property
    def vocabulary(self) -> Vocabulary:
        """Special tokens."""
        return self.tokenizer.vocabulary

    @property
    def pieces(self) -> tuple[list[str], list[str]]:
        """Text of each token of source and target."""
        return self.tokenizer.all_pieces("source"), self.tokenizer.all_pieces("target")


class Program(Protocol):
    """A program that translates with an export."""

    def translate(
        self, sources: Sequence[Sequence[int]], settings: ExportBeamSettings, advance: Advance = _silent
    ) -> list[Found]:
        """Return the best translation of each sentence, given by its tokens without EOS. A score may be NaN.

        Args:
            sources: the sentences.
            settings: of the search.
            advance: called with the number of further sentences that are done.
        """
        ...

    def token_log_probs(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Return the log-probabilities (nats) of the tokens of given translations and of the EOS after them."""
        ...


@dataclass(frozen=True)
class Format:
    """A format of exports.

    Attributes:
        name: on the command line.
        precisions: that it can have, the default first.
        length_penalty: the only one that its program has; None if it has all.
        write: writes a model's files into a directory; raises NotPlainError for a model that cannot be expressed.
        open: opens an export in its program.
        check: raises NotPlainError for a model that cannot be expressed; its parameters need no data.
        package: name of the program's package.
        install: command that installs it.
    """

    name: str
    precisions: tuple[str, ...]
    length_penalty: str | None
    write: Callable[[Path, Subject], None]
    open: Callable[[Path, Subject], Program]
    check: Callable[[TranslationModel], object]
    package: str
    install: str


def _write_ctranslate2(directory: Path, subject: Subject) -> None:
    precision = next(each for each in PRECISIONS if each == subject.precision)
    plain = subject.model.plain()
    write_ctranslate2(directory, plain, subject.vocabulary, subject.pieces, subject.longest, precision)


class _CTranslate2:
    """CTranslate2, by the search that `translate --runtime ctranslate2` uses."""

    def __init__(self, directory: Path, subject: Subject) -> None:
        self._search = CTranslate2Search(
            directory, subject.vocabulary, subject.pieces, subject.longest, subject.precision
        )

    def translate(
        self, sources: Sequence[Sequence[int]], settings: ExportBeamSettings, advance: Advance = _silent
    ) -> list[Found]:
        found = {}
        for number, hypotheses in self._search.search(sources, settings, MAX_TOKENS):
            found[number] = hypotheses[0]
            advance(1)
        return [found[number] for number in range(len(sources))]

    def token_log_probs(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        return self._search.token_log_probs(sources, targets, MAX_TOKENS)


def _write_huggingface(directory: Path, subject: Subject) -> None:
    write_huggingface(directory, subject.model.plain(), subject.vocabulary, subject.longest)
    write_marian_tokenizer(directory, subject.tokenizer, subject.longest)


class _HuggingFace:
    """``generate`` of transformers, with one length limit for sentences of equal length."""

    def __init__(self, directory: Path, subject: Subject) -> None:
        self._program = TranslationProgram(directory)
        self._vocabulary, self._longest = subject.vocabulary, subject.longest

    def translate(
        self, sources: Sequence[Sequence[int]], settings: ExportBeamSettings, advance: Advance = _silent
    ) -> list[Found]:
        penalty = LengthPenalty.parse(settings.length_penalty)
        numbers_of: dict[int, list[int]] = {}
        for number, source in enumerate(sources):
            numbers_of.setdefault(len(source) + 1, []).append(number)
        found: dict[int, Found] = {}
        for length, numbers in numbers_of.items():
            size = max(1, MAX_TOKENS // length)
            for batch in (numbers[start : start + size] for start in range(0, len(numbers), size)):
                rows = [[*sources[number], self._vocabulary.source.eos] for number in batch]
                source_BS = torch.tensor(rows)
                options: dict[str, Any] = {
                    "num_beams": settings.beam,
                    "max_length": settings.limit(length, self._longest) + 1,  # with BOS
                    "forced_eos_token_id": self._vocabulary.eos,
                    "return_dict_in_generate": True,
                    "output_scores": True,
                    "do_sample": False,
                }
                if settings.beam > 1:
                    options |= {"early_stopping": True, "length_penalty": penalty.exponent}
                done = self._program.translate(source_BS, torch.ones_like(source_BS), **options)
                scores = done.sequences_scores.tolist() if settings.beam > 1 else [math.nan] * len(batch)
                for number, sequence, score in zip(batch, done.sequences.tolist(), scores, strict=True):
                    found[number] = Found(self._tokens(sequence), math.nan, score)
                advance(len(batch))
        return [found[number] for number in range(len(sources))]

    def _tokens(self, sequence: list[int]) -> list[int]:
        """Return a translation without BOS and EOS."""
        tokens = sequence[1:]
        return tokens[: tokens.index(self._vocabulary.eos)] if self._vocabulary.eos in tokens else tokens

    def token_log_probs(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        found = []
        pad, bos = self._vocabulary.pad, self._vocabulary.bos
        for source, target in zip(sources, targets, strict=True):
            # Padding is part of the comparison: one position on either side.
            source_BS = torch.tensor([[*source, self._vocabulary.source.eos, pad]])
            mask_BS = torch.tensor([[*[1] * (len(source) + 1), 0]])
            log_p_TV = self._program.log_probs(source_BS, mask_BS, torch.tensor([[bos, *target, pad]]))[0]
            tokens = [*target, self._vocabulary.eos]
            found.append([float(log_p_TV[place, token]) for place, token in enumerate(tokens)])
        return found


def _write_safetensors(directory: Path, subject: Subject) -> None:
    state = {name: tensor.detach().clone().contiguous() for name, tensor in subject.model.named_parameters()}
    try:
        save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error


class OwnProgram:
    """This program.

    Args:
        model: in eval mode.
        vocabulary: special tokens.
    """

    def __init__(self, model: TranslationModel, vocabulary: Vocabulary) -> None:
        prepare_to_decode(model, torch.device("cpu"), "fp32")
        self._model = model
        self._vocabulary = vocabulary

    def translate(
        self, sources: Sequence[Sequence[int]], settings: ExportBeamSettings, advance: Advance = _silent
    ) -> list[Found]:
        """Translate by the beam search of this program; see :meth:`Program.translate`."""
        from deepspeed_nmt.search.translate import pad_sources

        search = BeamSearch(BeamConfig(**settings.model_dump()), self._model, self._vocabulary)
        found: dict[int, Found] = {}
        for numbers in length_buckets([len(source) + 1 for source in sources], MAX_TOKENS):
            rows = [[*sources[number], self._vocabulary.source.eos] for number in numbers]
            source_BS, padded = pad_sources(rows, self._vocabulary.pad, "cpu")
            for number, best in zip(numbers, search.search(source_BS, padded), strict=True):
                found[number] = Found(best[0].tokens, best[0].log_prob, best[0].score)
            advance(len(numbers))
        return [found[number] for number in range(len(sources))]

    def token_log_probs(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score translations by forced decoding; see :meth:`Program.token_log_probs`."""
        eos = self._vocabulary.source.eos
        return [
            token_log_probs([self._model], self._vocabulary, torch.tensor([[*source, eos]]), False, [[list(target)]])[
                0
            ][0]
            for source, target in zip(sources, targets, strict=True)
        ]


def _open_safetensors(directory: Path, subject: Subject) -> Program:
    model = subject.rebuild()
    weights = load_file(directory / WEIGHTS_FILE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return OwnProgram(model.eval(), subject.vocabulary)


FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(
            "ctranslate2",
            PRECISIONS,
            None,
            _write_ctranslate2,
            _CTranslate2,
            lambda model: model.plain(),
            "ctranslate2",
            ctranslate2_search.EXTRA,
        ),
        Format(
            "huggingface",
            ("fp32",),
            "power:1",
            _write_huggingface,
            _HuggingFace,
            lambda model: check_class(model.plain()),
            "transformers",
            huggingface.EXTRA,
        ),
        Format(
            "safetensors",
            ("fp32",),
            None,
            _write_safetensors,
            _open_safetensors,
            lambda model: None,
            "safetensors",
            "pip install safetensors",
        ),
    )
}
"""All formats by name."""


__all__ = ["FORMATS", "Format", "OwnProgram", "Program", "Subject"]
