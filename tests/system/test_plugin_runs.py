"""A repository of five files with a method: trained, resumed and used to translate, refused when it is not named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_nmt.plugins import PLUGINS
from deepspeed_nmt.run.directory import RunManifest
from tests.commands import ROOT, logged, refused

FILES = ["README.md", "nmt_state_norm.py", "pyproject.toml", "state_norm.yaml", "test_nmt_state_norm.py"]
CHECKS = """
import sys
from deepspeed_nmt import parity
from deepspeed_nmt.cli import main
parity.engines = lambda world, method: [("plain+recompute+packed", 1)]
assert main(["settings", "state_norm"]) == 0
sys.exit(main(["selftest", "--only", "state_norm", "--json", "--device", "cpu"]))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five files, with what their installation adds."""
    place = tmp_path_factory.mktemp("repository")
    for name in FILES:
        shutil.copy(ROOT / "tests" / "plugin" / name, place)
    info = place / "nmt_state_norm-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nmt-state-norm\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[deepspeed_nmt.methods]\nstate_norm = nmt_state_norm\n")
    return place


def python(repository: Path, plugins: str, *words: str, **environment: str) -> tuple[str, str]:
    """Run Python with a plug-in, and return its output and messages."""
    path = os.pathsep.join([str(ROOT), str(repository)])
    more = {"PYTHONPATH": path, "DEEPSPEED_NMT_PLUGINS": plugins, **environment}
    done = subprocess.run([sys.executable, *words], env={**os.environ, **more}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_the_repository_of_the_page_has_these_files() -> None:
    assert sorted(path.name for path in (ROOT / "tests" / "plugin").glob("*.*")) == FILES


def test_a_run_of_a_plugin(
    repository: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, source, module = tmp_path / "run", data.parent / "text" / "test.en", repository / "nmt_state_norm.py"
    program = ["-m", "deepspeed_nmt"]
    train = [*program, "train", "--run", str(run), "engine.device=cpu", "validation.metrics=[]"]
    first = ["--config", str(repository / "state_norm.yaml"), "--data", str(data), "training.max_updates=2"]
    python(repository, "state_norm", *train, *first)
    assert logged(run, "train/state_norm")[2] > 0.0
    (before,) = RunManifest.read(run).plugins.items()
    assert before[0] == "nmt_state_norm"

    # Its words reach a program of this user only: the record of a run imports nothing.
    monkeypatch.syspath_prepend(repository)
    for command in (
        ["train", "--run", str(run)],
        ["train", "--run", str(tmp_path / "warm"), "--init-from", str(run), "--data", str(data)],
        ["translate", "--run", str(run), "--input", str(source), "--output", str(tmp_path / "out.de")],
        ["score-pairs", "--run", str(run), "--source", str(source), "--target", str(source)],
        ["average", "--run", str(run), "--last", "2"],
        ["export", "--run", str(run), "--format", "huggingface", "--out", str(tmp_path / "export")],
        ["report", "runs", str(run), str(run)],
    ):
        message = refused(command, capsys, f"{run} was trained with the plug-in nmt_state_norm; set ")
        assert message.strip().endswith("DEEPSPEED_NMT_PLUGINS=nmt_state_norm")
    assert PLUGINS == {}

    # Another version of the files is named in a warning, and in the record from then on.
    module.write_text(module.read_text() + "\n# changed\n")
    _, messages = python(repository, "nmt_state_norm", *train, "training.max_updates=4")
    assert messages.count("was trained with another version of the plug-in nmt_state_norm") == 1
    (after,) = RunManifest.read(run).plugins.items()
    assert after[0] == before[0] and after[1] != before[1] and before[1][:12] in messages
    log = (run / "logs" / "rank-0.log").read_text()
    assert before[1] in log and after[1] in log

    # Workers inherit the name.
    translate = [*program, "translate", "--run", str(run), "--input", str(source), "--checkpoint", "last"]
    _, messages = python(
        repository, "state_norm", *translate, "--output", str(tmp_path / "out.de"), "--workers", "2", "--beam", "1"
    )
    assert len((tmp_path / "out.de").read_text().splitlines()) == len(source.read_text().splitlines())
    assert "another version" not in messages


def test_a_plugin_tests_itself(repository: Path) -> None:
    out, _ = python(repository, "state_norm", "-c", CHECKS, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    tables, *rows = out.strip().rsplit("\n", 1)
    assert "| `objective.state_norm.weight` | `0.1` | number ≥ 0 | factor in the loss; 0 disables it |" in tables
    assert "objective.r_drop" not in tables
    (row,) = map(json.loads, rows)
    assert row["method"] == "state_norm" and row["passed"]
