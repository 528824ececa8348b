"""The one thread that runs the policy: waits for its trigger, takes the newest observation, publishes the chunk."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.errors import ObservationError, Pi05Error
from pi05_ros.node.parameters import RunSettings
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import AnswersObservations, Leftover

Reason = tuple[str, str]  # a stable code and a sentence

_WINDOW = 200  # chunks that the percentiles of a stage look back on
_RATE_WINDOW_S = 5.0
_INPUT_WAIT_S = 0.1
_NO_REQUEST = ("trigger.waiting", "a message on ~/request starts the next chunk")


class GivesObservations(Protocol):
    """What this thread needs of `pi05_ros.node.inputs.Inputs`.

    ``newest_receive_ns``: when the last input of the observation last taken arrived (node's clock).
    """

    newest_receive_ns: int | None

    def take(self, now_ns: int) -> Observation | None:
        """The newest consistent observation, each at most once."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Until something came, or the time is over."""
        ...


@dataclass(frozen=True)
class Answer:
    """A chunk on its way out.

    Attributes:
        index: its number in this activation.
        started_ns: when its inference began (node's clock).
        stage_ms: ``wait``, from the arrival of the last input to that moment; the policy's own stages; and ``total``,
            from that moment until the chunk was ready.
    """

    chunk: ActionChunk
    index: int
    started_ns: int
    stage_ms: Mapping[str, float]


@dataclass(frozen=True)
class Figures:
    """What the status topic tells about the inference; counts are of this activation."""

    chunks: int = 0
    refused: int = 0
    clamp_count: int = 0
    chunk_rate_hz: float = 0.0
    stages: tuple[tuple[str, float, float], ...] = ()  # name, p50 ms, p95 ms
    blocked: Reason | None = None
    last_error: str = ""
    last_error_ns: int = 0
    busy_s: float = 0.0


class Inference:
    """Runs the policy in its own thread from `start` to `stop`; answers only between `activate` and `deactivate`.

    Args:
        policy: touched by this thread alone once it has started.
        inputs: where observations come from.
        settings: gives the current settings; called once for each chunk.
        clock_ns: the node's clock.
        publish: sends one answer. It is called with the gate held that `deactivate` takes, so it must be short.
        report: told the exception of every refused or failed inference.
        record: told every observation (with its prompt) and its answer; must return fast.
        on_model_thread: runs a function on the thread that alone touches the model, and returns what it returns; the
            observation is taken there, so that it is the newest one when the model gets to it.
    """

    def __init__(
        self,
        policy: AnswersObservations,
        inputs: GivesObservations,
        settings: Callable[[], RunSettings],
        clock_ns: Callable[[], int],
        publish: Callable[[Answer], None],
        report: Callable[[Exception], None],
        record: Callable[[Observation, Answer], None] | None = None,
        on_model_thread: Callable[[Callable[[], bool]], bool] = lambda turn: turn(),
    ) -> None:
        self._policy = policy
        self._inputs = inputs
        self._settings = settings
        self._clock_ns = clock_ns
        self._publish = publish
        self._report = report
        self._record = record
        self._on_model_thread = on_model_thread
        self._leftover = Leftover()
        self._gate = threading.Condition()
        self._stopping = False
        self._activation: int | None = None
        self._activations = 0
        self._requested_at: float | None = None
        self._due = 0.0
        self._busy_since: float | None = None
        self._figures = Figures()
        self._published_at: deque[float] = deque(maxlen=4096)
        self._stages: dict[str, deque[float]] = {}
        # A daemon: a model that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="inference", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def activate(self) -> None:
        """Let chunks out; they are counted from 0 again. Requests made before do not count."""
        with self._gate:
            self._activations += 1
            self._activation = self._activations
            self._requested_at = None
            self._due = time.monotonic()
            self._figures = Figures(last_error=self._figures.last_error, last_error_ns=self._figures.last_error_ns)
            self._published_at.clear()
            self._stages.clear()
            self._leftover.flush()
            self._gate.notify_all()

    def reset(self) -> None:
        """A new episode: the next chunk continues none that was sent before."""
        with self._gate:
            self._leftover.flush()

    def deactivate(self) -> None:
        """Once this returns no chunk of the activation is published, whatever the model is still computing."""
        with self._gate:
            self._activation = None
            self._figures = replace(self._figures, blocked=None)
            self._gate.notify_all()

    def request(self) -> None:
        """Ask for one chunk (trigger ``request``). Requests that wait together are answered by one chunk."""
        with self._gate:
            if self._activation is not None:
                self._requested_at = time.monotonic()
                self._gate.notify_all()

    def settings_changed(self) -> None:
        """Look at the settings again now."""
        with self._gate:
            self._due = min(self._due, time.monotonic() + 1.0 / self._settings().trigger_rate_hz)
            self._gate.notify_all()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; False when the model did not come back in time."""
        with self._gate:
            self._stopping = True
            self._activation = None
            self._gate.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def figures(self) -> Figures:
        """A consistent copy of the figures as of now."""
        now = time.monotonic()
        with self._gate:
            figures, busy_since = self._figures, self._busy_since
            published = [at for at in self._published_at if now - at <= _RATE_WINDOW_S]
            stages = {name: np.array(window) for name, window in self._stages.items()}
        rate = 0.0
        if len(published) > 1:
            # The span runs to now once the next chunk is overdue, so that a stall shows at once.
            mean = (published[-1] - published[0]) / (len(published) - 1)
            span = max(published[-1] - published[0], now - published[0] - mean)
            rate = (len(published) - 1) / span
        return replace(
            figures,
            chunk_rate_hz=rate,
            stages=tuple(
                (name, float(np.percentile(window, 50)), float(np.percentile(window, 95)))
                for name, window in stages.items()
            ),
            busy_s=0.0 if busy_since is None else now - busy_since,
        )

    def _run(self) -> None:
        while (turn := self._await_turn()) is not None:
            activation, settings = turn
            try:
                if not self._on_model_thread(partial(self._take_turn, activation)):
                    self._expire_request(settings)
                    self._inputs.wait(_INPUT_WAIT_S)
            except Exception as error:  # whatever a policy, a driver or a message raises, the node lives
                self._refuse(activation, error)
                with self._gate:
                    self._gate.wait(0.0 if self._stopping else 0.05)  # an error that comes at once must not spin

    def _await_turn(self) -> tuple[int, RunSettings] | None:
        """Sleep until a chunk is wanted; None once the thread shall end."""
        with self._gate:
            while not self._stopping:
                settings = self._settings()
                pause: float | None = None
                if self._activation is None:
                    pass
                elif settings.trigger == "continuous":
                    return self._activation, settings
                elif settings.trigger == "request":
                    if self._requested_at is not None:
                        return self._activation, settings
                    # What came of the last request stays in last_error; the reason is about now.
                    self._figures = replace(self._figures, blocked=_NO_REQUEST)
                else:
                    pause = self._due - time.monotonic()
                    if pause <= 0.0:
                        return self._activation, settings
                self._gate.wait(pause)
            return None

    def _take_turn(self, activation: int) -> bool:
        """Answer the newest observation as the settings now are; False when there was nothing to answer."""
        settings = self._settings()
        prompt = settings.prompt or self._policy.profile.prompt
        if not prompt:
            self._block(activation, "observation.no_prompt", "no instruction: set the parameter prompt or use ~/prompt")
            return False
        started_ns = self._clock_ns()
        started = time.perf_counter()
        observation = self._inputs.take(started_ns)
        if observation is None:
            return False
        arrived_ns = self._inputs.newest_receive_ns
        with self._gate:
            if self._activation != activation:
                return True
            index = self._figures.chunks
            self._requested_at = None
            period = 1.0 / settings.trigger_rate_hz
            # A turn that came late does not make the next ones come early.
            self._due = max(self._due + period, time.monotonic())
            self._busy_since = time.monotonic()
            continuing = None
            if settings.rtc is not None and observation.stamp_ns is not None:
                continuing = self._leftover.continuation(observation.stamp_ns, prompt, settings.rtc)
        seed = secrets.randbits(63) if settings.seed is None else settings.seed + index
        observation = replace(observation, prompt=prompt)
        infer = self._policy.infer if continuing is None else partial(self._policy.infer, continuing=continuing)
        try:
            chunk = infer(observation, seed=seed, num_steps=settings.num_steps)
        finally:
            with self._gate:
                self._busy_since = None
        total = (time.perf_counter() - started) * 1e3
        waited = 0.0 if arrived_ns is None else max(0.0, (started_ns - arrived_ns) / 1e6)
        answer = Answer(chunk, index, started_ns, {"wait": waited, **chunk.timings_ms, "total": total})
        self._send(activation, answer)
        if self._record is not None:
            self._record(observation, answer)
        return True

    def _send(self, activation: int, answer: Answer) -> None:
        with self._gate:
            if self._activation != activation:
                return  # computed across a deactivate
            self._publish(answer)
            self._leftover.sent(answer.chunk, self._clock_ns())
            self._published_at.append(time.monotonic())
            for name, duration in answer.stage_ms.items():
                self._stages.setdefault(name, deque(maxlen=_WINDOW)).append(duration)
            figures = self._figures
            self._figures = replace(
                figures,
                chunks=figures.chunks + 1,
                clamp_count=figures.clamp_count + answer.chunk.clamp_count,
                blocked=None,
            )

    def _block(self, activation: int, code: str, sentence: str) -> None:
        with self._gate:
            if self._activation == activation:
                self._figures = replace(self._figures, blocked=(code, sentence))

    def _refuse(self, activation: int, error: Exception) -> None:
        code, sentence = describe(error)
        with self._gate:
            self._busy_since = None
            figures = self._figures
            self._figures = replace(
                figures, last_error=f"{code}: {sentence}", last_error_ns=self._clock_ns(), refused=figures.refused + 1
            )
            if self._activation == activation:
                self._figures = replace(self._figures, blocked=(code, sentence))
        self._report(error)

    def _expire_request(self, settings: RunSettings) -> None:
        """A request that found no observation in time is refused, not kept for a later one."""
        with self._gate:
            if settings.trigger != "request" or self._requested_at is None:
                return
            if time.monotonic() - self._requested_at < settings.request_timeout_s:
                return
            self._requested_at = None
            activation = self._activation
        if activation is not None:
            why = f"no new observation within request_timeout_s ({settings.request_timeout_s:g} s) of the request"
            self._refuse(activation, ObservationError("timeout", why))


def describe(error: BaseException) -> Reason:
    """Code and sentence of any exception."""
    if isinstance(error, Pi05Error):
        return error.code, error.message
    return "error.unexpected", f"{type(error).__name__}: {error}"
