"""``pi05-ros check-live``: inspect the running graph against a profile, and against a checkpoint's statistics."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import rclpy
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import ConfigurationError
from pi05_ros.node import qos
from pi05_ros.node.environment import apply_dds_defaults
from pi05_ros.node.process import Spinner
from pi05_ros.profile import load_profile
from pi05_ros.recording.check import Inspection, report, statistics_spans

_TYPES = {
    "sensor_msgs/msg/Image": Image,
    "sensor_msgs/msg/CompressedImage": CompressedImage,
    "sensor_msgs/msg/JointState": JointState,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--profile", default="demo", help="robot profile (default: %(default)s)")
    parser.add_argument("--checkpoint", help="compare ranges with its statistics: folder, hub id or `builtin`")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to listen (default: %(default)g)")
    parser.add_argument("--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when there is an error in it."""
    profile = load_profile(options.profile)
    if not 0.0 < options.seconds < 3600.0:
        raise ConfigurationError("seconds", f"--seconds: above 0 and below 3600 expected, got {options.seconds}")
    spans = statistics_spans(profile, options.checkpoint) if options.checkpoint else {}
    inspection = Inspection(profile, spans)
    apply_dds_defaults()
    rclpy.init(args=["pi05-ros check-live", "--ros-args", *options.ros_args])
    node = rclpy.create_node("check")

    def taking(topic: str, kind: str) -> Callable[[Any], None]:
        return lambda message: inspection.add(topic, kind, node.get_clock().now().nanoseconds, message)

    for topic, kind in inspection.topics.items():
        base = qos.JOINTS if kind.endswith("JointState") else qos.SENSOR
        node.create_subscription(_TYPES[kind], topic, taking(topic, kind), base)
    spinner = Spinner("check")
    spinner.add(node)
    spinner.start()
    time.sleep(options.seconds)
    spinner.stop()
    published = {
        topic: sorted({publisher.topic_type for publisher in node.get_publishers_info_by_topic(topic)})
        for topic in inspection.topics
    }
    node.destroy_node()
    rclpy.try_shutdown()
    findings = inspection.findings()
    print(report(findings))
    for topic, kinds in published.items():
        if kinds and inspection.topics[topic] not in kinds:
            print(f"error    {topic}: {inspection.topics[topic]} expected, the graph has {kinds}")
    return int(any(finding.level == "error" for finding in findings))
