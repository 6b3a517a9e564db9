"""Checkpoints: written whole or not at all, checked before they are trusted."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.engine.base import EngineScalars, ParameterState
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.train import checkpoint as checkpoint_module
from deepspeed_nmt.train import store as store_module
from deepspeed_nmt.train.checkpoint import Checkpoint
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.store import CheckpointStore


def states(value: float, seen: list[str] | None = None) -> Iterator[ParameterState]:
    """Three parameters filled with a value; names go to ``seen`` as they are taken."""
    for name in ("a", "b.weight", "c"):
        if seen is not None:
            seen.append(name)
        moments = {"exp_avg": torch.full((2, 3), value / 2), "exp_avg_sq": torch.full((2, 3), value / 4)}
        yield ParameterState(name, torch.full((2, 3), value), moments)


def save(store: CheckpointStore, update: int, best: bool = False) -> None:
    store.save(Progress(update=update, epoch=1, best_score=3.5), EngineScalars(update, 8.0, 2), states(update), best)


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


def test_what_is_saved_comes_back(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_SHARD_BYTES", 30)  # several shards
    assert store.newest() is None
    save(store, 7)
    found = newest(store)
    assert found.progress == Progress(update=7, epoch=1, best_score=3.5) and found.scalars == EngineScalars(7, 8.0, 2)
    assert set(found.weights()) == {"a", "b.weight", "c"} and found.resumable
    assert torch.equal(found.weight("b.weight"), torch.full((2, 3), 7.0))
    assert torch.equal(found.moment("c", "exp_avg_sq"), torch.full((2, 3), 1.75))
    assert len(list(found.path.glob("weights-*.safetensors"))) == 3
    kinds = {file.suffix for file in found.path.iterdir()}
    assert kinds == {".safetensors", ".json"}, "nothing is pickled"


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    store: CheckpointStore, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    save(store, 2)
    file = store.directory / "update-0000002" / "moments-00001.safetensors"
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif harm == "truncate":
        file.write_bytes(data[:-5])
    elif harm == "remove":
        file.unlink()
    else:
        (store.directory / "update-0000002" / "manifest.json").write_text("{")
    assert newest(store).progress.update == 1
    assert "resuming from update-0000001, because update-0000002 is damaged" in caplog.text


def test_when_none_can_be_trusted_it_says_so(store: CheckpointStore) -> None:
    save(store, 1)
    (store.directory / "update-0000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"all checkpoints .* are damaged \(update-0000001\)"):
        store.newest()


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for update in range(1, 7):
        save(store, update, best=update == 2)
    assert store.names() == ["update-0000002", "update-0000004", "update-0000005", "update-0000006"]
    assert store.open("best").progress.update == 2 and store.open("last").progress.update == 6


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), "safetensors"])
def test_a_full_disk_leaves_what_there_was(
    store: CheckpointStore, error: OSError | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1, best=True)

    def full(*_: object) -> None:
        raise store_module.SafetensorError("No space left on device") if isinstance(error, str) else error

    monkeypatch.setattr(store_module, "save_file", full)
    monkeypatch.setattr(store_module, "_SHARD_BYTES", 1)
    seen: list[str] = []
    with pytest.raises(OSError, match="No space left"):
        store.save(Progress(update=2), EngineScalars(), states(2.0, seen), best=True)
    assert seen == ["a", "b.weight", "c"], "other ranks take part in all of it"
    assert newest(store).progress.update == 1 and store.open("best").progress.update == 1
    assert sorted(path.name for path in store.directory.iterdir()) == ["best", "latest", "update-0000001"]


def test_what_a_killed_process_left_goes_with_the_next_checkpoint(store: CheckpointStore) -> None:
    for name in (".update-0000003.tmp", ".average.tmp"):  # of an update that this run does not save, and another's
        (store.directory / name).mkdir(parents=True)
    save(store, 4)
    assert sorted(each.name for each in store.directory.glob(".*")) == [".average.tmp"]
    store.save_average([store.directory / "update-0000004"])
    assert not list(store.directory.glob(".*"))


def test_an_average_is_the_mean_and_cannot_be_resumed(store: CheckpointStore) -> None:
    for update in (1, 2, 6):
        save(store, update)
    path = store.save_average([store.directory / name for name in store.names()])
    average = store.open("average")
    assert average.path == path and not average.resumable
    assert torch.equal(average.weight("a"), torch.full((2, 3), 3.0))
    assert newest(store).progress.update == 6, "an average is not where training continues"


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("last", "must hold a checkpoint, but is empty; train first"),
        ("best", "must hold a checkpoint, but is empty; train first"),
        ("average", "has no average; make one"),
        ("nowhere", "--checkpoint must be best, last, average or the path of a checkpoint, but there is no"),
    ],
)
def test_a_missing_checkpoint_is_named(store: CheckpointStore, which: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        store.open(which)


def test_a_run_without_a_best_checkpoint_names_the_users_option(store: CheckpointStore) -> None:
    save(store, 1)
    with pytest.raises(CheckpointError, match="was not validated yet; use --from-checkpoint last"):
        store.open("best", "--from-checkpoint")


def test_a_damaged_best_checkpoint_names_a_way_out(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2, best=True)
    damage(store, 2)
    with pytest.raises(CheckpointError, match=r"is damaged; use --checkpoint last, .* or start `train` again"):
        store.open("best")


def test_a_retrained_update_replaces_a_damaged_checkpoint(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2, best=True)
    damage(store, 2)
    save(store, 2)
    assert newest(store).progress.update == 2 and store.open("best").progress.update == 2


def test_a_good_checkpoint_is_kept_only_if_it_is_the_same(store: CheckpointStore) -> None:
    save(store, 2)
    before = (store.directory / "update-0000002").stat().st_ino
    save(store, 2)
    assert (store.directory / "update-0000002").stat().st_ino == before
    store.save(Progress(update=2, train_seconds=9.0), EngineScalars(), states(5.0), best=False)
    assert torch.equal(newest(store).weight("a"), torch.full((2, 3), 5.0))


def test_a_damaged_later_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 8)
    damage(store, 8)
    save(store, 5)
    save(store, 6)
    assert newest(store).progress.update == 6 and store.names() == ["update-0000006", "update-0000008"]


def test_skipped_updates_do_not_push_out_what_a_run_rolls_back_to(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    save(store, 1)
    save(store, 2)
    for skipped, update in enumerate((3, 4, 5), 1):
        store.save(Progress(update=update, skipped=skipped), EngineScalars(2), states(2), best=False)
    assert store.names() == ["update-0000002", "update-0000005"]
    save(store, 6)
    assert store.names() == ["update-0000006"], "the streak is over"


def test_only_sizes_are_compared_of_what_another_rank_has_hashed(store: CheckpointStore) -> None:
    save(store, 1)
    file = store.directory / "update-0000001" / "weights-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert Checkpoint(file.parent, verify=False).progress.update == 1
    damage(store, 1)
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpoint(file.parent, verify=False)


def test_the_manifest_tells_which_file_holds_what(store: CheckpointStore) -> None:
    save(store, 1)
    manifest = json.loads((store.directory / "update-0000001" / "manifest.json").read_text())
    assert manifest["weights"] == {"weights-00001.safetensors": ["a", "b.weight", "c"]}
    assert len(manifest["files"]["weights-00001.safetensors"]["sha256"]) == 64


def test_a_run_can_be_rewound_to_an_older_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=9)
    for update in (1, 2, 4):
        save(store, update, best=update == 4)
    found = store.newest(until=3)
    assert found is not None and found.progress.update == 2 and store.newest(until=0) is None
    for place in (7, 8):  # and again
        store.rewind(found, Progress(update=2, epoch_update=place, best_update=1))
        found = newest(store)
        assert found.path.name == "update-0000002" and found.progress.epoch_update == place
        assert found.scalars == EngineScalars(2, 8.0, 2), "all but the place is as it was"
        assert torch.equal(found.weight("a"), torch.full((2, 3), 2.0))
    assert store.names() == ["update-0000001", "update-0000002"]
    assert store.open("last").progress.update == 2 and store.open("best").progress.update == 1
    save(store, 4)
    assert newest(store).progress.epoch_update == 0, "written anew"


def test_rewinding_that_fails_leaves_what_there_was(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    write, calls = checkpoint_module.atomic_write_text, []

    def full(path: Path, text: str) -> None:
        calls.append(path.name)
        if path.name == "manifest.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, text)

    monkeypatch.setattr(checkpoint_module, "atomic_write_text", full)
    with pytest.raises(OSError, match="No space left"):
        store.rewind(newest(store), Progress(update=1, epoch_update=7))
    assert calls[0].startswith("state-") and newest(store).progress.epoch == 1
