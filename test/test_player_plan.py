"""Sampling by time, hand-overs, tails and limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from player_world import ARM, EPOCH_NS, arm

from pi05_ros.errors import ConfigurationError, ProfileError
from pi05_ros.playback.handover import blend, ensemble
from pi05_ros.playback.limits import Limits, read_urdf
from pi05_ros.playback.plan import NS, Plan, TimedChunk
from pi05_ros.profile import load_profile, parse_profile

STEP = NS // 10
SMOOTH = np.array([False, False])
GRIPPER = np.array([False, True])


def chunk(rows: np.ndarray, stamp_ns: int = EPOCH_NS) -> TimedChunk:
    return TimedChunk(stamp_ns, STEP, np.asarray(rows, dtype=np.float64), len(rows))


def random_chunk(seed: int, stamp_ns: int = EPOCH_NS, rows: int = 12) -> TimedChunk:
    return chunk(np.random.default_rng(seed).standard_normal((rows, 2)), stamp_ns)


def test_rows_stand_at_stamp_plus_i_steps_and_between_them_lies_a_line():
    plan = Plan.of_chunk(chunk(np.array([[0.0, 0.0], [1.0, 10.0], [3.0, 30.0]])), SMOOTH)
    at = EPOCH_NS + np.array([-STEP, 0, STEP // 4, STEP, STEP + STEP // 2, 2 * STEP, 5 * STEP])
    expected = [[0, 0], [0, 0], [0.25, 2.5], [1, 10], [2, 20], [3, 30], [3, 30]]
    np.testing.assert_allclose(plan.sample(at), expected)


def test_a_stepwise_dimension_keeps_its_row_until_the_next():
    plan = Plan.of_chunk(chunk(np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 0.0]])), GRIPPER)
    at = EPOCH_NS + np.array([STEP - 1, STEP, 2 * STEP - 1, 2 * STEP])
    np.testing.assert_array_equal(plan.sample(at)[:, 1], [0.0, 1.0, 1.0, 0.0])


@given(seed=st.integers(0, 2**32 - 1), offset=st.integers(0, 11 * STEP), window=st.floats(0.01, 1.0))
def test_blend_begins_at_the_old_and_ends_at_the_new(seed: int, offset: int, window: float):
    old = Plan.of_chunk(random_chunk(seed), SMOOTH)
    new = Plan.of_chunk(random_chunk(seed + 1, EPOCH_NS + offset // 2), SMOOTH)
    now = EPOCH_NS + offset
    mixed = blend(old, new, now, window)
    np.testing.assert_allclose(mixed.sample(now), old.sample(now), atol=1e-6)
    after = now + round(window * NS) + np.arange(20) * STEP
    np.testing.assert_allclose(mixed.sample(after), new.sample(after), atol=1e-9)
    both = np.stack([old.rows.min(0), new.rows.min(0)]).min(0), np.stack([old.rows.max(0), new.rows.max(0)]).max(0)
    inside = mixed.sample(now + np.linspace(0, window * NS, 50).astype(np.int64))
    assert (inside >= both[0] - 1e-9).all() and (inside <= both[1] + 1e-9).all()


@given(seeds=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), now=st.integers(0, 8 * STEP))
def test_ensemble_is_the_weighted_mean_of_the_chunks_that_cover_an_instant(seeds: list[int], now: int):
    stamps = [EPOCH_NS + number * (STEP * 2 // 3) for number in range(len(seeds))]
    chunks = [random_chunk(seed, stamp) for seed, stamp in zip(seeds, stamps, strict=True)]
    start = max(EPOCH_NS + now, stamps[-1])
    plan = ensemble(chunks, SMOOTH, start, decay=0.3)
    for at in start + np.arange(0, 12 * STEP, STEP // 7):
        if at > chunks[-1].end_ns:
            break
        # As ACT defines it: w_i = exp(-m i) over the predictions for this instant, the oldest first.
        about = [(i, one) for i, one in enumerate(chunks) if one.stamp_ns <= at < one.end_ns or one is chunks[-1]]
        weights = np.exp(-0.3 * np.array([i for i, _ in about]))
        values = np.stack([Plan.of_chunk(one, SMOOTH).sample(at) for _, one in about])
        np.testing.assert_allclose(plan.sample(at), weights @ values / weights.sum(), atol=1e-6)


def test_deceleration_brings_velocity_to_zero_without_a_jump():
    plan = Plan.of_chunk(chunk(np.array([[0.0, 1.0], [0.1, 1.0]])), SMOOTH)
    tail = plan.with_tail(plan.end_ns, np.array([False, True]), decelerate_s=0.4)
    at = plan.end_ns + np.arange(-STEP // 2, NS, NS // 200)
    values = tail.sample(at)
    assert np.abs(np.diff(values[:, 0])).max() <= 1.0 / 200 + 1e-9  # 1 rad/s at the end, never faster
    assert values[-1, 0] == pytest.approx(0.1 + 1.0 * 0.4 / 2)
    assert values[-1, 1] == 0.0 and tail.sample(plan.end_ns)[1] == 1.0
    held = plan.with_tail(plan.end_ns, np.array([False, True]), decelerate_s=0.0)
    np.testing.assert_array_equal(held.sample(plan.end_ns + 1), [0.1, 0.0])


@given(
    values=st.lists(st.floats(-3, 3), min_size=6, max_size=6),
    previous=st.lists(st.floats(-2, 2), min_size=3, max_size=3),
    elapsed=st.floats(0, 0.02),
)
def test_limits_are_never_broken_and_clean_values_never_touched(
    values: list[float], previous: list[float], elapsed: float
):
    limits = Limits.of_profile(arm())
    wanted, before = np.array(values[:3]), np.array(previous)
    command, clamped = limits.apply(before, wanted, elapsed)
    allowed = np.where(np.isinf(limits.rate), np.inf, np.minimum(limits.rate, 1e9) * elapsed)
    assert (np.abs(command - before) <= allowed + 1e-12).all()
    # Outside the ends only where it was before, and never further out.
    low, high = np.minimum(limits.low, before), np.maximum(limits.high, before)
    assert (command >= low - 1e-12).all() and (command <= high + 1e-12).all()
    clean = (np.abs(wanted - before) <= allowed) & (wanted >= limits.low) & (wanted <= limits.high)
    assert not clamped[clean].any()
    np.testing.assert_array_equal(command[clean], wanted[clean])


def test_a_urdf_tightens_the_profile(tmp_path: Path):
    urdf = tmp_path / "arm.urdf"
    urdf.write_text(
        """<robot name="arm">
             <joint name="a" type="revolute"><limit lower="-0.5" upper="2" velocity="1" effort="1"/></joint>
             <joint name="b" type="continuous"><limit velocity="3" effort="1"/></joint>
           </robot>"""
    )
    limits = Limits.of_profile(arm(), read_urdf(urdf))
    np.testing.assert_array_equal(limits.low[:2], [-0.5, -1.0])
    np.testing.assert_array_equal(limits.high[:2], [1.0, 1.0])
    np.testing.assert_array_equal(limits.rate[:2], [1.0, 2.0])
    urdf.write_text("<robot><joint name='a' type='revolute'><limit lower='x' upper='2'/></joint></robot>")
    with pytest.raises(ConfigurationError, match="joint a"):
        read_urdf(urdf)
    with pytest.raises(ConfigurationError, match="nowhere.urdf"):
        read_urdf(tmp_path / "nowhere.urdf")


def test_what_is_not_limited_is_named():
    profile = load_profile("ur5e")
    assert Limits.of_profile(profile).missing(profile) == [dim.name for dim in profile.action.dims[:6]]
    assert Limits.of_profile(arm()).missing(arm()) == []


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ({"controllers": {}}, ["controllers", "at least 1"]),
        ({"unused": ["gripper", "b"]}, ["a", "go nowhere"]),
        ({"start_distance": 0.0}, ["start_distance", "greater than 0"]),
        ({"start_distance": {"a": 0.1}}, ["start_distance", "'b'"]),
        ({"stepwise": ["hand"]}, ["stepwise", "hand"]),
        ({"rate_hz": 0.5}, ["rate_hz"]),
        ({"controllers": {"c": {"type": "odometry", "topic": "c", "dims": ["a"]}}}, ["type", "joint_trajectory"]),
        (
            {"controllers": {"c": {"type": "joint_trajectory", "control": "velocity", "topic": "c", "dims": ["a"]}}},
            ["joint_trajectory carries positions"],
        ),
        (
            {"controllers": {"c": {"type": "multi_array", "control": "velocity", "topic": "c", "dims": ["a"]}}},
            ["takes velocity", "a is position"],
        ),
        (
            {"controllers": {"c": {"type": "multi_array", "topic": "c", "dims": ["a", "a", "b", "gripper"]}}},
            ["a goes to c already"],
        ),
        (
            {"controllers": {"c": {"type": "multi_array", "topic": "c", "dims": ["a"], "joints": ["x", "y"]}}},
            ["joints", "one for each"],
        ),
    ],
)
def test_an_output_that_does_not_fit_is_refused(output: dict, names: list[str]):
    good = {"controllers": {"c": {"type": "multi_array", "topic": "c", "dims": ["a", "b"]}}, "unused": ["gripper"]}
    content = {**ARM, "output": {"start_distance": 0.2, **good, **output}}
    with pytest.raises(ProfileError) as caught:
        parse_profile(content, origin="arm.yaml")
    for name in ["arm.yaml", "output", *names]:
        assert name in str(caught.value)


def test_a_delta_or_velocity_action_goes_to_no_position_controller():
    for name in ("droid", "libero"):
        profile = load_profile(name).model_dump(mode="json")
        dims = [dim["name"] for dim in profile["action"]["dims"]]
        profile["output"] = {
            "controllers": {"arm": {"type": "multi_array", "topic": "c", "dims": dims}},
            "start_distance": 0.2,
        }
        with pytest.raises(ProfileError, match="takes position, and the action .* is (velocity|delta_pose)"):
            parse_profile(profile, origin=name)


def test_a_position_that_is_not_measured_is_refused():
    content = {**ARM, "state": {**ARM["state"], "dims": [{"name": "a", "unit": "rad"}]}}
    with pytest.raises(ProfileError, match="need a state dimension of the same name"):
        parse_profile(content, origin="arm.yaml")
