"""The node in a graph: namespaces, remapping, several robots, simulated time, faults of the inputs."""

from __future__ import annotations

import array
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import rclpy
import ros_helpers
from rclpy.parameter import Parameter
from ros_helpers import COMMAND, Graph, Process, stand_in_robot, stub_node
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState
from stub_policy import load_stub

from pi05_ros.node.policy_node import PolicyNode
from pi05_ros.node.process import SpinningNodes
from pi05_ros.profile import load_profile


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def bring_up(graph: Graph, node: str = "/policy") -> None:
    assert graph.change_state("configure", node)
    assert graph.change_state("activate", node)


class Robot:
    """A robot of profile demo whose every message the test decides on."""

    def __init__(self, graph: Graph) -> None:
        self._node = graph.node
        self.images = {
            name: graph.node.create_publisher(Image, f"{name}/image_raw", 10) for name in ("base", "left_wrist")
        }
        self.jpeg = graph.node.create_publisher(CompressedImage, "right_wrist/image_raw/compressed", 10)
        self.joints = graph.node.create_publisher(JointState, "joint_states", 10)
        self.names = [dim.joint_name for dim in load_profile("demo").state.dims]
        pixels = np.full((8, 8, 3), 127, np.uint8)
        self.image = Image(height=8, width=8, encoding="rgb8", step=24, data=array.array("B", pixels.tobytes()))
        self.compressed = CompressedImage(format="jpeg", data=array.array("B", ros_helpers.jpeg(pixels)))

    def publish(self, stamp_ns: int, without: str = "", joints: dict[str, float] | None = None) -> None:
        """One message on every topic but ``without``; ``joints`` replaces single positions."""
        stamp = rclpy.time.Time(nanoseconds=stamp_ns).to_msg()
        self.image.header.stamp = self.compressed.header.stamp = stamp
        for name, publisher in self.images.items():
            if name != without:
                publisher.publish(self.image)
        self.jpeg.publish(self.compressed)
        positions = [(joints or {}).get(name, 0.0) for name in self.names]
        message = JointState(name=self.names, position=positions)
        message.header.stamp = stamp
        self.joints.publish(message)


def test_two_robots_in_two_namespaces(graph: Graph) -> None:
    with ExitStack() as stack:
        for namespace in ("/left", "/right"):
            stack.enter_context(stub_node("trigger_rate_hz:=5.0", f"prompt:='{namespace}'", namespace=namespace))
            stack.enter_context(stand_in_robot("--ros-args", "-r", f"__ns:={namespace}"))
        for namespace in ("/left", "/right"):
            bring_up(graph, f"{namespace}/policy")
        for namespace in ("/left", "/right"):
            chunks = graph.chunks(f"{namespace}/policy")
            chunks.wait_for_count(3)
            assert {chunk.prompt for chunk in chunks} == {namespace}
            streams = graph.status(f"{namespace}/policy").wait_for(lambda s: len(s.streams) == 4).streams
            assert all(stream.topic.startswith(f"{namespace}/") for stream in streams)


def test_two_robots_in_one_process() -> None:
    os.environ.update(ros_helpers.environment())
    context = rclpy.Context()
    rclpy.init(context=context)
    given = [Parameter("checkpoint", value="stub"), Parameter("profile", value="demo")]
    nodes = [
        PolicyNode(load_stub, namespace=namespace, parameter_overrides=given, context=context)
        for namespace in ("/left", "/right")
    ]
    spinning = SpinningNodes(nodes, context)
    try:
        with Graph() as graph, stand_in_robot("--ros-args", "-r", "__ns:=/left"):
            bring_up(graph, "/left/policy")
            bring_up(graph, "/right/policy")
            graph.chunks("/left/policy").wait_for_count(2)
            graph.status("/right/policy").wait_for(
                lambda s: s.state == "active" and s.reason.startswith("input.") and "/right/base" in s.reason
            )
            assert graph.change_state("deactivate", "/right/policy")
            assert graph.state("/left/policy") == "active"
    finally:
        spinning.close()
        rclpy.shutdown(context=context)
    assert all(node.state == "finalized" for node in nodes)


def test_remapping_and_another_name(graph: Graph) -> None:
    # The two cameras change places, which only works if a topic is remapped exactly once.
    swap = ["base/image_raw:=left_wrist/image_raw", "left_wrist/image_raw:=base/image_raw"]
    rules = [argument for rule in (*swap, "__node:=brain", "~/chunk:=/answers") for argument in ("-r", rule)]
    given = ["-p", "checkpoint:=stub", "-p", "profile:=demo"]
    with Process([*ros_helpers.STUB, "--ros-args", *given, *rules]), stand_in_robot():
        answers = graph.record(ros_helpers.ActionChunk, "/answers")
        bring_up(graph, "/brain")
        answers.wait_for_count(1)
        status = graph.status("/brain").wait_for(lambda s: len(s.streams) == 4)
        topics = {stream.name: stream.topic for stream in status.streams}
        assert topics["base"] == "/left_wrist/image_raw"
        assert topics["left_wrist"] == "/base/image_raw"
        names = {name for name, namespace in graph.node.get_node_names_and_namespaces() if namespace == "/"}
        assert names - {"probe", "robot"} == {"brain", "brain_inputs"}


def test_simulated_time(graph: Graph) -> None:
    with stub_node("use_sim_time:=true", "trigger:=continuous"):
        chunks, status = graph.chunks(), graph.status()
        clock = graph.node.create_publisher(Clock, "/clock", 10)
        robot = Robot(graph)
        bring_up(graph)

        def play(begin_s: float, steps: int) -> None:
            for step in range(steps):
                now_ns = round((begin_s + step / 50) * 1e9)
                clock.publish(Clock(clock=rclpy.time.Time(nanoseconds=now_ns).to_msg()))
                time.sleep(0.01)
                robot.publish(now_ns)
                time.sleep(0.01)

        # Without a clock the time is zero; the status goes on all the same.
        count = len(status)
        status.wait_for_count(count + 2, timeout=5.0)
        play(1000.0, 100)
        chunks.wait_for(lambda chunk: 1000 <= chunk.header.stamp.sec < 1003)
        assert max(max(chunk.input_ages) for chunk in chunks) < 0.5
        before = len(chunks)
        time.sleep(0.3)
        assert len(chunks) - before <= 1, "answers go on while the clock stands still"
        # The simulation starts again.
        play(100.0, 100)
        chunks.wait_for(lambda chunk: 100 <= chunk.header.stamp.sec < 103)


def test_a_state_that_is_not_finite_is_refused_by_name(graph: Graph) -> None:
    with stub_node("trigger:=continuous"):
        chunks, status = graph.chunks(), graph.status()
        robot = Robot(graph)
        bring_up(graph)
        with ros_helpers.repeating(lambda: robot.publish(time.time_ns()), 0.05):
            chunks.wait_for_count(2)
        time.sleep(0.6)  # what was published before is too old by now
        for value, code in ((math.nan, "observation.nan"), (math.inf, "observation.inf")):
            count, heard = len(chunks), len(status)
            with ros_helpers.repeating(lambda v=value: robot.publish(time.time_ns(), joints={"joint_3": v}), 0.05):
                said = status.wait_for(lambda s, c=code: c in s.reason, start=heard)  # type: ignore[misc]
                assert "joint_3" in said.reason
            assert len(chunks) == count
        with ros_helpers.repeating(lambda: robot.publish(time.time_ns()), 0.05):
            chunks.wait_for_count(len(chunks) + 2)
            status.wait_for(lambda s: s.state == "active" and s.reason == "", start=len(status))


def test_a_camera_that_stops_stops_the_chunks_and_is_named(graph: Graph) -> None:
    with stub_node("trigger:=continuous"):
        chunks, status = graph.chunks(), graph.status()
        robot = Robot(graph)
        bring_up(graph)
        with ros_helpers.repeating(lambda: robot.publish(time.time_ns()), 0.05):
            chunks.wait_for_count(2)
        with ros_helpers.repeating(lambda: robot.publish(time.time_ns(), without="left_wrist"), 0.05):
            said = status.wait_for(lambda s: s.state == "active" and "left_wrist" in s.reason)
            assert said.reason.startswith("input.")
            status.wait_for(lambda s: {x.name: x.state for x in s.streams}.get("left_wrist") == "dead")
            count = len(chunks)
            time.sleep(0.5)
            assert len(chunks) == count
        with ros_helpers.repeating(lambda: robot.publish(time.time_ns()), 0.05):
            chunks.wait_for_count(count + 2)
            status.wait_for(lambda s: s.state == "active" and s.reason == "", start=len(status))


def test_the_command_starts_by_itself_and_takes_ros_arguments(graph: Graph) -> None:
    options = ["--namespace", "arm", "--prompt", "yes", "--ros-args", "-p", "trigger_rate_hz:=5.0"]
    with (
        Process([*COMMAND, "node", *options]) as node,
        stand_in_robot("--ros-args", "-r", "__ns:=/arm"),
    ):
        chunks = graph.chunks("/arm/policy")
        chunks.wait_for_count(3, timeout=60.0)
        assert {chunk.prompt for chunk in chunks} == {"yes"}
        assert {chunk.profile for chunk in chunks} == {"demo"}
        node.wait_for_line("the built-in checkpoint is random")
        assert graph.get_parameter("trigger_rate_hz", "/arm/policy") == 5.0


def test_autostart_that_fails_says_so_and_leaves_the_node_up(graph: Graph) -> None:
    with Process([*COMMAND, "node", "--checkpoint", "/nowhere", "--profile", "demo"]) as node:
        node.wait_for_line("autostart ends at configure", timeout=60.0)
        said = graph.status().wait_for(lambda s: s.reason.startswith("checkpoint."))
        assert "/nowhere" in said.reason
        assert said.state == "unconfigured"
        assert graph.set_parameter("checkpoint", "builtin") == ""
        assert graph.change_state("configure", timeout=60.0)
