"""Checkpoints of a run before it starts: disk space, time, and the interval at which failures cost least.

With a mean time M between failures, a checkpoint that stops training for D seconds, and R seconds from a failure to
the next update, T seconds of training between two checkpoints take on average

    M exp(R / M) (exp((T + D) / M) - 1)

seconds. The interval that makes the share of T largest is, to first order, sqrt(2 D M): J. W. Young, "A First Order
Approximation to the Optimum Checkpoint Interval", Communications of the ACM, 1974. Expected time and expansion to
higher order are from J. T. Daly, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps",
Future Generation Computer Systems, 2006.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass

from deepspeed_nmt.errors import ConfigError, finite_number, shown, shown_bytes

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_S = 1e9
"""Bound on a time, thirty years."""


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of a time such as 90, 90s, 45m, 3h or 2d, the value of ``option``.

    Raises:
        ConfigError: if it is no positive time, or above thirty years.
    """
    unit, seconds = text[-1:] if text[-1:] in _UNITS else "s", math.nan
    with suppress(ValueError):
        seconds = finite_number(text.removesuffix(unit)) * _UNITS[unit]
    if not 0.0 < seconds <= _MAX_S:
        raise ConfigError(f"{option} is {shown(text)}; give a positive time such as 90s, 45m, 3h or 2d")
    return seconds


def young_interval(saving_s: float, mtbf_s: float) -> float:
    """Return the best interval T to first order."""
    return math.sqrt(2.0 * saving_s * mtbf_s)


def daly_interval(saving_s: float, mtbf_s: float) -> float:
    """Return the best interval T to higher order; M if a checkpoint takes two times as long."""
    if saving_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = saving_s / (2.0 * mtbf_s)
    return young_interval(saving_s, mtbf_s) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - saving_s


def expected_seconds(interval_s: float, saving_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected seconds for ``interval_s`` seconds of training and a checkpoint, failures included."""
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + saving_s) / mtbf_s)
    except OverflowError:  # it practically never ends
        return math.inf


@dataclass(frozen=True)
class IntervalPlan:
    """Checkpoints at the interval at which failures cost least, by times in seconds.

    Failures are ``mtbf_s`` apart on average, a checkpoint stops training for ``saving_s``, ``restart_s`` pass from a
    failure to the next update, and an update takes ``update_s``; None if unknown.
    """

    mtbf_s: float
    saving_s: float
    restart_s: float
    update_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Seconds of training between two checkpoints."""
        return daly_interval(self.saving_s, self.mtbf_s)

    @property
    def save_every(self) -> int | None:
        """Updates between two checkpoints; None if the time of an update is unknown."""
        return None if self.update_s is None else max(1, round(self.interval_s / self.update_s))

    def goodput(self, restart_s: float | None = None) -> float:
        """Return the expected share of time in updates that survive and their checkpoints, as ``perf/goodput``."""
        useful, restart_s = self.interval_s + self.saving_s, self.restart_s if restart_s is None else restart_s
        return useful / expected_seconds(self.interval_s, self.saving_s, restart_s, self.mtbf_s)

    def as_json(self) -> dict[str, object]:
        """Return the plan as values for JSON."""
        times = {"mtbf_s": self.mtbf_s, "saving_s": self.saving_s, "restart_s": self.restart_s}
        first_order = {"interval_first_order_s": young_interval(self.saving_s, self.mtbf_s)}
        goodput = {"goodput": self.goodput(), "goodput_without_restarts": self.goodput(0.0)}
        return {**times, "interval_s": self.interval_s, **first_order, "save_every": self.save_every, **goodput}

    def __str__(self) -> str:
        every = f" (training.save_every={self.save_every})" if self.save_every is not None else ""
        goodput, cost = self.goodput(), self.goodput(0.0) - self.goodput()
        times = f"with a failure every {self.mtbf_s:,.0f} s and {self.saving_s:,.3g} s for a checkpoint"
        return (
            f"{times}, save every {self.interval_s:,.0f} s{every}; expected goodput {goodput:.2%}, and restarts of "
            f"{self.restart_s:,.3g} s cost {cost:.2%}"
        )


@dataclass(frozen=True)
class CheckpointPlan:
    """Disk space and time of a run's checkpoints: the newest ``keep_last``, and with ``keep_best`` the best one.

    Of older ones ``late_keep`` may wait for a score that comes late; 0 if none chooses the best. A checkpoint has
    tensors of ``size`` bytes: fp32 weights and optimizer states.
    """

    size: int
    keep_last: int
    keep_best: bool
    late_keep: int
    mb_per_s: float

    @property
    def disk_bytes(self) -> int:
        """Room for all of them, and for the one being written."""
        return self.size * (self.keep_last + int(self.keep_best) + self.late_keep + 1)

    @property
    def seconds(self) -> float:
        """Time to write one checkpoint."""
        return self.size / (self.mb_per_s * 1e6)

    def as_json(self) -> dict[str, object]:
        """Return the plan as values for JSON."""
        sizes = {"checkpoint_bytes": self.size, "disk_bytes": self.disk_bytes}
        return {**sizes, "write_mb_per_s": self.mb_per_s, "save_seconds": self.seconds}

    def __str__(self) -> str:
        best = ", the best one" if self.keep_best else ""
        late = f", validation.late_keep={self.late_keep}" if self.late_keep else ""
        return (
            f"a checkpoint has {shown_bytes(self.size)} and is written in {self.seconds:,.0f} s at "
            f"{self.mb_per_s:g} MB/s (--write-speed); training.keep_last={self.keep_last}{best}{late} and the one "
            f"being written need {shown_bytes(self.disk_bytes)} of disk"
        )
