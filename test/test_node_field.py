"""Mistakes met on real robots, through the topics of the node as it ships, with the built-in checkpoint or a stub."""

from __future__ import annotations

import array
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import rclpy
import ros_helpers
import yaml
from diagnostic_msgs.msg import DiagnosticArray
from ros_helpers import COMMAND, RELIABLE, Graph, Process, stub_node
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String

from pi05_ros.msg import ActionChunk
from pi05_ros.profile import load_profile

CAMERAS = {"base": Image, "left_wrist": Image, "right_wrist": CompressedImage}


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


class StillRobot:
    """Profile demo's robot, which never moves and whose cameras see the same for ever."""

    def __init__(self, graph: Graph) -> None:
        create = graph.node.create_publisher
        topics = {"base": "base/image_raw", "left_wrist": "left_wrist/image_raw"}
        topics["right_wrist"] = "right_wrist/image_raw/compressed"
        self._cameras = {name: create(kind, topics[name], 10) for name, kind in CAMERAS.items()}
        self._joints = create(JointState, "joint_states", 10)
        pixels = np.full((48, 64, 3), 90, np.uint8)
        self.raw = Image(height=48, width=64, encoding="rgb8", step=192, data=array.array("B", pixels.tobytes()))
        self.jpeg = CompressedImage(format="jpeg", data=array.array("B", ros_helpers.jpeg(pixels)))
        self.joints = {dim.joint_name: 0.1 for dim in load_profile("demo").state.dims}
        self.late_s = dict.fromkeys(CAMERAS, 0.0)
        self.sent = 0

    def publish(self) -> None:
        now_ns = time.time_ns()
        for name, kind in CAMERAS.items():
            message = self.raw if kind is Image else self.jpeg
            stamp_ns = now_ns - round(self.late_s[name] * 1e9)
            message.header.stamp = rclpy.time.Time(nanoseconds=stamp_ns).to_msg()
            self._cameras[name].publish(message)
        joints = JointState(name=list(self.joints), position=list(self.joints.values()))
        joints.header.stamp = rclpy.time.Time(nanoseconds=now_ns).to_msg()
        self._joints.publish(joints)
        self.sent += 1


def bring_up(graph: Graph) -> None:
    assert graph.change_state("configure", timeout=60.0)
    assert graph.change_state("activate")


def builtin_node(profile: Path | str = "demo") -> Process:
    options = ["--no-autostart", "--checkpoint", "builtin", "--profile", str(profile)]
    return Process([*COMMAND, "node", *options, "--ros-args", "-p", "trigger:=continuous", "-p", "num_steps:=1"])


def test_other_camera_names_fail_the_configure_naming_both_lists(graph: Graph, tmp_path: Path) -> None:
    content = load_profile("demo").model_dump(mode="json", exclude_none=True)
    cameras = content["cameras"]
    content["cameras"] = {
        "front": {**cameras["base"], "slot": "front"},
        "wrist": {**cameras["left_wrist"], "slot": "wrist"},
    }
    content["anchor"] = "front"
    path = tmp_path / "two_cameras.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    with builtin_node(path):
        status = graph.status()
        assert not graph.change_state("configure", timeout=60.0)
        said = status.wait_for(lambda s: s.reason.startswith("contract.cameras"))
        assert said.state == "unconfigured"
        for name in ("front", "wrist", "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"):
            assert name in said.reason


def test_a_flood_of_empty_pictures_ages_the_stream_and_spares_the_log(graph: Graph) -> None:
    with stub_node("trigger:=continuous") as node:
        chunks, status = graph.chunks(), graph.status()
        robot = StillRobot(graph)
        bring_up(graph)
        with ros_helpers.repeating(robot.publish, 0.02):
            chunks.wait_for_count(3)
            good, robot.jpeg.data = robot.jpeg.data, array.array("B")
            said = status.wait_for(lambda s: {x.name: x.state for x in s.streams}.get("right_wrist") == "stale")
            assert "observation.image_corrupt" in said.reason and "right_wrist" in said.reason
            count, began = len(chunks), time.monotonic()
            status.wait_for(lambda s: {x.name: x.state for x in s.streams}.get("right_wrist") == "dead")
            assert len(chunks) == count
            lines = [line for line in node.output if "image_corrupt" in line]
            assert 1 <= len(lines) <= 2 + (time.monotonic() - began) / 2.0, "the log is flooded"
            robot.jpeg.data = good
            chunks.wait_for_count(count + 3)


def test_a_robot_that_stands_still_gets_a_chunk_of_every_picture(graph: Graph) -> None:
    # No filter on how much an observation differs from the last one: it starves robots that move little.
    with stub_node("trigger:=continuous"):
        chunks = graph.chunks()
        robot = StillRobot(graph)
        bring_up(graph)
        with ros_helpers.repeating(robot.publish, 0.1):
            chunks.wait_for_count(5)
            count, sent = len(chunks), robot.sent
            time.sleep(3.0)
        time.sleep(0.5)
        assert robot.sent - sent >= 20
        assert len(chunks) - count >= 0.8 * (robot.sent - sent)


def test_drops_of_a_late_camera_stand_in_status_and_diagnostics(graph: Graph) -> None:
    with stub_node("trigger:=continuous"):
        status = graph.status()
        diagnostics = graph.record(DiagnosticArray, "/diagnostics")
        robot = StillRobot(graph)
        robot.late_s["left_wrist"] = 0.2  # four times the slop; pictures come every 0.3 s
        bring_up(graph)
        with ros_helpers.repeating(robot.publish, 0.3):
            said = status.wait_for(lambda s: any(x.name == "left_wrist" and x.dropped > 3 for x in s.streams), 20.0)
            assert said.reason.startswith("input.unsynchronised") and "left_wrist" in said.reason
            assert said.chunks == 0

            def counted(message: DiagnosticArray) -> bool:
                entries = {entry.name: {v.key: v.value for v in entry.values} for entry in message.status}
                return int(entries.get("policy: input left_wrist", {}).get("dropped", 0)) > 3

            diagnostics.wait_for(counted)


def test_a_long_prompt_and_a_far_state_are_flagged_on_the_chunk(graph: Graph) -> None:
    with builtin_node():
        chunks = graph.chunks()
        prompt = graph.node.create_publisher(String, "/policy/prompt", RELIABLE)
        robot = StillRobot(graph)
        bring_up(graph)
        with ros_helpers.repeating(robot.publish, 0.1):
            assert list(chunks.wait_for(lambda chunk: True, 60.0).guard_flags) == []
            robot.joints["joint_3"] = 3.0  # training ended at 1.6
            chunks.wait_for(lambda chunk: list(chunk.guard_flags) == ["state.beyond_statistics:joint_3"])
            robot.joints["joint_3"] = 0.1
            long = "pick up the block " * 280
            prompt.publish(String(data=long))

            def shortened(chunk: ActionChunk) -> bool:
                return list(chunk.guard_flags) == ["prompt.shortened"] and chunk.prompt.strip() == long.strip()

            chunks.wait_for(shortened)
