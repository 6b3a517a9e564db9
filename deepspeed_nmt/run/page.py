"""The page of a run: what its directory says of it, as far as it can be read.

A run may be trained right now, may be of an older version, or may have lost files. What is missing is left out; only
a directory without readable settings is refused.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError

from deepspeed_nmt import __version__
from deepspeed_nmt.config import load_config
from deepspeed_nmt.data.directory import META_FILE, Meta
from deepspeed_nmt.errors import UserError, counted
from deepspeed_nmt.evaluate.curves import HOURS, METRICS_FILE, SOURCE_RELIANCE, TOKENS
from deepspeed_nmt.evaluate.metrics import METRICS, validation_tag
from deepspeed_nmt.evaluate.page.content import Best, Content, State, Status, Tile
from deepspeed_nmt.evaluate.page.events import ENDINGS, STARTS, Events, read_events
from deepspeed_nmt.evaluate.page.log import RunLog
from deepspeed_nmt.evaluate.page.texts import TextSet, read_texts
from deepspeed_nmt.evaluate.page.words import measure_words
from deepspeed_nmt.evaluate.table import cell
from deepspeed_nmt.files import resolved
from deepspeed_nmt.manifest import DamagedRecordError, read_record
from deepspeed_nmt.recipes import recipes
from deepspeed_nmt.run.directory import ENVIRONMENT_FILE, LOGS
from deepspeed_nmt.run.manifest import CHECKPOINTS, DATA_FILE, DataRecord
from deepspeed_nmt.run.outcome import Outcome
from deepspeed_nmt.run.page_tables import (
    RESOLVED_FILE,
    Compared,
    data_tables,
    differing,
    environment_tables,
    is_higher_better,
    json_object,
    plain_list,
    settings_tables,
    start_tables,
    validation_tables,
)
from deepspeed_nmt.run.plans import Plans
from deepspeed_nmt.train.collapse import NLL
from deepspeed_nmt.train.events import EVENTS_FILE

_SILENT_S = 1800.0
"""Seconds without a sign of life after which a run no longer counts as running: longer than a validation."""


class RunPage:
    """A run directory, read for its page.

    Args:
        path: run directory.
        recipe: name of the recipe that settings are compared with; None for that of the command that started the run,
            or else the one that differs least.

    Raises:
        ConfigError: if it is no run directory, its settings cannot be read, or there is no such recipe.
    """

    def __init__(self, path: Path, recipe: str | None = None) -> None:
        self.path = path
        self.outcome = Outcome.read(path)
        self.config = self.outcome.config
        self.log = RunLog.read(path)
        self.events: Events = read_events(path)
        self.best = self._best()
        self.texts: list[TextSet] = read_texts(path, self.best.update if self.best else 0)
        self._environment = json_object(path / ENVIRONMENT_FILE)
        self._recipe = self._compared(recipe)

    @cached_property
    def content(self) -> Content:
        """The run in words."""
        update, last = self._update, self.config.training.max_updates
        status = self.status()
        finished = self.outcome.is_finished
        return Content(
            name=resolved(self.path).name or str(self.path),
            subtitle=self._subtitle(),
            status=status,
            share=1.0 if finished else min(1.0, update / last),
            tiles=self._tiles(),
            settings=settings_tables(self.config.flat(), self._recipe),
            data=data_tables(self._data_record, self._metas),
            environment=environment_tables(self.path, self._environment),
            restarts=start_tables(self.events),
            validation=validation_tables(self.path, self.log),
            best=self.best,
            missing=self._missing,
            threshold=self.config.collapse.threshold,
            guessing=self._guessing,
            made_by=__version__,
        )

    def status(self, now: float | None = None) -> Status:
        """Return the state of training.

        Args:
            now: time in seconds since the epoch; None for the present.
        """
        turns = self.events.of(*STARTS, *ENDINGS)
        last = turns[-1] if turns else None
        seen = self._last_seen
        update, most = self._update, self.config.training.max_updates
        made = f"{update:,} of {most:,} updates"
        state: State
        if self.outcome.is_finished or (last is not None and last.kind == "end"):
            early = update < most and self.config.training.patience
            state, words = "finished", f"{made}; stopped early, without a better validation" if early else made
        elif last is not None and last.kind == "failure":
            state, words = "failed", f"{made}. {last.text}"
        elif last is not None and last.kind == "stop":
            state, words = "stopped", f"{made}; the same command resumes it"
        elif seen is not None and (now or time.time()) - seen < _SILENT_S:
            state, words = "running", f"{made} when this page was made"
        elif update == 0:
            state, words = "new", "nothing is logged yet"
        else:
            since = "" if seen is None else f" since {datetime.fromtimestamp(seen):%Y-%m-%d %H:%M}"
            state, words = "silent", f"{made}; nothing was written{since}: it was killed, or waits in a queue"
        if trouble := self._collapsed():
            after = "" if state == "failed" and "the decoder" in words else f" ({state}: {words})"
            return Status("collapsed", f"{trouble}{after}")
        return Status(state, words)

    @property
    def _update(self) -> int:
        return max(self.log.update, self.outcome.updates)

    @property
    def _last_seen(self) -> float | None:
        """Time of the last sign of life, in seconds since the epoch."""
        found = []
        for file in (self.path / METRICS_FILE, self.path / LOGS / "rank-0.log"):
            with suppress(OSError):
                found.append(file.stat().st_mtime)
        return max(found, default=None)

    @cached_property
    def _data_record(self) -> DataRecord | None:
        with suppress(UserError):
            return DataRecord.read(self.path)
        return None

    @cached_property
    def _metas(self) -> dict[str, Meta]:
        """Descriptions of the run's data directories that can be reached, by path; the main one first."""
        record = self._data_record
        if record is None:
            return {}
        found = {}
        for path in dict.fromkeys([record.path, *(each.path for each in record.corpora)]):
            with suppress(OSError, ValueError, ValidationError, UserError, DamagedRecordError):
                found[path] = Meta.model_validate_json(read_record(Path(path) / META_FILE)[0])
        return found

    @property
    def _missing(self) -> list[str]:
        """Names of files that every run has, which are missing or cannot be read."""
        found = {
            METRICS_FILE: self.log.tags,
            EVENTS_FILE: self.events.source == EVENTS_FILE,
            ENVIRONMENT_FILE: self._environment,
            RESOLVED_FILE: json_object(self.path / RESOLVED_FILE),
            DATA_FILE: self._data_record,
            CHECKPOINTS: self.outcome.progress,
        }
        return [name for name, content in found.items() if not content]

    @property
    def _guessing(self) -> float | None:
        """Loss of guessing, in nats a token."""
        sizes = [meta.vocabulary_size for meta in self._metas.values()]
        return math.log(sizes[0]) if sizes and sizes[0] > 0 else None

    def _collapsed(self) -> str:
        """Return the reason why the decoder counts as collapsed, as the monitor judges; "" if it does not."""
        collapse = self.config.collapse
        grace = collapse.grace or 2 * self.config.schedule.warmup_updates
        reliance, loss = self.log.series(SOURCE_RELIANCE), self.log.series(NLL)
        last = list(zip(reliance.updates, reliance.values, strict=True))[-collapse.patience :]
        if len(last) < collapse.patience or last[0][0] <= grace:
            return ""
        low = all(value < collapse.threshold for _, value in last)
        if low:
            return (
                f"the decoder ignores its source: source reliance is {last[-1][1]:.3f} nats a token, below "
                f"{collapse.threshold:g} in the last {counted(len(last), 'measurements')}"
            )
        guessing = self._guessing
        if guessing is not None and all(value > guessing for value in loss.values[-collapse.patience :]):
            return (
                f"the decoder predicts worse than guessing: its loss is {loss.values[-1]:.2f} nats a token without "
                f"dropout, and that of guessing {guessing:.2f}"
            )
        return ""

    def _best(self) -> Best | None:
        progress = self.outcome.progress
        if progress is not None and progress.best_update:
            tag = (progress.best_by or self._measure()).partition(" ")[0]  # without the digest of its set
            series = self.log.series(tag)
            values = dict(zip(series.updates, series.values, strict=True))
            value = values.get(progress.best_update)
            if value is None and progress.best_score is not None:
                value = self.config.validation.value_of(progress.best_by, progress.best_score)
            return Best(progress.best_update, tag, value)
        tag = self._measure()
        found = self.log.series(tag).best(higher_is_better=is_higher_better(self.path, tag.removeprefix("valid/")))
        return None if found is None else Best(found[0], tag, found[1])

    def _measure(self) -> str:
        """Return the tag of the value that chooses the best checkpoint, as far as the settings tell."""
        by = self.config.validation.best_by
        if by != "auto":
            return validation_tag(by)
        found = [validation_tag(name) for name in METRICS if self.log.series(validation_tag(name))]
        return found[0] if found else validation_tag("loss")

    def _compared(self, recipe: str | None) -> Compared:
        """Return the recipe to compare with, and its settings."""
        own = self.config.flat()
        if recipe is None:
            words = [str(word) for word in plain_list(self._environment.get("command"))]
            given = [after for word, after in pairwise(words) if word == "--recipe"]
            given += [word.removeprefix("--recipe=") for word in words if word.startswith("--recipe=")]
            recipe = next((name for name in given if name in recipes()), None)
        if recipe is not None:
            return Compared(recipe, load_config(recipe).flat(), is_guessed=False)
        flat = {name: load_config(name).flat() for name in recipes()}
        nearest = min(flat, key=lambda name: (len(differing(own, flat[name])), name))
        return Compared(nearest, flat[nearest], is_guessed=True)

    def _subtitle(self) -> str:
        parts = [f"{'near the recipe' if self._recipe.is_guessed else 'recipe'} {self._recipe.recipe}"]
        model = self.config.flat()
        layers = [model.get(f"model.{side}_layers") for side in ("encoder", "decoder")]
        if all(isinstance(each, int) for each in layers):
            parts.append(f"{layers[0]} + {layers[1]} layers")
        if (count := self.outcome.parameters(Plans())) is not None:
            parts.append(f"{count:,} parameters")
        pairs = [meta.splits["train"].pairs for meta in self._metas.values() if "train" in meta.splits]
        if pairs:
            parts.append(f"{sum(pairs):,} sentence pairs")
        text = self._data_record.text if self._data_record is not None else None
        if text is not None and text.source_lang and text.target_lang:
            parts.append(f"{text.source_lang} to {text.target_lang}")
        return " · ".join(parts)

    def _tiles(self) -> list[Tile]:
        update, log = self._update, self.log
        tiles = [Tile("updates", f"{update:,}", f"of {self.config.training.max_updates:,}")]
        if self.best is not None:
            words = measure_words(self.best.tag.removeprefix("valid/"))
            tiles.append(Tile(f"best {words}", cell(self.best.value, 2), f"at update {self.best.update:,}"))
        for tag, label, digits in (("valid/loss", "validation loss", 3), ("train/ppl", "training perplexity", 2)):
            if (value := log.last(tag)) is not None:
                tiles.append(Tile(label, cell(value, digits), "last"))
        if (value := log.last(SOURCE_RELIANCE)) is not None:
            tiles.append(Tile("source reliance", cell(value), f"threshold {self.config.collapse.threshold:g}"))
        if (tokens := log.last(TOKENS)) is not None:
            tiles.append(Tile("target tokens", _short(tokens)))
        if (hours := log.last(HOURS)) is not None:
            tiles.append(Tile("time in updates", f"{hours:.1f} h" if hours >= 1.0 else f"{60 * hours:.0f} min"))
        if speeds := sorted(log.series("perf/target_tokens_per_s").finite):
            tiles.append(Tile("speed", _short(speeds[len(speeds) // 2]), "target tokens a second"))
        for kind, label in (("skip", "skipped updates"), ("spike", "spikes"), ("rollback", "rollbacks")):
            count = len(self.events.of(kind)) or int(log.last(f"train/{_PLURAL[kind]}") or 0)
            if count:
                tiles.append(Tile(label, f"{count:,}"))
        if starts := len(self.events.of(*STARTS)):
            tiles.append(Tile("starts", f"{starts:,}"))
        return tiles


_PLURAL = {"skip": "skipped", "spike": "spikes", "rollback": "rollbacks"}
"""Tags of counts by kind of event."""


def _short(number: float) -> str:
    """Return a number of at most four digits with its unit: 12.3 k, 4.56 M."""
    for factor, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if number >= factor:
            scaled = number / min(factor, 1e3) if unit == " k" else number / factor
            return f"{scaled:.3g}{unit}" if scaled < 1000 else f"{scaled:,.0f}{unit}"
    return f"{number:,.0f}"
