"""Speed of `prepare --executor slurm` on one host and on two, which run one task at a time each.

    OMP_NUM_THREADS=1 python benchmarks/run.py hosts [--pairs 1000000] [--tasks 4 16] [--rounds 1]

It needs root, SLURM, datatrove, and a core for each host: the hosts are the two nodes of tests/slurm on this machine.
Pairs of the sample corpus are prepared with a vocabulary that was trained before. Seconds count from the command
until the data directory is there; those of a stage until its last task has ended. The files are compared with those
of one process.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prepare import VOCABULARY_PAIRS, _prepared
from records import Results, Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.slurm.cluster import Cluster

STAGES = ("index", "clean", "duplicate", "vocabulary", "encode", "join")
HOSTS = (1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=1_000_000, help="size of the text (default: %(default)s)")
    parser.add_argument("--tasks", type=int, nargs="+", default=[4, 16], help="tasks of a stage (default: 4 16)")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of each (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Results:
    """Prepare by each number of tasks on each number of hosts."""
    root = Path(tempfile.mkdtemp(prefix="hosts-"))
    root.chmod(0o755)  # munge requires it
    rounds: list[dict[str, Any]] = []
    try:
        vocabulary = _prepared(root / "small", VOCABULARY_PAIRS, root / "vocabulary", vocab_size=8000)
        local = _prepared(root / "text", arguments.pairs, root / "local", vocab_from=vocabulary)
        with Cluster(root / "slurm") as cluster:
            for _ in range(arguments.rounds):
                for tasks in arguments.tasks:
                    for hosts in HOSTS:
                        out = root / "data"
                        rounds.append({"hosts": hosts, "tasks": tasks, **_measured(cluster, root, out, hosts, tasks)})
                        for path in local.iterdir():
                            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
                        shutil.rmtree(out)
                        shutil.rmtree(root / ".data.tasks")
    finally:
        shutil.rmtree(root)
    rows = []
    for row in rounds:
        one = next(r["seconds"] for r in rounds if (r["hosts"], r["tasks"]) == (1, row["tasks"]))
        rows.append({**row, "pairs/s": arguments.pairs / row["seconds"], "one host = 1": one / row["seconds"]})
    formats = dict.fromkeys(("seconds", *STAGES), "{:.1f}") | {"pairs/s": "{:,.0f}", "one host = 1": "{:.2f}"}
    return Results(tables={"speed": Table.of(rows, formats)}, rounds=rounds)


def _measured(cluster: Cluster, root: Path, out: Path, hosts: int, tasks: int) -> dict[str, float]:
    """Prepare, and return seconds, in all and by stage."""
    files = [
        f"--{split}-{side}={root / 'text' / split}.{language}"
        for split in ("train", "valid")
        for side, language in (("source", "en"), ("target", "de"))
    ]
    where = ["--executor", "slurm", "--tasks", str(tasks), "--array", str(hosts), "--partition", "low"]
    words = [sys.executable, "-m", "deepspeed_nmt", "prepare", *files, "--out", str(out), *where]
    environment = {
        **cluster.environment,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        "SBATCH_EXCLUSIVE": "exclusive",
    }
    began = time.time()
    subprocess.run([*words, "--vocab-from", str(root / "vocabulary")], env=environment, cwd=root, check=True)
    cluster.until((out / "meta.json").exists, 3600.0, "the data")
    seconds = time.time() - began
    cluster.until(lambda: not cluster.run("squeue", "-h"), 60.0, "the end of all jobs")
    logs, spans = root / ".data.tasks" / "logs", {}
    for stage in STAGES:
        ended = max((path.stat().st_mtime for path in logs.glob(f"{stage}/logs/*")), default=began)
        spans[stage], began = ended - began, ended
    return {"seconds": seconds, **spans}
