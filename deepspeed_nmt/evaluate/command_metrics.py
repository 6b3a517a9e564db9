"""Metrics that are programs of the user, such as COMET.

The settings name one as ``command:PATH`` or ``late:PATH``, with ``NAME=`` in front or ``:lower`` at the end. The
program is called with the files of hypotheses, references and sources. One that is called on the spot prints a number
as its last line. A late one is called with a fourth file, into which the number is written whenever it is known, by
itself or by a job that it submits. No shell is involved.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from typing_extensions import override

from deepspeed_nmt.errors import ConfigError, MetricError, finite_number, shown
from deepspeed_nmt.evaluate.metrics import METRICS, PROGRAM_DECIMALS, Metric
from deepspeed_nmt.files import sha256_of

SENTENCES = "DEEPSPEED_NMT_SENTENCES"
"""Environment variable with the file into which the program may write the score of each sentence, one a line."""
RESERVED = ("loss", "nll", "ppl", "mean", "auto", "samples")
"""Words that are measures, or have another meaning where measures are named."""

_FORM = re.compile(r"(?:(?P<name>[^=:/]*)=)?(?P<when>command|late):(?P<path>.+?)(?P<lower>:lower)?", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")
_OF_LAUNCHERS = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_.*|ROLE_.*|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PMI.*"
    r"|OMPI_.*|SLURM_(?:NTASKS|NPROCS|PROCID|LOCALID|NODEID|STEP.*|TASK.*)|DEEPSPEED_NMT_(?:STOP|STATUS)"
)
"""Variables by which a launcher tells a rank of its place: a program with these would wait for other ranks."""
_LAST_BYTES = 1 << 16
_INTERVAL_S = 0.05


@dataclass(frozen=True)
class ScoredFiles:
    """Files that a program scores, a sentence on each line, and one for the scores of these, or None for none."""

    hypothesis: Path
    reference: Path
    source: Path
    sentences: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CommandMetric(Metric):
    """A metric that is a program, whose result, if it is ``late``, comes later, in a file."""

    path: Path
    late: bool = False
    decimals: int = PROGRAM_DECIMALS

    @classmethod
    def parse(cls, text: str) -> CommandMetric | None:
        """Return the program that a setting names; None if it names none.

        A name that cannot be part of a tag, or is that of another measure, is a ValueError.
        """
        if (match := _FORM.fullmatch(text)) is None:
            return None
        path = Path(match["path"])
        name = path.stem if match["name"] is None else match["name"]
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"has {shown(text)}, whose name {shown(name)} is not of letters, digits, - and _, 50 at most; put "
                "NAME= in front"
            )
        if name in (*RESERVED, *METRICS):
            raise ValueError(f"has {shown(text)}, whose name is that of another measure; put NAME= in front")
        return cls(
            name=name, kind="plain", path=path, late=match["when"] == "late", higher_is_better=not match["lower"]
        )

    def __str__(self) -> str:
        """Return the setting that :meth:`parse` reads, with the name and the absolute path."""
        when, lower = "late" if self.late else "command", "" if self.higher_is_better else ":lower"
        return f"{self.name}={when}:{self.path.absolute()}{lower}"

    @property
    def problem(self) -> str:
        """Reason why the program cannot be called, as a sentence; "" if there is none."""
        if not self.path.is_file():
            what = "is not a file" if self.path.exists() else "does not exist"
            return f"{self.path}, the metric {self.name}, {what}; correct the path"
        if not os.access(self.path, os.X_OK):
            return f"{self.path}, the metric {self.name}, is not executable; run `chmod +x {self.path}`"
        return ""

    @override
    def signature(self) -> str:
        when, direction = "late" if self.late else "command", "" if self.higher_is_better else "|lower"
        try:
            digest = f"|sha256:{sha256_of(self.path)[:8]}"
        except OSError:  # a program that may be called and not read
            digest = ""
        return f"{when}:{self.path}{digest}{direction}"

    def score(self, files: ScoredFiles, limit_s: float, interrupted: Callable[[], bool] = lambda: False) -> float:
        """Call the program, and return the number that it prints.

        Raises:
            MetricError: if it cannot be called, fails, takes longer than ``limit_s``, is interrupted, or prints no
                finite number.
        """
        with ExitStack() as stack:
            try:
                out, err = (stack.enter_context(TemporaryFile()) for _ in range(2))
            except OSError as error:
                raise MetricError(f"{self.path}, the metric {self.name}, has no temporary file: {error}") from error
            process, deadline = self._call(files, (), out, err), time.monotonic() + limit_s
            try:
                while process.poll() is None:
                    if interrupted():
                        raise MetricError(f"the metric {self.name} was ended, because the run stops")
                    if time.monotonic() > deadline:
                        raise MetricError(
                            f"{self.path}, the metric {self.name}, took more than {limit_s:g} s; raise "
                            f"validation.command_s, or let its result come late (late:{self.path})"
                        )
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_INTERVAL_S)
            finally:
                kill(process)
            if process.returncode != 0:
                words = f": {shown(said)}" if (said := last_line(err)) else ""
                raise MetricError(f"{self.path}, the metric {self.name}, {ending(process.returncode)}{words}")
            return self._number(last_line(out), f"the last line of {self.path}")

    def start(self, files: ScoredFiles, result: Path, log: Path) -> subprocess.Popen[bytes]:
        """Call a late program, which prints into ``log``, and return the process without waiting for it."""
        with log.open("wb") as stream:
            return self._call(files, (result,), stream, stream)

    def read(self, result: Path) -> float | None:
        """Read the number from the file of a late program; None while there is none."""
        with suppress(FileNotFoundError), result.open("rb") as stream:
            if text := last_line(stream):
                return self._number(text, f"the last line of {result}")
        return None

    def _number(self, text: str, where: str) -> float:
        with suppress(ValueError):
            return finite_number(text)
        raise MetricError(f"{where}, of the metric {self.name}, is {shown(text)}, and not a finite number")

    def _call(
        self, files: ScoredFiles, further: Sequence[Path], out: IO[Any], err: IO[Any]
    ) -> subprocess.Popen[bytes]:
        variables = {} if files.sentences is None else {SENTENCES: str(files.sentences.absolute())}
        paths = (self.path, files.hypothesis, files.reference, files.source, *further)
        try:
            return start([str(path.absolute()) for path in paths], subprocess.DEVNULL, out, err, variables)
        except OSError as error:
            raise MetricError(
                f"{self.path}, the metric {self.name}, cannot be started ({error.strerror or error}); does its first "
                "line name an interpreter, such as #!/bin/sh?"
            ) from error


def check_programs(metrics: Sequence[CommandMetric]) -> None:
    """Check that programs can be called."""
    if problems := [metric.problem for metric in metrics if metric.problem]:
        raise ConfigError(problems)


def read_sentence_scores(path: Path, count: int) -> list[float] | None:
    """Read the scores of sentences that a program has written; None if it has not, or not one for each sentence."""
    try:
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
        scores = [finite_number(line) for line in lines if line]
    except (OSError, ValueError):
        return None
    return scores if len(scores) == count else None


def ending(status: int) -> str:
    """Return a phrase for the exit status of a process that failed."""
    if status >= 0:
        return f"ended with status {status}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-status).name}"
    return f"was killed by signal {-status}"


def start(
    words: Sequence[str], given: IO[Any] | int, out: IO[Any] | int, err: IO[Any], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a program of the user in a session of its own, so that signals for this one do not reach it."""
    environment = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    return subprocess.Popen(
        words, stdin=given, stdout=out, stderr=err, env={**environment, **variables}, start_new_session=True
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a program that :func:`start` has started, and the processes that it has started, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(stream: IO[bytes]) -> str:
    """Return the last line of a file that is not blank; "" if there is none."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _LAST_BYTES))
    lines = stream.read().decode("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
