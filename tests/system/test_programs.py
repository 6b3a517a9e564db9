"""Forked programs behave like ordinary processes."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.programs import Program
from tests.support import rank_environment

SCRIPT = """
import atexit, os, sys, threading, time
import torch
atexit.register(print, "the end", flush=True)
print(sys.argv[1:], os.environ["RANK"], os.environ.get("GREETING"), __name__, flush=True)
print(torch.get_num_threads(), len(os.listdir(f"/proc/{os.getppid()}/task")), flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


def test_a_program_has_its_own_arguments_environment_output_and_status(tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text(SCRIPT)
    environment = rank_environment(1, 2, 0, tmp_path)
    program = Program([str(script), "3"], {**environment, "GREETING": "hello"}, log)
    assert program.wait(timeout=60) == 3
    assert log.read_text() == "['3'] 1 hello __main__\n1 1\nthe end\n", "program and server have one thread each"
    program = Program([str(script), "sleep"], environment, log)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(timeout=0.2)
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    assert program.wait(timeout=60) == -signal.SIGTERM
    program = Program(["-m", "deepspeed_nmt", "--version"], environment, log)
    assert program.wait(timeout=60) == 0 and log.read_text().startswith("deepspeed-nmt ")
