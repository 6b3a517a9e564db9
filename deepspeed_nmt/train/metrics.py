"""Metrics of a run: one ``log()`` for the console, ``metrics.jsonl`` and TensorBoard.

docs/metrics.md has the tags with their units and meanings.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tqdm import tqdm

from deepspeed_nmt.console import ON_BAR, logger
from deepspeed_nmt.files import atomic_write_bytes, parse_json
from deepspeed_nmt.train.board import LAYOUT
from deepspeed_nmt.train.events import finite
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.validation import LateResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
TARGET_TOKENS = "train/target_tokens"
"""Tag of the target tokens seen so far, in each entry: the axis of curves."""

_SHORT = {
    "train/loss": "loss",
    "train/ppl": "ppl",
    "train/lr": "lr",
    "train/grad_norm": "norm",
    "valid/loss": "valid loss",
    "valid/nll": "",
    "valid/ppl": "valid ppl",
    "valid/bleu": "valid BLEU",
    "collapse/source_reliance": "source reliance",
    "perf/target_tokens_per_s": "tokens/s",
}


class Metrics:
    """Writer of a run's metrics; inactive on ranks other than 0.

    Metrics that cannot be written, for example on a full disk, are reported once; training continues.

    Args:
        run: the run directory.
        active: True on rank 0.
        update: number of updates made so far; later entries, of a run that died, are dropped.
        max_updates: length of the progress bar.
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
        self._run = run
        self._board: SummaryWriter | None = None
        self._first = update + 1
        self._reported = False
        self._bar = (
            tqdm(total=max_updates, initial=update, unit=" updates", dynamic_ncols=True)
            if sys.stderr.isatty()
            else None
        )
        self._max_updates = max_updates

    def log(self, progress: Progress, values: dict[str, float], note: str = "") -> None:
        """Log values after the newest update.

        Args:
            progress: after that update.
            values: by tag.
            note: words for the console's line.
        """
        if not self._active:
            return
        update = progress.update
        self._write(update, progress.target_tokens, values)
        shown = _shown(values)
        if not shown:
            return
        if self._bar is not None:
            self._bar.update(update - self._bar.n)
            self._bar.set_postfix_str(shown)
        on_bar = self._bar is not None and "valid/loss" not in values
        logger.info("update %d/%d%s: %s", update, self._max_updates, note, shown, extra={ON_BAR: on_bar})

    def log_late(self, result: LateResult) -> None:
        """Log the values of a late result, if it has any, under the update that they belong to."""
        if not self._active or not result.values:
            return
        self._write(result.update, result.target_tokens, result.values)
        logger.info("late values of update %d: %s", result.update, _shown(result.values))

    def text(self, update: int, tag: str, markdown: str) -> None:
        """Show a text in TensorBoard.

        Args:
            update: number of the update.
            tag: of the text.
            markdown: the text.
        """
        if not self._active:
            return
        with self._reporting():
            self._opened_board().add_text(tag, markdown, update)

    def draw(self, update: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Show images in TensorBoard.

        Args:
            update: number of the update.
            images: grey ones by tag. Shape: (height,width) each
        """
        if not self._active or not images:
            return
        with self._reporting():
            board = self._opened_board()
            for tag, image in images.items():
                board.add_image(tag, image, update, dataformats="HW")

    def _write(self, update: int, target_tokens: int, values: Mapping[str, float]) -> None:
        values = {**values, TARGET_TOKENS: float(target_tokens)}
        with self._reporting():
            self._file.write(json.dumps({"update": update, **finite(values)}, allow_nan=False) + "\n")
            self._file.flush()
            board = self._opened_board()
            for tag, value in values.items():
                board.add_scalar(tag, value, update)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error of writing, unless what came before could not be written, either. Training continues."""
        try:
            yield
            self._reported = False
        except OSError as error:
            self._board = None
            self._report(error)

    def _opened_board(self) -> SummaryWriter:
        """Return TensorBoard's writer; open a file whose entries replace those of a run that died."""
        if self._board is None:  # the first entry, or the last one failed
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            first, self._first = self._first, 1  # once
            self._board = SummaryWriter(str(self._run / TENSORBOARD_DIR), purge_step=first if first > 1 else None)
            self._board.add_custom_scalars(LAYOUT)
        return self._board

    def _report(self, error: OSError) -> None:
        """Log an error, unless the metrics before could not be written, either."""
        if not self._reported:
            logger.error("metrics could not be written to %s (%s); training continues", self._run, error)
        self._reported = True

    def __enter__(self) -> Metrics:
        self._hook, threading.excepthook = threading.excepthook, self._on_error_of_a_thread
        return self

    def _on_error_of_a_thread(self, error: threading.ExceptHookArgs) -> None:
        """Print nothing about TensorBoard's thread: its errors are raised again by the next entry."""
        if not (type(error.thread).__module__.startswith("tensorboard.") and issubclass(error.exc_type, OSError)):
            self._hook(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        threading.excepthook = self._hook
        if self._active:
            for stream in (self._file, self._board):
                try:
                    if stream is not None:
                        stream.close()
                except OSError as failed:
                    self._report(failed)
            if self._bar is not None:
                self._bar.close()


def _before(line: bytes, update: int) -> bool:
    try:
        return int(parse_json(line)["update"]) <= update
    except (ValueError, KeyError, TypeError):
        return False  # the last line of a run that died while writing it, or a damaged one


def _shown(values: Mapping[str, float]) -> str:
    """Return the values that the console shows, with their words."""
    named = [(_label(tag), tag, value) for tag, value in values.items()]
    return ", ".join(f"{label} {_format(tag, value)}" for label, tag, value in named if label)


def _label(tag: str) -> str:
    """Return the words for a tag on the console: those of ``_SHORT``, or of a metric's tag; "" if it is not shown.

    A value of a validation set with a name has the words for it, and the name.
    """
    if tag in _SHORT or not tag.startswith("valid/"):
        return _SHORT.get(tag, "")
    of, _, name = tag.removeprefix("valid/").rpartition("/")
    words = _SHORT.get(f"valid/{name}", f"valid {name}")
    return words.replace("valid", f"valid {of}", 1) if of else words


def _format(tag: str, value: float) -> str:
    if tag == "train/lr":
        return f"{value:.2e}"
    return f"{value:,.0f}" if tag == "perf/target_tokens_per_s" else f"{value:.3f}"
