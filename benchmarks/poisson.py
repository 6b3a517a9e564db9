"""Goodput of a job whose ranks are all killed at random moments.

    python benchmarks/run.py poisson [--mtbf 300] [--minutes 60] [--layout zero2] [--save-every N]

Kills are a Poisson process: seconds between two of them are exponential with mean ``--mtbf``. Each time the job
starts again at once, as a scheduler would start it. Goodput is seconds of updates that survive, of their validations
and checkpoints, divided by the wall time; the run's own ledger counts them. The last column of the table by activity
says where the rest of a kill went.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kills import LAYOUTS
from records import Results, Table

from deepspeed_nmt.train.goodput import PRODUCTIVE, Account, read_ledger
from tests.support import free_port, prepare_sample, rank_environment

MODEL = [
    *("model.dim=128", "model.ffn_dim=512", "model.heads=4", "model.encoder_layers=3", "model.decoder_layers=3"),
    *("batch.update_tokens=2048", "batch.micro_tokens=1024", "schedule.warmup_updates=100", "engine.device=cpu"),
    *("training.log_every=20", "validation.metrics=[]", "collapse.every=0", "training.max_updates=1000000"),
    "engine.deterministic=true",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mtbf", type=float, default=300.0, help="mean seconds between two kills (default: 300)")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time (default: 60)")
    parser.add_argument("--layout", choices=LAYOUTS, default="zero2", help="ranks and engine (default: zero2)")
    parser.add_argument("--save-every", type=int, default=20, help="updates between checkpoints (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")


def run(arguments: argparse.Namespace) -> Results:
    """Train for the given time with kills, and account for its seconds."""
    dice, layout = random.Random(arguments.seed), LAYOUTS[arguments.layout]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        data = prepare_sample(scratch, 2000, train=20_000, valid=200, test=20)
        words = ["-m", "deepspeed_nmt", "train", "--recipe", "transformer_base", "--data", str(data)]
        words += ["--run", str(scratch / "run"), *MODEL, *layout.settings]
        words += [f"training.save_every={arguments.save_every}", "training.validate_every=500"]
        end, lives = time.monotonic() + 60.0 * arguments.minutes, []
        while (left := end - time.monotonic()) > 0.0:
            port, since = free_port(), time.monotonic()
            processes = []
            for number in range(layout.ranks):
                environment = rank_environment(number, layout.ranks, port, scratch)
                with (scratch / f"rank{number}.log").open("ab") as log:
                    command = [sys.executable, *words]
                    processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            deadline = since + min(left, dice.expovariate(1.0 / arguments.mtbf))
            while time.monotonic() < deadline:
                if any(process.poll() is not None for process in processes):
                    raise RuntimeError((scratch / "rank0.log").read_text(errors="replace")[-3000:])
                time.sleep(0.02)
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()
            lives.append(round(time.monotonic() - since, 2))
        account = Account.of(read_ledger(scratch / "run"))
    seconds, wall = account.seconds, sum(lives)
    kills = len(lives) - 1
    useful = sum(seconds.get(activity, 0.0) for activity in PRODUCTIVE)
    rows = [
        {
            "activity": activity,
            "seconds": round(spent, 1),
            "seconds a kill": None if kept else round(spent / max(1, kills), 2),
        }
        for activity, spent in seconds.items()
        for kept in [activity in PRODUCTIVE]
    ]
    tables = {
        "goodput": Table.of(
            [
                {
                    "layout": arguments.layout,
                    "mean between kills (s)": arguments.mtbf,
                    "kills": kills,
                    "wall time (s)": round(wall),
                    "goodput": useful / wall,
                    "lost a kill (s)": round((wall - useful) / max(1, kills), 2),
                    "load": round(os.getloadavg()[0], 1),
                }
            ],
            {"goodput": "{:.1%}"},
        ),
        "activities": Table.of(rows),
    }
    return Results(tables=tables, rounds=lives)
