"""How a new chunk takes over from what is being executed.

``replace`` follows the new chunk from the moment it is there; ``blend`` passes over gradually; ``ensemble`` averages
all chunks that speak about an instant, as ACT does (Zhao et al. 2023, section IV-B); with ``rtc`` the policy has
already made the chunk's beginning agree with the last one, and a short blend takes up what is left of the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from pi05_ros.playback.plan import NS, Plan, TimedChunk

Handover = Literal["replace", "blend", "ensemble", "rtc"]
HANDOVERS: tuple[Handover, ...] = ("replace", "blend", "ensemble", "rtc")
_BLEND_KNOTS = 16


def smooth_step(share: np.ndarray) -> np.ndarray:
    """0 to 1 with zero slope at both ends, for ``share`` in any range."""
    share = np.clip(share, 0.0, 1.0)
    return share * share * (3.0 - 2.0 * share)


def blend(old: Plan, new: Plan, now_ns: int, window_s: float) -> Plan:
    """Pass from ``old`` (all of it at ``now_ns``) to ``new`` (all of it after ``window_s``).

    Stepwise dimensions are not mixed: they follow ``new`` at once.
    """
    window_ns = round(window_s * NS)
    if window_ns <= 0:
        return new
    until = now_ns + window_ns
    inside = np.unique(
        np.concatenate(
            [
                now_ns + np.linspace(0, window_ns, _BLEND_KNOTS).astype(np.int64),
                old.times_ns[(old.times_ns > now_ns) & (old.times_ns < until)],
                new.times_ns[(new.times_ns > now_ns) & (new.times_ns < until)],
            ]
        )
    )
    share = np.where(new.stepwise, 1.0, smooth_step((inside - now_ns) / window_ns)[:, None])
    theirs, ours = new.sample(inside), old.sample(inside)
    later = new.times_ns > until
    return Plan(
        np.concatenate([inside, new.times_ns[later]]),
        np.concatenate([ours + share * (theirs - ours), new.rows[later]]),
        new.stepwise,
        new.end_ns,
        new.chunk,
    )


def ensemble(chunks: Sequence[TimedChunk], stepwise: np.ndarray, now_ns: int, decay: float) -> Plan:
    """The weighted mean of all chunks (oldest first) that cover each instant: weight exp(-decay * i), i = 0 the oldest.

    Exact between the rows of all chunks, and it jumps where one of them ends. Stepwise dimensions follow the newest.
    """
    newest = chunks[-1]
    plans = [Plan.of_chunk(chunk, stepwise) for chunk in chunks]
    ends = [chunk.end_ns for chunk in chunks[:-1] if now_ns <= chunk.end_ns < newest.end_ns]
    times = np.unique(np.concatenate([[now_ns, newest.end_ns], *(chunk.times_ns for chunk in chunks)]))
    times = times[(times >= now_ns) & (times <= newest.end_ns)]
    # Behind the end of each older chunk a second knot of the same time carries the mean without it.
    knots = np.concatenate([times, np.array(ends, dtype=np.int64)])
    behind = np.concatenate([np.zeros(len(times), dtype=bool), np.ones(len(ends), dtype=bool)])
    order = np.lexsort((behind, knots))
    knots, behind = knots[order], behind[order]
    total = np.zeros((len(knots), newest.actions.shape[1]))
    weights = np.zeros(len(knots))
    for age, (chunk, plan) in enumerate(zip(chunks, plans, strict=True)):
        covers = (knots >= chunk.stamp_ns) & np.where(behind, knots < chunk.end_ns, knots <= chunk.end_ns)
        weight = np.where(covers, np.exp(-decay * age), 0.0)
        total += weight[:, None] * plan.sample(knots)
        weights += weight
    total /= weights[:, None]
    total[:, stepwise] = plans[-1].sample(knots)[:, stepwise]
    return Plan(knots, total, stepwise, newest.end_ns, newest)
