"""The container files agree with each other and with the locks; launch/container.sh runs Python in an image."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONTAINERS = ROOT / "containers"


def definition() -> dict[str, list[str]]:
    """Return the sections of the Apptainer definition, and its header as section ""."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in (CONTAINERS / "deepspeed_nmt.def").read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            sections[name] = []
        elif line.strip() and not line.startswith("#"):
            sections[name].append(line.strip())
    return sections


def instructions() -> list[list[str]]:
    """Return the instructions of the Dockerfile."""
    text = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def included() -> list[str]:
    """Return the files that .dockerignore leaves to the image."""
    text = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    assert "\n*\n" in text, "all others are left out"
    return re.findall(r"^!(\S+)$", text, re.MULTILINE)


def test_both_images_have_the_same_steps_and_files() -> None:
    sections, docker = definition(), instructions()
    step = "/src/containers/build.sh {} && rm -rf /src"
    assert sections["post"] == [step.format("{{ LOCK }}")]
    assert [words for name, words in docker if name == "RUN"] == [step.format('"$LOCK"')]
    assert sections["files"] == [f"{name} /src/{name}" for name in included()]
    assert ["COPY", ". /src"] in docker
    assert {"setup.py", "pyproject.toml", "README.md", "requirements"} <= set(included()), "what pip reads"
    assert all((ROOT / name).exists() for name in included())
    arguments = dict(line.split("=") for line in sections["arguments"])
    assert arguments == dict(words.split("=") for name, words in docker if name == "ARG")
    assert sections[""] == ["Bootstrap: docker", "From: {{ BASE }}"] and ["FROM", "${BASE}"] in docker
    environment = "/opt/deepspeed_nmt/environment.sh"
    assert sections["environment"] == [f". {environment}"]
    assert [environment in words for name, words in docker if name == "ENTRYPOINT"] == [True]


def test_a_user_without_a_home_directory_gets_one(tmp_path: Path) -> None:
    script = CONTAINERS / "environment.sh"
    code = f'set -eu; . {script}; echo "$HOME|$USER|$PATH|$PYTHONNOUSERSITE$PYTHONSAFEPATH"'

    def sourced(**settings: str) -> list[str]:
        plain = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), **settings}
        done = subprocess.run(["sh", "-c", code], env=plain, capture_output=True, text=True, check=True)
        return done.stdout.strip().split("|")

    home, user, path, python = sourced(HOME="/nonexistent")
    assert Path(home).is_dir() and Path(home).parent == tmp_path
    assert user == f"uid{os.getuid()}" and path.startswith("/opt/deepspeed_nmt/bin:") and python == "11"
    (tmp_path / "home").mkdir()
    assert sourced(HOME=str(tmp_path / "home"), USER="ada")[:2] == [str(tmp_path / "home"), "ada"]


@pytest.fixture
def apptainer(tmp_path: Path) -> Path:
    """An `apptainer` that prints its words and two variables."""
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "PYTHONPATH=$PYTHONPATH" "OMP_NUM_THREADS=$OMP_NUM_THREADS"\n')
    program.chmod(0o755)
    (tmp_path / "image.sif").touch()
    return program


def run_container(apptainer: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    place = apptainer.parents[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CONTAINER", "SLURM_"))}
    path = {"PATH": f"{apptainer.parent}:{kept['PATH']}", "TMPDIR": str(place), "PYTHONPATH": "/of/the/host"}
    return subprocess.run(
        [ROOT / "launch/container.sh", *words], env={**kept, **path, **settings}, cwd=place, capture_output=True,
        text=True,
    )  # fmt: skip


def test_python_runs_in_the_image_with_the_directories_of_the_job(apptainer: Path) -> None:
    options = {"CONTAINER": "image.sif", "CONTAINER_OPTIONS": "--bind /scratch:/* --cleanenv", "OMP_NUM_THREADS": "3"}
    done = run_container(apptainer, "-m", "deepspeed_nmt", "train", "a b", **options)
    assert done.returncode == 0, done.stderr
    said, here = done.stdout.splitlines(), str(apptainer.parents[1])
    begin = ["exec", "--pwd", here, "--bind", here, "--bind", str(ROOT), "--bind", here]
    begin += ["--nv"] if Path("/dev/nvidiactl").exists() else []
    words = ["--bind", "/scratch:/*", "--cleanenv", "image.sif", "python3", "-m", "deepspeed_nmt", "train", "a b"]
    assert said == [*begin, *words, "PYTHONPATH=", "OMP_NUM_THREADS=3"]
