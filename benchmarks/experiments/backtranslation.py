"""Experiment: back-translation, sequence-level distillation and a model of two target languages on Multi30k.

    python benchmarks/run.py backtranslation --text TEXT --out OUT [--arms A ...] [--set K=V ...]

TEXT is a directory with train, val and test_2016_flickr in .en, .de and .fr (raw Multi30k). Every other pair of the
training text is parallel text, from which the vocabulary is learnt; of the remaining pairs each side is monolingual
text. All arms are trained from scratch for --updates updates, on one thread each, and the average of the last four
checkpoints translates the test set.

    base_en_de                 the parallel half
    backtranslated_en_de       mixture with back-translations of the other half's German side, sampled and tagged
    beam_en_de                 the same with beam search instead of sampling
    base_de_en, ...            the same from German to English
    student_en_de              a small model, the parallel half
    distilled_en_de            the same model, translations of the English side of both halves by base_en_de
    multilingual               one model of English to German and French, all pairs
    single_en_de, ..._en_fr    a model of each of them, with the same vocabulary, all pairs

Synthetic corpora are made by `backtranslate`. What an arm needs is made first, and what is finished or
stopped in OUT is used or resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from arms import PROGRAM, add_shared, sh
from records import Results, Table

LAUNCH = Path(__file__).parents[2] / "launch"
COMMON = [
    *("model.encoder_layers=3", "model.decoder_layers=3", "model.ffn_dim=256", "model.dropout=0.2"),
    *("engine.name=plain", "engine.device=cpu", "collapse.every=0", "training.log_every=50", "training.keep_last=4"),
    *("training.validate_every=250", "validation.max_sentences=100", "search.beam=5"),
]
"""Settings of all arms: 128 dimensions and updates of 2,048 tokens come from the recipe."""
RECIPE = "multi30k_cpu"
STUDENT = ["model.dim=64", "model.ffn_dim=128", "model.encoder_layers=2", "model.decoder_layers=1"]
WAYS = ("en_de", "de_en")
ARMS = [
    *(f"{kind}_{way}" for kind in ("base", "backtranslated") for way in WAYS),
    *("student_en_de", "distilled_en_de", "multilingual", "single_en_de", "single_en_fr", "beam_en_de", "beam_de_en"),
]


class Experiment:
    """The arms, each of which is made once, whichever arms depend on it.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.text: Path = arguments.text
        self.out: Path = arguments.out
        self._locks = {name: Lock() for name in [*ARMS, "multi"]}

    def prepare(self) -> None:
        """Divide the training text, and make the data directories of both directions."""
        halves = self.out / "text"
        halves.mkdir(parents=True, exist_ok=True)
        for language in ("en", "de"):
            lines = (self.text / f"train.{language}").read_bytes().splitlines(keepends=True)
            for name, half in (("parallel", lines[::2]), ("mono", lines[1::2])):
                if not (path := halves / f"{name}.{language}").exists():
                    path.write_bytes(b"".join(half))
        for way in WAYS:
            words = ["prepare", "--out", str(self.out / "data" / way)]
            for side, language in zip(("source", "target"), way.split("_"), strict=True):
                words += [f"--{side}-lang", language, f"--train-{side}", str(halves / f"parallel.{language}")]
                words += [f"--valid-{side}", str(self.text / f"val.{language}")]
                words += [f"--test-{side}", str(self.text / f"test_2016_flickr.{language}")]
            given = ["--vocab-from", str(self.out / "data/en_de")]
            sh(*words, *(["--vocab-size", "4000", "--symbols", "<bt>"] if way == "en_de" else given))

    def make(self, arm: str) -> dict[str, float]:
        """Make an arm, and return the BLEU of the test set by direction."""
        with self._locks[arm]:
            kind, _, way = arm.partition("_")
            data = self.out / "data" / way
            if kind in ("base", "student"):
                return self._trained(arm, [way], [data], STUDENT if kind == "student" else [])
            if kind == "distilled":
                self.make("base_en_de")
                texts = [self.out / f"text/{half}.en" for half in ("parallel", "mono")]
                corpus = self._synthetic(arm, "base_en_de", texts, data, "--distill", "--")
                return self._trained(arm, [way], [corpus], STUDENT)
            if kind in ("backtranslated", "beam"):
                source, target = way.split("_")
                self.make(f"base_{target}_{source}")
                search = ["--", *(["--search", "sampling"] if kind == "backtranslated" else [])]
                texts = [self.out / f"text/mono.{target}"]
                corpus = self._synthetic(arm, f"base_{target}_{source}", texts, data, *search)
                return self._trained(arm, [way], [data, f"{corpus}=1@<bt>"])
            return self._of_three_languages(arm)

    def _synthetic(self, arm: str, run: str, texts: list[Path], data: Path, *options: str) -> Path:
        """Make a corpus by `backtranslate`, and return its directory."""
        out = self.out / "synthetic" / arm
        words: list[object] = ["--run", self.out / "runs" / run, "--text", *texts, "--data", data, "--out", out]
        command = [*PROGRAM, "backtranslate", *words, "--workers", "1", *options, "--device", "cpu"]
        self._logged(arm, [str(word) for word in command])
        return out / "data"

    def _of_three_languages(self, arm: str) -> dict[str, float]:
        multi = self.out / "multi"
        with self._locks["multi"]:
            script = [str(LAUNCH / "data/multi30k_multilingual.sh"), "--from", str(self.text), "--out", str(multi)]
            self._logged("multi", [*script, "--vocab-size", "6000"])
        if arm != "multilingual":
            way = arm.removeprefix("single_")
            return self._trained(arm, [way], [multi / way])
        ways = ["en_de", "en_fr"]
        return self._trained(arm, ways, [multi / way for way in ways], valid=["--valid", f"fr={multi / 'en_fr'}"])

    def _trained(
        self,
        arm: str,
        ways: list[str],
        corpora: Sequence[Path | str],
        settings: Sequence[str] = (),
        valid: Sequence[str] = (),
    ) -> dict[str, float]:
        """Train, average, translate and score; return BLEU by direction."""
        run, arguments = self.out / "runs" / arm, self.arguments
        words = ["train", "--recipe", RECIPE, "--run", str(run), *valid]
        words += [word for corpus in corpora for word in ("--data", str(corpus))]
        settings = [*COMMON, *settings, f"training.max_updates={arguments.updates}", *arguments.settings]
        self._logged(arm, [*PROGRAM, *words, *settings])
        self._logged(arm, [*PROGRAM, "average", "--run", str(run), "--last", "4"])
        found = {}
        for way in ways:
            source, target = (self.text / f"test_2016_flickr.{language}" for language in way.split("_"))
            hypothesis = run.parent / f"{arm}.{way}.hyp"
            tag = ["--tag", f"<2{way[-2:]}>"] if len(ways) > 1 else []
            files = ["--input", str(source), "--output", str(hypothesis)]
            self._logged(arm, [*PROGRAM, "translate", "--run", str(run), "--checkpoint", "average", *files, *tag])
            scored = json.loads(sh("score", "--hypothesis", str(hypothesis), "--reference", str(target), "--json"))
            found[way] = scored["bleu"]["score"]
        return found

    def _logged(self, arm: str, command: list[str]) -> None:
        """Run a command on one thread; its output is appended to the log of the arm."""
        (self.out / "logs").mkdir(exist_ok=True)
        with (self.out / "logs" / arm).open("a") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(command, env=environment, check=True, stdout=log, stderr=log)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="directory of raw Multi30k")
    parser.add_argument("--out", type=Path, required=True, help="directory for data, runs and results")
    parser.add_argument(
        "--arms", nargs="+", default=ARMS, choices=ARMS, metavar="A", help="arms to make (default: all)"
    )
    add_shared(parser, updates=2000)


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Make the arms; each is a row more."""
    experiment = Experiment(arguments)
    experiment.prepare()
    rows: list[dict[str, object]] = []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for arm, found in zip(arguments.arms, pool.map(experiment.make, arguments.arms), strict=True):
            rows += [{"arm": arm, "direction": way, "BLEU": bleu} for way, bleu in found.items()]
            yield Results(tables={"arms": Table.of(rows, {"BLEU": "{:.2f}"})})
