"""Ranks from the environment of launchers, and the rank that reports errors."""

import os
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import ConfigError, ReportedError
from deepspeed_nmt.parallel import launched, watchdog, world
from deepspeed_nmt.parallel.collectives import await_ranks
from deepspeed_nmt.parallel.hardware import prepare_gpu
from deepspeed_nmt.parallel.launched import isolate_extension_builds, once_per_host, place
from deepspeed_nmt.parallel.shared_work import local_store

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
    ],
    ids=["python", "torchrun", "torchrun within srun", "srun", "batch script", "interactive step"],
)
def test_ranks_of_launchers(
    environment: dict[str, str], found: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert place() == found


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


@pytest.mark.parametrize("kind", ["link", "open to others", "file", "of another user"])
def test_a_directory_of_extensions_that_others_can_change_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    (tmp_path / "mine").mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    name = tmp_path / f"torch_extensions-{os.getuid()}-{os.getpid()}-0"
    if kind == "link":
        name.symlink_to(tmp_path / "mine")
    elif kind == "file":
        name.touch(mode=0o600)
    else:
        name.mkdir()
        name.chmod(0o770 if kind == "open to others" else 0o700)
    if kind == "of another user":
        monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result((0o40700, 1, 1, 1, os.getuid() + 1, *[0] * 5)))
    with pytest.raises(ConfigError, match=rf"{name.name}.*TORCH_EXTENSIONS_DIR"):
        isolate_extension_builds()
    assert "TORCH_EXTENSIONS_DIR" not in os.environ


def test_the_store_of_workers_listens_on_this_host_only() -> None:
    store = local_store()
    listening = [each.laddr for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]
    other = torch.distributed.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"


CUDA_13 = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "compute_120"]


def test_a_torch_without_kernels_for_its_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, before anything is done on the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_13)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    sentence = r"torch .* no kernels for the Tesla V100 \(sm_70\), only for sm_75, .* requirements/v100\.txt`"
    with pytest.raises(ConfigError, match=f"^{sentence}$"):  # a Translator
        prepare_gpu(torch.device("cuda", 0))
    with pytest.raises(ConfigError, match=f"^{sentence}; .*doctor"):  # a training
        world.join_world("auto")


@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_command_lets_blocks_of_gpu_memory_grow_unless_the_user_decides(
    own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "max_split_size_mb:64")
        if name != own:
            monkeypatch.delenv(name)
    assert main(["recipes"]) == 0
    set_here = os.environ.get("PYTORCH_ALLOC_CONF")
    assert set_here == {None: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}.get(own)


def test_a_rank_that_reads_the_result_of_a_collective_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under NCCL the call itself has returned long before."""
    thread = threading.Thread(target=lambda: await_ranks(lambda: released.wait(60)))
    released = threading.Event()
    monkeypatch.setattr(watchdog.threading, "main_thread", lambda: thread)
    thread.start()
    try:
        while not (seen := watchdog._main_thread())[0]:
            assert thread.is_alive()
        assert "collectives.py" not in seen[1]  # the line of its caller is what tells
    finally:
        released.set()
        thread.join()
    monkeypatch.undo()
    assert not watchdog._main_thread()[0]
