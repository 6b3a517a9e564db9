"""Ranks from the environment of launchers, and the rank that reports errors."""

from __future__ import annotations

import atexit
import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import ConfigError, ReportedError
from deepspeed_nmt.parallel import launched
from deepspeed_nmt.parallel.device import prepare_gpu
from deepspeed_nmt.parallel.launched import isolate_extension_builds, once_per_host, place

_STEP = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
_SHELL = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *_STEP):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (5, 8, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", **_STEP}, (0, 1, 0)),
        (_STEP, (3, 4, 1)),
        (_SHELL, (0, 1, 0)),
        ({**_SHELL, "SLURM_STEP_ID": "4294967290"}, (0, 1, 0)),
        ({"WORLD_SIZE": "4"}, (0, 1, 0)),
    ],
    ids=["python", "torchrun", "torchrun within srun", "srun", "batch script", "interactive step", "no rank"],
)
def test_ranks_of_launchers(
    environment: dict[str, str], found: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place() == found


def test_an_invalid_number_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert main(["selftest"]) == 2
    assert "error: WORLD_SIZE must be a number, but is 'abc'" in capsys.readouterr().err


def test_the_first_rank_of_a_host_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_REPORT_DELAY_S", 0.0)
    for name, value in {"RANK": "8", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError), once_per_host():
        raise ConfigError("wrong")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ReportedError) as reported, once_per_host():
        raise ConfigError("wrong")
    assert reported.value.status == 2


def test_extensions_are_built_in_a_new_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    isolate_extension_builds()
    assert f"-{os.getpid()}-" in os.environ["TORCH_EXTENSIONS_DIR"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
        isolate_extension_builds()
        assert f"-{os.getppid()}-" in os.environ["TORCH_EXTENSIONS_DIR"], "all ranks of a host have this parent"
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/chosen")
    isolate_extension_builds()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/chosen"


@pytest.mark.parametrize(("rank", "ranks"), [("0", "0"), ("2", "2"), ("9" * 30, "1")])
def test_a_rank_that_cannot_be_is_refused(
    rank: str, ranks: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert main(["selftest"]) == 2
    assert "error: RANK must be below WORLD_SIZE, the number of processes, but they are" in capsys.readouterr().err


def test_the_directory_of_extensions_goes_with_its_maker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    at_exit: list[partial[object]] = []
    monkeypatch.setattr(atexit, "register", lambda *call, **options: at_exit.append(partial(*call, **options)))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    for _ in range(2):  # only the first one makes it
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        isolate_extension_builds()
    Path(os.environ["TORCH_EXTENSIONS_DIR"], "lock").touch()
    (remove,) = at_exit
    remove()
    assert not list(tmp_path.iterdir())


def test_a_process_with_a_gpu_does_without_cudnn_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """It builds a plan for each new shape, and nearly every batch has a shape of its own."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    backends = torch.backends.cuda
    before = backends.cudnn_sdp_enabled()
    try:
        backends.enable_cudnn_sdp(True)
        prepare_gpu(torch.device("cuda", 1))
        assert chosen == [torch.device("cuda", 1)] and not backends.cudnn_sdp_enabled()
    finally:
        backends.enable_cudnn_sdp(before)
