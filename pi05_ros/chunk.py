"""What the policy answers: a chunk of actions in robot units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ActionChunk:
    """A chunk of actions; row ``i`` belongs to the instant ``stamp_ns + i * step_time_s``.

    Attributes:
        actions: float32 [horizon, dims] in robot units.
        names, units, control_modes: one entry per action dimension, in column order.
        step_time_s: seconds between two rows (1 / training rate); ``None`` where the profile does not know it.
        executed_steps: rows meant to be executed before the next chunk takes over; ``None`` where unknown.
        stamp_ns: stamp of the observation's anchor camera; ``None`` outside ROS.
        prompt: the instruction as it was given.
        noise_seed: seed of the initial noise, or ``None`` when the noise itself was given.
        timings_ms: stage name -> milliseconds, in the order of the stages.
        guard_flags: codes of what the guard noticed; empty for a clean chunk.
        clamp_count: values clamped to the profile's limits.
        rtc_delay: rows bound to the last chunk by real-time chunking; ``None`` where nothing was continued.
    """

    actions: np.ndarray
    names: tuple[str, ...]
    units: tuple[str, ...]
    control_modes: tuple[str, ...]
    step_time_s: float | None
    executed_steps: int | None
    prompt: str | None
    checkpoint_id: str
    profile: str
    denoise_steps: int
    noise_seed: int | None
    stamp_ns: int | None = None
    input_stamps_ns: Mapping[str, int] = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    cache_hit: bool = False
    guard_flags: tuple[str, ...] = ()
    clamp_count: int = 0
    rtc_delay: int | None = None

    @property
    def horizon(self) -> int:
        return int(self.actions.shape[0])

    @property
    def action_dim(self) -> int:
        return int(self.actions.shape[1])
