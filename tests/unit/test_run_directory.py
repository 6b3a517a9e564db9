"""Checks of a run directory that need no training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed_nmt.config import load_config
from deepspeed_nmt.run import start

COINS = ("layer.name=cross_attention_drop", "layer.drop_depth=2", "layer.drop_ratio=0.5", "layer.coins=micro_batch")


@pytest.mark.parametrize(
    ("settings", "ranks", "reason"),
    [
        ((), 1, ""),
        (("batch.micro_tokens=999",), 1, "batch.micro_tokens was 4096 and is 999"),
        ((), 4, "there were 4 data-parallel ranks and are 1"),
        (("training.max_updates=9",), 1, ""),
    ],
)
def test_choices_of_micro_batches_that_change_are_told(
    settings: tuple[str, ...], ranks: int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / start.ENVIRONMENT_FILE).write_text(json.dumps({"ranks": ranks}))
    before, now = load_config(settings=COINS), load_config(settings=(*COINS, *settings))
    start._warn_of_micro_batches(tmp_path, before.flat(), now.flat())
    said = f"layer.name=cross_attention_drop for each micro-batch are others from now on, because {reason}"
    assert [said in message for message in caplog.messages] == [True] * bool(reason)


def test_layers_depend_on_micro_batches_by_their_choices_alone() -> None:
    def depends(*settings: str) -> bool:
        return load_config(settings=settings).layer.depends_on_micro_batches

    assert depends(*COINS) and depends(*COINS, "layer.drop_depth=0", "layer.beyond=0.5")
    assert not depends(*COINS, "layer.coins=update") and not depends(*COINS, "layer.drop_ratio=1")
    assert not depends(*COINS, "layer.drop_depth=0") and not depends()
