"""The chunk player's messages: chunks in, controllers' commands, previews and status out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from builtin_interfaces.msg import Duration
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from pi05_ros.msg import ActionChunk as ActionChunkMessage
from pi05_ros.node.outputs import time_message
from pi05_ros.playback.gate import OfferedChunk
from pi05_ros.playback.plan import NS
from pi05_ros.profile import Controller


def offered_chunk(message: ActionChunkMessage) -> OfferedChunk:
    """The chunk as it came, unchecked."""
    return OfferedChunk(
        stamp_ns=_ns(message.header.stamp),
        step_ns=_ns(message.step_time),
        names=message.names,
        units=message.units,
        control_modes=message.control_modes,
        horizon=message.horizon,
        action_dim=message.action_dim,
        actions=np.frombuffer(message.actions, dtype=np.float32),
        executed_steps=message.executed_steps,
        prompt=message.prompt,
        profile=message.profile,
        index=message.chunk_index,
        input_stamps_ns=dict(zip(message.input_names, map(_ns, message.input_stamps), strict=False)),
    )


def trajectory_message(joints: Sequence[str], times_ns: np.ndarray, rows: np.ndarray, now_ns: int) -> JointTrajectory:
    """``rows`` [N, joints] at ``times_ns``, counted from ``now_ns``."""
    message = JointTrajectory(joint_names=list(joints))
    message.header.stamp = time_message(now_ns)
    for at, row in zip(times_ns.tolist(), rows, strict=True):
        since = at - now_ns
        message.points.append(
            JointTrajectoryPoint(
                positions=array("d", row.tolist()),
                time_from_start=Duration(sec=since // NS, nanosec=since % NS),
            )
        )
    return message


def joint_command(joints: Sequence[str], values: np.ndarray, control: str, now_ns: int) -> JointState:
    """``values`` [joints] as positions or velocities."""
    message = JointState(name=list(joints))
    message.header.stamp = time_message(now_ns)
    numbers = array("d", values.tolist())
    if control == "velocity":
        message.velocity = numbers
    else:
        message.position = numbers
    return message


def controller_command(
    controller: Controller, joints: Sequence[str], values: np.ndarray, now_ns: int
) -> Float64MultiArray | JointState:
    """What a controller that is commanded every period takes; ``values`` in its own order."""
    if controller.type == "multi_array":
        return Float64MultiArray(data=array("d", values.tolist()))
    return joint_command(joints, values, controller.control, now_ns)


MESSAGE_TYPES = {"joint_trajectory": JointTrajectory, "multi_array": Float64MultiArray, "joint_state": JointState}


def _ns(time: object) -> int:
    return int(time.sec) * NS + int(time.nanosec)  # type: ignore[attr-defined]
