"""Topics to observations, through real topics: a robot's publishers on one node, Inputs on another."""

from __future__ import annotations

import array
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image as PillowImage
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from ros_helpers import Graph
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import ConfigurationError, ObservationError
from pi05_ros.node.inputs import Inputs
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile, parse_profile
from pi05_ros.synchronizer import StreamReport, SyncSettings

RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
BEST_EFFORT = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
JOINTS = ("a", "b", "c")
TIMEOUT_S = 5.0


def profile(**changes: Any) -> Profile:
    content: dict[str, Any] = {
        "name": "test",
        "cameras": {
            "front": {"slot": "base", "topic": "front/image"},
            "wrist": {"slot": "wrist", "topic": "wrist/image", "type": "compressed"},
        },
        "anchor": "front",
        "state": {
            "sources": {"joints": {"topic": "joint_states"}},
            "dims": [{"name": f"joint_{name}", "joint": name, "unit": "rad"} for name in JOINTS],
        },
        "action": {"dims": [{"name": "joint_a", "unit": "rad", "control": "position"}]},
    }
    return parse_profile({**content, **changes}, "test")


def raw(colour: Sequence[int], stamp: Any, encoding: str = "rgb8", size: tuple[int, int] = (4, 6)) -> Image:
    pixels = np.empty((*size, len(colour)), np.uint8)
    pixels[:] = colour
    message = Image(height=size[0], width=size[1], encoding=encoding, step=size[1] * len(colour))
    message.data = array.array("B", pixels.tobytes())
    message.header.stamp = stamp
    return message


def compressed(colour: Sequence[int], stamp: Any, kind: str = "png") -> CompressedImage:
    buffer = io.BytesIO()
    PillowImage.new("RGB", (6, 4), tuple(colour)).save(buffer, kind)
    message = CompressedImage(format=kind, data=array.array("B", buffer.getvalue()))
    message.header.stamp = stamp
    return message


def joints(values: Mapping[str, float], stamp: Any, **arrays: Sequence[float]) -> JointState:
    message = JointState(name=list(values), position=array.array("d", values.values()))
    for name, given in arrays.items():
        setattr(message, name, array.array("d", given))
    message.header.stamp = stamp
    return message


class Robot:
    """Publishers by topic, and the Inputs under test on a node of its own."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.publishers: dict[str, Any] = {}
        self.open: list[Inputs] = []
        self.node = None
        import rclpy

        self.node = rclpy.create_node("inputs", namespace="robot_1", context=graph.context)
        self._executor = SingleThreadedExecutor(context=graph.context)
        self._executor.add_node(self.node)
        self._ending = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self._ending:
            self._executor.spin_once(timeout_sec=0.05)

    def inputs(
        self, wanted: Profile, settings: SyncSettings | None = None, qos: Mapping[str, str] | None = None
    ) -> Inputs:
        inputs = Inputs(self.node, wanted, settings or SyncSettings(), qos or {}, self.node.default_callback_group)
        self.open.append(inputs)
        return inputs

    def advertise(self, kind: type, topic: str, qos: QoSProfile = RELIABLE, matched: bool = True) -> Any:
        publisher = self.graph.node.create_publisher(kind, f"/robot_1/{topic}", qos)
        self.publishers[topic] = publisher
        deadline = time.monotonic() + TIMEOUT_S
        while matched and publisher.get_subscription_count() == 0:
            assert time.monotonic() < deadline, f"nobody subscribed to {topic}"
            time.sleep(0.01)
        return publisher

    def send(self, **messages: Any) -> None:
        """Publish by topic; ``__`` stands for the slash."""
        for name, message in messages.items():
            topic = name.replace("__", "/")
            publisher = self.publishers.get(topic) or self.advertise(type(message), topic)
            publisher.publish(message)

    def now_ns(self) -> int:
        return self.node.get_clock().now().nanoseconds

    def stamp(self) -> Any:
        return self.node.get_clock().now().to_msg()

    def observation(self, inputs: Inputs) -> Observation:
        """The next observation; AssertionError with the reason when none comes."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            found = inputs.take(self.now_ns())
            if found is not None:
                return found
            inputs.wait(0.1)
        raise AssertionError(f"no observation: {inputs.reason(self.now_ns())}")

    def until(self, inputs: Inputs, holds: Callable[[], Any]) -> Any:
        """What ``holds`` gives once that is true; nothing may become an observation meanwhile."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := holds()):
            assert inputs.take(self.now_ns()) is None
            assert time.monotonic() < deadline, f"{inputs.reason(self.now_ns())}, {inputs.reports(self.now_ns())}"
            time.sleep(0.02)
        return found

    def reason(self, inputs: Inputs, code: str) -> str:
        """The sentence of the reason once it has this code."""

        def found() -> str | None:
            reason = inputs.reason(self.now_ns())
            return reason[1] if reason is not None and reason[0] == code else None

        return str(self.until(inputs, found))

    def report(self, inputs: Inputs, name: str) -> StreamReport:
        return next(report for report in inputs.reports(self.now_ns()) if report.name == name)

    def close(self) -> None:
        for inputs in self.open:
            inputs.close()
        for publisher in self.publishers.values():
            self.graph.node.destroy_publisher(publisher)
        self._ending = True
        self._thread.join(TIMEOUT_S)
        self._executor.shutdown()
        self.node.destroy_node()


@pytest.fixture(scope="module")
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


@pytest.fixture
def robot(graph: Graph) -> Iterator[Robot]:
    robot = Robot(graph)
    yield robot
    robot.close()


def test_topics_become_one_observation(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    stamp = robot.stamp()
    # Another order than the profile's, and a joint that it does not read.
    robot.send(
        front__image=raw((255, 0, 0), stamp),
        wrist__image=compressed((0, 255, 0), stamp),
        joint_states=joints({"c": 3.0, "gripper": 9.0, "a": 1.0, "b": 2.0}, stamp),
    )
    observation = robot.observation(inputs)
    assert observation.images["front"].shape == (4, 6, 3)
    assert (observation.images["front"] == (255, 0, 0)).all()
    assert (observation.images["wrist"] == (0, 255, 0)).all()
    assert observation.state.tolist() == [1.0, 2.0, 3.0]
    expected = stamp.sec * 10**9 + stamp.nanosec
    assert observation.stamp_ns == expected
    assert observation.input_stamps_ns == {"front": expected, "wrist": expected, "joints": expected}
    assert list(observation.input_stamps_ns) == ["front", "wrist", "joints"]
    assert observation.prompt is None
    assert inputs.take(robot.now_ns()) is None, "the same anchor image was given twice"
    assert inputs.reason(robot.now_ns()) is None
