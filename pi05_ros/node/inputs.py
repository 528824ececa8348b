"""From the robot's topics to observations: subscriptions that only store, and a `take` that converts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rclpy.callback_groups import CallbackGroup
from rclpy.clock import JumpThreshold
from rclpy.duration import Duration
from rclpy.event_handler import SubscriptionEventCallbacks, UnsupportedEventTypeError
from rclpy.node import Node
from rclpy.qos import QoSCompatibility, QoSProfile, qos_check_compatible
from rclpy.subscription import Subscription
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import ConfigurationError, ObservationError
from pi05_ros.guard import check_state
from pi05_ros.node import qos
from pi05_ros.node.images import to_rgb
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile
from pi05_ros.streams import CameraInput, Refusal, StateInput
from pi05_ros.synchronizer import StreamReport, SynchronizedSet, Synchronizer, SyncSettings

_LOG_PERIOD_S = 5.0
_GRAPH_PERIOD_S = 1.0
# rmw's word for a publisher that is seen before its node's name is.
_UNKNOWN_NODE = "_NODE_NAME_UNKNOWN_"
_JUMP = Duration(seconds=0.5)


@dataclass(frozen=True)
class _Subscribed:
    """One input's subscription and what it expects of publishers."""

    subscription: Subscription
    type_name: str
    profile: QoSProfile


class Inputs:
    """Subscribes to what a profile reads and turns it into observations.

    Callbacks stamp and store the newest messages; images are converted in the thread that calls `take`. Every method
    may be called from any thread; no lock is held while an image is converted.

    Args:
        node: owns the subscriptions; relative topic names of the profile are resolved in its namespace.
        profile: the robot; cameras whose slot is ``null`` are not subscribed.
        settings: how inputs are put together; without an anchor it is the profile's, else the first camera in the
            profile that feeds a slot and is not optional.
        qos_overrides: topic as the profile names it -> policies (`pi05_ros.node.qos.override`).
        callback_group: of the subscriptions.

    Raises:
        ConfigurationError: ``config.inputs`` (no camera, a camera or state dimension without a topic, a topic
            that cannot be subscribed), ``config.sync``, ``config.qos``.
    """

    def __init__(
        self,
        node: Node,
        profile: Profile,
        settings: SyncSettings,
        qos_overrides: Mapping[str, str],
        callback_group: CallbackGroup,
    ) -> None:
        self._node = node
        self._profile = profile
        self._clock = node.get_clock()
        self._names = [dim.name for dim in profile.state.dims]
        self._cameras = {name: camera for name, camera in profile.cameras.items() if camera.slot is not None}
        cameras, sources, state = _streams(profile)
        if settings.anchor is None:
            first = next((name for name, camera in cameras.items() if not camera.optional), None)
            settings = replace(settings, anchor=profile.anchor or first)
        self._synchronizer = Synchronizer(cameras, sources, state, settings, _same_picture)
        self._changed = threading.Condition()
        self._woken = False
        self._closed = False
        self._logged: dict[tuple[str, str], float] = {}
        self._graph: dict[str, tuple[float, Refusal | None]] = {}
        self._subscribed: dict[str, _Subscribed] = {}
        self.newest_receive_ns: int | None = None
        topics = {**{name: camera.topic for name, camera in cameras.items()}, **sources}
        # Resolved before anything is created, so that a mistake leaves nothing behind.
        profiles = {
            name: qos.for_topic(qos.JOINTS if name in sources else qos.SENSOR, topic, qos_overrides)
            for name, topic in topics.items()
        }
        for name, topic in topics.items():
            if name in sources:
                message_type: type = JointState
                callback = self._joints_callback(name)
            else:
                message_type = CompressedImage if self._cameras[name].type == "compressed" else Image
                callback = self._image_callback(name)
            try:
                subscription = self._subscribe(message_type, topic, callback, profiles[name], callback_group, name)
            except Exception as error:  # an impossible name; in this process the topic has another type already
                self._destroy_subscriptions()
                raise ConfigurationError(
                    "inputs", f"{name}: topic {topic} cannot be subscribed as {message_type.__name__}: {error}"
                ) from error
            type_name = f"sensor_msgs/msg/{message_type.__name__}"
            self._subscribed[name] = _Subscribed(subscription, type_name, profiles[name])
        self._jump = self._clock.create_jump_callback(
            JumpThreshold(
                min_forward=None, min_backward=Duration(nanoseconds=-_JUMP.nanoseconds), on_clock_change=True
            ),
            post_callback=self._on_jump,
        )

    def take(self, now_ns: int) -> Observation | None:
        """Newest consistent observation, each at most once; ``None`` when there is none (`reason` says why).

        An image that cannot be used is dropped and counted, and the next best set is tried.

        Args:
            now_ns: the node's clock.

        Returns:
            The observation without a prompt; ``state`` is float64 in the profile's order and units.

        Raises:
            ObservationError: ``observation.nan`` or ``observation.inf``, naming the state dimensions.
        """
        while True:
            with self._changed:
                self._woken = False
                taken = None if self._closed else self._synchronizer.take(now_ns)
            if taken is None:
                return None
            state = np.array(taken.state, dtype=np.float64)
            check_state(state, self._names)
            images = self._convert(taken, now_ns)
            if images is not None:
                with self._changed:
                    self._synchronizer.accept(taken)
                self.newest_receive_ns = taken.newest_receive_ns
                return Observation(
                    images=images,
                    state=state,
                    stamp_ns=taken.stamp_ns,
                    input_stamps_ns=taken.input_stamps_ns,
                )

    def wait(self, timeout_s: float) -> bool:
        """Wait until something came since the last `take` or `wait`, or `wake` was called; ``False``: time is over."""
        with self._changed:
            happened = self._changed.wait_for(lambda: self._woken or self._closed, timeout_s)
            self._woken = False
            return happened

    def wake(self) -> None:
        """End a running `wait`, or the next one at once."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def reason(self, now_ns: int) -> Refusal | None:
        """Code and sentence why no observation comes, or ``None`` while the inputs are in order."""
        with self._changed:
            finding = None if self._closed else self._synchronizer.diagnose(now_ns)
        if finding is None:
            return None
        code, sentence = self._graph_problem(finding.stream) or ("", "")
        if code:
            return code, sentence
        return finding.code, f"{finding.sentence}; {sentence}" if sentence else finding.sentence

    def reports(self, now_ns: int) -> list[StreamReport]:
        """One report per input: cameras, then state sources."""
        with self._changed:
            reports = [] if self._closed else self._synchronizer.reports(now_ns)
        for index, report in enumerate(reports):
            problem = None if report.state == "live" else self._graph_problem(report.name)
            if problem is not None and problem[0]:
                reports[index] = replace(report, last_error=": ".join(problem))
        return reports

    def close(self) -> None:
        """Give the subscriptions back; calls after this one find nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._jump.unregister()
        self._destroy_subscriptions()

    def _destroy_subscriptions(self) -> None:
        for subscribed in self._subscribed.values():
            self._node.destroy_subscription(subscribed.subscription)

    def _subscribe(
        self,
        message_type: type,
        topic: str,
        callback: Callable[[Any], None],
        profile: QoSProfile,
        callback_group: CallbackGroup,
        name: str,
    ) -> Subscription:
        events = self._events(name)
        try:
            return self._node.create_subscription(
                message_type, topic, callback, profile, callback_group=callback_group, event_callbacks=events
            )
        except UnsupportedEventTypeError:
            # Not every middleware counts lost messages; the two others are looked up in the graph as well.
            return self._node.create_subscription(message_type, topic, callback, profile, callback_group=callback_group)

    def _image_callback(self, name: str) -> Callable[[Any], None]:
        def store(message: Image | CompressedImage) -> None:
            receive_ns = self._clock.now().nanoseconds
            with self._changed:
                if not self._closed:
                    refusal = self._synchronizer.add_image(name, _stamp_ns(message), receive_ns, message)
                    self._stored(name, refusal)

        return store

    def _joints_callback(self, name: str) -> Callable[[Any], None]:
        def store(message: JointState) -> None:
            receive_ns = self._clock.now().nanoseconds
            with self._changed:
                if not self._closed:
                    refusal = self._synchronizer.add_joints(
                        name,
                        _stamp_ns(message),
                        receive_ns,
                        message.name,
                        message.position,
                        message.velocity,
                        message.effort,
                    )
                    self._stored(name, refusal)

        return store

    def _stored(self, name: str, refusal: Refusal | None) -> None:
        if refusal is not None:
            self._log(name, refusal)
        elif not self._woken and self._synchronizer.pending:
            self._woken = True
            self._changed.notify_all()

    def _convert(self, taken: SynchronizedSet, now_ns: int) -> dict[str, np.ndarray] | None:
        images = {}
        for name, frame in taken.images.items():
            camera = self._cameras[name]
            try:
                images[name] = to_rgb(frame.payload, camera.topic or name)
            except ObservationError as error:
                with self._changed:
                    self._synchronizer.hand_back(taken, name, error.code, f"camera {name}: {error.message}", now_ns)
                self._log(name, (error.code, f"camera {name}: {error.message}"))
                return None
        return images

    def _log(self, name: str, refusal: Refusal) -> None:
        """Warn once in a while of each kind: a stream may refuse 1000 messages a second."""
        key, now = (name, refusal[0]), time.monotonic()
        if now - self._logged.get(key, -_LOG_PERIOD_S) >= _LOG_PERIOD_S:
            self._logged[key] = now
            self._node.get_logger().warning(": ".join(refusal))

    def _events(self, name: str) -> SubscriptionEventCallbacks:
        def mismatch(_: Any) -> None:
            # Who it was and both sides stand in the graph; the event itself names neither.
            self._graph.pop(name, None)
            problem = self._graph_problem(name)
            if problem is not None and problem[0]:
                self._log(name, problem)

        def lost(event: Any) -> None:
            with self._changed:
                self._synchronizer.count_lost(name, event.total_count_change)

        return SubscriptionEventCallbacks(
            incompatible_qos=mismatch, incompatible_type=mismatch, message_lost=lost, use_default_callbacks=False
        )

    def _graph_problem(self, name: str) -> Refusal | None:
        """Why a stream's topic carries nothing: publishers of another type or QoS; without a code: no publisher."""
        if name not in self._subscribed:
            return None
        checked, problem = self._graph.get(name, (-_GRAPH_PERIOD_S, None))
        if time.monotonic() - checked >= _GRAPH_PERIOD_S:
            problem = self._look_at_graph(name)
            self._graph[name] = (time.monotonic(), problem)
        return problem

    def _look_at_graph(self, name: str) -> Refusal | None:
        subscribed = self._subscribed[name]
        topic = subscribed.subscription.topic_name
        problems: list[Refusal] = []
        publishers = self._node.get_publishers_info_by_topic(topic)
        if not publishers:
            return "", f"no node publishes {topic}"
        for publisher in publishers:
            where = f"{name} ({topic}): "
            who = f"node {publisher.node_namespace.rstrip('/')}/{publisher.node_name}"
            if publisher.node_name == _UNKNOWN_NODE:
                who = "a node"
            if publisher.topic_type != subscribed.type_name:
                problems.append(
                    ("input.type", f"{where}{subscribed.type_name} expected, {who} publishes {publisher.topic_type}")
                )
                continue
            fits, _ = qos_check_compatible(publisher.qos_profile, subscribed.profile)
            if fits == QoSCompatibility.ERROR:
                ours, theirs = qos.describe(subscribed.profile), qos.describe(publisher.qos_profile)
                problems.append(
                    (
                        "input.qos",
                        f"{where}this node asks for {ours}, {who} offers {theirs}; override the QoS of the topic",
                    )
                )
            else:
                return None
        return problems[0] if problems else None

    def _on_jump(self, jump: Any) -> None:
        now_ns = self._clock.now().nanoseconds
        with self._changed:
            self._synchronizer.clock_jumped(now_ns)
        self._node.get_logger().warning(f"the node's clock jumped to {now_ns / 1e9:.3f} s; inputs are collected anew")


def _streams(profile: Profile) -> tuple[dict[str, CameraInput], dict[str, str], list[StateInput]]:
    """What the synchroniser is told of a profile."""
    cameras = {}
    for name, camera in profile.cameras.items():
        if camera.slot is None:
            continue
        if camera.topic is None:
            raise ConfigurationError(
                "inputs", f"profile {profile.name}: camera {name} feeds {camera.slot} without a topic"
            )
        cameras[name] = CameraInput(camera.topic, camera.optional)
    if not cameras:
        raise ConfigurationError("inputs", f"profile {profile.name}: at least one camera that feeds a slot expected")
    if profile.state.dims and not profile.state.sources:
        raise ConfigurationError(
            "inputs", f"profile {profile.name}: state.sources with topics expected for {len(profile.state.dims)} dims"
        )
    state = [StateInput(profile.source_of(dim), dim.joint_name, dim.field) for dim in profile.state.dims]
    read = {dim.source for dim in state}
    sources = {name: source.topic for name, source in profile.state.sources.items() if name in read}
    return cameras, sources, state


def _stamp_ns(message: Image | CompressedImage | JointState) -> int:
    stamp = message.header.stamp
    return stamp.sec * 1_000_000_000 + stamp.nanosec


def _same_picture(one: Image | CompressedImage, other: Image | CompressedImage) -> bool:
    return np.array_equal(np.frombuffer(one.data, np.uint8), np.frombuffer(other.data, np.uint8))
