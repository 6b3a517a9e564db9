"""Kill a job again and again, and compare its last checkpoint bit for bit with that of an undisturbed run.

    python benchmarks/run.py kills [--layout NAME ...] [--fault NAME ...] [--kills 50] [--minutes 60] [--busy N]

A batch is a layout and a fault. Its job is started, disturbed at a random moment, killed, and started again,
``--kills`` times; then it trains to its end. Updates go on while checkpoints are written to a slow disk, so that some
kills hit a checkpoint that is being written. The undisturbed run writes its checkpoints while training waits.

Faults: one rank is killed; all ranks are; the launcher (torchrun) is; a rank is stopped, so that it hangs; the disk
returns an error for a while; the disk is full for a while (a small tmpfs, which only root can mount).

Each batch is a row of the record; a batch that has a row is not made again, so the benchmark resumes.
Ranks are forked from one process that has imported everything, so a start costs tenths of a second; those under
torchrun are real starts. The exit status is 1 if a batch ended with other bits, or failed.
"""

from __future__ import annotations

import argparse
import errno
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from records import Results, Table, commit, read  # noqa: E402

from deepspeed_nmt.cli import main  # noqa: E402
from deepspeed_nmt.train import checkpoint  # noqa: E402
from tests.programs import Program  # noqa: E402
from tests.support import assert_same, free_port, prepare_sample, rank_environment, run_ranks  # noqa: E402
from tests.system.conftest import SMALL  # noqa: E402

RESUMES = True
"""A record that exists is continued."""
DEEPSPEED = ["engine.name=deepspeed", "engine.ds_config={}"]


class Layout(NamedTuple):
    """Ranks and settings of a job.

    Attributes:
        ranks: number of processes.
        settings: settings of the engine.
        mixture: True to train on two data directories.
        silent_s: seconds without a heartbeat after which a rank is lost. Ranks share the cores with each other and
            with ``--busy``: one that waits for its turn must not be taken for one that hangs.
    """

    ranks: int
    settings: list[str]
    mixture: bool = False
    silent_s: int = 4


LAYOUTS = {
    "plain": Layout(2, ["engine.name=plain"]),
    "zero2": Layout(2, [setting.format("zero2") for setting in DEEPSPEED]),
    "zero3": Layout(2, [setting.format("zero3") for setting in DEEPSPEED], silent_s=12),
    "plain-4-mixture": Layout(4, ["engine.name=plain"], mixture=True, silent_s=12),
}
FAULTS = ("all", "rank", "launcher", "hang", "error", "full")
TRAINING = [
    *("training.save_every=4", "training.validate_every=100000", "validation.metrics=[]", "collapse.every=0"),
    *("training.keep_last=2", "engine.deterministic=true"),
]
_TIMEOUT_S = 300.0


def rank(words: list[str]) -> int:
    """Be a rank whose disk is slow, and returns errors while the file $FAULTY_DISK exists."""
    module: Any = checkpoint
    save_file, control = module.save_file, Path(os.environ["FAULTY_DISK"])

    def slowly(tensors: Any, path: Any) -> None:
        path.touch()
        time.sleep(float(os.environ["SLOW_DISK_S"]))
        if control.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        save_file(tensors, path)

    module.save_file = slowly
    return main(words)


class Job:
    """A run that is started repeatedly.

    Args:
        layout: its ranks and settings.
        data: data directories.
        scratch: directory for its files.
        run: the run directory.
    """

    def __init__(self, layout: Layout, data: list[Path], scratch: Path, run: Path) -> None:
        self.layout, self.run, self.scratch = layout, run, scratch
        self.faulty = scratch / "faulty-disk"
        mixed = [f"--data={path}" for path in data[: 2 if layout.mixture else 1]]
        self.words = [str(Path(__file__).resolve()), "rank", "train", "--recipe", "transformer_base"]
        self.words += ["--run", str(run), *mixed, *SMALL, *TRAINING, *layout.settings]
        self.words.append(f"engine.silent_s={layout.silent_s}")
        self.processes: list[Any] = []

    def start(self, *, launcher: bool) -> None:
        """Start the ranks without an end in sight, by torchrun or directly."""
        words, port = [*self.words, "training.max_updates=100000"], free_port()
        disk = {"SLOW_DISK_S": "0.06", "FAULTY_DISK": str(self.faulty)}
        if launcher:
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={self.layout.ranks}"]
            environment = {**os.environ, **disk, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            with (self.scratch / "launcher.log").open("wb") as log:
                command += [f"--master-port={port}", "--max-restarts=0", "--", *words]
                self.processes = [subprocess.Popen(command, env=environment, stdout=log, stderr=log)]
            return
        for number in range(self.layout.ranks):
            environment = {**rank_environment(number, self.layout.ranks, port, self.scratch), **disk}
            self.processes.append(Program(words, environment, self.scratch / f"rank{number}.log"))

    def updates(self) -> int:
        """Return the update of the newest complete checkpoint."""
        names = (path.name for path in self.run.glob("checkpoints/update-*"))
        return max((int(name[7:]) for name in names if re.fullmatch(r"update-\d+", name)), default=0)

    def is_saving(self) -> bool:
        """Return True if a checkpoint is being written."""
        return any(not re.fullmatch(r"update-\d+", path.name) for path in self.run.glob("checkpoints/*update-*"))

    def wait_beyond(self, update: int) -> None:
        """Wait for a newer checkpoint than that of an update."""
        deadline = time.monotonic() + _TIMEOUT_S
        while self.updates() <= update:
            if any(process.poll() is not None for process in self.processes) or time.monotonic() > deadline:
                logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in self.scratch.glob("*.log"))
                raise RuntimeError(f"no checkpoint after update {update}:\n{logs}")
            time.sleep(0.01)

    def disturb(self, fault: str, dice: random.Random) -> bool:
        """Let something happen to the running job, and return True if a checkpoint was being written."""
        caught = self.is_saving()
        pids = [process.pid for process in self.processes]
        if fault == "rank":
            os.kill(dice.choice(pids), signal.SIGKILL)
        elif fault == "launcher":
            os.kill(pids[0], signal.SIGKILL)
        elif fault == "hang":
            os.kill(dice.choice(pids), signal.SIGSTOP)
        elif fault == "error":
            self.faulty.touch()
            time.sleep(dice.uniform(0.2, 1.0))
            self.faulty.unlink()
            time.sleep(dice.uniform(0.0, 0.4))
        elif fault == "full":
            filler = self.run.parent / "filler"
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            time.sleep(dice.uniform(0.2, 1.0))
            filler.unlink()
            time.sleep(dice.uniform(0.0, 0.4))
        return caught

    def end(self, fault: str) -> None:
        """Wait until all processes have ended: those that are left notice the fault, or are killed.

        Raises:
            RuntimeError: if a rank has not noticed that another one, or the launcher, is gone.
        """
        children: list[psutil.Process] = []
        if fault == "launcher":
            pattern = f"--run\0{self.run}\0".encode()
            for process in psutil.process_iter():
                with suppress(psutil.Error, OSError):
                    if pattern in Path(f"/proc/{process.pid}/cmdline").read_bytes() and process.pid != os.getpid():
                        children.append(process)
        if fault in ("rank", "launcher"):
            deadline = time.monotonic() + 60
            for process in (*self.processes, *children):
                with suppress(subprocess.TimeoutExpired, psutil.TimeoutExpired):
                    process.wait(max(0.1, deadline - time.monotonic()))
            if any(process.poll() is None for process in self.processes) or any(c.is_running() for c in children):
                raise RuntimeError(f"a rank did not notice the fault: {fault}")
        elif fault == "hang":
            deadline = time.monotonic() + 60
            while sum(process.poll() is None for process in self.processes) > 1:
                if time.monotonic() > deadline:
                    raise RuntimeError("a rank did not notice that another one hangs")
                time.sleep(0.05)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a tmpfs of 48 MiB during the block.

    Raises:
        RuntimeError: if this user cannot.
    """
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(path)], check=False).returncode:
        raise RuntimeError("a full disk needs a tmpfs, which only root can mount; leave it out with --fault")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)


def batch(layout: Layout, fault: str, kills: int, data: list[Path], scratch: Path) -> dict[str, Any]:
    """Make a batch, and return its row.

    Raises:
        RuntimeError: if the job does not resume, or a rank does not notice a fault.
        AssertionError: if its last checkpoint is not that of the undisturbed run.
    """
    dice, began = random.Random(f"{layout}{fault}"), time.monotonic()
    caught = 0
    disk = scratch / "disk"
    with small_disk(disk) if fault == "full" else nullcontext():
        disk.mkdir(exist_ok=True)
        job = Job(layout, data, scratch, disk / "run")
        seconds = []
        for number in range(kills):
            before, since = job.updates(), time.monotonic()
            job.start(launcher=fault == "launcher")
            try:
                job.wait_beyond(before)
                seconds.append(time.monotonic() - since)
                aims, deadline = number % 2 == 0, time.monotonic() + 10.0
                while aims and time.monotonic() < deadline:
                    if job.is_saving():
                        time.sleep(dice.uniform(0.0, 0.1))
                        if job.is_saving():
                            break
                    time.sleep(0.002)
                time.sleep(0.0 if aims else dice.uniform(0.0, 0.4))
                caught += job.disturb(fault, dice)
            finally:
                job.end(fault)
        last = job.updates() + 6
        end = [f"training.max_updates={last}"]
        disks: dict[str, Any] = {"SLOW_DISK_S": "0", "FAULTY_DISK": str(job.faulty)}
        run_ranks([*job.words, *end], layout.ranks, scratch, **disks)
        straight = Job(layout, data, scratch, scratch / "straight")
        words = [*straight.words, *end, "training.save=blocking"]
        run_ranks(words, layout.ranks, scratch, **disks)
        assert_same(job.run, straight.run, last)
        assert not job.is_saving(), "an incomplete checkpoint is left"
    return {
        "kills": kills,
        "during a save": caught,
        "updates": last,
        "same bits": "yes",
        "seconds from start to a new checkpoint, median": round(sorted(seconds)[len(seconds) // 2], 2),
        "seconds": round(time.monotonic() - began),
    }


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Let processes compute beside the block."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="layouts (default: all)")
    parser.add_argument("--fault", action="append", choices=FAULTS, help="faults (default: all)")
    parser.add_argument("--kills", type=int, default=50, help="of a batch (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which no batch is begun")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside the job")


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Make the batches that have no row yet; each is a row more."""
    path, since, failed = arguments.results / f"{arguments.record}.json", time.monotonic(), False
    rows = read(path).tables["batches"].dicts() if path.is_file() else []
    with tempfile.TemporaryDirectory() as name, busy(arguments.busy):
        directory = Path(name)
        data = [prepare_sample(directory, 500, train=400, valid=31, test=20)]
        text = directory / "text"
        words = ["prepare", "--out", str(directory / "second"), "--vocab-from", str(data[0])]
        for split in ("train", "valid"):
            words += [f"--{split}-source", str(text / f"{split}.de"), f"--{split}-target", str(text / f"{split}.en")]
        assert main(words) == 0
        data.append(directory / "second")
        for fault, layout in itertools.product(arguments.fault or FAULTS, arguments.layout or LAYOUTS):
            known = any((row["layout"], row["fault"]) == (layout, fault) for row in rows)
            if known or time.monotonic() - since > 60.0 * arguments.minutes:
                continue
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                try:
                    row = batch(LAYOUTS[layout], fault, arguments.kills, data, Path(scratch))
                except (RuntimeError, AssertionError, OSError) as error:
                    sys.stderr.write(f"{layout} {fault}: {error}\n")
                    failed = True
                    continue
            more = {"busy": arguments.busy, "commit": commit(), "load": round(os.getloadavg()[0], 1)}
            rows.append({"layout": layout, "fault": fault, **row, **more})
            yield Results(tables={"batches": Table.of(rows)})
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(rank(sys.argv[2:]))
