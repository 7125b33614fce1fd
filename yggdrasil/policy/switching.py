"""c_prefill: the time to bring the draft back after steps without it, measured once and looked up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["SwitchTable"]


@dataclass(frozen=True)
class SwitchTable:
    """Seconds to catch the draft's KV up, by lag and batch size.

    Args:
        lags: Measured L_max, ascending.
        batch_sizes: Measured B, ascending.
        seconds: seconds[i][j] at lags[i], batch_sizes[j].

    Source: Nightjar section 4.2, "Prefill Cost Modeling", Table 3.
    """

    lags: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __call__(self, lag: int, batch_size: int) -> float:
        """Linear between measured points along both axes, proportional beyond them.

        A lag below the smallest measured one, and a lag or batch size above the largest, scales the nearest
        measured value.
        """
        if lag < self.lags[0]:
            return self(self.lags[0], batch_size) * max(lag, 0) / self.lags[0]
        max_lag = self.lags[-1]
        max_rows = self.batch_sizes[-1]
        if lag > max_lag or batch_size > max_rows:  # full graphs one after another
            return (
                self(min(lag, max_lag), min(batch_size, max_rows))
                * max(1.0, lag / max_lag)
                * max(1.0, batch_size / max_rows)
            )
        i, lag_share = _place(self.lags, lag)
        j, batch_share = _place(self.batch_sizes, batch_size)
        low = self.seconds[i]
        high = self.seconds[min(i + 1, len(self.lags) - 1)]
        k = min(j + 1, len(self.batch_sizes) - 1)
        at_low, at_high = (row[j] * (1 - batch_share) + row[k] * batch_share for row in (low, high))
        return at_low * (1 - lag_share) + at_high * lag_share

    def to_json(self) -> dict[str, Any]:
        """The form that `from_json` reads."""
        return {
            "lags": list(self.lags),
            "batch_sizes": list(self.batch_sizes),
            "seconds": [list(row) for row in self.seconds],
        }

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> SwitchTable:
        return cls(
            tuple(payload["lags"]),
            tuple(payload["batch_sizes"]),
            tuple(tuple(row) for row in payload["seconds"]),
        )


def _place(points: Sequence[int], value: int) -> tuple[int, float]:
    """The measured point before `value`, and the fraction of the way to the next; not beyond the last."""
    after = bisect_left(points, value)
    if after == 0:
        return 0, 0.0
    return after - 1, (value - points[after - 1]) / (points[after] - points[after - 1])
