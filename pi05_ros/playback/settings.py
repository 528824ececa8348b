"""The words of the player: its settings, states, commands and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pi05_ros.errors import ConfigurationError
from pi05_ros.playback.handover import HANDOVERS, Handover

State = Literal["idle", "waiting", "ramping", "running", "late", "stopped"]
WhenLate = Literal["hold", "decelerate", "stop"]


@dataclass(frozen=True)
class PlayerSettings:
    """How chunks become motion. Times in seconds.

    Attributes:
        blend_s: how long `blend` passes from one chunk to the next.
        rtc_blend_s: the same for `rtc`: guidance leaves a small difference between the two chunks.
        ensemble_decay: the exponent of `ensemble`; 0 weighs all chunks alike.
        when_late: what happens when no chunk follows: hold the last command, come to rest over ``decelerate_s``, or
            stop for good.
        ramp_s: over which the first motion passes from the measured pose to the chunk.
        resume_s: over which motion is taken up again after it was late.
        observation_timeout_s: how long an observation may carry motion, from its oldest input on.
        feedback_timeout_s: how long each state source may be silent while the robot moves.
        policy_timeout_s: how long the policy's status (sent at 1 Hz) may be missing.
        request_margin_s: how much earlier than expected to be needed the next chunk is asked for.
        request_timeout_s: after which an unanswered request is made again.
        clock_jump_s: how far the clock may leave the monotonic one between two periods.
        steady: the clock follows the monotonic one (False for simulated time, which may pause and run fast).
        hold_s: how long the hold command is repeated after a stop.
    """

    handover: Handover = "blend"
    blend_s: float = 0.2
    rtc_blend_s: float = 0.1
    ensemble_decay: float = 0.01
    when_late: WhenLate = "decelerate"
    decelerate_s: float = 0.3
    ramp_s: float = 1.0
    resume_s: float = 0.5
    observation_timeout_s: float = 3.0
    feedback_timeout_s: float = 0.25
    policy_timeout_s: float = 3.0
    request_margin_s: float = 0.05
    request_timeout_s: float = 1.0
    clock_jump_s: float = 0.1
    steady: bool = True
    hold_s: float = 1.0

    def __post_init__(self) -> None:
        if self.handover not in HANDOVERS:
            raise ConfigurationError("player", f"handover: one of {HANDOVERS} expected, got {self.handover!r}")
        if self.when_late not in ("hold", "decelerate", "stop"):
            raise ConfigurationError("player", f"when_late: hold, decelerate or stop expected, got {self.when_late!r}")


@dataclass(frozen=True)
class Command:
    """The command of one control period: float64 [dims] in robot units, NaN where nothing is known yet.

    ``send`` is False while the player has nothing to say to the controllers.
    """

    values: np.ndarray
    send: bool
    state: State


@dataclass
class Counts:
    """What happened since the last reset."""

    commands: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    clamped: int = 0
    clamped_by_dim: Counter[str] = field(default_factory=Counter)
    late: int = 0
    late_s: float = 0.0
    stops: int = 0
    requests: int = 0
