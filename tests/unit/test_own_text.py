"""The rules for text of one's own: vocabulary, metric, recipe, length, and the verdict on its validations."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from deepspeed_nmt.config import load_config
from deepspeed_nmt.data.vocabulary_training import train_subwords
from deepspeed_nmt.recipes.own_text import (
    _plan,
    fitted,
    length_arguments,
    main,
    metric_for,
    minutes_for,
    recipe_for,
    seconds_left,
    sized_for,
    still_rises,
    vocabulary,
)


def test_vocabulary_of_a_large_script_has_room_for_its_characters(tmp_path: Path) -> None:
    assert [vocabulary(pairs, Counter("abc")) for pairs in (1999, 2000, 50_000)] == [
        (500, 1.0),
        (2000, 1.0),
        (8000, 1.0),
    ]
    noisy = Counter({chr(65 + number): 10**6 for number in range(100)} | {chr(0x4E00 + n): 1 for n in range(3000)})
    assert vocabulary(500_000, noisy) == (11_100, 1.0), "rare letters of an alphabet are not left out"
    assert vocabulary(1350, Counter({chr(0x4E00 + n): 9 for n in range(900)})) == (1400, 0.9995)
    rng = random.Random(1)
    han, weights = [chr(0x4E00 + number) for number in range(4000)], [1 / rank for rank in range(1, 4001)]
    lines = ["".join(rng.choices(han, weights, k=15)) + "。" for _ in range(3000)]
    text = tmp_path / "text"
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    option, size, coverage, share = main("vocabulary", str(text), str(text))
    assert (option, coverage, share) == ("--vocab-size", "--character-coverage", "0.9995")
    assert 3000 < int(size) < 6000
    assert train_subwords(lines, int(size), character_coverage=0.9995).size <= int(size)


def test_metric_fits_the_script() -> None:
    assert metric_for(["Ein Hund schläft.", "北京 is large", ""]) == "bleu"
    assert metric_for(["我们在北京学习。", "他今天不在家里。"]) == "bleu_zh"
    assert metric_for(["私は東京に住んでいます。"]) == "bleu_char"


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_arguments_are_settings_of_train(device: str) -> None:
    dropouts = []
    for pairs in (3000, 30_000, 119_000, 500_000, 2_000_000):
        recipe = recipe_for(pairs, device)
        words = [*recipe.arguments("bleu_zh"), *length_arguments(recipe.update_tokens, 900.0, 9000.0)]
        assert words[0] == "--recipe"
        config = load_config(words[1], settings=words[2:])
        assert config.schedule.name == "cosine" and config.validation.metrics == ("bleu_zh",)
        dropouts.append(config.flat()["model.dropout"])
    assert dropouts[0] > dropouts[-1]


def test_length_fills_the_minutes() -> None:
    recipe = recipe_for(30_000, "cpu")
    for minutes, speed in ((1, 900.0), (15, 9000.0), (60, 100_000.0)):
        words = length_arguments(recipe.update_tokens, 60.0 * minutes, speed)
        updates, every, log_every, warmup = (int(word.partition("=")[2]) for word in words)
        seconds = updates * recipe.update_tokens / speed
        assert 0.75 * 60 * minutes < seconds <= 0.85 * 60 * minutes
        assert updates % every == 0 and 3 <= updates // every <= 10 and warmup == min(4000, updates // 10)
        assert log_every <= every
    assert minutes_for(recipe, 400_000, 9000.0) == recipe.minutes
    assert minutes_for(recipe, 10_000, 9000.0) == 3, "100 epochs are a million tokens"


def test_the_trial_and_two_starts_are_part_of_the_minutes() -> None:
    assert seconds_left(3, spent=30.0, measured=18.0) == 180.0 - 30.0 - 12.0
    assert seconds_left(3, spent=0.0, measured=18.0) == 180.0, "the trial was made by an earlier start"
    assert seconds_left(1, spent=50.0, measured=6.0) == 30.0, "half of them, however slow a start is"


def test_updates_are_smaller_where_few_have_room() -> None:
    recipe = recipe_for(30_000, "cpu")  # a minute of 9,000 tokens/s has room for 224 updates of 2,048
    sizes = [sized_for(recipe, 60.0 * minutes, 9000.0).update_tokens for minutes in (1, 3, 4, 6, 7, 60)]
    assert sizes == [512, 512, 1024, 1024, 2048, 2048]
    assert sized_for(recipe_for(3000, "cpu"), 60.0, 9000.0).update_tokens == 512, "not below this"


def test_too_few_tokens_are_told_with_the_minutes_that_would_do() -> None:
    recipe, minutes = fitted(20_000, "cpu", 400_000, seconds=150.0, tokens_per_s=150.0)
    small = load_config("multi30k_cpu", settings=recipe.arguments("")[2:]).flat()
    assert minutes == 67 and small["model.encoder_layers"] == 1 and small["batch.update_tokens"] == 512
    assert fitted(20_000, "gpu", 400_000, seconds=10.0, tokens_per_s=9000.0)[1] == recipe_for(20_000, "gpu").minutes
    assert fitted(20_000, "cpu", 400_000, seconds=70.0, tokens_per_s=9000.0)[1] == 0
    assert fitted(150, "cpu", 2000, seconds=30.0, tokens_per_s=9000.0)[1] == 0, "so little text does not give more"


@pytest.mark.parametrize("speed", [60.0, 100.0, 300.0, 600.0])
def test_the_minutes_that_are_advised_are_enough(speed: float, tmp_path: Path) -> None:
    """A start with more minutes has a longer trial; each start takes 25 s."""
    (tmp_path / "data").mkdir()
    (tmp_path / "speed").mkdir()
    sizes = {"pairs": 20_000, "target": {"tokens": 380_000}}
    (tmp_path / "data" / "meta.json").write_text(json.dumps({"splits": {"train": sizes}}))
    minutes, warnings = 5, []
    for _ in range(2):
        updates = max(1, int(min(20, 6.0 * minutes * speed / 512)))
        lines = [json.dumps({"update": n, "perf/target_tokens_per_s": speed}) for n in range(1, updates + 1)]
        (tmp_path / "speed" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        spent = f"{updates * 512 / speed + 25.0:.0f}"
        planned = _plan(tmp_path, "cpu", "bleu", spent, str(minutes))
        warnings.append(planned[1])
        minutes = int(planned[4].split()[-1])
    assert warnings[0] and not warnings[1], "the second plan is for the minutes that the first one advises"


def test_few_epochs_need_less_dropout() -> None:
    def dropout(pairs: int, device: str, epochs: float) -> float:
        recipe, _ = fitted(pairs, device, 1_000_000, seconds=1e6 * epochs / 0.85 / 9000.0, tokens_per_s=9000.0)
        return float(recipe.settings["model.dropout"])

    assert [dropout(3000, "cpu", epochs) for epochs in (1.0, 4.9, 5.1)] == [0.2, 0.2, 0.3]
    assert dropout(200_000, "cpu", 1.0) == 0.1 and dropout(60_000, "gpu", 1.0) == 0.3


def test_few_updates_need_few_layers() -> None:
    def layers(minutes: int, device: str = "cpu") -> int:
        recipe, _ = fitted(20_000, device, 382_000, seconds=60.0 * minutes, tokens_per_s=3500.0)
        assert recipe.speed == (1.0 if recipe.settings["model.encoder_layers"] > 1 else 1.25)
        return int(recipe.settings["model.decoder_layers"])

    assert [layers(minutes) for minutes in (3, 6, 30, 60)] == [1, 1, 2, 2] and layers(60, "gpu") == 4


def planned(out: Path, *words: str, trial: float = 0.0, run: float = 0.0) -> list[str]:
    """Return a plan for 30,000 pairs by the speeds of a trial and of a run, 0 if there is none."""
    for name, speed in (("speed", trial), ("run", run)):
        (out / name).mkdir(exist_ok=True)
        entries = [json.dumps({"update": update, "perf/target_tokens_per_s": speed}) for update in (1, 2, 3)]
        (out / name / "metrics.jsonl").write_text("\n".join(entries) if speed else "", encoding="utf-8")
    (out / "data").mkdir(exist_ok=True)
    split = {"pairs": 30_000, "target": {"tokens": 450_000}}
    (out / "data" / "meta.json").write_text(json.dumps({"splits": {"train": split}}), encoding="utf-8")
    lines = main("plan", str(out), "cpu", "bleu", *words)
    (out / "plan").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return lines


def test_a_longer_plan_keeps_what_the_run_has(tmp_path: Path) -> None:
    short = planned(tmp_path, "12", "2", trial=9000.0)
    assert "batch.update_tokens=512" in short and short[1:5] == ["", "2", "96", "--minutes 4"]
    assert "batch.update_tokens=2048" in planned(tmp_path, "12", "60", trial=9000.0), "nothing was trained"
    planned(tmp_path, "12", "2", trial=9000.0)
    longer = planned(tmp_path, "0", "60", trial=9000.0, run=4500.0)
    assert "batch.update_tokens=512" in longer and longer[2:4] == ["60", "3600"]
    updates = 10 * int(3600 * 0.85 * 4500 / 512 / 10)
    assert f"training.max_updates={updates}" in longer, "by the speed of the run"
    assert f"({updates * 512 / 480_000:.1f} epochs)" in longer[0], "of tokens as the speed counts them, with EOS"


def test_a_plan_too_short_to_learn_says_so_and_takes_the_smallest_recipe(tmp_path: Path) -> None:
    slow = planned(tmp_path, "50", "3", trial=150.0)
    assert "69 min would suit" in slow[1] and slow[4] == "--fresh --minutes 69"
    assert {"model.decoder_layers=1", "validation.metrics=[]"} <= set(slow)
    assert "assumed speed of 500" in planned(tmp_path, "50", "3")[0], "no update of the trial ended"
    assert planned(tmp_path, "12", "3", trial=9000.0)[1] == ""


def test_the_trial_has_a_tenth_of_the_minutes(tmp_path: Path) -> None:
    planned(tmp_path, "12", trial=9000.0)
    assert [main("trial", str(tmp_path), "cpu", *minutes)[0] for minutes in (["3"], [])] == ["18", "90"]
    assert "batch.update_tokens=512" in main("trial", str(tmp_path), "cpu")


LAUNCHER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[4])))
run = pathlib.Path(sys.argv[1])
time.sleep(0.5)  # a start
(run / "goodput.jsonl").open("a").write("{}")
with (run / "metrics.jsonl").open("a") as log:
    for update in range(int(sys.argv[2])):
        log.write('{"update": %d, "perf/target_tokens_per_s": 9.0}\\n' % update)
if sys.argv[3] == "ends":
    sys.exit(3)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("seconds", "updates", "launcher", "status"),
    [
        ("0.2", "0", ("1", "sleeps", "75"), 0),
        ("0.2", "0", ("1", "sleeps", "0"), 0),  # it has just ended itself
        ("60", "2", ("2", "sleeps", "75"), 0),
        ("60", "0", ("1", "ends", "75"), 3),
    ],
)
def test_training_is_stopped_by_seconds_or_updates(
    seconds: str, updates: str, launcher: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    (tmp_path / "goodput.jsonl").write_text("{}", encoding="utf-8")  # of an earlier start
    began = time.monotonic()
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), *launcher]
    words = [sys.executable, "-m", "deepspeed_nmt.recipes.own_text", "watch", str(tmp_path), seconds, updates]
    done = subprocess.run([*words, *command], capture_output=True, text=True, check=False)
    assert done.returncode == status and time.monotonic() - began < 30, done.stderr
    assert len((tmp_path / "goodput.jsonl").read_text(encoding="utf-8")) == 4, "time counts from the new start"
    assert (" warning: " in done.stdout) == (seconds == "0.2" and launcher[2] == "75")


def test_a_trial_that_does_not_begin_is_given_up(tmp_path: Path) -> None:
    signals = (
        "import signal, time; signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))"
    )
    began = time.monotonic()
    words = [sys.executable, "-m", "deepspeed_nmt.recipes.own_text", "watch", str(tmp_path), "0.1", "2"]
    done = subprocess.run([*words, sys.executable, "-c", f"{signals}\ntime.sleep(60)"], check=False)
    assert done.returncode == 0 and time.monotonic() - began < 30


def test_verdict_on_validations(tmp_path: Path) -> None:
    assert still_rises([5.0, 20.0, 25.0, 28.0]) and not still_rises([20.0, 28.0, 28.1, 27.0])
    assert not still_rises([]) and not still_rises([3.0])
    assert still_rises([6.0, 5.0], higher_is_better=False) and not still_rises([5.0, 5.2], higher_is_better=False)

    def outlook(losses: list[float], scores: list[float]) -> list[str]:
        lines = [
            json.dumps({"update": 10 * number, "valid/loss": loss, "valid/bleu": score})
            for number, (loss, score) in enumerate(zip(losses, scores, strict=True), 1)
        ]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"update": 99, "val']), encoding="utf-8")
        return main("outlook", str(tmp_path))

    assert "too few to tell" in main("outlook", str(tmp_path))[0]
    sentence, updates = outlook([4.0, 3.0, 2.5, 2.4], [1.0, 9.0, 15.0, 18.0])
    assert "1.0 9.0 15.0 18.0; still improves" in sentence and updates == "40"
    assert "hardly improves" in outlook([3.0, 2.5, 2.6, 2.7], [1.0, 19.0, 19.1, 18.0])[0]
    assert "still improves" in outlook([6.0, 5.8, 5.5, 5.0], [0.5, 0.8, 0.1, 0.2])[0], "BLEU of a new model is noise"
