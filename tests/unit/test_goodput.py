"""Goodput: where the seconds of a run went, by its ledger."""

from pathlib import Path

import pytest

from deepspeed_nmt.train import goodput
from deepspeed_nmt.train.goodput import GOODPUT_FILE, Account, Activity, Entry, Ledger, read_ledger


def begins(time: float, update: int = 0) -> Entry:
    return Entry(time=time, update=update, begins=True)


def at(update: int, **seconds: float) -> Entry:
    names = {"wait": "waiting for data", "start": "imports"}
    named = {names.get(name, name): spent for name, spent in seconds.items()}
    return Entry.model_validate({"time": 0.0, "update": update, "seconds": named})


def test_what_a_killed_process_did_after_its_checkpoint_was_repeated() -> None:
    ledger = [
        *(begins(1000.0), at(0, start=10.0), at(50, start=10.0, updates=40.0, wait=2.0)),
        at(60, start=10.0, updates=48.0, wait=2.0, saving=1.0, validation=3.0),  # a checkpoint
        at(90, start=10.0, updates=72.0, wait=3.0, saving=1.0, validation=3.0),
        *(begins(1100.0, 60), at(100, start=12.0, updates=30.0, saving=1.0)),
    ]
    account = Account.of(ledger)
    assert account.starts == 2
    assert account.seconds == {
        "imports": 22.0, "updates": 48.0 + 30.0, "waiting for data": 2.0, "saving": 2.0, "validation": 3.0,
        "repeated": 24.0 + 1.0, "idle": 100.0 - 89.0,
    }  # fmt: skip
    assert account.goodput == pytest.approx((78.0 + 3.0 + 2.0) / 143.0)


def test_an_empty_ledger_has_no_goodput_and_odd_lines_are_left_out(tmp_path: Path) -> None:
    assert Account.of([]).goodput is None and Account.of([begins(5.0)]).goodput is None
    assert Account.of([at(1, updates=1.0)]).starts == 0
    good = begins(3.0, 7).model_dump_json()
    odd = ["", "[]", "{", '{"time": 1}', '{"time": NaN, "update": 1}', '{"time": 1.0, "update": -1}', "1" * 400]
    odd += ['{"time": 1.0, "update": 1, "seconds": {"sleep": 1.0}}', '{"time": 1.0, "update": "1"}', good[:-1]]
    (tmp_path / GOODPUT_FILE).write_text("\n".join([*odd, good]))
    assert read_ledger(tmp_path) == [begins(3.0, 7)] and read_ledger(tmp_path / "none") == []


def test_a_ledger_counts_each_second_once_over_a_resume_and_a_rollback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(goodput, "_age_of_process", lambda: 2.0)
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(f"deepspeed_nmt.train.goodput.time.{clock}", lambda: now)

    def spend(activity: Activity, seconds: float) -> None:
        nonlocal now
        ledger.begin(activity)
        now += seconds

    ledger = Ledger()
    spend("model", 3.0)
    ledger.write(0, must=True)  # there is no run yet
    ledger.start(tmp_path, 0)
    spend("updates", 10.0)
    ledger.write(5, must=True)
    spend("updates", 6.0)
    ledger.write(8)  # too soon
    spend("restore", 4.0)
    ledger.start(tmp_path, 5)  # a rollback
    spend("updates", 7.0)
    account = ledger.account()
    assert account.starts == 2 and sum(account.seconds.values()) == now - 98.0
    assert account.seconds["updates"] == 17.0 and account.seconds["repeated"] == 0.0, "nobody wrote of update 8"
    assert account.seconds["idle"] == 6.0 and account.seconds["restore"] == 4.0
    now += 20.0
    ledger = Ledger()
    ledger.start(tmp_path, 5)
    account = ledger.account()
    assert account.starts == 3 and sum(account.seconds.values()) == now - 98.0
    (tmp_path / GOODPUT_FILE).unlink()
    (tmp_path / GOODPUT_FILE).mkdir()
    for update in (6, 7):
        ledger.write(update, must=True)
    assert caplog.text.count("could not be written") == 1
