"""``pi05-ros rehearse-topics``: policy, player and plant as three processes over topics; figures of what they do.

With ``--stops`` it measures how long a stop takes instead.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from pi05_ros.errors import RequestError
from pi05_ros.msg import ActionChunk as ActionChunkMessage
from pi05_ros.msg import PlayerStatus
from pi05_ros.node import qos
from pi05_ros.node.demo import Child
from pi05_ros.node.environment import isolated_environment
from pi05_ros.node.process import Spinner, raise_priority
from pi05_ros.playback.figures import motion_figures
from pi05_ros.playback.flow_target import paths
from pi05_ros.playback.handover import HANDOVERS
from pi05_ros.profile import load_profile
from pi05_ros.tools.rehearse import DELAYS_MS, HEADER, row

_PROFILE = "simulated_arm"
_DEEP = QoSProfile(depth=1000, reliability=ReliabilityPolicy.RELIABLE)
_TIMEOUT_S = 30.0


class Observer:
    """Records what the three processes say and calls the player's services."""

    def __init__(self) -> None:
        rclpy.init(args=[])
        self._node = rclpy.create_node("rehearsal")
        self.status: PlayerStatus | None = None
        self.commands: list[tuple[float, JointState]] = []
        self.states: list[JointState] = []
        self.chunks: list[ActionChunkMessage] = []
        self.stop = self._node.create_publisher(Bool, "/player/stop", qos.COMMAND)
        self._node.create_subscription(PlayerStatus, "/player/status", self._on_status, qos.STATUS)
        self._node.create_subscription(
            JointState, "/player/command", lambda m: self.commands.append((time.monotonic(), m)), _DEEP
        )
        self._node.create_subscription(JointState, "/joint_states", self.states.append, _DEEP)
        self._node.create_subscription(ActionChunkMessage, "/policy/chunk", self.chunks.append, _DEEP)
        self._services: dict[str, Any] = {
            name: self._node.create_client(Trigger, f"/player/{name}") for name in ("start", "reset")
        }
        self._spinner = Spinner("rehearsal")
        self._spinner.add(self._node)
        self._spinner.start()

    def _on_status(self, message: PlayerStatus) -> None:
        self.status = message

    def wait(self, fits: Callable[[PlayerStatus], bool], children: Sequence[Child]) -> PlayerStatus:
        deadline = time.monotonic() + _TIMEOUT_S
        while self.status is None or not fits(self.status):
            for child in children:
                child.check()
            if time.monotonic() > deadline:
                logs = "\n".join(child.tail() for child in children)
                raise RequestError("timeout", f"last status of the player: {self.status}\n{logs}")
            time.sleep(0.005)
        return self.status

    def call(self, name: str) -> str:
        """The service's refusal, or an empty string."""
        future = self._services[name].call_async(Trigger.Request())
        deadline = time.monotonic() + _TIMEOUT_S
        while not future.done():
            if time.monotonic() > deadline:
                raise RequestError("timeout", f"/player/{name} did not answer")
            time.sleep(0.002)
        answer = future.result()
        return "" if answer.success else str(answer.message)

    def begin(self, children: Sequence[Child]) -> None:
        """Start once policy and plant are there, again while the target is too far away, and wait for the motion."""
        self.wait(lambda s: s.lifecycle == "active" and s.feedback_age >= 0.0, children)
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            refused = self.call("start")
            if refused:
                raise RequestError("start", refused)
            begun = self.wait(lambda s: s.state == "running" or s.reason.startswith("start.distance"), children)
            if begun.state == "running":
                return
            if time.monotonic() > deadline:
                raise RequestError("start", begun.reason)
            time.sleep(0.3)

    def close(self) -> None:
        self._spinner.stop()
        self._node.destroy_node()
        rclpy.try_shutdown()


def processes(
    handover: str, delay_ms: tuple[float, float], options: argparse.Namespace, environment: dict[str, str], logs: Path
) -> list[Child]:
    rtc = ["-p", f"rtc:={'guided' if handover == 'rtc' else 'none'}"]
    policy = ["analytic-policy", "--delay-ms", *map(str, delay_ms), *(["--busy"] if options.busy else [])]
    player = ["player", "--live", "--profile", _PROFILE, "--ros-args", "-p", f"handover:={handover}"]
    player += ["-p", f"realtime_priority:={50 if options.realtime else 0}"]
    return [
        Child("plant", ["plant", "--profile", _PROFILE], environment, logs),
        Child("policy", [*policy, "--ros-args", *rtc], environment, logs),
        Child("player", [*player, "-p", "ramp_s:=0.5", "-p", "observation_timeout_s:=3.0"], environment, logs),
    ]


def measure(observer: Observer, seconds: float) -> tuple[Any, PlayerStatus]:
    """Figures of ``seconds`` of motion from now on, and the player's status at the end."""
    profile = load_profile(_PROFILE)
    moving = [dim.name for dim in profile.action.dims if dim.control == "position"]
    assert profile.output is not None
    observer.commands.clear()
    observer.states.clear()
    observer.chunks.clear()
    before = observer.status
    time.sleep(seconds)
    commands, states, chunks = list(observer.commands), list(observer.states), list(observer.chunks)
    after = observer.status
    assert before is not None and after is not None

    def columns(message: JointState) -> list[float]:
        values = dict(zip(message.name, message.position, strict=True))
        return [values[name] for name in moving]

    def times(messages: Sequence[JointState]) -> np.ndarray:
        return np.array([message.header.stamp.sec + message.header.stamp.nanosec * 1e-9 for message in messages])

    at = times(states)
    figures = motion_figures(
        times([message for _, message in commands]),
        np.array([columns(message) for _, message in commands]),
        1.0 / profile.output.rate_hz,
        np.array([columns(state) for state in states]),
        paths(at, len(moving), 2, 0.3),
        [
            (
                np.array(chunk.actions, dtype=np.float64).reshape(chunk.horizon, chunk.action_dim)[:, : len(moving)],
                chunk.step_time.sec + chunk.step_time.nanosec * 1e-9,
            )
            for chunk in chunks
        ],
        after.late - before.late,
        after.late_time - before.late_time,
    )
    return figures, after


def stop_latencies(observer: Observer, children: Sequence[Child], count: int) -> np.ndarray:
    """Seconds from publishing True on ~/stop to the arrival of the first command that holds, ``count`` times."""
    latencies: list[float] = []
    rng = np.random.default_rng(0)
    while len(latencies) < count:
        observer.begin(children)
        time.sleep(float(rng.uniform(0.1, 0.6)))
        asked = time.monotonic()
        observer.stop.publish(Bool(data=True))
        observer.wait(lambda s: s.state == "stopped", children)
        time.sleep(0.05)
        recent = observer.commands[-200:]
        rows = np.array([message.position for _, message in recent])
        moved = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1))
        latencies.append(recent[int(moved[-1]) + 2][0] - asked)
        observer.stop.publish(Bool(data=False))
        while observer.call("reset"):
            time.sleep(0.01)
        time.sleep(0.1)
    return np.array(latencies)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run (default: %(default)g)")
    parser.add_argument("--handover", choices=HANDOVERS, help="only this one")
    parser.add_argument("--stops", type=int, metavar="N", help="measure the latency of N stops instead")
    parser.add_argument("--realtime", action="store_true", help="the player with realtime_priority 50")
    parser.add_argument("--busy", action="store_true", help="the policy computes all the time instead of sleeping")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    environment = isolated_environment()
    logs = Path(tempfile.mkdtemp(prefix="pi05_ros-rehearsal-"))
    environment.setdefault("ROS_LOG_DIR", str(logs))
    os.environ.update(environment)
    observer = Observer()
    if options.realtime:
        raise_priority(51)  # what measures must not wait where what is measured does not
    try:
        if options.stops:
            children = processes(options.handover or "blend", (200.0, 200.0), options, environment, logs)
            try:
                milliseconds = stop_latencies(observer, children, options.stops) * 1e3
                jitter = 0.0 if observer.status is None else observer.status.jitter_p99 * 1e3
            finally:
                end(children)
            p50, p99 = np.percentile(milliseconds, (50, 99))
            print(f"{options.stops} stops: p50 {p50:.2f} ms, p99 {p99:.2f} ms, largest {milliseconds.max():.2f} ms")
            print(f"control periods: 99 % at most {jitter:.2f} ms late")
            return 0
        print(HEADER + " control jitter p99 ms |")
        print("|" + "---|" * 9)
        for handover in [options.handover] if options.handover else HANDOVERS:
            for delay_ms in DELAYS_MS:
                observer.status = None
                children = processes(handover, delay_ms, options, environment, logs)
                try:
                    observer.begin(children)
                    time.sleep(1.0)
                    figures, status = measure(observer, options.seconds)
                finally:
                    end(children)
                print(f"{row(handover, delay_ms, figures)} {status.jitter_p99 * 1e3:.2f} |", flush=True)
    finally:
        observer.close()
    return 0


def end(children: Sequence[Child]) -> None:
    for child in reversed(children):
        child.end()
