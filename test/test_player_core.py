"""The closed loop without ROS: start, hand-over, lateness, watchdogs, stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from player_world import EPOCH_NS, PERIOD_NS, World, arm, running, wave

from pi05_ros.errors import ConfigurationError
from pi05_ros.playback.delay import DelayEstimate
from pi05_ros.playback.plan import NS


def test_nothing_is_commanded_before_start_and_before_the_first_chunk():
    world = World()
    world.run(0.2, every_s=0.1)
    assert world.start() is None
    world.run(0.5)
    assert world.player.state == "waiting"
    assert world.player.reason is not None and world.player.reason[0] == "chunk.waiting"
    assert len(world.sent()) == 0


def test_a_clean_motion_is_followed_without_a_clamp():
    world = running(handover="replace")
    np.testing.assert_allclose(world.sent()[-1][:2], wave(world.now_ns)[:2], atol=2e-3)
    assert world.player.counts.clamped == 0
    assert world.player.counts.refused == {} and world.player.counts.late == 0


@pytest.mark.parametrize("handover", ["replace", "blend", "ensemble", "rtc"])
def test_every_handover_follows_agreeing_chunks(handover: str):
    world = running(handover=handover)
    # The mean of chunks sampled at different phases lies inside the arc: h^2 / 8 of the row distance.
    np.testing.assert_allclose(world.sent()[-1], wave(world.now_ns), atol=2e-3)
    assert np.abs(np.diff(world.sent()[-50:, :2], axis=0)).max() < 1.5 * 0.5 * 0.01


def test_the_first_motion_begins_at_the_measured_pose_and_ramps():
    world = World(ramp_s=1.0)
    world.pose[0] += 0.15
    assert world.start() is None
    start = world.pose.copy()
    world.run(1.5, every_s=0.3)
    sent = world.sent()
    assert np.abs(sent[0] - start)[0] < 1e-3
    assert np.abs(np.diff(sent[:, 0])).max() < 0.01
    np.testing.assert_allclose(sent[-1], wave(world.now_ns), atol=2e-3)


def test_a_first_action_too_far_from_the_robot_moves_nothing():
    world = World()
    world.pose[1] += 0.25
    assert world.start() is None
    refused = world.offer(world.chunk())
    assert refused is not None and refused[0] == "start.distance"
    assert "b " in refused[1] and "a " not in refused[1].split("robot:")[1].split("(")[0]
    world.run(0.2, every_s=0.1)
    assert world.player.state == "idle" and len(world.sent()) == 0
    world.pose = wave(world.now_ns)
    assert world.start() is None  # not latched: nothing has moved


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"names": ["b", "a", "gripper"]}, "chunk.names"),
        ({"units": ["deg", "rad", "fraction"]}, "chunk.units"),
        ({"control_modes": ["velocity", "position", "gripper"]}, "chunk.control_modes"),
        ({"actions": np.zeros(7, dtype=np.float32)}, "chunk.shape"),
        ({"horizon": 1}, "chunk.shape"),
        ({"action_dim": 4}, "chunk.shape"),
        ({"step_ns": 0}, "chunk.step_time"),
        ({"profile": "another"}, "chunk.profile"),
        ({"prompt": "an older one"}, "chunk.prompt"),
        ({"actions": np.full(60, np.nan, dtype=np.float32)}, "chunk.nan"),
        ({"actions": np.r_[np.zeros(59), np.inf].astype(np.float32)}, "chunk.inf"),
        ({"age_s": -1.0}, "chunk.future"),
        ({"age_s": 1.2}, "chunk.past"),
        ({"age_s": 0.5}, "chunk.older"),
        ({"age_s": 4.0}, "observation.old"),
        ({"input_stamps_ns": {"front": EPOCH_NS - 10 * NS}}, "observation.old"),
    ],
)
def test_a_chunk_that_must_not_move_the_robot_is_refused_and_counted(changes: dict[str, Any], code: str):
    world = running()
    world.offer(world.chunk())
    world.run(0.1)
    old = world.chunk(**changes)
    world.say()
    refused = world.offer(old)
    assert refused is not None and refused[0] == code
    assert world.player.counts.refused == {code: 1}
    before = world.sent()[-1]
    world.run(0.05)
    assert np.abs(world.sent()[-1] - before)[:2].max() < 0.05  # the old chunk goes on


@pytest.mark.parametrize("when_late", ["hold", "decelerate", "stop"])
def test_the_declared_behaviour_when_no_chunk_follows(when_late: str):
    world = running(when_late=when_late, decelerate_s=0.3)
    world.run(2.0)
    sent = world.sent()
    counts = world.player.counts
    assert counts.late == 1
    assert world.player.reason is not None and world.player.reason[0] == "chunk.late"
    speed = np.abs(np.diff(sent[:, :2], axis=0)).max(axis=1)
    if when_late == "stop":
        assert world.player.state == "stopped"
        assert len(sent) < len(world.commands) - 30  # falls silent after hold_s
    else:
        assert world.player.state == "late" and counts.late_s > 0.5
    assert speed[-10:].max() == 0.0
    if when_late == "decelerate":
        assert np.abs(np.diff(speed)).max() < 0.2 * speed.max()


def test_motion_is_taken_up_again_smoothly_after_it_was_late():
    world = running()
    world.run(2.0)
    assert world.player.state == "late"
    at = len(world.sent())
    world.run(1.5, every_s=0.3)
    assert world.player.state == "running"
    assert np.abs(np.diff(world.sent()[at - 1 :, :2], axis=0)).max() <= 0.02 + 1e-9
    np.testing.assert_allclose(world.sent()[-1], wave(world.now_ns), atol=2e-3)


def test_an_old_observation_carries_no_motion_however_long_its_chunk_is():
    world = running(observation_timeout_s=0.6)
    world.offer(world.chunk())
    world.run(0.58)
    assert world.player.state == "running"
    world.run(0.05)
    assert world.player.state == "late"
    assert world.player.reason is not None and world.player.reason[0] == "observation.old"


def test_a_timeout_shorter_than_the_executed_steps_is_refused():
    with pytest.raises(ConfigurationError, match="10 executed steps"):
        World(observation_timeout_s=0.4)


def test_the_policys_reason_is_the_reason_of_the_lateness():
    world = running()
    world.say(reason=("input.stale", "front (front/image_raw): 0.7 s old"))
    world.run(2.0)
    assert world.player.state == "late"
    assert world.player.reason == ("input.stale", "front (front/image_raw): 0.7 s old")
    world = running()
    world.say()
    world.run(6.0)
    assert world.player.reason is not None and world.player.reason[0] == "policy.silent"


@pytest.mark.parametrize("code", ["input.dead", "input.frozen"])
def test_a_dead_or_frozen_camera_ends_the_motion_at_once(code: str):
    world = running(decelerate_s=0.2)
    world.offer(world.chunk())
    world.say(reason=(code, "front: the picture does not change in a single byte"))
    assert world.player.state == "late"
    world.run(0.3)
    assert world.player.reason is not None and world.player.reason[0] == code and "front" in world.player.reason[1]
    assert np.abs(np.diff(world.sent()[-5:], axis=0)).max() == 0.0


def test_a_policy_that_is_no_longer_active_ends_the_motion():
    world = running()
    world.say(state="inactive")
    assert world.player.reason == ("policy.inactive", "the policy node is inactive")


def test_lost_feedback_stops_and_stays():
    world = running(feedback_timeout_s=0.2)
    world.offer(world.chunk())
    world.feedback_flows = False
    world.run(0.19)
    assert world.player.state == "running"
    world.run(0.05)
    assert world.player.state == "stopped"
    assert world.player.reason is not None and world.player.reason[0] == "feedback.lost"
    assert "joints (joint_states)" in world.player.reason[1]
    world.feedback_flows = True
    world.run(0.2, every_s=0.1)
    assert world.player.state == "stopped"
    refused = world.start()
    assert refused is not None and refused[0] == "start.stopped" and "feedback.lost" in refused[1]


def test_feedback_that_is_not_finite_stops():
    world = running()
    world.player.feedback("joints", {"a": float("nan"), "b": 0.0, "gripper": 0.0}, world.mono_s)
    assert world.player.state == "stopped"
    assert world.player.reason is not None and world.player.reason[0] == "feedback.nan"


def test_start_needs_feedback():
    world = World()
    refused = world.player.start(world.mono_s)
    assert refused is not None and refused[0] == "feedback.missing" and "joint_states" in refused[1]


@pytest.mark.parametrize("jump_s", [-5.0, -0.2, 0.2, 3600.0])
def test_a_clock_jump_stops(jump_s: float):
    world = running()
    world.now_ns += round(jump_s * NS)
    world.tick()
    assert world.player.state == "stopped"
    assert world.player.reason is not None and world.player.reason[0] == "clock.jump"


def test_simulated_time_may_stand_still():
    world = running(steady=False)
    world.offer(world.chunk())
    held = world.sent()[-1]
    for _ in range(50):
        world.now_ns -= PERIOD_NS
        world.tick()
    assert world.player.state == "running"
    np.testing.assert_allclose(world.sent()[-1], held, atol=1e-2)
    world.now_ns -= NS
    world.tick()
    assert world.player.state == "stopped"


def test_another_prompt_flushes_and_only_its_own_chunks_move_the_robot():
    world = running()
    world.offer(world.chunk())
    before = world.chunk()
    world.run(0.05)
    world.say(prompt="stop waving")
    assert world.player.state == "late"
    assert world.player.reason is not None and world.player.reason[0] == "prompt.changed"
    refused = world.offer(before)
    assert refused is not None and refused[0] == "chunk.prompt"
    world.run(0.2)
    assert world.offer(world.chunk(prompt="stop waving")) is None
    assert world.player.prompt == "stop waving" and world.player.state == "ramping"


def test_a_chunk_that_brings_the_news_of_another_prompt_is_not_taken_for_an_old_one():
    world = running()
    world.say()
    world.run(0.1)
    assert world.offer(world.chunk(prompt="stop waving")) is None
    assert world.player.state == "ramping"
    world.say(prompt="stop waving")  # the status says so only now
    assert world.player.state == "ramping"


@pytest.mark.parametrize("state", ["idle", "waiting", "ramping", "running", "late", "stopped"])
def test_stop_holds_within_one_period_from_every_state_until_reset(state: str):
    world = World()
    if state == "stopped":
        world.player.stop("stop.first", "", world.mono_s)
    elif state != "idle":
        assert world.start() is None
        if state != "waiting":
            world.offer(world.chunk())
            world.run({"ramping": 0.4, "running": 0.9, "late": 1.2}[state])
            if state == "running":
                world.offer(world.chunk())
                world.run(0.1)
    assert world.player.state == state
    before = world.sent()[-1] if len(world.sent()) else None
    world.player.stop("stop.requested", "by hand", world.mono_s)
    command = world.tick()
    assert world.player.state == "stopped"
    assert world.player.reason is not None
    assert world.player.reason[0] == ("stop.first" if state == "stopped" else "stop.requested")
    assert command.send == (state in ("ramping", "running", "late"))
    if before is not None and command.send:
        np.testing.assert_array_equal(command.values, before)
    sent = len(world.sent())
    world.run(2.0, every_s=0.2)
    later = world.sent()[sent:]
    assert len(later) == (0 if before is None else len(later)) and (later == before).all()
    assert world.player.state == "stopped"
    world.player.reset()
    assert world.player.state == "idle" and world.player.reason is None
    world.run(0.3, every_s=0.1)
    assert world.player.state == "idle"


def test_a_velocity_is_stopped_by_zero_and_held_by_zero():
    profile = arm().model_dump(mode="json")
    for dim in profile["action"]["dims"][:2]:
        dim |= {"control": "velocity", "unit": "rad/s", "max_velocity": None}
    profile["output"]["controllers"]["arm"]["control"] = "velocity"
    from pi05_ros.profile import parse_profile

    world = World(parse_profile(profile, "velocities"), ramp_s=0.1)
    world.start()
    world.offer(world.chunk(lambda at: wave(at) * 0 + 0.4))
    world.run(0.5)
    assert world.sent()[-1][:2].tolist() == pytest.approx([0.4, 0.4])
    world.player.stop("stop.requested", "by hand", world.mono_s)
    assert world.tick().values[:2].tolist() == [0.0, 0.0]
    world.player.reset()
    world.start()
    world.offer(world.chunk(lambda at: wave(at) * 0 + 0.4))
    world.run(2.0)
    assert world.player.state == "late" and world.sent()[-1][:2].tolist() == [0.0, 0.0]


def test_the_next_chunk_is_asked_for_so_early_that_it_comes_in_time():
    world = World(ramp_s=0.2)
    world.start()
    pending: list[tuple[int, Any]] = []
    for _ in range(600):
        if world.player.request_due(world.now_ns, world.mono_s):
            pending.append((world.now_ns + round(0.35 * NS), world.chunk()))
        while pending and pending[0][0] <= world.now_ns:
            assert world.offer(pending.pop(0)[1]) is None
        world.tick()
    counts = world.player.counts
    assert counts.late == 0 and counts.clamped == 0
    # executed_steps are 0.5 s: not asked for much more often than needed.
    assert 9 <= counts.accepted <= 16


def test_a_request_without_an_answer_is_made_again():
    world = World(request_timeout_s=0.5)
    world.start()
    asked = [
        world.now_ns for _ in range(100) if world.player.request_due(world.now_ns, world.mono_s) or world.tick() is None
    ]
    assert len(asked) == 2


def test_the_trajectory_lies_ahead_rises_and_keeps_every_limit():
    world = running()
    world.offer(world.chunk(lambda at: wave(at) + 0.8))
    times, rows = world.player.trajectory(world.now_ns)
    assert times[0] == world.now_ns + PERIOD_NS and (np.diff(times) > 0).all()
    steps = np.diff(np.vstack([world.sent()[-1], rows])[:, :2], axis=0)
    spans = np.diff(np.r_[world.now_ns, times]) / NS
    assert (np.abs(steps) <= 2.0 * spans[:, None] + 1e-9).all()
    assert rows[:, :2].max() <= 1.0
    world.player.stop("stop.requested", "by hand", world.mono_s)
    times, rows = world.player.trajectory(world.now_ns)
    np.testing.assert_array_equal(rows, [world.sent()[-1]])


def test_the_delay_is_a_percentile_of_a_window_without_the_warm_up():
    delay = DelayEstimate(window=10, percentile=90, warm_up=1)
    delay.add(30.0)
    assert delay.seconds is None
    for value in range(20):
        delay.add(float(value))
    assert delay.seconds == pytest.approx(np.percentile(np.arange(10.0, 20.0), 90))
