"""launch/local.sh and launch/multinode.sh, as a user calls them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from deepspeed_nmt.errors import EXIT_STOPPED
from tests.support import ROOT


def environment() -> dict[str, str]:
    """A shell's, without what a launcher would say."""
    plain = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**plain, "VENV": sys.prefix, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_local_trains_and_ctrl_c_stops_it(data: Path, small: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--recipe", "transformer_base", "--data", str(data), "--run", str(run), *small, "validation.bleu=false"]
    command = [str(ROOT / "launch/local.sh"), "--ranks", "2", "--cpu", "--", *words]
    endless = [*command, "training.max_updates=100000", "training.validate_every=100000", "training.save_every=4"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(endless, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while not (run / "checkpoints/latest").exists():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does; the ranks are in a group of their own
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tmp_path / "log").read_text()
    assert "2 ranks on CPU" in said and "stopped by SIGUSR1 after update" in said
    assert process.returncode == EXIT_STOPPED, said
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_mistakes_are_named(tmp_path: Path) -> None:
    def fails(*words: str) -> str:
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=20)
        assert done.returncode == 2
        return done.stderr

    local, multinode = str(ROOT / "launch/local.sh"), str(ROOT / "launch/multinode.sh")
    assert "arguments of `deepspeed-nmt train` are required after --" in fails(local)
    assert "--hostfile is required" in fails(multinode, "--", "--recipe", "x")
    nowhere = ["--hostfile", str(tmp_path / "x"), "--", "--recipe", "x"]
    assert "--hostfile must be a file, but" in fails(multinode, *nowhere)
    assert "'--recipe' is no option of this script" in fails(multinode, "--recipe", "x")
    assert "submit this with sbatch" in fails(str(ROOT / "launch/train.sbatch"), "--recipe", "x")
