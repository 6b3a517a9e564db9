"""Compare the results of two commits bit for bit, for instance before and after a refactoring.

    git worktree add ../old COMMIT
    python benchmarks/compare_commits.py ../old . [--family NAME ...] [--layout plain|zero2 ...] [--work DIR]

Both checkouts are run through their command lines, each on data directories of its own; the old commit makes the
text. Each family of methods trains a tiny model with dropout for 30 updates, on two ranks under ZeRO-2 and in one
process of plain torch. The rows of the report compare

    files         of data directories that both commits prepare from the same text: those that the old commit writes,
                  and all values in its meta.json but the version
    weights       of the last checkpoint, by name and SHA-256; likewise Adam's moments
    log           metrics.jsonl without timings: losses, gradient norms, validation, collapse monitor
    translations  of fifty lines by the run's own search: four hypotheses of each line, with their scores
    resumed       weights, moments and log of the new commit's run, and of a copy that it resumes after update 15

The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import runpy
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from safetensors.numpy import load_file
from tqdm import tqdm

DATA = {"data": ["--vocab-size=400"], "bert-data": ["--tokenizer=hf:./berts/en,./berts/de", "--max-length=126"]}
LAYOUTS = {"zero2": ["engine.name=deepspeed", "engine.ds_config=zero2"], "plain": ["engine.name=plain"]}
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


def be_command(checkout: Path, work: Path, log: Path, launcher: dict[str, str], words: list[str]) -> None:
    """Run ``python -m deepspeed_nmt *words`` of a checkout in this process.

    Args:
        checkout: checkout to run.
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
    sys.path.insert(0, str(checkout))
    sys.argv[1:] = words
    runpy.run_path(str(checkout / "deepspeed_nmt" / "__main__.py"), run_name="__main__")


class Commits(NamedTuple):
    """Commands of two checkouts, run in a scratch directory with the results in its ``old`` and ``new``."""

    old: Path
    new: Path
    work: Path
    ranks: int
    advance: Callable[[], object]
    settings: list[str]

    def make(self, commit: str, name: str, words: list[str], ranks: int = 1, resumes: Path | None = None) -> Path:
        """Make a file or directory by a command, with ``{out}`` for its path. Results of ``old`` are reused."""
        out, checkout = f"{commit}/{name}", self.old if commit == "old" else self.new
        result, record = self.work / out, self.work / f"{out}.made-by"
        command = [word.format(out=out) for word in words]
        made_by = json.dumps([str(checkout), ranks, *command])
        if commit == "new" or not record.is_file() or record.read_text() != made_by:
            record.unlink(missing_ok=True)
            shutil.rmtree(result, ignore_errors=True)
            if resumes is not None:  # a copy, as if that run had been killed before its last checkpoint
                shutil.copytree(resumes, result)
                shutil.rmtree(newest(result))
                (result / "checkpoints" / "latest").write_text(f"{newest(result).name}\n")
                (result / "checkpoints" / "best").write_text(f"{newest(result).name}\n")
            self._run(checkout, out.replace("/", "-"), command, ranks)
            record.write_text(made_by)
        self.advance()
        return result

    def _run(self, checkout: Path, label: str, words: list[str], ranks: int) -> None:
        ports = random.sample(range(20000, 30000), 9)  # below the ephemeral ports
        port = next(port for port in ports if socket.socket().connect_ex(("127.0.0.1", port)))
        world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        logs, processes = [self.work / "logs" / f"{label}-{rank}.log" for rank in range(ranks)], []
        for rank, log in enumerate(logs):
            launcher = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            processes.append(PROCESSES.Process(target=be_command, args=(checkout, self.work, log, launcher, words)))
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


def compare_data(commits: Commits, names: set[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Compare the files that both commits prepare from the old commit's text."""
    text = commits.make("old", "text", ["sample-data", "--out", "{out}", "--train=300", "--valid=40", "--test=50"])
    files = []
    for side, language in (("source", "en"), ("target", "de")):
        files += [f"--{split}-{side}=old/text/{split}.{language}" for split in ("train", "valid", "test")]
        if "bert-data" in names and not (folder := commits.work / "berts" / language).is_dir():
            make_bert(folder, text / f"train.{language}")
    for name in sorted(names):
        words = ["prepare", "--out", "{out}", *files, *DATA[name]]
        old, new = (hash_files(commits.make(commit, name, words)) for commit in ("old", "new"))
        both = {key: value for key, value in new.items() if key in old}  # a newer commit may record more
        yield name, {"files": first_difference(old, both)}


def compare_family(commits: Commits, family: str, layout: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Compare the runs of a family: trained, resumed, translated."""
    origin: list[str] = []
    for number, stage in enumerate(FAMILIES[family], start=1):
        name, ranks = f"{family}-{number}-{layout}", commits.ranks if layout == "zero2" else 1
        runs, results, translations = {}, {}, {}
        for commit, settings in (("old", []), ("new", commits.settings)):
            words = ["train", "--recipe", stage.recipe, "--data", f"{commit}/{stage.data}", "--run", "{out}"]
            words += [word.format(commit) for word in origin] + [
                *COMMON,
                *stage.settings,
                *LAYOUTS[layout],
                *settings,
            ]
            runs[commit] = commits.make(commit, name, words, ranks)
            results[commit] = measure(runs[commit])
            translations[commit] = translate(commits, commit, f"{commit}/{name}", stage.searches)
        old, new = results["old"], results["new"]
        resumed = measure(commits.make("new", f"{name}-resumed", words, ranks, resumes=runs["new"]))
        checks = {check: first_difference(old[check], new[check]) for check in ("weights", "moments", "log")}
        checks["translations"] = first_difference(translations["old"], translations["new"])
        checks["resumed"] = next(filter(None, (first_difference(new[check], resumed[check]) for check in new)), "")
        yield f"{stage.recipe}, {layout}", checks
        origin = ["--grow-from", f"{{}}/{name}", "--from-checkpoint", "last"]


def translate(commits: Commits, commit: str, run: str, searches: tuple[list[str], ...]) -> dict[str, str]:
    """Translate the test text with a run; returns hypotheses by search and line."""
    words = ["translate", "--run", run, "--checkpoint", "last", "--device", "cpu", "--nbest", "4"]
    words += ["--input", "old/text/test.en", "--output", "{out}"]
    hypotheses: dict[str, str] = {}
    for number, options in enumerate(searches):
        file = commits.make(commit, f"{run.replace('/', '-')}-{number}.txt", [*words, *options])
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
    for entry in entries:
        for tag in (tag for tag in entry if tag not in {"update", *TIMINGS}):
            key = f"{tag} at update {entry['update']}"
            found["log"][key] = f"{found['log'].get(key, '')} {entry[tag]!r}".lstrip()
    return found


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


def report(label: str, rows: Iterator[tuple[str, dict[str, str]]]) -> bool:
    """Print rows as they come, with differences below them. Return True if there are none."""
    equal = True
    try:
        for name, checks in rows:
            verdicts = (f"{check} {'DIFFERS' if difference else 'equal'}" for check, difference in checks.items())
            below = [f"    {check}: {difference}" for check, difference in checks.items() if difference]
            tqdm.write("\n".join([f"{name:<29} {', '.join(verdicts)}", *below]))
            equal = equal and not below
    except (OSError, ValueError, KeyError) as error:  # a command failed, or its output is not as expected
        tqdm.write(f"{label:<29} FAILED: {error}")
        equal = False
    return equal


def main() -> int:
    """Compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="checkout of the reference commit")
    parser.add_argument("new", type=Path, help="checkout of the commit to compare with it")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="default: all")
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: both")
    parser.add_argument("--setting", action="append", default=[], metavar="key=value", help="of runs that NEW begins")
    parser.add_argument("--ranks", type=int, default=2, help="processes under ZeRO-2 (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="commands to run at the same time (%(default)s)")
    parser.add_argument("--work", type=Path, help="scratch directory to keep; results of OLD in it are reused")
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory")
    arguments = parser.parse_args()
    work = (arguments.work or Path(tempfile.mkdtemp(prefix="compare-"))).resolve()
    for name in ("old", "new", "logs"):
        (work / name).mkdir(parents=True, exist_ok=True)
    # Older commits timed two libraries for products; both commits take the one that this CPU is to take.
    amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    os.environ.setdefault("DEEPSPEED_NMT_CPU_PRODUCTS", "onednn" if amd else "blas")
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    PROCESSES.set_forkserver_preload(["__main__", "deepspeed.runtime.zero.muon.original_muon"])
    del sys.path[0]  # otherwise transformers would import kernels.py of this directory as the package `kernels`
    cells = [(family, layout) for layout in arguments.layout for family in arguments.family]
    data = {stage.data for family in arguments.family for stage in FAMILIES[family]}
    runs = sum(3 + 2 * len(stage.searches) for family, _ in cells for stage in FAMILIES[family])
    with ThreadPoolExecutor(arguments.jobs) as pool, tqdm(total=1 + 2 * len(data) + runs, unit="command") as bar:
        try:
            commits = Commits(
                arguments.old.resolve(), arguments.new.resolve(), work, arguments.ranks, bar.update, arguments.setting
            )
            equal = [report("data", compare_data(commits, data))]
            equal += pool.map(lambda cell: report(cell[0], compare_family(commits, *cell)), cells)
        finally:
            pool.shutdown(cancel_futures=True)
    tqdm.write(f"{'equal to the bit' if all(equal) else 'the commits differ'}; {bar.format_dict['elapsed']:.0f} s")
    if all(equal) and arguments.work is None and not arguments.keep:
        shutil.rmtree(work, ignore_errors=True)
    else:
        tqdm.write(f"results and logs are in {work}")
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
