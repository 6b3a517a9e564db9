"""Metrics of a run: one ``log()`` for the console, ``metrics.jsonl`` and TensorBoard.

docs/metrics.md has the tags with their units and meanings. The charts of TensorBoard's page "Custom Scalars" are the
same for all runs: a chart is given by regular expressions that tags must match from their beginning, and one without
values stays empty. TensorBoard shows a chart once for all runs together, and once for all starts of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from deepspeed_nmt.console import ON_BAR, json_line, logger, progress_bar
from deepspeed_nmt.core.batch import CORPUS_SUM
from deepspeed_nmt.data.loader import Update
from deepspeed_nmt.engine.contract import UpdateResult, add_sums
from deepspeed_nmt.engine.norms import Squares
from deepspeed_nmt.files import atomic_write_bytes, read_regular
from deepspeed_nmt.parallel.collectives import sum_over_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.events import Line
from deepspeed_nmt.train.out_of_memory import peak_memory_gib
from deepspeed_nmt.train.progress import LogState, Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.tensorboard import SummaryWriter


METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
TARGET_TOKENS = "train/target_tokens"
"""Tag of the target tokens seen so far, in each entry: the axis of curves."""

_MAX_SETTING = 200
"""Bound on the characters of a setting in TensorBoard."""
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

    Entries after ``update``, of a run that died, are dropped; with None all stay.

    ``settings`` and ``measures``, tags of scores, are what TensorBoard's page "HParams" compares runs by.
    """

    def __init__(
        self,
        run: Path,
        active: bool,
        update: int | None,
        max_updates: int,
        settings: Mapping[str, object] = MappingProxyType({}),
        measures: Sequence[str] = (),
    ) -> None:
        self._active = active
        if not active:
            return
        path = run / METRICS_FILE
        if update is not None and path.exists():
            lines = [(text, Line.read(text)) for text in read_regular(path).split(b"\n")]
            kept = [text for text, line in lines if line is not None and line.update <= update]
            atomic_write_bytes(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._run, self._max_updates = run, max_updates
        self._board: SummaryWriter | None = None
        self._purge_from = None if update is None else update + 1
        self._settings, self._measures = settings, measures
        self._reported = False
        without_bar = None if update is not None else True  # None: on a terminal there is one
        self._bar = progress_bar(total=max_updates, initial=update or 0, unit=" updates", disable=without_bar)

    def log(self, progress: Progress, values: Mapping[str, float], note: str = "") -> None:
        """Log values after an update."""
        if not self._active:
            return
        update = progress.update
        with self._reporting():
            values = {**values, TARGET_TOKENS: float(progress.target_tokens)}
            self._file.write(json_line({"update": update, **values}) + "\n")
            self._file.flush()
            for tag, value in values.items():
                self._opened_board().add_scalar(tag, value, update)
        if shown := _shown(values):
            self._bar.update(update - self._bar.n)
            self._bar.set_postfix_str(shown)
            on_bar = not self._bar.disable and "valid/loss" not in values
            logger.info("update %d/%d%s: %s", update, self._max_updates, note, shown, extra={ON_BAR: on_bar})

    def show(
        self, update: int, texts: Mapping[str, str], images: Mapping[str, NDArray[np.uint8]] = MappingProxyType({})
    ) -> None:
        """Show texts, in Markdown, and images in TensorBoard."""
        if not self._active:
            return
        with self._reporting():
            for tag, text in texts.items():
                self._opened_board().add_text(tag, text, update)
            for tag, image in images.items():
                self._opened_board().add_image(tag, image, update, dataformats="HW")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an error of writing, unless what came before could not be written, either. Training continues."""
        try:
            yield
            self._reported = False
        except OSError as error:
            self._board = None
            if not self._reported:
                logger.error("metrics could not be written to %s (%s); training continues", self._run, error)
            self._reported = True

    def _opened_board(self) -> SummaryWriter:
        """Return TensorBoard's writer; open a file whose entries replace those of a run that died."""
        if self._board is None:  # the first entry, or the last one failed
            from torch.utils.tensorboard import SummaryWriter  # takes a second

            self._board = SummaryWriter(str(self._run / TENSORBOARD_DIR), purge_step=self._purge_from)
            self._purge_from = None
            self._board.add_custom_scalars(LAYOUT)
            self._add_settings(self._board)
        return self._board

    def _add_settings(self, board: SummaryWriter) -> None:
        """Write the settings once for this start; the page takes the measures' newest values from their curves."""
        from torch.utils.tensorboard.summary import hparams

        if not self._settings:
            return
        values = {
            key: value if isinstance(value, bool | int | float) else str(value)[:_MAX_SETTING]
            for key, value in self._settings.items()
        }
        writer = board._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(values, dict.fromkeys(self._measures, 0.0)):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        if self._active:
            with self._reporting():
                self._file.close()
            with self._reporting():
                if self._board is not None:
                    self._board.close()
            self._bar.close()


def _shown(values: Mapping[str, float]) -> str:
    """Return the values that the console shows, with their words."""
    formats = {"train/lr": ".2e", "perf/target_tokens_per_s": ",.0f"}
    return ", ".join(
        f"{words} {value:{formats.get(tag, '.3f')}}" for tag, value in values.items() if (words := label(tag))
    )


def label(tag: str) -> str:
    """Return the words for a tag on the console: those of ``_SHORT``, or of a metric's tag; "" if it is not shown.

    A value of a validation set with a name has the words for it, and the name.
    """
    if tag in _SHORT or not tag.startswith("valid/"):
        return _SHORT.get(tag, "")
    of, _, name = tag.removeprefix("valid/").rpartition("/")
    words = _SHORT.get(f"valid/{name}", f"valid {name}")
    return words.replace("valid", f"valid {of}", 1) if of else words


_SET = r"^valid/([^/]+/)?"
_OF_ALL_METHODS = "loss|nll|ppl|grad_norm|lr|loss_scale|skipped|spikes|rollbacks|target_tokens"
"""Values of training that every run has; the others are sums of its objective."""


def _chart(*patterns: str) -> tuple[str, list[str]]:
    return "Multiline", [f"{pattern}$" for pattern in patterns]


LAYOUT: dict[str, dict[str, tuple[str, list[str]]]] = {
    "Loss": {
        "training and validation, nats per token": _chart(r"^train/(loss|nll)", rf"{_SET}(loss|nll)"),
        "further sums of the objective": _chart(rf"^train/(?!({_OF_ALL_METHODS})$)[^/]+"),
    },
    "Quality": {
        "metrics of all validation sets": _chart(rf"{_SET}(?!(loss|nll|ppl)$)[^/]+"),
        "perplexity": _chart(r"^train/ppl", rf"{_SET}ppl"),
    },
    "Collapse": {
        "source and prefix reliance, nats per token": _chart(r"^collapse/((source|prefix)_reliance|nll)"),
        "share of cross-attention by layer": _chart(r"^collapse/cross_share/.*"),
    },
    "Speed": {
        "target tokens per second": _chart(r"^perf/target_tokens_per_s"),
        "goodput, MFU, data wait, padding": _chart(r"^perf/(goodput|mfu|data_wait|padding)"),
        "peak memory, GiB": _chart(r"^perf/memory"),
    },
    "Stability": {
        "norm of the gradient": _chart(r"^train/grad_norm"),
        "norm of the gradient, encoder": _chart(r"^norm/gradient/[a-z_]*encoder/.*"),
        "norm of the gradient, decoder": _chart(r"^norm/gradient/[a-z_]*decoder/.*"),
        "norm of the gradient, elsewhere": _chart(r"^norm/gradient/(?![a-z_]*coder/).*"),
        "change of the weights, encoder": _chart(r"^norm/update/[a-z_]*encoder/.*"),
        "change of the weights, decoder": _chart(r"^norm/update/[a-z_]*decoder/.*"),
        "change of the weights, elsewhere": _chart(r"^norm/update/(?![a-z_]*coder/).*"),
        "learning rate": _chart(r"^train/lr"),
        "loss scale": _chart(r"^train/loss_scale"),
        "skipped updates, spikes, rollbacks": _chart(r"^train/(skipped|spikes|rollbacks)"),
    },
    "Mixture": {
        "share of target tokens": _chart(r"^data/[^/]+/share"),
        "loss by corpus, nats per token": _chart(r"^train/[^/]+/nll"),
        "epochs by corpus": _chart(r"^data/[^/]+/epochs"),
    },
}


class Workload(NamedTuple):
    """Operations for each source and target token, both ways, and those of one GPU a second at its peak."""

    source_flops: float
    target_flops: float
    peak_flops: float

    def utilisation(self, source_tokens: float, target_tokens: float, gpu_seconds: float) -> float:
        """Return the MFU: the model's operations as a share of the GPUs' peak."""
        done = self.source_flops * source_tokens + self.target_flops * target_tokens
        return done / (gpu_seconds * self.peak_flops)


_PADDED, _REAL = "positions/padded", "positions/real"
_COUNTS = ("skipped", "tokens_of", "corpus_tokens", "tokens", "worked", "waited", "elapsed")
"""Attributes of a window that are not summed over ranks."""


class LogWindow:
    """Sums since the last line of the log; they stay on the device until the line is due."""

    def __init__(self, workload: Workload | None, corpora: Sequence[str] = ()) -> None:
        self.skipped = 0
        self._workload = workload
        self._corpora = corpora
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens_of: dict[str, int] = {}
        self.corpus_tokens = dict.fromkeys(self._corpora, 0)
        self.tokens = self.worked = self.padded = self.real = 0
        self.waited = self.elapsed = 0.0
        self.result: UpdateResult | None = None

    def add(self, update: Update, result: UpdateResult, waited: float, elapsed: float) -> None:
        """Add an update that took ``elapsed`` seconds, ``waited`` of them for its data."""
        if result.skipped:
            self.skipped += 1
        else:
            add_sums(self.sums, result.sums)
            self.tokens += update.target_tokens
            for name, tokens in zip(self._corpora, update.corpus_tokens, strict=False):
                self.corpus_tokens[name] += tokens
            for name in result.sums:  # some regularizers are computed in some updates only
                self.tokens_of[name] = self.tokens_of.get(name, 0) + update.target_tokens
        self.worked += update.target_tokens  # skipped updates cost time, too
        self.padded += update.padded_positions
        self.real += update.real_positions
        self.waited += waited
        self.elapsed += elapsed
        self.result = result

    def state(self, world: World) -> LogState:
        """Return the sums of this rank, for a checkpoint."""
        sums = self._own_sums(world)
        padded, real = int(sums.pop(_PADDED)), int(sums.pop(_REAL))
        return LogState(sums=sums, padded=padded, real=real, **{name: getattr(self, name) for name in _COUNTS})

    def _own_sums(self, world: World) -> dict[str, float]:
        """Return the sums that this rank adds to those of all; its micro-batches may be those of another one."""
        sums = {name: float(value) for name, value in self.sums.items()}
        sums |= {_PADDED: float(self.padded), _REAL: float(self.real)}
        return sums if world.tensor_rank == 0 else dict.fromkeys(sums, 0.0)

    def restore(self, states: Sequence[LogState], world: World, device: torch.device) -> None:
        """Continue from the sums of the ranks that wrote a checkpoint; of another number of ranks, rank 0 has all.

        Of another mixture, whose corpora have other numbers, the sums by corpus begin anew.
        """
        if not states:
            return
        own = states[world.rank] if len(states) == world.ranks else states[0]
        for name in _COUNTS:
            setattr(self, name, copy(getattr(own, name)))
        same_mixture = [*own.corpus_tokens] == [*self._corpora]
        if not same_mixture:
            self.corpus_tokens = dict.fromkeys(self._corpora, 0)
        # The names are the same on all ranks, also of what the updates up to the next line may not compute.
        names = [name for name in own.sums if same_mixture or not name.startswith(CORPUS_SUM)]
        self.sums = {name: torch.zeros((), device=device) for name in names}
        shares = list(states) if world.is_main else []
        if len(states) == world.ranks:  # rank 0 also has the sums of ranks that share its model now
            shares = [own, *(share for rank, share in enumerate(shares) if rank % world.tensor_ranks)]
        for share in shares:
            self.padded, self.real = self.padded + share.padded, self.real + share.real
            add_sums(self.sums, {name: torch.tensor(share.sums[name], device=device) for name in names})

    def flush(self, lr: float, world: World) -> dict[str, float]:
        """Return the window's values over all ranks by tag, and empty it. All ranks call it together."""
        assert self.result is not None
        sums = self._own_sums(world)
        # A place for each rank in the same sum, since a maximum would be another synchronisation.
        peaks = {f"peak/{rank}": 0.0 for rank in range(world.ranks)}
        peaks[f"peak/{world.rank}"] = peak_memory_gib(world.device)
        total = sum_over_ranks({**sums, **peaks}, world)
        memory_gib = max(total.pop(name) for name in peaks)
        padded, real = total.pop(_PADDED), total.pop(_REAL)
        by_corpus = [total.pop(f"{CORPUS_SUM}{number}", 0.0) for number in range(len(self._corpora))]
        values = {f"train/{name}": value / max(1, self.tokens_of[name]) for name, value in total.items()}
        if len(self._corpora) > 1:
            for (name, tokens), nll in zip(self.corpus_tokens.items(), by_corpus, strict=True):
                values[f"data/{name}/share"] = tokens / max(1, sum(self.corpus_tokens.values()))
                if tokens:
                    values[f"train/{name}/nll"] = nll / tokens
        if "train/nll" in values:
            values["train/ppl"] = math.exp(min(values["train/nll"], 100.0))
        values |= {
            "train/grad_norm": self.result.grad_norm,
            "train/lr": lr,
            "train/loss_scale": self.result.loss_scale,
            "train/skipped": float(self.skipped),
            "perf/target_tokens_per_s": self.tokens / self.elapsed,
            "perf/padding": 1.0 - real / padded,
            "perf/data_wait": self.waited / self.elapsed,
            "perf/memory": memory_gib,
        }
        if self._workload is not None:
            gpu_seconds = self.elapsed * world.ranks
            values["perf/mfu"] = self._workload.utilisation(real - self.worked, self.worked, gpu_seconds)
        self._clear()
        return values


def norms_by_layer(squares: Squares) -> dict[str, float]:
    """Return the norms of gradient and change of each layer, by tag.

    Tags end in the path of the layer or module in the model, ``encoder/layer_01``, ``source_embedding`` or
    ``decoder/final_norm``. Layers are counted from 1.
    """
    total: dict[str, float] = {}
    for prefix, by_name in (("norm/gradient", squares.gradient), ("norm/update", squares.change)):
        for name, value in by_name.items():
            path = re.sub(r"layers\.(\d+)", lambda match: f"layer_{int(match[1]) + 1:02}", layer_of(name))
            tag = f"{prefix}/{path.replace('.', '/')}"
            total[tag] = total.get(tag, 0.0) + value
    return {tag: math.sqrt(value) for tag, value in total.items()}


def layer_of(parameter: str) -> str:
    """Return the name of the layer, or of the other module, that a parameter belongs to."""
    return re.sub(r"(layers\.\d+)\..*|\.[^.]*$", r"\1", parameter)
