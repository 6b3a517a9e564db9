"""Reading text once, and replacing files whatever happens."""

import fcntl
import io
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_nmt import files
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.export.certificate import Certificate
from deepspeed_nmt.files import (
    atomic_write_text,
    exclusive,
    hidden,
    open_text,
    parse_json,
    read_regular,
    remove_directory,
    remove_orphans,
    restore_directory,
    sha256_of,
    staged,
    text_lines,
)
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.run.directory import check_contents
from tests.support import ROOT


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Set the umask during the block."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_exists_keeps_its_permissions(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
    before = path.stat()
    with umask(0o027):
        atomic_write_text(path, "new")
    after = path.stat()
    assert path.read_text() == "new" and after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_new_files_follow_the_umask(mask: int, mode: int, tmp_path: Path) -> None:
    with umask(mask), staged(tmp_path / "new") as new:
        atomic_write_text(tmp_path / "file", "new")
        save_file({"weight": torch.zeros(1)}, new / "weights")  # makes a file of mode 0600, whatever the umask is
    for path in (tmp_path / "file", tmp_path / "new/weights"):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o777 & ~mask


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link to a pipe"])
def test_what_is_no_regular_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if kind == "directory":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
        path = tmp_path / "pipe" if kind == "pipe" else path
    for read in (read_regular, sha256_of):
        with pytest.raises(OSError, match=path.name) as error:
            read(path)
    assert error.value.strerror == ("Is a directory" if kind == "directory" else error.value.strerror)


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    atomic_write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "file").read_text() == "new"


KILLED = """
import os, signal, sys
from pathlib import Path
from deepspeed_nmt.files import atomic_writer
with atomic_writer(Path(sys.argv[1]), "w") as file:
    file.write("half a translation")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "file[1]"
    path.write_text("old")
    command = [sys.executable, "-c", KILLED, str(path)]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert killed.returncode == -9 and path.read_text() == "old"
    (left,) = set(tmp_path.iterdir()) - {path}
    assert left.read_text() == "half a translation"
    (tmp_path / ".file[1].notes.tmp").write_text("somebody else's")
    atomic_write_text(path, "new")
    assert {file.name for file in tmp_path.iterdir()} == {path.name, ".file[1].notes.tmp"}


def test_without_locks_files_are_written_and_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    left = hidden(tmp_path / "file", "0123abcd.tmp")
    left.touch()
    atomic_write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new" and left.exists()
    with exclusive(tmp_path / "lock", "in use by {holder}") as locked:
        assert not locked
    assert not (tmp_path / "lock").exists()


def test_a_lock_names_its_holder_and_leaves_no_file(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("process 1 on a host that lost its power")  # and its lock with it
    with exclusive(lock, "in use by {holder}") as locked:
        assert locked
        with (
            pytest.raises(DataError, match=f"in use by process {os.getpid()} on "),
            exclusive(lock, "in use by {holder}"),
        ):
            pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (victim := tmp_path / "victim").write_text("precious")
    (lock := tmp_path / "lock").symlink_to(victim)
    with exclusive(lock, "in use by {holder}") as locked:
        assert not locked
    assert victim.read_text() == "precious"


def test_exports_of_a_run_are_its_own(tmp_path: Path) -> None:
    (exports := tmp_path / "run" / "exports").mkdir(parents=True)
    check_contents(tmp_path / "run")
    (exports / "ctranslate2-fp32-0.stamp").symlink_to(tmp_path / "victim")
    with pytest.raises(DataError, match=r"0\.stamp is a link to .*victim, out of the run"):
        check_contents(tmp_path / "run")


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # fails at another bound, but in the same way
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / 'file'}'"):
            atomic_write_text(tmp_path / "file", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_streams_are_written_to_directly(capfd: pytest.CaptureFixture[str]) -> None:
    atomic_write_text(Path("/dev/null"), "nothing")
    atomic_write_text(Path("/dev/stdout"), "first\n")
    atomic_write_text(Path("/proc/self/fd/2"), "to stderr\n")
    captured = capfd.readouterr()
    assert captured.out == "first\n" and captured.err == "to stderr\n"


def test_a_directory_is_replaced_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "path"

    def replace_by(content: str) -> None:
        with staged(path) as new:
            (new / "file").write_text(content)

    replace_by("1")
    replace_by("2")
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda old, to: _refuse() if ".partial-" in old.name else rename(old, to))
    with pytest.raises(OSError, match="refused"):
        replace_by("3")
    monkeypatch.setattr(Path, "rename", rename)
    assert (path / "file").read_text() == "2" and [each.name for each in tmp_path.iterdir()] == ["path"]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    replace_by("3")
    assert (path / "file").read_text() == "3" and (tmp_path / "elsewhere" / "file").read_text() == "2"
    path.rename(tmp_path / "third")
    path.symlink_to(tmp_path / "nowhere")
    replace_by("4")
    assert (path / "file").read_text() == "4" and not list(tmp_path.glob(".*"))


def _refuse() -> Path:
    raise OSError("refused")


def test_a_removed_directory_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "path"
    path.mkdir()
    (path / "file").touch()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove_directory(path)
    (left,) = tmp_path.iterdir()
    assert not path.exists() and left.name.startswith(".path.partial-")
    restore_directory(path, lambda old: False, clear=True)
    path.mkdir()
    remove_directory(path)
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    remove_directory(path)
    remove_directory(path)
    assert [each.name for each in tmp_path.iterdir()] == ["elsewhere"]


def test_deep_nesting_is_no_json() -> None:
    with pytest.raises(ValueError, match="the nesting is too deep"):
        parse_json("[" * 200_000)


def test_orphans_of_any_file_go_and_others_stay(tmp_path: Path) -> None:
    living = tmp_path / ".best.0123abcd.tmp"
    for path in (living, tmp_path / ".config.yaml.0123abcd.tmp", tmp_path / ".mine.tmp", tmp_path / "a.0123abcd.tmp"):
        path.touch()
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_orphans(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living.name, ".mine.tmp", "a.0123abcd.tmp"}


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    message = "line 1 of /dev/zero has more than 1 MiB"
    with open_text("/dev/zero") as stream, pytest.raises(DataError, match=message):
        list(text_lines(stream, "/dev/zero"))


@pytest.mark.parametrize("change", ["notes", "sub/notes", "model.bin", "certificate.json"])
def test_only_an_export_as_it_was_written_is_replaced(change: str, tmp_path: Path) -> None:
    export = tmp_path / "export"
    Certificate.check_own(export)
    export.mkdir()
    Certificate.check_own(export)
    (export / "model.bin").write_bytes(b"weights")
    Certificate(
        **dict.fromkeys(("exporter", "run", "checkpoint", "exit", "text", "metric", "signature"), ""),
        update=3,
        precision="fp32",
        hashes=dict.fromkeys(("config.yaml", "vocabulary", "weights", "text"), "0" * 64),
        versions={},
        comparisons=(),
        weights_bytes=7,
        export_bytes=7,
        length_penalty="mean",
        logit_difference=1 / 3,
        files={"model.bin": FileRecord.of(b"weights")},
    ).write(export)
    Certificate.check_own(export)
    (export / change).parent.mkdir(exist_ok=True)
    (export / change).write_text("mine")
    with pytest.raises(DataError, match=f"--out .* has .*{change.split('/')[0]}.*; move"):
        Certificate.check_own(export)
    assert (export / change).read_text() == "mine"


def test_the_temporary_file_of_a_living_writer_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with files.atomic_writer(path, "w") as slow:
        slow.write("of the slow writer")
        atomic_write_text(path, "of the fast one")
        assert path.read_text() == "of the fast one" and len(list(tmp_path.iterdir())) == 2
    assert path.read_text() == "of the slow writer" and list(tmp_path.iterdir()) == [path]


def test_a_lock_file_removed_by_its_holder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, locked = fcntl.flock, []

    def late(file: io.IOBase, operation: int) -> None:
        locked.append(file)
        if len(locked) == 1:  # the holder ends in the moment between opening and locking
            (tmp_path / "lock").unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with exclusive(tmp_path / "lock", "") as held:
        assert held and len(locked) == 2 and (tmp_path / "lock").exists()
