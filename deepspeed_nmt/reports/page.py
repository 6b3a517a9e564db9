"""The page of a run: what its directory says of it, as one HTML file that needs nothing else.

A run may be trained right now, or may have lost files. What is missing is left out; only a directory without readable
settings is refused.

Everything that comes from a run is text, and is escaped as text: by the template, or as JSON that the page's script
reads with ``JSON.parse`` and plotly shows. A content security policy permits the script and the library that draws by
their hashes, and no request.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError
from sacrebleu.metrics.chrf import CHRF

from deepspeed_nmt import __version__
from deepspeed_nmt.config import load_config
from deepspeed_nmt.console import cell, setting
from deepspeed_nmt.data.data_directory import META_FILE, Meta
from deepspeed_nmt.errors import UserError, counted
from deepspeed_nmt.evaluate.metrics import METRICS, decimals_of, validation_tag
from deepspeed_nmt.files import resolved
from deepspeed_nmt.manifest import DamagedRecordError, read_record
from deepspeed_nmt.recipes import recipes
from deepspeed_nmt.reports import page_figures, run_log
from deepspeed_nmt.reports.outcome import Outcome, differing
from deepspeed_nmt.reports.page_figures import Best, Chart, histogram, words_of
from deepspeed_nmt.reports.run_log import PREFIX_RELIANCE, SOURCE_RELIANCE, STARTS, RunLog, read_object, shortened
from deepspeed_nmt.reports.text_scores import recorded_scores
from deepspeed_nmt.run.directory import ENVIRONMENT_FILE, LOGS, ORIGIN_FILE, VALIDATION
from deepspeed_nmt.run.plans import Plans
from deepspeed_nmt.run.resolve import RESOLVED_FILE
from deepspeed_nmt.train.events import EVENTS_FILE
from deepspeed_nmt.train.growth import SIDES
from deepspeed_nmt.train.log import METRICS_FILE

_SILENT_S = 1800.0
"""Seconds without a sign of life after which a run no longer counts as running: longer than a validation."""
_TRANSLATIONS = re.compile(r"update-(\d{1,15})\.txt")
_MAX_SENTENCES = 3000
"""Bound on the sentences that are scored, each one alone; of more, equally many between two are left out."""
_MAX_SHOWN, _MAX_SCORED, _MAX_WORDS = 600, 10_000, 2000
"""Bounds on the characters of a sentence on the page, of one that is scored, and of a value in a table."""
_SAMPLES, _MAX_UPDATES, _WORST, _MAX_EVENTS = 16, 16, 15, 400


class Status(NamedTuple):
    """State of a run, and a sentence on it.

    States are ``new``, ``running``, ``finished``, ``stopped``, ``failed``; ``collapsed`` if the decoder ignores its
    source or its prefix, whatever became of training; ``silent`` if nothing was written for a while and nothing says
    why.
    """

    state: str
    sentence: str


class Table(NamedTuple):
    """A table of text, whose rows begin with their names; a folded one is shown on request, ``note`` above it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    note: str = ""


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
        self.name = resolved(path).name or str(path)
        self.outcome = Outcome.read(path)
        self.config = self.outcome.config
        self.log: RunLog = self.outcome.log
        self.events = run_log.read_events(path)
        self.best = self._best()
        self.texts = read_texts(path, self.best.update if self.best else 0)
        self.environment = read_object(path, ENVIRONMENT_FILE)
        self.settings = self.config.flat()
        self.recipe = recipe or self._recorded_recipe()

    def render(self) -> bytes:
        """Return the page."""
        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        environment.filters |= {"thousands": "{:,}".format, "shortened": lambda text: shortened(text, _MAX_SHOWN)}
        environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
        source, drawer = _drawer()
        charts = {"curves": self.curves(), "layers": page_figures.heat_maps(self.log)}
        spreads = [_histograms(number, texts) for number, texts in enumerate(self.texts)]
        signs = page_figures.marks(self.events, self.best)
        data = {
            "figures": [chart.specification for part in [*charts.values(), *spreads] for chart in part],
            "marks": signs,
            "positions": self.log.positions(),
            "themes": {
                "light": page_figures.theme("#5c6675", "#8a94a3", "#dfe4ea", "#ffffff"),
                "dark": page_figures.theme("#a3adba", "#7c8795", "#2d3641", "#1a2027"),
            },
        }
        names = {trace["name"] for trace in signs}
        page = environment.get_template("page.html").render(
            page=self, version=__version__, status=self.status(), charts=charts, data=data, drawer=drawer,
            texts=list(zip(self.texts, spreads, strict=True)), events=self.events[-_MAX_EVENTS:],
            events_file=EVENTS_FILE, looks=[look for look in page_figures.MARKS.values() if look.words in names],
            policy=lambda script: _policy(str(script), source), marked=marked_words,
            starts=STARTS, words=_words,
        )  # fmt: skip
        return page.encode("utf-8", errors="replace")

    def curves(self) -> list[Chart]:
        """Return the charts of the log."""
        return page_figures.curves(self.log, self.config.collapse.threshold)

    def status(self, now: float | None = None) -> Status:
        """Return the state of training at a time in seconds since the epoch; None for the present."""
        turns = [event for event in self.events if event.kind in (*STARTS, *run_log.ENDINGS)]
        last = turns[-1].kind if turns else ""
        times = []
        for file in (self.path / METRICS_FILE, self.path / LOGS / "rank-0.log"):
            with suppress(OSError):
                times.append(file.stat().st_mtime)
        seen = max(times, default=None)
        update, most = self.outcome.updates, self.config.training.max_updates
        made = f"{update:,} of {most:,} updates"
        if self.outcome.is_finished or last == "end":
            early = self.outcome.progress is not None and self.config.training.stops_early(self.outcome.progress)
            state, words = "finished", f"{made}; stopped early, without a better validation" if early else made
        elif last == "failure":
            state, words = "failed", f"{made}. {turns[-1].text}"
        elif last == "stop":
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
    def share(self) -> float:
        """Share of the updates that are made, 0 to 1."""
        return 1.0 if self.outcome.is_finished else min(1.0, self.outcome.updates / self.config.training.max_updates)

    @cached_property
    def _metas(self) -> dict[str, Meta]:
        """Descriptions of the run's data directories that can be reached, by path; the main one first."""
        record = self.outcome.data_record
        metas = {}
        for path in [] if record is None else dict.fromkeys([record.path, *(part.path for part in record.corpora)]):
            with suppress(OSError, ValueError, ValidationError, UserError, DamagedRecordError):
                metas[path] = Meta.model_validate_json(read_record(Path(path) / META_FILE))
        return metas

    def _collapsed(self) -> str:
        """Return the reason why the decoder counts as collapsed, "" if it does not: the monitor has not warned."""
        collapse = self.config.collapse
        warned = max((event.update or 0 for event in self.events if event.kind == "collapse"), default=0)
        sources, prefixes = self.log.series(SOURCE_RELIANCE), self.log.series(PREFIX_RELIANCE)
        last = [(update, x, prefixes.get(update, x)) for update, x in sources.items()][-collapse.patience :]
        is_low = all(min(both) < collapse.threshold for _, *both in last)
        if len(last) < collapse.patience or last[0][0] > warned or not is_low:
            return ""
        _, source, prefix = last[-1]
        is_blind = source < collapse.threshold
        lacks = "its source: source" if is_blind else "what it has written: prefix"
        return (
            f"the decoder ignores {lacks} reliance is {source if is_blind else prefix:.3f} nats a token; source or "
            f"prefix reliance was below {collapse.threshold:g} in the last {counted(len(last), 'measurements')}"
        )

    def _best(self) -> Best | None:
        """Return the best validation: as `choose-best` or the checkpoint records it, or else by the log."""
        progress, chosen, measure = self.outcome.progress, self.outcome.chosen, self.config.validation.best_by
        if measure == "auto":
            measure = next((name for name in METRICS if validation_tag(name) in self.log.tags), "loss")
        by: str | None
        score: float | None
        if chosen is not None:
            update, by, score = chosen.update, chosen.by, chosen.score
        elif progress is not None and progress.best_update:
            update, by, score = progress.best_update, progress.best_by, progress.best_score
        else:
            best = self.outcome.best(measure)
            return None if best is None else Best(best[0], validation_tag(measure), best[1])
        tag = (by or validation_tag(measure)).partition(" ")[0]  # without the digest of its set
        value = self.log.series(tag).get(update)
        if value is None and score is not None:
            value = self.config.validation.value_of(by, score)
        return Best(update, tag, value)

    def _recorded_recipe(self) -> str | None:
        """Return the recipe that the command of the last start names."""
        command = self.environment.get("command")
        words = [word for text in (command if isinstance(command, list) else []) for word in str(text).split("=", 1)]
        return next((name for word, name in pairwise(words) if word == "--recipe" and name in recipes()), None)

    @property
    def subtitle(self) -> str:
        """A line on the model and its data."""
        parts = ["no recipe" if self.recipe is None else f"recipe {self.recipe}"]
        model = self.config.for_update(self.outcome.updates).model
        layers = [getattr(model, name, None) for name in SIDES]
        if all(isinstance(count, int) for count in layers):
            parts.append(f"{layers[0]} + {layers[1]} layers")
        if (parameters := self.outcome.parameters(Plans())) is not None:
            parts.append(f"{parameters:,} parameters")
        if pairs := sum(meta.splits["train"].pairs for meta in self._metas.values() if "train" in meta.splits):
            parts.append(f"{pairs:,} sentence pairs")
        text = self.outcome.data_record.text if self.outcome.data_record is not None else None
        if text is not None and text.source_lang and text.target_lang:
            parts.append(f"{text.source_lang} to {text.target_lang}")
        return " · ".join(parts)

    @property
    def tiles(self) -> Iterator[tuple[str, str, str]]:
        """Figures at the head: label, value, and a few words below it."""
        last = {tag: value for tag in self.log.tags for value in self.log.series(tag).finite.values()}
        yield "updates", f"{self.outcome.updates:,}", f"of {self.config.training.max_updates:,}"
        if self.best is not None:
            at = f"at update {self.best.update:,}"
            yield f"best {words_of(self.best.tag)}", cell(self.best.value, decimals_of(self.best.tag)), at
        for tag, label, form, note in (
            ("valid/loss", "validation loss", "{:.3f}", "last"),
            ("train/ppl", "training perplexity", "{:,.2f}", "last"),
            (SOURCE_RELIANCE, "source reliance", "{:.3f}", f"threshold {self.config.collapse.threshold:g}"),
            (run_log.TOKENS, "target tokens", "{:,.0f}", ""),
            (run_log.HOURS, "time in updates", "{:,.2f} h", ""),
            ("perf/target_tokens_per_s", "speed", "{:,.0f}", "target tokens a second"),
            (run_log.GOODPUT, "goodput", "{:.1%}", ""),
        ):
            if tag in last:
                yield label, form.format(last[tag]), note
        kinds = Counter("start" if event.kind in STARTS else event.kind for event in self.events)
        for kind, label, tag in (
            ("skip", "skipped updates", "train/skipped"),
            ("spike", "spikes", "train/spikes"),
            ("rollback", "rollbacks", "train/rollbacks"),
            ("start", "starts", ""),
        ):
            # The log has the updates of the run; events are also of those that a killed process lost.
            if count := int(last[tag]) if tag in last else kinds[kind]:
                yield label, f"{count:,}", ""

    @cached_property
    def tables(self) -> dict[str, list[Table]]:
        """Tables of each section; empty ones are left out."""
        sections = {
            "validation": self._validation(),
            "settings": self._compared_settings(),
            "data": self._data(),
            "environment": self._environment(),
        }
        return {name: [table for table in tables if table.rows] for name, tables in sections.items()}

    def _validation(self) -> list[Table]:
        rows, signatures = [], dict[str, dict[str, Any]]()
        for tag in self.log.tags:
            of, _, metric = (name := tag.removeprefix("valid/")).rpartition("/")
            if name != tag and metric not in ("nll", "ppl"):
                if of not in signatures:
                    signatures[of] = read_object(self.path, f"{VALIDATION}/{of or 'main'}/signatures.json")
                update, best = self.outcome.best(name) or (None, None)
                signature = _words(signatures[of].get(metric, ""))
                rows.append([name, cell(self.log.last(tag)), cell(best), cell(update), signature])
        scores = [
            [score.text, score.metric, f"{score.value:.2f}", f"{score.lines:,}", score.checkpoint, score.signature]
            for score in recorded_scores(self.path)
        ]
        return [
            Table("Measures", ["measure", "last", "best", "at update", "signature"], rows),
            Table("Test scores", ["test set", "metric", "score", "lines", "checkpoint", "signature"], scores),
        ]

    def _compared_settings(self) -> list[Table]:
        own, other = self.settings, load_config(self.recipe).flat()
        changed = differing([own, other])
        rows = [[key, *(setting(side[key]) if key in side else "-" for side in (own, other))] for key in changed]
        same = [[key, setting(own[key])] for key in own if key not in changed]
        what = "the defaults" if self.recipe is None else f"the recipe {self.recipe}"
        return [
            Table(f"Differences from {what}", ["setting", "this run", "there"], rows),
            Table(f"Settings as in {what}", ["setting", "value"], same, folded=True),
        ]

    def _data(self) -> list[Table]:
        """Return the tables of the data that the run was last trained on."""
        if (record := self.outcome.data_record) is None:
            return []
        rows, removed, inputs = [], [], []
        for path, meta in self._metas.items():
            removed += [[reason, f"{count:,}", path] for reason, count in meta.removed.items() if count]
            inputs += [
                [name, f"{file.lines:,}", file.sha256[:12], file.path]
                for name, files in meta.inputs.items()
                for file in files
            ]
        for path, weights, tag, fingerprint in [
            (corpus.path, ", ".join(map(str, corpus.weights)), corpus.tag, corpus.fingerprint)
            for corpus in record.corpora
        ] or [(record.path, "-", None, record.fingerprint)]:
            sizes = ["-"] * 5
            if (described := self._metas.get(path)) is not None:
                train, valid = described.splits.get("train"), described.splits.get("valid")
                tokens = (train.pairs, train.source.tokens, train.target.tokens) if train else (None, None, None)
                sizes = [cell(size) for size in (*tokens, valid and valid.pairs, described.vocabulary_size)]
            rows.append([path, *sizes, weights, tag or "-", fingerprint[:12]])
        head = ["directory", "pairs", "source tokens", "target tokens", "validation pairs", "vocabulary"]
        head += ["weight", "tag"]
        note = "" if self._metas else "The data directory cannot be reached from here."
        return [
            Table("Corpora", [*head, "fingerprint"], rows, note=note),
            Table("Pairs removed by `prepare`", ["reason", "pairs", "from"], removed),
            Table("Input files", ["text", "lines", "sha256", "file"], inputs, folded=True),
        ]

    def _environment(self) -> list[Table]:
        """Return host, packages and command of the last start."""
        origin = {f"origin: {key}": value for key, value in read_object(self.path, ORIGIN_FILE).items()}
        values = {**self.environment, **read_object(self.path, RESOLVED_FILE), **origin}
        rows = [[key.replace("_", " "), _words(value)] for key, value in values.items() if value is not None]
        return [Table("The last start", ["what", "value"], rows)]


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(item)}" for key, item in value.items())
    return "-" if value is None else shortened(str(value), _MAX_WORDS)


@dataclass(frozen=True)
class Sentence:
    """A line of a set, from 1, with the translation of an update; ``source`` is "" if it is not kept."""

    number: int
    source: str
    reference: str
    translation: str
    update: int

    @cached_property
    def chrf(self) -> float:
        """Sentence chrF of the translation."""
        return float(CHRF().sentence_score(self.translation, [self.reference]).score)

    @property
    def length_ratio(self) -> float:
        """Characters of the translation for each character of the reference."""
        return len(self.translation) / max(1, len(self.reference))


class TextSet:
    """Translations of one validation set, whatever the model wrote: nothing of it is trusted.

    Its directory has ``source.txt``, ``reference.txt`` and ``update-0000400.txt`` for each validation, one sentence a
    line. Update ``best`` is among those sampled.
    """

    def __init__(self, run: Path, name: str, best: int = 0) -> None:
        self.name, self._run, self._best = name, run, best
        matches = (_TRANSLATIONS.fullmatch(file.name) for file in (run / VALIDATION / name).iterdir())
        self._files = {int(match[1]): match[0] for match in matches if match}
        self.updates = sorted(self._files)
        self._sources, self._references = self._lines("source.txt"), self._lines("reference.txt")

    @cached_property
    def newest(self) -> list[Sentence]:
        """Sentences with their newest translations, at most _MAX_SENTENCES; none without references."""
        sentences = self._translated(self.updates[-1]) if self.updates else []
        return sentences[:: max(1, -(-len(sentences) // _MAX_SENTENCES))]

    @cached_property
    def worst(self) -> list[Sentence]:
        """Sentences of the lowest chrF, the worst first."""
        return sorted(self.newest, key=lambda sentence: sentence.chrf)[:_WORST]

    @property
    def signs(self) -> dict[str, Any]:
        """Counts over the newest translations that reveal a broken model: different ones, empty ones, and copies."""
        translations = [sentence.translation for sentence in self.newest]
        return {
            "lines": len(translations),
            "distinct": len(set(translations)),
            "empty": sum(not text.strip() for text in translations),
            "copied": sum(bool(item.source.strip()) and item.source == item.translation for item in self.newest),
            "length_ratio": sum(map(len, translations)) / max(1, sum(len(item.reference) for item in self.newest)),
        }

    @property
    def sampled(self) -> list[int]:
        """Updates whose translations are samples: the first, the last, the best, and some between them."""
        chosen = {*_spread(self.updates, _MAX_UPDATES - 1), self._best}
        return sorted(chosen & self._files.keys())

    @cached_property
    def samples(self) -> list[list[Sentence]]:
        """Some sentences, spread over the set, with a translation of each sampled update."""
        numbers = _spread([sentence.number for sentence in self.newest], _SAMPLES)
        texts = [self._translated(update) for update in self.sampled]
        return [[text[number - 1] for text in texts if number <= len(text)] for number in numbers]

    def _translated(self, update: int) -> list[Sentence]:
        sources = chain(self._sources, repeat(""))
        texts = zip(sources, self._references, self._lines(self._files[update]), strict=False)
        return [Sentence(number, *sides, update) for number, sides in enumerate(texts, 1)]

    def _lines(self, file: str) -> list[str]:
        """Return the lines of a text; none if it cannot be read. Only a line feed ends one."""
        text = run_log.read_file(self._run, f"{VALIDATION}/{self.name}/{file}").decode("utf-8", errors="replace")
        lines = text.removesuffix("\n").split("\n") if text else []
        return [shortened(line.removesuffix("\r"), _MAX_SCORED) for line in lines]


def read_texts(run: Path, best: int = 0) -> list[TextSet]:
    """Open the validation sets whose translations a run keeps, the main one first; ``best`` is among the sampled."""
    sets: list[TextSet] = []
    with suppress(OSError):
        sets = [TextSet(run, path.name, best) for path in (run / VALIDATION).iterdir() if path.is_dir()]
    return sorted((texts for texts in sets if texts.updates), key=lambda texts: (texts.name != "main", texts.name))


def _spread(items: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` items at equal distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def marked_words(sentence: Sentence) -> list[tuple[str, bool]]:
    """Return the words of a translation as the page shows it; True for those that the reference does not have."""
    known = set(sentence.reference.split())
    words = re.split(r"(\s+)", shortened(sentence.translation, _MAX_SHOWN))
    return [(word, bool(word.strip()) and word not in known) for word in words]


def _histograms(number: int, texts: TextSet) -> list[Chart]:
    """Return histograms of lengths and scores of the newest translations of a set."""
    if not (newest := texts.newest):
        return []
    lengths = {
        f"{side}s": [float(len(getattr(sentence, side).split())) for sentence in newest]
        for side in ("translation", "reference")
    }
    most = sorted(lengths["references"])[int(0.99 * (len(newest) - 1))]
    caption = f"Update {texts.updates[-1]:,}, {len(newest):,} sentences of the set {texts.name}."
    chrf = {"chrF": [sentence.chrf for sentence in newest]}
    return [
        histogram(f"lengths-{number}", "Words of a sentence", caption, lengths, max(10.0, 1.4 * most)),
        histogram(f"scores-{number}", "chrF of a sentence", caption, chrf, 100.0),
    ]


def _policy(*scripts: str) -> str:
    """Return the content security policy: these scripts, styles and images of the page, and no request."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )


@cache
def _drawer() -> tuple[str, str]:
    """Return the source of plotly.js, as the package plotly brings it, and the same compressed, in base64."""
    from plotly.offline import get_plotlyjs

    source = str(get_plotlyjs())
    return source, base64.b64encode(gzip.compress(source.encode(), mtime=0)).decode()
