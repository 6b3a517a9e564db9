"""Experiment: small runs of depth growing, recurrent stacks and N x M softmaxing, beside vanilla models.

    python benchmarks/run.py exits --data DATA --out OUT [--jobs J ...] [--at-once 2] [--set K=V ...]

DATA is a directory made by `deepspeed-nmt prepare`, with a test set; the figures in benchmarks/RESULTS.md are of raw
Multi30k, English to German, and a vocabulary of 2,000. Arms train in OUT/<arm>-seed<n>, on one thread each. A grown
model starts from `layers3` and trains as long again.

The N x M models have the settings of the vanilla ones. `multi4x4` draws 2x2 exits for each update and weights them by
the inverse of their probability, `multi4x4_equal` weights them equally. An update of theirs costs about two vanilla
ones. Finally `report depths` of each N x M model is drawn to OUT/depths-<arm>-seed<n>.png, and rules by which its
exits choose, fitted on the validation text, translate the test set beside its fixed decoder depths, all in turn;
seconds are medians of three, without loading. They are compared with the full depth by a paired bootstrap test.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

from arms import Arm, Experiment, add_options, compared, difference, sh
from records import Results, Table

from deepspeed_nmt.api import Translator
from deepspeed_nmt.reports.text_scores import ParallelText, common_scorer
from deepspeed_nmt.run.directory import Run


def layers(encoder: int, decoder: int) -> list[str]:
    """Return settings for these numbers of layers."""
    return [f"model.encoder_layers={encoder}", f"model.decoder_layers={decoder}"]


def depth(encoder: int, decoder: int) -> list[str]:
    """Return options to translate with the first layers only."""
    return ["--encoder-layers", str(encoder), "--decoder-layers", str(decoder)]


TOP = ["model.name=depth_growing", "model.top_encoder_layers=1", "model.top_decoder_layers=1"]
LOOPS = ["model.name=recurrent", "model.encoder_loops=2", "model.decoder_loops=2"]
EXITS = ["objective.label_smoothed=null", "objective.multi_softmax.exits=2x2"]
PAIRS = {f"{encoder}-{decoder}": depth(encoder, decoder) for encoder, decoder in ((4, 4), (4, 2), (2, 2))}

ARMS = {
    "layers4": Arm(layers(4, 4)),
    "layers4-2": Arm(layers(4, 2)),
    "layers2": Arm(layers(2, 2)),
    "layers8": Arm(layers(8, 8)),
    "recurrent4x2": Arm([*layers(4, 4), *LOOPS]),
    "layers3": Arm(layers(3, 3)),
    "grown3+1": Arm(
        [*layers(3, 3), *TOP],
        grow_from="layers3",
        translations={"": [], "shallow": ["--exit", "shallow"], "rerank": ["--rerank", "deep-shallow"]},
    ),
    "multi4x4": Arm([*layers(4, 4), *EXITS], translations=PAIRS),
    "multi4x4_equal": Arm(
        [*layers(4, 4), *EXITS, "objective.multi_softmax.inverse_probability=false"], translations=PAIRS
    ),
}
# Longest first; an arm that grows comes after the arm it grows from.
JOBS = [
    *("layers4:1", "multi4x4:1", "multi4x4_equal:1", "layers8:1", "recurrent4x2:1", "layers3:1", "grown3+1:1"),
    *("layers4-2:1", "layers2:1"),
]


def chosen(run: Path, data: Path) -> list[dict[str, object]]:
    """Translate the test set at each fixed decoder depth and by each rule; return rows with BLEU and seconds."""
    ways: dict[str, Translator] = {}
    whole = Translator.open(run, checkpoint="average")
    exits = [int(name.partition("-")[2]) for name in whole.exits if name.startswith(f"{whole.model.stages[0]}-")]
    exits.append(whole.model.stages[1])
    for number in exits:
        ways[f"{number} decoder layers"] = whole.at_exit(f"{whole.model.stages[0]}-{number}")
    for loss in (0.0, 0.5, 1.0):
        file = run.with_name(f"{run.name}.rule-{loss}.json")
        words = ["--input", str(data / "valid.source"), "--reference", str(data / "valid.target")]
        words += ["--max-loss", str(loss), "--fit", str(file), "--out", str(file.with_suffix(".png"))]
        sh("report", "depths", "--run", str(run), "--checkpoint", "average", *words)
        rule = {name: json.loads(file.read_text())[name] for name in ("rule", "exits", "threshold")}
        title = f"{rule['rule']} {rule['threshold']:.3f} of exits {', '.join(map(str, rule['exits']))} (loss {loss})"
        ways[title] = Translator.open(run, checkpoint="average", name="choosing_exits", **rule)
    for name in ("rerank", "consensus"):
        search = {"name": "choosing_exits", "exits": exits, "rule": name}
        ways[f"{name} of all exits"] = Translator.open(run, checkpoint="average", **search)
    text = ParallelText.read(data / "test.source", data / "test.target")
    scorer, seconds = common_scorer([Run.open(run)], text), {way: [] for way in ways}
    files, bleus = {way: run.with_name(f"{run.name}.way-{n}.hyp") for n, way in enumerate(ways)}, {}
    for _ in range(3):
        for way, translator in ways.items():
            started = time.monotonic()
            lines = [one.text for one in translator.translate(text.sources)]
            seconds[way].append(time.monotonic() - started)
            bleus[way] = scorer.first(lines)
            files[way].write_text("".join(f"{line}\n" for line in lines))
    whole = files[f"{exits[-1]} decoder layers"]
    return [
        {
            "run": run.name,
            "way": way,
            "BLEU": bleus[way],
            "against all layers": difference(compared(whole, files[way], data / "test.target")),
            "seconds": median(seconds[way]),
        }
        for way in ways
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, ARMS, JOBS)


def run(arguments: argparse.Namespace) -> Results:
    """Run the arms, then draw BLEU and time by depth."""
    experiment = Experiment(ARMS, arguments)
    results = experiment.run(arguments.jobs)
    rows: list[dict[str, object]] = []
    for job in arguments.jobs:
        if job.startswith("multi"):
            run = experiment.run_of(*job.split(":"))
            picture = arguments.out / f"depths-{run.name}.png"
            files = ["--input", str(arguments.data / "test.source"), "--out", str(picture)]
            files += ["--reference", str(arguments.data / "test.target")]
            sys.stdout.write(sh("report", "depths", "--run", str(run), "--checkpoint", "average", *files, "--oracle"))
            rows += chosen(run, arguments.data)
    if rows:
        results.tables["rules"] = Table.of(rows, {"BLEU": "{:.2f}", "seconds": "{:.2f}"})
    return results
