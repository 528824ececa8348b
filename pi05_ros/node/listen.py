"""Puts what is heard on a running graph into an `Inspection`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import rclpy
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.node import qos
from pi05_ros.node.environment import apply_dds_defaults
from pi05_ros.node.process import Spinner
from pi05_ros.recording.check import Inspection

_TYPES = {
    "sensor_msgs/msg/Image": Image,
    "sensor_msgs/msg/CompressedImage": CompressedImage,
    "sensor_msgs/msg/JointState": JointState,
}


def listen(inspection: Inspection, seconds: float, ros_args: Sequence[str] = ()) -> list[str]:
    """Listen to the inspection's topics for so long.

    Returns:
        A sentence for each topic that is published with another type than the profile says.
    """
    apply_dds_defaults()
    rclpy.init(args=["pi05-ros check", "--ros-args", *ros_args])
    node = rclpy.create_node("check")

    def taking(topic: str, kind: str) -> Callable[[Any], None]:
        return lambda message: inspection.add(topic, kind, node.get_clock().now().nanoseconds, message)

    for topic, kind in inspection.topics.items():
        base = qos.JOINTS if kind.endswith("JointState") else qos.SENSOR
        node.create_subscription(_TYPES[kind], topic, taking(topic, kind), base)
    spinner = Spinner("check")
    spinner.add(node)
    spinner.start()
    time.sleep(seconds)
    spinner.stop()
    published = {
        topic: sorted({publisher.topic_type for publisher in node.get_publishers_info_by_topic(topic)})
        for topic in inspection.topics
    }
    node.destroy_node()
    rclpy.try_shutdown()
    return [
        f"{topic}: {inspection.topics[topic]} expected, the graph has {kinds}"
        for topic, kinds in published.items()
        if kinds and inspection.topics[topic] not in kinds
    ]
