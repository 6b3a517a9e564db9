"""Opening of runs to decode with: search and settings, models at an exit, ensembles, tags, the layer that aligns."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, DataError, counted, did_you_mean, option, shown
from deepspeed_nmt.registry import validated
from deepspeed_nmt.run.directory import DataRecord, Run
from deepspeed_nmt.search.alignment import AttentionWatch, cross_attention
from deepspeed_nmt.search.decode_options import DecodeOptions, check_unicode
from deepspeed_nmt.search.forced import pad_sources, token_log_probs
from deepspeed_nmt.search.lines import length_buckets
from deepspeed_nmt.search.searches import SEARCHES
from deepspeed_nmt.text import Tags


def search_settings(runs: Sequence[Run], changes: Mapping[str, Any], exits: Sequence[str]) -> SearchConfig:
    """Return the search of the first run with changed settings; those that are None stay.

    ``exits`` are the options by which the user chooses an exit.
    """
    run, own = runs[0], runs[0].config.search
    if changes.get("name") is None and (exits or (len(runs) > 1 and own.needs_exits)):
        own = own.from_one_exit()  # although the run was validated with several
    settings = own.model_dump()
    given = {key: value for key, value in changes.items() if value is not None}
    settings |= given
    name = settings["name"]
    if name not in SEARCHES:
        hint = did_you_mean(str(name), SEARCHES)
        raise ConfigError(f"{option('name', 'search')} is {shown(name)}, no known search{hint}")
    kind = SEARCHES[name].config
    if unknown := [key for key in given if key not in kind.model_fields]:
        having = [entry.name for entry in SEARCHES.values() if unknown[0] in entry.config.model_fields]
        raise ConfigError(
            f"{option(unknown[0])} is no option of search.name={name}, which decodes here"
            f"{', but of ' * bool(having)}{' and '.join(having)}; leave it out"
        )
    known = {key: value for key, value in settings.items() if key in kind.model_fields}
    search = validated(kind, known, option)
    assert isinstance(search, SearchConfig)
    if exits and search.from_one_exit() is not search:
        raise ConfigError(
            f"search.name={name} decodes from several exits, and {option(exits[0])} chooses one; give one of them"
        )
    parts = run.config.parts
    if wrong := set(replace(parts, search=search).contradictions()) - set(parts.contradictions()):
        raise ConfigError(sorted(wrong))
    return search


def check_ensemble(runs: Sequence[Run], weights: Sequence[float] | None) -> None:
    """Check that runs can be combined."""
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
    if not all(1e-100 <= weight <= 1e100 for weight in weights):  # their sum and its shares are numbers above 0
        raise ConfigError(
            f"{option('weights')} are {shown(list(weights))}, and not all from 1e-100 to 1e100; leave out a run of "
            "weight 0"
        )


def warn_of_differences(runs: Sequence[Run], search: SearchConfig, given: Mapping[str, object]) -> None:
    """Warn if the runs of an ensemble differ in what is taken from the first of them, and not ``given``."""
    chosen = {name for name, value in given.items() if value is not None}
    fields = {*type(search).model_fields} - chosen
    first = runs[0]
    for run in runs[1:]:
        tags = zip(("tag", "tag_target"), astuple(first.data.tags), astuple(run.data.tags), strict=True)
        differences = [
            f"{option(name)} ({own or 'none'} and {other or 'none'})"
            for name, own, other in tags
            if own != other and name not in chosen
        ]
        forms = first.data.common_text, run.data.common_text
        if forms[0].contradicts(forms[1]):
            differences.append(f"the form of their text ({forms[0]} and {forms[1]})")
        one, two = first.config.search.model_dump(), run.config.search.model_dump()
        names = {"name"} if "name" in fields and one["name"] != two["name"] else fields & one.keys() & two.keys()
        differences += [
            f"search.{name} ({shown(one[name])} and {shown(two[name])})"
            for name in one
            if name in names and one[name] != two[name]
        ]
        if differences:
            logger.warning(
                f"{first.path} and {run.path} differ in {', '.join(differences)}; the ensemble decodes with what "
                f"{first.path} has, unless other options are given"
            )


def suppressed(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of tokens that are never predicted, given as the vocabulary spells them or as text."""
    numbers = []
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
        numbers.append(number)
    return tuple(numbers)


def chosen_tags(run: Run, source: str | None, target: str | None) -> Tags:
    """Return the tags of a translation: those that the user gives, "" for none, None for those of the run's data."""
    tags = run.data.tags.changed(source, target)
    for side in SIDES:
        if (tag := tags.of(side)) is not None:
            run.tokenizer.symbol(side, tag)
    return tags


def chosen_exit(model: TranslationModel, options: DecodeOptions) -> str:
    """Return the name of the exit that a user has chosen; a side without a number of layers keeps all of them."""
    if options.encoder_layers is None and options.decoder_layers is None:
        return TOP if options.exit is None else options.exit
    encoder, decoder = model.stages
    return exit_name(options.encoder_layers or encoder, options.decoder_layers or decoder)


def cut_at(run: Run, model: TranslationModel, exit: str) -> TranslationModel:
    """Return a run's model, cut at an exit."""
    try:
        cut = model.at_exit(exit)
    except ConfigError as error:
        raise ConfigError(f"{run.path}: {error}") from error
    if not run.trained_at(exit, model.stages):
        logger.warning("%s was not trained at exit %s; expect bad translations", run.path, exit)
    return cut


def trained_exits(run: Run, model: TranslationModel) -> list[str]:
    """Return the names of the exits that a run has trained, the top last; named ones instead of numbered ones."""
    if named := run.config.model.named_exits:
        return list(named)
    encoder, decoder = model.stages
    names = [exit_name(n, m) for n in range(1, encoder + 1) for m in range(1, decoder + 1)]
    trained = [name for name in names[:-1] if run.trained_at(name, model.stages)]
    return [*trained, TOP]


_MAX_PAIRS = 1000
"""Sentence pairs of the validation text that decide on the layer that aligns."""
_MAX_TOKENS = 4096
_LONGEST = 250
_PRIOR = 1.0
"""Weight of the frequencies of target tokens in their distribution after a source token, in tokens."""

Linked = tuple[int, int]
"""A source token and the target token that is linked with it."""


def alignment_layer(run: Run, model: TranslationModel) -> int:
    """Return the number of the decoder layer whose cross-attention aligns best on the validation text of a run.

    There are no reference alignments. A good alignment links a target token with the source token that it translates,
    so the target token can be predicted from that source token alone. For each layer the links of the validation text
    are divided into two halves by sentence. From each half p(target token | linked source token) is estimated, and
    the other half is scored: the layer with the lowest cross-entropy is chosen. A layer that attends to the end of
    the sentence, to punctuation or to the token before the translated one predicts hardly better than the frequencies
    of the target tokens. The model is in eval mode.
    """
    attentions = model.cross_attentions()
    if not attentions:
        raise ConfigError(f"{option('alignment')} needs a model with cross-attention, but {run.path} has none")
    if len(attentions) == 1:
        return next(iter(attentions))
    try:
        data = DataDirectory.open(Path(DataRecord.read(run.path).path))
        run.check_vocabulary(data)
        corpus = data.corpus("valid")
    except DataError as error:
        raise ConfigError(
            f"{option('alignment')} chooses the decoder layer on the validation text of the run, which cannot be "
            f"read ({error}); give {option('alignment_layer')}"
        ) from error
    pairs = [(corpus.source(i).tolist(), corpus.target(i).tolist()) for i in range(min(_MAX_PAIRS, len(corpus)))]
    pairs = [pair for pair in pairs if max(map(len, pair)) <= _LONGEST and min(map(len, pair)) > 0]
    links = _links(model, run, pairs)
    scores = {layer: held_out_cross_entropy(of) for layer, of in zip(attentions, links, strict=True)}
    best = min(scores, key=lambda layer: scores[layer])
    logger.info(
        f"{run.path}: decoder layer {best} aligns best (cross-entropy {scores[best]:.3f} of links; the worst of "
        f"{len(scores)} has {max(scores.values()):.3f}); {option('alignment_layer')} fixes the layer"
    )
    return best


def _links(
    model: TranslationModel, run: Run, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[list[list[Linked]]]:
    """Return for each layer with cross-attention the linked tokens of each sentence pair."""
    vocabulary = run.tokenizer.vocabulary
    device = next(model.parameters()).device
    layers = list(model.cross_attentions().values())
    links: list[list[list[Linked]]] = [[[] for _ in pairs] for _ in layers]
    lengths = [max(map(len, pair)) + 1 for pair in pairs]
    for bucket in length_buckets(lengths, _MAX_TOKENS):
        rows = [[*pairs[number][0], vocabulary.source.eos] for number in bucket]
        source_BS, padded = pad_sources(rows, vocabulary.pad, device)
        with torch.inference_mode():
            watch = AttentionWatch([[(layer, 1.0)] for layer in layers], source_BS, vocabulary)
            with watch.watching():
                targets = [[pairs[number][1]] for number in bucket]
                token_log_probs(model, vocabulary, source_BS, padded, targets, watch.decoded)
        for place, number in enumerate(bucket):
            source, target = rows[place], pairs[number][1]
            for layer in range(len(layers)):
                positions = watch.links(layer, place, len(target))
                links[layer][number] = [
                    (source[position], token) for position, token in zip(positions, target, strict=True)
                ]
    return links


def held_out_cross_entropy(sentences: Sequence[Sequence[Linked]]) -> float:
    """Return the cross-entropy (nats per token) of target tokens given their linked source tokens.

    The distributions are estimated on every other sentence and measured on the rest, and the reverse. They are
    smoothed by the frequencies of target tokens.
    """
    total, tokens = 0.0, 0
    for half in range(2):
        pairs = Counter(itertools.chain.from_iterable(sentences[half::2]))
        sources, targets = Counter[int](), Counter[int]()
        for (source, target), count in pairs.items():
            sources[source] += count
            targets[target] += count
        all_targets = targets.total() + len(targets) + 1  # one for each, and one for those that are unseen
        for source, target in itertools.chain.from_iterable(sentences[1 - half :: 2]):
            prior = (targets[target] + 1) / all_targets
            p = (pairs[source, target] + _PRIOR * prior) / (sources[source] + _PRIOR)
            total -= math.log(p)
            tokens += 1
    return total / max(1, tokens)


@dataclass(frozen=True)
class Opened:
    """Runs that are decoded with, one or an ensemble: the checkpoint of each, the exit, and hashes of the weights."""

    runs: tuple[Run, ...]
    checkpoint: str
    exit: str
    digests: tuple[str, ...] = ()
    precision: str = "fp32"
    natively: bool = False
    aligning: dict[str, list[int]] = field(default_factory=dict)
    """Layers that align best by exit, once they have been chosen."""

    def exits(self, models: Sequence[TranslationModel]) -> list[str]:
        """Return the names of the exits up to this one that all runs have trained, the top last."""
        names = [trained_exits(run, model) for run, model in zip(self.runs, models, strict=True)]
        shared = [name for name in names[0] if all(name in others for others in names[1:])]
        if self.exit in shared:  # a named one
            return shared[: shared.index(self.exit) + 1]
        # The top of a grown model is called deep, and that of others top: all have one.
        return shared if names[0][-1] in shared else [*shared, TOP]

    def alignment_layers(self, models: Sequence[TranslationModel], layer: int | None) -> list[int]:
        """Return the decoder layer of each model whose cross-attention aligns: ``layer``, or the best one of each."""
        if layer is not None:
            for model in models:
                cross_attention(model.cross_attentions(), layer)
            return [layer] * len(models)
        if self.exit not in self.aligning:
            self.aligning[self.exit] = list(map(alignment_layer, self.runs, models))
        return self.aligning[self.exit]
