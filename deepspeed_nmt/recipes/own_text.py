"""Recipe, vocabulary and length of a training on text of one's own, for `launch/quickstart.sh SOURCE TARGET`.

    python -m deepspeed_nmt.recipes.own_text vocabulary SOURCE TARGET   options of `prepare`
    python -m deepspeed_nmt.recipes.own_text metric REFERENCE           metric of the translations
    python -m deepspeed_nmt.recipes.own_text recipe DATA DEVICE METRIC  arguments of `train`, without a length
    python -m deepspeed_nmt.recipes.own_text plan DATA DEVICE METRIC SPEED_RUN [MINUTES [PLAN]]
    python -m deepspeed_nmt.recipes.own_text outlook RUN                whether the validation score still rises

`plan` prints a reason, the minutes, and all arguments of `train`, one a line; SPEED_RUN is a run of a few updates,
and PLAN what was printed for fewer minutes: a run that trains on keeps the size of its updates.
The rules are functions of the number of pairs, the device, the minutes, and the speed that a few updates had there.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_nmt.console import output
from deepspeed_nmt.errors import DataError, UserError
from deepspeed_nmt.text import text_of, without_spaces

_LARGE_SCRIPT = 500
"""Number of characters needed for 99.95% of the text above which the others are left out, as of Chinese."""
_COVERAGE = 0.9995
_MAX_EPOCHS = 100
_TRAINING_SHARE = 0.85
"""Share of the minutes that updates take; the rest is for validation and checkpoints."""
_VALIDATIONS = 10
_UPDATES = 1500
"""Number of updates below which they become smaller, down to a quarter of the recipe's tokens, or these."""
_SMALLEST_UPDATE = 512
_SIZE = "batch.update_tokens="
_KANA = range(0x3040, 0x3100)
_HAN = range(0x4E00, 0xA000)
_GAIN = 0.01
"""Relative gain that counts as a rise."""


@dataclass(frozen=True)
class OwnRecipe:
    """A recipe with settings for some number of pairs on a device.

    Attributes:
        minutes: length by default.
        update_tokens: target tokens of an update.
    """

    name: str
    settings: Mapping[str, Any]
    reason: str
    minutes: int
    update_tokens: int

    def arguments(self, metric: str) -> list[str]:
        """Return arguments of `train`."""
        settings = {
            **self.settings,
            "batch.update_tokens": self.update_tokens,
            "schedule.name": "cosine",
            "validation.metrics": [metric],
            "validation.best_by": "auto",
            "validation.max_sentences": 200,
        }
        return ["--recipe", self.name, *(f"{key}={_value(value)}" for key, value in settings.items())]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def vocabulary(pairs: int, characters: Mapping[str, int]) -> tuple[int, float]:
    """Return size and character coverage of a joint vocabulary.

    Args:
        characters: number of occurrences of each character of both sides.
    """
    size = 500 if pairs < 2000 else 2000 if pairs < 50_000 else 8000
    left, needed = _COVERAGE * sum(characters.values()), 0
    for count in sorted(characters.values(), reverse=True):
        if left <= 0:
            break
        left, needed = left - count, needed + 1
    is_large = needed > _LARGE_SCRIPT
    singles = needed if is_large else len(characters)  # tokens that come before all merges
    return size + singles if 4 * singles > size else size, _COVERAGE if is_large else 1.0


def metric_for(references: Iterable[str]) -> str:
    """Return the metric for references: BLEU of characters if most have no spaces, of Chinese as sacreBLEU has it."""
    lines = [line for line in references if line.strip()]
    if 2 * sum(map(without_spaces, lines)) <= len(lines):
        return "bleu"
    codes = Counter(ord(character) for line in lines for character in line)
    kana, han = (sum(codes[code] for code in script) for script in (_KANA, _HAN))
    return "bleu_zh" if han > 10 * kana else "bleu_char"


def recipe_for(pairs: int, device: str) -> OwnRecipe:
    """Return the recipe for some number of training pairs on "cpu" or "gpu".

    Measured: 2,700 pairs of Multi30k, 330,000 target tokens, dropout 0.3, 140 s of one core of a busy CPU. Updates of
    1,024 tokens reached a validation loss of 4.63 (BLEU 2.4), of 2,048 tokens 4.95 (1.3). Of 50,000 pairs of a
    Japanese corpus, 392 updates of 2,048 tokens in six minutes of a core ended at BLEU 1.5. Dropout, sizes of the
    model and of the vocabulary, longer runs and GPUs were not compared.
    """
    if device == "gpu" and pairs >= 50_000:
        settings = {"model.dropout": 0.1 if pairs >= 1_000_000 else 0.3, "optimizer.clip_norm": 1.0}
        reason = "enough text for the Transformer BASE (D 512)"
        return OwnRecipe("transformer_base", settings, reason, 60, 16_384)
    dropout = 0.3 if pairs < 10_000 else 0.2 if pairs < 100_000 else 0.1
    update_tokens = 1024 if pairs < 10_000 else 2048
    reason = f"4+4 layers of D 128; the less text, the more dropout ({dropout}) and the smaller updates"
    return OwnRecipe("multi30k_cpu", {"model.dropout": dropout}, reason, 15 if pairs < 50_000 else 30, update_tokens)


def minutes_for(recipe: OwnRecipe, epoch_tokens: int, tokens_per_s: float) -> int:
    """Return how long to train if the user does not say it: as the recipe says, but at most 100 epochs."""
    return min(recipe.minutes, max(1, math.ceil(_MAX_EPOCHS * epoch_tokens / tokens_per_s / _TRAINING_SHARE / 60.0)))


def sized_for(recipe: OwnRecipe, minutes: int, tokens_per_s: float) -> OwnRecipe:
    """Return the recipe with updates of a half or a quarter of the size, if the minutes have room for few of them.

    Args:
        tokens_per_s: target tokens a second over all ranks.
    """
    updates = 60 * minutes * _TRAINING_SHARE * tokens_per_s / recipe.update_tokens
    parts = 1 if updates >= _UPDATES else 2 if 2 * updates >= _UPDATES else 4
    return replace(recipe, update_tokens=max(_SMALLEST_UPDATE, recipe.update_tokens // parts))


def length_arguments(recipe: OwnRecipe, minutes: int, tokens_per_s: float) -> list[str]:
    """Return the arguments of `train` for as many updates as the minutes have room for: a tenth of them is warm-up.

    Args:
        tokens_per_s: target tokens a second over all ranks.
    """
    validations = min(_VALIDATIONS, 2 + minutes)
    every = max(1, int(60 * minutes * _TRAINING_SHARE * tokens_per_s / recipe.update_tokens / validations))
    updates = validations * every
    return [
        f"training.max_updates={updates}",
        f"training.validate_every={every}",
        f"schedule.warmup_updates={min(4000, updates // 10)}",
    ]


def still_rises(scores: Sequence[float], *, higher_is_better: bool = True) -> bool:
    """Return True if the best score of the second half of the validations is 1% better than that of the first."""
    signed = [score if higher_is_better else -score for score in scores if math.isfinite(score)]
    half = len(signed) // 2
    if half == 0:
        return False
    before = max(signed[:half])
    return max(signed[half:]) > before + _GAIN * abs(before)


def logged(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the updates and values of each tag in the log of a run; lines that are no objects are left out."""
    series: dict[str, dict[int, float]] = {}
    file = run / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by a stop
            continue
        update = entry.get("update") if isinstance(entry, dict) else None
        if isinstance(update, int):
            for tag, value in entry.items():
                if isinstance(value, float):
                    series.setdefault(tag, {})[update] = value
    return {tag: sorted(values.items()) for tag, values in series.items()}


def _plan(data: Path, device: str, metric: str, speed_run: Path, minutes: str = "", before: str = "") -> list[str]:
    pairs, tokens = _size(data)
    speeds = [value for _, value in logged(speed_run).get("perf/target_tokens_per_s", [])][1:]  # the first has set-up
    if not speeds:
        raise DataError(f"no speed in {speed_run}; start again with --fresh")
    recipe, speed = recipe_for(pairs, device), sum(speeds) / len(speeds)
    length = int(minutes) if minutes else minutes_for(recipe, tokens, speed)
    sizes = [line for line in Path(before).read_text().splitlines() if line.startswith(_SIZE)] if before else []
    if sizes:
        recipe = replace(recipe, update_tokens=int(sizes[0].removeprefix(_SIZE)))
    else:
        recipe = sized_for(recipe, length, speed)
    arguments = length_arguments(recipe, length, speed)
    updates = int(arguments[0].partition("=")[2])
    reason = (
        f"{pairs:,} pairs, {device.upper()}: {recipe.reason}; {updates:,} updates of {recipe.update_tokens:,} tokens "
        f"({updates * recipe.update_tokens / max(1, tokens):.1f} epochs), for which {speed:,.0f} tokens/s need about "
        f"{length} min"
    )
    return [reason, f"{length}", *recipe.arguments(metric), *arguments]


def _size(data: Path) -> tuple[int, int]:
    """Return the training pairs and target tokens of a data directory."""
    try:
        training = json.loads((data / "meta.json").read_text(encoding="utf-8"))["splits"]["train"]
        return int(training["pairs"]), int(training["target"]["tokens"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{data / 'meta.json'} is not what `prepare` writes ({error}); start again with --fresh"
        ) from error


def _outlook(run: Path) -> list[str]:
    """Return a sentence on the validations of a run, and its updates; nothing if fewer than two are logged."""
    log = logged(run)
    losses = log.get("valid/loss", [])
    if len(losses) < 2:
        return []
    tag = next((tag for tag in ("valid/bleu", "valid/bleu_zh", "valid/bleu_char") if tag in log), "")
    scores, loss = [score for _, score in log.get(tag, [])], [loss for _, loss in losses]
    shown = [f"{score:.1f}" for score in scores] if tag else [f"{value:.3f}" for value in loss]
    rises = still_rises(scores) or still_rises(loss, higher_is_better=False)
    verdict = (
        "still improves: more minutes help" if rises else "hardly improves: more text would help, not more minutes"
    )
    line = f"{(tag or 'valid/loss').replace('/', ' ')}: {' '.join(shown[-_VALIDATIONS:])}; {verdict}"
    return [line, f"{losses[-1][0]}"]


def main(command: str, *words: str) -> list[str]:
    """Return the lines that a command prints."""
    if command == "vocabulary":
        pairs, characters = 0, Counter[str]()
        for name in words:
            with Path(name).open("rb") as file:
                for line in file:
                    pairs += 1
                    characters.update(text_of(line))
        size, coverage = vocabulary(pairs // len(words), characters)
        return ["--vocab-size", f"{size}", *(["--character-coverage", f"{coverage}"] if coverage < 1.0 else [])]
    if command == "metric":
        with Path(words[0]).open("rb") as lines:
            return [metric_for(map(text_of, lines))]
    if command == "recipe":
        return recipe_for(_size(Path(words[0]))[0], words[1]).arguments(words[2])
    if command == "plan":
        return _plan(Path(words[0]), words[1], words[2], Path(words[3]), *words[4:])
    return _outlook(Path(words[0]))


if __name__ == "__main__":
    try:
        output("\n".join(main(*sys.argv[1:])))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
