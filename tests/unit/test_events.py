"""The history of a run in events.jsonl, and the command that is notified: what it gets, and what it cannot break."""

import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest

from deepspeed_nmt.errors import NoProgressError, ReportedError, TrainingError
from deepspeed_nmt.train.configuration import Event
from deepspeed_nmt.train.events import EVENTS_FILE, Events, Notifier, check_progress, reason

EVENTS = get_args(Event)


def read(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / EVENTS_FILE).read_text("utf-8").splitlines()]


def python(code: str) -> str:
    """A command that runs a line of Python."""
    return shlex.join([sys.executable, "-c", code])


def alive(pid: int) -> bool:
    """True if a process runs."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_line_is_valid_json_with_the_documented_keys_and_older_lines_stay(tmp_path: Path) -> None:
    older = b'{"event": "start"}\n{"torn": '
    (tmp_path / EVENTS_FILE).write_bytes(older)
    with Events(tmp_path, True) as events:
        events.record("best", 400, "two\nlines", score=31.5, loss=math.nan)
        events.record("stop", 410, "größer", signal="SIGTERM")
    content = (tmp_path / EVENTS_FILE).read_bytes()
    assert content.startswith(older + b"\n") and content.endswith(b"\n")
    best, stop = (json.loads(line, parse_constant=pytest.fail) for line in content.splitlines()[2:])
    assert list(best) == ["time", "update", "event", "text", "score", "loss"]
    assert (best["update"], best["event"], best["text"]) == (400, "best", "two lines")
    assert (best["score"], best["loss"], stop["signal"], stop["text"]) == (31.5, None, "SIGTERM", "größer")
    assert best["time"].endswith("+00:00") and len(best["time"]) == len("2026-11-23T04:05:09+00:00")


def begin(events: Events, update: int, job: str = "7") -> None:
    events.record("resume" if update else "start", update, "begun", job=job)


def test_a_job_that_gets_nowhere_three_times_in_a_row_is_not_started_again(tmp_path: Path) -> None:
    for failure in ("no space left", None, "rank 3 is gone"):
        check_progress(tmp_path, 40, "7")
        with suppress(TrainingError), Events(tmp_path, True) as events:
            begin(events, 40)
            if failure:
                raise TrainingError(failure)
    with (tmp_path / EVENTS_FILE).open("ab") as file:
        file.write(b'[1]\n{"event": 3}\n{"torn')
    with pytest.raises(NoProgressError) as refused:
        check_progress(tmp_path, 40, "7")
    causes = ("1. no space left", "2. it was killed", "3. rank 3 is gone", "job 7", "after update 40")
    assert all(cause in str(refused.value) for cause in causes) and refused.value.status == 78
    # What ends the count: a new checkpoint, another job, a user without SLURM, a stop on request.
    check_progress(tmp_path, 41, "7")
    check_progress(tmp_path, 40, "8")
    check_progress(tmp_path, 40, None)
    with Events(tmp_path, True) as events:
        begin(events, 40)
        events.record("stop", 40, "stopped by SIGTERM")
    check_progress(tmp_path, 40, "7")
    # A job whose time ends before each first update gets nowhere; preemption is no fault of its own.
    for signal in ("SIGTERM", "SIGUSR1", "SIGUSR1", "SIGUSR1"):
        check_progress(tmp_path, 40, "9")
        with Events(tmp_path, True) as events:
            begin(events, 40, "9")
            events.record("stop", 40, f"stopped by {signal}", signal=signal)
    with pytest.raises(
        NoProgressError, match=r"1\. stopped by SIGUSR1, as the time limit came before another update"
    ):
        check_progress(tmp_path, 40, "9")
    for at in (40, 60, 40, 40):  # after a rollback it may resume at an earlier one
        begin(events, at)
    check_progress(tmp_path, 40, "7")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TrainingError("the training has diverged"), "the training has diverged"),
        (ReportedError(1, "rank 1 says why"), "rank 1 says why"),
        (RuntimeError("CUDA error\nmany lines"), "RuntimeError: CUDA error"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_an_error_is_a_failure_after_the_newest_update(tmp_path: Path, error: BaseException, text: str) -> None:
    assert reason(error) == text
    with pytest.raises(type(error)), Events(tmp_path, True) as events:
        events.record("start", 0, "started")
        events.at(17)
        events.record("saved", 15, "saved")  # by the thread that writes checkpoints
        raise error
    last = read(tmp_path)[-1]
    assert (last["event"], last["update"], last["text"]) == ("failure", 17, " ".join(text.split()))


def test_the_failure_that_the_watchdog_finds_is_recorded_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Events(tmp_path, True) as events:
        events.fail("rank 1 is gone")
        raise RuntimeError("connection closed by peer")
    assert [entry["text"] for entry in read(tmp_path)] == ["rank 1 is gone"]


def test_a_full_disk_is_reported_once_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EVENTS_FILE).symlink_to("/dev/full")
    with Events(tmp_path, True) as events:
        for update in range(3):
            events.record("skip", update, "skipped")
    assert [record.message.startswith("an event could not be written to ") for record in caplog.records] == [True]


def test_the_command_gets_the_event_on_stdin_and_in_variables_without_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    code = (
        "import os, sys; names = ('EVENT', 'RUN', 'UPDATE', 'TEXT');"
        "values = [os.environ['DEEPSPEED_NMT_' + name] for name in names];"
        f"print(sys.stdin.read(), values, sys.argv[1:], 'RANK' in os.environ, file=open({str(out)!r}, 'a'))"
    )
    monkeypatch.setenv("RANK", "0")
    notifier = Notifier(python(code) + " '$HOME; *' b", ("best",))
    with Events(tmp_path, True, notifier) as events:
        events.record("skip", 3, "not asked for")
        events.record("best", 4, "best $(touch x)", score=1.5)
    line = (tmp_path / EVENTS_FILE).read_text().splitlines()[1]
    values = ["best", str(tmp_path), "4", "best $(touch x)"]
    assert out.read_text() == f"{line}\n {values} ['$HOME; *', 'b'] False\n"


def test_a_slow_command_delays_nothing_and_is_killed_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, time; child = subprocess.Popen(['sleep', '60']);"
        f"print(os.getpid(), child.pid, file=open({str(pids)!r}, 'a'), flush=True); time.sleep(60)"
    )
    notifier = Notifier(python(code), EVENTS, limit_s=3.0)
    started = time.monotonic()
    notifier.notify("best", "{}", tmp_path, 1, "best")
    assert time.monotonic() - started < 0.5, "an event does not wait for the command"
    until(lambda: any("took longer than 3 s, and was killed" in message for message in caplog.messages))
    slower = Notifier(python(code), EVENTS)
    slower.notify("stop", "{}", tmp_path, 2, "stop")
    slower.notify("end", "{}", tmp_path, 2, "end")
    until(lambda: pids.exists() and len(pids.read_text().splitlines()) == 2)
    started = time.monotonic()
    slower.close(wait_s=0.3)
    assert time.monotonic() - started < 3.0
    until(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))
    assert len(pids.read_text().splitlines()) == 2, "the event that waited is dropped"
    assert caplog.messages[1:] == [
        "training.notify: the command was still running 0.3 s after training had ended, and was killed; training is "
        "not affected"
    ]


def test_without_a_temporary_file_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    notifier = Notifier(python("pass"), EVENTS)
    notifier.notify("best", "{}", tmp_path, 1, "best")
    notifier.close()
    assert "the command could not be run ([Errno 2] No such file or directory" in caplog.text


@pytest.mark.parametrize(
    ("command", "warning"),
    [
        ("/nowhere/to/be/found", "could not be run ([Errno 2] No such file or directory: '/nowhere/to/be/found')"),
        (python("import sys; sys.exit('no network')"), "ended with status 1 (no network)"),
    ],
)
def test_a_command_that_fails_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, warning: str
) -> None:
    with Events(tmp_path, True, Notifier(command, EVENTS)) as events:
        for update in range(3):
            events.record("best", update, "best")
    assert caplog.messages == [f"training.notify: the command {warning}; training is not affected"]
    assert len(read(tmp_path)) == 3
