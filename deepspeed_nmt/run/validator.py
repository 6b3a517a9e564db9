"""Validation during training: loss with teacher forcing, and metrics of the translations."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.loader import ValidationSet
from deepspeed_nmt.errors import MetricError
from deepspeed_nmt.evaluate.command_metrics import CommandMetric, read_sentence_scores
from deepspeed_nmt.evaluate.metrics import Metric, Scorer, TextMetric, validation_tag, warn_of_spaces
from deepspeed_nmt.files import open_regular, text_lines
from deepspeed_nmt.parallel.collectives import from_main, gather_lists, sum_over_ranks
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.attention_images import AttentionImages, Images
from deepspeed_nmt.run.late_scores import LateScores
from deepspeed_nmt.run.validation_sets import SPLIT, ValidationTexts, digest, plain_kind, title
from deepspeed_nmt.search.decode_options import MAX_SOURCE_TOKENS, DecodeOptions
from deepspeed_nmt.search.lines import LineInputs, SourceCounts
from deepspeed_nmt.search.models import packed_weights
from deepspeed_nmt.search.streams import translate_lines
from deepspeed_nmt.text import TextForm, join_segments
from deepspeed_nmt.train.configuration import MAIN, MEAN
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.validation import Choice, Replica, Validation


class ModelValidator:
    """Validator of a model by loss and metrics of each validation set.

    The weights are gathered once. Then each rank scores and translates its sentences without waiting for other ranks.

    Args:
        update: number of updates made so far; what is there of later ones is removed.
        interrupted: function that returns True if the run is to stop, so that programs are not waited for.
    """

    def __init__(
        self,
        replica: Replica,
        objective: Objective,
        data: Mapping[str, DataDirectory],
        config: RunConfig,
        world: World,
        watchdog: Watchdog,
        run: Path,
        update: int,
        interrupted: Callable[[], bool],
    ) -> None:
        self._replica, self._world, self._watchdog = replica, world, watchdog
        self._config, self._interrupted = config.validation, interrupted
        self._sets = {name: _MeasuredSet(name, data[MAIN], of, objective, config, world) for name, of in data.items()}
        self.main = self._sets[MAIN].batched
        """Validation set of the training data, in batches."""
        # Attention to a source belongs to a token that is predicted next.
        count = config.validation.attention_images if config.search.left_to_right and world.is_main else 0
        self._attention = AttentionImages(self.main.corpus, data[MAIN].tokenizer(), count) if count else None
        chooses = config.validation.chooses
        first = MAIN if chooses == MEAN else chooses
        self._best = config.validation.chosen(data[first].text_form, first)[1]
        chosen_by = data if chooses == MEAN else {chooses: data[chooses]}
        # Scores of other text are not compared. The main set is always the same one.
        of = "" if chooses == MAIN else f" of {digest(chosen_by)}"
        self._choice = choice_by(
            self._best, chooses, data, of + by_settings(self._best, config, data[first].text_form)
        )
        self.measure = self._choice.by.partition(" ")[0]
        """Tag of the measure that chooses the best checkpoint."""
        self._late = LateScores(run, config.validation)
        if world.is_main:
            for measured in self._sets.values():
                measured.open_texts(run, update)

    def __call__(self, progress: Progress) -> Validation:
        """Validate the weights after the newest update. All ranks call it together."""
        update, values = progress.update, dict[str, float]()
        images: Images = {}
        samples: dict[str, str] = {}
        translated = [measured for measured in self._sets.values() if measured.metrics]
        with self._replica.at(update) as model:
            for measured in self._sets.values():
                self._begin(measured, update)
                values |= measured.losses(model)
            if self._attention is not None:
                images = self._attention(model, self._world.device)
            with packed_weights(model, self._world.device) if translated else nullcontext():
                for measured in translated:
                    self._begin(measured, update)
                    values |= measured.scores(model)
        for measured in translated:
            if self._world.is_main:
                kept = {progress.best_update, progress.patience_update, *self._late.awaiting()}
                samples[validation_tag("samples", measured.name)] = measured.write(update, kept)
            values |= self._command_scores(measured, update)
        validation = self._choice.validation(values)
        return replace(validation, awaits_score=self._start_late(progress, values), samples=samples, images=images)

    def _begin(self, measured: _MeasuredSet, update: int) -> None:
        """Record the set that is validated; each has the time limit of a validation."""
        self._watchdog.at(f"validating on {title(measured.name)} after update {update}", slow=True)

    def _start_late(self, progress: Progress, values: Mapping[str, float]) -> bool:
        """Start late programs on rank 0, and return True on all ranks if the score is to come."""
        if not any(metric.late for metric in self._config.commands.values()):
            return False
        awaits_score = False
        if self._world.is_main:
            try:
                awaits_score = self._late.start(progress.update, progress.target_tokens, values, self._choice)
            except OSError as error:
                logger.error("%s; late metrics of update %d are left out", error, progress.update)
        return bool(from_main(awaits_score, self._world))

    def _command_scores(self, measured: _MeasuredSet, update: int) -> dict[str, float]:
        """Return the numbers of programs by tag, which rank 0 calls."""
        values: dict[str, float] = {}
        for metric in measured.commands:
            self._watchdog.at(f"running {metric.path} after update {update}", slow=True)
            if self._world.is_main:
                tag = validation_tag(metric.name, measured.name)
                try:
                    files = measured.texts.scored(update, metric.name)
                    values[tag] = metric.score(files, self._config.command_s, self._interrupted)
                except MetricError as error:
                    logger.warning("%s; %s of update %d is not known, and training continues", error, tag, update)
            values = from_main(values, self._world)
        return values

    def is_significantly_better(self, update: int, than: int) -> bool:
        """Return True if translations are better than earlier ones by ``validation.significant``, if that is set."""
        level, chooses, best = self._config.significant, self._config.chooses, self._best
        if level == 0.0 or best is None:
            return True
        significant = True
        if self._world.is_main:
            sets = self._sets if chooses == MEAN else {chooses: self._sets[chooses]}
            # Sets of several languages have one metric with several tokenizers.
            chosen = [(one.best or best, one.texts) for one in sets.values()]
            significant = is_significant(chosen, update, than, level)
        return bool(from_main(significant, self._world))


def choice_by(metric: Metric | None, chooses: str, sets: Iterable[str], suffix: str) -> Choice:
    """Return the choice of the best checkpoint by a metric, or by the loss; ``suffix`` ends its description."""
    name = "loss" if metric is None else metric.name
    chosen = list(sets) if chooses == MEAN else [chooses]
    return Choice(
        by=validation_tag(name, chooses) + suffix,
        tags=tuple(validation_tag(name, of) for of in chosen),
        losses=tuple(validation_tag("loss", of) for of in chosen),
        mean=(validation_tag(name, MEAN), validation_tag("loss", MEAN)) if chooses == MEAN else ("", ""),
        sign=1 if metric is not None and metric.higher_is_better else -1,
        # Losses, which are not rounded, decide alone.
        least=math.inf if metric is None else metric.least,
        decimals=2 if metric is None else metric.decimals,
    )


def by_settings(metric: Metric | None, config: RunConfig, text: TextForm) -> str:
    """Return the end of the description of a metric, None for the loss.

    Scores of another search, of other sentences or another form of text, which chooses the tokenizer of BLEU, or by
    another program of the same name are not compared.
    """
    if metric is None:
        return ""
    search = config.search.name, config.search.model_dump_json(exclude_defaults=True)
    program = str(metric) if isinstance(metric, CommandMetric) else ""
    settings = (*search, config.validation.max_sentences, program, text)
    return f" by settings {hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}"


class _MeasuredSet:
    """A validation set, of ``data``, and its measures; all ranks measure it together. ``main`` is trained on."""

    def __init__(
        self,
        name: str,
        main: DataDirectory,
        data: DataDirectory,
        objective: Objective,
        config: RunConfig,
        world: World,
    ) -> None:
        self.name, self._form = name, data.text_form
        self._objective, self._world = objective, world
        self._config, self._search = config.validation, config.search
        self._tokenizer, self._tags = main.tokenizer(), data.tags
        vocabulary = self._tokenizer.vocabulary
        self.batched = ValidationSet(data.corpus(SPLIT), vocabulary, config.batch, world.rank, world.ranks)
        self._longest_line = max(MAX_SOURCE_TOKENS, main.longest_source)
        longest = data.meta.splits[SPLIT].source.longest
        self.metrics, self.best = self._config.chosen(data.text_form, name)
        self.commands = [metric for metric in self.metrics if isinstance(metric, CommandMetric) and not metric.late]
        if self.metrics and longest > self._longest_line and world.is_main:
            logger.warning(
                f"{title(name)} has a source line of {longest:,} tokens: of lines over {self._longest_line:,} only "
                "the beginning is translated; leave them out"
            )
        with open_regular(data.text(SPLIT, "source")) as stream:
            self._sources = list(text_lines(stream))
        self._count = min(len(self._sources), self._config.max_sentences or len(self._sources))
        with open_regular(data.text(SPLIT, "target")) as stream:
            self._references = [self._tokenizer.reference(line) for line in islice(text_lines(stream), self._count)]
        self._scorer = Scorer(self.metrics, data.text_form, self._references)
        self._translations: list[str] = []
        if world.is_main:
            warn_of_spaces(f"the references of {title(name)}", self._references, self.metrics)
            for metric in self.metrics:
                how = data.text_form.how(metric.kind)
                logger.info("%s: %s%s", validation_tag(metric.name, name), metric.signature(), how and f"; {how}")

    def open_texts(self, run: Path, update: int) -> None:
        """Write sources and references into the run; on rank 0, which keeps the translations."""
        self.texts = ValidationTexts(run, self.name, self._config.keep_translations, self._form)
        try:
            if not self.metrics:
                self.texts.forget(update)
                return
            sources = self._sources[: self._count]
            if self._tokenizer.segmented:
                sources = [join_segments(line) for line in sources]
            of_source = replace(self._form, target_lang=self._form.source_lang)
            sources = of_source.convert(plain_kind(of_source), sources)
            references = self._form.convert(plain_kind(self._form), self._references)
            self.texts.begin(sources, references, self.metrics, update)
        except OSError as error:
            logger.error("%s; translations of validation may not be kept, and training continues", error)

    def write(self, update: int, besides: Collection[int]) -> str:
        """Write the translations of :meth:`scores` into the run, on rank 0, and return a table of a few sentences.

        Translations of the updates ``besides`` are kept in any case.
        """
        translations = self._form.convert(plain_kind(self._form), self._translations)
        try:
            self.texts.write(update, translations, besides)
        except OSError as error:
            logger.error("%s; translations of update %d are not kept, and training continues", error, update)
        return self.texts.table(translations)

    def losses(self, model: TranslationModel) -> dict[str, float]:
        """Return loss, NLL and perplexity by tag."""
        sums = {"loss": 0.0, "nll": 0.0, "tokens": 0.0}
        for batch in self.batched.batches():
            with torch.no_grad():
                output = self._objective(model, batch.to(self._world.device))
            sums["loss"] += float(output.loss)
            sums["nll"] += float(output.nll)
            sums["tokens"] += batch.target_tokens
        total = sum_over_ranks(sums, self._world)
        nll = total["nll"] / total["tokens"]
        return {
            validation_tag("loss", self.name): total["loss"] / total["tokens"],
            validation_tag("nll", self.name): nll,
            validation_tag("ppl", self.name): math.exp(min(nll, 100.0)),
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
            DecodeOptions(max_tokens=self._config.max_tokens, max_source_tokens=self._longest_line),
            device=self._world.device,
            counts=SourceCounts(),  # warnings would be repeated at each validation
            inputs=LineInputs(first=self._world.rank, step=self._world.ranks, tags=self._tags),
        )
        pairs = [[index, best[0].text] for index, best in zip(mine, translations, strict=True)]
        self._translations = [text for _, text in sorted(gather_lists(pairs, self._world))]
        scores = self._scorer(self._translations)
        return {validation_tag(name, self.name): score for name, score in scores.items()}


def is_significant(sets: Sequence[tuple[Metric, ValidationTexts]], update: int, over: int, level: float) -> bool:
    """Return True if a gain, of the mean over some sets, is significant by paired bootstrap, or cannot be tested.

    Each set has the metric with the tokenizer of its language.
    """
    metric, p_value = sets[0][0], _p_value(sets, update, over)
    gain = f"the gain of update {update} over update {over}"
    if p_value is None:
        logger.warning("%s counts as significant, because %s cannot be tested", gain, metric.name)
        return True
    how = "a significant gain" if p_value < level else "no significant gain (validation.significant)"
    logger.info("%s in %s: p = %.4f, %s", gain, metric.name, p_value, how)
    return p_value < level


def _p_value(sets: Sequence[tuple[Metric, ValidationTexts]], update: int, over: int) -> float | None:
    """Return the p-value of a gain, 1 if it is none; None if translations or scores of sentences are missing.

    The sentences of all sets are resampled together.
    """
    from deepspeed_nmt.evaluate.scoring import bootstrap, score_of_statistics, sentence_statistics

    sides: list[list[Any]] = [[], []]
    score: Callable[[NDArray[Any]], float] = np.mean
    for metric, of in sets:
        references = [of.converted(of.references, metric.kind)]
        for rows, side in zip(sides, (over, update), strict=True):
            if isinstance(metric, CommandMetric):
                scores = read_sentence_scores(of.path(side, f"{metric.name}.sentences"), len(of.references))
                if scores is None:
                    return None
                rows += scores
            elif (lines := of.read(side)) is None:
                return None
            else:
                assert isinstance(metric, TextMetric)
                made = metric.make(False)
                score = partial(score_of_statistics, made)
                rows += [*sentence_statistics(made, of.converted(lines, metric.kind), references)]
    (compared,) = bootstrap(sides, score)
    # Where the mean over sets is better, all sentences together may be worse.
    is_gain = compared.difference > 0.0 if metric.higher_is_better else compared.difference < 0.0
    return compared.p_value if is_gain else 1.0
