"""No damage to a file of a run or of a data directory changes an output in silence."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from deepspeed_nmt.cli import main
from deepspeed_nmt.run.directory import DataRecord, replace_files
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.checkpoint import Checkpoint
from tests.fuzz.conftest import Explore
from tests.support import prepare_sample

SETTINGS = [
    *("model.dim=16", "model.ffn_dim=16", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=1"),
    *("batch.update_tokens=300", "batch.micro_tokens=300", "training.validate_every=2", "training.keep_last=9"),
    *("search.beam=2", "search.max_length_ratio=1", "search.max_length_extra=5", "validation.max_sentences=3"),
    *("engine.device=cpu", "training.log_every=1", "collapse.every=0"),
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
    record = DataRecord(
        path=str(place / "data"), fingerprint=fingerprint.fingerprint, text=TextForm(), common_text=TextForm()
    )
    replace_files(
        place / "run",
        {"data.json": record.model_dump_json().encode()},
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


def files_of(directory: Path) -> list[Path]:
    """All files below a directory, in order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def damage(directory: Path, rng: random.Random) -> str:
    """Damage one file below a directory, or swap two, and describe it."""
    file = rng.choice(files_of(directory))
    kind = rng.choice([flip, flip, truncate, remove, swap, pipe])
    what = kind(file, directory, rng)
    return f"{kind.__name__} {file.relative_to(directory)} {what}"


def flip(file: Path, directory: Path, rng: random.Random) -> str:
    """Flip one bit."""
    content = bytearray(file.read_bytes())
    if not content:
        return truncate(file, directory, rng)
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"byte {place} bit {bit}"


def truncate(file: Path, directory: Path, rng: random.Random) -> str:
    """Cut the end off, as a full disk or a power failure does."""
    content = file.read_bytes()
    length = rng.choice([0, rng.randrange(len(content) + 1), max(0, len(content) - 1)])
    file.write_bytes(content[:length])
    return f"to {length} of {len(content)}"


def remove(file: Path, directory: Path, rng: random.Random) -> str:
    """Remove a file, or the directory it is in."""
    if file.parent != directory and rng.random() < 0.2:
        shutil.rmtree(file.parent)
        return "and its directory"
    file.unlink()
    return ""


def pipe(file: Path, directory: Path, rng: random.Random) -> str:
    """Put a pipe in the place of a file, to which nobody writes."""
    file.unlink()
    os.mkfifo(file)
    return ""


def swap(file: Path, directory: Path, rng: random.Random) -> str:
    """Swap a file with another one, of the same kind if there is one."""
    others = [path for path in files_of(directory) if path != file]
    alike = [path for path in others if path.name == file.name or path.suffix == file.suffix]
    other, aside = rng.choice(alike or others), file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)
    return f"with {other.relative_to(directory)}"


def test_damage(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], explore: Explore) -> None:
    status, expected = translate(sound)
    assert status == 0 and len(expected.splitlines()) == 3
    seeds = st.integers(0, 2**40)
    explore(lambda seed: try_damage(sound, tmp_path / "place", seed, expected, capsys), seeds, 100, 1200.0)
