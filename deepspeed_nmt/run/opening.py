"""Opening of runs to decode with: the search and its settings, models at an exit, ensembles, and tags."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, counted, did_you_mean, option, shown
from deepspeed_nmt.registry import problem_of
from deepspeed_nmt.run.alignment_layer import alignment_layer
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search import SEARCHES
from deepspeed_nmt.search.alignment import cross_attention
from deepspeed_nmt.search.decode_options import DecodeOptions, check_unicode
from deepspeed_nmt.text import Tags


def search_settings(runs: Sequence[Run], changes: Mapping[str, Any], exits: Sequence[str]) -> SearchConfig:
    """Return the search of the first run with changed settings.

    Args:
        runs: to decode with.
        changes: settings by name; those that are None stay.
        exits: options by which the user chooses an exit.

    Raises:
        ConfigError: if a setting is unknown or out of range, or the model lacks an exit that the search needs.
    """
    run = runs[0]
    settings = run.config.search.model_dump()
    if (exits or len(runs) > 1) and run.config.search.needs_exits and changes.get("name") is None:
        settings["name"] = SEARCHES.default  # decodes from one exit, although the run was validated with both
    settings |= {key: value for key, value in changes.items() if value is not None}
    if settings["name"] not in SEARCHES:
        name = settings["name"]
        raise ConfigError(
            f"{option('name', 'search')} is {shown(name)}, no known search{did_you_mean(str(name), SEARCHES)}"
        )
    kind = SEARCHES[settings["name"]].config
    if unknown := [key for key, value in changes.items() if value is not None and key not in kind.model_fields]:
        raise ConfigError(
            f"{option(unknown[0])} is no option of search.name={settings['name']}, which decodes here; "
            + _remedy(runs, unknown[0], exits)
        )
    try:
        search = kind.model_validate({key: value for key, value in settings.items() if key in kind.model_fields})
    except ValidationError as error:
        raise ConfigError(
            [problem_of(each, option(str(each["loc"][0])) if each["loc"] else "") for each in error.errors()]
        ) from error
    assert isinstance(search, SearchConfig)
    if not set(search.needs_exits) <= set(run.config.model.named_exits):
        raise ConfigError(
            f"search.name={search.name} needs a run whose model has the exits {' and '.join(search.needs_exits)}, "
            f"but {run.path} has model.name={run.config.model.name}"
        )
    parts = run.config.parts
    if wrong := set(replace(parts, search=search).contradictions()) - set(parts.contradictions()):
        raise ConfigError(sorted(wrong))
    return search


def _remedy(runs: Sequence[Run], setting: str, exits: Sequence[str]) -> str:
    """Return the remedy for a setting that the search lacks; another search only if it can decode with the runs.

    Args:
        runs: to decode with.
        setting: its name.
        exits: options by which the user chooses an exit.
    """
    config = runs[0].config
    if exits and setting in type(config.search).model_fields:
        chosen = " and ".join(map(option, exits))
        return f"leave out {chosen} to decode with {config.search.name}, or leave out {option(setting)}"
    kinds = [entry.config() for entry in SEARCHES.entries if setting in entry.config.model_fields]
    possible = [
        kind.name
        for kind in kinds
        if isinstance(kind, SearchConfig)
        and not replace(config.parts, search=kind).contradictions()
        and not (kind.needs_exits and len(runs) > 1)
    ]
    return f"use search {' or '.join(possible)}, or leave it out" if possible else "leave it out"


def check_ensemble(runs: Sequence[Run], weights: Sequence[float] | None) -> None:
    """Check that runs can be combined.

    Args:
        runs: to combine.
        weights: of the runs; None for equal weights.

    Raises:
        ConfigError: if there is none, or they have different vocabularies, or one predicts masked tokens, or the
            weights are not one positive number for each.
    """
    if not runs:
        raise ConfigError("`run` is empty; give a run directory or several")
    if len({run.tokenizer.digest for run in runs}) > 1:
        raise ConfigError("the runs of the ensemble differ in their vocabularies; prepare their data by --vocab-from")
    masked = [run.path for run in runs if not run.config.model.left_to_right]
    if masked and len(runs) > 1:
        raise ConfigError(
            f"{masked[0]} predicts masked tokens, and an ensemble translates from left to right; give it alone"
        )
    if weights is None:
        return
    if len(weights) != len(runs):
        raise ConfigError(
            f"{option('weights')} has {counted(len(weights), 'numbers')} for "
            f"{counted(len(runs), 'runs')}; give as many"
        )
    if not all(0.0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"{option('weights')} are {shown(list(weights))}, and not all above 0; leave out a run of weight 0"
        )


def warn_of_differences(runs: Sequence[Run], search: SearchConfig, given: Mapping[str, object]) -> None:
    """Warn if the runs of an ensemble differ in what is taken from the first of them.

    Args:
        runs: of the ensemble.
        search: which decodes.
        given: options and settings of the search by name; the runs do not matter for those that are not None.
    """
    chosen = {name for name, value in given.items() if value is not None}
    for run in runs[1:]:
        differing = [
            f"{option(name)} ({own or 'none'} and {other or 'none'})"
            for name, own, other in (
                ("tag", runs[0].tags.source, run.tags.source),
                ("tag_target", runs[0].tags.target, run.tags.target),
            )
            if own != other and name not in chosen
        ]
        if runs[0].text_form.contradicts(run.text_form):
            differing.append(f"the form of their text ({runs[0].text_form} and {run.text_form})")
        differing += _differing_settings(
            runs[0].config.search, run.config.search, {*type(search).model_fields} - chosen
        )
        if differing:
            logger.warning(
                "%s and %s differ in %s; the ensemble decodes with what %s has, unless other options are given",
                runs[0].path,
                run.path,
                ", ".join(differing),
                runs[0].path,
            )


def _differing_settings(first: SearchConfig, other: SearchConfig, names: Collection[str]) -> list[str]:
    """Return phrases for settings in which two searches differ: their names alone, or settings that both have.

    Args:
        first: a search.
        other: another one.
        names: of the settings to compare.
    """
    one, two = first.model_dump(), other.model_dump()
    if "name" in names and first.name != other.name:
        names = ("name",)
    both = [name for name in one if name in names and name in two]
    return [f"search.{name} ({shown(one[name])} and {shown(two[name])})" for name in both if one[name] != two[name]]


def suppressed(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of tokens that are never predicted.

    Args:
        tokenizer: of the runs.
        texts: the tokens, as the vocabulary spells them or as text that is one token.

    Raises:
        ConfigError: if a text is no token of the target, or is the end of sentences.
    """
    found = []
    for text in texts:
        check_unicode("suppress", text)
        number = tokenizer.number(text, "target")
        if number is None:
            tokens = tokenizer.encode_batch([text], "target")[0]
            number = tokens[0] if len(tokens) == 1 else None
        if number is None or number in (tokenizer.vocabulary.eos, tokenizer.vocabulary.unk):
            raise ConfigError(
                f"{option('suppress')}: {shown(text)} is no token of the target's vocabulary; for the "
                f"unknown token give {option('suppress_unknown')}"
            )
        found.append(number)
    return tuple(found)


def chosen_tags(run: Run, source: str | None, target: str | None) -> Tags:
    """Return the tags of a translation.

    Args:
        run: the run.
        source: symbol given by the user for source lines; "" for none, None for that of the run's data.
        target: symbol given by the user for translations, in the same way.

    Raises:
        DataError: if a symbol given is none of the vocabulary.
    """
    recorded = run.tags
    tags = Tags(
        *(
            (own if given is None else given or None)
            for own, given in zip((recorded.source, recorded.target), (source, target), strict=True)
        )
    )
    for side in SIDES:
        tag = tags.of(side)
        if tag is not None:
            run.tokenizer.symbol(side, tag)
    return tags


def chosen_search(runs: Sequence[Run], changes: Mapping[str, Any], options: DecodeOptions) -> SearchConfig:
    """Return the search that a user has chosen; see :func:`search_settings`.

    Args:
        runs: to decode with.
        changes: settings by name; those that are None stay.
        options: which tokens are never predicted, and the exit.
    """
    if options.suppress is not None:
        changes = {**changes, "suppress_tokens": suppressed(runs[0].tokenizer, options.suppress)}
    return search_settings(runs, changes, options.exits)


def chosen_exit(model: TranslationModel, options: DecodeOptions) -> str:
    """Return the name of the exit that a user has chosen; a side without a number of layers keeps all of them."""
    if options.encoder_layers is None and options.decoder_layers is None:
        return options.exit or TOP
    encoder, decoder = model.stages
    return exit_name(options.encoder_layers or encoder, options.decoder_layers or decoder)


def cut_at(run: Run, model: TranslationModel, exit: str) -> TranslationModel:
    """Return a run's model, cut at an exit.

    Raises:
        ConfigError: if the run has no such exit.
    """
    try:
        cut = model.at_exit(exit)
    except ConfigError as error:
        raise ConfigError(f"{run.path}: {error}") from error
    if not run.trained_at(exit, model.stages):
        logger.warning("%s was not trained at exit %s; expect bad translations", run.path, exit)
    return cut


def trained_exits(run: Run, model: TranslationModel) -> list[str]:
    """Return the names of the exits that a run has trained, the top among them as the last.

    Named exits come instead of the numbered ones that they stand for.
    """
    if named := run.config.model.named_exits:
        return list(named)
    encoder, decoder = model.stages
    names = [exit_name(n, m) for n in range(1, encoder + 1) for m in range(1, decoder + 1)]
    trained = [name for name in names[:-1] if run.trained_at(name, model.stages)]
    return [*trained, TOP]


@dataclass(frozen=True)
class Opened:
    """Runs that are decoded with.

    Attributes:
        runs: one, or those of an ensemble.
        checkpoint: which checkpoint of each.
        exit: exit of their models.
        digests: hash of the weights of each.
        precision: in which they decode.
        aligning: layers that align best by exit, as far as they were asked for.
    """

    runs: tuple[Run, ...]
    checkpoint: str
    exit: str
    digests: tuple[str, ...] = ()
    precision: str = "fp32"
    aligning: dict[str, list[int]] = field(default_factory=dict)

    def exits(self, models: Sequence[TranslationModel]) -> list[str]:
        """Return the names of the exits that all runs have trained, the top last.

        Args:
            models: of the runs, at the top.
        """
        each = [trained_exits(run, model) for run, model in zip(self.runs, models, strict=True)]
        return [name for name in each[0] if all(name in others for others in each[1:])]

    def alignment_layers(self, models: Sequence[TranslationModel], layer: int | None) -> list[int]:
        """Return the decoder layer of each model whose cross-attention aligns.

        Args:
            models: of the runs, at :attr:`exit`.
            layer: number of the layer for all; None to choose those that align best on validation text.

        Raises:
            ConfigError: if a layer does not exist, or cannot be chosen.
        """
        if layer is not None:
            for model in models:
                cross_attention(model.cross_attentions(), layer)
            return [layer] * len(models)
        if self.exit not in self.aligning:  # in a run that is read-only, they would be chosen in each call
            pairs = zip(self.runs, models, strict=True)
            layers = [alignment_layer(run, self.checkpoint, self.exit, model) for run, model in pairs]
            self.aligning[self.exit] = layers
        return self.aligning[self.exit]
