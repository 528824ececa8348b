"""Random schedules of everything that can happen to the player: whatever comes, no command breaks a limit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from player_world import World, wave

from pi05_ros.playback.handover import HANDOVERS
from pi05_ros.playback.plan import NS

Event = tuple[str, float]


def happen(world: World, kind: str, value: float) -> None:
    """One event; ``value`` in [0, 1) says how."""
    player = world.player
    if kind == "chunk":
        world.offer(world.chunk(age_s=value * 1.5))
    elif kind == "wild":  # within no limit, and nowhere near the last chunk
        world.offer(world.chunk(lambda at: wave(at) + 6.0 * (value - 0.5)))
    elif kind == "nan":
        world.offer(world.chunk(lambda at: np.where(np.arange(3) == int(3 * value), np.nan, wave(at))))
    elif kind == "older prompt":
        world.offer(world.chunk(prompt="another", age_s=value))
    elif kind == "prompt":
        world.say(prompt="another" if value > 0.5 else "wave")
    elif kind == "policy":
        faults = [None, ("input.dead", "front"), ("input.frozen", "front"), ("action.nan", "a")]
        world.say(player.prompt, reason=faults[int(4 * value)])
    elif kind == "joints":
        world.feedback_flows = value > 0.5
    elif kind == "bump":  # someone moves the robot
        world.pose = world.pose + (value - 0.5)
    elif kind == "clock":
        world.now_ns += round((value - 0.5) * 4 * NS)
    elif kind == "stall":  # the control loop is held up
        world.now_ns += round(value * 0.5 * NS)
        world.mono_s += value * 0.5
    elif kind == "start":
        world.start()
    elif kind == "stop":
        player.stop("stop.requested", "by hand", world.mono_s)
    elif kind == "reset":
        player.reset()
    else:
        raise AssertionError(kind)


KINDS = ["chunk", "chunk", "chunk", "wild", "nan", "older prompt", "prompt", "policy", "joints", "bump", "clock",
         "stall", "start", "start", "stop", "reset"]  # fmt: skip
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.integers(0, 40)), min_size=5, max_size=60
)


def check_schedule(
    schedule: list[tuple[str, float, int]], handover: str, when_late: str, draw_stop: Callable[[], None] | None = None
) -> None:
    """Play a schedule; after every period compare with what must hold whatever happened."""
    world = World(handover=handover, when_late=when_late, ramp_s=0.3, feedback_timeout_s=0.1)
    limits = world.player.limits
    low, high = limits.low.copy(), limits.high.copy()
    last: np.ndarray | None = None
    last_mono = 0.0
    world.start()
    for kind, value, periods in schedule:
        happen(world, kind, value)
        for _ in range(periods):
            state_before, pose = world.player.state, world.pose.copy()
            mono_before = world.mono_s if last is None else last_mono
            command = world.tick()
            if not command.send:
                if command.state in ("idle", "waiting", "stopped"):
                    last = None if command.state != "stopped" else last
                continue
            assert command.state in ("ramping", "running", "late", "stopped")
            assert np.isfinite(command.values).all()
            previous = last if last is not None and state_before not in ("idle", "waiting") else pose
            elapsed = world.mono_s - mono_before
            arm, was = command.values[:2], previous[:2]
            allowed = 2.0 * min(max(elapsed, 0.0), 0.02) + 1e-9
            if last is not None:
                assert (np.abs(arm - was) <= allowed).all(), (kind, value, command.state)
            assert (arm >= np.minimum(low[:2], was) - 1e-9).all() and (arm <= np.maximum(high[:2], was) + 1e-9).all()
            if command.state == "stopped" and last is not None:
                assert (command.values == last).all()
            last, last_mono = command.values, world.mono_s
        if last is None:
            last_mono = world.mono_s


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=EVENTS, handover=st.sampled_from(HANDOVERS), when_late=st.sampled_from(["hold", "decelerate", "stop"]))
def test_whatever_happens_no_command_breaks_a_limit(schedule: list, handover: str, when_late: str):
    check_schedule(schedule, handover, when_late)


@pytest.mark.soak
@settings(deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=EVENTS, handover=st.sampled_from(HANDOVERS), when_late=st.sampled_from(["hold", "decelerate", "stop"]))
def test_whatever_happens_a_thousand_times(schedule: list, handover: str, when_late: str):
    check_schedule(schedule, handover, when_late)
