"""Disk space and time of a run's checkpoints, and time of the whole run."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_nmt.engine.checkpoint_size import checkpoint_bytes
from deepspeed_nmt.errors import shown_bytes

_MB = 10**6
_DAY_S = 86_400


@dataclass(frozen=True)
class CheckpointPlan:
    """Checkpoints of a run.

    Attributes:
        size: bytes of the tensors of one checkpoint: fp32 weights and Adam's moments.
        keep_last: number of newest checkpoints that are kept.
        keep_best: True if the best one is kept besides.
        mb_per_s: speed of writing in MB/s.
    """

    size: int
    keep_last: int
    keep_best: bool
    mb_per_s: float

    @classmethod
    def of(cls, trained: int, frozen: int, keep_last: int, keep_best: bool, mb_per_s: float) -> CheckpointPlan:
        """Return the plan of a model with these numbers of trained and frozen parameters."""
        return cls(checkpoint_bytes(trained, frozen), keep_last, keep_best, mb_per_s)

    @property
    def disk(self) -> int:
        """Bytes of the largest number of checkpoints at once, the one being written included."""
        return self.size * (self.keep_last + int(self.keep_best) + 1)

    @property
    def seconds(self) -> float:
        """Time to write one checkpoint."""
        return self.size / (self.mb_per_s * _MB)

    def as_json(self) -> dict[str, object]:
        """Return the plan as values for JSON."""
        return {
            "checkpoint_bytes": self.size,
            "disk_bytes": self.disk,
            "write_mb_per_s": self.mb_per_s,
            "save_seconds": self.seconds,
        }

    def __str__(self) -> str:
        best = ", the best one" if self.keep_best else ""
        return (
            f"a checkpoint has {shown_bytes(self.size)} and is written in {self.seconds:,.0f} s at "
            f"{self.mb_per_s:g} MB/s (--write-speed); training.keep_last={self.keep_last}{best} and the one being "
            f"written need {shown_bytes(self.disk)} of disk"
        )


def gpu_days(updates: int, update_tokens: int, tokens_per_s: float, gpus: int) -> float:
    """Return the days of all GPUs together that a number of updates takes, without validation.

    Args:
        updates: number of updates.
        update_tokens: largest number of target tokens in an update.
        tokens_per_s: target tokens a second of all GPUs.
        gpus: number of GPUs.
    """
    return updates * update_tokens / tokens_per_s * gpus / _DAY_S
