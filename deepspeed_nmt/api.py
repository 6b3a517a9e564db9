"""Python API: translation with trained runs.

    from deepspeed_nmt import Translator

    translator = Translator.open("runs/sample")
    for translation in translator.translate(["The dog sleeps."]):
        print(translation.text, translation.score)

`deepspeed-nmt translate` uses this module.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch
from typing_extensions import Unpack

from deepspeed_nmt.core.model import TOP, DecodableModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, option
from deepspeed_nmt.parallel.device import prepare_gpu, uses_cuda
from deepspeed_nmt.run.arguments import (
    Paths,
    StreamOptions,
    beside_of,
    check_details,
    check_flags,
    check_type,
    checked_texts,
    made_plain,
    paths_of,
)
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.opening import (
    Opened,
    check_ensemble,
    chosen_exit,
    chosen_search,
    chosen_tags,
    cut_at,
    warn_of_differences,
)
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.ensemble import Ensemble, members_of
from deepspeed_nmt.search.precision import prepare_to_decode, resolve_precision
from deepspeed_nmt.search.requests import LineInputs
from deepspeed_nmt.search.scoring import ScoredTranslation, score_lines
from deepspeed_nmt.search.searches import KeptSearch
from deepspeed_nmt.search.source_form import warn_of_form
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS, SourceCounts, SourceLines
from deepspeed_nmt.search.translate import Wanted, translate_lines
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm, plain_form


class Translator:
    """Translator of sentences by a trained run, or by an ensemble of several; :meth:`open` makes one.

    Args:
        model: the model, in eval mode and on ``device``.
        tokenizer: tokenizer of the run.
        search: the search and its settings.
        device: device of the model.
        max_source_tokens: default of :meth:`stream`.
        detokenise: form of the text that the model writes, if translations are made plain; None to keep it.
        text: form of the text that the model was trained on; None if it is not known.
        opened: runs of the model; None if it is of none.
        tags: symbols in front of source lines, and with which translations begin.

    Several threads can use a translator. Only one at a time uses the model.
    """

    def __init__(
        self,
        model: DecodableModel,
        tokenizer: Tokenizer,
        search: SearchConfig,
        device: torch.device,
        max_source_tokens: int = MAX_SOURCE_TOKENS,
        detokenise: TextForm | None = None,
        text: TextForm | None = None,
        opened: Opened | None = None,
        tags: Tags = NO_TAGS,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.search = search
        self.device = device
        self.max_source_tokens = max_source_tokens
        self.detokenise = detokenise
        self.text = TextForm() if text is None else text
        self.tags = tags
        self._opened = opened
        self._lock = threading.RLock()
        self._kept = KeptSearch()

    @classmethod
    def open(
        cls,
        run: Paths,
        *,
        checkpoint: str | Path = "best",
        device: str = "auto",
        exit: str | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        detokenise: str | None = None,
        precision: str = "auto",
        weights: Sequence[float] | None = None,
        suppress: Sequence[str] | None = None,
        tag: str | None = None,
        tag_target: str | None = None,
        **search: Any,
    ) -> Translator:
        """Open a run, or an ensemble of runs.

        Args:
            run: run directory, or several for an ensemble.
            checkpoint: best, last, average, or a path.
            device: auto (a GPU if there is one), cpu or cuda.
            exit: exit to decode from, for example "3-2", or "shallow" of a grown model; None for the top.
            encoder_layers: number of the encoder's first layers (or loops) to use; None for all.
            decoder_layers: number of the decoder's first layers (or loops) to use; None for all.
            detokenise: language code of the translations, from which Moses' tokens are removed; "" for the language
                that the run records; None to keep the form of the text that it was trained on.
            precision: auto, fp32, bf16, fp16 (GPUs) or int8 (CPUs). auto: 16 bit on a GPU, fp32 on a CPU.
            weights: of the runs of an ensemble, positive numbers; None for equal ones.
            suppress: tokens of the vocabulary that are never predicted, as text.
            tag: symbol of the vocabulary that is put in front of each source sentence, such as the tag of a language;
                "" for none, None for that of the data that the run was trained on, if any.
            tag_target: symbol with which each translation is forced to begin, which is not returned, in the same way.
            search: settings that override those of the run's search, for example ``beam=1``; ``name`` chooses another
                search, for example ``name="sampling", seed=3, top_p=0.9``.

        Raises:
            ConfigError: if the runs cannot be opened or combined, an exit or a setting is unknown, there is no GPU
                for ``device="cuda"``, or the device does not have the precision.
            CheckpointError: if the checkpoint does not exist or is damaged.
        """
        where = torch.device("cpu")
        if uses_cuda(device, option("device")):
            where = torch.device("cuda", torch.cuda.current_device())
            prepare_gpu(where)
        check_type("checkpoint", checkpoint, (str, Path), "best, last, average, or a path")
        check_type("exit", exit, (str, type(None)), "the name of an exit")
        for name, layers in (("encoder_layers", encoder_layers), ("decoder_layers", decoder_layers)):
            check_type(name, layers, (int, type(None)), "a whole number")
        numbers = resolve_precision(precision, where)
        check_type("detokenise", detokenise, (str, type(None)), "a language code")
        runs = [Run.open(path, option("run")) for path in paths_of(run)]
        check_ensemble(runs, weights)
        text = None if detokenise is None else plain_form(runs[0].text_form, detokenise, runs[0].path)
        exits = {"exit": exit, "encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
        tags = chosen_tags(runs[0], tag, tag_target)
        settings = chosen_search(runs, search, suppress, exits)
        given = {**search, "tag": tag, "tag_target": tag_target, "suppress_tokens": suppress}
        warn_of_differences(runs, settings, given)
        models, digests, name = [], [], TOP
        for each in runs:
            whole, digest = each.loaded(str(checkpoint))
            digests.append(digest)
            name = chosen_exit(whole, exit, encoder_layers, decoder_layers)
            models.append(cut_at(each, whole, name))
        model = models[0] if len(models) == 1 else Ensemble(models, weights).eval()
        prepare_to_decode(model, where, numbers)
        longest = min(each.max_source_tokens for each in runs)
        opened = Opened(tuple(runs), str(checkpoint), name, tuple(digests), numbers)
        return cls(model, runs[0].tokenizer, settings, where, longest, text, runs[0].text_form, opened, tags)

    @property
    def precision(self) -> str:
        """Precision of the weights: fp32, bf16, fp16 or int8."""
        return "fp32" if self._opened is None else self._opened.precision

    @property
    def digests(self) -> tuple[str, ...]:
        """Hash of the weights of each model; none if the model is of no run."""
        return () if self._opened is None else self._opened.digests

    @property
    def exits(self) -> list[str]:
        """Names of the trained exits, the top last; the top alone if the model is of no run."""
        return [TOP] if self._opened is None else self._opened.exits(members_of(self.model))

    def at_exit(self, name: str) -> Translator:
        """Return the translator that decodes from an exit. It shares the weights, and the lock of its threads.

        Raises:
            ConfigError: if the model has no exit of this name.
        """
        found = copy.copy(self)
        found.model = self.model.at_exit(name)
        found._kept = KeptSearch()
        if self._opened is not None:
            found._opened = replace(self._opened, exit=name)
        return found

    @overload
    def translate(
        self,
        sentences: Iterable[str],
        max_tokens: int = 4096,
        *,
        nbest: None = None,
        **options: Unpack[StreamOptions],
    ) -> list[Translation]: ...

    @overload
    def translate(
        self, sentences: Iterable[str], max_tokens: int = 4096, *, nbest: int, **options: Unpack[StreamOptions]
    ) -> list[list[Translation]]: ...

    def translate(
        self,
        sentences: Iterable[str],
        max_tokens: int = 4096,
        *,
        nbest: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> list[Translation] | list[list[Translation]]:
        """Return the best translation of each sentence, or its ``nbest`` best ones as a list.

        Args:
            sentences: source sentences; the translation of an empty one is empty.
            max_tokens: batch size: sentences x longest source.
            nbest: number of translations of each sentence, best first; None for the best one, not in a list.
            **options: ``max_source_tokens``, ``strict``, ``prefix``, ``constraints``, ``token_scores``, ``alignment``
                and ``alignment_layer`` of :meth:`stream`.

        Raises:
            ConfigError: if a number is out of range, or ``sentences`` is something else.
            DataError: if a sentence is too long, and ``strict`` is True; or as :meth:`stream`.
        """
        if nbest is None:
            return [best[0] for best in self.stream(sentences, max_tokens=max_tokens, **options)]
        return list(self.stream(sentences, max_tokens=max_tokens, nbest=nbest, **options))

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long, as :meth:`stream` does if it is strict.

        Args:
            sentences: source sentences.
            max_source_tokens: see :meth:`stream`.

        Raises:
            ConfigError: if ``sentences`` is something else.
            DataError: if a sentence is too long.
        """
        longest = self.max_source_tokens if max_source_tokens is None else max_source_tokens
        reader = SourceLines(self.tokenizer, longest, self.model.longest_source, strict=True)
        for sentence in self.tags.tagged(checked_texts(sentences)):
            reader.encode(sentence)

    def stream(
        self,
        sentences: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        nbest: int = 1,
        advance: Callable[[int], object] = lambda more: None,
        max_source_tokens: int | None = None,
        strict: bool = False,
        counts: SourceCounts | None = None,
        prefix: Iterable[str] | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        first_line: int = 0,
        token_scores: bool = False,
        alignment: bool = False,
        alignment_layer: int | None = None,
    ) -> Iterator[list[Translation]]:
        """Yield the ``nbest`` best translations of each sentence, best first, in bounded memory.

        Args:
            sentences: source sentences.
            max_tokens: batch size: sentences x longest source.
            buffer_lines: number of sentences to read ahead, so that batches have sentences of similar length.
            nbest: number of translations of each sentence.
            advance: callback for progress; its argument is the number of sentences finished since the last call.
            max_source_tokens: longest sentence, in tokens without EOS; the model may have a lower bound. None: 1024,
                or the longest sentence that the run was trained on if that is longer.
            strict: True to refuse longer sentences. Otherwise their beginning is translated, with a warning. In a
                command, also lines that are not UTF-8.
            counts: record of what there is to warn of, for a piece of a text whose warnings are made for the whole
                text. None to log warnings.
            prefix: text with which each translation begins, in the form of the text that the run was trained on; ""
                for any.
            constraints: phrases, in that form, that each translation contains, for ``name="constrained_beam"``.
            first_line: number of the first sentence in its text, from 0. Samples of a sentence depend on its number.
            token_scores: True to return the log-probability of each token.
            alignment: True to return links of words, from the cross-attention of the decoder layer that aligns best
                on the run's validation text.
            alignment_layer: another decoder layer, counted from 1, for ``alignment``.

        Raises:
            ConfigError: if a number is out of range, ``sentences`` is something else, or the search does not respect
                an option.
            DataError: if a sentence is too long, and ``strict`` is True; or if there are more or fewer lines of
                ``prefix`` or ``constraints`` than sentences, after those that have one are translated.
        """
        check_flags(strict=strict, token_scores=token_scores, alignment=alignment)
        lines, beside = checked_texts(sentences), beside_of(prefix, constraints, first_line)
        found = translate_lines(
            self.model,
            self.tokenizer,
            warn_of_form(lines, self.text) if counts is None else lines,
            self.search,
            max_tokens=max_tokens,
            buffer_lines=buffer_lines,
            device=self.device,
            nbest=nbest,
            advance=advance,
            max_source_tokens=self.max_source_tokens if max_source_tokens is None else max_source_tokens,
            strict=strict,
            counts=counts,
            inputs=LineInputs(*beside, tags=self.tags),
            wanted=self._wanted(token_scores, alignment, alignment_layer),
            lock=self._lock,
            kept=self._kept,
        )
        return found if self.detokenise is None else made_plain(found, self.detokenise)

    def _wanted(self, token_scores: bool, alignment: bool, layer: int | None) -> Wanted:
        """Return what a translation returns beside the text.

        Raises:
            ConfigError: if the run cannot return it.
        """
        check_details(self.search, token_scores, alignment, layer, self.detokenise)
        if not alignment:
            return Wanted(token_scores)
        members = members_of(self.model)
        opened = self._opened or Opened((), "", TOP)
        if self._opened is None and layer is None:
            raise ConfigError(f"{option('alignment_layer')} is required for a model of no run, but missing")
        with self._lock:
            return Wanted(token_scores, opened.alignment_layers(members, layer))

    def score(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        advance: Callable[[int], object] = lambda more: None,
        max_source_tokens: int | None = None,
        strict: bool = False,
        warn: bool = True,
    ) -> Iterator[ScoredTranslation]:
        """Yield the log-probability (nats) of each token of given translations, by forced decoding.

        An ensemble gives the mean of its models' probabilities. Text is encoded anew, so its tokens can differ from
        those of the search that wrote it.

        Args:
            sources: source sentences.
            targets: a translation of each; for an n-best list repeat the source.
            max_tokens: batch size: pairs x longest side.
            buffer_lines: number of pairs to read ahead, so that batches have pairs of similar length.
            advance: callback for progress; its argument is the number of pairs finished since the last call.
            max_source_tokens: see :meth:`stream`.
            strict: see :meth:`stream`.
            warn: False to log no warnings of lines, for text that is scored again.

        Raises:
            ConfigError: if a number is out of range, the texts are something else, or the run predicts masked tokens.
            DataError: if there are more sources than targets or fewer, after all pairs; if a target is
                longer than the model can read, or a source is too long and ``strict`` is True.
        """
        check_flags(strict=strict, warn=warn)
        if not self.search.left_to_right:
            raise ConfigError(
                "`score` needs a run that translates from left to right, but this one predicts masked tokens, which "
                "have no log-probability token by token; use another run"
            )
        tag, texts = self.tags.target, checked_texts(targets, "targets")
        found = score_lines(
            self.model,
            self.tokenizer,
            self.tags.tagged(checked_texts(sources, "sources")),
            texts if tag is None else (f"{tag} {text}" for text in texts),
            max_tokens=max_tokens,
            buffer_lines=buffer_lines,
            device=self.device,
            advance=advance,
            max_source_tokens=self.max_source_tokens if max_source_tokens is None else max_source_tokens,
            strict=strict,
            warn=warn,
            lock=self._lock,
        )
        return found if tag is None else (ScoredTranslation(each.tokens[1:], each.log_probs[1:]) for each in found)
