"""Listens to a live graph for a few seconds and says what is there (`pi05_ros.survey`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSCompatibility, QoSProfile, qos_check_compatible
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import ObservationError
from pi05_ros.node import qos
from pi05_ros.node.environment import apply_dds_defaults
from pi05_ros.node.images import to_rgb
from pi05_ros.node.inputs import Inputs
from pi05_ros.profile import Profile
from pi05_ros.survey import COMPRESSED, IMAGE, JOINTS, SeenJoint, SeenPublisher, SeenTopic, Survey
from pi05_ros.synchronizer import SyncSettings

_CLASSES = {IMAGE: Image, COMPRESSED: CompressedImage, JOINTS: JointState}
_DISCOVERY_S = 5.0
_SETTLED_S = 1.0  # no new topic for so long: the graph is known
_LOOK_EVERY_S = 0.2
_TAKE_EVERY_S = 0.1  # an observation converts pictures, which would slow the listening down
# Layouts and pictures are told apart up to here; a publisher that never repeats itself must not fill the memory.
_MAX_KINDS = 16


@contextmanager
def listening_node(namespace: str = "", ros_arguments: Sequence[str] = ()) -> Iterator[Node]:
    """A node in a context of its own, to be spun by `survey`; topics resolve as those of the policy node.

    Args:
        namespace: of the policy node whose topics are looked at.
        ros_arguments: what follows ``--ros-args``, e.g. ``-r`` and ``-p use_sim_time:=true``.
    """
    apply_dds_defaults()
    context = Context()
    rclpy.init(args=["pi05-ros", "--ros-args", *ros_arguments], context=context)
    node = Node("profile_check", namespace=namespace or None, context=context)
    try:
        yield node
    finally:
        node.destroy_node()
        rclpy.try_shutdown(context=context)


class _Listener:
    """Collects what comes on one topic.

    ``expected`` is the type to listen to; the first readable one that is published unless given. ``base`` is what the
    policy node will ask for; its default for the type unless given.
    """

    def __init__(self, node: Node, topic: str, expected: str | None = None, base: QoSProfile | None = None) -> None:
        self._node = node
        self._topic = topic
        self._expected = expected
        self._base = base
        self._subscription: Any = None
        self._publishers: tuple[SeenPublisher, ...] = ()
        self._arrivals: list[float] = []
        self._stamp_offsets: list[int] = []
        self._zero_stamps = 0
        self._pictures: dict[tuple[str, int, int], None] = {}
        self._kinds: set[tuple[object, ...]] = set()
        self._unreadable: dict[str, None] = {}
        self._layouts: dict[tuple[str, ...], None] = {}
        self._joints: dict[str, SeenJoint] = {}

    def look(self) -> None:
        """Take stock of the publishers, and subscribe once there is one that can be read."""
        infos = self._node.get_publishers_info_by_topic(self._topic)
        self._publishers = tuple(
            SeenPublisher(
                f"{info.node_namespace.rstrip('/')}/{info.node_name}", info.topic_type, self._qos_problem(info)
            )
            for info in infos
        )
        # Within one participant a topic has only one type, so another than the expected one is never subscribed.
        readable = [kind for kind in (info.topic_type for info in infos) if kind in _CLASSES]
        wanted = self._expected or next(iter(readable), None)
        if self._subscription is None and wanted in readable:
            kind = _CLASSES[wanted]
            callback = self._on_joints if kind is JointState else partial(self._on_image, kind)
            # Best effort matches everybody, so that numbers come even where the node's own subscription would not.
            listening = qos.JOINTS if kind is JointState else qos.SENSOR
            self._subscription = self._node.create_subscription(kind, self._topic, callback, listening)

    def seen(self) -> SeenTopic:
        arrivals, offsets = self._arrivals, self._stamp_offsets
        span = arrivals[-1] - arrivals[0] if arrivals else 0.0
        return SeenTopic(
            topic=self._topic,
            publishers=self._publishers,
            messages=len(arrivals),
            rate_hz=(len(arrivals) - 1) / span if span > 0 else 0.0,
            zero_stamps=self._zero_stamps,
            lead_s=max(offsets, default=0) / 1e9,
            age_s=-min(offsets, default=0) / 1e9,
            pictures=tuple(self._pictures),
            unreadable=tuple(self._unreadable),
            layouts=tuple(self._layouts),
            joints=self._joints,
        )

    def close(self) -> None:
        if self._subscription is not None:
            self._node.destroy_subscription(self._subscription)

    def _qos_problem(self, info: Any) -> str:
        ours = self._base or (qos.JOINTS if info.topic_type == JOINTS else qos.SENSOR)
        fits, _ = qos_check_compatible(info.qos_profile, ours)
        if fits != QoSCompatibility.ERROR:
            return ""
        return f"the policy node asks for {qos.describe(ours)}, it offers {qos.describe(info.qos_profile)}"

    def _arrived(self, header: Any) -> None:
        self._arrivals.append(time.monotonic())
        stamp = header.stamp.sec * 1_000_000_000 + header.stamp.nanosec
        if stamp == 0:
            self._zero_stamps += 1
        else:
            self._stamp_offsets.append(stamp - self._node.get_clock().now().nanoseconds)

    def _on_image(self, kind: type, message: Any) -> None:
        self._arrived(message.header)
        raw = kind is Image
        key = (message.encoding, message.width, message.height, message.step) if raw else (message.format,)
        # One picture of each kind is enough; the observations convert more of them.
        if key in self._kinds or len(self._kinds) >= _MAX_KINDS:
            return
        try:
            height, width, _ = to_rgb(message, self._topic).shape
        except ObservationError as error:
            self._unreadable[f"{error.code}: {error.message}"] = None
        else:
            self._pictures[message.encoding if raw else message.format, width, height] = None
        self._kinds.add(key)

    def _on_joints(self, message: JointState) -> None:
        self._arrived(message.header)
        names = tuple(message.name)
        if names not in self._layouts and len(self._layouts) >= _MAX_KINDS:
            return
        self._layouts[names] = None
        arrays = {name: getattr(message, name) for name in ("position", "velocity", "effort")}
        for place, name in enumerate(names):
            numbers = {label: values[place] for label, values in arrays.items() if place < len(values)}
            before = self._joints.get(name, SeenJoint())
            self._joints[name] = SeenJoint(
                before.fields | set(numbers),
                before.not_finite or not all(map(math.isfinite, numbers.values())),
            )


def survey(
    node: Node,
    seconds: float,
    profile: Profile | None = None,
    settings: SyncSettings | None = None,
    qos_overrides: Sequence[str] = (),
) -> Survey:
    """Listen for ``seconds`` once publishers are found, which may take some seconds more.

    Args:
        node: from `listening_node`; spun by this call.
        profile: listen to its topics, and let the policy node's own inputs make observations of them; without one,
            listen to every topic of a readable type.
        settings: how the inputs put observations together; the node's defaults unless given.
        qos_overrides: as the node's parameter ``qos``.

    Raises:
        ConfigurationError: ``config.inputs``, ``config.sync``, ``config.qos``, as `Inputs`.
    """
    executor = SingleThreadedExecutor(context=node.context)
    executor.add_node(node)
    overrides = {node.resolve_topic_name(topic): given for topic, given in qos.parse_overrides(qos_overrides).items()}
    inputs = None if profile is None else _inputs(node, profile, settings or SyncSettings(), overrides)
    listeners = {} if profile is None else _profile_listeners(node, profile, overrides)
    observations, bad_state = 0, ""
    try:
        began: float | None = None
        looked = taken = -math.inf
        grown = started = time.monotonic()
        while True:
            now = time.monotonic()
            settled = profile is None and bool(listeners) and now - grown >= _SETTLED_S
            if began is None and (settled or now - started >= _DISCOVERY_S or _all_found(listeners, profile)):
                began = now
            if began is not None and now - began >= seconds:
                break
            if now - looked >= _LOOK_EVERY_S:
                looked = now
                if profile is None:
                    for topic in _readable_topics(node):
                        if topic not in listeners:
                            listeners[topic] = _Listener(node, topic)
                            grown = now
                for listener in listeners.values():
                    listener.look()
            executor.spin_once(timeout_sec=0.02)
            if inputs is not None and now - taken >= _TAKE_EVERY_S:
                taken = now
                try:
                    observations += inputs.take(node.get_clock().now().nanoseconds) is not None
                except ObservationError as error:
                    bad_state = f"{error.code}: {error.message}"
        reason = inputs.reason(node.get_clock().now().nanoseconds) if inputs is not None else None
        return Survey(
            seconds=seconds,
            topics={topic: listener.seen() for topic, listener in listeners.items()},
            observations=None if inputs is None else observations,
            reason=": ".join(reason) if reason is not None else bad_state,
        )
    finally:
        if inputs is not None:
            inputs.close()
        for listener in listeners.values():
            listener.close()
        executor.shutdown()


def resolved(node: Node, profile: Profile) -> dict[str, str]:
    """Topic as the profile names it -> full name."""
    topics = [camera.topic for camera in profile.cameras.values() if camera.topic is not None]
    topics += [source.topic for source in profile.state.sources.values()]
    return {topic: str(node.resolve_topic_name(topic)) for topic in topics}


def _profile_listeners(node: Node, profile: Profile, overrides: Mapping[str, str]) -> dict[str, _Listener]:
    """A listener for each input that the policy node would subscribe to, by full topic name."""
    types = {source.topic: JOINTS for source in profile.state.sources.values()}
    for camera in profile.cameras.values():
        if camera.topic is not None and camera.slot is not None:
            types[camera.topic] = COMPRESSED if camera.type == "compressed" else IMAGE
    listeners = {}
    for topic, full in resolved(node, profile).items():
        if topic in types:
            base = qos.for_topic(qos.JOINTS if types[topic] == JOINTS else qos.SENSOR, full, overrides)
            listeners[full] = _Listener(node, full, types[topic], base)
    return listeners


def _readable_topics(node: Node) -> list[str]:
    return [name for name, types in node.get_topic_names_and_types() if any(kind in _CLASSES for kind in types)]


def _all_found(listeners: Mapping[str, _Listener], profile: Profile | None) -> bool:
    return profile is not None and all(listener.seen().publishers for listener in listeners.values())


def _inputs(node: Node, profile: Profile, settings: SyncSettings, overrides: Mapping[str, str]) -> Inputs:
    full = resolved(node, profile)
    cameras = {
        name: camera.model_copy(update={"topic": full[camera.topic]}) if camera.topic is not None else camera
        for name, camera in profile.cameras.items()
    }
    sources = {
        name: source.model_copy(update={"topic": full[source.topic]}) for name, source in profile.state.sources.items()
    }
    state = profile.state.model_copy(update={"sources": sources})
    whole = profile.model_copy(update={"cameras": cameras, "state": state})
    return Inputs(node, whole, settings, overrides, node.default_callback_group)
