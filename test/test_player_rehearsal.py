"""The closed loop in virtual time, with a policy whose flow is known."""

from __future__ import annotations

import numpy as np
import pytest

from pi05_ros.playback.flow_target import denoise, target_chunks
from pi05_ros.playback.leftover import RtcSettings
from pi05_ros.playback.limits import Limits
from pi05_ros.playback.rehearsal import rehearse
from pi05_ros.playback.settings import PlayerSettings
from pi05_ros.profile import load_profile
from pi05_ros.tools.rehearse import DELAYS_MS, delay_law

ARM = load_profile("simulated_arm")


def test_the_flow_ends_in_one_of_its_targets():
    targets = target_chunks(3.0, 0.05, 30, np.zeros(3))
    rng = np.random.default_rng(0)
    ends = [denoise(targets, rng.standard_normal((30, 3)), 10) for _ in range(40)]
    nearest = [int(np.abs(targets - end).max(axis=(1, 2)).argmin()) for end in ends]
    for end, way in zip(ends, nearest, strict=True):
        np.testing.assert_allclose(end, targets[way], atol=1e-6)
    assert 5 <= sum(nearest) <= 35  # both are chosen


@pytest.mark.parametrize("delay_ms", DELAYS_MS)
@pytest.mark.parametrize("seed", [1, 2])
def test_rtc_takes_no_step_above_twice_the_largest_in_a_chunk(delay_ms: tuple[float, float], seed: int):
    done = rehearse(ARM, PlayerSettings(handover="rtc"), delay_law(*delay_ms), 10.0, seed, RtcSettings())
    assert done.figures.step_ratio <= 2.0
    assert done.figures.stalls == 0 and done.figures.tracking_rms < 0.1


def test_without_it_chunks_that_disagree_make_the_robot_jump():
    done = rehearse(ARM, PlayerSettings(handover="replace"), delay_law(200, 200), 10.0, 1)
    assert done.figures.step_ratio > 4.0


def test_a_delay_beyond_the_horizon_stalls_and_is_counted_within_the_limits():
    limits = Limits.of_profile(ARM)
    done = rehearse(ARM, PlayerSettings(), delay_law(900, 1400), 20.0, 1, limits=limits)
    assert done.figures.stalls >= 3 and done.figures.stalled_s > 0.3
    assert done.figures.largest_step <= 0.03 + 1e-9


@pytest.mark.parametrize("handover", ["replace", "blend", "ensemble", "rtc"])
def test_the_same_seed_gives_the_same_motion(handover: str):
    runs = [rehearse(ARM, PlayerSettings(handover=handover), delay_law(50, 250), 4.0, 7) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].commands, runs[1].commands)
