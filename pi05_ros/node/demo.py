"""``pi05-ros demo``: a stand-in robot and the policy node as two processes, and a live table of what the node answers.

Everything runs in a ROS domain of its own on this machine, so that it can never reach a robot.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pi05_ros.errors import ConfigurationError, Pi05Error, RequestError
from pi05_ros.msg import ActionChunk, PolicyStatus
from pi05_ros.node import qos
from pi05_ros.node.environment import isolated_environment
from pi05_ros.node.process import Spinner

_NODE = "/policy"
_RATE_HZ = 5.0
_START_TIMEOUT_S = 60.0
_CONFIGURE_TIMEOUT_S = 600.0
_REFRESH_S = 0.25
_PLAIN_EVERY_S = 5.0


class Child:
    """A process of the demo; its output goes to a file that is shown only when something went wrong."""

    def __init__(self, name: str, arguments: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends its children in order.
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "pi05_ros.cli", *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises RequestError when the process is no longer there."""
        status = self._popen.poll()
        if status is not None:
            raise RequestError("child_ended", f"the {self.name} ended with status {status}:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])

    def end(self) -> None:
        """SIGINT, and SIGKILL for what does not follow it."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGINT)
            try:
                self._popen.wait(5.0)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()


class Watcher:
    """Follows the node's topics and drives its lifecycle, from this process."""

    def __init__(self) -> None:
        rclpy.init(args=[])
        self.chunks = 0
        self.last_chunk: ActionChunk | None = None
        self.status: PolicyStatus | None = None
        self._lock = threading.Lock()
        self._latency_ms: deque[float] = deque(maxlen=1000)
        self._node = rclpy.create_node("demo")
        self._node.create_subscription(ActionChunk, f"{_NODE}/chunk", self._on_chunk, qos.CHUNK)
        self._node.create_subscription(PolicyStatus, f"{_NODE}/status", self._on_status, qos.STATUS)
        self._change_state: Any = self._node.create_client(ChangeState, f"{_NODE}/change_state")
        self._spinner = Spinner("watcher")
        self._spinner.add(self._node)
        self._spinner.start()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()
        self._node.destroy_node()
        rclpy.try_shutdown()

    def is_up(self) -> bool:
        return bool(self._change_state.service_is_ready())

    def start_transition(self, transition_id: int) -> Any:
        """A future of the ChangeState answer."""
        request = ChangeState.Request()
        request.transition.id = transition_id
        return self._change_state.call_async(request)

    def latency_ms(self) -> tuple[float, float]:
        """p50 and p95 from the anchor image's stamp to the arrival of its chunk here; NaN before the first."""
        with self._lock:
            values = list(self._latency_ms)
        if not values:
            return math.nan, math.nan
        p50, p95 = np.percentile(values, (50, 95))
        return float(p50), float(p95)

    def _on_chunk(self, chunk: ActionChunk) -> None:
        stamp = chunk.header.stamp.sec + chunk.header.stamp.nanosec * 1e-9
        with self._lock:
            self._latency_ms.append((time.time() - stamp) * 1e3)
        self.chunks += 1
        self.last_chunk = chunk

    def _on_status(self, status: PolicyStatus) -> None:
        self.status = status


class Screen:
    """The live table on a terminal; a line now and then where there is none."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._said_at = -math.inf

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, watcher: Watcher, left_s: float | None) -> None:
        if self._live is not None:
            self._live.update(tables(watcher, left_s))
        elif time.monotonic() - self._said_at >= _PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            self._console.print(line(watcher), markup=False, highlight=False, soft_wrap=True)


def tables(watcher: Watcher, left_s: float | None) -> Group:
    """What the terminal shows."""
    status = watcher.status
    if status is None:
        return Group(Text("waiting for the policy node ..."))
    p50, p95 = watcher.latency_ms()
    until = "" if left_s is None else f", {left_s:.0f} s left"
    head = Text.assemble(
        ("pi05_ros demo", "bold"), f"  {status.state}{until} (Ctrl-C ends it)\n",
        f"checkpoint {status.checkpoint_id or '-'}, profile {status.profile or '-'}, prompt \"{status.prompt}\"\n",
        (status.reason, "yellow"),
    )  # fmt: skip
    chunks = Table("chunks", "rate Hz", "refused", "clamped", "image to chunk ms p50 / p95", title="Chunks")
    chunks.add_row(
        str(watcher.chunks), f"{status.chunk_rate_hz:.1f}", str(status.refused), str(status.clamp_count),
        f"{p50:.1f} / {p95:.1f}",
    )  # fmt: skip
    stages = Table("stage", "p50 ms", "p95 ms", title="Latency by stage")
    for name, stage_p50, stage_p95 in zip(status.stage_names, status.stage_p50_ms, status.stage_p95_ms, strict=True):
        stages.add_row(name, f"{stage_p50:.1f}", f"{stage_p95:.1f}")
    inputs = Table("input", "topic", "state", "rate Hz", "age ms", "received", "dropped", title="Inputs")
    for stream in status.streams:
        style = "" if stream.state == "live" else "red"
        inputs.add_row(
            stream.name, stream.topic, stream.state, f"{stream.rate_hz:.1f}", f"{stream.age * 1e3:.0f}",
            str(stream.received), str(stream.dropped), style=style,
        )  # fmt: skip
    return Group(head, chunks, stages, inputs)


def line(watcher: Watcher) -> str:
    """The same in one line."""
    status = watcher.status
    if status is None:
        return "waiting for the policy node ..."
    if status.state != "active":
        return str(status.reason or status.state)
    p50, p95 = watcher.latency_ms()
    stages = ", ".join(
        f"{name} {stage_p50:.1f}/{stage_p95:.1f}"
        for name, stage_p50, stage_p95 in zip(
            status.stage_names, status.stage_p50_ms, status.stage_p95_ms, strict=True
        )
    )  # fmt: skip
    inputs = ", ".join(f"{s.name} {s.rate_hz:.0f} Hz {s.age * 1e3:.0f} ms {s.dropped} dropped" for s in status.streams)
    return (
        f"{watcher.chunks} chunks, {status.chunk_rate_hz:.1f} Hz, image to chunk {p50:.1f}/{p95:.1f} ms p50/p95 | "
        f"stages ms: {stages} | inputs: {inputs}" + (f" | {status.reason}" if status.reason else "")
    )


def plot_chunk(chunk: ActionChunk, path: Path) -> None:
    """Draw every action dimension of a chunk over time into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    actions = np.asarray(chunk.actions, dtype=np.float32).reshape(chunk.horizon, chunk.action_dim)
    step_s = chunk.step_time.sec + chunk.step_time.nanosec * 1e-9
    times = np.arange(chunk.horizon) * (step_s or 1.0)
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for column, (name, unit) in enumerate(zip(chunk.names, chunk.units, strict=True)):
        axes.plot(times, actions[:, column], label=f"{name} [{unit}]")
    if 0 < chunk.executed_steps < chunk.horizon:
        axes.axvline(chunk.executed_steps * (step_s or 1.0), color="grey", linestyle=":", label="executed until here")
    axes.set_xlabel("seconds after the observation" if step_s else "step")
    axes.set_title(f'chunk {chunk.chunk_index}: "{chunk.prompt}", checkpoint {chunk.checkpoint_id}', fontsize=10)
    axes.legend(fontsize=8, ncols=2)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument(
        "--seconds", type=float, default=None, help="how long it runs once active (default: DEMO_SECONDS, or 30)"
    )
    parser.add_argument("--checkpoint", default="builtin", help="folder or hub id (default: the small random one)")
    parser.add_argument("--profile", default="demo", help="robot profile (default: %(default)s)")
    parser.add_argument("--prompt", help="the instruction (default: the profile's)")


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 when chunks came."""
    seconds = demo_seconds(options.seconds)
    folder = Path(os.environ.get("DEMO_DIR", "."))
    if not folder.is_dir():
        raise ConfigurationError("demo_dir", f"DEMO_DIR: an existing folder expected, got {folder}")
    console = Console()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    environment = isolated_environment()
    logs = Path(tempfile.mkdtemp(prefix="pi05_ros-demo-"))
    environment.setdefault("ROS_LOG_DIR", str(logs))
    os.environ.update(environment)
    console.print(f"ROS domain {environment['ROS_DOMAIN_ID']}, this machine only; logs in {logs}", highlight=False)

    node = ["node", "--no-autostart", "--checkpoint", options.checkpoint, "--profile", options.profile]
    if options.prompt:
        node += ["--prompt", options.prompt]
    children = [
        Child("robot", ["robot", "--profile", options.profile], environment, logs),
        Child("policy node", [*node, "--ros-args", "-p", f"trigger_rate_hz:={_RATE_HZ}"], environment, logs),
    ]
    failure = ""
    try:
        with Watcher() as watcher:
            try:
                with Screen(console) as screen:
                    drive(watcher, children, screen, ended, seconds)
            except Pi05Error as error:
                failure = str(error)
            return summarize(console, watcher, folder, failure)
    finally:
        for child in children:
            child.end()


def drive(watcher: Watcher, children: Sequence[Child], screen: Screen, ended: threading.Event, seconds: float) -> None:
    """Configure, activate, and show what comes until the time is over or ``ended`` is set.

    Raises:
        RequestError: a process ended, a transition failed, or one took too long.
    """

    def wait(done: Callable[[], bool], timeout_s: float, what: str, left: bool = False) -> bool:
        deadline = time.monotonic() + timeout_s
        while not done():
            if ended.wait(_REFRESH_S):
                return False
            for child in children:
                child.check()
            if time.monotonic() > deadline:
                if left:
                    return True
                raise RequestError("timeout", f"{what} took more than {timeout_s:g} s:\n{children[-1].tail()}")
            screen.show(watcher, deadline - time.monotonic() if left else None)
        return True

    if not wait(watcher.is_up, _START_TIMEOUT_S, "the start of the policy node"):
        return
    for label, transition in (
        ("configure", Transition.TRANSITION_CONFIGURE),
        ("activate", Transition.TRANSITION_ACTIVATE),
    ):
        answer = watcher.start_transition(transition)
        if not wait(answer.done, _CONFIGURE_TIMEOUT_S, label):
            return
        if not answer.result().success:
            raise RequestError(label, f"the policy node refused to {label}:\n{children[-1].tail()}")
    wait(lambda: False, seconds, "", left=True)


def summarize(console: Console, watcher: Watcher, folder: Path, failure: str) -> int:
    """Say what came and draw the last chunk; the exit status."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if failure:
        say(failure)
    chunk = watcher.last_chunk
    if chunk is None:
        say("no chunk came" + (f"; last reason: {watcher.status.reason}" if watcher.status is not None else ""))
        return 1
    say(line(watcher))
    p50, p95 = watcher.latency_ms()
    say(
        f"{watcher.chunks} chunks of {chunk.horizon} x {chunk.action_dim} actions from checkpoint "
        f"{chunk.checkpoint_id}; image to chunk p50 {p50:.1f} ms, p95 {p95:.1f} ms"
    )
    path = folder / "demo_chunk.png"
    plot_chunk(chunk, path)
    say(f"plot of the last chunk: {path.resolve()}")
    return 1 if failure else 0


def demo_seconds(given: float | None) -> float:
    """From the option, DEMO_SECONDS, or 30.

    Raises:
        ConfigurationError: ``config.demo_seconds``.
    """
    text = os.environ.get("DEMO_SECONDS", "30") if given is None else str(given)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < 86400.0:
        raise ConfigurationError("demo_seconds", f"DEMO_SECONDS: seconds above 0 expected, got {text!r}")
    return seconds
