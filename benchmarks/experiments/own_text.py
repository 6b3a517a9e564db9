"""Experiment: the rules for own text against rivals, for the same processor time, on cuts of real corpora.

    python benchmarks/run.py own_text --text DATA --out OUT [--minutes 6] [--cuts NAME:PAIRS[:S-T] ...] [--arms A ...]

DATA has a directory for each corpus, with the files `train`, `val` or `dev`, and `test` or `test_2016_flickr`, in two
languages, .en and .de if the cut does not name them (S-T). A cut is a random sample of the training pairs, in their
order. The first arm of each cut is what `deepspeed_nmt/recipes/own_text.py` chooses for so many minutes, the others
change it. All are trained on one thread for the updates that fit into --minutes of processor time, without the
validations by BLEU of the quickstart, and the best checkpoint by validation loss translates the test set (at most
--lines of it). The time of an update is measured in a short run of the rules' arm, and in each other arm by its ratio
to one more such run just before: processor time grows with what else the machine does. BLEU is of characters if the
rules say so. The arm `NFKC` is for the record `normalization`.

An arm that has a row in OUT is not made again, and one that was stopped is resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from arms import PROGRAM, sh
from records import Results, Table

from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.recipes import own_text

RESUMES = True
_SPLITS = {"train": ("train",), "valid": ("val", "dev"), "test": ("test_2016_flickr", "test")}
_SPEED_UPDATES = (20, 60)
"""Updates between which the processor time is measured."""
_ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Rival:
    """A change of what the rules choose.

    Attributes:
        settings: settings of training.
        dropout: addend of the dropout.
        update_tokens: factor of the size of updates.
        prepare: options of `prepare`.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    dropout: float = 0.0
    update_tokens: float = 1.0
    prepare: Sequence[str] = ()


RIVALS = {
    "rule": Rival(),
    "updates of four times the size": Rival(update_tokens=4.0),
    "4+4 layers": Rival({"model.encoder_layers": 4, "model.decoder_layers": 4}),
    "2+2 layers": Rival({"model.encoder_layers": 2, "model.decoder_layers": 2}),
    "1+1 layers": Rival({"model.encoder_layers": 1, "model.decoder_layers": 1}),
    "dropout 0.1 lower": Rival(dropout=-0.1),
    "dropout 0.1 higher": Rival(dropout=0.1),
    "NFKC": Rival(prepare=("--normalization", "nfkc")),
}
ARMS = ["rule", "4+4 layers", "1+1 layers", "dropout 0.1 lower"]
CUTS = ["multi30k:3000", "multi30k:20000", "tatoeba_ende:100000"]


class Experiment:
    """Arms of the cuts, one after another."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments

    def folder(self, cut: str, arm: str = "") -> Path:
        """Return the directory of a cut, or of an arm in it."""
        return Path(self.arguments.out, cut.replace(":", "-"), arm.replace(" ", "-"))

    def text(self, cut: str) -> dict[str, Path]:
        """Write the files of a cut, and return them by `<split>-<side>`."""
        name, pairs, *languages = cut.split(":")
        folder = self.folder(cut, "text")
        folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for split, names in _SPLITS.items():
            for side, language in zip(("source", "target"), (languages or ["en-de"])[0].split("-"), strict=True):
                paths = [self.arguments.text / name / f"{stem}.{language}" for stem in names]
                lines = next(path for path in paths if path.exists()).read_bytes().splitlines(keepends=True)
                if split == "train":
                    chosen = random.Random(1).sample(range(len(lines)), min(int(pairs), len(lines)))
                    lines = [lines[number] for number in sorted(chosen)]
                file = files[f"{split}-{side}"] = folder / f"{split}.{side}"
                file.write_bytes(b"".join(lines[: self.arguments.lines] if split == "test" else lines))
        return files

    def data(self, cut: str, rival: Rival) -> DataDirectory:
        """Prepare a cut, with a vocabulary as the rules and the rival choose it."""
        files = self.text(cut)
        chosen = own_text.main("vocabulary", *(str(files[f"train-{side}"]) for side in ("source", "target")))
        size = int(chosen[1])
        data = self.folder(cut, "-".join(["data", f"{size}", *(word.strip("-") for word in rival.prepare)]))
        words = [
            "prepare",
            "--out",
            str(data),
            "--vocab-size",
            f"{size}",
            *chosen[2:],
            *rival.prepare,
            "--workers",
            "1",
        ]
        sh(*words, *(word for name, file in files.items() for word in (f"--{name}", str(file))))
        return DataDirectory.open(data)

    def row(self, cut: str, arm: str) -> dict[str, Any]:
        """Make an arm, or read its row."""
        folder, rival = self.folder(cut, arm), RIVALS[arm]
        if (file := folder / "row.json").exists():
            return dict(json.loads(file.read_text(encoding="utf-8")))
        folder.mkdir(parents=True, exist_ok=True)
        data = self.data(cut, rival)
        training = data.meta.splits["train"]
        seconds, tokens = 60.0 * self.arguments.minutes, training.target.tokens
        start = ["train", "--data", str(data.path)]
        end = ["engine.name=plain", "engine.device=cpu", "collapse.every=0"]
        recipe = own_text.sized_for(own_text.recipe_for(training.pairs, "cpu"), 0.0, 0.0)
        rules = ["train", "--data", str(self.data(cut, RIVALS["rule"]).path), *recipe.arguments(""), *end]
        speed = self._speed(self.folder(cut, "rule") / "speed", rules)
        recipe, _ = own_text.fitted(training.pairs, "cpu", tokens, seconds, speed)
        dropout = round(max(0.0, recipe.settings["model.dropout"] + rival.dropout), 2)
        settings = {**recipe.settings, "model.dropout": dropout, **rival.settings}
        update_tokens = int(rival.update_tokens * recipe.update_tokens)
        recipe = replace(recipe, settings=settings, update_tokens=update_tokens)
        words = [*start, *recipe.arguments(""), *end]
        if arm != "rule" or recipe.speed != 1.0:  # which is a guess
            before = self._speed(folder / "speed-of-rule", rules)
            speed *= self._speed(folder / "own-speed", words) / before
        lengths = own_text.length_arguments(recipe.update_tokens, seconds, speed)
        used = _used()
        with (folder / "log").open("a") as log:
            command = [*PROGRAM, *words, "--run", str(folder / "run"), *lengths]
            subprocess.run(command, env=_ONE_THREAD, check=True, stdout=log, stderr=log)
        minutes = (_used() - used) / 60.0
        files = ["--input", str(data.path / "test.source"), "--output", str(folder / "test.hyp")]
        sh("translate", "--run", str(folder / "run"), "--checkpoint", "best", *files)
        updates, trip = int(lengths[0].partition("=")[2]), data.meta.round_trips["train.target"]
        row = {
            "corpus": cut.split(":")[0],
            "pairs": training.pairs,
            "arm": arm,
            "vocabulary": data.meta.vocabulary_size,
            "target tokens": training.target.tokens,
            "targets changed": trip.changed / trip.lines,
            "dropout": dropout,
            "tokens an update": recipe.update_tokens,
            "updates": updates,
            "epochs": updates * recipe.update_tokens / training.target.tokens,
            "minutes": minutes,
            "BLEU": self._scored(cut, arm)["bleu"]["score"],
        }
        file.write_text(json.dumps(row), encoding="utf-8")
        return row

    def against_rule(self, cut: str, arm: str) -> list[float] | None:
        """Return the difference of BLEU from the rules' arm, and its 95% interval."""
        if arm == "rule" or not (self.folder(cut, "rule") / "row.json").exists():
            return None
        comparison = self._scored(cut, "rule", arm)["comparison"]
        return [comparison["difference"], *comparison["interval"]]

    def _scored(self, cut: str, *arms: str) -> dict[str, Any]:
        """Return the scores of the last of the arms, compared with the first."""
        reference = self.folder(cut, "text") / "test.target"
        with reference.open(encoding="utf-8") as lines:
            # `th` has the tokenizer char.
            language = [] if own_text.metric_for(lines) == "bleu" else ["--language", "th"]
        hypotheses = [str(self.folder(cut, arm) / "test.hyp") for arm in arms]
        words = ["score", "--hypothesis", *hypotheses, "--reference", str(reference), *language, "--json"]
        return dict(json.loads(sh(*words).splitlines()[-1]))

    def _speed(self, run: Path, words: list[str]) -> float:
        """Return target tokens a second of processor time."""
        log, first, last = run / "metrics.jsonl", *_SPEED_UPDATES
        cached = run / "speed.json"
        if cached.exists():
            return float(json.loads(cached.read_text()))
        command = [*PROGRAM, *words, "--restart", "--run", str(run), f"training.max_updates={last + 1}"]
        command += [f"training.log_every={first}", "training.validate_every=1000"]
        seen: dict[int, tuple[float, float]] = {}
        with subprocess.Popen(
            command, env=_ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while process.poll() is None and last not in seen:
                for line in log.read_text().splitlines() if log.exists() else ():
                    entry = json.loads(line)
                    if (update := entry["update"]) not in seen and "train/target_tokens" in entry:
                        used = psutil.Process(process.pid).cpu_times()
                        seen[update] = (used.user + used.system, entry["train/target_tokens"])
                try:
                    process.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
        speed = (seen[last][1] - seen[first][1]) / (seen[last][0] - seen[first][0])
        cached.write_text(json.dumps(speed))
        return speed


def _used() -> float:
    """Return the processor time of the programs that have ended, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="directory of the corpora")
    parser.add_argument("--out", type=Path, required=True, help="directory for text, data, runs and rows")
    parser.add_argument("--minutes", type=int, default=6, help="processor time of an arm (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1000, help="lines of the test set (default: %(default)s)")
    parser.add_argument("--cuts", nargs="+", default=CUTS, metavar="NAME:PAIRS[:S-T]", help="corpora and pairs")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=RIVALS, metavar="A", help=", ".join(RIVALS))


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Make the arms, those of all cuts in turn; each is a row more."""
    experiment, rows = Experiment(arguments), []
    for arm in arguments.arms:
        for cut in arguments.cuts:
            row = experiment.row(cut, arm)
            rows.append((arguments.cuts.index(cut), {**row, "against the rule": experiment.against_rule(cut, arm)}))
            formats = {"epochs": "{:.1f}", "minutes": "{:.1f}", "BLEU": "{:.2f}", "targets changed": "{:.2%}"}
            formats |= {"against the rule": "{:+.2f} [{:+.2f}, {:+.2f}]"}
            shown = [row for _, row in sorted(rows, key=lambda entry: entry[0])]
            yield Results(tables={"arms": Table.of(shown, formats)})
