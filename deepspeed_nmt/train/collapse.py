"""Notices a decoder that turns into a language model and ignores its source.

Such a model looks fine on the training loss. What gives it away: with the sources shuffled among the sentences its
loss hardly rises. On a fixed slice of the validation set,

    collapse/source_reliance = NLL per target token with shuffled sources - NLL with the true ones    (nats)

is near 0 for an unconditional language model, and well above 1 for a good translation model. ``collapse/nll`` is the
NLL with the true sources; above ln V, what guessing costs, a model has collapsed in another way: it fits its training
set with dropout on and predicts nothing with dropout off (deep post-norm decoders do that). Besides, for each decoder
layer that has cross-attention, with a, c, f the outputs of its self-attention, cross-attention and
feed-forward networks, averaged over target tokens,

    collapse/cross_share/layer_NN = |c| / (|a| + |c| + |f|).

Legend: B sentences, T target length.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig, cut_update
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import collate
from deepspeed_nmt.parallel.collectives import sum_over_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.randomness import Purpose, permutation
from deepspeed_nmt.registry import Config
from deepspeed_nmt.train.replica import Replica

RELIANCE, NLL = "collapse/source_reliance", "collapse/nll"


class CollapseConfig(Config):
    """How a decoder that ignores its source is noticed."""

    every: int = Field(default=500, ge=0, description="updates between measurements; 0: never")
    sentences: int = Field(default=128, ge=2, description="size of the slice of the validation set")
    threshold: float = Field(default=0.2, ge=0.0, description="source reliance, in nats per token, that is too low")
    grace: int = Field(default=0, ge=0, description="updates before the first judgement; 0: twice the warm-up")
    patience: int = Field(default=2, ge=1, description="measurements in a row that must be bad")
    action: Literal["warn", "stop"] = Field(
        default="warn", description="what to do then: warn, or save and stop the run"
    )


class CollapseMonitor:
    """Measures and judges.

    Args:
        config: when, on how much, and what is too low.
        grace: updates before the first judgement, when the configuration leaves it open.
        corpus: the validation set.
        replica: the model.
        objective: of the run; its likelihood is what is measured.
        vocabulary: of the corpus.
        batch: bounds the size of a batch.
        world: the ranks, which share the slice.
        remedies: settings to try against a decoder that ignores its source, for the warning.
    """

    def __init__(
        self,
        config: CollapseConfig,
        grace: int,
        corpus: Corpus,
        replica: Replica,
        objective: Objective,
        vocabulary: Vocabulary,
        batch: BatchConfig,
        world: World,
        remedies: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._remedies = remedies
        self._grace = config.grace or grace
        self._corpus = corpus
        self._replica = replica
        self._objective = objective
        self._vocabulary = vocabulary
        self._world = world
        order = permutation(len(corpus), Purpose.COLLAPSE_SLICE)[: config.sentences]
        self._sentences = np.sort(order)
        # Each sentence gets the source of its neighbour on a random ring: never its own.
        self._other_source = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
        longest = int(max(corpus.source_lengths.max(), corpus.target_lengths.max()))
        self._limits = batch.model_copy(update={"micro_tokens": max(longest, batch.micro_tokens)})

    def due(self, update: int) -> bool:
        """Whether to measure after ``update``."""
        return self._config.every > 0 and update % self._config.every == 0 and len(self._sentences) > 1

    def __call__(self, update: int) -> dict[str, float]:
        """Measure after ``update``, by tag. All ranks call it together and get the same."""
        started = time.monotonic()
        with self._replica.at(update) as model:
            values = self._measure(model)
        values["collapse/seconds"] = time.monotonic() - started
        return values

    def _measure(self, model: TranslationModel) -> dict[str, float]:
        corpus, vocabulary, ranks = self._corpus, self._vocabulary, self._world.ranks
        groups = cut_update(self._sentences, corpus.source_lengths, corpus.target_lengths, ranks, self._limits)
        norms = _SublayerNorms(model)
        sums = {"true": 0.0, "shuffled": 0.0, "tokens": 0.0}
        for group in groups[self._world.rank]:
            true = collate(corpus, group, vocabulary)
            with norms.of(true):
                sums["true"] += self._nll(model, true)
            others = np.array([self._other_source[int(index)] for index in group], dtype=np.int64)
            sums["shuffled"] += self._nll(model, collate(corpus, group, vocabulary, source_indices=others))
            sums["tokens"] += true.target_tokens
        total = sum_over_ranks({**sums, **norms.sums}, self._world)
        nll, shuffled = (total[kind] / total["tokens"] for kind in ("true", "shuffled"))
        values = {RELIANCE: shuffled - nll, NLL: nll}
        for layer in norms.layers:
            attended, crossed, fed = (total[f"{part}/{layer}"] for part in _PARTS)
            values[f"collapse/cross_share/layer_{layer:02}"] = crossed / max(attended + crossed + fed, 1e-30)
        return values

    def judge(self, update: int, values: dict[str, float], bad: int) -> tuple[int, str]:
        """Warn when the last measurements were all bad, and again after as many more; or stop, and again at once if
        the run is started as it was.

        Args:
            values: what was measured after ``update``.
            bad: bad measurements in a row before this one.

        Returns:
            Bad measurements in a row now, and why the run should stop, if that is the action asked for.
        """
        config = self._config
        guessing = math.log(self._vocabulary.size)
        low, lost = values[RELIANCE] < config.threshold, values[NLL] > guessing
        if update <= self._grace or not (low or lost):
            return 0, ""
        bad += 1
        if bad < config.patience or (config.action == "warn" and bad % config.patience):
            return bad, ""
        if lost:
            what = (
                f"the decoder predicts worse than guessing. Its validation loss is {values[NLL]:.2f} nats a token "
                f"(guessing costs {guessing:.2f}) after {bad} bad measurements in a row, whatever its "
                "training loss says. Remedies: model.norm=pre, a lower optimizer.lr, a longer "
                "schedule.warmup_updates, optimizer.clip_norm=1, or fewer model.decoder_layers"
            )
        else:
            what = (
                "the decoder ignores its source. With the sources shuffled among the sentences, its loss rises by "
                f"only {values[RELIANCE]:.3f} nats a token (collapse.threshold is {config.threshold:g}), in "
                f"{bad} measurements in a row: it is turning into a language model, and its BLEU will "
                f"be near 0 however low its loss. Remedies: {', '.join([*self._remedies, *_REMEDIES])}, or fewer "
                "model.decoder_layers"
            )
        message = f"update {update}: {what}"
        if config.action == "stop":
            return bad, message
        if self._world.is_main:
            logger.warning("%s", message)
        return bad, ""

    def _nll(self, model: TranslationModel, batch: Batch) -> float:
        with torch.no_grad():
            return float(self._objective(model, batch.to(self._world.device)).nll)


_REMEDIES = ("a lower optimizer.lr", "a longer schedule.warmup_updates")
_PARTS = ("self_attention", "cross_attention", "feed_forward")


class _SublayerNorms:
    """Sums the norms of the outputs of the decoder layers' parts, by "part/number of the layer".

    Attributes:
        layers: numbers, from 1, of the decoder layers that have cross-attention.
        sums: over all target tokens seen.
    """

    def __init__(self, model: TranslationModel) -> None:
        self._watched = model.cross_attending()
        self.layers = list(self._watched)
        self.sums = {f"{part}/{layer}": 0.0 for layer in self.layers for part in _PARTS}

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Watch a run of the model on a batch."""
        real_BT = batch.target_output_BT.ne(batch.pad)
        pending: dict[str, Tensor] = {}

        def watch(name: str) -> Callable[[Tensor], None]:
            def see(output: Tensor) -> None:
                # A decoder that is shown a sentence's begin and end at once has one more position, in front.
                norms_BT = output.float().norm(dim=2)[:, -real_BT.shape[1] :]
                added = (norms_BT * real_BT.to(norms_BT.device)).sum()
                pending[name] = pending[name] + added if name in pending else added

            return see

        for number, residuals in self._watched.items():
            for part, residual in zip(_PARTS, residuals, strict=True):
                if residual is not None:
                    residual.watch = watch(f"{part}/{number}")
        try:
            yield
        finally:
            for residual in itertools.chain.from_iterable(self._watched.values()):
                if residual is not None:
                    residual.watch = None
        for name, value in pending.items():
            self.sums[name] += float(value)
