"""Metrics of a run: one ``log()`` for the console, ``metrics.jsonl`` and TensorBoard.

Tags:

- ``train/loss``: the objective, per target token (nats), with the weights of pairs.
- ``train/nll``, ``train/ppl``: negative log-likelihood per target token (nats), and its exponential, without weights.
- ``train/divergence``, ``train/ald``, ...: further sums of the objective, without their factors, per target token.
- ``train/CORPUS/nll``, ``data/CORPUS/share``: of several corpora, the negative log-likelihood per target token of
  each, and its share of the target tokens.
- ``data/CORPUS/epochs``, ``data/CORPUS/target_tokens``: what the run has read of each since it began.
- ``train/grad_norm``: norm of the gradient before clipping.
- ``train/lr``, ``train/loss_scale``: of the last update.
- ``train/skipped``, ``train/spikes``: number of such updates since the last start.
- ``train/rollbacks``, ``train/target_tokens``: numbers since the run began.
- ``valid/loss``, ``valid/nll``, ``valid/ppl``: the same on the validation set.
- ``valid/bleu``, ``valid/bleu_tokenised``, ...: metrics of the validation set, translated by the run's search.
- ``valid/NAME``: of a program that is a metric; of a late one, under the update that it belongs to.
- ``valid/samples``: translations of a few sentences, as text in TensorBoard.
- ``valid/SET/loss``, ``valid/SET/bleu``, ...: the same of a validation set with a name, or of ``mean`` over all sets.
- ``collapse/source_reliance``, ``collapse/nll``: nats per target token, see :mod:`deepspeed_nmt.train.collapse`.
- ``collapse/cross_share/layer_NN``: share of cross-attention in the update of a decoder layer.
- ``collapse/seconds``: duration of the measurement.
- ``norm/gradient/PART``, ``norm/update/PART``: norms of the gradient before clipping, and of the change of the
  weights in one update, of a layer or another part of the model; see :mod:`deepspeed_nmt.train.norms`.
- ``perf/target_tokens_per_s``: target tokens a second over all ranks.
- ``perf/hours``: hours spent in updates, over all restarts.
- ``perf/padding``: share of positions that are padding.
- ``perf/data_wait``: share of time spent waiting for data.
- ``perf/memory``: peak of this rank (GiB).
- ``perf/mfu``: model FLOPs of real tokens, recomputation not counted, as a share of the GPUs' dense 16-bit peak; for
  known GPUs.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tqdm import tqdm

from deepspeed_nmt.console import ON_BAR, logger
from deepspeed_nmt.files import atomic_write_bytes, parse_json
from deepspeed_nmt.train.board import LAYOUT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"

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

    def log(self, update: int, values: dict[str, float], note: str = "") -> None:
        """Log values.

        Args:
            update: number of the update.
            values: by tag.
            note: words for the console's line.
        """
        if not self._active:
            return
        try:
            self._write(update, values)
            self._reported = False
        except OSError as error:
            self._board = None
            self._report(error)
        named = [(_label(tag), tag, value) for tag, value in values.items()]
        shown = ", ".join(f"{label} {_format(tag, value)}" for label, tag, value in named if label)
        if not shown:
            return
        if self._bar is not None:
            self._bar.update(update - self._bar.n)
            self._bar.set_postfix_str(shown)
        on_bar = self._bar is not None and "valid/loss" not in values
        logger.info("update %d/%d%s: %s", update, self._max_updates, note, shown, extra={ON_BAR: on_bar})

    def log_earlier(self, update: int, values: dict[str, float]) -> None:
        """Log values of an update that was logged before, which have come late.

        Args:
            update: number of the update.
            values: by tag.
        """
        if not self._active:
            return
        try:
            self._write(update, values)
        except OSError as error:
            self._board = None
            self._report(error)
        named = [(_label(tag), tag, value) for tag, value in values.items()]
        shown = ", ".join(f"{label} {_format(tag, value)}" for label, tag, value in named if label)
        logger.info("late values of update %d: %s", update, shown)

    def text(self, update: int, tag: str, markdown: str) -> None:
        """Show a text in TensorBoard.

        Args:
            update: number of the update.
            tag: of the text.
            markdown: the text.
        """
        if not self._active:
            return
        try:
            self._opened_board().add_text(tag, markdown, update)
            self._reported = False
        except OSError as error:
            self._board = None
            self._report(error)

    def draw(self, update: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Show images in TensorBoard.

        Args:
            update: number of the update.
            images: grey ones by tag. Shape: (height,width) each
        """
        if not self._active or not images:
            return
        try:
            board = self._opened_board()
            for tag, image in images.items():
                board.add_image(tag, image, update, dataformats="HW")
            self._reported = False
        except OSError as error:
            self._board = None
            self._report(error)

    def _write(self, update: int, values: dict[str, float]) -> None:
        self._file.write(json.dumps({"update": update, **values}) + "\n")
        self._file.flush()
        board = self._opened_board()
        for tag, value in values.items():
            board.add_scalar(tag, value, update)

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
