"""A run whose model grows in its course: checkpoints of both depths, and resumption to the bit around the growth."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepspeed_nmt.api import Translator
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import load_config
from deepspeed_nmt.reports.page import RunPage
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.run.start import exits_settings
from tests.commands import log_of, refused, train_words
from tests.support import assert_same
from tests.system.conftest import SMALL

SETTINGS = [
    *(*SMALL, "training.max_updates=6", "training.validate_every=2", "training.log_every=2", "collapse.every=0"),
    *("validation.metrics=[]", "engine.name=plain", "model.decoder_layers=3", "schedule.name=wsd"),
    *("schedule.warmup_updates=2", "schedule.decay_updates=2", "growth.at=[3]", "growth.by=adjacent"),
    *("growth.encoder_layers=[1]", "growth.decoder_layers=[2]"),
    "objective.label_smoothed.smoothing=0.2",
]


@pytest.fixture(scope="module")
def grown(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates that grows from 1+2 to 2+3 layers after the third."""
    run = tmp_path_factory.mktemp("growth") / "run"
    assert main(train_words(data, run, *SETTINGS)) == 0
    return run


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("update-*"))


@pytest.mark.parametrize("newest", [2, 3, 4])
def test_a_run_killed_around_a_growth_resumes_to_the_bit(
    data: Path, grown: Path, tmp_path: Path, newest: int
) -> None:
    assert names(grown) == [f"update-{update:07d}" for update in (2, 3, 4, 6)]
    run = shutil.copytree(grown, tmp_path / "run")
    for name in names(run):
        if int(name[-7:]) > newest:
            shutil.rmtree(run / "checkpoints" / name)
    assert main(train_words(data, run, *SETTINGS)) == 0
    assert names(run) == names(grown)
    assert_same(run, grown, 6)


def test_every_command_reads_the_depth_that_a_checkpoint_has(
    data: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.open(grown)
    for update, depth in ((2, (1, 2)), (3, (1, 2)), (4, (2, 3)), (6, (2, 3))):
        assert run.model(f"update-{update:07d}").stages == depth
    assert [line["update"] for line in log_of(grown, "events") if line["event"] == "growth"] == [3]
    assert Translator.open(grown, checkpoint="update-0000003").translate(["a dog"])
    refused(["average", "--run", str(grown), "--last", "3"], capsys, "fewer layers", "update-0000003")
    assert main(["average", "--run", str(grown), "--last", "2"]) == 0
    assert run.model("average").stages == (2, 3)
    capsys.readouterr()
    assert main(["plan", "--config", str(grown / "config.yaml"), "--data", str(data), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    shallow, deep = (
        sum(weight.numel() for weight in run.model(name).parameters()) for name in ("update-0000003", "last")
    )
    assert (planned["until_update"], planned["parameters"]) == ({"3": shallow}, deep)
    later = [*SETTINGS, "growth.at=[4]", "training.max_updates=8"]
    refused(train_words(data, grown, *later), capsys, "growth.at is [4]", "stays at [3]")


def test_a_run_may_end_before_it_grows_but_not_begin_so(
    data: Path, grown: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = [*SETTINGS, "training.max_updates=3"]
    refused(train_words(data, tmp_path / "new", *shorter), capsys, "growth.at has 3", "training.max_updates is 3")
    run = shutil.copytree(grown, tmp_path / "run")
    for name in names(run)[1:]:
        shutil.rmtree(run / "checkpoints" / name)
    assert main(train_words(data, run, *shorter)) == 0
    assert names(run)[-1] == "update-0000003" and Run.open(run).model("last").stages == (1, 2)
    assert log_of(run, "metrics")[-1]["update"] == 3, "a line of the log ends where the model grows"
    assert "1 + 2 layers" in RunPage(run).subtitle and "2 + 3 layers" in RunPage(grown).subtitle


def test_exits_are_added_to_the_layers_that_a_checkpoint_has(grown: Path) -> None:
    for which, depths in (("update-0000003", (1, 2)), ("last", (2, 3))):
        config = load_config(file=grown / "config.yaml", settings=exits_settings(grown, which, "1"))
        model = config.for_update(1).model
        assert (model.encoder_layers, model.decoder_layers) == depths  # type: ignore[attr-defined]
        assert config.objective["added_exits"].smoothing == 0.2  # type: ignore[attr-defined]
