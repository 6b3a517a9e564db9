"""Speed in the log, and the choice of the best validation."""

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_nmt.config import load_config
from deepspeed_nmt.data.loader import Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import UpdateResult
from deepspeed_nmt.errors import EXIT_STOPPED
from deepspeed_nmt.evaluate.metrics import METRICS
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run.trainer import Trainer, warn_of_early_end
from deepspeed_nmt.run.validator import by_settings
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.configuration import TrainingConfig
from deepspeed_nmt.train.growth import GrowthConfig
from deepspeed_nmt.train.log import LogWindow, Workload
from deepspeed_nmt.train.loop import TrainingLoop
from deepspeed_nmt.train.progress import LogState, Progress
from deepspeed_nmt.train.validation import Choice, Validation, update_best

ALONE = World(0, 1, 0, torch.device("cpu"))


def window(workload: Workload | None, skip_second: bool = False, world: World = ALONE) -> dict[str, float]:
    sums_of_log = LogWindow(workload)
    for number in (1, 2):
        update = Update(
            number=number,
            micro_batches=[],
            target_tokens=300,
            padded_positions=1000,
            real_positions=800,
            after=Cursor(),
        )
        sums = {"loss": torch.tensor(900.0), "nll": torch.tensor(600.0)}
        skipped = skip_second and number == 2
        sums_of_log.add(update, UpdateResult(sums, 1.0, skipped, 1.0), waited=0.5, elapsed=2.0)
    return sums_of_log.flush(1e-3, world)


def test_mfu_counts_real_source_and_target_tokens() -> None:
    values = window(Workload(source_flops=10.0, target_flops=20.0, peak_flops=5500.0))
    # 1000 source and 600 target tokens in 4 seconds.
    assert values["perf/mfu"] == pytest.approx((10.0 * 1000 + 20.0 * 600) / (4.0 * 5500.0))
    assert values["perf/padding"] == pytest.approx(0.2)
    assert values["perf/data_wait"] == pytest.approx(0.25)
    assert values["perf/target_tokens_per_s"] == pytest.approx(150.0)


def test_values_of_a_corpus_are_its_own_after_a_change_of_the_mixture() -> None:
    """A run that was stopped within a window continues with corpora of other numbers."""

    def add(to: LogWindow, tokens: tuple[int, ...], nlls: tuple[float, ...]) -> None:
        sums = {"nll": sum(nlls), **{f"corpus/{number}": nll for number, nll in enumerate(nlls)}}
        update = Update(
            number=1, micro_batches=[], target_tokens=sum(tokens), padded_positions=1000, real_positions=800,
            after=Cursor(), corpus_tokens=tokens,
        )  # fmt: skip
        result = UpdateResult({name: torch.tensor(value) for name, value in sums.items()}, 1.0, False, 1.0)
        to.add(update, result, waited=0.5, elapsed=2.0)

    def flushed(names: list[str], tokens: tuple[int, ...], nlls: tuple[float, ...]) -> dict[str, float]:
        before, after = LogWindow(None, ["data", "small"]), LogWindow(None, names)
        add(before, (200, 100), (400.0, 500.0))
        after.restore([LogState.model_validate_json(before.state(ALONE).model_dump_json())], ALONE, ALONE.device)
        add(after, tokens, nlls)
        return after.flush(1e-3, ALONE)

    same = flushed(["data", "small"], (100, 300), (500.0, 700.0))
    assert (same["train/data/nll"], same["train/small/nll"]) == pytest.approx((900 / 300, 1200 / 400))
    assert same["data/small/share"] == pytest.approx(4 / 7)
    other = flushed(["data", "extra", "small"], (100, 100, 200), (500.0, 200.0, 600.0))
    assert [other[f"train/{name}/nll"] for name in ("data", "extra", "small")] == pytest.approx([5.0, 2.0, 3.0])
    assert [other[f"data/{name}/share"] for name in ("data", "extra", "small")] == pytest.approx([0.25, 0.25, 0.5])
    alone = flushed(["data"], (100,), (500.0,))
    assert alone["train/nll"] == pytest.approx(1400 / 400) and not any("corpus/1" in tag for tag in alone)


def test_all_ranks_add_up_the_same_sums_after_a_start_on_more_of_them() -> None:
    """A regularizer that is not due before the next line is in the log of the ranks that wrote the checkpoint."""
    saved = LogState(sums={"loss": 90.0, "ald": 2.0}, tokens_of={"loss": 30, "ald": 10}, tokens=30, worked=30)
    sums = []
    for rank in range(2):
        restored = LogWindow(None)
        restored.restore([saved], World(rank, 2, 0, torch.device("cpu")), ALONE.device)
        sums.append({name: float(value) for name, value in restored.sums.items()})
    assert sums == [{"loss": 90.0, "ald": 2.0}, {"loss": 0.0, "ald": 0.0}]


@pytest.mark.parametrize(
    ("before", "after"), [((4, 2), (1, 1)), ((4, 2), (4, 2)), ((4, 2), (4, 1)), ((4, 1), (4, 2))]
)
def test_sums_are_saved_once_by_ranks_that_share_a_model(before: tuple[int, int], after: tuple[int, int]) -> None:
    """A run continues with other numbers of ranks, and of tensor-parallel ones among them."""
    (ranks, shared), worlds = before, [World(rank, after[0], 0, ALONE.device, after[1]) for rank in range(after[0])]
    update = Update(
        number=1, micro_batches=[], target_tokens=30, padded_positions=90, real_positions=70, after=Cursor()
    )
    saved = []
    for rank in range(ranks):
        logged = LogWindow(None)
        logged.add(update, UpdateResult({"loss": torch.tensor(60.0)}, 1.0, False, 1.0), waited=0.5, elapsed=2.0)
        saved.append(logged.state(World(rank, ranks, 0, ALONE.device, shared)))
    total = dict.fromkeys(("loss", "positions/padded", "positions/real"), 0.0)
    for world in worlds:
        restored = LogWindow(None)
        restored.restore(saved, world, ALONE.device)
        total = {name: value + restored._own_sums(world)[name] for name, value in total.items()}
    assert list(total.values()) == [of * ranks / shared for of in (60.0, 90.0, 70.0)]


def validated(
    *measured: tuple[float, float], progress: Progress | None = None, by: str = "valid/bleu", least: float = 1.0
) -> tuple[list[int], Progress]:
    """The updates whose checkpoints are the best so far, of validations of (score, loss), and the progress."""
    best_at, progress = [], progress or Progress()
    for update, (score, loss) in enumerate(measured, 1):
        validation = Validation({}, Choice(by, least=least), score, loss)
        progress, is_best = update_best(replace(progress, update=update), validation, lambda update, than: True)
        best_at += [update] * is_best
    return best_at, progress


def test_while_bleu_is_near_zero_the_loss_decides_on_the_best_checkpoint_and_on_patience() -> None:
    best_at, progress = validated((0.034, 9.0), (0.0, 8.0), (0.9, 8.5), (0.003, 7.0), (0.0, 7.0))
    assert best_at == [1, 2, 4] and (progress.best_update, progress.validations_since_best) == (4, 1)
    assert not TrainingConfig(patience=2).ends_at(progress)
    assert validated((0.9, 7.5), progress=progress)[1].validations_since_best == 2
    assert validated((1.1, 9.0), progress=progress)[0] == [1], "a better BLEU wins with any loss"


def test_a_better_bleu_wins_and_of_equal_ones_the_lower_loss() -> None:
    assert validated((30.0, 2.0), (31.0, 2.5), (30.9, 1.0), (31.001, 2.4), (31.004, 2.4))[0] == [1, 2, 4]
    losses = [(-2.0, 2.0), (-1.999, 1.999), (-1.999, 1.999), (-2.1, 2.1)]
    assert validated(*losses, by="valid/loss", least=math.inf)[0] == [1, 2]


def test_scores_by_another_measure_are_not_compared() -> None:
    progress = validated((31.0, 2.0))[1]
    assert progress.best_by == "valid/bleu"
    best_at, progress = validated((-2.0, 2.0), (-2.1, 2.1), progress=progress, by="valid/loss", least=math.inf)
    assert best_at == [1] and (progress.best_by, progress.best_score) == ("valid/loss", -2.0)


@pytest.mark.parametrize(
    ("setting", "by", "best_at"),
    [
        ("validation.max_sentences=9", "valid/bleu", [1]),
        ("search.beam=1", "valid/bleu", [1]),
        ("search.beam=1", "valid/loss", []),
        ("validation.max_tokens=99", "valid/bleu", []),
        ("validation.metrics=[command:/x/a]", "valid/a", []),
        ("validation.metrics=[command:/x/a:lower]", "valid/a", [1]),
    ],
)
def test_scores_of_other_translations_are_not_compared(
    setting: str, by: str, best_at: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    text = TextForm("raw", "en", "zh")

    def described(settings: str, text: TextForm) -> str:
        config = load_config(settings=[settings])
        metrics = {**METRICS, **config.validation.commands}
        return by + by_settings(metrics.get(by.removeprefix("valid/")), config, text)

    before = validated((31.0, 2.0), by=described("validation.metrics=[command:/x/a]", text))[1]
    for now in (described(setting, text), described("validation.metrics=[command:/x/a]", TextForm("raw", "en"))):
        caplog.clear()
        assert validated((30.0, 2.5), progress=before, by=now)[0] == best_at
        assert ("begins anew" in caplog.text) == bool(best_at)
        best_at = [] if by == "valid/loss" else [1]


def test_nan_is_never_better() -> None:
    assert validated((-math.nan, math.nan), (-5.0, 5.0), (-math.nan, math.nan))[0] == [1, 2]
    assert validated((0.0, math.nan), (0.0, 5.0), (0.0, math.nan))[0] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["schedule.name=wsd", "schedule.decay_updates=9"], "training.max_updates=45, up to which schedule.name=wsd"),
        (["schedule.name=cosine", "training.max_updates=45"], ""),
        (["schedule.name=inverse_sqrt"], ""),
        (["growth.at=[20,60]", "growth.encoder_layers=[2,4]"], "set growth.at below that, instead of 60"),
        (["growth.at=[20]", "growth.encoder_layers=[2]"], ""),
        (["schedule.name=linear", "training.max_epochs=0"], ""),
        (["schedule.warmup_updates=45"], "after 45 updates or so, within the warm-up of schedule.warmup_updates=45"),
        (["schedule.warmup_updates=45", "schedule.skipped_updates=1"], ""),
        (
            ["schedule.name=cosine", "training.max_updates=45", "schedule.final_lr=1e-4", "optimizer.lr=5e-5"],
            "schedule.final_lr=0.0001 is above optimizer.lr=5e-05",
        ),
    ],
)
def test_an_end_that_leaves_out_what_the_settings_say_is_warned_of(
    settings: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(settings=["training.max_epochs=5", "schedule.warmup_updates=9", *settings])
    warn_of_early_end(config, Progress(update=5, epoch=0, epoch_update=10), 10)  # after a rollback
    warnings = [record.message for record in caplog.records]
    assert warnings == [] if not words else len(warnings) == 1 and words in warnings[0]


@pytest.mark.parametrize(
    ("max_epochs", "growth", "end", "words"),
    [
        (0, (), "", ", 0:03:00 left"),  # 90 updates, 2 s each
        (3, (), "", ", 0:00:50 left"),  # 2 epochs of 10 updates and half of one
        (0, (), "1060", ", 0:03:00 left, 0:01:00 until the job's time limit"),
        (0, (), "1200", ", 0:03:00 left"),
        (0, (), "soon", ", 0:03:00 left"),
        (0, (5, 40, 60), "", ", 0:01:00 until the model grows"),
        (3, (50,), "", ", 0:00:50 left"),
        (0, (10, 40), "", ""),
    ],
)
def test_the_log_has_the_time_left(
    max_epochs: int, growth: tuple[int, ...], end: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = object.__new__(TrainingLoop)
    loop.config = TrainingConfig(max_updates=100, max_epochs=max_epochs)
    loop.growth = GrowthConfig(at=growth, encoder_layers=growth)
    loop.loader = SimpleNamespace(order=SimpleNamespace(updates_in=lambda epoch: 10))
    loop._start = (500.0, 5)
    monkeypatch.setattr(time, "monotonic", lambda: 510.0)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    assert loop._time_left(Progress(update=10, epoch=0, epoch_update=5)) == words
    assert loop._time_left(Progress(update=100, epoch=9)) == ""


class _Stub(TrainingLoop):
    """A loop whose updates are skipped by number, and which records the updates after which it validates."""

    def __init__(self, stop_after: int, skipped: tuple[int, ...], growth: tuple[int, ...]) -> None:
        done: Any = SimpleNamespace(write=lambda *_, **__: None, begin=str, at=str, finish=str, saved_at=0)
        self.config = TrainingConfig(max_updates=20, validate_every=5, max_skipped=9)
        self.growth = GrowthConfig(at=growth, encoder_layers=growth)
        self.saver = self.ledger = self.watchdog = done
        self.loader: Any = SimpleNamespace(updates=lambda cursor, number: (each for each in ()))
        self._stop_after, self._skipped, self._now = stop_after, skipped, 0
        self.validated: list[int] = []

    def _update(self, progress: Progress, updates: Any) -> Progress:
        self._now = update = progress.update + 1
        return replace(progress, update=update, skipped=progress.skipped + 1 if update in self._skipped else 0)

    def _measure_collapse(self, progress: Progress) -> tuple[Progress, str]:
        return progress, ""

    def _validate(self, progress: Progress) -> Progress:
        self.validated.append(progress.update)
        self._validation_due = False
        return progress

    def _save(self, progress: Progress, *, must: bool) -> None:
        self.saved = progress

    def _stop_requested(self) -> bool:
        return self._now == self._stop_after


@pytest.mark.parametrize(("stop_after", "growth"), [(6, ()), (-1, (6,))])
def test_a_validation_that_skipped_updates_put_off_is_made_after_a_stop_or_a_growth_among_them(
    stop_after: int, growth: tuple[int, ...]
) -> None:
    loop = _Stub(stop_after, (5, 6, 7, 14), growth)
    loop.run(Progress(update=3))
    assert (loop.saved.update, loop.saved.skipped, loop.validated) == (6, 2, [])
    again = _Stub(-1, (5, 6, 7, 14), growth)
    again.run(loop.saved)
    assert again.validated == [8, 10, 15, 20]
    assert TrainingLoop.run(other := _Stub(-1, (14,), ()), Progress(update=13)) and other.validated == [15, 20]


def test_a_stop_after_the_last_update_is_the_end(tmp_path: Path) -> None:
    """Otherwise the same command would find nothing to do, and the event would be lost."""
    recorded: list[str] = []
    trainer: Any = SimpleNamespace(
        path=tmp_path,
        world=World(0, 1, 0, torch.device("cpu")),
        config=load_config(settings=["training.max_updates=4"]),
        stop=SimpleNamespace(agreed=True, signal_name="SIGUSR1"),
        events=SimpleNamespace(begun=True, record=lambda event, *_, **__: recorded.append(event)),
    )
    assert [Trainer._finish(trainer, Progress(update=update)) for update in (3, 4)] == [EXIT_STOPPED, 0]
    assert recorded == ["stop", "end"]
