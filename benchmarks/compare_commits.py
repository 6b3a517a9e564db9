"""Compare the training of two commits, layouts, engines, settings or versions of torch, and show where they part.

    python benchmarks/compare_commits.py main .       # a commit and this checkout, bit for bit
    ... .:plain .:zero2 --no-dropout --tolerance 1e-5
    ... .:ranks=4 .:ranks=4,optimizer.clip_norm=0 --layout zero3 --family vanilla
    ... . . --new-python ENV/bin/python --picture parts.html

A side is a commit or the directory of a checkout, and after a colon a layout, ``ranks=N`` and settings. Both run
through their command lines, each on data directories of its own; OLD makes the text. Each family of methods trains a
tiny model with dropout for 30 updates, by default on two ranks under ZeRO-2 and in one process of plain torch. The
rows of the report compare

    files         of data directories that both sides prepare from the same text: those that OLD writes, and all
                  values in its meta.json but the version
    weights       of the last checkpoint, by name and SHA-256; likewise Adam's moments (not with a tolerance)
    log           metrics.jsonl without timings: losses, gradient norms, validation, collapse monitor
    translations  of fifty lines by the run's own search: four hypotheses of each line, with their scores
    resumed       weights, moments and log of NEW's run, and of a copy that it resumes after update 15
    gradients     with the setting engine.hash_gradients=true on both sides: hashes by update, micro-batch, rank and
                  parameter, before and after the reduction

If logs differ, a table has the first update at which each metric parts, by how much, and its largest difference, all
relative to the larger value. With a tolerance, which is absolute below 1 and relative above, speed, padding and the
scores of hypotheses do not count. If OLD and NEW are runs with hashes of gradients, only these are compared. The exit
status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from records import ROOT, Table
from safetensors.numpy import load_file
from tqdm import tqdm

DATA = {"data": ["--vocab-size=400"], "bert-data": ["--tokenizer=hf:./berts/en,./berts/de", "--max-length=126"]}
LAYOUTS = {f"zero{stage}": ["engine.name=deepspeed", f"engine.ds_config=zero{stage}"] for stage in (2, 0, 1, 3)}
LAYOUTS["plain"] = ["engine.name=plain"]
NO_DROPOUT = ["model.dropout=0", "model.attention_dropout=0", "model.activation_dropout=0"]
COMMON = [
    *("batch.update_tokens=300", "batch.micro_tokens=200", "schedule.warmup_updates=10", "optimizer.lr=3e-3"),
    # Explicit, because recipes have changed.
    *("optimizer.clip_norm=1.0", "optimizer.beta2=0.98", "schedule.initial_lr=1e-7"),
    *("training.max_updates=30", "training.validate_every=15", "training.log_every=1", "training.keep_last=9"),
    *("validation.max_sentences=7", "collapse.every=10", "collapse.sentences=16", "engine.device=cpu"),
]
BEAM = ["search.beam=4", "search.max_length_ratio=1.2", "search.max_length_extra=2"]
TINY = [
    *("model.dim=16", "model.ffn_dim=32", "model.heads=2", "model.encoder_layers=3", "model.decoder_layers=3"),
    *("model.attention_dropout=0.1", "model.activation_dropout=0.1", "model.init=xavier", *BEAM),
]
TOP = [*TINY, "model.top_encoder_layers=1", "model.top_decoder_layers=1", "search.name=beam"]
BOTH_NETS: tuple[list[str], ...] = ([], ["--rerank", "deep-shallow"])
BERTS = ["model.source_encoder=./berts/en", "model.target_encoder=./berts/de"]
ADAPTERS = ["model.adapter_dim=24", "search.iterations=3", "search.length_beam=4"]
TIMINGS = {
    *("perf/target_tokens_per_s", "perf/data_wait", "perf/memory", "perf/mfu", "perf/hours", "perf/goodput"),
    "collapse/seconds",
}
Curves = dict[str, dict[int, float]]
"""Values of the log by tag and update."""
Parting = dict[str, Any]
"""First and largest difference of a metric, in these columns."""
COLUMNS = {
    "metric": "{}",
    "parts at": "update {}",
    "old": "{:.8g}",
    "new": "{:.8g}",
    "by": "{:.1e}",
    "at most": "{:.1e}",
    "at": "update {}",
}
PROCESSES = multiprocessing.get_context("forkserver")  # importing torch for each command would dominate
LOCK = threading.Lock()  # multiprocessing is not thread-safe


class Stage(NamedTuple):
    """One run of a family: a recipe, settings on top of it, a key of ``DATA``, and options of its translations."""

    recipe: str
    settings: list[str]
    data: str = "data"
    searches: tuple[list[str], ...] = ([],)


FAMILIES = {  # longest first; a second stage grows on the first stage
    "depth_growing": [Stage("depth_growing_base_6", TINY), Stage("depth_growing_base_8", TOP, searches=BOTH_NETS)],
    "deep_decoder": [Stage("deep_decoder_base_30", [*TINY, "layer.drop_depth=1"])],
    "abnet": [Stage("abnet_parallel", [*BERTS, *ADAPTERS], "bert-data")],
    "bert_parallel": [Stage("bert_parallel", [*BERTS, *BEAM], "bert-data")],
    "multi_softmax_all": [Stage("multi_softmax_base", TINY)],
    "multi_softmax_2x2": [Stage("multi_softmax_base_2x2", TINY)],
    "closed_chain": [Stage("closed_chain_base_8_4", [*TINY, "model.encoder_loops=3", "objective.r_drop.weight=1"])],
    "recurrent": [Stage("recurrent_base_8_4", [*TINY, "model.encoder_loops=2", "engine.recompute_encoder=1"])],
    "vanilla": [Stage("transformer_base", TINY)],
}


def be_command(side: Side, work: Path, log: Path, launcher: dict[str, str], words: list[str]) -> None:
    """Run ``python -m deepspeed_nmt *words`` of a side in this process.

    Args:
        side: program and Python.
        work: working directory.
        log: file that receives stdout and stderr.
        launcher: variables that a launcher would set.
        words: command and its arguments.
    """
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(work)
    os.environ.update(launcher, TORCH_EXTENSIONS_DIR=f"{log}.extensions")
    if side.python != sys.executable:
        os.environ["PYTHONPATH"] = str(side.checkout)
        os.execv(side.python, [side.python, "-m", "deepspeed_nmt", *words])
    sys.path.insert(0, str(side.checkout))
    sys.argv[1:] = words
    runpy.run_path(str(side.checkout / "deepspeed_nmt" / "__main__.py"), run_name="__main__")


class Side(NamedTuple):
    """One side of the comparison.

    Attributes:
        name: "old" or "new".
        checkout: directory of its program.
        python: Python that runs it.
        layout: layout of its runs; None for those of ``--layout``.
        ranks: processes of its runs; None for the number of the layout.
        settings: of its runs, after all others.
    """

    name: str
    checkout: Path
    python: str
    layout: str | None
    ranks: int | None
    settings: list[str]

    @classmethod
    def parse(cls, name: str, text: str, python: str, work: Path) -> Side:
        """Return the side ``COMMIT[:word,word...]``; a commit's files are written into ``work``.

        Raises:
            ValueError: if it is neither a directory nor a commit, or a word is not known.
        """
        commit, _, words = text.partition(":")
        layout, ranks, settings = None, None, []
        for word in filter(None, re.split(r",(?=[\w.]+=|\w+(?:,|$))", words)):
            if word in LAYOUTS:
                layout = word
            elif word.startswith("ranks="):
                ranks = int(word.removeprefix("ranks="))
            elif "=" in word:
                settings.append(word)
            else:
                raise ValueError(f"{word} is no setting; layouts: {', '.join(LAYOUTS)}")
        checkout = Path(commit or ".").resolve()
        if not checkout.is_dir():
            find = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
            sha = subprocess.run(find, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
            if not sha:
                raise ValueError(f"{commit} is neither a directory nor a commit")
            checkout = work / "commits" / sha
            if not checkout.is_dir():
                checkout.mkdir(parents=True)
                tar = subprocess.run(["git", "archive", sha], cwd=ROOT, capture_output=True, check=True).stdout
                subprocess.run(["tar", "-x", "-C", str(checkout)], input=tar, check=True)
        return cls(name, checkout, python, layout, ranks, settings)


class Comparison(NamedTuple):
    """Both sides, run in a scratch directory with the results in its ``old`` and ``new``."""

    old: Side
    new: Side
    work: Path
    tolerance: float
    settings: list[str]
    advance: Callable[[], object]

    def make(self, side: Side, name: str, words: list[str], ranks: int = 1, resumes: Path | None = None) -> Path:
        """Make a file or directory by a command, with ``{out}`` for its path. Results of ``old`` are reused."""
        out = f"{side.name}/{name}"
        result, record = self.work / out, self.work / f"{out}.made-by"
        command = [word.format(out=out) for word in words]
        made_by = json.dumps([str(side.checkout), side.python, ranks, *command])
        if side.name == "new" or not record.is_file() or record.read_text() != made_by:
            record.unlink(missing_ok=True)
            shutil.rmtree(result, ignore_errors=True)
            if resumes is not None:  # a copy, as if that run had been killed before its last checkpoint
                shutil.copytree(resumes, result)
                shutil.rmtree(newest(result))
                (result / "checkpoints" / "latest").write_text(f"{newest(result).name}\n")
                (result / "checkpoints" / "best").write_text(f"{newest(result).name}\n")
            self._run(side, out.replace("/", "-"), command, ranks)
            record.write_text(made_by)
        self.advance()
        return result

    def _run(self, side: Side, label: str, words: list[str], ranks: int) -> None:
        ports = random.sample(range(20000, 30000), 9)  # below the ephemeral ports
        port = next(port for port in ports if socket.socket().connect_ex(("127.0.0.1", port)))
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        logs, processes = [self.work / "logs" / f"{label}-{rank}.log" for rank in range(ranks)], []
        for rank, log in enumerate(logs):
            launcher = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            processes.append(PROCESSES.Process(target=be_command, args=(side, self.work, log, launcher, words)))
            with LOCK:
                processes[-1].start()
        statuses: list[int | None] = [None]
        deadline = time.monotonic() + 900.0  # for a command that hangs
        while None in statuses and not any(statuses) and time.monotonic() < deadline:
            time.sleep(0.05)
            with LOCK:
                statuses = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        for log, status in sorted(zip(logs, statuses, strict=True), key=lambda rank: rank[1] is None):
            if status != 0:
                raise ChildProcessError(f"{log}: exit status {status}\n{log.read_text()[-1500:]}")


class Row(NamedTuple):
    """One row of the report.

    Attributes:
        name: of what is compared.
        checks: a description of the first difference by check; empty if there is none.
        partings: metrics that part.
        curves: logs of both sides.
    """

    name: str
    checks: dict[str, str]
    partings: Sequence[Parting] = ()
    curves: tuple[Curves, Curves] = ({}, {})


def compare_data(both: Comparison, names: set[str]) -> Iterator[Row]:
    """Compare the files that both sides prepare from the text of the old one."""
    text = both.make(both.old, "text", ["sample-data", "--out", "{out}", "--train=300", "--valid=40", "--test=50"])
    files = []
    for side, language in (("source", "en"), ("target", "de")):
        files += [f"--{split}-{side}=old/text/{split}.{language}" for split in ("train", "valid", "test")]
        if "bert-data" in names and not (folder := both.work / "berts" / language).is_dir():
            make_bert(folder, text / f"train.{language}")
    for name in sorted(names):
        words = ["prepare", "--out", "{out}", *files, *DATA[name]]
        old, new = (hash_files(both.make(side, name, words)) for side in (both.old, both.new))
        yield Row(name, {"files": first_difference(old, {key: new[key] for key in new if key in old})})


def compare_family(both: Comparison, family: str, layout: str) -> Iterator[Row]:
    """Compare the runs of a family: trained, resumed, translated."""
    origin: list[str] = []
    for number, stage in enumerate(FAMILIES[family], start=1):
        name = f"{family}-{number}-{layout.replace('/', '-')}"
        runs, results, translations = {}, {}, {}
        for side in (both.old, both.new):
            own = side.layout or layout
            ranks = side.ranks or (1 if own == "plain" else 2)
            words = ["train", "--recipe", stage.recipe, "--data", f"{side.name}/{stage.data}", "--run", "{out}"]
            words += [word.format(side.name) for word in origin]
            words += [*COMMON, *stage.settings, *LAYOUTS[own], *both.settings, *side.settings]
            runs[side.name] = both.make(side, name, words, ranks)
            results[side.name] = measure(runs[side.name])
            translations[side.name] = translate(both, side, f"{side.name}/{name}", stage.searches)
        old, new = results["old"], results["new"]
        resumed = measure(both.make(both.new, f"{name}-resumed", words, ranks, resumes=runs["new"]))
        compared = [
            "weights",
            "moments",
            "log",
            *(["gradients"] if "gradients" in old and "gradients" in new else []),
        ]
        checks = {check: first_difference(old[check], new[check]) for check in compared}
        curves = read_curves(runs["old"]), read_curves(runs["new"])
        partings = find_partings(*curves, both.tolerance)
        if both.tolerance:
            partings = [parting for parting in partings if not parting["metric"].startswith("perf/")]
            checks = {"log": f"{len(partings)} metrics part" if partings else ""}
            for lines in translations.values():  # without scores
                lines.update({line: hypothesis.split(" ||| ")[1] for line, hypothesis in lines.items()})
        checks["translations"] = first_difference(translations["old"], translations["new"])
        checks["resumed"] = next(filter(None, (first_difference(new[check], resumed[check]) for check in new)), "")
        yield Row(f"{stage.recipe}, {layout}", checks, partings, curves)
        origin = ["--grow-from", f"{{}}/{name}", "--from-checkpoint", "last"]


def read_curves(run: Path) -> Curves:
    """Return the log of a run without timings, by tag and update."""
    curves: Curves = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        for tag in entry.keys() - {"update", *TIMINGS}:
            if isinstance(entry[tag], (int, float)):
                curves.setdefault(tag, {})[entry["update"]] = entry[tag]
    return curves


def find_partings(old: Curves, new: Curves, tolerance: float) -> list[Parting]:
    """Return the metrics that differ by more than a tolerance, in the order in which they part."""
    found: list[Parting] = []
    for metric in old | new:
        pair = old.get(metric, {}), new.get(metric, {})
        rows = [(update, *(curve.get(update, math.nan) for curve in pair)) for update in sorted(pair[0] | pair[1])]
        sized = [(update, a, b, difference(a, b)) for update, a, b in rows]
        parted = [row for row in sized if row[3] > tolerance and not abs(row[1] - row[2]) <= tolerance]
        if parted:
            largest = max(parted, key=lambda row: row[3])
            found.append(dict(zip(COLUMNS, (metric, *parted[0], largest[3], largest[0]), strict=True)))
    return sorted(found, key=lambda row: (row["parts at"], -row["by"]))


def difference(a: float, b: float) -> float:
    """Return the difference of two values relative to the larger; infinity if one is missing or not finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    size = abs(a - b) / max(abs(a), abs(b))
    return size if math.isfinite(size) else math.inf


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Draw the losses of both sides, and the differences of the metrics that part most."""
    from plotly.subplots import make_subplots

    titles = [title for row in rows for title in (row.name, "relative difference")]
    figure = make_subplots(rows=len(rows), cols=2, subplot_titles=titles)
    for number, row in enumerate(rows, start=1):
        for name, curves in zip(("old loss", "new loss"), row.curves, strict=True):
            loss = curves.get("train/loss", {})
            figure.add_scatter(x=[*loss], y=[*loss.values()], name=name, row=number, col=1)
        for metric in [parting["metric"] for parting in sorted(row.partings, key=lambda each: -each["at most"])][:8]:
            old, new = (curves.get(metric, {}) for curves in row.curves)
            apart = {update: difference(old[update], new[update]) for update in sorted(old.keys() & new.keys())}
            figure.add_scatter(x=[*apart], y=[*apart.values()], name=metric, row=number, col=2)
        figure.update_yaxes(type="log", row=number, col=2)
    figure.update_layout(height=360 * len(rows)).write_html(picture)


def translate(both: Comparison, side: Side, run: str, searches: tuple[list[str], ...]) -> dict[str, str]:
    """Translate the test text with a run; returns hypotheses by search and line."""
    words = ["translate", "--run", run, "--checkpoint", "last", "--device", "cpu", "--nbest", "4"]
    words += ["--input", "old/text/test.en", "--output", "{out}"]
    hypotheses: dict[str, str] = {}
    for number, options in enumerate(searches):
        file = both.make(side, f"{run.replace('/', '-')}-{number}.txt", [*words, *options])
        lines = file.read_text(encoding="utf-8").splitlines()
        hypotheses |= {" ".join([*options, f"line {index}"]): line for index, line in enumerate(lines, start=1)}
    return hypotheses


def newest(run: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((run / "checkpoints").glob("update-*"))


def measure(run: Path) -> dict[str, dict[str, str]]:
    """Hash a run's last weights and moments, and read its log. Runs trained separately differ in ``start``."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    start = {"speed at update 1": str(entries[0].get("perf/target_tokens_per_s"))}
    found: dict[str, dict[str, str]] = {"weights": {}, "moments": {}, "log": {}, "start": start}
    for file in newest(run).glob("*-*.safetensors"):
        for name, array in load_file(file).items():
            kind = "weights" if file.name.startswith("weights") else "moments"
            found[kind][name] = hashlib.sha256(str(array.shape).encode() + array.tobytes()).hexdigest()
    if hashes := read_hashes(run):
        found["gradients"] = hashes
    for entry in entries:
        for tag in (tag for tag in entry if tag not in {"update", *TIMINGS}):
            key = f"{tag} at update {entry['update']}"
            found["log"][key] = f"{found['log'].get(key, '')} {entry[tag]!r}".lstrip()
    return found


def read_hashes(run: Path) -> dict[str, str]:
    """Return the hashes of a run's gradients in the order of training; of an update made twice, the last ones."""
    hashes: dict[tuple[int, float, int, str], str] = {}
    for file in (run / "gradients").glob("rank-*.jsonl"):
        rank = int(file.stem.removeprefix("rank-"))
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            micro_batch = math.inf if entry["micro_batch"] is None else entry["micro_batch"]
            for name, digest in entry["gradients"].items():
                hashes[entry["update"], micro_batch, rank, name] = digest
    return {
        f"update {update}, {'reduced' if part == math.inf else f'micro-batch {part}'}, rank {rank}, {name}": digest
        for (update, part, rank, name), digest in sorted(hashes.items())
    }


def hash_files(directory: Path) -> dict[str, str]:
    """Hash the files of a data directory; of meta.json, return all values but the version."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}
    meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
    for name in ("meta.json", "meta.json.sha256"):
        found.pop(name, None)
    del meta["version"]
    return found | {f"meta.json: {key}": json.dumps(value) for key, value in meta.items()}


def first_difference(old: dict[str, str], new: dict[str, str]) -> str:
    """Describe the first value that differs; return an empty string if all are equal."""
    names = [name for name in old | new if old.get(name) != new.get(name)]
    if not names:
        return "" if old else "there is nothing to compare"
    was, became = (values.get(names[0], "missing")[:40] for values in (old, new))
    return f"{names[0]} was {was}, is {became}; {len(names)} of {len(old | new)} differ"


def make_bert(folder: Path, text: Path) -> None:
    """Save a tiny random BERT with a WordPiece tokenizer of a text."""
    import tokenizers
    import transformers

    transformers.set_seed(1)
    tokenizer = tokenizers.BertWordPieceTokenizer()
    tokenizer.train(str(text), vocab_size=300, show_progress=False)
    folder.mkdir(parents=True)
    tokenizer.save_model(str(folder))
    shape = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 128}
    transformers.utils.logging.disable_progress_bar()
    transformers.BertForMaskedLM(transformers.BertConfig(**shape, initializer_range=0.2)).save_pretrained(folder)


def report(label: str, rows: Iterator[Row]) -> list[Row]:
    """Print rows as they come, with differences below them, and return them."""
    reported = []
    try:
        for row in rows:
            verdicts = (f"{check} {'DIFFERS' if found else 'equal'}" for check, found in row.checks.items())
            below = [f"    {check}: {found}" for check, found in row.checks.items() if found]
            if row.partings:
                below.append(Table.of(row.partings[:12], COLUMNS).markdown())
                below += [f"and {len(row.partings) - 12} more metrics"] if len(row.partings) > 12 else []
            tqdm.write("\n".join([f"{row.name:<29} {', '.join(verdicts)}", *below]))
            reported.append(row)
    except (OSError, ValueError, KeyError) as error:  # a command failed, or its output is not as expected
        tqdm.write(f"{label:<29} FAILED: {error}")
        reported.append(Row(label, {"failed": str(error)}))
    return reported


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="commit or checkout, and after a colon what its runs have")
    parser.add_argument("new", metavar="NEW", help="the same, to compare with it")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=["zero2", "plain"], help="default: both")
    parser.add_argument("--no-dropout", action="store_true", help="masks depend on the layout")
    parser.add_argument("--jobs", type=int, default=2, help="commands to run at the same time (%(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative difference of the log that is none")
    parser.add_argument("--picture", type=Path, metavar="FILE.html", help="draw what parts (needs plotly)")
    for name in ("old", "new"):
        parser.add_argument(f"--{name}-python", default=sys.executable, help="Python of another environment")
    parser.add_argument("--work", type=Path, help="scratch directory to keep; results of OLD in it are reused")
    arguments = parser.parse_args()
    hashes = [read_hashes(Path(side)) for side in (arguments.old, arguments.new)]
    if all(hashes):
        tqdm.write(first_difference(*hashes) or "equal to the bit")
        return int(hashes[0] != hashes[1])
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="compare-"))).resolve()
    for name in ("old", "new", "logs"):
        (work / name).mkdir(parents=True, exist_ok=True)
    try:
        old = Side.parse("old", arguments.old, arguments.old_python, work)
        new = Side.parse("new", arguments.new, arguments.new_python, work)
    except ValueError as error:
        parser.error(str(error))
    # Older commits timed two libraries for products; both commits take the one that this CPU is to take.
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    os.environ.setdefault("DEEPSPEED_NMT_CPU_PRODUCTS", "onednn" if amd else "blas")
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    PROCESSES.set_forkserver_preload(["__main__", "deepspeed.runtime.zero.muon.original_muon"])
    sys.path.append(sys.path.pop(0))  # no library takes a file of this directory for its own
    layouts = [f"{old.layout}/{new.layout}"] if old.layout and new.layout else arguments.layout
    cells = [(family, layout) for layout in layouts for family in arguments.family]
    data = {stage.data for family in arguments.family for stage in FAMILIES[family]}
    runs = sum(3 + 2 * len(stage.searches) for family, _ in cells for stage in FAMILIES[family])
    with ThreadPoolExecutor(arguments.jobs) as pool, tqdm(total=1 + 2 * len(data) + runs, unit="command") as bar:
        try:
            dropout = NO_DROPOUT if arguments.no_dropout else []
            both = Comparison(old, new, work, arguments.tolerance, dropout, bar.update)
            rows = report("data", compare_data(both, data))
            found = [*pool.map(lambda cell: report(cell[0], compare_family(both, *cell)), cells)]
        finally:
            pool.shutdown(cancel_futures=True)
    trained = [row for each in found for row in each]
    equal = not any(found for row in [*rows, *trained] for found in row.checks.values())
    same = f"equal to {arguments.tolerance:g}" if arguments.tolerance else "equal to the bit"
    tqdm.write(f"{same if equal else 'the sides differ'}; {bar.format_dict['elapsed']:.0f} s")
    if arguments.picture is not None:
        draw([row for row in trained if row.curves[0]], arguments.picture)
    if equal and arguments.work is None:
        shutil.rmtree(work, ignore_errors=True)
    else:
        tqdm.write(f"results and logs are in {work}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
