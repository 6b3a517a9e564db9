"""No damage to a file of a run or of a data directory changes an output in silence."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.cli import main
from deepspeed_nmt.run.manifest import DataRecord, replace_files
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.fuzz.damage import damage
from tests.fuzz.exploring import HOURS
from tests.support import prepare_sample

SETTINGS = [
    *("model.dim=16", "model.ffn_dim=16", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"),
    *("batch.update_tokens=300", "batch.micro_tokens=300", "training.validate_every=2", "training.keep_last=9"),
    *(
        "search.beam=2",
        "search.max_length_ratio=1",
        "search.max_length_extra=5",
        "validation.max_sentences=3",
        "collapse.every=0",
    ),
    *("engine.device=cpu", "training.log_every=1"),
]
SENTENCES = "The dog sees a house.\nA man reads books.\nWhen did they sleep?\n"
DOCUMENTED = {0, 1, 2}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a data directory and a run of four updates; after/ is the run two updates later."""
    directory = tmp_path_factory.mktemp("sound")
    prepare_sample(directory, 300, train=120, valid=7, test=7)
    assert train(directory, 4) == 0
    shutil.copytree(directory / "run", directory / "four")
    assert train(directory, 6) == 0
    (directory / "run").rename(directory / "after")
    (directory / "four").rename(directory / "run")
    (directory / "in").write_text(SENTENCES)
    return directory


def train(directory: Path, updates: int) -> int:
    words = ["train", "--data", str(directory / "data"), "--run", str(directory / "run"), *SETTINGS]
    return main([*words, f"training.max_updates={updates}"])


def translate(directory: Path) -> tuple[int, str]:
    output = directory / "out"
    output.unlink(missing_ok=True)
    words = ["--run", str(directory / "run"), "--input", str(directory / "in"), "--output", str(output)]
    status = main(["translate", *words])
    return status, output.read_text() if output.exists() else ""


def weights(run: Path) -> dict[str, torch.Tensor]:
    return Checkpoint(run / "checkpoints" / "update-0000006").weights()


def try_damage(sound: Path, place: Path, seed: int, expected: str, errors: pytest.CaptureFixture[str]) -> None:
    """Damage a copy once or twice, use it, and compare what comes out with what comes out of the sound one."""
    rng = random.Random(seed)
    shutil.rmtree(place, ignore_errors=True)
    for name in ("run", "data"):
        shutil.copytree(sound / name, place / name)
    shutil.copy(sound / "in", place / "in")
    fingerprint = Checkpoint(sound / "run/checkpoints/update-0000004").run
    assert fingerprint is not None
    replace_files(
        place / "run",
        {"data.json": DataRecord(path=str(place / "data"), fingerprint=fingerprint.fingerprint).content()},
    )
    target = place / rng.choice(["run", "run", "data"])
    done = [damage(target, rng) for _ in range(rng.choice([1, 1, 2]))]
    told = f"seed {seed}: {'; '.join(done)}"
    errors.readouterr()
    try:
        if rng.random() < 0.75:
            status, output = translate(place)
            assert status in DOCUMENTED, told
            assert status != 0 or output == expected, told
        else:
            status = train(place, 6)
            assert status in DOCUMENTED, told
            if status == 0:
                after, reference = weights(place / "run"), weights(sound / "after")
                assert after.keys() == reference.keys(), told
                assert all(torch.equal(after[name], reference[name]) for name in after), told
    except Exception as error:
        raise AssertionError(told) from error
    said = errors.readouterr().err
    assert "Traceback" not in said and (status == 0 or "error: " in said), f"{told}\n{said}"


def test_damage(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, expected = translate(sound)
    assert status == 0 and len(expected.splitlines()) == 3
    for seed in range(200):
        try_damage(sound, tmp_path / "place", seed, expected, capsys)


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_damage_for_twenty_minutes(
    sound: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    _, expected = translate(sound)
    rng, end, done = random.Random(), time.monotonic() + 1200.0 * HOURS, 0
    while time.monotonic() < end:
        try_damage(sound, tmp_path / "place", rng.randrange(2**40), expected, capsys)
        done += 1
    record_property("tried", f"{done} cases of damage")
