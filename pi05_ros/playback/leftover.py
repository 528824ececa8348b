"""What of the last chunk is still to be executed when the next one is computed, for real-time chunking.

The last chunk is sampled at the new observation's instants (new stamp + i * step time), so that row ``i`` of the
leftover is due when row ``i`` of the new chunk is. `pi05_ros.playback.rtc` then says it in the network's numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.observation import Observation
from pi05_ros.playback.delay import DelayEstimate
from pi05_ros.playback.plan import NS, Plan, TimedChunk
from pi05_ros.profile import Profile


@dataclass(frozen=True)
class RtcSettings:
    """How firmly a chunk continues the last one; see `pi05_ros.engine.chunking.RealTimeChunking`.

    Attributes:
        fade_rows: rows behind the delay over which the pull fades (guided).
    """

    mode: Literal["guided", "hard_prefix"] = "guided"
    fade_rows: int = 10
    schedule: Literal["zeros", "ones", "linear", "exp"] = "linear"
    max_guidance_weight: float = 10.0


@dataclass(frozen=True)
class Continuation:
    """A leftover in robot units.

    Attributes:
        rows: float64 [L, dims], 1 <= L <= horizon.
        delay: rows that will have been executed when the new chunk arrives, at most L.
    """

    rows: np.ndarray
    delay: int
    settings: RtcSettings


class AnswersObservations(Protocol):
    """What running or replaying chunks needs of `pi05_ros.policy.Policy`."""

    profile: Profile

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        *,
        continuing: Continuation | None = None,
    ) -> ActionChunk: ...


class Leftover:
    """Keeps the last chunk that was sent and how old chunks are when they are sent.

    Args:
        transport_s: from sending a chunk to its first command, added to the delay.
    """

    def __init__(self, transport_s: float = 0.02) -> None:
        self._transport_s = transport_s
        self._ages = DelayEstimate()
        self._last_age_s = 0.0
        self._last: TimedChunk | None = None

    def sent(self, chunk: ActionChunk, now_ns: int) -> None:
        """``chunk`` has been sent. One without stamp or step time cannot be continued."""
        if chunk.stamp_ns is None or not chunk.step_time_s:
            self._last = None
            return
        self._last_age_s = (now_ns - chunk.stamp_ns) / NS
        self._ages.add(self._last_age_s)
        self._last = TimedChunk(
            chunk.stamp_ns,
            round(chunk.step_time_s * NS),
            np.array(chunk.actions, dtype=np.float64),
            chunk.executed_steps or chunk.horizon,
            chunk.prompt or "",
        )

    def flush(self) -> None:
        """The next chunk begins anew (an episode was reset, the robot was stopped)."""
        self._last = None

    def continuation(self, stamp_ns: int, prompt: str, settings: RtcSettings) -> Continuation | None:
        """What a chunk for an observation of ``stamp_ns`` continues.

        ``None`` for the first chunk, after `flush`, for another prompt, where the last chunk is used up before
        ``stamp_ns``, and where ``stamp_ns`` is not newer. One shorter than the delay is extended by its last row.
        """
        last = self._last
        if last is None or prompt != last.prompt or not last.stamp_ns < stamp_ns <= last.end_ns:
            return None
        # Before any duration counts (the first one may hold a compilation) the last one is all there is.
        age_s = self._last_age_s if self._ages.seconds is None else self._ages.seconds
        delay = min(math.ceil((age_s + self._transport_s) * NS / last.step_ns), len(last.actions))
        return continue_chunk(last, stamp_ns, delay, settings)


def continue_chunk(last: TimedChunk, stamp_ns: int, delay: int, settings: RtcSettings) -> Continuation:
    """What is left of ``last`` at ``stamp_ns`` (within it), at least ``delay`` rows, as `Leftover` finds it."""
    real = (last.end_ns - stamp_ns) // last.step_ns + 1
    times = stamp_ns + np.arange(max(real, delay), dtype=np.int64) * last.step_ns
    plan = Plan.of_chunk(last, np.zeros(last.actions.shape[1], dtype=bool))
    return Continuation(plan.sample(times), delay, settings)
