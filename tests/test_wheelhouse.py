"""A wheelhouse has all that an installation needs: collected for any machine, and installed without a network.

The distributions are small ones that the tests build, in a copy of the launch scripts with a lock of its own.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"

BACKEND = """
import zipfile
from pathlib import Path

NAME, VERSION = {name!r}, "1.0"

def write_wheel(directory, name, version, requires=()):
    info = f"{{name}}-{{version}}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {{name}}", f"Version: {{version}}"]
    lines += [f"Requires-Dist: {{each}}" for each in requires]
    path = Path(directory, f"{{name}}-{{version}}-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{{name}}.py", "")
        wheel.writestr(f"{{info}}/METADATA", "\\n".join(lines) + "\\n")
        wheel.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{{info}}/RECORD", "")
    return path.name

def build_wheel(directory, config_settings=None, metadata_directory=None):
    return write_wheel(directory, NAME, VERSION)

build_editable = build_wheel
"""


def project(name: str, folder: str = ".") -> dict[str, str]:
    """Return the files of a project whose build needs no other distribution."""
    system = f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["{folder}"]\n'
    return {"pyproject.toml": system, f"{folder}/backend.py": BACKEND.format(name=name)}


def write_wheel(directory: Path, name: str, version: str, *requires: str) -> None:
    namespace: dict[str, Callable[..., str]] = {}
    exec(BACKEND.format(name=name), namespace)  # type: ignore[arg-type]
    namespace["write_wheel"](directory, name, version, requires)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the launch scripts, with a small package and lock; `published` is what an index would have."""
    root = tmp_path_factory.mktemp("repository")
    for name in ("lib.sh", "wheelhouse.sh", "wheelhouse.py", "quickstart.sh"):
        (root / "launch").mkdir(exist_ok=True)
        shutil.copy(ROOT / "launch" / name, root / "launch" / name)
    files = {
        **project("deepspeed_nmt", "deepspeed_nmt"),
        **dict.fromkeys(("setup.py", "README.md", "ds_configs/zero1.json"), ""),
        "requirements/common.txt": 'deepspeed==1.0\nplain==1.0\nolder==1.0; python_version < "3.0"\n',
        "requirements/cpu.txt": "-r common.txt\ntorch==1.0\n",
        "requirements/test.txt": "tester==1.0\n",
        "requirements/docs.txt": "-c common.txt\n-c test.txt\nwriter==1.0\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    published = root / "published"
    published.mkdir()
    for wheel in ("plain 1.0", "plain 2.0", "runtime 3.0", "tester 1.0", "tester 2.0"):
        write_wheel(published, *wheel.split())
    # As torch's build for a V100, which pins its libraries itself.
    write_wheel(published, "torch", "1.0", "plain>=1", "runtime==3.0", 'toy; extra == "toys"')
    write_wheel(published, "writer", "1.0", "tester")
    with tarfile.open(published / "deepspeed-1.0.tar.gz", "w:gz") as archive:  # as source only
        for name, text in {**project("deepspeed"), "PKG-INFO": "Name: deepspeed\nVersion: 1.0\n"}.items():
            entry = tarfile.TarInfo(str(Path("deepspeed-1.0", name)))
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return root


def variables(**settings: str) -> dict[str, str]:
    """Return an environment in which pip cannot reach an index, nor wheels of this machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "LOCK", "WHEELHOUSE"))}
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    return {**kept, **nowhere, "VENV": sys.prefix, "LC_ALL": "C.UTF-8", **settings}


def run(*words: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, env=variables(**settings), capture_output=True, text=True)


def collect(repository: Path, out: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    links = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(repository / "published"), **settings}
    return run(repository / "launch/wheelhouse.sh", "--out", out, *words, **links)


@pytest.fixture(scope="module")
def wheelhouse(repository: Path) -> Path:
    out = repository / "wheels"
    done = collect(repository, out, "--lock", "cpu", "--docs")
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def shell(repository: Path, code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run shell code that uses the library of the launch scripts."""
    return run("bash", "-c", f'set -euo pipefail; . "{repository}/launch/lib.sh"; {code}', **settings)


def test_a_wheelhouse_has_what_the_lock_requires(wheelhouse: Path) -> None:
    names = {f"{name}-1.0" for name in ("deepspeed", "deepspeed_nmt", "plain", "torch", "tester", "writer")}
    names.add("runtime-3.0")
    assert {path.name.removesuffix("-py3-none-any.whl") for path in wheelhouse.glob("*.whl")} == names
    pinned = (wheelhouse / "requirements.txt").read_text().splitlines()
    assert pinned == sorted(name.replace("-", "==").replace("deepspeed_nmt", "deepspeed-nmt") for name in names)
    sums = (wheelhouse / "SHA256SUMS").read_text().splitlines()
    assert {line.split()[1] for line in sums} == {path.name for path in wheelhouse.iterdir()} - {"SHA256SUMS"}


def test_it_installs_without_a_network(repository: Path, wheelhouse: Path, tmp_path: Path) -> None:
    """In a new virtual environment, by the launch scripts' own function; without the wheelhouse that fails."""
    venv = str(tmp_path / "venv")
    code = 'lock="$(lock_to_install)"; echo "lock $lock"; install "$lock" docs'
    done = shell(repository, code, WHEELHOUSE=os.path.relpath(wheelhouse), VENV=venv, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lock cpu" in done.stdout, "the lock is that of the wheelhouse"
    assert "Looking in links" in done.stdout and "Looking in indexes" not in done.stdout, "pip asks no index"
    found = {path.name.removesuffix("-1.0.dist-info") for path in (tmp_path / "venv").rglob("*.dist-info")}
    assert {"deepspeed", "deepspeed_nmt", "plain", "runtime-3.0.dist-info", "torch", "writer", "tester"} <= found
    assert shell(repository, "install cpu docs", WHEELHOUSE=str(wheelhouse), VENV=venv).stdout == "", "nothing twice"
    # For other hardware torch has the same version, which pip would keep.
    for stamp in ("cpu", "v100"):
        (tmp_path / "venv" / f".installed-{stamp}").touch()
    code = 'pip_install() { :; }; install_lock cuda; ls -A "$VENV"'
    done = shell(repository, code, VENV=venv)
    assert ".installed-docs" in done.stdout and ".installed-cpu" not in done.stdout, done.stderr
    assert ".installed-v100" not in done.stdout and not list((tmp_path / "venv").rglob("torch*.dist-info"))

    alone = shell(repository, "pip_install --quiet --target elsewhere plain", VENV=venv)
    assert alone.returncode != 0 and "pip could not install what is needed" in alone.stderr


def test_a_wheelhouse_that_does_not_fit_is_refused(repository: Path, wheelhouse: Path, tmp_path: Path) -> None:
    def refuses(message: str, lock: str = "cpu") -> None:
        done = shell(repository, f"check_wheelhouse {lock}", WHEELHOUSE=str(copy))
        assert done.returncode == 2 and message in done.stderr, done.stderr

    copy = tmp_path / "copy"
    refuses("was not completed by")
    shutil.copytree(wheelhouse, copy)
    refuses("lacks requirements/v100.txt", "v100")
    (copy / "plain-1.0-py3-none-any.whl").write_bytes(b"cut off")
    refuses("of WHEELHOUSE have changed")
    said = (copy / "wheelhouse.txt").read_text()
    (copy / "wheelhouse.txt").write_text(said.replace(f"python={HERE}", "python=3.9"))
    refuses(f"is for the python 3.9, not for {HERE}")


def test_a_directory_that_cannot_be_filled_is_refused(repository: Path, wheelhouse: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for out, words, message in (
        (tmp_path, (), "has files that this script has not written"),
        (wheelhouse, ("--python", "3.19"), "is for lock=cpu, python="),
        (wheelhouse, ("--machine", "m68k"), "--machine is 'm68k'"),
    ):
        done = collect(repository, out, *words, LOCK="cpu")
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert (wheelhouse / "SHA256SUMS").exists(), "a refused start changes nothing"
    done = collect(repository, tmp_path / "out", LOCK="cpu", PIP_FIND_LINKS=str(tmp_path))
    assert done.returncode == 2 and "pip could not fetch what is needed" in done.stderr
    assert not (tmp_path / "out/SHA256SUMS").exists(), "an incomplete wheelhouse is not used"


@pytest.fixture(scope="module")
def helper() -> ModuleType:
    """The program that launch/wheelhouse.sh runs."""
    spec = importlib.util.spec_from_file_location("wheelhouse", ROOT / "launch/wheelhouse.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wheelhouse"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_dependencies_are_those_of_the_other_machine(helper: ModuleType) -> None:
    def wheel(name: str, *requires: str) -> object:
        return helper.Wheel(Path(name), name, "1.0", tuple(map(helper.Requirement, requires)))

    libraries = 'library; platform_machine == "aarch64" and sys_platform == "linux"'
    wheels = [
        wheel("torch", libraries, "tools[fast]", 'never; extra == "x"'),
        wheel("tools", 'quick; extra == "fast"', 'backport; python_version < "3.11"'),
    ]
    machines = (("3.10", "x86_64", {"quick", "backport"}), ("3.13", "aarch64", {"quick", "library"}))
    for python, machine, expected in machines:
        target = helper.Target("cuda", python, machine, ())
        needed, unmet = helper.follow([helper.Requirement("torch==1.0")], wheels, target)
        assert {other.name for other in needed} == {"torch", "tools"}
        assert {other.name for other in unmet} == expected, (python, machine)
    assert helper.follow([helper.Requirement("torch==1.1")], wheels, target)[1], "another version is not met"
