"""Run directories written for tests of their page, without a training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_nmt.config import load_config

HOSTILE = "<script>alert('page')</script> & <img src=http://example.org/x.png onerror=alert(1)> %{x}"
"""Text that a model may write, and that a page must show as text."""


def write_run(
    path: Path,
    updates: int = 200,
    *settings: str,
    every: int = 10,
    reliance: float | None = 2.0,
    recipe: str | None = "sample_small",
) -> Path:
    """Write settings, environment and log of a run: losses that fall, and with ``reliance`` the collapse monitor's.

    Args:
        path: directory to make.
        updates: number of updates made.
        settings: of the form ``section.key=value``.
        every: updates between lines of the log.
        reliance: final source reliance; None for a run without the monitor.
        recipe: that the recorded command names; None for a command without one.
    """
    path.mkdir(parents=True)
    config = load_config("sample_small", settings=list(settings))
    (path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    words = ["/usr/bin/deepspeed-nmt", "train", *(["--recipe", recipe] if recipe else []), *settings]
    environment = {
        "deepspeed_nmt": "0.1.0",
        "ranks": 2,
        "gpus": [],
        "packages": {"torch": "2.13.0"},
        "command": words,
    }
    (path / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    entries: list[dict[str, float]] = []
    for update in range(every, updates + 1, every):
        part = update / updates
        values = {"train/loss": 7 - 5 * part, "train/nll": 6 - 5 * part, "train/ppl": math.exp(6 - 5 * part)}
        values |= {"train/lr": 1e-3 * part, "train/grad_norm": 1 + 100 * math.exp(-9 * part), "train/loss_scale": 1.0}
        values |= {"train/target_tokens": 700.0 * update, "perf/hours": update / 1000, "perf/memory": 1.5}
        values |= {"perf/target_tokens_per_s": 2e3, "perf/padding": 0.05, "perf/data_wait": 0.01}
        entries.append({"update": update, **values})
        if update % (5 * every) == 0:
            valid = {"valid/loss": 7 - 4.5 * part, "valid/nll": 6.0, "valid/ppl": 9.0, "valid/bleu": 30 * part}
            entries.append({"update": update, **valid, "train/target_tokens": 700.0 * update})
        if reliance is not None and update % (2 * every) == 0:
            found = {
                "collapse/source_reliance": reliance * part,
                "collapse/prefix_reliance": 0.5 * reliance * part,
                "collapse/nll": 6 - 3 * part,
                "collapse/seconds": 1.0,
            }
            found |= {f"collapse/cross_share/layer_{layer:02}": 0.1 * layer * part for layer in range(11, 0, -1)}
            entries.append({"update": update, **found})
    append_log(path, entries)
    return path


def append_log(path: Path, entries: Sequence[Mapping[str, object]]) -> None:
    """Append entries to the log of a run."""
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)


def write_events(path: Path, *events: tuple[str, int, str]) -> None:
    """Write the events of a run: name, update and text of each."""
    lines = [
        json.dumps(
            {"time": f"2026-11-23T04:05:{number % 60:02}+00:00", "update": update, "event": name, "text": text}
        )
        for number, (name, update, text) in enumerate(events)
    ]
    (path / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_texts(path: Path, updates: Sequence[int], lines: int = 30, name: str = "main") -> Path:
    """Write translations of a validation set that become better; two of them, and a reference, are hostile."""
    directory = path / "validation" / name
    directory.mkdir(parents=True)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    sources = [" ".join(words[number % 5 : number % 5 + 4]) + f" {number}" for number in range(lines)]
    references = [source.upper() for source in sources]
    references[-1] = HOSTILE
    (directory / "source.txt").write_text("\n".join(sources) + "\n", encoding="utf-8")
    (directory / "reference.txt").write_text("\n".join(references) + "\n", encoding="utf-8")
    for place, update in enumerate(updates):
        translations = [reference[: 4 + 8 * place] for reference in references]
        translations[lines // 2] = translations[-1] = HOSTILE
        (directory / f"update-{update:07}.txt").write_text("\n".join(translations) + "\n", encoding="utf-8")
    (directory / "signatures.json").write_text(json.dumps({"bleu": "nrefs:1|tok:13a"}), encoding="utf-8")
    return directory


def full_run(path: Path) -> Path:
    """Write a run with everything that the page can show: all kinds of events, a mixture, norms, hostile texts."""
    write_run(path, 200, "validation.sets.news=/data/news", "optimizer.lr=3e-3")
    extra = []
    for update in range(10, 201, 10):
        values: dict[str, object] = {"train/ald": 0.5, "data/web/share": 0.7, "data/books/share": 0.3}
        values |= {"train/web/nll": 4.0, "train/books/nll": 3.0, HOSTILE: 1.0, "valid/news/bleu": update / 10}
        for group in ("gradient", "update"):
            values |= {f"norm/{group}/encoder_{layer:02}": 10.0**-layer for layer in range(1, 4)}
            values |= {f"norm/{group}/embeddings": 0.0}
        extra.append({"update": update, **values})
    append_log(path, [*extra, {"update": 100, "train/loss": math.nan}])
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"update": 110, "train/lo\n[1, 2]\n{"update": "x"}\n')
    write_events(
        path,
        ("start", 0, "deepspeed_nmt 0.1.0 on host1"),
        *(("skip", update, f"update {update} skipped: {HOSTILE}") for update in (31, 32)),
        ("spike", 60, "its loss is high"),
        ("rollback", 80, "back to update 50"),
        ("stop", 120, "stopped by SIGUSR1"),
        ("resume", 120, "resuming after update 120"),
        ("best", 150, "the best so far"),
        ("collapse", 160, "the decoder ignores its source"),
        ("unheard-of", 170, HOSTILE),
        ("end", 200, "done"),
    )
    write_texts(path, [50, 100, 150, 200])
    write_texts(path, [50, 100], name="news")
    return path
