"""The chunk player as a process: lifecycle, services, controllers' topics, stop, faults that come over topics."""

from __future__ import annotations

import signal
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from builtin_interfaces.msg import Duration, Time
from player_world import ARM
from ros_helpers import COMMAND, LATCHED, Graph, Process, Recording
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Float64MultiArray
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from pi05_ros.msg import ActionChunk, PlayerStatus, PolicyStatus
from pi05_ros.node.qos import STATUS

NS = 10**9


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def at(seconds: np.ndarray | float) -> np.ndarray:
    """float64 [..., 3]: where the arm shall be at a time of the system clock."""
    seconds = np.asarray(seconds)
    return np.stack([0.3 * np.sin(seconds), 0.3 * np.cos(seconds), (seconds % 2.0 > 1.0) * 1.0], axis=-1)


class Robot:
    """Stands in for robot and policy: publishes joint states, chunks and the policy's status.

    It obeys commands exactly; until the first one it stands where the next chunk will begin.
    """

    def __init__(self, graph: Graph) -> None:
        node = graph.node
        self.pose = at(time.time())
        self.led, self.offset = False, 0.0
        self.joints_flow = self.chunks_flow = True
        self.chunk_changes: dict[str, Any] = {}
        self.prompt, self.reason, self.state = "wave", "", "active"
        self._joints = node.create_publisher(JointState, "/joint_states", 10)
        self._chunks = node.create_publisher(ActionChunk, "/policy/chunk", 1)
        self._status = node.create_publisher(PolicyStatus, "/policy/status", STATUS)
        self.stop = node.create_publisher(Bool, "/player/stop", 1)
        self.arm: Recording[Float64MultiArray] = graph.record(Float64MultiArray, "/arm/commands")
        self.gripper: Recording[JointState] = graph.record(JointState, "/gripper/commands")
        node.create_subscription(Float64MultiArray, "/arm/commands", self._obey, 10)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _obey(self, message: Float64MultiArray) -> None:
        self.led = True
        self.pose[:2] = message.data

    def _run(self) -> None:
        beat = 0
        while not self._ending.wait(0.01):
            if not self.led:
                self.pose = at(time.time()) + self.offset
            if self.joints_flow:
                message = JointState(name=["b", "gripper", "a"])
                message.header.stamp = stamp(time.time())
                message.position = array("d", [self.pose[1], self.pose[2], self.pose[0]])
                self._joints.publish(message)
            if self.chunks_flow and beat % 25 == 0:
                self.send_chunk(**self.chunk_changes)
            if beat % 20 == 0:
                self.send_status()
            beat += 1

    def send_status(self) -> None:
        status = PolicyStatus(state=self.state, prompt=self.prompt, reason=self.reason)
        status.header.stamp = stamp(time.time())
        self._status.publish(status)

    def send_chunk(self, age_s: float = 0.02, **changes: Any) -> None:
        made = time.time() - age_s
        rows = at(made + np.arange(20) * 0.05)
        chunk = ActionChunk(
            step_time=Duration(nanosec=NS // 20),
            names=["a", "b", "gripper"],
            units=["rad", "rad", "fraction"],
            control_modes=["position", "position", "gripper"],
            horizon=20,
            action_dim=3,
            actions=array("f", rows.astype(np.float32).reshape(-1).tolist()),
            executed_steps=10,
            prompt=self.prompt,
            profile="arm",
        )
        chunk.header.stamp = stamp(made)
        for name, value in changes.items():
            setattr(chunk, name, value)
        self._chunks.publish(chunk)

    def __enter__(self) -> Robot:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(5.0)


def stamp(seconds: float) -> Time:
    return Time(sec=int(seconds), nanosec=int(seconds % 1.0 * NS))


def player(tmp_path: Path, *parameters: str, autostart: bool = True, changes: dict | None = None) -> Process:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump({**ARM, **(changes or {})}), encoding="utf-8")
    given = [f"profile:={path}", "dry_run:=false", "ramp_s:=0.3", *parameters]
    arguments = [argument for parameter in given for argument in ("-p", parameter)]
    mode = ["--autostart" if autostart else "--no-autostart"]
    return Process([*COMMAND, "player", *mode, "--ros-args", *arguments])


def statuses(graph: Graph) -> Recording[PlayerStatus]:
    return graph.record(PlayerStatus, "/player/status", LATCHED)


def call(graph: Graph, service: str) -> Trigger.Response:
    return graph.call(Trigger, f"/player/{service}", Trigger.Request())


def begin(graph: Graph, status: Recording[PlayerStatus]) -> None:
    """Start as soon as the feedback has reached the player, and wait for the motion."""
    status.wait_for(lambda s: s.lifecycle == "active" and s.feedback_age >= 0.0, 20.0)
    answer = call(graph, "start")
    assert answer.success, answer.message
    status.wait_for(lambda s: s.state == "running")


def steps(recording: Recording[Float64MultiArray], start: int = 0) -> np.ndarray:
    return np.abs(np.diff(np.array([message.data for message in recording[start:]]), axis=0))


def test_it_follows_the_chunks_on_the_controllers_topics(graph: Graph, tmp_path: Path):
    with Robot(graph) as robot, player(tmp_path):
        status = statuses(graph)
        begin(graph, status)
        first = len(robot.arm)
        time.sleep(1.0)
        expected, got = at(time.time()), np.array(robot.arm[-1].data)
        np.testing.assert_allclose(got, expected[:2], atol=0.02)
        assert robot.gripper[-1].name == ["gripper"]
        assert {message.position[0] for message in robot.gripper[first:]} <= {0.0, 1.0}  # never in between
        assert 90 <= len(robot.arm) - first <= 110
        assert steps(robot.arm).max() <= 0.02 * 2 + 1e-6  # 2 rad/s, one period made up for at most
        last = status.wait_for(lambda s: s.state == "running", start=len(status) - 1)
        assert last.clamped == 0 and last.late == 0 and not last.refused_codes and not last.dry_run


def test_a_dry_run_opens_no_controller(graph: Graph, tmp_path: Path):
    with Robot(graph) as robot, player(tmp_path, "dry_run:=true"):
        status, shown = statuses(graph), graph.record(JointState, "/player/command")
        preview = graph.record(JointTrajectory, "/player/preview")
        begin(graph, status)
        shown.wait_for_count(50)
        preview.wait_for_count(1)
        assert shown[-1].name == ["a", "b", "gripper"]
        assert not robot.arm and not robot.gripper
        assert not graph.node.get_publishers_info_by_topic("/arm/commands")
        assert status[-1].dry_run


def test_trajectories_rise_lie_ahead_and_come_once_per_chunk(graph: Graph, tmp_path: Path):
    output = {
        **ARM["output"],
        "controllers": {
            "arm": {
                "type": "joint_trajectory",
                "topic": "arm/moves",
                "dims": ["b", "a"],
                "joints": ["jb", "ja"],
            },
            "gripper": ARM["output"]["controllers"]["gripper"],
        },
    }
    with Robot(graph) as robot, player(tmp_path, changes={"output": output}):
        status, sent = statuses(graph), graph.record(JointTrajectory, "/arm/moves")
        status.wait_for(lambda s: s.lifecycle == "active" and s.feedback_age >= 0.0, 20.0)
        assert call(graph, "start").success
        sent.wait_for_count(4)
        robot.chunks_flow = False
        for message in sent:
            assert message.joint_names == ["jb", "ja"]
            times = np.array([p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in message.points])
            assert times[0] > 0.0 and (np.diff(times) > 0.0).all()
            rows = np.array([p.positions for p in message.points])
            assert (np.abs(np.diff(rows, axis=0)) <= 2.0 * np.diff(times)[:, None] + 1e-6).all()
        accepted = status.wait_for(lambda s: s.state == "late").accepted
        assert len(sent) == accepted
        assert call(graph, "stop").success
        sent.wait_for_count(accepted + 1)
        assert len(sent[-1].points) == 1  # hold


@pytest.mark.parametrize("way", ["topic", "service"])
def test_stop_holds_at_once_and_until_reset(graph: Graph, tmp_path: Path, way: str):
    with Robot(graph) as robot, player(tmp_path):
        status = statuses(graph)
        begin(graph, status)
        if way == "topic":
            robot.stop.publish(Bool(data=True))
        else:
            assert call(graph, "stop").success
        stopped = status.wait_for(lambda s: s.state == "stopped")
        assert stopped.reason.startswith("stop.requested")
        time.sleep(0.1)
        held = list(robot.arm[-1].data)
        time.sleep(0.3)
        assert list(robot.arm[-1].data) == held
        time.sleep(1.2)
        count = len(robot.arm)
        time.sleep(0.3)
        assert len(robot.arm) == count  # silent after hold_s
        assert not call(graph, "start").success
        if way == "topic":
            assert not call(graph, "reset").success
            robot.stop.publish(Bool(data=False))
            time.sleep(0.2)
        assert call(graph, "reset").success
        robot.led = False
        time.sleep(0.2)
        begin(graph, status)


def test_start_is_refused_with_a_reason(graph: Graph, tmp_path: Path):
    with Robot(graph) as robot, player(tmp_path, autostart=False):
        status = statuses(graph)
        status.wait_for(lambda s: s.lifecycle == "unconfigured", 20.0)
        assert "configure and activate first" in call(graph, "start").message
        assert graph.change_state("configure", "/player") and graph.change_state("activate", "/player")
        robot.joints_flow = False
        time.sleep(0.5)
        assert "feedback." in call(graph, "start").message
        robot.joints_flow = True
        robot.offset = 0.5
        time.sleep(0.2)
        assert call(graph, "start").success
        refused = status.wait_for(lambda s: s.reason.startswith("start.distance"))
        assert refused.state == "idle" and not robot.arm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output": None}, "config.no_output"),
        ({"action": {"dims": [{**dim, "max_velocity": None} for dim in ARM["action"]["dims"]]}}, "config.unlimited"),
    ],
)
def test_a_profile_that_cannot_move_a_robot_safely_is_refused(
    graph: Graph, tmp_path: Path, changes: dict, message: str
):
    with player(tmp_path, changes=changes, autostart=False):
        status = statuses(graph)
        assert not graph.change_state("configure", "/player")
        assert message in status.wait_for(lambda s: bool(s.reason)).reason


def test_an_unknown_parameter_is_refused_at_start(tmp_path: Path):
    with player(tmp_path, "hand_over:=blend") as process:
        assert process.wait(20.0) == 2
        assert "did you mean handover?" in process.text


@pytest.mark.parametrize("end", ["deactivate", "SIGINT"])
def test_an_ending_player_holds_the_robot(graph: Graph, tmp_path: Path, end: str):
    with Robot(graph) as robot, player(tmp_path) as process:
        status = statuses(graph)
        begin(graph, status)
        if end == "deactivate":
            assert graph.change_state("deactivate", "/player")
        else:
            process.signal(signal.SIGINT)
            assert process.wait(5.0) == 0, process.text
        time.sleep(0.2)
        count = len(robot.arm)
        assert list(robot.arm[-1].data) == list(robot.arm[-2].data)
        time.sleep(0.3)
        assert len(robot.arm) == count
        assert "Traceback" not in process.text


FAULTS = {
    "chunk late": ("late", "chunk.late"),
    "camera lost": ("late", "input.dead"),
    "camera frozen": ("late", "input.frozen"),
    "policy inactive": ("late", "policy.inactive"),
    "joints lost": ("stopped", "feedback.lost"),
    "NaN in joints": ("stopped", "feedback.nan"),
    "stop heartbeat lost": ("stopped", "stop.silent"),
}
REFUSED = {"NaN in chunk": "chunk.nan", "older prompt": "chunk.prompt", "old observation": "observation.old"}


@pytest.mark.parametrize("fault", [*FAULTS, *REFUSED])
def test_a_fault_has_its_behaviour_and_its_reason(graph: Graph, tmp_path: Path, fault: str):
    heartbeat = ["stop_heartbeat_s:=0.3"] if fault == "stop heartbeat lost" else []
    with Robot(graph) as robot, player(tmp_path, *heartbeat):
        status = statuses(graph)
        beating = threading.Event()

        def beat() -> None:
            while heartbeat and not beating.wait(0.05):
                robot.stop.publish(Bool(data=False))

        threading.Thread(target=beat, daemon=True).start()
        time.sleep(0.2)
        begin(graph, status)
        before = len(robot.arm)
        if fault == "chunk late":
            robot.chunks_flow = False
        elif fault == "camera lost":
            robot.reason = "input.dead: front (front/image_raw): no image for 2.1 s"
        elif fault == "camera frozen":
            robot.reason = "input.frozen: front (front/image_raw): the picture does not change in a single byte"
        elif fault == "policy inactive":
            robot.state = "inactive"
        elif fault == "joints lost":
            robot.joints_flow = False
        elif fault == "NaN in joints":
            robot.pose[2] = np.nan
            assert robot.led
        elif fault == "stop heartbeat lost":
            beating.set()
        elif fault == "NaN in chunk":
            robot.chunk_changes = {"actions": array("f", [0.0] * 59 + [np.nan])}
        elif fault == "older prompt":
            robot.chunk_changes = {"prompt": "an older one", "age_s": 0.4}
        elif fault == "old observation":
            robot.chunk_changes = {"input_names": ["front"], "input_stamps": [stamp(time.time() - 10.0)]}
        if fault in FAULTS:
            state, code = FAULTS[fault]
            status.wait_for(lambda s: s.state == state and s.reason.startswith(code))
            if state == "late" and fault != "chunk late":
                robot.chunks_flow = False
        else:
            code = REFUSED[fault]
            status.wait_for(lambda s: code in s.refused_codes)
            status.wait_for(lambda s: s.state == "late")
        beating.set()
        time.sleep(0.5)
        assert steps(robot.arm, before).max() <= 0.04 + 1e-6
        assert steps(robot.arm, len(robot.arm) - 5).max(initial=0.0) == 0.0  # at rest


def test_a_killed_policy_is_named_and_a_restarted_player_moves_nothing(graph: Graph, tmp_path: Path):
    with Robot(graph) as robot:
        with player(tmp_path, "policy_timeout_s:=1.5") as process:
            status = statuses(graph)
            begin(graph, status)
            robot.chunks_flow = False
            robot.send_status = lambda: None  # type: ignore[method-assign]
            status.wait_for(lambda s: s.state == "late" and s.reason.startswith("policy.silent"))
            process.signal(signal.SIGKILL)
            process.wait(5.0)
        robot.chunks_flow = True
        count = len(robot.arm)
        again = len(status)
        with player(tmp_path):
            status.wait_for(lambda s: s.lifecycle == "active" and s.state == "idle", 20.0, start=again)
            time.sleep(0.7)
            assert len(robot.arm) == count
