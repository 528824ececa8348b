"""The lifecycle node: camera and joint topics in, action chunks out."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.srv import ChangeState
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.context import Context
from rclpy.lifecycle import LifecycleNodeMixin, LifecycleState, TransitionCallbackReturn
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.serialization import serialize_message
from rclpy.task import Future
from std_msgs.msg import Empty, String

from pi05_ros.engine import scheduler
from pi05_ros.errors import EngineError, Pi05Error
from pi05_ros.msg import ActionChunk as ActionChunkMessage
from pi05_ros.msg import PolicyStatus
from pi05_ros.node import doors, parameters, qos
from pi05_ros.node.inference import Answer, Figures, Inference, Reason, describe
from pi05_ros.node.inputs import Inputs
from pi05_ros.node.outputs import (
    Status,
    chunk_message,
    diagnostics_message,
    sentence,
    status_message,
    stream_message,
)
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import AnswersObservations
from pi05_ros.profile import Profile, load_profile
from pi05_ros.recording.recorder import Recorder
from pi05_ros.srv import SetPrompt

if TYPE_CHECKING:
    from pi05_ros.policy import Policy
    from pi05_ros.serving.app import Server

_STATUS_TICK_S = 0.1
_STATUS_PERIOD_S = 1.0
# How long a clean-up waits for a model that computes; then the node ends finalized rather than pull its weights away.
_INFERENCE_END_S = 30.0
_SAME_ERROR_S = 5.0  # the log repeats an error that goes on no more often
_TRIGGERS = ("configure", "activate", "deactivate", "cleanup", "shutdown")


class LoadedPolicy(AnswersObservations, Protocol):
    """What the node needs of `pi05_ros.policy.Policy`."""

    checkpoint: Any
    contract: Any

    def capture_pending(self) -> bool: ...

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


PolicyFactory = Callable[..., LoadedPolicy]


def _load_policy(*arguments: Any, **options: Any) -> LoadedPolicy:
    # Imported here: torch takes seconds, in which the node must already be up and answer signals.
    from pi05_ros.policy import load_policy

    return load_policy(*arguments, **options)


def _return_memory() -> None:
    """Give freed memory back to the system: glibc keeps it, in an arena for each thread that ever loaded weights."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PolicyNode(LifecycleNodeMixin, Node):
    """Pi0.5 as a managed node.

    Two rclpy nodes share the work, so that two single-threaded executors in two threads can spin them: this one
    (lifecycle, parameters, status) and `inputs_node` (subscriptions). Topics are resolved by this node, so namespace,
    remapping and parameters are those of this node alone.

    A transition runs in a thread of its own while its service call waits as a coroutine: a configure of half a minute
    leaves status, diagnostics, parameters and the other lifecycle services answering.

    Args:
        load_policy: called like `pi05_ros.load_policy`; that function unless given.
        parameter_overrides: values that win over the command line's.
        namespace, name, cli_args, context: as for any rclpy node.

    Raises:
        ConfigurationError: a parameter is unknown or has a value outside its range.
    """

    def __init__(
        self,
        load_policy: PolicyFactory | None = None,
        *,
        name: str = "policy",
        namespace: str | None = None,
        parameter_overrides: Sequence[Parameter] = (),
        cli_args: list[str] | None = None,
        context: Context | None = None,
    ) -> None:
        Node.__init__(
            self,
            name,
            namespace=namespace,
            parameter_overrides=list(parameter_overrides),
            cli_args=cli_args,
            context=context,
        )
        # Reentrant: a waiting transition must not lock out get_state.
        LifecycleNodeMixin.__init__(self, callback_group=ReentrantCallbackGroup())
        self._load_policy = load_policy or _load_policy
        self._last_state = ""  # of a destroyed node, whose state machine must not be asked any more
        self._transition_lock = threading.Lock()
        self._transition_since: float | None = None
        self._transition_error: Reason | None = None
        self._progress = ""
        self._last_error: tuple[str, int] = ("", 0)
        self._logged: tuple[str, float] = ("", 0.0)
        self._policy: LoadedPolicy | None = None
        self._profile: Profile | None = None
        self._inputs: Inputs | None = None
        self._inference: Inference | None = None
        self._recorder: Recorder | None = None
        self._scheduler: scheduler.Scheduler | None = None
        self._server: Server | None = None
        try:
            parameters.declare(self, self._parameter_overrides)
        except Pi05Error:
            self.destroy_node()
            raise
        self._settings = parameters.run_settings(self)
        self.add_on_set_parameters_callback(self._check_parameters)
        self.add_post_set_parameters_callback(self._parameters_changed)

        self.inputs_node = Node(
            f"{self.get_name()}_inputs",
            namespace=self.get_namespace(),
            use_global_arguments=False,
            start_parameter_services=False,
            parameter_overrides=[self.get_parameter("use_sim_time")],
            context=context,
        )
        self._chunk_publisher = self.create_publisher(ActionChunkMessage, "~/chunk", qos.CHUNK)
        self._status_publisher = self.create_publisher(PolicyStatus, "~/status", qos.STATUS)
        self._diagnostics_publisher = self.create_publisher(DiagnosticArray, "/diagnostics", qos.DIAGNOSTICS)
        self.create_subscription(Empty, "~/request", self._on_request, qos.COMMAND)
        self.create_subscription(Empty, "~/reset", self._on_reset, qos.COMMAND)
        self.create_subscription(String, "~/prompt", self._on_prompt, qos.COMMAND)
        self.create_service(SetPrompt, "~/set_prompt", self._on_set_prompt)
        self._serve_transitions_aside()
        self._published: tuple[object, ...] = ()
        self._published_at = 0.0
        # Steady: a paused or jumping simulation clock must not silence the status.
        self.create_timer(_STATUS_TICK_S, self._on_status_tick, clock=Clock(clock_type=ClockType.STEADY_TIME))

    @property
    def state(self) -> str:
        """Label of the lifecycle state: unconfigured, configuring, inactive, ..."""
        return self._last_state or str(self._state_machine.current_state[1])

    def change_state(self, transition: str) -> bool:
        """Run a transition by label (configure, activate, deactivate, cleanup, shutdown); True when it succeeded.

        Blocks until it is done: never call it from a callback of this node.
        """
        if transition not in _TRIGGERS:
            raise ValueError(f"transition: one of {_TRIGGERS} expected, got {transition!r}")
        trigger = getattr(self, f"trigger_{transition}")
        return self._alone(transition, lambda: trigger() == TransitionCallbackReturn.SUCCESS)

    def shutdown(self) -> None:
        """Give everything back, from whatever state, and say so on the status topic; waits for a running transition."""
        with self._transition_lock:
            if self.state != "finalized":
                try:
                    self.trigger_shutdown()
                except Exception:
                    self.get_logger().error(f"shutdown failed:\n{traceback.format_exc()}")
            self._publish_status(self._status())

    def destroy(self) -> None:
        """Destroy both nodes; no executor may be spinning them."""
        self._last_state = self.state
        self.inputs_node.destroy_node()
        # rclpy leaves the state machine, which owns the lifecycle services, to the garbage collector: until then they
        # would be in the graph and swallow the requests meant for another node of this name.
        self._state_machine.destroy_when_not_in_use()
        self.destroy_node()

    # Transitions

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("configure", self._configure, TransitionCallbackReturn.FAILURE)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("activate", self._activate, TransitionCallbackReturn.FAILURE)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        # A failed deactivate would leave the node active; an error tears it down instead.
        return self._guarded("deactivate", self._deactivate, TransitionCallbackReturn.ERROR)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("cleanup", self._teardown, TransitionCallbackReturn.ERROR)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        return self._guarded("shutdown", self._teardown, TransitionCallbackReturn.ERROR)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured when everything could be given back, else finalized."""
        error = self._transition_error
        result = self._guarded("error processing", self._teardown, TransitionCallbackReturn.FAILURE)
        self._transition_error = self._transition_error or error
        return result

    def _configure(self) -> None:
        settings = parameters.load_settings(self)
        self._profile = load_profile(settings.profile)
        # The streams come up before the weights, so that they are seen to live while the model loads.
        self._inputs = Inputs(
            self.inputs_node,
            self._resolved(self._profile),
            parameters.sync_settings(self),
            parameters.qos_overrides(self),
            self.inputs_node.default_callback_group,
        )
        serve = doors.serve_settings(self)
        self._scheduler = serve.scheduler()
        self._scheduler.start()
        self._server = doors.open_server(serve, settings, self._profile, self._scheduler)
        if self._server is not None:
            self.get_logger().info(f"network doors at {self._server.url}")
        self._policy = policy = self._scheduler.call(partial(self._load, settings, self._profile)).result()
        asked: AnswersObservations = policy
        if self._server is not None:
            doors.describe_engine(self._server, policy)
            asked = doors.ObservedPolicy(cast("Policy", policy), self._scheduler)
        if settings.checkpoint is None:
            self.get_logger().warning("the built-in checkpoint is random: its actions mean nothing")
        if self._profile.timing.rate_hz is None:
            self.get_logger().warning(f"profile {self._profile.name} has no rate_hz: chunks carry step_time 0")
        self.get_logger().info("profile and checkpoint agree:\n" + policy.contract.table())
        model_thread = self._scheduler
        self._recorder = self._open_recorder(self._profile)
        self._inference = Inference(
            asked,
            self._inputs,
            lambda: self._settings,
            self._now_ns,
            self._publish_answer,
            self._on_refusal,
            record=None if self._recorder is None else self._record,
            on_model_thread=lambda turn: model_thread.call(turn).result(),
        )
        self._inference.start()

    def _open_recorder(self, profile: Profile) -> Recorder | None:
        folder = self.get_parameter("record").value
        if not folder:
            return None
        bound = self.get_parameter("record_max_mb").value * 1_000_000
        recorder = Recorder(Path(folder), self._resolved(profile), bound, str(self._chunk_publisher.topic_name))
        self.get_logger().info(f"every inference is recorded in {recorder.folder}")
        return recorder

    def _load(self, settings: parameters.LoadSettings, profile: Profile) -> LoadedPolicy:
        """On the thread that will run the model: what is captured for a thread is captured for this one."""
        # Kept before it is warmed up, so that a failed warm-up gives it back.
        self._policy = policy = self._load_policy(
            settings.checkpoint,
            profile,
            settings.device,
            settings.dtype,
            revision=settings.revision,
            assets=settings.assets,
            statistics=settings.statistics,
            normalization=settings.normalization,
            tokenizer=settings.tokenizer,
            progress=self._on_progress,
            engine=settings.engine,
        )
        policy.warm_up()
        return policy

    def _activate(self) -> None:
        assert self._inference is not None and self._scheduler is not None and self._policy is not None
        self._scheduler.activate(cast(scheduler.RunsPolicy, self._policy), idle=self._policy.capture_pending)
        self._inference.activate()

    def _deactivate(self) -> None:
        assert self._inference is not None and self._scheduler is not None
        self._scheduler.deactivate("the node is not active")
        self._inference.deactivate()

    def _teardown(self) -> None:
        """The one way everything is given back; safe from any state, and again after it failed half-way."""
        if self._scheduler is not None:
            self._scheduler.deactivate("the node is shutting down")
        if self._server is not None:
            server, self._server = self._server, None
            server.stop()
        if self._inference is not None:
            if not self._inference.stop(_INFERENCE_END_S):
                raise EngineError("hung", f"the running inference did not end within {_INFERENCE_END_S:g} s")
            self._inference = None
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.close()
            self.get_logger().info(f"recorded {recorder.written}, dropped {recorder.dropped} {recorder.error}")
        if self._scheduler is not None:
            if not self._scheduler.stop(_INFERENCE_END_S):
                raise EngineError("hung", f"the running inference did not end within {_INFERENCE_END_S:g} s")
            self._scheduler = None
        if self._inputs is not None:
            inputs, self._inputs = self._inputs, None
            inputs.close()
        if self._policy is not None:
            policy, self._policy = self._policy, None
            policy.close()
        self._profile = None
        self._progress = ""
        _return_memory()

    def _guarded(
        self, name: str, step: Callable[[], None], otherwise: TransitionCallbackReturn
    ) -> TransitionCallbackReturn:
        """Run one step. rclpy would swallow its exception: log it, keep it for the status, and say what comes next."""
        try:
            step()
        except (Exception, SystemExit) as error:
            self._transition_error = describe(error)
            text = sentence(self._transition_error)
            self._last_error = (text, self._now_ns())
            if not isinstance(error, Pi05Error):
                text += f"\n{traceback.format_exc()}"
            self.get_logger().error(f"{name} failed: {text}")
            if name == "configure":
                try:
                    self._teardown()
                except Exception:
                    self.get_logger().error(f"giving back after a failed configure failed:\n{traceback.format_exc()}")
                    return TransitionCallbackReturn.ERROR
            return otherwise
        self._transition_error = None
        return TransitionCallbackReturn.SUCCESS

    def _serve_transitions_aside(self) -> None:
        """Let the change_state service wait as a coroutine while a thread runs the transition."""
        (service,) = (service for service in self.services if service.srv_type is ChangeState)
        answer = service.callback

        async def change_state(request: ChangeState.Request, response: ChangeState.Response) -> ChangeState.Response:
            executor = self.executor
            done: Future[bool] = Future(executor=executor)

            def run() -> None:
                succeeded = False
                try:
                    label = request.transition.label or str(request.transition.id)
                    succeeded = self._alone(label, lambda: answer(request, response).success)
                finally:
                    done.set_result(succeeded)
                    if executor is not None:
                        executor.wake()

            threading.Thread(target=run, name="transition", daemon=True).start()
            response.success = bool(await done)
            return response

        service.callback = change_state

    def _alone(self, label: str, change: Callable[[], bool]) -> bool:
        """One transition at a time; another that comes meanwhile is refused at once, not queued."""
        if not self._transition_lock.acquire(blocking=False):
            self.get_logger().error(f"transition {label} refused: another one is running (state {self.state})")
            return False
        try:
            self._transition_since = time.monotonic()
            return change()
        except Exception as error:  # Jazzy raises for a transition that the state does not have
            self.get_logger().error(f"transition {label} is not possible from {self.state}: {error}")
            return False
        finally:
            self._transition_since = None
            self._transition_lock.release()

    def _resolved(self, profile: Profile) -> Profile:
        """The profile with every topic as this node's namespace and remapping rules make it."""
        cameras = {
            name: camera if camera.topic is None else camera.model_copy(update={"topic": self._resolve(camera.topic)})
            for name, camera in profile.cameras.items()
        }
        sources = {
            name: source.model_copy(update={"topic": self._resolve(source.topic)})
            for name, source in profile.state.sources.items()
        }
        state = profile.state.model_copy(update={"sources": sources})
        return profile.model_copy(update={"cameras": cameras, "state": state})

    def _resolve(self, topic: str) -> str:
        return str(self.resolve_topic_name(topic))

    # Parameters and prompt

    def _check_parameters(self, changed: list[Parameter]) -> Any:
        return parameters.check(changed, self.state)

    def _parameters_changed(self, changed: list[Parameter]) -> None:
        self._settings = parameters.run_settings(self)
        inference = self._inference
        if inference is not None:
            inference.settings_changed()
        for parameter in changed:
            if parameter.name == "use_sim_time":
                self.inputs_node.set_parameters([parameter])

    def _on_prompt(self, message: String) -> None:
        refused = self._set_prompt(message.data)
        if refused:
            self.get_logger().error(refused)
            self._last_error = (refused, self._now_ns())

    def _on_set_prompt(self, request: SetPrompt.Request, response: SetPrompt.Response) -> SetPrompt.Response:
        refused = self._set_prompt(request.prompt)
        response.success = not refused
        response.message = refused or "in effect with the next observation"
        return response

    def _set_prompt(self, prompt: str) -> str:
        """The parameter is the one place of the prompt; returns why it was refused, or an empty string."""
        if not prompt.strip():
            return "observation.empty_prompt: an instruction is expected, got an empty one; the old one stays"
        (result,) = self.set_parameters([Parameter("prompt", value=prompt)])
        return "" if result.successful else str(result.reason)

    def _on_request(self, _: Empty) -> None:
        inference = self._inference
        if inference is not None:
            inference.request()

    def _on_reset(self, _: Empty) -> None:
        inference = self._inference
        if inference is not None:
            inference.reset()

    # Chunks and status

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    def _publish_answer(self, answer: Answer) -> None:
        self._chunk_publisher.publish(chunk_message(answer))

    def _record(self, observation: Observation, answer: Answer) -> None:
        recorder = self._recorder
        if recorder is not None:
            recorder.put(observation, serialize_message(chunk_message(answer)))

    def _on_refusal(self, error: Exception) -> None:
        text = sentence(describe(error))
        now = time.monotonic()
        if text == self._logged[0] and now - self._logged[1] < _SAME_ERROR_S:
            return
        self._logged = (text, now)
        if not isinstance(error, Pi05Error):
            text += "\n" + "".join(traceback.format_exception(error))
        self.get_logger().error(f"no chunk: {text}")

    def _on_progress(self, done: int, total: int) -> None:
        self._progress = f", {done / 1e9:.2f} of {total / 1e9:.2f} GB read"

    def _on_status_tick(self) -> None:
        status = self._status()
        server = self._server
        if server is not None:
            server.publish_ages({stream.name: stream.age for stream in status.streams})
        due = time.monotonic() - self._published_at >= _STATUS_PERIOD_S - _STATUS_TICK_S / 2
        if due or status.changes != self._published:
            self._publish_status(status)
            name = str(self.get_fully_qualified_name()).lstrip("/")
            self._diagnostics_publisher.publish(diagnostics_message(status, name))

    def _publish_status(self, status: Status) -> None:
        self._published, self._published_at = status.changes, time.monotonic()
        self._status_publisher.publish(status_message(status))

    def _status(self) -> Status:
        now_ns = self._now_ns()
        policy, profile, inputs, inference = self._policy, self._profile, self._inputs, self._inference
        state = self.state
        figures = inference.figures() if inference is not None else Figures()
        reason, failed = self._reason(state, now_ns, inputs, figures)
        last_error = max((self._last_error, (figures.last_error, figures.last_error_ns)), key=lambda error: error[1])
        prompt = self._settings.prompt or (profile.prompt if profile is not None else None) or ""
        return Status(
            stamp_ns=now_ns,
            state=state,
            reason=reason,
            failed=failed,
            checkpoint_id=policy.checkpoint.id if policy is not None else "",
            profile=profile.name if profile is not None else "",
            prompt=prompt,
            figures=figures,
            streams=[] if inputs is None else [stream_message(report) for report in inputs.reports(now_ns)],
            last_error=last_error[0],
            last_error_ns=last_error[1],
        )

    def _reason(self, state: str, now_ns: int, inputs: Inputs | None, figures: Figures) -> tuple[Reason | None, bool]:
        """Why no chunk comes, and whether that is an error rather than a step that has yet to be taken."""
        since = self._transition_since
        if since is not None and state not in ("unconfigured", "inactive", "active", "finalized"):
            return (f"lifecycle.{state}", f"{state} for {time.monotonic() - since:.0f} s{self._progress}"), False
        if self._transition_error is not None:
            return self._transition_error, True
        if state == "unconfigured":
            return ("lifecycle.unconfigured", "configure and activate to get chunks"), False
        if state == "inactive":
            return ("lifecycle.inactive", "activate to get chunks"), False
        if state != "active":
            return (f"lifecycle.{state}", f"the node is {state}"), False
        missing = inputs.reason(now_ns) if inputs is not None else None
        if missing is not None:
            return missing, True
        if figures.blocked is not None:
            return figures.blocked, not figures.blocked[0].startswith("trigger.")
        if figures.busy_s > _STATUS_PERIOD_S:
            return ("inference.running", f"the model has been computing for {figures.busy_s:.0f} s"), False
        return None, False


def main() -> int:
    """Executable of the package: ROS arguments only; launch or `ros2 lifecycle` drives the lifecycle."""
    from pi05_ros.node.process import run_process

    return run_process(lambda: [PolicyNode()], sys.argv)


if __name__ == "__main__":
    sys.exit(main())
