"""Detection of decoders that lose one of their two inputs: the source, or the target prefix.

A decoder that ignores its source is a language model. Its training loss looks normal, but its loss hardly rises if
each sentence gets the source of another one. On a fixed slice of the validation set, the monitor measures

    collapse/source_reliance = NLL per target token with shuffled sources - NLL with the true ones    (nats),

which is near 0 for an unconditional language model and well above 1 for a good translation model, and

    collapse/prefix_reliance = NLL per target token with shuffled prefixes - NLL with the true ones   (nats),

which is near 0 for a decoder that predicts each token from the source and the position alone. A shuffled prefix has
the words of another sentence, continued by those of further ones up to the length of its own. ``collapse/nll`` is
the NLL with the true inputs. If it exceeds ln V, the NLL of guessing, a model has collapsed in another way: it fits
its training set with dropout and predicts nothing without, as deep post-norm decoders do. For each decoder layer with
cross-attention, the monitor also measures

    collapse/cross_share/layer_NN = |c| / (|a| + |c| + |f|)

where |a|, |c| and |f| are the norms of the outputs of self-attention, cross-attention and feed-forward network,
averaged over target tokens. Further sub-layers, such as the attention of MSC to its context, are not counted.

Legend: B sentences, T target length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import MaskedModel, TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.data.loader import ValidationSet
from deepspeed_nmt.parallel.collectives import sum_over_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.randomness import Purpose, permutation
from deepspeed_nmt.train.configuration import CollapseConfig
from deepspeed_nmt.train.events import NO_EVENTS, Events
from deepspeed_nmt.train.validation import Replica

RELIANCE, PREFIX_RELIANCE, NLL = "collapse/source_reliance", "collapse/prefix_reliance", "collapse/nll"
DROP_RATIO = "collapse/drop_ratio"
_FALLING = 0.5
"""Share of the mean fall of the loss per update, from guessing on, above which it still falls as at the start."""


class CollapseMonitor:
    """Measurement of source and prefix reliance, and their check.

    Args:
        grace: updates before the first check, used if the configuration leaves them open. Then there is none either
            while the loss still falls as at the start: a decoder learns the language before it reads its source.
        validation: set that the slice is taken from.
        remedies: settings to try against a decoder that ignores its source, for the warning.
    """

    def __init__(
        self,
        config: CollapseConfig,
        grace: int,
        validation: ValidationSet,
        replica: Replica,
        objective: Objective,
        world: World,
        remedies: Sequence[str] = (),
        events: Events = NO_EVENTS,
    ) -> None:
        self._config, self._remedies, self._events, self._world = config, remedies, events, world
        self._validation, self._replica, self._objective = validation, replica, objective
        self._grace = config.grace or grace
        order = permutation(len(validation), Purpose.COLLAPSE_SLICE)[: config.sentences]
        self._sentences = np.sort(order)
        # Each sentence gets the source, or the prefix, of its neighbour on a random ring: never its own.
        self._other = dict(zip(order.tolist(), np.roll(order, 1).tolist(), strict=True))
        if config.every > 0 and len(order) < 2 and world.is_main:
            logger.warning(
                "the validation set has one sentence, with none to exchange its source with, so collapse is not "
                "measured; prepare more, or set collapse.every=0"
            )

    def due(self, update: int) -> bool:
        """Return True if a measurement follows ``update``."""
        return self._config.every > 0 and update % self._config.every == 0 and len(self._sentences) > 1

    def __call__(self, update: int) -> dict[str, float]:
        """Measure after ``update`` and return values by tag. All ranks call it together and get the same values."""
        started = time.monotonic()
        sums = {"true": 0.0, "sources": 0.0, "prefixes": 0.0, "tokens": 0.0}
        with self._replica.at(update) as model:
            norms = _SublayerNorms(model)
            has_prefixes = not isinstance(model, MaskedModel)  # which predicts no token from a prefix
            for batch in self._validation.batches(self._sentences):
                with norms.of(batch):
                    sums["true"] += self._nll(model, batch)
                sums["tokens"] += batch.target_tokens
                if has_prefixes:
                    sums["prefixes"] += self._nll(model, self._with_other_prefixes(batch))
            for batch in self._validation.batches(self._sentences, self._other):
                sums["sources"] += self._nll(model, batch)
        total = sum_over_ranks({**sums, **norms.sums}, self._world)
        nll, sources, prefixes = (total[kind] / total["tokens"] for kind in ("true", "sources", "prefixes"))
        values = {RELIANCE: sources - nll, NLL: nll}
        if has_prefixes:
            values[PREFIX_RELIANCE] = prefixes - nll
        for layer in norms.layers:
            attended, crossed, fed = (total[f"{part}/{layer}"] for part in _PARTS)
            values[f"collapse/cross_share/layer_{layer:02}"] = crossed / max(attended + crossed + fed, 1e-30)
        values["collapse/seconds"] = time.monotonic() - started
        return values

    @property
    def _guessing(self) -> float:
        return math.log(self._validation.vocabulary.size)

    def counts(self, update: int, values: dict[str, float], before: float | None) -> bool:
        """Return True if a measurement is one of a decoder that has had time to read its source.

        ``before`` is the NLL of the last measurement, None if this is the first.
        """
        fall, newest = self._guessing - values[NLL], (self._guessing if before is None else before) - values[NLL]
        fast = newest / self._config.every > _FALLING * fall / update
        is_falling = not self._config.grace and fall > 0.0 and fast
        return update > self._grace and not is_falling

    def check(self, update: int, values: dict[str, float], bad: int, before: float | None) -> tuple[int, str]:
        """Check a measurement.

        With ``action=warn``, warn after ``patience`` bad measurements in a row, and again after as many more. With
        ``action=stop``, ask for a stop after ``patience`` of them, and again after each further one: a run that is
        resumed without a remedy stops at its next measurement. The reason is that of the newest, since a decoder may
        alternate between losing its source and its prefix.

        ``before`` is that of :meth:`counts`.

        Returns:
            Bad measurements in a row including this one, of which ``bad`` came before, and the reason to stop or "".
        """
        config, lost = self._config, values[NLL] > self._guessing
        blind, adrift = (values.get(tag, math.inf) < config.threshold for tag in (RELIANCE, PREFIX_RELIANCE))
        if not (self.counts(update, values, before) and (blind or adrift or lost)):
            return 0, ""
        bad += 1
        if bad < config.patience or (config.action == "warn" and bad % config.patience):
            return bad, ""
        bound = f"(collapse.threshold is {config.threshold:g}):"
        if lost:
            what = (
                f"the decoder predicts worse than guessing. Its validation loss is {values[NLL]:.2f} nats a token "
                f"(guessing: {self._guessing:.2f}), and its training loss does not show it."
            )
            if adrift:
                what += " It does not read what it has written: exchanged prefixes change nothing."
            remedies = [*(_FOR_PREFIXES if adrift else ["model.norm=pre"]), *_FOR_ANY, "optimizer.clip_norm=1"]
        elif blind:
            what = (
                "the decoder ignores its source. With the sources shuffled among the sentences, its loss rises by "
                f"only {values[RELIANCE]:.3f} nats a token {bound} it is turning into a language model, and its BLEU "
                "will be near 0 even if its loss is low."
            )
            remedies = [*_FOR_SOURCES, *_FOR_ANY, *self._remedies]
        else:
            what = (
                "the decoder does not read what it has written. With the prefixes exchanged among the sentences, its "
                f"loss rises by only {values[PREFIX_RELIANCE]:.3f} nats a token {bound} it predicts each word from "
                "the source and its position alone, and its BLEU will be low."
            )
            remedies = [*_FOR_PREFIXES, *_FOR_ANY]
        what += f" Bad measurements in a row, in this or another way: {bad}. Remedies: {', '.join(remedies)}"
        message = f"update {update}: {what}, or fewer model.decoder_layers"
        tags = [tag for tag in (RELIANCE, PREFIX_RELIANCE, NLL) if tag in values]
        measured = {**{tag.partition("/")[2]: values[tag] for tag in tags}, "bad_measurements": bad}
        self._events.record("collapse", update, message, action=config.action, **measured)
        if config.action == "stop":
            return bad, message
        if self._world.is_main:
            logger.warning("%s", message)
        return bad, ""

    def _with_other_prefixes(self, batch: Batch) -> Batch:
        """Replace the words that the decoder reads by those of the next sentences on the ring."""
        input_BT = batch.target_input_BT.clone()
        lengths_B = batch.target_mask.sum(dim=1).tolist()
        for row, (sentence, length) in enumerate(zip(batch.sentence_ids_B.tolist(), lengths_B, strict=True)):
            words: list[int] = []
            while sentence >= 0 and len(words) < length - 1:
                sentence = self._other[sentence]
                words += self._validation.corpus.target(sentence).tolist()
            if words:
                input_BT[row, 1:length] = torch.tensor(words[: length - 1])
        return replace(batch, target_input_BT=input_BT)

    def _nll(self, model: TranslationModel, batch: Batch) -> float:
        with torch.no_grad():
            return float(self._objective(model, batch.to(self._world.device)).nll)


_FOR_SOURCES = ("model.init=depth_scaled with model.norm=pre or post",)
_FOR_PREFIXES = (*_FOR_SOURCES, "no cross-attention in most of the lower decoder layers (layer.drop_ratio=1)")
_FOR_ANY = ("a lower optimizer.lr", "a longer schedule.warmup_updates")
_PARTS = ("self_attention", "cross_attention", "feed_forward")


class _SublayerNorms:
    """Sums over target tokens of the norms of sub-layers' outputs, by "sub-layer/number of the layer" from 1."""

    def __init__(self, model: TranslationModel) -> None:
        self._watched = model.cross_attending()
        self.layers = list(self._watched)
        self.sums = {f"{part}/{layer}": 0.0 for layer in self.layers for part in _PARTS}

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        """Add the norms of one forward pass over ``batch``."""
        real_BT = batch.target_mask
        pending: dict[str, Tensor] = {}

        def watch(name: str) -> Callable[[Tensor], None]:
            def see(output: Tensor) -> None:
                # A decoder that reads begin and end of a sentence at once has one more position, in front.
                norms_BT = output.float().norm(dim=2)[:, -real_BT.shape[1] :]
                added = (norms_BT * real_BT.to(norms_BT.device)).sum()
                pending[name] = pending[name] + added if name in pending else added

            return see

        residuals = {
            f"{part}/{number}": residual
            for number, layer in self._watched.items()
            for part in _PARTS
            if (residual := getattr(layer, f"{part.removesuffix('_attention')}_residual")) is not None
        }
        for name, residual in residuals.items():
            residual.watch = watch(name)
        try:
            yield
        finally:
            for residual in residuals.values():
                residual.watch = None
        for name, value in pending.items():
            self.sums[name] += float(value)
