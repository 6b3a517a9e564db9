"""Seconds from the start of a killed run to its first new update, taken apart, of two commits.

    python benchmarks/run.py restart [--before 1aa79e5] [--rounds 5]

Two CPU ranks of each commit train a small model for ten updates. Then they are started again from the checkpoint,
round after round, by turns. The times are those of rank 0, from the start of its process:

    imports      until the command begins to read its data, Python's own start included
    data         settings and data are read, before and after the ranks meet
    rendezvous   the ranks wait for one another
    checkpoint   the newest one is found and verified
    model        model and engine are built
    restore      the engine takes the optimizer's state
    first update

Modules that are imported late count where they are needed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from records import Results

ENGINES = {"plain": ["engine.name=plain"], "ZeRO-2": ["engine.name=deepspeed", "engine.ds_config=zero2"]}
SETTINGS = [
    *("model.dim=128", "model.ffn_dim=512", "model.heads=4", "model.encoder_layers=3", "model.decoder_layers=3"),
    *("batch.update_tokens=2048", "batch.micro_tokens=1024", "validation.metrics=[]", "collapse.every=0"),
    *("training.save_every=10", "training.validate_every=100000", "engine.device=cpu"),
]
RANKS = 2


def rank(words: list[str]) -> int:
    """Run the command, and write when its parts end until the first update."""
    sys.path.pop(0)  # no library takes a file of this directory for its own
    began, spent = [float(os.environ["BEGAN"])], dict.fromkeys(PARTS, 0.0)

    def ends(part: str) -> None:
        now = time.time()
        spent[part] += now - began[0]
        began[0] = now

    def wrap(owner: Any, name: str, before: str, within: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            ends(before)
            result = function(*arguments, **options)
            ends(within)
            return result

        setattr(owner, name, timed)

    import importlib

    from deepspeed_nmt import engine as engines
    from deepspeed_nmt.cli import main
    from deepspeed_nmt.parallel import launched, watchdog, world

    try:
        store = importlib.import_module("deepspeed_nmt.train.store")  # of older commits
    except ModuleNotFoundError:
        store = importlib.import_module("deepspeed_nmt.train.checkpoint")
    wrap(launched, "isolate_extension_builds", "imports", "imports")
    wrap(world, "join_world", "data", "rendezvous")
    wrap(watchdog.Watchdog, "__enter__", "data", "data")
    wrap(store.CheckpointStore, "newest", "checkpoint", "checkpoint")
    build: Callable[..., Any] = engines.build_engine

    def build_engine(*arguments: Any, **options: Any) -> Any:
        engine = build(*arguments, **options)
        update, restore = engine.update, engine.restore

        def first_update(*arguments: Any, **options: Any) -> Any:
            ends("model")
            update(*arguments, **options)
            ends("first update")
            if os.environ["RANK"] == "0":
                Path(os.environ["SPENT"]).write_text(json.dumps(spent))
            engine.update = update
            return update(*arguments, **options)

        def restored(*arguments: Any, **options: Any) -> None:
            ends("model")
            engine.update = update  # which the engine itself may call
            restore(*arguments, **options)
            engine.update = first_update
            ends("restore")

        engine.restore = restored
        return engine

    engines.build_engine = build_engine
    return main(words)


PARTS = ("imports", "data", "rendezvous", "checkpoint", "model", "restore", "first update")


def start(checkout: Path, words: list[str], scratch: Path) -> dict[str, float]:
    """Run a command of a checkout on the ranks, and return the seconds of the parts of its start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spent = scratch / "spent.json"
    spent.unlink(missing_ok=True)
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SPENT": str(spent)}
    shared |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "BEGAN": repr(time.time())}
    processes = []
    for number in range(RANKS):
        environment = {**os.environ, **shared, "RANK": str(number), "LOCAL_RANK": str(number)}
        with (scratch / f"rank{number}.log").open("wb") as log:
            command = [sys.executable, __file__, *words]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=checkout))
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError((scratch / "rank0.log").read_text(errors="replace")[-3000:])
    result: dict[str, float] = json.loads(spent.read_text()) if spent.exists() else {}
    return result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--before", default="1aa79e5", metavar="COMMIT", help="the older one (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Results:
    """Measure both commits by turns."""
    from records import ROOT, Results, Table, commit

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        old = scratch / "before"
        old.mkdir()
        tar = subprocess.run(["git", "archive", arguments.before], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(old)], input=tar, check=True)
        checkouts = {arguments.before: old, commit(): ROOT}
        words: dict[tuple[str, str], list[str]] = {}
        for version, checkout in checkouts.items():
            home = scratch / version
            sample = ["sample-data", "--out", str(home / "text"), "--train", "2000", "--valid", "50", "--test", "10"]
            files = [
                f"--{split}-{side}={home}/text/{split}.{language}"
                for split in ("train", "valid")
                for side, language in (("source", "en"), ("target", "de"))
            ]
            prepare = ["prepare", "--out", str(home / "data"), "--vocab-size", "1000", *files]
            for command in (sample, prepare):
                environment = {**os.environ, "PYTHONPATH": str(checkout)}
                program = [sys.executable, "-m", "deepspeed_nmt", *command]
                subprocess.run(program, env=environment, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
            for engine, settings in ENGINES.items():
                run = ["train", "--recipe", "transformer_base", "--data", str(home / "data")]
                words[engine, version] = [*run, "--run", str(home / engine), *SETTINGS, *settings]
                start(checkout, [*words[engine, version], "training.max_updates=10"], scratch)
        spent: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in words}
        for number in range(arguments.rounds):
            for (engine, version), command in words.items():
                end = [*command, f"training.max_updates={11 + number}"]
                spent[engine, version].append(start(checkouts[version], end, scratch))
    rows = []
    for (engine, version), starts in sorted(spent.items(), key=lambda item: list(ENGINES).index(item[0][0])):
        parts = {part: median(one[part] for one in starts) for part in PARTS}
        whole = [sum(one.values()) for one in starts]
        which = "before" if version == arguments.before else "after"
        spread = [min(whole), max(whole)]
        rows.append({"engine": engine, "": which, **parts, "in all": median(whole), "from to": spread})
    formats = dict.fromkeys((*PARTS, "in all"), "{:.2f} s") | {"from to": "{:.1f} to {:.1f} s"}
    return Results(tables={"starts": Table.of(rows, formats)})


if __name__ == "__main__":
    sys.exit(rank(sys.argv[1:]))
