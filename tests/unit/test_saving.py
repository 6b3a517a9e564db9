"""Checkpoints written in the background: training waits for a copy in host memory only, and nothing else changes."""

import ctypes
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_nmt.engine.contract import EngineScalars, ParameterState
from deepspeed_nmt.engine.transfer import HostBuffer
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.parallel.watchdog import Watchdog
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train import checkpoint as store_module
from deepspeed_nmt.train import saving
from deepspeed_nmt.train.checkpoint import CheckpointStore
from deepspeed_nmt.train.configuration import Save, TrainingConfig
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.saving import Saver

ALONE = World(0, 1, 0, torch.device("cpu"))
SHAPE = (5, 3)
NAMES = ("a", "b.weight")
SIZE = len(NAMES) * 12 * 15
GIB = 1 << 30


class Weights:
    """Engine of two parameters, which training changes in place."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.tensors = {name: [torch.zeros(SHAPE) for _ in range(3)] for name in NAMES}

    def train(self, value: float) -> None:
        for number, tensor in enumerate(tensor for tensors in self.tensors.values() for tensor in tensors):
            tensor.fill_(value + number / 8)

    def scalars(self) -> EngineScalars:
        return EngineScalars(3)

    def state(self, copy: bool = True, buffer: HostBuffer | None = None) -> Iterator[ParameterState]:
        for name, tensors in self.tensors.items():
            weight, first, second = buffer(tensors) if buffer else [tensor.clone() for tensor in tensors]
            yield ParameterState(name, weight, {"exp_avg": first, "exp_avg_sq": second})


def saver_in(directory: Path, engine: Weights, save: Save = "background") -> Saver:
    store, watchdog = CheckpointStore(directory), Watchdog(ALONE, 0.0, 1.0, 1.0)
    return Saver(store, engine, ALONE, watchdog, TrainingConfig(save=save), SIZE, 0)  # type: ignore[arg-type]


def names(directory: Path) -> list[str]:
    return CheckpointStore(directory).names()


class SlowDisk:
    """Disk that writes nothing before it is told to; it may be full then."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self._write = store_module.save_file

    def __call__(self, tensors: Any, path: Path) -> None:
        self.began.set()
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        self._write(tensors, path)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    found = SlowDisk()
    monkeypatch.setattr(store_module, "save_file", found)
    yield found
    found.go_on.set()


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(
    tmp_path: Path, slow: SlowDisk
) -> None:
    engine = Weights()
    with saver_in(tmp_path / "background", engine) as saver:
        for update in (1, 2):  # the second copy has the memory of the first
            slow.began.clear()
            slow.go_on.clear()
            engine.train(update)
            saver.save(Progress(update=update), must=False)
            assert slow.began.wait(60) and saver.saved_at == update - 1
            engine.train(99.0)
            assert f"update-{update:07d}" not in names(tmp_path / "background")
            slow.go_on.set()
            saver.finish()
            assert saver.saved_at == update and f"update-{update:07d}" in names(tmp_path / "background")
    with saver_in(tmp_path / "blocking", engine, "blocking") as saver:
        for update in (1, 2):
            engine.train(update)
            saver.save(Progress(update=update), must=False)
            assert saver.saved_at == update
    files = sorted(file for file in (tmp_path / "blocking").rglob("*") if file.is_file())
    assert len(files) == 2 * 5 + 1
    for file in files:
        other = tmp_path / "background" / file.relative_to(tmp_path / "blocking")
        assert other.read_bytes() == file.read_bytes(), file.name


def test_the_copy_takes_no_more_memory_than_the_checkpoint(tmp_path: Path) -> None:
    saver = saver_in(tmp_path, Weights())
    assert saver._buffer is not None and saver._buffer._flat.nbytes == SIZE
    saver.finish()


def test_a_checkpoint_waits_for_the_one_before(tmp_path: Path, slow: SlowDisk) -> None:
    engine = Weights()
    with saver_in(tmp_path, engine) as saver:
        engine.train(1.0)
        saver.save(Progress(update=1), must=False)
        threading.Timer(0.2, slow.go_on.set).start()
        engine.train(2.0)
        saver.save(Progress(update=2), must=True)
        assert saver.saved_at == 2
    store = CheckpointStore(tmp_path)
    assert [float(store.read(name).weight("a")[0, 0]) for name in store.names()] == [1.0, 2.0]


def test_the_end_waits_for_a_checkpoint_that_is_being_written(tmp_path: Path, slow: SlowDisk) -> None:
    def interrupted() -> None:
        with saver_in(tmp_path, Weights()) as saver:
            saver.save(Progress(update=1), must=False)
            threading.Timer(0.2, slow.go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == ["update-0000001"]


def test_a_full_disk_in_the_background_is_reported_and_the_next_checkpoint_written(
    tmp_path: Path, slow: SlowDisk, caplog: pytest.LogCaptureFixture
) -> None:
    slow.go_on.set()
    with saver_in(tmp_path, Weights()) as saver:
        saver.save(Progress(update=1), must=False)
        saver.finish()
        slow.error = OSError(errno.ENOSPC, "No space left on device")
        saver.save(Progress(update=2), must=False)
        saver.finish()
        assert saver.saved_at == 1
        assert caplog.text.count("the checkpoint of update 2 could not be written to ") == 1
        assert "the last good one is of update 1. Free some space" in caplog.text
        assert "training continues" in caplog.text
        with pytest.raises(OSError, match=r"the checkpoint of update 3 could not be written .* is of update 1"):
            saver.save(Progress(update=3), must=True)
        slow.error = None
        saver.save(Progress(update=4), must=False)
    assert names(tmp_path) == ["update-0000001", "update-0000004"]


def test_an_error_of_the_program_in_the_background_ends_training(tmp_path: Path, slow: SlowDisk) -> None:
    slow.go_on.set()
    slow.error = ValueError("a mistake")
    with saver_in(tmp_path, Weights()) as saver:
        saver.save(Progress(update=1), must=False)
        with pytest.raises(ValueError, match="a mistake"):
            saver.save(Progress(update=2), must=False)


@pytest.mark.parametrize("reason", ["available", "allocation"])
def test_training_waits_where_host_memory_has_no_room_for_a_copy(
    tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> HostBuffer:
        raise RuntimeError("not enough memory")

    if reason == "available":
        monkeypatch.setattr(saving, "host_memory", lambda: SimpleNamespace(available=2 * SIZE - 1))
    else:
        monkeypatch.setattr(saving, "HostBuffer", fails)
    with saver_in(tmp_path, Weights()) as saver:
        saver.save(Progress(update=1), must=False)
        assert saver.saved_at == 1
    assert "training waits while checkpoints are written: for the background, their copy of " in caplog.text


def test_a_disk_without_room_is_named_and_a_quota_only_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, reserved, quota in ((5 * GIB, True, False), (99 * GIB, False, True)):
        monkeypatch.setattr(saving.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        monkeypatch.setattr(saving, "_reserve", lambda *_, reserved=reserved: reserved)
        with pytest.raises(ConfigError, match=r"more checkpoints of 3\.0 GiB are to come") as refusal:
            saving.check_can_save(tmp_path, 3 * GIB, TrainingConfig(), 0)
        assert ("of which a quota leaves less" in str(refusal.value)) is quota


@pytest.mark.parametrize(
    ("error", "has_room"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EOPNOTSUPP, True), (0, True)]
)
def test_room_is_missing_if_the_c_library_says_so(
    error: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves its error where ctypes keeps a copy of it, if asked to."""

    class Library:
        def __init__(self, _: None, use_errno: bool = False) -> None:
            def fallocate64(*_: int) -> int:
                ctypes.set_errno(error if use_errno else 0)
                return -1 if error else 0

            self.fallocate64 = fallocate64

    monkeypatch.setattr(saving.ctypes, "CDLL", Library)
    assert saving._reserve(0, 100) is has_room
