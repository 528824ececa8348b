"""The expert's adaptive norms, computed once for each number of steps instead of at every step of every request."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from pi05_ros.engine.placement import WeightPlacement
from pi05_ros.model.gemma import Modulation
from pi05_ros.model.pi05 import Pi05, StepModulation


class ModulationTables:
    """Modulation of every Euler step by number of steps, the least recently used dropped first.

    They depend on weights and flow times alone. Each row is computed by itself, as in a single step, so that a table
    holds bit for bit what the step would have computed.

    Args:
        max_rows: steps kept in all; at full size one takes 0.45 MB.
    """

    def __init__(self, model: Pi05, placement: WeightPlacement, max_rows: int = 256) -> None:
        self._model = model
        self._placement = placement
        self._max_rows = max_rows
        self._tables: OrderedDict[int, list[StepModulation]] = OrderedDict()
        self._end: StepModulation | None = None

    def steps(self, num_steps: int) -> list[StepModulation]:
        """The table of ``num_steps`` steps from t = 1."""
        table = self._tables.get(num_steps)
        if table is None:
            table = self._compute(self._model.euler_times(num_steps))
            self._tables[num_steps] = table
        self._tables.move_to_end(num_steps)
        while len(self._tables) > 1 and sum(self._tables) > self._max_rows:
            self._tables.popitem(last=False)
        return table

    def end(self) -> StepModulation:
        """At t = 0, for rows that are already actions."""
        if self._end is None:
            (self._end,) = self._compute([0.0])
        return self._end

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._tables.clear()
        self._end = None

    def _compute(self, times: list[float]) -> list[StepModulation]:
        with self._placement.stage("modulation"):
            return self._model.modulations(times)


def by_row(first: StepModulation, second: StepModulation, is_first: Tensor) -> StepModulation:
    """``first`` where ``is_first`` (bool [B, H, 1]) and ``second`` elsewhere; each part becomes [B, H, width]."""

    def choose(one: Modulation, other: Modulation) -> Modulation:
        return Modulation(*(torch.where(is_first, left, right) for left, right in zip(one, other, strict=True)))

    layers = tuple(
        (choose(one[0], other[0]), choose(one[1], other[1]))
        for one, other in zip(first.layers, second.layers, strict=True)
    )
    return StepModulation(layers, choose(first.final, second.final))
