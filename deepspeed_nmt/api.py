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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TOP, DecodableModel, exit_name
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.parallel.hardware import prepare_gpu, uses_cuda
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.opening import (
    Opened,
    check_ensemble,
    chosen_exit,
    chosen_tags,
    cut_at,
    search_settings,
    suppressed,
    warn_of_differences,
)
from deepspeed_nmt.search.base import Translation
from deepspeed_nmt.search.choosing_exits import ChoosingExitsConfig
from deepspeed_nmt.search.decode_options import (
    MAX_SOURCE_TOKENS,
    OPEN,
    STREAM,
    DecodeOptions,
    check_type,
    checked_texts,
    identity_of,
    read_rule,
)
from deepspeed_nmt.search.forced import score_lines
from deepspeed_nmt.search.lines import LineInputs, SourceCounts, SourceLines, in_plain_text, warn_of_form
from deepspeed_nmt.search.models import Ensemble, members_of, prepare_to_decode, resolve_native, resolve_precision
from deepspeed_nmt.search.reliance import ScoredTranslation
from deepspeed_nmt.search.streams import translate_lines
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm, plain_form

_MAX_LINE = 2**62
"""Largest number of the first sentence in its text."""


class Translator:
    """Translator of sentences by a trained run, or by an ensemble of several; :meth:`open` makes one.

    Args:
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
        self.text = text or TextForm()
        self.tags = tags
        self._opened = opened
        self._lock = threading.RLock()

    @classmethod
    def open(cls, run: str | Path | Sequence[str | Path], **options: Any) -> Translator:
        """Open a run, or an ensemble of runs.

        Further keywords are settings that override those of the run's search, for example ``beam=1``; ``name``
        chooses another search, for example ``name="sampling", seed=3, top_p=0.9``.

        Args:
            run: run directory, or several for an ensemble.
            **options: options of the opening of runs (see the table of `translate` in docs/commands.md), and settings
                of the search. ``tag`` and ``tag_target`` are "" for none, and ``detokenise`` is "" for the language
                that the run records.

        Raises:
            ConfigError: if the runs cannot be opened or combined, an exit or a setting is unknown, there is no GPU
                for ``device="cuda"``, or the device does not have the precision.
            CheckpointError: if the checkpoint does not exist or is damaged.
        """
        given = [run] if isinstance(run, (str, Path)) or not isinstance(run, Iterable) else list(run)
        for path in given:
            check_type("run", path, (str, Path), "a run directory or several")
        changes = {name: value for name, value in options.items() if name not in OPEN}
        own = {name: value for name, value in options.items() if name in OPEN}
        return cls.opened(DecodeOptions.of({"run": [Path(path) for path in given], **own}), changes)

    @classmethod
    def opened(cls, options: DecodeOptions, changes: Mapping[str, Any]) -> Translator:
        """Open the runs of checked options; ``changes`` are settings of the search, of which None stay."""
        device = torch.device("cpu")
        if uses_cuda(options.device, option("device")):
            device = torch.device("cuda", torch.cuda.current_device())
            prepare_gpu(device)
        precision = resolve_precision(options.precision, device)
        runs = [Run.open(path, option("run")) for path in options.run or ()]
        check_ensemble(runs, options.weights)
        form = runs[0].data.common_text
        detokenise = None if options.detokenise is None else plain_form(form, options.detokenise, runs[0].path)
        tags = chosen_tags(runs[0], options.tag, options.tag_target)
        search = search_settings(runs, changes, options.exits)
        warn_of_differences(runs, search, {**changes, **options.given_values("tag", "tag_target")})
        if options.suppress is not None:
            never = *getattr(search, "suppress_tokens", ()), *suppressed(runs[0].tokenizer, options.suppress)
            search = search_settings(runs, {**changes, "suppress_tokens": never}, options.exits)
        models, digests, name = [], [], TOP
        for run in runs:
            whole, digest = run.loaded(str(options.checkpoint))
            digests.append(digest)
            name = chosen_exit(whole, options)
            models.append(cut_at(run, whole, name))
            for stage in search.exits if isinstance(search, ChoosingExitsConfig) else ():
                cut_at(run, whole, exit_name(whole.stages[0], stage))  # warns of one that was not trained
        model = models[0] if len(models) == 1 else Ensemble(models, options.weights).eval()
        if options.choose_exits is not None and read_rule(options.choose_exits)[1] not in (None, digests[0]):
            logger.warning(
                f"{options.choose_exits} was fitted on other weights than those of {runs[0].path}, whose exits may "
                "be more or less sure of what they write; fit it again by `report depths --fit`"
            )
        natively = resolve_native(options.native, device, precision)
        prepare_to_decode(model, device, precision, natively)
        longest = min(run.longest_line for run in runs)
        opened = Opened(tuple(runs), str(options.checkpoint), name, tuple(digests), precision, natively)
        return cls(model, runs[0].tokenizer, search, device, longest, detokenise, form, opened, tags)

    def __deepcopy__(self, memo: dict[int, Any]) -> Translator:
        """Return a translator of copied weights, with a lock of its own: locks cannot be copied."""
        other = copy.copy(self)
        memo[id(self._lock)] = threading.RLock()
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    @property
    def precision(self) -> str:
        """Precision of the weights: fp32, bf16, fp16 or int8."""
        return "fp32" if self._opened is None else self._opened.precision

    @property
    def natively(self) -> bool:
        """True if native code decodes, where the model has layers that it knows."""
        return self._opened is not None and self._opened.natively

    @property
    def digests(self) -> tuple[str, ...]:
        """Hash of the weights of each model; none if the model is of no run."""
        return () if self._opened is None else self._opened.digests

    @property
    def exits(self) -> list[str]:
        """Names of the trained exits, the top last; the top alone if the model is of no run."""
        return [TOP] if self._opened is None else self._opened.exits(members_of(self.model))

    @property
    def aligning(self) -> dict[str, list[int]]:
        """Layers that align best, one of each model, by exit; empty until they have been chosen."""
        return {} if self._opened is None else self._opened.aligning

    def identity(self) -> dict[str, Any]:
        """Return all that translations depend on besides the options and the text."""
        models = {"the vocabulary": self.tokenizer.digest, "the weights": self.digests}
        options = identity_of(self.search, self.device.type, self.precision)
        return {**models, **options, "--native": "on" if self.natively else "off"}

    def at_exit(self, name: str) -> Translator:
        """Return the translator that decodes from an exit. It shares the weights, and the lock of its threads."""
        check_type("name", name, (str,), "the name of an exit")
        other = copy.copy(self)
        other.model, other.search = self.model.at_exit(name), self.search.from_one_exit()
        if self._opened is not None and name != TOP:  # which is the exit itself, of an exit
            other._opened = replace(self._opened, exit=name)
        return other

    @overload
    def translate(
        self, sentences: Iterable[str], max_tokens: int = 4096, *, nbest: None = None, **options: Any
    ) -> list[Translation]: ...

    @overload
    def translate(
        self, sentences: Iterable[str], max_tokens: int = 4096, *, nbest: int, **options: Any
    ) -> list[list[Translation]]: ...

    def translate(
        self, sentences: Iterable[str], max_tokens: int = 4096, *, nbest: int | None = None, **options: Any
    ) -> list[Translation] | list[list[Translation]]:
        """Return the best translation of each sentence, or its ``nbest`` best ones as a list.

        Args:
            sentences: source sentences; the translation of an empty one is empty.
            max_tokens: batch size: sentences x longest source.
            nbest: number of translations of each sentence, best first; None for the best one, not in a list.
            **options: other arguments of :meth:`stream`.

        Raises:
            ConfigError: if a number is out of range, or ``sentences`` is something else.
            DataError: if a sentence is too long, and ``strict`` is True; or as :meth:`stream`.
        """
        if nbest is None:
            return [best[0] for best in self.stream(sentences, max_tokens=max_tokens, **options)]
        return list(self.stream(sentences, max_tokens=max_tokens, nbest=nbest, **options))

    def check(self, sentences: Iterable[str], max_source_tokens: int | None = None) -> None:
        """Check that no sentence is too long, or raise a DataError, as :meth:`stream` does if it is strict."""
        longest = self.max_source_tokens if max_source_tokens is None else max_source_tokens
        reader = SourceLines(self.tokenizer, longest, self.model.longest_source, strict=True)
        for sentence in self.tags.tagged(checked_texts("sentences", sentences)):
            reader.encode(sentence)

    def stream(
        self,
        sentences: Iterable[str],
        *,
        advance: Callable[[int], object] = lambda more: None,
        prefix: Iterable[str] | None = None,
        constraints: Iterable[Sequence[str]] | None = None,
        first_line: int = 0,
        counts: SourceCounts | None = None,
        **options: Any,
    ) -> Iterator[list[Translation]]:
        """Yield the ``nbest`` best translations of each sentence, best first, in bounded memory.

        Args:
            sentences: source sentences.
            advance: called with the number of sentences finished since the last call.
            prefix: text with which each translation begins, in the form of the text that the run was trained on; ""
                for any.
            constraints: phrases, in that form, that each translation contains, for ``name="constrained_beam"``.
            first_line: number of the first sentence in its text, from 0. Samples of a sentence depend on its number.
            counts: record of what there is to warn of, for a piece of a text whose warnings are made for the whole
                text. None to log warnings.
            **options: options of lines and of what is returned; see the table of `translate` in docs/commands.md.

        Raises:
            ConfigError: if a number is out of range, ``sentences`` is something else, or the search does not respect
                an option.
            DataError: if a sentence is too long, and ``strict`` is True; or if there are more or fewer lines of
                ``prefix`` or ``constraints`` than sentences, after those that have one are translated.
        """
        chosen = self._line_options(options, STREAM)
        check_type("first_line", first_line, (int,), "a whole number")
        if not 0 <= first_line <= _MAX_LINE:
            raise ConfigError(f"{option('first_line')} is {shown(first_line)}; give a number from 0 to {_MAX_LINE:,}")
        lines = checked_texts("sentences", sentences)
        beside = (
            None if prefix is None else checked_texts("prefix", prefix),
            None if constraints is None else checked_texts("constraints", constraints, phrases=True),
        )
        translations = translate_lines(
            self.model,
            self.tokenizer,
            warn_of_form(lines, self.text) if counts is None else lines,
            self.search,
            chosen,
            device=self.device,
            advance=advance,
            counts=counts,
            inputs=LineInputs(*beside, first_line, tags=self.tags),
            alignment_layers=self._alignment_layers(chosen),
            lock=self._lock,
        )
        return translations if self.detokenise is None else in_plain_text(translations, self.detokenise)

    def _line_options(self, options: Mapping[str, Any], names: Collection[str]) -> DecodeOptions:
        """Check keywords, among ``names`` alone, and return the options with the bound of lines that holds here."""
        if others := sorted(options.keys() - names):
            raise TypeError(
                f"unexpected keyword argument '{others[0]}'; settings of runs and searches go to `Translator.open`"
            )
        for name in ("alignment", "reliance"):
            check_type(name, options.get(name, False), (bool,), "True or False")
        chosen = DecodeOptions.of(options)
        return chosen.model_copy(update={"max_source_tokens": chosen.longest_line(self.max_source_tokens)})

    def _alignment_layers(self, options: DecodeOptions) -> list[int] | None:
        """Return for each model the layer whose cross-attention aligns; None for no alignment."""
        details = [name for name in ("alignment", "reliance", "token_scores") if getattr(options, name)]
        if details and not self.search.left_to_right:
            raise ConfigError(
                f"{option(details[0])} needs a run that translates from left to right, and this one predicts masked "
                "tokens; leave it out, or use another run"
            )
        if not options.alignment:
            return None
        if self.detokenise is not None:
            raise ConfigError(
                f"{option('alignment')} links the words that the model writes, which {option('detokenise')} changes; "
                "leave out one of them"
            )
        if self._opened is None and options.alignment_layer is None:
            raise ConfigError(f"{option('alignment_layer')} is missing, which a model of no run needs; give it")
        with self._lock:
            opened = self._opened or Opened((), "", TOP)
            return opened.alignment_layers(members_of(self.model), options.alignment_layer)

    def score(
        self,
        sources: Iterable[str],
        targets: Iterable[str],
        *,
        advance: Callable[[int], object] = lambda more: None,
        warn: bool = True,
        reliance: bool = False,
        **options: Any,
    ) -> Iterator[ScoredTranslation]:
        """Yield the log-probability (nats) of each token of given translations, by forced decoding.

        An ensemble gives the mean of its models' probabilities. Text is encoded anew, so its tokens can differ from
        those of the search that wrote it.

        Args:
            targets: a translation of each; for an n-best list repeat the source.
            advance: called with the number of pairs finished since the last call.
            warn: False to log no warnings of lines, for text that is scored again.
            reliance: True to measure how much each translation relies on its source, for twice the work.

        Raises:
            ConfigError: if a number is out of range, the texts are something else, or the run predicts masked tokens.
            DataError: if there are more sources than targets or fewer, after all pairs; if a target is
                longer than the model can read, or a source is too long and ``strict`` is True.
        """
        check_type("warn", warn, (bool,), "True or False")
        check_type("reliance", reliance, (bool,), "True or False")
        chosen = self._line_options(options, ("max_tokens", "buffer_lines", "max_source_tokens", "strict"))
        if not self.search.left_to_right:
            raise ConfigError(
                "`score` needs a run that translates from left to right, and this one predicts masked tokens, which "
                "have no log-probability token by token; use another run"
            )
        tag, texts = self.tags.target, checked_texts("targets", targets)
        scored = score_lines(
            self.model,
            self.tokenizer,
            self.tags.tagged(checked_texts("sources", sources)),
            texts if tag is None else (type(text)(f"{tag} {text}") for text in texts),  # a damaged one stays so
            chosen,
            device=self.device,
            advance=advance,
            warn=warn,
            blind=(self.tags.source or "") if reliance else None,
            lock=self._lock,
        )
        if tag is None:
            return scored
        return (
            ScoredTranslation(pair.tokens[1:], pair.log_probs[1:], pair.blind_log_probs and pair.blind_log_probs[1:])
            for pair in scored
        )
