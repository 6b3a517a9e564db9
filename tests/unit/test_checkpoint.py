"""Checkpoints are written completely or not at all, and verified before use."""

import errno
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_nmt import manifest
from deepspeed_nmt.engine.contract import EngineScalars, ParameterState
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.train import checkpoint as store_module
from deepspeed_nmt.train.checkpoint import Checkpoint, CheckpointStore
from deepspeed_nmt.train.progress import Progress


def states(value: float, seen: list[str] | None = None) -> Iterator[ParameterState]:
    """Yield three parameters filled with a value, and append their names to ``seen``."""
    for name in ("a", "b.weight", "c"):
        if seen is not None:
            seen.append(name)
        moments = {"exp_avg": torch.full((2, 3), value / 2), "exp_avg_sq": torch.full((2, 3), value / 4)}
        yield ParameterState(name, torch.full((2, 3), value), moments)


def progress(update: int, best: int = 0) -> Progress:
    return Progress(update=update, epoch=1, best_score=3.5 if best else None, best_update=best)


def save(store: CheckpointStore, update: int, best: int = 0) -> None:
    store.save(progress(update, best), EngineScalars(update, 8.0, 2), states(update))


def damage(store: CheckpointStore, update: int) -> None:
    file = store.directory / f"update-{update:07d}" / "weights-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=3)


def newest(store: CheckpointStore) -> Checkpoint:
    found = store.newest()
    assert found is not None
    return found


def test_a_saved_checkpoint_is_restored(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SHARD_BYTES", 30)  # several shards
    assert store.newest() is None
    save(store, 7)
    found = newest(store)
    assert found.progress == progress(7) and found.scalars == EngineScalars(7, 8.0, 2)
    assert set(found.weights()) == {"a", "b.weight", "c"} and found.resumable
    assert torch.equal(found.weight("b.weight"), torch.full((2, 3), 7.0))
    assert torch.equal(found.optimizer_state("c", "exp_avg_sq"), torch.full((2, 3), 1.75))
    assert len(list(found.path.glob("weights-*.safetensors"))) == 3
    kinds = {file.suffix for file in found.path.iterdir()}
    assert kinds == {".safetensors", ".json", ".sha256"}, "nothing is pickled"


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "no manifest", "pipe"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    store: CheckpointStore, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    save(store, 2)
    file = store.directory / "update-0000002" / "optimizer-00001.safetensors"
    data = file.read_bytes()
    if harm in ("flip", "truncate"):
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if harm == "flip" else data[:-5])
    elif harm == "remove":
        file.unlink()
    else:
        (file.parent / "manifest.json").unlink()
        if harm == "pipe":
            os.mkfifo(file.parent / "manifest.json")
    assert newest(store).progress.update == 1
    assert "using update-0000001, because update-0000002 is damaged" in caplog.text


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for update in range(1, 7):
        save(store, update, best=2)
    assert store.names() == ["update-0000002", "update-0000004", "update-0000005", "update-0000006"]
    assert store.open("best").progress.update == 2 and store.open("last").progress.update == 6


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), "safetensors"])
def test_a_full_disk_keeps_the_existing_checkpoints(
    store: CheckpointStore, error: OSError | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, best=1)

    def full(*_: object) -> None:
        raise store_module.SafetensorError("No space left on device") if isinstance(error, str) else error

    monkeypatch.setattr(store_module, "save_file", full)
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)
    seen: list[str] = []
    with pytest.raises(OSError, match="No space left"):
        store.save(progress(2, best=2), EngineScalars(), states(2.0, seen))
    assert seen == ["a", "b.weight", "c"], "all parameters are read, because other ranks take part"
    assert newest(store).progress.update == 1 and store.open("best").progress.update == 1
    assert sorted(path.name for path in store.directory.iterdir()) == ["best", "latest", "update-0000001"]


def test_the_pointer_to_a_best_checkpoint_goes_with_it(store: CheckpointStore) -> None:
    store.directory.mkdir()
    (store.directory / "best").write_text("update-0000009\n")
    save(store, 1)
    assert not (store.directory / "best").exists() and (store.directory / "latest").read_text() == "update-0000001\n"


def test_what_a_killed_process_left_goes_with_the_next_checkpoint(store: CheckpointStore) -> None:
    # Of an update that this run does not save, and of an average.
    for name in (".update-0000003.partial-01234567", ".average.partial-01234567"):
        (store.directory / name).mkdir(parents=True)
    store.restore()
    assert len(list(store.directory.glob(".*"))) == 2, "another process may be writing"
    save(store, 4)
    assert sorted(each.name for each in store.directory.glob(".*")) == [".average.partial-01234567"]
    store.save_average([store.read("update-0000004")])
    assert not list(store.directory.glob(".*"))


def killed_between_the_renames(store: CheckpointStore, update: int) -> None:
    """Write a checkpoint of other progress in a process that is killed once the old one is moved away."""
    child = os.fork()
    if child == 0:
        rename = Path.rename

        def die_at(path: Path, target: Path) -> Path:
            if ".partial-" in path.name:
                os.kill(os.getpid(), signal.SIGKILL)
            return rename(path, target)

        Path.rename = die_at  # type: ignore[method-assign]
        store.save(Progress(update=update, train_seconds=9.0), EngineScalars(), states(5.0))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_checkpoint_that_a_killed_process_moved_away_is_restored(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 7)
    killed_between_the_renames(store, 7)
    assert store.names() == []
    store.restore()  # what is left of the new one may be written by a process that lives
    assert newest(store).weight("a")[0, 0] == 7.0 and "update-0000007 is restored: a killed" in caplog.text
    assert len(list(store.directory.glob(".update-*"))) == 1
    killed_between_the_renames(store, 7)
    save(store, 8)
    assert store.names() == ["update-0000007", "update-0000008"] and not list(store.directory.glob(".update-*"))
    assert store.read("update-0000007").progress == progress(7)


def test_an_average_is_the_mean_and_cannot_be_resumed(store: CheckpointStore) -> None:
    for update in (1, 2, 6):
        save(store, update)
    path = store.save_average([store.read(name) for name in store.names()])
    average = store.open("average")
    assert average.path == path and not average.resumable
    assert torch.equal(average.weight("a"), torch.full((2, 3), 3.0))
    assert newest(store).progress.update == 6, "training does not resume from an average"


def test_a_missing_or_damaged_checkpoint_is_named(store: CheckpointStore) -> None:
    for which, message in (("best", "train first"), ("average", "has no average"), ("nowhere", "is nowhere")):
        with pytest.raises(CheckpointError, match=message):
            store.open(which)
    save(store, 1)
    with pytest.raises(CheckpointError, match="was not validated yet; use --from-checkpoint last"):
        store.open("best", "--from-checkpoint")
    save(store, 2, best=2)
    damage(store, 2)
    with pytest.raises(CheckpointError, match="is damaged"):
        store.open("best")
    without_best = CheckpointStore(store.directory, keep_last=1, keep_best=False)
    save(without_best, 3, best=2)
    with pytest.raises(CheckpointError, match=r"that of update 2 was not kept \(training\.keep_best\)"):
        without_best.open("best")
    damage(store, 3)
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged"):
        store.newest()


def test_a_retrained_update_replaces_a_damaged_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2, best=2)
    damage(store, 2)
    save(store, 2, best=2)
    assert newest(store).progress.update == 2 and store.open("best").progress.update == 2


def test_a_damaged_later_checkpoint_does_not_displace_an_intact_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 8)
    damage(store, 8)
    save(store, 5)
    save(store, 6)
    assert newest(store).progress.update == 6 and store.names() == ["update-0000006", "update-0000008"]


def test_skipped_updates_do_not_displace_the_checkpoint_of_a_rollback(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    save(store, 2)
    for skipped, update in enumerate((3, 4, 5), 1):
        store.save(Progress(update=update, skipped=skipped), EngineScalars(2), states(2))
    assert store.names() == ["update-0000002", "update-0000005"]
    save(store, 6)
    assert store.names() == ["update-0000006"], "the streak is over"


def test_files_hashed_by_another_rank_are_checked_by_size(store: CheckpointStore) -> None:
    save(store, 1)
    file = store.directory / "update-0000001" / "weights-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert Checkpoint(file.parent, verify=False).progress.update == 1
    damage(store, 1)
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpoint(file.parent, verify=False)


def test_a_run_can_be_rewound_to_an_older_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for update in (1, 2, 4):
        save(store, update, best=4 if update == 4 else 1)
    found = store.newest(until=3)
    assert found is not None and found.progress.update == 2 and store.newest(until=0) is None
    for place in (7, 8):  # twice
        store.rewind(found, replace(progress(2, best=1), epoch_update=place))
        found = newest(store)
        assert found.path.name == "update-0000002" and found.progress.epoch_update == place
        assert found.scalars == EngineScalars(2, 8.0, 2), "only the position changes"
        assert torch.equal(found.weight("a"), torch.full((2, 3), 2.0))
    assert store.names() == ["update-0000001", "update-0000002"]
    assert store.open("last").progress.update == 2 and store.open("best").progress.update == 1
    save(store, 4)
    assert newest(store).progress.epoch_update == 0, "the checkpoint is written again"


def test_a_failed_rewind_changes_nothing(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    write, calls = manifest.atomic_write_bytes, []

    def full(path: Path, content: bytes) -> None:
        calls.append(path.name)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(manifest, "atomic_write_bytes", full)
    for failing in (1, 2, 3):
        calls.clear()
        with pytest.raises(OSError, match="No space left"):
            store.rewind(newest(store), Progress(update=1, epoch_update=7))
        assert newest(store).progress.epoch_update == (7 if failing == 3 else 0), "the old one or the new one"
    assert calls == ["manifest.json.sha256", "manifest.json", "manifest.json.sha256"]


def edit(directory: Path, **changes: Any) -> None:
    """Change a manifest, and give it the hash that it then has."""
    file = directory / "manifest.json"
    manifest.write_record(file, json.dumps({**json.loads(file.read_text()), **changes}).encode())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": {"weights-00001.safetensors": ["a", "z", "c"]}}, "names other tensors than weights-00001"),
        ({"weights": {"../../x.safetensors": ["a"]}}, r"weights.../../x.safetensors"),
        ({"files": {}}, "optimizer-00001.safetensors has no hash"),
        ({"format": 99}, "its content is wrong: format is 99; give 2"),
        ({"run": "run.json"}, "run.json has no hash"),
        ({"state": "/dev/zero"}, "state [^;]*dev/zero"),
    ],
)
def test_a_checkpoint_with_a_bad_manifest_is_passed_over(
    store: CheckpointStore, changes: dict[str, Any], message: str
) -> None:
    save(store, 1)
    save(store, 2)
    edit(store.directory / "update-0000002", **changes)
    assert newest(store).progress.update == 1
    with pytest.raises(CheckpointError, match=message):
        store.read("update-0000002")


@pytest.mark.parametrize("harm", ["other manifest", "no hash", "renamed"])
def test_a_manifest_is_checked_itself(store: CheckpointStore, harm: str) -> None:
    save(store, 1)
    save(store, 2)
    file = store.directory / "update-0000002" / "manifest.json"
    if harm == "other manifest":
        file.write_text(file.read_text().replace("b.weight", "b.height"))
    elif harm == "no hash":
        (file.parent / "manifest.json.sha256").unlink()
    else:
        file.parent.rename(store.directory / "update-0000003")
    assert newest(store).progress.update == 1


@pytest.mark.parametrize("junk", [b"\xff\x00", b"../elsewhere", b"update-0000009", None])
def test_pointers_are_rebuilt_from_the_checkpoints(store: CheckpointStore, junk: bytes | None) -> None:
    save(store, 1, best=1)
    (store.directory / "update-junk").mkdir()
    for update in range(2, 7):
        for pointer in ("best", "latest"):
            (store.directory / pointer).unlink()
            if junk is not None:
                (store.directory / pointer).write_bytes(junk)
        assert store.open("best").progress.update == 1 and store.open("last").progress.update == update - 1
        save(store, update, best=1)
    assert (store.directory / "best").read_text() == "update-0000001\n"
    assert (store.directory / "latest").read_text() == "update-0000006\n"


def test_checkpoints_that_are_links_are_rotated_and_replaced(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, 1)
    (store.directory / "update-0000001").rename(tmp_path / "elsewhere")
    for name in ("update-0000001", "update-0000002"):
        (store.directory / name).symlink_to(tmp_path / "elsewhere")
    (store.directory / "update-0000003").symlink_to(tmp_path / "nowhere")
    for update in range(2, 5):
        save(store, update)
    assert store.names() == ["update-0000002", "update-0000003", "update-0000004"]
    assert not any((store.directory / name).is_symlink() for name in store.names())
    assert (tmp_path / "elsewhere" / "manifest.json").exists(), "what a link leads to stays"
