"""How good a motion was: tracking error, steps between commands, jerk, stalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MotionFigures:
    """Figures of one run.

    Attributes:
        tracking_rms: of the distance between the robot and the nearest way to do the task (unit of the joints).
        largest_step: between two commands; where the control loop was late, per control period that passed.
        step_ratio: ``largest_step`` over the largest step that the chunks themselves contain in one control period.
        jerk_rms: of the commands' third derivative (unit per s^3).
        stalls, stalled_s: how often and for how long no chunk had come in time.
    """

    tracking_rms: float
    largest_step: float
    step_ratio: float
    jerk_rms: float
    stalls: int
    stalled_s: float


def motion_figures(
    times_s: np.ndarray,
    commands: np.ndarray,
    period_s: float,
    positions: np.ndarray,
    ways: np.ndarray,
    chunks: Sequence[tuple[np.ndarray, float]],
    stalls: int,
    stalled_s: float,
) -> MotionFigures:
    """Compare a run with what it should have been.

    Args:
        times_s, commands: float [N] and [N, joints], one per control period.
        positions: float [M, joints] of the robot; ways: float [ways, M, joints] at the same instants.
        chunks: rows [horizon, joints] and step time of every chunk that was played.
    """
    steps = np.abs(np.diff(commands, axis=0)) / np.maximum(np.diff(times_s) / period_s, 1.0)[:, None]
    inside = max(float(np.abs(np.diff(rows, axis=0)).max()) * period_s / step_s for rows, step_s in chunks)
    jerk = np.diff(commands, n=3, axis=0) / period_s**3
    distance = np.sqrt(((positions - ways) ** 2).mean(axis=-1)).min(axis=0)
    return MotionFigures(
        tracking_rms=float(np.sqrt((distance**2).mean())),
        largest_step=float(steps.max()),
        step_ratio=float(steps.max()) / inside,
        jerk_rms=float(np.sqrt((jerk**2).mean())),
        stalls=stalls,
        stalled_s=stalled_s,
    )
