"""The locks are complete and agree with setup.py; the launch scripts behave as their help describes."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("cpu", "cuda", "v100")
LAUNCH = ROOT / "launch"
SCRIPTS = [*sorted(LAUNCH.rglob("*.sh")), *sorted(LAUNCH.glob("*.sbatch")), ROOT / ".ci" / "run"]
SCRIPTS += [*sorted((ROOT / "benchmarks").rglob("*.sh")), *sorted((ROOT / "containers").glob("*.sh"))]
PYTORCH_INDEX = "https://download.pytorch.org/whl/"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def read_lock(name: str) -> tuple[list[Requirement], list[str]]:
    """Return the requirements and the options of a lock, with those of the files that it includes."""
    requirements: list[Requirement] = []
    options: list[str] = []
    for raw in (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        line = raw.split("#")[0].strip()
        if line.startswith("-r "):
            included = read_lock(Path(line[3:].strip()).stem)
            requirements += included[0]
            options += included[1]
        elif line.startswith("-"):
            options.append(line)
        elif line:
            requirements.append(Requirement(line))
    return requirements, options


def pinned_version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    return specifier.version


def environment(python: str) -> dict[str, str]:
    """Return the environment for markers of this kind of machine with another Python."""
    return {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}


def pins(name: str, python: str) -> dict[str, str]:
    """Return the version of each distribution that a lock installs under a Python version."""
    return {
        canonicalize_name(requirement.name): pinned_version(requirement)
        for requirement in read_lock(name)[0]
        if requirement.marker is None or requirement.marker.evaluate(environment(python))
    }


def install_requires() -> list[Requirement]:
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            return [Requirement(text) for text in ast.literal_eval(node.value)]
    raise AssertionError("setup.py has no install_requires")


@pytest.mark.parametrize("name", [*LOCKS, "test"])
def test_lock_pins_every_distribution_once_and_satisfies_setup(name: str) -> None:
    requirements, options = read_lock(name)
    assert all([s.operator for s in r.specifier] == ["=="] and "*" not in str(r.specifier) for r in requirements)
    names = [canonicalize_name(requirement.name) for requirement in requirements]
    assert len(names) == len(set(names))
    assert all(option.startswith(f"--extra-index-url {PYTORCH_INDEX}") for option in options)
    for python in PYTHONS if name in LOCKS else ():
        locked = pins(name, python)
        for requirement in install_requires():
            version = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_locks_differ_only_in_pytorch() -> None:
    common = {str(requirement) for requirement in read_lock("common")[0]}
    for name in LOCKS:
        more = {r.name for r in read_lock(name)[0] if str(r) not in common}
        assert "torch" in more
        assert all(part == "torch" or part.startswith(("cuda-", "nvidia-", "triton")) for part in more)


def test_a_v100_gets_a_build_that_has_its_kernels() -> None:
    """Since PyTorch 2.11 only the builds for CUDA 12.6 have sm_70, up to 2.14."""
    requirements, options = read_lock("v100")
    torch_version = pinned_version(next(r for r in requirements if r.name == "torch"))
    assert options == [f"--extra-index-url {PYTORCH_INDEX}cu126"]
    assert torch_version.endswith("+cu126")
    assert tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2]) <= (2, 14)
    (bounds,) = (requirement.specifier for requirement in install_requires() if requirement.name == "torch")
    assert bounds.contains("2.14.1") and not bounds.contains("2.15.0"), "pip without a lock takes the newest"


def missing_from(locked: Mapping[str, str], python: str) -> list[str]:
    """Return the requirements of the locked distributions, as installed here, that the lock does not meet."""
    problems = []
    for name in locked:
        try:
            requirements = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:  # required by another Python only
            continue
        for requirement in requirements:
            if requirement.marker is not None and not requirement.marker.evaluate(environment(python)):
                continue
            version = locked.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                problems.append(f"{name} needs {requirement}, the lock has {version}")
    return problems


def test_lock_is_complete() -> None:
    """Every dependency is pinned. The requirements are those of the distributions installed here."""
    if metadata.version("torch").endswith("+cu126"):
        pytest.skip("the cu126 build pins its CUDA libraries itself")
    lock = "cuda" if any(text.startswith("triton") for text in metadata.requires("torch") or []) else "cpu"
    for python in PYTHONS:
        locked = pins(lock, python)
        assert missing_from(locked, python) == [], "without the lock of the tests"
        assert missing_from({**locked, **pins("test", python)}, python) == []
        assert missing_from({name: version for name, version in locked.items() if name != "filelock"}, python) != []


def test_scripts_are_valid() -> None:
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK) or script.name in ("lib.sh", "environment.sh")  # sourced
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck (launch/test.sh --system installs it)")
    done = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


PROGRAMS = [str(path.relative_to(LAUNCH)) for path in SCRIPTS if path.is_relative_to(LAUNCH)]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "lib.sh"])
def test_help_changes_nothing(name: str, tmp_path: Path) -> None:
    done = run_script(name, "--help", VENV=str(tmp_path / "venv"), OUT=str(tmp_path / "out"))
    assert done.returncode == 0 and f"launch/{name} " in done.stdout and not done.stdout.startswith("#")
    assert list(tmp_path.iterdir()) == []


def run_script(
    name: str, *arguments: str, cwd: Path | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    own = {"SOURCE", "TARGET", "OUT", "RANKS", "RECIPE", "LOCK", "VOCAB_SIZE"}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    command = [str(ROOT / "launch" / name), *arguments]
    return subprocess.run(
        command, env={**inherited, **settings}, cwd=cwd, capture_output=True, text=True, check=False
    )


STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$STUB_LOG"
[ "$(basename "$0")" != deepspeed ] || echo 0 >"$DEEPSPEED_NMT_STATUS"
[ "${FAIL_AT:-none}" != "$1" ] || exit "${FAIL_WITH:-75}"
output() { sed -n "s/.*--$1 \\([^ ]*\\).*/\\1/p" <<<"$all"; }
all="$*"
case "$(basename "$0") $1" in
*sample-data) mkdir -p "$(output out)" && touch "$(output out)"/{train,valid,test}.{en,de} ;;
*prepare)
    mkdir -p "$(output out)"
    echo '{"splits": {"train": {"pairs": 900, "target": {"tokens": 9000}}}}' >"$(output out)/meta.json"
    ;;
*translate) touch "$(output output)" ;;
"deepspeed "*)
    mkdir -p "$(output run)/checkpoints"
    for update in 10 20 30; do
        printf '{"update": %d, "perf/target_tokens_per_s": 9000.0, "valid/bleu": %d.5, ' "$update" "$update"
        echo '"valid/loss": 2.0}'
    done >"$(output run)/metrics.jsonl"
    echo "12:00:00 update 10/30: valid loss 2.000" # what the launcher prints
    ;;
esac
echo "noise of $1"
"""


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """Settings under which the quickstart installs nothing and calls stubs that only log their arguments."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("deepspeed", "deepspeed-nmt"):
        (programs / name).write_text(STUB, encoding="utf-8")
        (programs / name).chmod(0o755)
    (programs / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
    (programs / "python").chmod(0o755)
    return {
        "VENV": str(tmp_path / "venv"),
        "OUT": str(tmp_path / "out"),
        "SKIP_INSTALL": "1",
        "LOCK": "cpu",
        "STUB_LOG": str(tmp_path / "log"),
    }


def commands(stubs: Mapping[str, str]) -> list[str]:
    """Return the first words of each call of a stub, and clear the log."""
    log = Path(stubs["STUB_LOG"])
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [" ".join(line.split()[:2]) for line in lines if line.startswith("deepspeed")]


def write_text(path: Path, lines: int, word: str = "word") -> str:
    path.write_text("".join(f"{word} {number}\n" for number in range(lines)), encoding="utf-8")
    return str(path)


def test_quickstart_resumes(stubs: dict[str, str]) -> None:
    stopped = run_script("quickstart.sh", FAIL_AT="translate", **stubs)
    assert stopped.returncode == 75 and "start the same command again to resume" in stopped.stderr
    assert commands(stubs) == [
        "deepspeed-nmt sample-data",
        "deepspeed-nmt prepare",
        "deepspeed --num_gpus",
        "deepspeed-nmt translate",
    ]
    again = run_script("quickstart.sh", **stubs)
    assert again.returncode == 0, again.stderr
    assert commands(stubs) == ["deepspeed-nmt translate", "deepspeed-nmt score"]
    out = Path(stubs["OUT"])
    shutil.rmtree(out / "data")
    assert run_script("quickstart.sh", **stubs).returncode == 0
    assert len(commands(stubs)) == 4, "what was deleted is done again, and what follows from it"
    failed = run_script("quickstart.sh", "--fresh", FAIL_AT="prepare", FAIL_WITH="2", **stubs)
    assert failed.returncode == 2 and "failed with status 2" in failed.stderr
    stopped = run_script("quickstart.sh", "--fresh", FAIL_AT="translate", **stubs)
    assert stopped.returncode == 75 and "without --fresh to resume" in stopped.stderr
    commands(stubs)
    (translations := out / "run/validation/main").mkdir(parents=True)
    (translations / "update-0000400.txt").touch()
    (out / "run/gradients").mkdir()
    (out / "run/test_scores.json").touch()  # of a report
    assert run_script("quickstart.sh", "--fresh", **stubs).returncode == 0
    assert len(commands(stubs)) == 5 and not translations.exists()
    assert {path.name for path in (out / "run").iterdir()} == {"checkpoints", "metrics.jsonl"}


def test_quickstart_does_not_leave_out_what_another_recipe_or_vocabulary_asks_for(stubs: dict[str, str]) -> None:
    first = run_script("quickstart.sh", VOCAB_SIZE="700", **stubs)
    assert first.returncode == 0 and "VOCAB_SIZE=700 LOCK=cpu " in first.stdout.splitlines()[-1], "to start over"
    commands(stubs)
    other = run_script("quickstart.sh", VOCAB_SIZE="900", **stubs)
    assert other.returncode == 2 and "was prepared with another VOCAB_SIZE" in other.stderr
    assert run_script("quickstart.sh", **stubs).returncode == 0
    assert commands(stubs) == ["deepspeed-nmt score"], "the size is that of before"
    assert run_script("quickstart.sh", RECIPE="sample_small", **stubs).returncode == 0
    assert commands(stubs) == ["deepspeed --num_gpus", "deepspeed-nmt translate", "deepspeed-nmt score"]


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_quickstart_keeps_files_that_it_did_not_make(stubs: dict[str, str], tmp_path: Path) -> None:
    """Text below OUT, a directory with other files, text that links lead to, and files added to an own directory."""

    def refuses(out: Path, message: str, source: Path, target: Path) -> None:
        before = files_of(tmp_path)
        done = run_script("quickstart.sh", "--fresh", str(source), str(target), **{**stubs, "OUT": str(out)})
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert files_of(tmp_path) == before

    out = Path(stubs["OUT"])
    (inside := out / "text").mkdir(parents=True)
    source, target = inside / "train.source", inside / "train.target"
    write_text(source, 300)
    write_text(target, 300, "Wort")
    refuses(out, "is among the files of OUT", source, target)
    source, target = (Path(shutil.copy(path, tmp_path)) for path in (source, target))
    refuses(out, "has files that this script has not made", source, target)
    shutil.rmtree(out)
    out.mkdir()
    (out / ".quickstart").write_text("sample corpus and more\n")
    refuses(out, ".quickstart is not what this script writes", source, target)
    shutil.rmtree(out)
    assert run_script("quickstart.sh", str(source), str(target), **stubs).returncode == 0
    (inside / "valid.source").unlink()
    (inside / "valid.source").symlink_to(source)
    refuses(out, "is among the files of OUT", source, target)
    (inside / "valid.source").unlink()
    for name in ("text", "data", "run"):
        (out / name / "precious").write_text("mine")
    done = run_script("quickstart.sh", "--fresh", str(source), str(target), **stubs)
    assert done.returncode == 0, done.stderr
    assert [(out / name / "precious").read_text() for name in ("text", "data", "run")] == ["mine"] * 3


TRAINING = """#!/usr/bin/env bash
# A launcher whose ranks save and stop when the file of stop requests appears.
trap 'echo killed >>"$STUB_LOG"; exit 143' TERM
echo training >>"$STUB_LOG"
until [ -e "$DEEPSPEED_NMT_STOP" ]; do sleep 0.05; done
sleep 0.5
echo saved >>"$STUB_LOG"
echo 75 >"$DEEPSPEED_NMT_STATUS"
"""
SLOW = """#!/usr/bin/env bash
[ "$1" = prepare ] || exit 0
echo preparing >>"$STUB_LOG"
sleep 30
"""
PIP = """#!/usr/bin/env bash
case "$*" in
*"pip install"*) trap 'echo "Operation cancelled by user"; exit 1' INT; echo installing >>"$STUB_LOG"; sleep 30 ;;
esac
"""


@pytest.mark.parametrize(
    ("number", "step"),
    [(signal.SIGHUP, "training"), (signal.SIGTERM, "preparing"), (signal.SIGINT, "installing")],
)
def test_quickstart_forwards_a_signal(
    number: signal.Signals, step: str, stubs: dict[str, str], tmp_path: Path
) -> None:
    program, text = {
        "training": ("deepspeed", TRAINING),
        "preparing": ("deepspeed-nmt", SLOW),
        "installing": ("python", PIP),
    }[step]
    stubs["SKIP_INSTALL"] = "1" if step != "installing" else ""
    (Path(stubs["VENV"]) / "bin" / program).write_text(text, encoding="utf-8")
    log = Path(stubs["STUB_LOG"])
    process = subprocess.Popen(
        [str(LAUNCH / "quickstart.sh")], env={**os.environ, **stubs}, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    try:
        while not (log.exists() and step in log.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        # The shell and the kernel both report a lost terminal, the one to the process, the other to its group.
        os.kill(process.pid, number)
        time.sleep(0.1)
        os.killpg(process.pid, number)
        said = process.communicate(timeout=300)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == (75 if step == "training" else 128 + number), said
    assert f"stopped with status {process.returncode}; start the same command again to resume" in said
    assert step != "training" or log.read_text().splitlines()[-1] == "saved"
    assert "error" not in said


def test_quickstart_splits_off_held_out_text(stubs: dict[str, str], tmp_path: Path) -> None:
    source = write_text(tmp_path / "lang=en", 1000)  # awk takes such a name for an assignment
    target = write_text(tmp_path / "lang=de", 1000, "Wort")
    stubs["OUT"] += "\\new"
    with Path(source).open("a", encoding="utf-8") as more:
        more.write("word 9\n")  # repeats the source of the first held-out pair
    with Path(target).open("a", encoding="utf-8") as more:
        more.write("Wort again")  # a last line without a line feed
    done = run_script("quickstart.sh", "lang=en", "lang=de", cwd=tmp_path, **stubs)
    assert done.returncode == 0, done.stderr
    parts = {
        part: [
            (Path(stubs["OUT"]) / "text" / f"{part}.{side}").read_text(encoding="utf-8").splitlines()
            for side in ("source", "target")
        ]
        for part in ("train", "valid", "test")
    }
    assert {part: len(sides[0]) for part, sides in parts.items()} == {"train": 900, "valid": 50, "test": 50}
    for sources, targets in parts.values():
        assert [line.replace("word", "Wort") for line in sources] == targets
    assert set(parts["train"][0]).isdisjoint(parts["valid"][0] + parts["test"][0])
    other = run_script("quickstart.sh", **stubs)
    assert other.returncode == 2 and "made from other text" in other.stderr
    Path(source).write_text("word\n" * 300, encoding="utf-8")
    same = run_script("quickstart.sh", "--fresh", source, source, **stubs)
    assert same.returncode == 2 and "no pair is left to train" in same.stderr


def test_quickstart_plans_the_training_of_own_text(stubs: dict[str, str], tmp_path: Path) -> None:
    """The recipe and the length follow from text, device, minutes and speed. More minutes train on."""
    text = [write_text(tmp_path / "a", 1000), write_text(tmp_path / "b", 1000, "Wort")]
    log, plan = Path(stubs["STUB_LOG"]), Path(stubs["OUT"]) / "plan"

    def last_training(*arguments: str) -> list[str]:
        done = run_script("quickstart.sh", *arguments, **stubs)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
        words = [
            line.split() for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("deepspeed ")
        ]
        log.unlink()
        return words[-1]

    def updates_of(words: list[str]) -> int:
        return int(dict(word.partition("=")[::2] for word in words)["training.max_updates"])

    shown: list[str] = []
    first = last_training(*text, "--minutes", "2")
    assert {"multi30k_cpu", "model.dropout=0.3", "batch.update_tokens=512"} <= set(first)
    before = updates_of(first)
    # 1.25 times as many as the speed of the trial gives, fewer by its whole seconds, of which there may be none
    assert 1112 <= before <= 2240
    assert "10.5 20.5 30.5; still improves" in shown[0] and "--minutes 4" in shown[0]
    assert "update 10/30: valid loss" in shown[0] and len(shown[0].splitlines()) < 40
    assert "noise" not in shown[0].replace("noise of score", "")
    assert "noise of prepare" in (Path(stubs["OUT"]) / "log").read_text(encoding="utf-8")
    assert run_script("quickstart.sh", *text, **stubs).returncode == 0
    assert "deepspeed-nmt translate" not in commands(stubs), "all is done, also if no minutes are given"
    longer = last_training("--minutes", "4", *text, "--", "optimizer.lr=1e-3")
    assert (
        updates_of(longer) > before
        and "batch.update_tokens=512" in longer
        and "optimizer.lr=1e-3" in longer[longer.index("--recipe") :]
    )
    assert plan.read_text(encoding="utf-8").splitlines()[2] == "4"
    assert shlex.split(shown[1].splitlines()[-1])[-2:] == ["--", "optimizer.lr=1e-3"]
    failed = run_script("quickstart.sh", "--fresh", *text, FAIL_AT="prepare", FAIL_WITH="2", **stubs)
    assert failed.returncode == 2 and f"the end of {stubs['OUT']}/log" in failed.stderr


def test_quickstart_refuses_what_it_cannot_use(stubs: dict[str, str], tmp_path: Path) -> None:
    long, longer, short = (write_text(tmp_path / str(n), n) for n in (300, 301, 199))
    Path(utf16 := str(tmp_path / "utf16")).write_text("word\n" * 300, encoding="utf-16")
    cases: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        ((long,), {}, "1 arguments"),
        ((long, str(tmp_path / "none")), {}, "is missing"),
        ((long, longer), {}, "300 lines"),
        ((short, short), {}, "199 lines"),
        ((utf16, utf16), {}, "is UTF-16"),
        (("--frsh",), {}, "--frsh"),
        ((), {"SOURCE": long}, "name the other file"),
        ((), {"OUT": f"{long}/below"}, "below cannot be written"),
        ((), {"RECIPE": "sample_smal"}, "'sample_smal'"),
        ((), {"RANKS": "two"}, "RANKS is 'two'"),
        (("--minutes", "soon"), {}, "'soon'"),
        (("--minutes", "nan"), {}, "no positive whole number"),
        (("--minutes", "0.1"), {}, "no positive whole number"),
        (("--minutes", "00"), {}, "no positive whole number"),
        ((), {"RANKS": "08"}, "RANKS is '08'"),
        (("--minutes", "5"), {"RECIPE": "sample_small"}, "RECIPE has a length"),
        (("--", "lr"), {}, "lr is no setting"),
    ]
    for arguments, settings, message in cases:
        done = run_script("quickstart.sh", *arguments, **{**stubs, **settings})
        assert done.returncode == 2 and message in done.stderr, done.stderr
    assert commands(stubs) == [] and not Path(stubs["OUT"]).exists()


def test_quickstart_with_minutes_refuses_what_a_recipe_has_trained(stubs: dict[str, str]) -> None:
    """Its plan would follow the one that the trained model has, after a trial of minutes."""
    (run := Path(stubs["OUT"]) / "run").mkdir(parents=True)
    (run.parent / ".quickstart").write_text("sample corpus\n")
    (run / "metrics.jsonl").touch()
    done = run_script("quickstart.sh", "--minutes", "10", "--", "optimizer.beta2=0.98", **stubs)
    assert done.returncode == 2 and "was trained as its recipe says, without --minutes" in done.stderr, done.stderr
    assert commands(stubs) == []


def call_library(code: str, path: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run shell code that uses launch/lib.sh, with `path` first on PATH."""
    script = f'set -euo pipefail; . "{ROOT}/launch/lib.sh"; {code}'
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    variables = {**kept, "PATH": f"{path}:{os.environ['PATH']}", **settings}
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)


def test_an_option_names_the_lock(stubs: dict[str, str], tmp_path: Path) -> None:
    """On a host without a GPU. The option has priority over LOCK."""
    assert "requirements/v100.txt" in run_script("quickstart.sh", "--lock", "v100", **stubs).stdout
    for script in ("quickstart.sh", "test.sh"):
        for option, value in (("--lock", "gpu"), ("--wheelhouse", str(tmp_path / "none"))):
            done = run_script(script, option, value, **stubs)
            assert done.returncode == 2 and option in done.stderr, script


def test_lock_fits_the_gpus(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    for gpus, lock in (
        ("", "cpu"),
        ("9.0, 580.65.06\n9.0, 580.65.06", "cuda"),
        ("7.0, 580.65.06", "v100"),
        ("8.0, 535.104.05", "v100"),
        ("8.0, 580.1\n7.0, 580.1", "v100"),
        ("NVIDIA-SMI has failed because it could not communicate with the driver", "cpu"),
    ):
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{gpus}\nEND\n", encoding="utf-8")
        program.chmod(0o755)
        done = call_library("choose_lock", tmp_path)
        assert done.stdout.strip() == lock, (gpus, done.stderr)
    program.write_text("#!/bin/sh\necho 9.0, 580.1\n", encoding="utf-8")
    seen = {hidden: call_library("list_gpus", tmp_path, CUDA_VISIBLE_DEVICES=hidden).stdout for hidden in ("", "0")}
    assert seen == {"": "", "0": "9.0, 580.1\n"}


def test_the_root_is_that_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    code = 'cd "$1" && . launch/lib.sh && echo "$ROOT"'
    variables = {**os.environ, "CDPATH": str(tmp_path)}
    done = subprocess.run(["bash", "-c", code, "-", ROOT], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == f"{ROOT}\n"


def test_an_option_without_a_value_ends_a_script() -> None:
    for name, option in (("docs.sh", "--port"), ("data/multi30k_multilingual.sh", "--out")):
        done = run_script(name, option)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and option in done.stderr


def test_missing_modules_of_python_are_named(tmp_path: Path) -> None:
    program, venv = tmp_path / "python-without-venv", tmp_path / "venv"
    program.write_text(f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; esac\nexec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    for python, message in ((program, "apt-get install python3-venv"), (tmp_path / "none", "Python 3.10 or newer")):
        done = call_library("make_venv", tmp_path, PYTHON=str(python), VENV=str(venv))
        assert done.returncode == 2 and message in done.stderr and not venv.exists()


def test_nothing_is_installed_twice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1", encoding="utf-8")
    again = f'stamped thing "{tmp_path}/file" -- echo run'
    done = call_library(f'{again}; {again}; echo 2 >"{tmp_path}/file"; {again}', tmp_path, VENV=str(tmp_path))
    assert done.stdout.split() == ["run", "run"], done.stderr
    failing = "stamped other setup.py -- false || true; stamped other setup.py -- echo run"
    assert call_library(failing, tmp_path, VENV=str(tmp_path)).stdout.split() == ["run"]


def tracked_files() -> list[Path]:
    """Return the files that are tracked or could be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return [path for path in (ROOT / name for name in listing.split("\0") if name) if path.is_file()]


def test_no_file_names_a_package_registry() -> None:
    """Installation follows the machine's settings of pip and apt; only PyTorch's public index is named."""
    registry = rb"\b(?:pypi|pythonhosted|registry\.npmjs|(?:deb|security)\.debian)\.(?:org|com)\b"
    index = rb"(?:index-url|find-links)[ =]+(?!https://download\.pytorch\.org/)\S*//\S+"
    pattern = re.compile(registry + b"|" + index)
    assert [(path, name) for path in tracked_files() for name in pattern.findall(path.read_bytes())] == []


def test_wheel_is_whole_and_runs_where_it_is_installed(tmp_path: Path) -> None:
    """Neither building nor installing needs a network, and the installed package needs nothing of the repository."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copy / name)
    for name in ("deepspeed_nmt", "ds_configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("deepspeed_nmt-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "deepspeed_nmt"
    patterns = ("*.py", "*.cpp", "*.yaml", "py.typed", "page.html")
    files = {str(path.relative_to(ROOT)) for pattern in patterns for path in package.rglob(pattern)}
    files |= {f"deepspeed_nmt/ds_configs/{path.name}" for path in (ROOT / "ds_configs").glob("*.json")}
    assert files - packed == set()
    assert {name.split("/")[0].removesuffix("-0.1.0.dist-info") for name in packed} == {"deepspeed_nmt"}

    target = tmp_path / "target"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    module = [sys.executable, "-m", "deepspeed_nmt"]
    for command, text in (
        ([*module, "recipes", "transformer_base"], "transformer_base"),
        ([sys.executable, "-c", "import deepspeed_nmt; print(deepspeed_nmt.__file__)"], str(target)),
        ([str(target / "bin" / "deepspeed-nmt"), "train", "--help"], "--recipe"),
    ):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(target)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and text in done.stdout, done.stderr
