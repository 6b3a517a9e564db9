"""Fill a directory with the wheels of a lock and of what it requires. launch/wheelhouse.sh runs it.

The machine that installs may have another Python and another processor than this one. pip's own download of
dependencies evaluates their markers for this machine, so they are followed here.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

# A new virtual environment has pip and nothing else.
from pip._vendor.packaging.markers import default_environment
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
PACKAGE = ("setup.py", "pyproject.toml", "README.md", "deepspeed_nmt", "ds_configs")
"""Files from which the wheel of this package is built."""
FURTHER = ("test", "docs")
"""Locks in addition to that of a kind of machine."""
SOURCE_ONLY = ("deepspeed",)
"""Distributions without a published wheel. They are built here, and must be pure Python."""
GLIBC = range(28, 4, -1)
"""Minor versions of the glibc 2.N that wheels may be for. Debian 10 and RHEL 8 have 2.28."""


class WheelhouseError(Exception):
    """An error that the user can correct."""


@dataclass(frozen=True)
class Target:
    """A kind of machine that installs.

    Args:
        lock: name of the lock.
        python: version of Python, such as 3.12.
        machine: processor, such as x86_64.
        also: names of further locks.
    """

    lock: str
    python: str
    machine: str
    also: tuple[str, ...]

    @property
    def text(self) -> str:
        """Content of wheelhouse.txt, which launch/lib.sh reads."""
        return f"lock={self.lock}\npython={self.python}\nmachine={self.machine}\nalso={' '.join(self.also)}\n"

    @cached_property
    def environment(self) -> dict[str, str]:
        """Values of the variables of markers."""
        version = {"python_version": self.python, "python_full_version": f"{self.python}.0"}
        system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
        return {**default_environment(), **version, **system, "platform_machine": self.machine}

    def needs(self, requirement: Requirement, extra: str = "") -> bool:
        """Return True if the marker of a requirement holds."""
        return requirement.marker is None or requirement.marker.evaluate({**self.environment, "extra": extra})

    @property
    def pip_options(self) -> list[str]:
        """Options of `pip download` that select wheels."""
        tags = [f"manylinux_2_{minor}" for minor in GLIBC] + ["manylinux2014", "manylinux2010", "manylinux1", "linux"]
        platforms = [f"--platform={tag}_{self.machine}" for tag in tags]
        return ["--only-binary=:all:", f"--python-version={self.python}", "--implementation=cp", *platforms]


@dataclass(frozen=True)
class Wheel:
    """A wheel in the directory."""

    path: Path
    name: str
    version: str
    requires: tuple[Requirement, ...]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        """Read the metadata of a wheel."""
        try:
            with zipfile.ZipFile(path) as archive:
                (name,) = (each for each in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
                found = email.message_from_bytes(archive.read(name))
        except (zipfile.BadZipFile, ValueError):
            raise WheelhouseError(f"{path} is damaged; remove it and start this script again") from None
        requires = tuple(Requirement(text) for text in found.get_all("Requires-Dist", []))
        return cls(path, canonicalize_name(found["Name"]), found["Version"], requires)


def read_lock(name: str) -> tuple[list[Requirement], list[str]]:
    """Return the requirements and the indexes of a lock, with those of the files that it includes."""
    requirements: list[Requirement] = []
    indexes: list[str] = []
    for raw in (LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        line = raw.split("#")[0].strip()
        if line.startswith("-r "):
            included = read_lock(Path(line[3:].strip()).stem)
            requirements += included[0]
            indexes += included[1]
        elif line.startswith("--extra-index-url"):
            indexes += line.split()
        elif line and not line.startswith("-"):
            requirements.append(Requirement(line))
    return requirements, indexes


def pip(*words: str | Path) -> None:
    """Run pip."""
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=False)
    if done.returncode:
        raise WheelhouseError(
            "pip could not fetch what is needed; correct the error above, and start this script again"
        )


def wheels_in(directory: Path) -> list[Wheel]:
    return [Wheel.read(path) for path in sorted(directory.glob("*.whl"))]


def met(requirement: Requirement, wheels: Iterable[Wheel]) -> Iterator[Wheel]:
    """Yield the wheels that meet a requirement."""
    for wheel in wheels:
        same = wheel.name == canonicalize_name(requirement.name)
        if same and requirement.specifier.contains(wheel.version, prereleases=True):
            yield wheel


def follow(
    roots: Iterable[Requirement], wheels: Sequence[Wheel], target: Target
) -> tuple[list[Wheel], list[Requirement]]:
    """Return the wheels that requirements and their dependencies need, and the requirements that none meets."""
    needed: dict[Path, Wheel] = {}
    unmet: dict[str, Requirement] = {}
    followed: set[tuple[Path, str]] = set()
    queue = [root for root in roots if target.needs(root)]
    while queue:
        requirement = queue.pop()
        found = list(met(requirement, wheels))
        if not found:
            unmet[str(requirement)] = requirement
        for wheel in found[-1:]:
            needed[wheel.path] = wheel
            for extra in ("", *requirement.extras):
                if (wheel.path, extra) not in followed:
                    followed.add((wheel.path, extra))
                    queue += [each for each in wheel.requires if target.needs(each, extra)]
    return list(needed.values()), list(unmet.values())


def build(out: Path, what: str) -> None:
    """Build a wheel of pure Python from a requirement or from a directory with sources."""
    with tempfile.TemporaryDirectory() as scratch:
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, what)
        (wheel,) = Path(scratch).glob("*.whl")
        if not wheel.name.endswith("-none-any.whl"):
            raise WheelhouseError(
                f"the wheel of {what} is {wheel.name}, which is not pure Python; unset DS_BUILD_OPS, and start again"
            )
        shutil.move(wheel, out / wheel.name)


def build_package(out: Path) -> None:
    """Build the wheel of this package, from a copy, in which nothing of an earlier build is left."""
    with tempfile.TemporaryDirectory() as scratch:
        for name in PACKAGE:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, Path(scratch, name), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, scratch)
        for old in out.glob("deepspeed_nmt-*.whl"):
            old.unlink()
        build(out, scratch)


def fill(out: Path, target: Target) -> list[Wheel]:
    """Download and build all that the directory lacks, and return the wheels that it needs."""
    pins: dict[str, Requirement] = {}
    indexes: list[str] = []
    for name in (target.lock, *target.also):
        found = read_lock(name)
        pins |= {str(each): each for each in found[0] if target.needs(each)}
        indexes += found[1]
    build_package(out)
    for pin in pins.values():
        if canonicalize_name(pin.name) in SOURCE_ONLY and not list(met(pin, wheels_in(out))):
            build(out, plain(pin))
    roots = [Requirement("deepspeed_nmt"), *pins.values()]
    options = ["--progress-bar=off", "--dest", out, "--find-links", out, "--no-deps", *target.pip_options]
    # Locks pin all; the constraints pin what one lock requires of another one, which is not asked for.
    options += [f"--constraint={LOCKS / name}.txt" for name in ("common", "test")]
    # pip asks the index of PyTorch for each package. If it cannot be reached, that takes many retries.
    common = {canonicalize_name(each.name) for name in ("common", *FURTHER) for each in read_lock(name)[0]}
    while True:
        needed, unmet = follow(roots, wheels_in(out), target)
        if not unmet:
            return needed
        if usual := [plain(each) for each in unmet if canonicalize_name(each.name) in common]:
            pip("download", *options, *usual)
        if rest := [plain(each) for each in unmet if canonicalize_name(each.name) not in common]:
            pip("download", *options, *indexes, *rest)
        if follow(roots, wheels_in(out), target)[1] == unmet:
            lacking = ", ".join(map(str, unmet))
            raise WheelhouseError(
                f"{lacking} is not among the wheels of {out}, because pip found another version; correct the lock"
            )


def plain(requirement: Requirement) -> str:
    """Return a requirement without marker and extras: pip evaluates markers for this machine."""
    return f"{requirement.name}{requirement.specifier}"


def claim(out: Path, target: Target) -> None:
    """Make the directory, unless it is written by this script.

    Raises:
        WheelhouseError: if it has other files, or is for another kind of machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    mark = out / "wheelhouse.txt"
    if not mark.exists() and any(out.iterdir()):
        raise WheelhouseError(f"{out} has files that this script has not written; give another --out")
    if mark.exists():
        words = mark.read_text(encoding="utf-8").split("also=")[0]
        if words != target.text.split("also=")[0]:
            raise WheelhouseError(f"{out} is for {', '.join(words.split())}; give another --out")
    (out / "SHA256SUMS").unlink(missing_ok=True)  # incomplete from now on
    mark.write_text(target.text, encoding="utf-8")


def finish(out: Path, target: Target, needed: Sequence[Wheel]) -> None:
    """Write what pip and sha256sum read."""
    pins = sorted(f"{wheel.name}=={wheel.version}" for wheel in needed)
    (out / "requirements.txt").write_text("\n".join([*pins, ""]), encoding="utf-8")
    files = sorted([*(wheel.path for wheel in needed), out / "requirements.txt", out / "wheelhouse.txt"])
    sums = "".join(f"{digest(path)}  {path.name}\n" for path in files)
    (out / "SHA256SUMS").write_text(sums, encoding="utf-8")
    size = sum(wheel.path.stat().st_size for wheel in needed)
    print(f"{out}: {len(needed)} wheels, {size / 1e6:.0f} MB, for {', '.join(target.text.split())}")  # noqa: T201


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    found = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def main() -> int:
    """Fill the directory, and return the exit status."""
    directory, lock, python, machine, *also = sys.argv[1:]
    out, target = Path(directory).resolve(), Target(lock, python, machine, tuple(also))
    try:
        claim(out, target)
        finish(out, target, fill(out, target))
    except WheelhouseError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
