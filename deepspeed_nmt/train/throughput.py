"""Sums over the updates between two lines of the log, and the speed of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deepspeed_nmt.core.batch import CORPUS_SUM
from deepspeed_nmt.data.loader import Update
from deepspeed_nmt.engine.base import UpdateResult, add_sums
from deepspeed_nmt.parallel.collectives import sum_over_ranks
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.out_of_memory import peak_memory_gib


@dataclass(frozen=True)
class Workload:
    """Cost of training, and the peak of a GPU.

    Attributes:
        source_flops: operations for each source token, forward and backward.
        target_flops: operations for each target token, forward and backward.
        peak_flops: peak of one GPU, in operations a second.
    """

    source_flops: float
    target_flops: float
    peak_flops: float

    def utilisation(self, source_tokens: float, target_tokens: float, gpu_seconds: float) -> float:
        """Return the MFU: the model's operations as a share of the GPUs' peak."""
        done = self.source_flops * source_tokens + self.target_flops * target_tokens
        return done / (gpu_seconds * self.peak_flops)


class LogWindow:
    """Sums since the last line of the log; they stay on the device until the line is due.

    Args:
        workload: cost of training; None if it is unknown.
        corpora: names of the corpora that the run is trained on.
    """

    def __init__(self, workload: Workload | None, corpora: Sequence[str] = ()) -> None:
        self.skipped = 0
        self._workload = workload
        self._corpora = corpora
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens_of: dict[str, int] = {}
        self.corpus_tokens = np.zeros(len(self._corpora), dtype=np.int64)
        self.tokens = self.worked = self.padded = self.real = self.updates = 0
        self.waited = self.elapsed = 0.0
        self.result: UpdateResult | None = None

    def add(self, update: Update, result: UpdateResult, waited: float, elapsed: float) -> None:
        """Add an update that took ``elapsed`` seconds, ``waited`` of them for its data."""
        if result.skipped:
            self.skipped += 1
        else:
            add_sums(self.sums, result.sums)
            self.tokens += update.target_tokens
            self.corpus_tokens += np.array(update.corpus_tokens[: len(self._corpora)], dtype=np.int64)
            for name in result.sums:  # some regularizers are computed in some updates only
                self.tokens_of[name] = self.tokens_of.get(name, 0) + update.target_tokens
        self.worked += update.target_tokens  # skipped updates cost time, too
        self.padded += update.padded_positions
        self.real += update.real_positions
        self.waited += waited
        self.elapsed += elapsed
        self.updates += 1
        self.result = result

    def flush(self, lr: float, world: World) -> dict[str, float]:
        """Return the window's values over all ranks by tag, and empty it. All ranks call it together."""
        assert self.result is not None
        sums = {name: float(value) for name, value in self.sums.items()}
        sums |= {"positions/padded": float(self.padded), "positions/real": float(self.real)}
        if world.tensor_rank != 0:  # of the same micro-batches as the first rank of the group
            sums = dict.fromkeys(sums, 0.0)
        # A place for each rank in the same sum, since a maximum would be another synchronisation.
        peaks = {f"peak/{rank}": 0.0 for rank in range(world.ranks)}
        peaks[f"peak/{world.rank}"] = peak_memory_gib(world.device)
        total = sum_over_ranks({**sums, **peaks}, world)
        memory_gib = max(total.pop(name) for name in peaks)
        padded, real = total.pop("positions/padded"), total.pop("positions/real")
        by_corpus = [total.pop(f"{CORPUS_SUM}{number}", 0.0) for number in range(len(self._corpora))]
        values = {f"train/{name}": value / max(1, self.tokens_of[name]) for name, value in total.items()}
        if len(self._corpora) > 1:
            for name, nll, tokens in zip(self._corpora, by_corpus, self.corpus_tokens.tolist(), strict=True):
                values[f"data/{name}/share"] = tokens / max(1, self.tokens)
                if tokens:
                    values[f"train/{name}/nll"] = nll / tokens
        if "train/nll" in values:
            values["train/ppl"] = math.exp(min(values["train/nll"], 100.0))
        values.update(
            {
                "train/grad_norm": self.result.grad_norm,
                "train/lr": lr,
                "train/loss_scale": self.result.loss_scale,
                "train/skipped": float(self.skipped),
                "perf/target_tokens_per_s": self.tokens / self.elapsed,
                "perf/padding": 1.0 - real / padded,
                "perf/data_wait": self.waited / self.elapsed,
                "perf/memory": memory_gib,
            }
        )
        if self._workload is not None:
            gpu_seconds = self.elapsed * world.ranks
            values["perf/mfu"] = self._workload.utilisation(real - self.worked, self.worked, gpu_seconds)
        self._clear()
        return values
