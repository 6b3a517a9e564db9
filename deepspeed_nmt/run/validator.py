"""Validation during training: loss with teacher forcing, and metrics of the translations."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.validation import ValidationSet
from deepspeed_nmt.evaluate.metrics import Scorer, validation_tag
from deepspeed_nmt.files import text_lines
from deepspeed_nmt.parallel.collectives import gather_lists, sum_over_ranks
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.attention_images import AttentionImages, Images
from deepspeed_nmt.run.validation import MAIN, MEAN, ValidationConfig
from deepspeed_nmt.run.validation_sets import SPLIT, digest, title
from deepspeed_nmt.search import SearchConfig
from deepspeed_nmt.search.precision import packed_weights
from deepspeed_nmt.search.requests import LineInputs
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS
from deepspeed_nmt.search.translate import translate_lines
from deepspeed_nmt.train.replica import Replica
from deepspeed_nmt.train.session import Validation


class ModelValidator:
    """Validator of a model by loss and metrics of each validation set.

    The weights are gathered once. Then each rank scores and translates its sentences without waiting for other ranks.

    Args:
        replica: unsharded copy of the model.
        objective: objective of the run.
        data: data directories with the raw validation text, by name of the set, first that of the training data.
        validation: validation sets in batches, by the same names.
        config: settings of validation.
        search: the search and its settings.
        world: the ranks.
        watchdog: records the set that is validated, if there are several.
        attention: draws the cross-attention of some sentences; None for no images.

    Raises:
        ConfigError: if the text of a set cannot be brought into the form that a metric requires.
    """

    def __init__(
        self,
        replica: Replica,
        objective: Objective,
        data: Mapping[str, DataDirectory],
        validation: Mapping[str, ValidationSet],
        config: ValidationConfig,
        search: SearchConfig,
        world: World,
        watchdog: Watchdog,
        attention: AttentionImages | None = None,
    ) -> None:
        self._attention = attention if world.is_main else None
        self._replica = replica
        self._world = world
        self._watchdog = watchdog
        main = data[MAIN]
        self._sets = {
            name: _MeasuredSet(name, main, each, validation[name], objective, config, search, world)
            for name, each in data.items()
        }
        self._best = config.chosen(main.text_form)[1]
        self._chooses = config.chooses
        chosen_by = data if self._chooses == MEAN else {self._chooses: data[self._chooses]}
        # Scores of other text are not compared. The main set is always the same one.
        self._of = "" if self._chooses == MAIN else f" of {digest(chosen_by)}"

    def __call__(self, update: int) -> Validation:
        """Validate the weights after ``update`` and return the values and the score. All ranks call it together."""
        values: dict[str, float] = {}
        seconds = dict.fromkeys(self._sets, 0.0)
        images: Images = {}
        with self._replica.at(update) as model:
            for name, each in self._sets.items():
                with self._measuring(name, update, seconds):
                    values |= each.losses(model)
            if self._attention is not None:
                images = self._attention(model, self._world.device)
            translated = {name: each for name, each in self._sets.items() if each.is_translated}
            if translated:
                with packed_weights(model, self._world.device):
                    for name, each in translated.items():
                        with self._measuring(name, update, seconds):
                            values |= each.scores(model)
        if len(seconds) > 1 and self._world.is_main:
            shares = ", ".join(f"{value:.1f} s for {title(name)}" for name, value in seconds.items())
            logger.info("validation after update %d took %.1f s: %s", update, sum(seconds.values()), shares)
        return replace(self._judged(values), images=images)

    def _judged(self, values: dict[str, float]) -> Validation:
        """Return the values, with their means if these choose, and the score."""
        best, of = self._best, self._chooses
        if of == MEAN:
            for name in ("loss", *([] if best is None else [best.name])):
                values[validation_tag(name, MEAN)] = fmean(values[validation_tag(name, each)] for each in self._sets)
        loss = values[validation_tag("loss", of)]
        if best is None:  # losses, which are not rounded, decide alone
            return Validation(values, validation_tag("loss", of) + self._of, -loss, loss, least=math.inf)
        score = values[validation_tag(best.name, of)] * (1 if best.higher_is_better else -1)
        return Validation(values, validation_tag(best.name, of) + self._of, score, loss, best.least, best.decimals)

    @contextmanager
    def _measuring(self, name: str, update: int, seconds: dict[str, float]) -> Iterator[None]:
        """Add the time of a part of validation to that of its set."""
        if len(self._sets) > 1:  # each set has the time limit of a validation
            self._watchdog.at(f"validating on {title(name)} after update {update}", slow=True)
        started = time.monotonic()
        yield
        seconds[name] += time.monotonic() - started


class _MeasuredSet:
    """A validation set and its measures; all ranks measure it together.

    Args:
        name: name of the set, MAIN for that of the training data.
        main: data that is trained on.
        data: data directory with the set's raw text.
        validation: the set in batches.
        objective: objective of the run.
        config: settings of validation.
        search: the search and its settings.
        world: the ranks.
    """

    def __init__(
        self,
        name: str,
        main: DataDirectory,
        data: DataDirectory,
        validation: ValidationSet,
        objective: Objective,
        config: ValidationConfig,
        search: SearchConfig,
        world: World,
    ) -> None:
        self._name = name
        self._objective = objective
        self._validation = validation
        self._tokenizer, self._tags = main.tokenizer(), data.tags
        self._config = config
        self._search = search
        self._world = world
        self._max_source_tokens = max(MAX_SOURCE_TOKENS, main.longest_source)
        longest = data.meta.splits[SPLIT].source.longest
        metrics, _ = config.chosen(data.text_form, name)
        if metrics and longest > self._max_source_tokens and world.is_main:
            logger.warning(
                "%s has a source line of %s tokens: of lines over %s only the beginning is "
                "translated; leave them out",
                title(name),
                f"{longest:,}",
                f"{self._max_source_tokens:,}",
            )
        with data.text(SPLIT, "source").open("rb") as stream:
            self._sources = list(text_lines(stream))
        with data.text(SPLIT, "target").open("rb") as stream:
            references = [self._tokenizer.reference(line) for line in text_lines(stream)]
        self._count = min(len(self._sources), config.max_sentences or len(self._sources))
        self._scorer = Scorer(metrics, data.text_form, references[: self._count])
        if world.is_main:
            for metric in metrics:
                how = data.text_form.how(metric.kind)
                logger.info("%s: %s%s", validation_tag(metric.name, name), metric.signature(), how and f"; {how}")

    @property
    def is_translated(self) -> bool:
        """True if there are metrics."""
        return bool(self._scorer.metrics)

    def losses(self, model: TranslationModel) -> dict[str, float]:
        """Return loss, NLL and perplexity by tag."""
        sums = {"loss": 0.0, "nll": 0.0, "tokens": 0.0}
        for batch in self._validation.batches():
            with torch.no_grad():
                output = self._objective(model, batch.to(self._world.device))
            sums["loss"] += float(output.loss)
            sums["nll"] += float(output.nll)
            sums["tokens"] += batch.target_tokens
        total = sum_over_ranks(sums, self._world)
        nll = total["nll"] / total["tokens"]
        return {
            validation_tag("loss", self._name): total["loss"] / total["tokens"],
            validation_tag("nll", self._name): nll,
            validation_tag("ppl", self._name): math.exp(min(nll, 100.0)),
        }

    def scores(self, model: TranslationModel) -> dict[str, float]:
        """Translate the set on all ranks, and return the metrics by tag."""
        # Each rank takes every ranks-th sentence, so that all have similar work; the order is restored below.
        mine = range(self._world.rank, self._count, self._world.ranks)
        translations = translate_lines(
            model,
            self._tokenizer,
            (self._sources[index] for index in mine),
            self._search,
            max_tokens=self._config.max_tokens,
            device=self._world.device,
            max_source_tokens=self._max_source_tokens,
            warn=False,  # it would repeat itself at each validation
            inputs=LineInputs(first=self._world.rank, step=self._world.ranks, tags=self._tags),
        )
        pairs = [[index, best[0].text] for index, best in zip(mine, translations, strict=True)]
        hypotheses = [text for _, text in sorted(gather_lists(pairs, self._world))]
        return {validation_tag(name, self._name): score for name, score in self._scorer(hypotheses).items()}
