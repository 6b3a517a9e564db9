"""Python programs that tests start, in milliseconds instead of the eight seconds of a real start.

One server (`multiprocessing`'s fork server) imports the package and the libraries it uses, once per test session, and
forks itself for each program. A fork is an ordinary process with its own pid, environment, output, exit status and
signals. It differs from a real start in three ways: its parent is the server, all programs share one seed of string
hashes, and `ps` shows the server's command line. Launchers, SLURM and the lost-launcher tests therefore start Python
itself.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

import torch

import deepspeed_nmt
from deepspeed_nmt.plugins import load_plugins

LIBRARIES = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.pyplot",
    "torch._inductor.compile_fx",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
)
"""Libraries that are imported on first use, mostly by DeepSpeed's and torch's optimizers."""

_PR_SET_PDEATHSIG = 1
_FORKING = multiprocessing.get_context("forkserver")


class Program:
    """A running program, with the methods of :class:`subprocess.Popen` that tests use.

    Args:
        command: the words after `python`: a script or ``-m MODULE``, then its arguments.
        environment: all environment variables.
        log: file that receives stdout and stderr.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.returncode: int | None = None
        if torch.cuda.is_available():  # CUDA does not survive a fork
            with log.open("wb") as stream:
                self._process: subprocess.Popen[bytes] | multiprocessing.process.BaseProcess = subprocess.Popen(
                    [sys.executable, *command], env=environment, stdout=stream, stderr=stream
                )
            return
        _start_server()
        log.touch()
        self._process = _FORKING.Process(target=_run, args=(command, environment, str(log)))
        self._process.start()

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, -N after signal N, or None while the program runs."""
        if isinstance(self._process, subprocess.Popen):
            self.returncode = self._process.poll()
        else:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: if the program still runs after ``timeout`` seconds.
        """
        if isinstance(self._process, subprocess.Popen):
            self._process.wait(timeout)
        else:
            self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program."""
        self.send_signal(signal.SIGKILL)


def _start_server() -> None:
    """Start the fork server, unless it runs. Its libraries use one thread each, like those of ranks."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        modules = [module.name for module in pkgutil.walk_packages(deepspeed_nmt.__path__, "deepspeed_nmt.")]
        packages = [name for name in modules if not name.endswith(".__main__")]
        _FORKING.set_forkserver_preload([*packages, *LIBRARIES, "tests.frozen"])
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _run(command: list[str], environment: dict[str, str], log: str) -> None:
    """Run ``python *command`` in this forked process, which ends with the server."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with Path(os.devnull).open("rb") as nothing:  # replaces the pipe that would keep the server alive after its tests
        os.dup2(nothing.fileno(), forkserver._forkserver._forkserver_alive_fd)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)
    os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    load_plugins()  # a real start does so when it imports the package
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if "train" in command:
        torch.set_deterministic_debug_mode("warn")  # fills new memory with NaN, which no result must depend on
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them
