"""The rules for text of one's own: vocabulary, metric, recipe, length, and the verdict on its validations."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from deepspeed_nmt.config import load_config
from deepspeed_nmt.data.vocabulary_training import train_subwords
from deepspeed_nmt.recipes.own_text import (
    length_arguments,
    main,
    metric_for,
    minutes_for,
    recipe_for,
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
        words = [*recipe.arguments("bleu_zh"), *length_arguments(recipe, 15, 9000.0)]
        assert words[0] == "--recipe"
        config = load_config(words[1], settings=words[2:])
        assert config.schedule.name == "cosine" and config.validation.metrics == ("bleu_zh",)
        dropouts.append(config.flat()["model.dropout"])
    assert dropouts[0] > dropouts[-1]


def test_length_fills_the_minutes() -> None:
    recipe = recipe_for(30_000, "cpu")
    for minutes, speed in ((1, 900.0), (15, 9000.0), (60, 100_000.0)):
        updates, every, warmup = (int(word.partition("=")[2]) for word in length_arguments(recipe, minutes, speed))
        seconds = updates * recipe.update_tokens / speed
        assert 0.75 * 60 * minutes < seconds <= 0.85 * 60 * minutes
        assert updates % every == 0 and 3 <= updates // every <= 10 and warmup == min(4000, updates // 10)
    assert minutes_for(recipe, 400_000, 9000.0) == recipe.minutes
    assert minutes_for(recipe, 10_000, 9000.0) == 3, "100 epochs are a million tokens"


def test_updates_are_smaller_where_few_have_room() -> None:
    recipe = recipe_for(30_000, "cpu")  # a minute of 9,000 tokens/s has room for 224 updates of 2,048
    sizes = [sized_for(recipe, minutes, 9000.0).update_tokens for minutes in (1, 3, 4, 6, 7, 60)]
    assert sizes == [512, 512, 1024, 1024, 2048, 2048]
    assert sized_for(recipe_for(3000, "cpu"), 1, 9000.0).update_tokens == 512, "not below this"


def test_a_longer_plan_keeps_the_size_of_updates(tmp_path: Path) -> None:
    split = {"pairs": 30_000, "target": {"tokens": 450_000}}
    (tmp_path / "meta.json").write_text(json.dumps({"splits": {"train": split}}), encoding="utf-8")
    entries = [json.dumps({"update": update, "perf/target_tokens_per_s": 9000.0}) for update in (10, 20, 30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(entries), encoding="utf-8")
    words = ["plan", str(tmp_path), "cpu", "bleu", str(tmp_path)]
    short = main(*words, "2")
    (tmp_path / "plan").write_text("\n".join(short) + "\n", encoding="utf-8")
    assert "batch.update_tokens=512" in short and "batch.update_tokens=2048" in main(*words, "60")
    longer = main(*words, "60", str(tmp_path / "plan"))
    assert "batch.update_tokens=512" in longer and longer[1] == "60"


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

    assert main("outlook", str(tmp_path)) == []
    sentence, updates = outlook([4.0, 3.0, 2.5, 2.4], [1.0, 9.0, 15.0, 18.0])
    assert "1.0 9.0 15.0 18.0; still improves" in sentence and updates == "40"
    assert "hardly improves" in outlook([3.0, 2.5, 2.6, 2.7], [1.0, 19.0, 19.1, 18.0])[0]
    assert "still improves" in outlook([6.0, 5.8, 5.5, 5.0], [0.5, 0.8, 0.1, 0.2])[0], "BLEU of a new model is noise"
