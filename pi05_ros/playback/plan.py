"""What is to be commanded when: piecewise linear in time, with an end after which nothing was asked of the policy.

Times are int64 nanoseconds of the clock that stamps chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

NS = 1_000_000_000
_TAIL_KNOTS = 16


@dataclass(frozen=True)
class TimedChunk:
    """A chunk as the player holds it; row ``i`` belongs to ``stamp_ns + i * step_ns``.

    Attributes:
        actions: float64 [horizon, dims], finite, in robot units.
        executed_steps: rows after which the next chunk is meant to take over.
        oldest_input_ns: the oldest stamp among the inputs that the chunk answers.
    """

    stamp_ns: int
    step_ns: int
    actions: np.ndarray
    executed_steps: int
    prompt: str = ""
    index: int = 0
    oldest_input_ns: int | None = None

    @property
    def times_ns(self) -> np.ndarray:
        """int64 [horizon]."""
        return self.stamp_ns + np.arange(len(self.actions), dtype=np.int64) * self.step_ns

    @property
    def end_ns(self) -> int:
        return self.stamp_ns + (len(self.actions) - 1) * self.step_ns

    @property
    def takeover_ns(self) -> int:
        """When the next chunk is meant to take over."""
        return self.stamp_ns + min(self.executed_steps, len(self.actions) - 1) * self.step_ns


@dataclass(frozen=True)
class Plan:
    """Commands over time.

    Attributes:
        times_ns: int64 [N], not falling; two equal times make a jump.
        rows: float64 [N, dims].
        stepwise: bool [dims], dimensions that keep a row's value until the next row.
        end_ns: the last instant that rests on a chunk; what follows is the tail (hold or deceleration).
        chunk: the newest chunk in it.
    """

    times_ns: np.ndarray
    rows: np.ndarray
    stepwise: np.ndarray
    end_ns: int
    chunk: TimedChunk | None = field(default=None, compare=False)

    @classmethod
    def of_chunk(cls, chunk: TimedChunk, stepwise: np.ndarray) -> Plan:
        return cls(chunk.times_ns, chunk.actions, stepwise, chunk.end_ns, chunk)

    @classmethod
    def hold(cls, values: np.ndarray, at_ns: int, stepwise: np.ndarray) -> Plan:
        """``values`` float64 [dims] for ever; none of it rests on a chunk."""
        return cls(np.array([at_ns], dtype=np.int64), np.array(values, dtype=np.float64)[None], stepwise, at_ns)

    def sample(self, at_ns: np.ndarray | int) -> np.ndarray:
        """float64 [..., dims] at the given times; before the first row its value, after the last row the last."""
        at = np.asarray(at_ns, dtype=np.int64)
        after = np.searchsorted(self.times_ns, at, side="right")
        last = len(self.times_ns) - 1
        left, right = np.clip(after - 1, 0, last), np.clip(after, 0, last)
        start, end = self.times_ns[left], self.times_ns[right]
        span = np.maximum(end - start, 1)
        share = np.where(end > start, (np.clip(at, start, end) - start) / span, 0.0)[..., None]
        share = np.where(self.stepwise, 0.0, share)
        before, behind = self.rows[left], self.rows[right]
        return before + share * (behind - before)

    def velocity_at_end(self) -> np.ndarray:
        """float64 [dims] per second: the slope just before ``end_ns``; 0 for stepwise dimensions."""
        before = int(self.times_ns[max(int(np.searchsorted(self.times_ns, self.end_ns, side="left")) - 1, 0)])
        span = self.end_ns - before
        if span <= 0:
            return np.zeros(self.rows.shape[1])
        slope = (self.sample(self.end_ns) - self.sample(before)) / (span / NS)
        return np.where(self.stepwise, 0.0, slope)

    def with_tail(self, end_ns: int, velocity_mode: np.ndarray, decelerate_s: float) -> Plan:
        """The plan cut at ``end_ns`` and continued by the declared behaviour when nothing follows.

        A position comes to rest with its velocity falling linearly to 0 over ``decelerate_s`` (at once where that is
        0); a velocity (``velocity_mode``, bool [dims]) falls to 0 in the same time; a stepwise value stays.
        """
        cut = Plan(self.times_ns, self.rows, self.stepwise, min(end_ns, self.end_ns), self.chunk)
        keep = self.times_ns < cut.end_ns
        last = cut.sample(cut.end_ns)
        slope = np.where(velocity_mode, 0.0, cut.velocity_at_end())
        knots = np.linspace(0.0, 1.0, _TAIL_KNOTS) if decelerate_s > 0.0 else np.array([0.0, 0.0])
        # One ramp of the velocity v(1 - s) is the position v T (s - s^2 / 2).
        moved = slope * decelerate_s * (knots - knots**2 / 2)[:, None]
        falling = np.where(velocity_mode, last * (1.0 - knots)[:, None], last + moved)
        if decelerate_s <= 0.0:
            falling[1] = np.where(velocity_mode, 0.0, last)
        times = cut.end_ns + np.round(knots * decelerate_s * NS).astype(np.int64)
        return Plan(
            np.concatenate([self.times_ns[keep], times]),
            np.concatenate([self.rows[keep], falling]),
            self.stepwise,
            cut.end_ns,
            self.chunk,
        )
