"""Random damage to the files of a run and of a data directory."""

from __future__ import annotations

import random
import shutil
from pathlib import Path


def files_of(directory: Path) -> list[Path]:
    """All files below a directory, in order."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def damage(directory: Path, rng: random.Random) -> str:
    """Damage one file below a directory, or swap two, and describe it."""
    file = rng.choice(files_of(directory))
    kind = rng.choice([flip, flip, truncate, remove, swap, overwrite, extend])
    what = kind(file, directory, rng)
    return f"{kind.__name__} {file.relative_to(directory)} {what}"


def flip(file: Path, directory: Path, rng: random.Random) -> str:
    """Flip one bit."""
    content = bytearray(file.read_bytes())
    if not content:
        return extend(file, directory, rng)
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


def swap(file: Path, directory: Path, rng: random.Random) -> str:
    """Swap a file, or its directory, with another one of the same kind if there is one."""
    if file.parent.name.startswith("update-") and rng.random() < 0.3:
        others = [path for path in file.parent.parent.glob("update-*") if path != file.parent]
        if others:
            return exchange(file.parent, rng.choice(others), directory)
    others = [path for path in files_of(directory) if path != file]
    alike = [path for path in others if path.name == file.name or path.suffix == file.suffix]
    return exchange(file, rng.choice(alike or others), directory)


def exchange(one: Path, other: Path, directory: Path) -> str:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return f"with {other.relative_to(directory)}"


def overwrite(file: Path, directory: Path, rng: random.Random) -> str:
    """Replace a stretch by zeros or noise, as a bad block does."""
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content) + 1)
    end = min(len(content), start + rng.choice([1, 16, 512]))
    noise = bool(rng.randrange(2))
    content[start:end] = rng.randbytes(end - start) if noise else bytes(end - start)
    file.write_bytes(content)
    return f"bytes {start} to {end} by {'noise' if noise else 'zeros'}"


def extend(file: Path, directory: Path, rng: random.Random) -> str:
    """Append something."""
    more = rng.choice([b"\0", b"\n", b"}", b"x: 1\n", b"\xff\xfe"])
    with file.open("ab") as stream:
        stream.write(more)
    return f"by {more!r}"
