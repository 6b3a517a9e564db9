"""metrics.jsonl of a run: damaged, on a full disk, and with numbers that are not finite."""

import errno
import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from deepspeed_nmt.console import setup_logging
from deepspeed_nmt.reports.run_log import RunLog
from deepspeed_nmt.train.log import METRICS_FILE, Metrics
from deepspeed_nmt.train.progress import Progress

GOOD = [{"update": update, "train/target_tokens": 100.0 * update, "valid/bleu": 1.0 * update} for update in (1, 2, 3)]
BAD = [
    b'{"update": 4, "note": "\xff"}',
    b'{"train/target_tokens": 500.0, "valid/bleu": 9.0}',
    b'{"update": "four", "train/target_tokens": 500.0}',
    b'{"update": NaN, "train/target_tokens": 500.0}',
    b"null",
    b'{"update": 5, "train/tar',
]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A run whose log has good lines and bad ones."""
    good = [json.dumps(entry).encode() for entry in GOOD]
    (tmp_path / METRICS_FILE).write_bytes(b"\n".join([good[0], *BAD[:-1], *good[1:], BAD[-1]]))
    return tmp_path


def test_a_run_continues_a_damaged_log(damaged: Path) -> None:
    with Metrics(damaged, True, 2, 9) as metrics:
        metrics.log(Progress(update=3), {"valid/bleu": 5.0})
    lines = (damaged / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3]


def test_training_continues_without_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    setup_logging()
    with Metrics(tmp_path, True, 0, 9) as metrics:
        metrics.log(Progress(update=1), {"valid/bleu": 1.0})
        board = metrics._board
        assert board is not None
        board.flush()
        with monkeypatch.context() as disk:
            disk.setattr(RecordWriter, "write", full)
            for update in (2, 3, 4):
                metrics.log(Progress(update=update), {"valid/bleu": 2.0})
                if metrics._board is not None:
                    with suppress(OSError):
                        metrics._board.flush()
        metrics.log(Progress(update=5), {"valid/bleu": 5.0})
    error = capsys.readouterr().err
    assert error.count("metrics could not be written") == 1 and "Traceback" not in error
    lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3, 4, 5]


def test_the_log_is_valid_json_and_numbers_that_are_not_finite_are_read_as_nan(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    with Metrics(tmp_path, True, 0, 9) as metrics:
        metrics.log(Progress(update=1, target_tokens=70), {"train/grad_norm": math.inf, "train/loss": math.nan})
    infinite = b'{"update": 2, "train/target_tokens": 90.0, "train/loss": NaN, "train/grad_norm": -Infinity}\n'
    file = tmp_path / METRICS_FILE
    assert json.loads(file.read_text(), parse_constant=refuse) == {
        "update": 1, "train/target_tokens": 70.0, "train/grad_norm": None, "train/loss": None,
    }  # fmt: skip
    file.write_bytes(file.read_bytes() + infinite)
    log = RunLog.read(tmp_path)
    assert log.damaged == 0 and log.tokens == 90
    for series in map(log.series, ("train/loss", "train/grad_norm")):
        assert [*series] == [1, 2] and not series.finite


def test_settings_are_in_tensorboard_for_comparisons(tmp_path: Path) -> None:
    settings = {
        "model.norm": "pre",
        "optimizer.lr": 0.5,
        "training.notify": "x" * 999,
        "batch.exits": [1, 2],
        "a.b": None,
    }
    for update in (0, 1):  # resumed
        with Metrics(tmp_path, True, update, 9, settings, ("valid/bleu",)) as metrics:
            metrics.log(Progress(update=update + 1), {"valid/bleu": 5.0})
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= board.summary_metadata.keys()
    content = board.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["optimizer.lr"].number_value == 0.5 and values["model.norm"].string_value == "pre"
    assert len(values["training.notify"].string_value) == 200 and values["batch.exits"].string_value == "[1, 2]"
    content = board.summary_metadata["_hparams_/experiment"].plugin_data.content
    assert [info.name.tag for info in HParamsPluginData.FromString(content).experiment.metric_infos] == ["valid/bleu"]


@pytest.mark.parametrize("update", [0, 2])
def test_a_curve_has_nothing_of_updates_that_are_made_again(tmp_path: Path, update: int) -> None:
    """A run that was killed before its first checkpoint begins again, with 0 updates made."""
    board = tmp_path / "tensorboard"
    for first, value in ((0, 1.0), (update, 2.0)):
        with Metrics(tmp_path, True, first, 9) as metrics:
            for number in range(first + 1, 6):
                metrics.log(Progress(update=number), {"train/loss": value})
        # The names of one second and process need not be in order.
        newest = max(board.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        newest.rename(board / f"events.out.tfevents.{value}")
    points = EventAccumulator(str(board)).Reload().Scalars("train/loss")
    assert [(point.step, point.value) for point in points] == [(n, 1.0 + (n > update)) for n in range(1, 6)]


BLACK, WHITE = 0, 255
