"""One `log()` for the console, ``metrics.jsonl`` and TensorBoard.

Tags: train/loss (smoothed, per target token), train/nll, train/ppl, train/grad_norm, train/lr, train/loss_scale,
train/skipped and train/spikes (updates, since the run was last taken up), train/rollbacks (so far),
train/target_tokens (so far), train/divergence and train/ald (the objective's terms, unweighted), valid/loss,
valid/nll, valid/ppl, valid/bleu, collapse/source_reliance (nats per target token), collapse/nll,
collapse/cross_share/layer_NN, collapse/seconds (that the measurement took), perf/target_tokens_per_s, perf/padding
(share of positions), perf/data_wait (share of time), perf/memory (GiB, peak on this rank), perf/mfu (model FLOPs of
real tokens, without recomputation, as a share of what the GPUs' tensor cores do at best in 16 bit; known GPUs only).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from deepspeed_nmt.console import logger
from deepspeed_nmt.files import atomic_write_bytes

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"

_SHORT = {
    "train/loss": "loss",
    "train/ppl": "ppl",
    "train/lr": "lr",
    "train/grad_norm": "norm",
    "valid/loss": "valid loss",
    "valid/ppl": "valid ppl",
    "valid/bleu": "valid BLEU",
    "collapse/source_reliance": "source reliance",
    "perf/target_tokens_per_s": "tokens/s",
}


class Metrics:
    """Writes a run's metrics; on ranks other than 0 it does nothing.

    Args:
        run: the run directory.
        active: whether this is rank 0.
        update: updates made so far; later entries, left by a run that died, are dropped.
        max_updates: for the progress bar.
    """

    def __init__(self, run: Path, active: bool, update: int, max_updates: int) -> None:
        self._active = active
        if not active:
            return
        path = run / METRICS_FILE
        if path.is_file():
            kept = [line for line in path.read_bytes().split(b"\n") if _before(line, update)]
            atomic_write_bytes(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(run / TENSORBOARD_DIR), purge_step=update + 1 if update else None)
        self._bar = (
            tqdm(total=max_updates, initial=update, unit=" updates", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )
        self._max_updates = max_updates

    def log(self, update: int, values: dict[str, float], note: str = "") -> None:
        """Record values under their tags."""
        if not self._active:
            return
        self._file.write(json.dumps({"update": update, **values}) + "\n")
        self._file.flush()
        for tag, value in values.items():
            self._board.add_scalar(tag, value, update)
        shown = ", ".join(f"{_SHORT[tag]} {_format(tag, value)}" for tag, value in values.items() if tag in _SHORT)
        if self._bar is not None:
            self._bar.update(update - self._bar.n)
            self._bar.set_postfix_str(shown)
            if "valid/loss" not in values:
                return
        logger.info("update %d/%d%s: %s", update, self._max_updates, note, shown)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self._file.close()
            self._board.close()
            if self._bar is not None:
                self._bar.close()


def _before(line: bytes, update: int) -> bool:
    try:
        return int(json.loads(line.decode("utf-8"))["update"]) <= update
    except (ValueError, KeyError, TypeError):
        return False  # the last line of a run that died while writing it, or a damaged one


def _format(tag: str, value: float) -> str:
    if tag == "train/lr":
        return f"{value:.2e}"
    return f"{value:,.0f}" if tag == "perf/target_tokens_per_s" else f"{value:.3f}"
