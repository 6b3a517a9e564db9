"""Validation during training: loss with teacher forcing, and metrics of the translations."""

from __future__ import annotations

import math

import torch

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.data.validation import ValidationSet
from deepspeed_nmt.evaluate.metrics import Scorer, validation_tag
from deepspeed_nmt.files import text_lines
from deepspeed_nmt.parallel.collectives import gather_lists, sum_over_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.validation import ValidationConfig
from deepspeed_nmt.search import SearchConfig
from deepspeed_nmt.search.precision import packed_weights
from deepspeed_nmt.search.requests import LineInputs
from deepspeed_nmt.search.source_lines import MAX_SOURCE_TOKENS
from deepspeed_nmt.search.translate import translate_lines
from deepspeed_nmt.train.replica import Replica
from deepspeed_nmt.train.session import Validation


class ModelValidator:
    """Validator of a model by loss and metrics.

    The weights are gathered once. Then each rank scores and translates its sentences without waiting for other ranks.

    Args:
        replica: unsharded copy of the model.
        objective: objective of the run.
        data: data directory with the raw validation text.
        validation: validation set in batches.
        config: settings of validation.
        search: the search and its settings.
        world: the ranks.

    Raises:
        ConfigError: if the text of the data cannot be brought into the form that a metric requires.
    """

    def __init__(
        self,
        replica: Replica,
        objective: Objective,
        data: DataDirectory,
        validation: ValidationSet,
        config: ValidationConfig,
        search: SearchConfig,
        world: World,
    ) -> None:
        self._replica = replica
        self._objective = objective
        self._validation = validation
        self._tokenizer, self._tags = data.tokenizer(), data.tags
        self._config = config
        self._search = search
        self._world = world
        self._max_source_tokens = max(MAX_SOURCE_TOKENS, data.longest_source)
        valid = data.meta.splits["valid"].source.longest
        metrics, self._best = config.chosen(data.text_form)
        if metrics and valid > self._max_source_tokens and world.is_main:
            logger.warning(
                "the validation set has a source line of %s tokens: of lines over %s only the beginning is "
                "translated; leave them out",
                f"{valid:,}",
                f"{self._max_source_tokens:,}",
            )
        with data.text("valid", "source").open("rb") as stream:
            self._sources = list(text_lines(stream))
        with data.text("valid", "target").open("rb") as stream:
            references = [self._tokenizer.reference(line) for line in text_lines(stream)]
        self._count = min(len(self._sources), config.max_sentences or len(self._sources))
        self._scorer = Scorer(metrics, data.text_form, references[: self._count])
        if world.is_main:
            for metric in metrics:
                how = data.text_form.how(metric.kind)
                logger.info("%s: %s%s", validation_tag(metric.name), metric.signature(), how and f"; {how}")

    def __call__(self, update: int) -> Validation:
        """Validate the weights after ``update`` and return the values and the score. All ranks call it together."""
        with self._replica.at(update) as model:
            values = self._loss(model)
            if self._scorer.metrics:
                with packed_weights(model, self._world.device):
                    scores = self._scorer(self._translations(model))
                values |= {validation_tag(name): score for name, score in scores.items()}
        best, loss = self._best, values[validation_tag("loss")]
        if best is None:  # losses, which are not rounded, decide alone
            return Validation(values, validation_tag("loss"), -loss, loss, least=math.inf)
        score = values[validation_tag(best.name)] * (1 if best.higher_is_better else -1)
        return Validation(values, validation_tag(best.name), score, loss, best.least, best.decimals)

    def _loss(self, model: TranslationModel) -> dict[str, float]:
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
            validation_tag("loss"): total["loss"] / total["tokens"],
            validation_tag("nll"): nll,
            validation_tag("ppl"): math.exp(min(nll, 100.0)),
        }

    def _translations(self, model: TranslationModel) -> list[str]:
        """Translate the validation set on all ranks, and return all translations on each."""
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
        return [text for _, text in sorted(gather_lists(pairs, self._world))]
