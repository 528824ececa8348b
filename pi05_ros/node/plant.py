"""``pi05-ros plant``: a simulated robot that obeys the chunk player, for rehearsals and benchmarks without hardware.

It listens on the topics of the profile's controllers, moves as a first-order system, and publishes joint states at
200 Hz and small pictures that change from frame to frame.
"""

from __future__ import annotations

import argparse
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import rclpy
from rclpy.clock import Clock, ClockType
from rclpy.context import Context
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from sensor_msgs.msg import Image, JointState

from pi05_ros.errors import ConfigurationError
from pi05_ros.node import qos
from pi05_ros.node.environment import apply_dds_defaults
from pi05_ros.node.player_messages import MESSAGE_TYPES
from pi05_ros.node.process import Spinner, block_signals, wait_for_signal
from pi05_ros.playback.limits import joint_names
from pi05_ros.playback.plant import FirstOrderPlant
from pi05_ros.profile import Controller, Profile, load_profile

RATE_HZ = 200.0
CAMERA_HZ = 30.0
_SIDE = 32  # pixels


class PlantNode(Node):
    """The robot of a profile with an ``output`` section.

    Only position controllers are simulated; joint_trajectory controllers interpolate linearly between points.

    Raises:
        ConfigurationError: ``config.plant``.
    """

    def __init__(self, profile: Profile, tau_s: float = 0.05, context: Context | None = None) -> None:
        super().__init__("plant", context=context)
        if profile.output is None or any(c.control != "position" for c in profile.output.controllers.values()):
            raise ConfigurationError(
                "plant", f"profile {profile.name}: an output section with position controllers expected"
            )
        self._names = [dim.joint_name for dim in profile.state.dims]
        self._plant = FirstOrderPlant(np.zeros(len(self._names)), tau_s)
        self._stepped = time.monotonic()
        self._frames = 0
        self._trajectory: tuple[np.ndarray, np.ndarray, list[int]] | None = None
        joints = joint_names(profile)
        for controller in profile.output.controllers.values():
            index = [self._names.index(joints[dim]) for dim in controller.dims]
            kind = MESSAGE_TYPES[controller.type]
            self.create_subscription(kind, controller.topic, self._taking(controller, index), qos.ROBOT)
        self._states = [
            (
                self.create_publisher(JointState, source.topic, qos.ROBOT),
                [i for i, dim in enumerate(profile.state.dims) if profile.source_of(dim) == name],
            )
            for name, source in profile.state.sources.items()
        ]
        self._cameras = [
            (name, self.create_publisher(Image, camera.topic, qos.ROBOT))
            for name, camera in profile.cameras.items()
            if camera.topic is not None
        ]
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(1.0 / RATE_HZ, self._step, clock=steady)
        self.create_timer(1.0 / CAMERA_HZ, self._look, clock=steady)

    def _taking(self, controller: Controller, index: list[int]) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            if controller.type == "joint_trajectory":
                since = [p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in message.points]
                times = np.array([0.0, *since]) + time.monotonic()
                rows = np.array([self._plant.command[index], *(p.positions for p in message.points)])
                self._trajectory = (times, rows, index)
            else:
                values = message.data if controller.type == "multi_array" else message.position
                self._plant.command[index] = values

        return take

    def _step(self) -> None:
        now = time.monotonic()
        if self._trajectory is not None:
            times, rows, index = self._trajectory
            for column, joint in enumerate(index):
                self._plant.command[joint] = np.interp(now, times, rows[:, column])
        position = self._plant.step(max(now - self._stepped, 1e-6))
        self._stepped = now
        stamp = self.get_clock().now().to_msg()
        for publisher, index in self._states:
            message = JointState(name=[self._names[i] for i in index])
            message.header.stamp = stamp
            message.position = array("d", position[index].tolist())
            message.velocity = array("d", self._plant.velocity[index].tolist())
            publisher.publish(message)

    def _look(self) -> None:
        self._frames += 1
        for name, publisher in self._cameras:
            message = Image(height=_SIDE, width=_SIDE, encoding="rgb8", step=3 * _SIDE)
            message.header.frame_id = name
            message.header.stamp = self.get_clock().now().to_msg()
            data = array("B", bytes(3 * _SIDE * _SIDE))
            data[self._frames % len(data)] = 255
            message.data = data
            publisher.publish(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument(
        "--profile", default="simulated_arm", help="profile with an output section (default: %(default)s)"
    )
    parser.add_argument("--tau", type=float, default=0.05, help="time constant in seconds (default: %(default)g)")
    parser.add_argument("--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS")


def run(options: argparse.Namespace) -> int:
    """Simulate until SIGINT or SIGTERM."""
    profile = load_profile(options.profile)
    if not options.tau > 0.0:
        raise ConfigurationError("plant", f"--tau: seconds above 0 expected, got {options.tau}")
    block_signals()
    apply_dds_defaults()
    arguments = ["pi05-ros plant", "--ros-args", *options.ros_args]
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    plant = PlantNode(profile, options.tau)
    spinner = Spinner("plant")
    spinner.add(plant)
    spinner.start()
    plant.get_logger().info(f"{plant.get_fully_qualified_name()} simulates the robot of profile {profile.name}")
    wait_for_signal()
    spinner.stop()
    plant.destroy_node()
    rclpy.try_shutdown()
    return 0
