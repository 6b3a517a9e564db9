"""Python API: translation with trained runs.

    from deepspeed_nmt import Translator

    translator = Translator.open("runs/sample")
    for translation in translator.translate(["The dog sleeps."]):
        print(translation.text, translation.score)

`deepspeed-nmt translate` uses this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TOP, DecodableModel, TranslationModel, exit_name
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, option, shown
from deepspeed_nmt.parallel.device import prepare_gpu, uses_cuda
from deepspeed_nmt.run.decoding import search_settings
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.ensemble import Ensemble
from deepspeed_nmt.search.precision import prepare_to_decode, resolve_precision
from deepspeed_nmt.search.scoring import ScoredTranslation, score_lines
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS, SourceCounts, SourceLines, warn_of_form
from deepspeed_nmt.search.translate import Translation, translate_lines
from deepspeed_nmt.text import TextForm, warn_of_missing_rules

Paths = str | Path | Sequence[str | Path]
"""A run directory, or several."""


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
        weights: hash of the weights of each model.
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
        weights: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.search = search
        self.device = device
        self.max_source_tokens = max_source_tokens
        self.detokenise = detokenise
        self.text = TextForm() if text is None else text
        self.weights = list(weights)

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
            search: settings that override those of the run's search, for example ``beam=1``; ``name`` chooses another
                search.

        Raises:
            ConfigError: if the runs cannot be opened or combined, an exit or a setting is unknown, there is no GPU
                for ``device="cuda"``, or the device does not have the precision.
            CheckpointError: if the checkpoint does not exist or is damaged.
        """
        where = torch.device("cpu")
        if uses_cuda(device, option("device")):
            where = torch.device("cuda", torch.cuda.current_device())
            prepare_gpu(where)
        _check_type("checkpoint", checkpoint, (str, Path), "best, last, average, or a path")
        _check_type("exit", exit, (str, type(None)), "the name of an exit")
        for name, layers in (("encoder_layers", encoder_layers), ("decoder_layers", decoder_layers)):
            _check_type(name, layers, (int, type(None)), "a whole number")
        numbers = resolve_precision(precision, where)
        _check_type("detokenise", detokenise, (str, type(None)), "a language code")
        runs = [Run.open(path, option("run")) for path in _paths(run)]
        _check_ensemble(runs)
        text = None if detokenise is None else _form(runs[0], detokenise)
        exits = {"exit": exit, "encoder_layers": encoder_layers, "decoder_layers": decoder_layers}
        settings = search_settings(runs, search, [name for name, value in exits.items() if value is not None])
        loaded = [_model(each, str(checkpoint), exit, encoder_layers, decoder_layers) for each in runs]
        models = [model for model, _ in loaded]
        weights = [digest for _, digest in loaded]
        model = models[0] if len(models) == 1 else Ensemble(models).eval()
        prepare_to_decode(model, where, numbers)
        longest = min(each.max_source_tokens for each in runs)
        return cls(model, runs[0].tokenizer, settings, where, longest, text, runs[0].text_form, weights)

    def translate(
        self,
        sentences: Iterable[str],
        max_tokens: int = 4096,
        *,
        max_source_tokens: int | None = None,
        strict: bool = False,
    ) -> list[Translation]:
        """Return the best translation of each sentence.

        Args:
            sentences: source sentences; the translation of an empty one is empty.
            max_tokens: batch size: sentences x longest source.
            max_source_tokens: see :meth:`stream`.
            strict: see :meth:`stream`.

        Raises:
            ConfigError: if a number is out of range, or ``sentences`` is something else.
            DataError: if a sentence is too long, and ``strict`` is True.
        """
        found = self.stream(sentences, max_tokens=max_tokens, max_source_tokens=max_source_tokens, strict=strict)
        return [best[0] for best in found]

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
        for sentence in _checked(sentences):
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
        before: int = 0,
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
            strict: True to refuse longer sentences. Otherwise their beginning is translated, with a warning.
            counts: record of what there is to warn of, for a piece of a text whose warnings are made for the whole
                text. None to log warnings.
            before: number of sentences of the text before these.

        Raises:
            ConfigError: if a number is out of range, or ``sentences`` is something else.
            DataError: if a sentence is too long, and ``strict`` is True.
        """
        lines = _checked(sentences)
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
            before=before,
        )
        return found if self.detokenise is None else _detokenised(found, self.detokenise)

    def score(
        self,
        sources: Iterable[str],
        translations: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        advance: Callable[[int], object] = lambda more: None,
        max_source_tokens: int | None = None,
        strict: bool = False,
    ) -> Iterator[ScoredTranslation]:
        """Yield the log-probability (nats) of each token of given translations, by forced decoding.

        An ensemble gives the mean of its models' probabilities. Text is encoded anew, so its tokens can differ from
        those of the search that wrote it.

        Args:
            sources: source sentences.
            translations: a translation of each; for an n-best list repeat the source.
            max_tokens: batch size: pairs x longest side.
            buffer_lines: number of pairs to read ahead, so that batches have pairs of similar length.
            advance: callback for progress; its argument is the number of pairs finished since the last call.
            max_source_tokens: see :meth:`stream`.
            strict: see :meth:`stream`.

        Raises:
            ConfigError: if a number is out of range, the texts are something else, or the run predicts masked tokens.
            DataError: if there are more sources than translations or fewer, a translation is longer than the model
                can read, or a source is too long and ``strict`` is True.
        """
        if not self.search.left_to_right:
            raise ConfigError(
                "`score` needs a run that translates from left to right, but this one predicts masked tokens, which "
                "have no log-probability token by token; use another run"
            )
        return score_lines(
            self.model,
            self.tokenizer,
            _checked(sources, "sources"),
            _checked(translations, "translations"),
            max_tokens=max_tokens,
            buffer_lines=buffer_lines,
            device=self.device,
            advance=advance,
            max_source_tokens=self.max_source_tokens if max_source_tokens is None else max_source_tokens,
            strict=strict,
        )


def _form(run: Run, language: str) -> TextForm:
    """Return the form of the text that a run writes, to make it plain.

    Args:
        run: the run.
        language: language code given by the user; "" to take that of the run.

    Raises:
        ConfigError: if the text cannot be made plain.
    """
    text = TextForm.moses(language, option("detokenise")) if language else run.text_form
    if text.form == "unknown":
        raise ConfigError(
            f"{option('detokenise')} needs a run that records the form of its text, but {run.path} is of an older "
            "version; if its text was tokenised by Moses, give the language, for example de"
        )
    text.convert("plain", [])  # reports problems before anything is translated
    if language:
        warn_of_missing_rules(language, option("detokenise"))
    if not text.how("plain"):
        logger.warning(
            "%s changes nothing, because %s was trained on plain text; leave it out", option("detokenise"), run.path
        )
    return text


def _detokenised(found: Iterable[list[Translation]], text: TextForm) -> Iterator[list[Translation]]:
    """Yield translations with plain text."""
    for best in found:
        lines = text.convert("plain", [each.text for each in best])
        yield [replace(each, text=line) for each, line in zip(best, lines, strict=True)]


def _check_type(name: str, value: object, types: tuple[type, ...], requirement: str) -> None:
    """Check the type of an argument.

    Raises:
        ConfigError: if the value is of none of the types.
    """
    if not isinstance(value, types):
        raise ConfigError(f"{option(name)} must be {requirement}, but is {shown(value)}")


def _paths(run: Paths) -> list[Path]:
    """Return the run directories that the user gave.

    Raises:
        ConfigError: if one is no path.
    """
    several = [run] if isinstance(run, (str, Path)) or not isinstance(run, Iterable) else list(run)
    for each in several:
        _check_type("run", each, (str, Path), "a run directory or several")
    return [Path(each) for each in several]


def _checked(sentences: Iterable[str], name: str = "sentences") -> Iterator[str]:
    """Return an iterator over sentences that refuses everything else; it reads on demand.

    Args:
        sentences: to check.
        name: of the argument, for messages.

    Raises:
        ConfigError: if they are one string, or no iterable. The iterator raises it for what is no string.
    """
    if isinstance(sentences, (str, bytes)):
        raise ConfigError(f"`{name}` must be a list of sentences, but is one string; put it into a list: [sentence]")
    _check_type(name, sentences, (Iterable,), "a list of sentences")

    def text(sentence: str) -> str:
        _check_type(name, sentence, (str,), "a list of strings")
        return sentence

    return map(text, sentences)


def _check_ensemble(runs: Sequence[Run]) -> None:
    """Check that runs can be combined.

    Raises:
        ConfigError: if there is none, or they have different vocabularies, or one predicts masked tokens.
    """
    if not runs:
        raise ConfigError("`run` must be a run directory or several, but is empty")
    if len({run.tokenizer.digest for run in runs}) > 1:
        raise ConfigError(
            "the runs of an ensemble must have one vocabulary, but theirs differ; see prepare --vocab-from"
        )
    masked = [run.path for run in runs if not run.config.model.left_to_right]
    if masked and len(runs) > 1:
        raise ConfigError(
            f"all runs of an ensemble must translate from left to right, but {masked[0]} predicts masked "
            "tokens; give it alone"
        )


def _model(
    run: Run, checkpoint: str, exit: str | None, encoder_layers: int | None, decoder_layers: int | None
) -> tuple[TranslationModel, str]:
    """Return a run's model, cut at an exit, and the hash of its weights.

    A side without a number of layers keeps all of them.

    Raises:
        ConfigError: if the run has no such exit.
    """
    model, digest = run.loaded(checkpoint)
    name = exit or TOP
    if encoder_layers is not None or decoder_layers is not None:
        counts = zip((encoder_layers, decoder_layers), model.stages, strict=True)
        name = exit_name(*(whole if count is None else count for count, whole in counts))
    try:
        cut = model.at_exit(name)
    except ConfigError as error:
        raise ConfigError(f"{run.path}: {error}") from error
    if not run.trained_at(name, model.stages):
        logger.warning("%s was not trained at exit %s; expect bad translations", run.path, name)
    return cut, digest
