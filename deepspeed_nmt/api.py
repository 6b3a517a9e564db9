"""Translation from Python.

    from deepspeed_nmt import Translator

    translator = Translator.open("runs/sample")
    for translation in translator.translate(["The dog sleeps."]):
        print(translation.text, translation.score)

The command `deepspeed-nmt translate` runs this code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TOP, DecodableModel, TranslationModel, exit_name
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search import SEARCHES
from deepspeed_nmt.search.ensemble import Ensemble
from deepspeed_nmt.search.translate import Translation, translate_lines

Paths = str | Path | Sequence[str | Path]


class Translator:
    """Translates sentences with a trained run, or with several as an ensemble. Made by :meth:`open`.

    Args:
        model: in eval mode, on ``device``.
        tokenizer: of the run.
        search: the search and its settings.
        device: of the model.
    """

    def __init__(
        self, model: DecodableModel, tokenizer: Tokenizer, search: SearchConfig, device: torch.device
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.search = search
        self.device = device

    @classmethod
    def open(
        cls,
        run: Paths,
        *,
        checkpoint: str = "best",
        device: str = "auto",
        exit: str | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        **search: Any,
    ) -> Translator:
        """Open a run directory.

        Args:
            run: the directory, or several, which decode as an ensemble.
            checkpoint: best, last, average, or a path.
            device: auto (a GPU where there is one), cpu or cuda.
            exit: decode from this exit instead of the top, for example "3-2", or "shallow" of a grown model.
            encoder_layers: decode with the first layers (or loops) of the encoder, this many.
            decoder_layers: the same of the decoder.
            search: settings of the search that differ from the run's own, for example ``beam=1``; ``name`` chooses
                another search.

        Raises:
            ConfigError: if the runs cannot be opened or combined, or an exit or a setting does not exist.
            CheckpointError: if there is no such checkpoint, or it is damaged.
        """
        paths = [run] if isinstance(run, (str, Path)) else list(run)
        runs = [Run.open(Path(path)) for path in paths]
        _check_ensemble(runs)
        exits = (exit, encoder_layers, decoder_layers)
        settings = _search_settings(runs, search, asks_exit=any(each is not None for each in exits))
        use_cuda = device != "cpu" and torch.cuda.is_available()
        where = torch.device("cuda" if use_cuda else "cpu")
        models = [_model(each, checkpoint, exit, encoder_layers, decoder_layers) for each in runs]
        model = (models[0] if len(models) == 1 else Ensemble(models).eval()).to(where)
        return cls(model, runs[0].tokenizer, settings, where)

    def translate(self, sentences: Iterable[str], max_tokens: int = 4096) -> list[Translation]:
        """Return the best translation of each sentence.

        Args:
            sentences: source text, one sentence each; an empty one has an empty translation.
            max_tokens: bound on a batch, sentences times the longest source among them.

        Raises:
            ConfigError: if ``max_tokens`` is out of range.
        """
        return [best[0] for best in self.stream(sentences, max_tokens=max_tokens)]

    def stream(
        self,
        sentences: Iterable[str],
        *,
        max_tokens: int = 4096,
        buffer_lines: int = 4096,
        nbest: int = 1,
        advance: Callable[[int], object] = lambda more: None,
    ) -> Iterator[list[Translation]]:
        """Yield the ``nbest`` translations of each sentence, best first, in bounded memory.

        Args:
            sentences: source text, one sentence each.
            max_tokens: bound on a batch, sentences times the longest source among them.
            buffer_lines: sentences that are read before the first of them is returned.
            nbest: translations of each sentence.
            advance: is called with the number of further sentences done.

        Raises:
            ConfigError: if a number is out of range.
        """
        return translate_lines(
            self.model,
            self.tokenizer,
            sentences,
            self.search,
            max_tokens=max_tokens,
            buffer_lines=buffer_lines,
            device=self.device,
            nbest=nbest,
            advance=advance,
        )


def _check_ensemble(runs: Sequence[Run]) -> None:
    if not runs:
        raise ConfigError("a run directory is required, but none is given")
    if len({run.tokenizer.digest for run in runs}) > 1:
        raise ConfigError(
            "the runs of an ensemble must have one vocabulary, but theirs differ; see prepare --vocab-from"
        )
    guessing = [run.path for run in runs if not run.config.model.left_to_right]
    if guessing and len(runs) > 1:
        raise ConfigError(
            f"an ensemble translates from left to right, but {guessing[0]} guesses masked tokens; give it alone"
        )


def _search_settings(runs: Sequence[Run], changes: Mapping[str, Any], *, asks_exit: bool) -> SearchConfig:
    """Return the first run's search with some settings changed.

    Raises:
        ConfigError: if a setting is unknown or out of range.
    """
    run = runs[0]
    settings = run.config.search.model_dump()
    if (asks_exit or len(runs) > 1) and run.config.search.needs_exits and "name" not in changes:
        settings["name"] = SEARCHES.default  # one net, though the run was validated with two
    settings |= {key: value for key, value in changes.items() if value is not None}
    kind = SEARCHES[settings["name"]].config
    if foreign := [key for key, value in changes.items() if value is not None and key not in kind.model_fields]:
        option = f"--{foreign[0].replace('_', '-')}"
        raise ConfigError(f"{option} is no option of search.name={settings['name']}, by which this run is decoded")
    try:
        search = kind.model_validate({key: value for key, value in settings.items() if key in kind.model_fields})
    except ValidationError as error:
        raise ConfigError(
            [f"{'.'.join(map(str, p['loc']))}: {p['msg']}, but is {p['input']!r}" for p in error.errors()]
        ) from error
    assert isinstance(search, SearchConfig)
    if not set(search.needs_exits) <= set(run.config.model.named_exits):
        raise ConfigError(
            f"search.name={search.name} needs a run whose model has the exits {' and '.join(search.needs_exits)}, "
            f"but {run.path} has model.name={run.config.model.name}"
        )
    return search


def _model(
    run: Run, checkpoint: str, exit: str | None, encoder_layers: int | None, decoder_layers: int | None
) -> TranslationModel:
    """Return a run's model, cut at an exit. A side that no layers are asked for keeps all of its own.

    Raises:
        ConfigError: if the run has no such exit.
    """
    model = run.model(checkpoint)
    name = exit or TOP
    if encoder_layers is not None or decoder_layers is not None:
        asked = zip((encoder_layers, decoder_layers), model.stages, strict=True)
        name = exit_name(*(whole if count is None else count for count, whole in asked))
    try:
        cut = model.at_exit(name)
    except ConfigError as error:
        raise ConfigError(f"{run.path}: {error}") from error
    if not run.trained_at(name, model.stages):
        logger.warning("%s was not trained at exit %s; expect bad translations", run.path, name)
    return cut
