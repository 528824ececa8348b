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
import rclpy
from PIL import Image as PillowImage
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from ros_helpers import Graph
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import ConfigurationError, ObservationError
from pi05_ros.node.inputs import Inputs
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile, parse_profile
from pi05_ros.synchronizer import StreamReport, SyncSettings

RELIABLE = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
BEST_EFFORT = QoSProfile(depth=10, reliability=ReliabilityPolicy.BEST_EFFORT)
JOINTS = ("a", "b", "c")
TIMEOUT_S = 10.0
PATIENT = SyncSettings(max_age_s=5.0, dead_after_s=5.0)  # the machine that runs tests may be busy


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


class Host:
    """The node that owns the Inputs under test, in a participant of its own: within one, a topic has only one type."""

    def __init__(self) -> None:
        self._context = rclpy.Context()
        rclpy.init(context=self._context)
        self.node = rclpy.create_node("inputs", namespace="robot_1", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self._ending = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self._ending:
            self._executor.spin_once(timeout_sec=0.05)

    def close(self) -> None:
        self._ending = True
        self._thread.join(TIMEOUT_S)
        self._executor.shutdown()
        self.node.destroy_node()
        rclpy.shutdown(context=self._context)


class Robot:
    """Publishers by topic on one side, Inputs on the other."""

    def __init__(self, graph: Graph, host: Host) -> None:
        self.graph = graph
        self.node = host.node
        self.publishers: dict[str, Any] = {}
        self.open: list[Inputs] = []

    def inputs(
        self,
        wanted: Profile,
        settings: SyncSettings = PATIENT,
        qos: Mapping[str, str] | None = None,
        advertised: bool = True,
    ) -> Inputs:
        """Inputs of this profile, and publishers that have found them."""
        inputs = Inputs(self.node, wanted, settings, qos or {}, self.node.default_callback_group)
        self.open.append(inputs)
        if advertised:
            for camera in wanted.cameras.values():
                if camera.slot is not None:
                    self.advertise(CompressedImage if camera.type == "compressed" else Image, str(camera.topic))
            for source in wanted.state.sources.values():
                self.advertise(JointState, source.topic)
        return inputs

    def advertise(self, kind: type, topic: str, qos: QoSProfile = RELIABLE, matched: bool = True) -> Any:
        publisher = self.graph.node.create_publisher(kind, f"/robot_1/{topic}", qos)
        self.publishers[topic] = publisher
        readers = [reader for reader in self.node.subscriptions if reader.topic_name == f"/robot_1/{topic}"]
        deadline = time.monotonic() + TIMEOUT_S
        # Both ends must know of each other before a best-effort message can arrive.
        while matched and not (publisher.get_subscription_count() and all(r.get_publisher_count() for r in readers)):
            assert time.monotonic() < deadline, f"nobody subscribed to {topic}"
            time.sleep(0.005)
        return publisher

    def send(self, **messages: Any) -> None:
        """Publish by topic; ``__`` stands for the slash."""
        for name, message in messages.items():
            topic = name.replace("__", "/")
            self.publishers[topic].publish(message)

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

    def observation_of(self, inputs: Inputs, send: Callable[[], None]) -> Observation:
        """The next observation while ``send`` is called again and again (discovery is not instant)."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            send()
            inputs.wait(0.05)
            found = inputs.take(self.now_ns())
            if found is not None:
                return found
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


@pytest.fixture(scope="module")
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


@pytest.fixture(scope="module")
def host(graph: Graph) -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def robot(graph: Graph, host: Host) -> Iterator[Robot]:
    robot = Robot(graph, host)
    yield robot
    robot.close()


@pytest.fixture
def simulated_time(host: Host) -> Iterator[None]:
    host.node.set_parameters([Parameter("use_sim_time", value=True)])
    yield
    host.node.set_parameters([Parameter("use_sim_time", value=False)])


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


def send_set(robot: Robot, stamp: Any, wanted: Sequence[str] = ("front", "wrist", "joints"), **changed: Any) -> None:
    """One good message on each of the wanted streams, some of them replaced."""
    messages = {
        "front": ("front__image", raw((255, 0, 0), stamp)),
        "wrist": ("wrist__image", compressed((0, 255, 0), stamp)),
        "joints": ("joint_states", joints(dict.fromkeys(JOINTS, 0.5), stamp)),
    }
    for name in wanted:
        topic, message = messages[name]
        robot.send(**{topic: changed.get(name, message)})


@pytest.mark.parametrize(
    ("encoding", "order"), [("rgb8", "rgb"), ("bgr8", "bgr"), ("rgba8", "rgba"), ("bgra8", "bgra")]
)
def test_red_is_red_in_every_encoding(robot: Robot, encoding: str, order: str) -> None:
    inputs = robot.inputs(profile())
    red = [{"r": 255, "a": 77}.get(channel, 0) for channel in order]
    stamp = robot.stamp()
    send_set(robot, stamp, front=raw(red, stamp, encoding))
    assert (robot.observation(inputs).images["front"] == (255, 0, 0)).all()


def test_padded_rows(robot: Robot) -> None:
    cameras = {"front": {"slot": "base", "topic": "front/image"}}
    inputs = robot.inputs(profile(cameras=cameras))
    pixels = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
    padded = np.full((4, 16), 99, np.uint8)
    padded[:, :15] = pixels.reshape(4, 15)
    message = Image(height=4, width=5, encoding="rgb8", step=16, data=array.array("B", padded.tobytes()))
    message.header.stamp = robot.stamp()
    send_set(robot, message.header.stamp, ("front", "joints"), front=message)
    assert (robot.observation(inputs).images["front"] == pixels).all()


@pytest.mark.parametrize(
    ("camera", "bad", "code", "named"),
    [
        ("front", lambda stamp: raw((9,), stamp, "mono8"), "image_encoding", "mono8"),
        ("front", lambda stamp: raw((9, 9), stamp, "16UC1"), "image_encoding", "16UC1"),
        ("front", lambda stamp: raw((9, 9, 9), stamp, "nv12"), "image_encoding", "nv12"),
        ("wrist", lambda stamp: damaged(stamp, b""), "image_corrupt", "empty"),
        ("wrist", lambda stamp: damaged(stamp, bytes(range(7, 27))), "image_corrupt", "20 bytes"),
    ],
    ids=["mono8", "16UC1", "nv12", "empty jpeg", "noise"],
)
def test_pictures_that_cannot_be_used_never_become_observations(
    robot: Robot, camera: str, bad: Callable[[Any], Any], code: str, named: str
) -> None:
    inputs = robot.inputs(profile(), SyncSettings(slop_s=0.0, max_age_s=0.8, dead_after_s=0.8))
    stamp = robot.stamp()
    send_set(robot, stamp, **{camera: bad(stamp)})
    sentence = robot.reason(inputs, f"observation.{code}")
    assert f"{camera}/image" in sentence and named in sentence
    report = robot.report(inputs, camera)
    assert (report.state, report.dropped) == ("waiting", 1) and named in report.last_error
    # A good picture is used at once; when bad ones follow, the stream ages although messages come.
    robot.observation_of(inputs, lambda: send_set(robot, robot.stamp()))

    def keep_sending() -> bool:
        now = robot.stamp()
        send_set(robot, now, **{camera: bad(now)})
        return robot.report(inputs, camera).state == "dead"

    robot.until(inputs, keep_sending)
    reason = inputs.reason(robot.now_ns())
    assert reason is not None and reason[0] == "input.dead" and named in reason[1]


def damaged(stamp: Any, data: bytes) -> CompressedImage:
    message = CompressedImage(format="jpeg", data=array.array("B", data))
    message.header.stamp = stamp
    return message


def test_one_bad_frame_is_skipped(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    early = robot.stamp()
    send_set(robot, early, ("wrist",))
    time.sleep(0.02)
    stamp = robot.stamp()
    send_set(robot, stamp, ("front", "joints"))
    robot.send(wrist__image=damaged(stamp, b"\xff\xd8\xff rubbish"))
    observation = robot.observation(inputs)
    assert observation.input_stamps_ns["wrist"] == early.sec * 10**9 + early.nanosec
    assert observation.stamp_ns == stamp.sec * 10**9 + stamp.nanosec


def test_joints_are_taken_by_name_from_several_publishers_and_fields(robot: Robot) -> None:
    state = {
        "sources": {"left": {"topic": "left/joint_states"}, "right": {"topic": "right/joint_states"}},
        "dims": [
            {"name": "left_a", "source": "left", "joint": "a", "unit": "rad"},
            {"name": "right_a", "source": "right", "joint": "a", "unit": "rad"},
            {"name": "left_a_speed", "source": "left", "joint": "a", "unit": "rad/s", "field": "velocity"},
            {"name": "right_grip", "source": "right", "joint": "grip", "unit": "unitless", "field": "effort"},
        ],
    }
    inputs = robot.inputs(profile(cameras={"front": {"slot": "base", "topic": "front/image"}}, state=state))
    stamp = robot.stamp()
    robot.send(
        front__image=raw((1, 2, 3), stamp),
        left__joint_states=joints({"b": 1.0, "a": 2.0}, stamp, velocity=(3.0, 4.0)),
        right__joint_states=joints({"grip": 5.0, "a": 6.0}, stamp, effort=(7.0, 8.0)),
    )
    observation = robot.observation(inputs)
    assert observation.state.tolist() == [2.0, 6.0, 4.0, 7.0]
    assert list(observation.input_stamps_ns) == ["front", "left", "right"]


def test_arm_and_gripper_may_share_one_topic(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    gripper_stamp = robot.stamp()
    robot.send(joint_states=joints({"c": 3.0}, gripper_stamp))
    time.sleep(0.05)
    stamp = robot.stamp()
    send_set(robot, stamp, joints=joints({"b": 2.0, "a": 1.0}, stamp))
    observation = robot.observation(inputs)
    assert observation.state.tolist() == [1.0, 2.0, 3.0]
    assert observation.input_stamps_ns["joints"] == gripper_stamp.sec * 10**9 + gripper_stamp.nanosec


def test_a_missing_joint_is_an_error_that_names_it(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    stamp = robot.stamp()
    send_set(robot, stamp, joints=joints({"a": 1.0, "c": 2.0}, stamp))
    sentence = robot.reason(inputs, "input.joint_missing")
    assert "['b']" in sentence and "['a', 'c']" in sentence and "joint_states" in sentence


def test_arrays_that_do_not_fit_the_names_are_refused(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    stamp = robot.stamp()
    message = joints({"a": 1.0, "b": 2.0, "c": 3.0}, stamp)
    message.position = array.array("d", [1.0, 2.0])
    send_set(robot, stamp, joints=message)
    sentence = robot.reason(inputs, "input.malformed")
    assert "3 values of position" in sentence and "got 2" in sentence
    assert "input.malformed" in robot.report(inputs, "joints").last_error


@pytest.mark.parametrize(("value", "code"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf")])
def test_a_joint_that_is_not_finite_is_named(robot: Robot, value: float, code: str) -> None:
    inputs = robot.inputs(profile())
    stamp = robot.stamp()
    send_set(robot, stamp, joints=joints({"a": 1.0, "b": value, "c": 0.0}, stamp))
    with pytest.raises(ObservationError) as caught:
        robot.observation(inputs)
    assert caught.value.code == f"observation.{code}"
    assert "joint_b" in caught.value.message and "joint_a" not in caught.value.message
    stamp = robot.stamp()
    send_set(robot, stamp, ("joints",))
    robot.until(inputs, lambda: robot.report(inputs, "joints").received == 2)
    send_set(robot, stamp, ("front", "wrist"))
    assert robot.observation(inputs).state.tolist() == [0.5, 0.5, 0.5], "the next good message is used"


def test_numbers_that_are_not_read_may_be_anything(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    stamp = robot.stamp()
    values = joints({"a": 1.0, "b": 2.0, "c": 3.0, "other": np.nan}, stamp, velocity=(np.nan,) * 4)
    send_set(robot, stamp, joints=values)
    assert robot.observation(inputs).state.tolist() == [1.0, 2.0, 3.0]


def test_cameras_without_a_slot_are_not_subscribed(robot: Robot) -> None:
    cameras = {"front": {"slot": "base", "topic": "front/image"}, "low": {"slot": None, "topic": "low/image"}}
    inputs = robot.inputs(profile(cameras=cameras))
    robot.advertise(Image, "low/image", matched=False)
    stamp = robot.stamp()
    send_set(robot, stamp, ("front", "joints"))
    assert list(robot.observation(inputs).images) == ["front"]
    assert robot.publishers["low/image"].get_subscription_count() == 0
    assert [report.name for report in inputs.reports(robot.now_ns())] == ["front", "joints"]


def test_the_order_in_which_cameras_are_declared_changes_nothing(robot: Robot) -> None:
    ordered = profile().cameras
    inputs = robot.inputs(profile(cameras={name: ordered[name].model_dump() for name in ("wrist", "front")}))
    send_set(robot, robot.stamp())
    observation = robot.observation(inputs)
    assert (observation.images["front"] == (255, 0, 0)).all()
    assert (observation.images["wrist"] == (0, 255, 0)).all()


def test_a_camera_that_stops_is_named(robot: Robot) -> None:
    inputs = robot.inputs(profile(), SyncSettings(max_age_s=0.5, dead_after_s=1.0))
    robot.observation_of(inputs, lambda: send_set(robot, robot.stamp()))
    seen = []

    def dead() -> bool:
        send_set(robot, robot.stamp(), ("wrist", "joints"))
        reason = inputs.reason(robot.now_ns())
        seen.append(reason[0] if reason else "")
        assert reason is None or "camera front" in reason[1]
        return seen[-1] == "input.dead"

    robot.until(inputs, dead)
    assert list(dict.fromkeys(seen)) == ["", "input.stale", "input.dead"]


def test_a_frozen_picture_is_named(robot: Robot) -> None:
    inputs = robot.inputs(profile(), SyncSettings(max_age_s=5.0, detect_frozen=True, frozen_after_s=0.3))
    value = iter(range(255))

    def send() -> None:
        stamp = robot.stamp()
        send_set(robot, stamp, front=raw((next(value), 0, 0), stamp))

    started = time.monotonic()
    while (reason := inputs.reason(robot.now_ns())) is None or reason[0] != "input.frozen":
        send()
        inputs.take(robot.now_ns())
        time.sleep(0.03)
        assert time.monotonic() - started < TIMEOUT_S
    assert "camera wrist" in reason[1]
    assert time.monotonic() - started > 0.25


def test_stamps_that_cannot_be_true_are_refused(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    robot.send(front__image=raw((1, 1, 1), type(robot.stamp())()))
    assert "front" in robot.reason(inputs, "input.zero_stamp")
    future = robot.stamp()
    future.sec += 10
    send_set(robot, future)
    sentence = robot.reason(inputs, "input.future_stamp")
    assert "ahead" in sentence


def test_receive_stamps_are_the_clocks(robot: Robot) -> None:
    inputs = robot.inputs(profile(), SyncSettings(stamp_source="receive", slop_s=2.0, max_age_s=5.0))
    before = robot.now_ns()
    send_set(robot, type(robot.stamp())())
    observation = robot.observation(inputs)
    assert all(before <= stamp <= robot.now_ns() for stamp in observation.input_stamps_ns.values())


def test_incompatible_quality_of_service_is_reported_by_name(robot: Robot) -> None:
    inputs = robot.inputs(profile(), qos={"front/image": "reliable"}, advertised=False)
    robot.advertise(Image, "front/image", BEST_EFFORT, matched=False)
    sentence = robot.reason(inputs, "input.qos")
    assert "/robot_1/front/image" in sentence and "reliable" in sentence and "best_effort" in sentence
    robot.until(inputs, lambda: "node /probe offers" in str(inputs.reason(robot.now_ns())))
    assert robot.report(inputs, "front").last_error.startswith("input.qos: ")


@pytest.mark.parametrize("offered", [RELIABLE, BEST_EFFORT])
def test_the_default_matches_every_camera_driver(robot: Robot, offered: QoSProfile) -> None:
    inputs = robot.inputs(profile(), advertised=False)
    for topic, kind in (("front/image", Image), ("wrist/image", CompressedImage), ("joint_states", JointState)):
        robot.advertise(kind, topic, offered)
    robot.observation_of(inputs, lambda: send_set(robot, robot.stamp()))


def test_another_message_type_is_reported_by_name(robot: Robot) -> None:
    # A topic of its own: the publisher's participant still knows the others' types.
    cameras = {"front": {"slot": "base", "topic": "jpeg/image"}}
    inputs = robot.inputs(profile(cameras=cameras), advertised=False)
    robot.advertise(CompressedImage, "jpeg/image", matched=False)
    sentence = robot.reason(inputs, "input.type")
    assert "sensor_msgs/msg/Image expected" in sentence and "publishes sensor_msgs/msg/CompressedImage" in sentence
    assert "/robot_1/jpeg/image" in sentence
    robot.until(inputs, lambda: "node /probe publishes" in str(inputs.reason(robot.now_ns())))
    assert robot.report(inputs, "front").last_error.startswith("input.type: ")


def test_a_topic_that_nobody_publishes_is_said_so(robot: Robot) -> None:
    inputs = robot.inputs(profile(), advertised=False)
    said = "no message yet; no node publishes /robot_1/front/image"
    robot.until(inputs, lambda: said in str(inputs.reason(robot.now_ns())))


def test_qos_overrides_reach_the_subscription(robot: Robot) -> None:
    inputs = robot.inputs(
        profile(), qos={"front/image": "reliable, depth=9", "joint_states": "reliable"}, advertised=False
    )

    def offered(topic: str) -> list[ReliabilityPolicy]:
        infos = robot.node.get_subscriptions_info_by_topic(f"/robot_1/{topic}")
        return [info.qos_profile.reliability for info in infos]

    # Those of the test before may take a moment to leave the graph.
    robot.until(inputs, lambda: offered("front/image") == [ReliabilityPolicy.RELIABLE])
    robot.until(inputs, lambda: offered("joint_states") == [ReliabilityPolicy.RELIABLE])
    robot.until(inputs, lambda: offered("wrist/image") == [ReliabilityPolicy.BEST_EFFORT])


def test_waiting_ends_when_something_comes_and_when_it_is_woken(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    started = time.monotonic()
    assert inputs.wait(0.1) is False
    assert 0.09 <= time.monotonic() - started < 1.0
    threading.Timer(0.1, lambda: send_set(robot, robot.stamp(), ("front",))).start()
    started = time.monotonic()
    assert inputs.wait(TIMEOUT_S) is True
    assert time.monotonic() - started < 2.0
    inputs.wake()
    assert inputs.wait(TIMEOUT_S) is True
    assert inputs.wait(0.01) is False, "a wake-up counts once"
    threading.Timer(0.05, inputs.close).start()
    assert inputs.wait(TIMEOUT_S) is True


@pytest.mark.usefixtures("simulated_time")
def test_simulated_time_and_its_jumps(robot: Robot) -> None:
    inputs = robot.inputs(profile())
    assert "/clock" in robot.reason(inputs, "input.clock")
    publisher = robot.graph.node.create_publisher(Clock, "/clock", RELIABLE)
    robot.publishers["clock"] = publisher

    def set_clock(seconds: int) -> Any:
        clock = Clock()
        clock.clock.sec = seconds
        deadline = time.monotonic() + TIMEOUT_S
        while robot.now_ns() != seconds * 10**9:
            publisher.publish(clock)
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return clock.clock

    send_set(robot, set_clock(100))
    assert robot.observation(inputs).stamp_ns == 100 * 10**9
    send_set(robot, set_clock(101))
    deadline = time.monotonic() + TIMEOUT_S
    while any(report.received < 2 for report in inputs.reports(robot.now_ns())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    set_clock(20)
    assert robot.reason(inputs, "input.waiting")
    send_set(robot, set_clock(21))
    assert robot.observation(inputs).stamp_ns == 21 * 10**9, "a bag that begins again is used again"


def test_closing_gives_everything_back(robot: Robot) -> None:
    before = len(list(robot.node.subscriptions))
    for _ in range(20):
        inputs = robot.inputs(profile(), advertised=False)
        inputs.close()
        inputs.close()
        now = robot.now_ns()
        assert inputs.take(now) is None and inputs.reason(now) is None and inputs.reports(now) == []
        assert inputs.wait(TIMEOUT_S) is True
    assert len(list(robot.node.subscriptions)) == before
    robot.observation_of(robot.inputs(profile()), lambda: send_set(robot, robot.stamp()))


@pytest.mark.parametrize(
    ("changes", "settings", "qos", "named"),
    [
        ({"cameras": {"front": {"slot": "base"}}, "anchor": None}, {}, {}, "front"),
        ({"cameras": {"front": {"slot": None, "topic": "t"}}, "anchor": None}, {}, {}, "camera"),
        ({"cameras": {"front": {"slot": "b", "topic": "t", "optional": True}}}, {}, {}, "anchor"),
        (
            {"state": {"sources": {"j": {"topic": "no topic"}}, "dims": [{"name": "a", "unit": "rad"}]}},
            {},
            {},
            "no topic",
        ),
        ({}, {"anchor": "top"}, {}, "top"),
        ({}, {}, {"front/image": "dependable"}, "dependable"),
        ({}, {}, {"front/image": "reliable,best_effort"}, "reliability"),
        ({}, {}, {"front/image": "depth=0"}, "depth"),
    ],
)
def test_what_cannot_be_subscribed_is_refused_and_leaves_nothing_behind(
    robot: Robot, changes: dict[str, Any], settings: dict[str, Any], qos: dict[str, str], named: str
) -> None:
    before = len(list(robot.node.subscriptions))
    with pytest.raises(ConfigurationError, match=named):
        robot.inputs(profile(**changes), SyncSettings(**settings), qos, advertised=False)
    assert len(list(robot.node.subscriptions)) == before
