"""``pi05-ros robot``: a stand-in robot that publishes on its topics all that a profile subscribes to.

The cameras show photographs that are slowly panned, so that no two frames are alike; the joints swing.
"""

from __future__ import annotations

import argparse
import io
import math
from array import array
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rclpy
from PIL import Image as PillowImage
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.errors import ConfigurationError
from pi05_ros.node import qos
from pi05_ros.node.environment import apply_dds_defaults
from pi05_ros.node.process import Spinner, block_signals, wait_for_signal
from pi05_ros.profile import Profile, StateDimension, load_profile

WIDTH, HEIGHT = 640, 480
CAMERA_HZ, JOINT_HZ = 30.0, 50.0
_PAN_PIXELS = 2  # per frame
_SWING_S = 8.0
_PHOTOS = Path(__file__).parents[1] / "assets" / "photos"


class Panorama:
    """A photograph beside its mirror image, through which a window of 640x480 slides without a seam."""

    def __init__(self, photo: np.ndarray) -> None:
        once = np.concatenate([photo, photo[:, ::-1]], axis=1)
        self._wide = np.ascontiguousarray(np.concatenate([once, photo], axis=1))
        self._period = once.shape[1]

    def frame(self, index: int) -> np.ndarray:
        """uint8 [480, 640, 3], RGB; a view."""
        left = index * _PAN_PIXELS % self._period
        return self._wide[:, left : left + WIDTH]


class StandInRobot(Node):
    """Publishes the cameras and joint states of one profile. ``camera_hz`` and ``joint_hz`` in messages a second."""

    def __init__(self, profile: Profile, camera_hz: float = CAMERA_HZ, joint_hz: float = JOINT_HZ) -> None:
        super().__init__("robot")
        photos = [np.asarray(PillowImage.open(path).convert("RGB")) for path in sorted(_PHOTOS.glob("*.jpg"))]
        self._frames = self._joints = 0
        self._cameras: list[Callable[[int], None]] = []
        for number, (name, camera) in enumerate(profile.cameras.items()):
            if camera.topic is not None:
                panorama = Panorama(photos[number % len(photos)])
                publish = self._jpeg_camera if camera.type == "compressed" else self._raw_camera
                self._cameras.append(publish(name, camera.topic, panorama))
        by_source: dict[str, list[StateDimension]] = defaultdict(list)
        for dim in profile.state.dims:
            by_source[profile.source_of(dim)].append(dim)
        self._sources = [
            (self.create_publisher(JointState, profile.state.sources[source].topic, qos.ROBOT), dims)
            for source, dims in by_source.items()
        ]
        self.create_timer(1.0 / camera_hz, self._publish_images)
        self.create_timer(1.0 / joint_hz, self._publish_joints)

    def _jpeg_camera(self, name: str, topic: str, panorama: Panorama) -> Callable[[int], None]:
        publisher = self.create_publisher(CompressedImage, topic, qos.ROBOT)

        def publish(index: int) -> None:
            message = CompressedImage(format="rgb8; jpeg compressed bgr8")
            message.header.frame_id = name
            message.header.stamp = self.get_clock().now().to_msg()
            jpeg = io.BytesIO()
            PillowImage.fromarray(panorama.frame(index)).save(jpeg, "JPEG", quality=85)
            message.data = _bytes(jpeg.getbuffer())
            publisher.publish(message)

        return publish

    def _raw_camera(self, name: str, topic: str, panorama: Panorama) -> Callable[[int], None]:
        publisher = self.create_publisher(Image, topic, qos.ROBOT)

        def publish(index: int) -> None:
            message = Image(height=HEIGHT, width=WIDTH, encoding="rgb8", is_bigendian=0, step=3 * WIDTH)
            message.header.frame_id = name
            message.header.stamp = self.get_clock().now().to_msg()
            message.data = _bytes(np.ascontiguousarray(panorama.frame(index)).data)
            publisher.publish(message)

        return publish

    def _publish_images(self) -> None:
        for publish in self._cameras:
            publish(self._frames)
        self._frames += 1

    def _publish_joints(self) -> None:
        stamp = self.get_clock().now().to_msg()
        phase = 2.0 * math.pi * self._joints / (JOINT_HZ * _SWING_S)
        self._joints += 1
        for publisher, dims in self._sources:
            message = JointState(name=[dim.joint_name for dim in dims])
            message.header.stamp = stamp
            positions = [_swing(dim, phase + 0.7 * number) for number, dim in enumerate(dims)]
            message.position = array("d", positions)
            message.velocity = array("d", [0.0] * len(dims))
            message.effort = array("d", [0.0] * len(dims))
            publisher.publish(message)


def _swing(dim: StateDimension, phase: float) -> float:
    """A value that a joint of this unit can have, as JointState carries it (radians for angles)."""
    if dim.range is not None:
        low, high = dim.range
    elif dim.unit in ("fraction", "normalized"):
        low, high = 0.0, 1.0
    elif dim.unit == "percent":
        low, high = 0.0, 100.0
    else:
        low, high = -0.5, 0.5
    return low + (high - low) * (0.5 + 0.4 * math.sin(phase))


def _bytes(buffer: memoryview) -> array[int]:
    # What rclpy takes without looking at every element.
    data = array("B")
    data.frombytes(buffer)
    return data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--profile", default="demo", help="robot profile whose topics are published (default: demo)")
    parser.add_argument("--camera-hz", type=float, default=CAMERA_HZ, help="frames per second (default: %(default)g)")
    parser.add_argument("--joint-hz", type=float, default=JOINT_HZ, help="joint states a second (default: %(default)g)")
    parser.add_argument("--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS")


def run(options: argparse.Namespace) -> int:
    """Publish until SIGINT or SIGTERM."""
    profile = load_profile(options.profile)
    if not any(camera.topic for camera in profile.cameras.values()):
        raise ConfigurationError("no_topics", f"profile {profile.name}: cameras with topics expected, and none has one")
    block_signals()
    apply_dds_defaults()
    rclpy.init(args=["pi05-ros", "--ros-args", *options.ros_args], signal_handler_options=SignalHandlerOptions.NO)
    robot = StandInRobot(profile, options.camera_hz, options.joint_hz)
    spinner = Spinner("robot")
    spinner.add(robot)
    spinner.start()
    robot.get_logger().info(f"{robot.get_fully_qualified_name()} publishes what profile {profile.name} subscribes to")
    wait_for_signal()
    spinner.stop()
    robot.destroy_node()
    rclpy.try_shutdown()
    return 0
