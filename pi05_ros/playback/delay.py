"""How long an answer takes: a windowed percentile that does not count the warm-up."""

from __future__ import annotations

from collections import deque

import numpy as np


class DelayEstimate:
    """Percentile of the last durations.

    Args:
        window: how many durations are looked back on.
        percentile: 0 to 100.
        warm_up: how many durations are thrown away first (compilation, capture, caches).
    """

    def __init__(self, window: int = 32, percentile: float = 95.0, warm_up: int = 1) -> None:
        self._durations: deque[float] = deque(maxlen=window)
        self._percentile = percentile
        self._to_skip = warm_up

    def add(self, seconds: float) -> None:
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        self._durations.append(seconds)

    @property
    def seconds(self) -> float | None:
        """The percentile; ``None`` before the first duration that counts."""
        if not self._durations:
            return None
        return float(np.percentile(np.array(self._durations), self._percentile))
