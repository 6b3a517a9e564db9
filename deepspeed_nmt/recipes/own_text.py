"""Recipe, vocabulary and length of a training on text of one's own, for `launch/quickstart.sh SOURCE TARGET`.

    python -m deepspeed_nmt.recipes.own_text vocabulary SOURCE TARGET   options of `prepare`
    python -m deepspeed_nmt.recipes.own_text metric REFERENCE           metric of the translations
    python -m deepspeed_nmt.recipes.own_text trial OUT DEVICE [MINUTES] seconds and arguments of `train` for a trial
    python -m deepspeed_nmt.recipes.own_text watch RUN SECONDS UPDATES COMMAND...   train for no longer than that
    python -m deepspeed_nmt.recipes.own_text plan OUT DEVICE METRIC SPENT [MINUTES]
    python -m deepspeed_nmt.recipes.own_text outlook RUN                whether the validation score still rises

OUT has `data`, `speed` (of the trial, which took SPENT seconds) and `run`. `plan` prints a reason, a warning or "",
the minutes, the seconds left, options that train on, and arguments of `train`, one a line. A run that trains on keeps
those of OUT/plan, but for its length. The rules are functions of the number of pairs, the device, the minutes, and
the speed that a few updates had there, in target tokens a second over all ranks.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_nmt.console import output, setting
from deepspeed_nmt.errors import EXIT_STOPPED, DataError, UserError
from deepspeed_nmt.text import text_of, without_spaces

_LARGE_SCRIPT = 500
"""Number of characters needed for 99.95% of the text above which the others are left out, as of Chinese."""
_COVERAGE = 0.9995
_MAX_EPOCHS = 100
_TRAINING_SHARE = 0.85
"""Share of the seconds that updates take; the rest is for validation and checkpoints."""
_LEARNS = 500_000
"""Target tokens below which a model of this kind translates nothing.

Measured: the first 0.86 million of 8.6 on Multi30k gave a validation BLEU of 22, 0.33 million on 2,700 pairs of it
2.4, 0.80 million of a Japanese corpus 1.5.
"""
_TRIAL_SHARE = 0.1
"""Share of the minutes for the trial, from its first update on."""
_VALIDATIONS = 10
_UPDATES = 1500
"""Number of updates below which they become smaller, down to a quarter of the recipe's tokens, or these."""
_SMALLEST_UPDATE = 512
_FEW_EPOCHS, _FEW_UPDATES = 5, 2500
"""Numbers of epochs below which dropout is lower, and of updates below which a model has 1+1 layers."""
_SHALLOW_SPEED = 1.25
"""Speed of 1+1 layers relative to the trial, which is deeper; 1.3 to 1.7 times that of 2+2 were measured."""
_LENGTH = ("training.max_updates=", "training.validate_every=", "training.log_every=", "schedule.warmup_updates=")
_SPEED = "perf/target_tokens_per_s"
_UNKNOWN_SPEED = 500.0
"""Target tokens a second if the trial ended before its first update; cautious, a busy CPU."""
_TRIAL_UPDATES = 20
"""Updates of a whole trial (launch/quickstart.sh)."""
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
        speed: relative to that of the trial.
    """

    name: str
    settings: Mapping[str, Any]
    reason: str
    minutes: int
    update_tokens: int
    speed: float = 1.0

    def arguments(self, metric: str) -> list[str]:
        """Return arguments of `train` without a length; the metric "" stands for the loss alone."""
        settings = {
            **self.settings,
            "batch.update_tokens": self.update_tokens,
            "schedule.name": "cosine",
            "validation.metrics": [metric] if metric else [],
            "validation.best_by": "auto",
            "validation.max_sentences": 200,
        }
        return ["--recipe", self.name, *(f"{key}={setting(value)}" for key, value in settings.items())]


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

    Measured on cuts of 3,000 to 100,000 pairs (the record `own_text`): in six minutes of a core 2+2 layers end 9 to
    14 BLEU above 4+4, in twenty 3 above, since they make more updates and need fewer. Updates of four times the size
    lose 2 to 4. 1+1 layers end as high as 2+2 or higher (0 to 6) if these make less than 2,200 updates. With 0.1
    instead of 0.2 of dropout 20,000 pairs end 1.3 higher after 3 epochs, with either number of layers; with 0.2
    instead of 0.3, 3,000 pairs the same after 15. A GPU has time for 4+4, of which nothing was measured.
    """
    if device == "gpu" and pairs >= 50_000:
        settings = {"model.dropout": 0.1 if pairs >= 1_000_000 else 0.3, "optimizer.clip_norm": 1.0}
        reason = "enough text for the Transformer BASE (D 512)"
        return OwnRecipe("transformer_base", settings, reason, 60, 16_384)
    dropout = 0.3 if pairs < 10_000 else 0.2 if pairs < 100_000 else 0.1
    update_tokens = 1024 if pairs < 10_000 else 2048
    layers = 2 if device == "cpu" else 4
    settings = {"model.dropout": dropout, "model.encoder_layers": layers, "model.decoder_layers": layers}
    reason = f"{layers}+{layers} layers of D 128; the less text, the more dropout and the smaller updates"
    return OwnRecipe("multi30k_cpu", settings, reason, 15 if pairs < 50_000 else 30, update_tokens)


def minutes_for(recipe: OwnRecipe, epoch_tokens: int, tokens_per_s: float) -> int:
    """Return how long to train if the user does not say it: as the recipe says, but at most 100 epochs."""
    return min(recipe.minutes, max(1, math.ceil(_MAX_EPOCHS * epoch_tokens / tokens_per_s / _TRAINING_SHARE / 60.0)))


def seconds_left(minutes: int, spent: float, measured: float) -> float:
    """Return the seconds for training; those the trial spent, but did not measure, are a start, which comes again."""
    return max(30.0 * minutes, 60.0 * minutes - spent - max(0.0, spent - measured))


def sized_for(recipe: OwnRecipe, seconds: float, tokens_per_s: float) -> OwnRecipe:
    """Return the recipe with updates of a half or a quarter of the size, if the seconds have room for few of them."""
    updates = seconds * _TRAINING_SHARE * tokens_per_s / recipe.update_tokens
    parts = 1 if updates >= _UPDATES else 2 if 2 * updates >= _UPDATES else 4
    return replace(recipe, update_tokens=max(_SMALLEST_UPDATE, recipe.update_tokens // parts))


def shaped_for(recipe: OwnRecipe, updates: float, epochs: float) -> OwnRecipe:
    """Return a CPU's recipe with 1+1 layers for few updates; for few epochs with 0.1 less dropout, but 0.1."""
    if epochs < _FEW_EPOCHS:
        dropout = max(0.1, round(recipe.settings["model.dropout"] - 0.1, 2))
        recipe = replace(recipe, settings={**recipe.settings, "model.dropout": dropout})
    if updates < _FEW_UPDATES:
        settings = {**recipe.settings, "model.encoder_layers": 1, "model.decoder_layers": 1}
        reason = "1+1 layers of D 128, which need few updates"
        recipe = replace(recipe, settings=settings, reason=reason, speed=_SHALLOW_SPEED)
    return recipe


def fitted(
    pairs: int, device: str, epoch_tokens: int, seconds: float, tokens_per_s: float, lost: float = 0.0
) -> tuple[OwnRecipe, int]:
    """Return the recipe for some seconds; if they are too few to learn, the smallest, and the minutes that suit.

    Of these minutes a start loses some seconds before the training.
    """
    recipe, speed = recipe_for(pairs, device), _TRAINING_SHARE * tokens_per_s
    needed, tokens = min(_LEARNS, _MAX_EPOCHS * epoch_tokens), seconds * speed
    chosen = sized_for(recipe, seconds, tokens_per_s)
    if tokens < needed:
        chosen = replace(recipe_for(pairs, "cpu"), update_tokens=_SMALLEST_UPDATE)
    elif device != "cpu":
        return chosen, 0
    minutes = 0 if tokens >= needed else max(recipe.minutes, 1 + math.ceil((needed / speed + lost) / 60.0))
    return shaped_for(chosen, tokens / chosen.update_tokens, tokens / max(1, epoch_tokens)), minutes


def length_arguments(update_tokens: int, seconds: float, tokens_per_s: float) -> list[str]:
    """Return the arguments of `train` for as many updates as the seconds have room for, a tenth of them warm-up."""
    validations = min(_VALIDATIONS, 2 + int(seconds / 60.0))
    every = max(1, int(seconds * _TRAINING_SHARE * tokens_per_s / update_tokens / validations))
    updates = validations * every
    values = (updates, every, min(50, every), min(4000, updates // 10))
    return [f"{key}{value}" for key, value in zip(_LENGTH, values, strict=True)]


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


def watch(run: Path, seconds: float, updates: int, command: Sequence[str]) -> int:
    """Run the launcher, stop it some seconds after training begins or after some updates (0: any), return its status.

    It is 0 if it was stopped. A trial, of some updates, is given up if it has not begun in four times the seconds.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # the launcher gets them too
        signal.signal(number, lambda *_: None)
    ledger, has_begun = run / "goodput.jsonl", False
    before = ledger.exists() and ledger.stat().st_size
    deadline = time.monotonic() + 4.0 * seconds if updates else math.inf
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(0.2)
            if not has_begun and ledger.exists() and ledger.stat().st_size > before:
                has_begun, deadline = True, time.monotonic() + seconds
            if time.monotonic() >= deadline or 0 < updates <= len(logged(run).get(_SPEED, ())):
                process.terminate()
                if not has_begun:  # no rank reads the request; a second one kills them
                    time.sleep(3.0)
                    process.terminate()
                if process.wait() == EXIT_STOPPED and not updates:
                    output(f"{time.strftime('%X')} warning: the minutes ended before the last planned update")
                return 0 if process.returncode == EXIT_STOPPED or not has_begun else process.returncode
        return process.returncode


def _plan(out: Path, device: str, metric: str, spent: str, minutes: str = "") -> list[str]:
    pairs, tokens = _size(out / "data")
    logs = (logged(out / name).get(_SPEED, []) for name in ("speed", "run"))
    speeds, trained = ([value for _, value in log if value > 0.0] for log in logs)
    # Each value is of as many updates; the first one has what only happens once.
    known = trained or speeds[1:] or speeds
    speed = len(known) / sum(1.0 / value for value in known) if known else _UNKNOWN_SPEED
    recipe = recipe_for(pairs, device)
    length = int(minutes) if minutes else minutes_for(recipe, tokens, speed)
    size = sized_for(recipe, 0.0, speed).update_tokens  # of the trial
    measured = sum(size / value for value in speeds)
    seconds = 60.0 * length if trained else seconds_left(length, float(spent), measured)
    # Another start makes a whole trial, and begins twice.
    lost = _TRIAL_UPDATES * size / speed + 2.0 * max(0.0, float(spent) - measured)
    recipe, enough = fitted(pairs, device, tokens, seconds, speed, lost)
    warning = enough and f"{length} min have room for too few updates to learn much; {enough} min would suit"
    words, why = recipe.arguments("" if enough else metric), recipe.reason
    if trained:
        why = "trains on with the model that it has"
        words = [word for word in (out / "plan").read_text().splitlines()[5:] if not word.startswith(_LENGTH)]
        recipe = replace(recipe, speed=1.0)
    size = int(dict(word.partition("=")[::2] for word in words)["batch.update_tokens"])
    arguments = length_arguments(size, seconds, recipe.speed * speed)
    updates = int(arguments[0].partition("=")[2])
    reason = (
        f"{pairs:,} pairs, {device.upper()}: {why}; {updates:,} updates of {size:,} tokens "
        f"({updates * size / max(1, tokens):.1f} epochs), by the {'measured' if known else 'assumed'} speed of "
        f"{speed:,.0f} tokens/s{' of the deeper trial' if recipe.speed != 1.0 else ''}"
    )
    longer = f"--fresh --minutes {enough}" if enough else f"--minutes {2 * length}"
    return [reason, warning or "", f"{length}", f"{seconds:.0f}", longer, *words, *arguments]


def _size(data: Path) -> tuple[int, int]:
    """Return the training pairs and target tokens, EOS included, of a data directory."""
    try:
        training = json.loads((data / "meta.json").read_text(encoding="utf-8"))["splits"]["train"]
        pairs = int(training["pairs"])
        return pairs, int(training["target"]["tokens"]) + pairs
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{data / 'meta.json'} is not what `prepare` writes ({error}); start again with --fresh"
        ) from error


def _outlook(run: Path) -> list[str]:
    """Return a sentence on the validations of a run, and its updates."""
    log = logged(run)
    done = max((update for series in log.values() for update, _ in series), default=0)
    tag = next((tag for tag in ("valid/bleu", "valid/bleu_zh", "valid/bleu_char") if tag in log), "")
    scores, loss = ([value for _, value in log.get(name, [])] for name in (tag, "valid/loss"))
    shown = [f"{score:.1f}" for score in scores] if tag else [f"{value:.3f}" for value in loss]
    rises = still_rises(scores) or still_rises(loss, higher_is_better=False)
    verdict = (
        "still improves: more minutes help" if rises else "hardly improves: more text would help, not more minutes"
    )
    if len(loss) < 2:
        verdict = "too few to tell whether it still improves"
    line = f"{(tag or 'valid/loss').replace('/', ' ')}: {' '.join(shown[-_VALIDATIONS:]) or 'none'}; {verdict}"
    return [line, f"{done}"]


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
    if command == "trial":
        recipe = recipe_for(_size(Path(words[0], "data"))[0], words[1])
        minutes = int(words[2]) if words[2:] else recipe.minutes
        return [f"{60 * minutes * _TRIAL_SHARE:.0f}", *sized_for(recipe, 0.0, 0.0).arguments("")]
    if command == "plan":
        return _plan(Path(words[0]), *words[1:])
    return _outlook(Path(words[0]))


if __name__ == "__main__":
    try:
        if sys.argv[1] == "watch":
            sys.exit(watch(Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
        output("\n".join(main(*sys.argv[1:])))
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
