"""Random faults over real topics, one after the other in one player: no command breaks a limit, every stop holds."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ros_helpers import Graph, Recording
from std_msgs.msg import Bool
from test_player_node import Robot, call, player, statuses

from pi05_ros.msg import PlayerStatus

Schedule = list[tuple[str, float]]
FAULTS = ["chunks stop", "joints stop", "chunk of NaN", "wild chunk", "older prompt", "prompt", "camera frozen",
          "policy inactive", "NaN in joints", "stop topic", "stop service", "nothing"]  # fmt: skip
SCHEDULES = st.lists(st.tuples(st.sampled_from(FAULTS), st.floats(0.0, 0.4)), min_size=1, max_size=4)
LATCHED = {"joints stop": "feedback.lost", "NaN in joints": "feedback.nan", "stop topic": "stop.requested",
           "stop service": "stop.requested"}  # fmt: skip


class Stage:
    """Robot and player that survive every schedule."""

    def __init__(self, graph: Graph, robot: Robot) -> None:
        self.graph, self.robot = graph, robot
        self.status: Recording[PlayerStatus] = statuses(graph)
        self.status.wait_for(lambda s: s.lifecycle == "active" and s.feedback_age >= 0.0, 30.0)

    def heal(self) -> None:
        robot = self.robot
        robot.chunks_flow = robot.joints_flow = True
        robot.chunk_changes, robot.reason, robot.state, robot.prompt = {}, "", "active", "wave"
        robot.stop.publish(Bool(data=False))
        call(self.graph, "stop")
        for _ in range(50):
            if call(self.graph, "reset").success:
                break
            time.sleep(0.05)
        robot.led = False  # only now: until the reset, hold commands came
        robot.send_status()
        healed = len(self.status)
        time.sleep(0.1)
        self.status.wait_for(lambda s: s.state == "idle" and 0.0 <= s.feedback_age < 0.1, start=healed)

    def happen(self, fault: str) -> None:
        robot = self.robot
        if fault == "chunks stop":
            robot.chunks_flow = False
        elif fault == "joints stop":
            robot.joints_flow = False
        elif fault == "chunk of NaN":
            robot.send_chunk(actions=array("f", [np.nan] * 60))
        elif fault == "wild chunk":
            robot.send_chunk(actions=array("f", np.random.default_rng(0).uniform(-9, 9, 60).tolist()))
        elif fault == "older prompt":
            robot.send_chunk(prompt="an older one", age_s=0.5)
        elif fault == "prompt":
            robot.prompt = "stop waving"
            robot.send_status()
        elif fault == "camera frozen":
            robot.reason = "input.frozen: front (front/image_raw): the picture does not change in a single byte"
        elif fault == "policy inactive":
            robot.state = "inactive"
        elif fault == "NaN in joints":
            robot.pose[2] = np.nan
        elif fault == "stop topic":
            robot.stop.publish(Bool(data=True))
        elif fault == "stop service":
            call(self.graph, "stop")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder: Path = tmp_path_factory.mktemp("player")
    with Graph() as graph, Robot(graph) as robot, player(folder, "ramp_s:=0.2", "feedback_timeout_s:=0.2"):
        yield Stage(graph, robot)


def play(stage: Stage, schedule: Schedule) -> None:
    stage.heal()
    robot = stage.robot
    first = len(robot.arm)
    started = call(stage.graph, "start")
    assert started.success, started.message
    begun = len(stage.status)
    expected: list[str] = []
    for fault, pause in schedule:
        time.sleep(pause)
        stage.happen(fault)
        if fault in LATCHED and robot.led:  # nothing can be lost before it has been used
            expected.append(LATCHED[fault])
    time.sleep(0.35)
    commands = np.array([message.data for message in robot.arm[first:]]).reshape(-1, 2)
    assert np.isfinite(commands).all()
    assert np.abs(commands).max(initial=0.0) <= 1.0 + 1e-9
    assert np.abs(np.diff(commands, axis=0)).max(initial=0.0) <= 0.04 + 1e-9
    if expected:
        stopped = stage.status.wait_for(lambda s: s.state == "stopped", start=begun)
        assert stopped.reason.partition(":")[0] in LATCHED.values(), stopped.reason
        settled = len(robot.arm)
        time.sleep(0.15)
        held = np.array([message.data for message in robot.arm[max(settled - 1, first) :]]).reshape(-1, 2)
        assert (held == held[:1]).all()


COMMON = {
    "deadline": None,
    "phases": [Phase.generate],  # a failure is in time as well, and shrinking would not find it again
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=10, **COMMON)
@given(schedule=SCHEDULES)
def test_random_faults_over_topics(stage: Stage, schedule: Schedule):
    play(stage, schedule)


@pytest.mark.soak
@settings(max_examples=1000, **COMMON)
@given(schedule=SCHEDULES)
def test_a_thousand_random_faults_over_topics(stage: Stage, schedule: Schedule):
    play(stage, schedule)
