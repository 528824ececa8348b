"""The chunk player: a lifecycle node that turns action chunks into controllers' commands.

It is no functional safety: its stop is software on a computer that may hang. See docs/bringup.md.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.clock import Clock, ClockType
from rclpy.context import Context
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool, Empty
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory

from pi05_ros.errors import ConfigurationError, Pi05Error
from pi05_ros.msg import ActionChunk as ActionChunkMessage
from pi05_ros.msg import PlayerStatus, PolicyStatus
from pi05_ros.node import parameters, qos
from pi05_ros.node.inference import describe
from pi05_ros.node.outputs import sentence, time_message
from pi05_ros.node.player_messages import (
    MESSAGE_TYPES,
    controller_command,
    joint_command,
    offered_chunk,
    trajectory_message,
)
from pi05_ros.node.player_parameters import SPECS, NodeSettings, node_settings, player_settings
from pi05_ros.node.process import raise_priority
from pi05_ros.playback.limits import Limits, joint_names, read_urdf
from pi05_ros.playback.player import Player
from pi05_ros.playback.settings import Command
from pi05_ros.profile import Controller, Profile, load_profile

_STATUS_TICK_S = 0.1
_STATUS_PERIOD_S = 0.5
_JITTER_WINDOW = 1000
_CLOCKS_APART_S = 2e-4
_TRIGGERS = ("configure", "activate", "deactivate", "cleanup", "shutdown")


@dataclass(frozen=True)
class _Output:
    """One controller with its publisher: columns of the action that it takes, and its names for them."""

    controller: Controller
    columns: np.ndarray
    joints: tuple[str, ...]
    publisher: Any


class ChunkPlayer(LifecycleNode):
    """Plays the policy's chunks on a robot.

    Like the policy node it consists of two rclpy nodes for two single-threaded executors: this one (lifecycle,
    services, status) and ``inputs_node`` (chunks, feedback, stop). The control loop has a thread of its own, timed by
    the monotonic clock; a stop wakes it at once.

    Raises:
        ConfigurationError: a parameter is unknown or has a value outside its range.
    """

    def __init__(
        self,
        *,
        name: str = "player",
        namespace: str | None = None,
        parameter_overrides: Sequence[Parameter] = (),
        cli_args: list[str] | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__(
            name,
            namespace=namespace,
            parameter_overrides=list(parameter_overrides),
            cli_args=cli_args,
            context=context,
        )
        self._lock = threading.Lock()  # around every call of the player; held for less than a millisecond
        self._transition_lock = threading.Lock()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._player: Player | None = None
        self._settings: NodeSettings | None = None
        self._outputs: list[_Output] = []
        self._inputs: list[Any] = []
        self._request: Any = None
        self._policy_reset: Any = None
        self._transition_error = ""
        self._stop_pressed = False
        self._stop_heard: float | None = None
        self._late_by: deque[float] = deque(maxlen=_JITTER_WINDOW)
        try:
            parameters.declare(self, self._parameter_overrides, SPECS)
        except Pi05Error:
            self.destroy_node()
            raise
        self.add_on_set_parameters_callback(lambda changed: parameters.check(changed, self.state, SPECS))
        self.inputs_node = Node(
            f"{self.get_name()}_inputs",
            namespace=self.get_namespace(),
            use_global_arguments=False,
            start_parameter_services=False,
            parameter_overrides=[self.get_parameter("use_sim_time")],
            context=context,
        )
        self._status_publisher = self.create_publisher(PlayerStatus, "~/status", qos.STATUS)
        self._command_publisher = self.create_publisher(JointState, "~/command", qos.ROBOT)
        self._preview_publisher = self.create_publisher(JointTrajectory, "~/preview", qos.CHUNK)
        self._diagnostics_publisher = self.create_publisher(DiagnosticArray, "/diagnostics", qos.DIAGNOSTICS)
        for service, answer in (("start", self._start), ("stop", self._stop), ("reset", self._reset)):
            self.create_service(Trigger, f"~/{service}", self._answering(answer))
        # Always there: a stop that is asked for while the node is inactive must not be lost.
        stop_topic = self.resolve_topic_name("~/stop")
        self.inputs_node.create_subscription(Bool, stop_topic, self._on_stop, qos.COMMAND)
        self._published: tuple[object, ...] = ()
        self._published_at = 0.0
        self.create_timer(_STATUS_TICK_S, self._on_status_tick, clock=Clock(clock_type=ClockType.STEADY_TIME))

    @property
    def state(self) -> str:
        """Label of the lifecycle state."""
        return str(self._state_machine.current_state[1])

    def change_state(self, transition: str) -> bool:
        """Run a transition by label; True when it succeeded."""
        if transition not in _TRIGGERS:
            raise ValueError(f"transition: one of {_TRIGGERS} expected, got {transition!r}")
        with self._transition_lock:
            return bool(getattr(self, f"trigger_{transition}")() == TransitionCallbackReturn.SUCCESS)

    def shutdown(self) -> None:
        """Hold the robot and give everything back, from whatever state; waits for a running transition."""
        with self._transition_lock:
            if self.state != "finalized":
                try:
                    self.trigger_shutdown()
                except Exception:
                    self.get_logger().error(f"shutdown failed:\n{traceback.format_exc()}")
            self._publish_status()

    def destroy(self) -> None:
        """Destroy both nodes; no executor may be spinning them."""
        self.inputs_node.destroy_node()
        self.destroy_node()

    # Transitions

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("configure", self._configure)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("activate", self._activate)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("deactivate", self._end_control)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("cleanup", self._teardown)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("shutdown", self._teardown)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("error processing", self._teardown)

    def _guarded(self, name: str, step: Callable[[], None]) -> TransitionCallbackReturn:
        """Run one step; rclpy would swallow its exception."""
        try:
            step()
        except Exception as error:
            self._transition_error = sentence(describe(error))
            text = self._transition_error
            if not isinstance(error, Pi05Error):
                text += f"\n{traceback.format_exc()}"
            self.get_logger().error(f"{name} failed: {text}")
            if name == "configure":
                self._teardown()
                return TransitionCallbackReturn.FAILURE
            return TransitionCallbackReturn.FAILURE if name == "activate" else TransitionCallbackReturn.ERROR
        self._transition_error = ""
        return TransitionCallbackReturn.SUCCESS

    def _configure(self) -> None:
        settings = node_settings(self)
        profile = load_profile(settings.profile)
        limits = Limits.of_profile(profile, read_urdf(settings.urdf) if settings.urdf else None)
        steady = not self.get_parameter("use_sim_time").value
        player = Player(profile, limits, player_settings(self, steady))
        unlimited = limits.missing(profile)
        if unlimited and not settings.dry_run and not settings.allow_unlimited:
            raise ConfigurationError(
                "unlimited",
                f"profile {profile.name}: position and velocity limits expected for {unlimited}; give limits and "
                "max_velocity in the profile, a urdf, or say allow_unlimited",
            )
        self._settings, self._player = settings, player
        self._outputs = self._open_outputs(profile, settings.dry_run)
        self._listen(profile, settings)
        if settings.dry_run:
            self.get_logger().info("dry run: nothing is sent to the controllers; ~/command shows what would be")
        else:
            topics = [output.publisher.topic_name for output in self._outputs]
            self.get_logger().warning(f"not a dry run: after ~/start this node commands {topics}")

    def _open_outputs(self, profile: Profile, dry_run: bool) -> list[_Output]:
        assert profile.output is not None
        if dry_run:
            return []  # without a publisher nothing can be sent
        columns = {dim.name: column for column, dim in enumerate(profile.action.dims)}
        joints = joint_names(profile)
        return [
            _Output(
                controller,
                np.array([columns[dim] for dim in controller.dims]),
                tuple(joints[dim] for dim in controller.dims),
                self.create_publisher(MESSAGE_TYPES[controller.type], controller.topic, qos.ROBOT),
            )
            for controller in profile.output.controllers.values()
        ]

    def _listen(self, profile: Profile, settings: NodeSettings) -> None:
        def topic(name: str) -> str:
            return str(self.resolve_topic_name(name))

        node, policy = self.inputs_node, settings.policy
        self._inputs = [
            node.create_subscription(ActionChunkMessage, topic(f"{policy}/chunk"), self._on_chunk, qos.CHUNK),
            node.create_subscription(PolicyStatus, topic(f"{policy}/status"), self._on_policy_status, qos.STATUS),
            *(
                node.create_subscription(JointState, topic(source.topic), self._feedback_callback(name), qos.JOINTS)
                for name, source in profile.state.sources.items()
            ),
        ]
        self._policy_reset = self.create_publisher(Empty, f"{policy}/reset", qos.COMMAND)
        if settings.request_chunks:
            self._request = self.create_publisher(Empty, f"{policy}/request", qos.COMMAND)

    def _activate(self) -> None:
        assert self._player is not None
        with self._lock:
            self._player.reset()
            self._player.counts.stops = 0
            if self._stop_pressed:
                self._player.stop("stop.requested", "the stop topic says stop", time.monotonic())
        self._stop_heard = None
        self._ending.clear()
        self._late_by.clear()
        self._thread = threading.Thread(target=self._control, name="control", daemon=True)
        self._thread.start()
        if self._settings is not None and self._settings.realtime_priority > 0:
            try:
                raise_priority(self._settings.realtime_priority)
            except Pi05Error:
                self._end_control()
                raise

    def _end_control(self) -> None:
        """Hold the robot with a last command and end the control loop."""
        thread, player = self._thread, self._player
        if thread is None or player is None:
            return
        with self._lock:
            player.stop("player.deactivated", "the player was deactivated", time.monotonic())
        self._ending.set()
        self._wake.set()
        thread.join(1.0)
        self._thread = None

    def _teardown(self) -> None:
        self._end_control()
        for subscription in self._inputs:
            self.inputs_node.destroy_subscription(subscription)
        for output in self._outputs:
            self.destroy_publisher(output.publisher)
        for publisher in (self._request, self._policy_reset):
            if publisher is not None:
                self.destroy_publisher(publisher)
        self._inputs, self._outputs, self._request, self._policy_reset = [], [], None, None
        self._player = self._settings = None

    # What comes in

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _both_clocks(self) -> tuple[int, float]:
        """The node's and the monotonic clock at the same moment, as far as the scheduler lets them be read so."""
        for _ in range(3):
            now = time.monotonic()
            now_ns = self._now_ns()
            if time.monotonic() - now < _CLOCKS_APART_S:
                break
        return now_ns, now

    def _on_chunk(self, message: ActionChunkMessage) -> None:
        offered = offered_chunk(message)
        with self._lock:
            if self._player is None:
                return
            refused = self._player.offer(offered, self._now_ns(), time.monotonic())
        if refused is not None and refused[0] != "chunk.unwanted":
            self.get_logger().warning(f"chunk refused: {sentence(refused)}", throttle_duration_sec=1.0)

    def _on_policy_status(self, message: PolicyStatus) -> None:
        code, _, said = message.reason.partition(": ")
        reason = (code, said) if code else None
        stamp_ns = message.header.stamp.sec * 10**9 + message.header.stamp.nanosec
        with self._lock:
            if self._player is not None:
                now = time.monotonic()
                self._player.policy_says(message.state, reason, message.prompt, stamp_ns, self._now_ns(), now)

    def _feedback_callback(self, source: str) -> Callable[[JointState], None]:
        def take(message: JointState) -> None:
            positions = dict(zip(message.name, message.position, strict=False))
            with self._lock:
                if self._player is not None:
                    self._player.feedback(source, positions, time.monotonic())

        return take

    def _on_stop(self, message: Bool) -> None:
        self._stop_heard = time.monotonic()
        self._stop_pressed = bool(message.data)
        if message.data:
            self._stop_now("stop.requested", "the stop topic says stop")

    def _stop_now(self, code: str, why: str) -> None:
        with self._lock:
            if self._player is not None:
                self._player.stop(code, why, time.monotonic())
        self._wake.set()

    # Services

    def _answering(
        self, answer: Callable[[Player], tuple[bool, str]]
    ) -> Callable[[Trigger.Request, Trigger.Response], Trigger.Response]:
        def serve(_: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
            player = self._player
            if player is None or self._thread is None:
                response.success, response.message = False, f"the player is {self.state}; configure and activate first"
            else:
                response.success, response.message = answer(player)
            return response

        return serve

    def _start(self, player: Player) -> tuple[bool, str]:
        assert self._settings is not None
        with self._lock:
            refused = player.start(time.monotonic())
        if refused is not None:
            return False, sentence(refused)
        self._policy_reset.publish(Empty())  # no chunk continues one of an earlier episode
        return True, "waiting for the first chunk" + (" (dry run)" if self._settings.dry_run else "")

    def _stop(self, _: Player) -> tuple[bool, str]:
        self._stop_now("stop.requested", "the service was called")
        return True, "stopped until reset"

    def _reset(self, player: Player) -> tuple[bool, str]:
        if self._stop_pressed:
            return False, "stop.pressed: the stop topic still says stop; publish False there first"
        with self._lock:
            # From a motion, too, the robot is held before everything is forgotten.
            if player.state in ("ramping", "running", "late"):
                return False, f"reset.moving: the robot moves ({player.state}); stop first"
            player.reset()
        return True, "idle; start begins the next episode"

    # The control loop

    def _control(self) -> None:
        player = self._player
        assert player is not None
        due = time.monotonic() + player.period_s
        revision = player.revision
        while not self._ending.is_set():
            woken = self._wake.wait(max(due - time.monotonic(), 0.0))
            self._wake.clear()
            try:
                revision = self._period(player, revision)
            except Exception as error:
                self.get_logger().error(f"control failed: {traceback.format_exc()}", throttle_duration_sec=1.0)
                with self._lock:
                    player.stop("player.error", f"{type(error).__name__}: {error}", time.monotonic())
            now = time.monotonic()
            if not woken:
                self._late_by.append(now - due)
            if now >= due:
                # Periods that were missed are not made up for.
                due += player.period_s * (1 + (now - due) // player.period_s)
        self._period(player, revision)

    def _period(self, player: Player, revision: int) -> int:
        assert self._settings is not None
        now_ns, now = self._both_clocks()
        heartbeat_s = self._settings.stop_heartbeat_s
        with self._lock:
            heard = self._stop_heard
            if heartbeat_s > 0.0 and player.state != "idle" and (heard is None or now - heard > heartbeat_s):
                player.stop("stop.silent", f"the stop topic was silent for more than {heartbeat_s:g} s", now)
            command = player.tick(now_ns, now)
            asked = self._request is not None and player.request_due(now_ns, now)
            changed = player.revision != revision
            revision = player.revision
            ahead = player.trajectory(now_ns) if changed and command.send else None
        if command.send:
            self._send(command, now_ns)
        if ahead is not None:
            self._send_trajectories(*ahead, now_ns)
        if asked:
            self._request.publish(Empty())
        return revision

    def _send(self, command: Command, now_ns: int) -> None:
        assert self._player is not None
        for output in self._outputs:
            if output.controller.type != "joint_trajectory":
                values = command.values[output.columns]
                output.publisher.publish(controller_command(output.controller, output.joints, values, now_ns))
        self._command_publisher.publish(joint_command(self._player.names, command.values, "position", now_ns))

    def _send_trajectories(self, times_ns: np.ndarray, rows: np.ndarray, now_ns: int) -> None:
        assert self._player is not None
        for output in self._outputs:
            if output.controller.type == "joint_trajectory":
                output.publisher.publish(trajectory_message(output.joints, times_ns, rows[:, output.columns], now_ns))
        self._preview_publisher.publish(trajectory_message(self._player.names, times_ns, rows, now_ns))

    # Status

    def _on_status_tick(self) -> None:
        with self._lock:
            player = self._player
            changes = (self.state, self._transition_error, player and (player.state, player.reason, player.prompt))
        if changes != self._published or time.monotonic() - self._published_at > _STATUS_PERIOD_S - _STATUS_TICK_S / 2:
            self._published = changes
            self._publish_status()

    def _publish_status(self) -> None:
        self._published_at = time.monotonic()
        status = self._status()
        self._status_publisher.publish(status)
        level = DiagnosticStatus.OK
        if status.state == "stopped" or (self._transition_error and self.state != "active"):
            level = DiagnosticStatus.ERROR
        elif status.reason and self.state == "active":
            level = DiagnosticStatus.WARN
        name = str(self.get_fully_qualified_name()).lstrip("/")
        values = {
            "dry run": str(status.dry_run),
            "accepted": str(status.accepted),
            "refused": str(sum(status.refused_counts)),
            "clamped": str(status.clamped),
            "late": f"{status.late} times, {status.late_time:.2f} s",
            "delay (s)": f"{status.delay:.3f}",
            "last refusal": status.last_refusal,
        }
        pairs = [KeyValue(key=key, value=value) for key, value in values.items()]
        entry = DiagnosticStatus(level=level, name=f"{name}: motion", hardware_id=name, values=pairs)
        entry.message = status.reason or status.state or status.lifecycle
        message = DiagnosticArray(status=[entry])
        message.header.stamp = status.header.stamp
        self._diagnostics_publisher.publish(message)

    def _status(self) -> PlayerStatus:
        now_ns, now = self._now_ns(), time.monotonic()
        message = PlayerStatus(lifecycle=self.state, reason=self._transition_error, delay=-1.0)
        message.header.stamp = time_message(now_ns)
        with self._lock:
            player, settings = self._player, self._settings
            if player is None or settings is None:
                return message
            counts = player.counts
            message.dry_run = settings.dry_run
            message.handover = player.settings.handover
            message.when_late = player.settings.when_late
            message.state = player.state
            message.reason = self._transition_error or sentence(player.reason)
            message.prompt = player.prompt
            message.commands, message.accepted = counts.commands, counts.accepted
            message.refused_codes = list(counts.refused)
            message.refused_counts = list(counts.refused.values())
            message.clamped = counts.clamped
            message.clamped_names = list(counts.clamped_by_dim)
            message.clamped_counts = list(counts.clamped_by_dim.values())
            message.late, message.late_time = counts.late, counts.late_s
            message.stops, message.requests = counts.stops, counts.requests
            message.remaining = player.remaining_s(now_ns)
            message.observation_age = player.observation_age_s(now_ns)
            message.feedback_age = player.feedback_age_s(now)
            message.delay = -1.0 if player.delay.seconds is None else player.delay.seconds
            message.last_refusal = sentence(player.last_refusal)
        late_by = list(self._late_by)
        message.jitter_p99 = float(np.percentile(late_by, 99)) if late_by else 0.0
        return message


def main() -> int:
    """Executable of the package: ROS arguments only; launch or `ros2 lifecycle` drives the lifecycle."""
    from pi05_ros.node.process import run_process

    return run_process(lambda: [ChunkPlayer()], sys.argv)


if __name__ == "__main__":
    sys.exit(main())
