"""``pi05-ros node-benchmark``: what the node itself costs, with a model that answers at once.

The stand-in robot (three raw 640x480 cameras at 30 Hz, joints at 50 Hz), the node and this measuring process are three
processes in a ROS domain of their own. The node is asked for a chunk of every observation.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import rclpy
import yaml
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState

from pi05_ros.chunk import ActionChunk
from pi05_ros.errors import RequestError
from pi05_ros.msg import ActionChunk as ActionChunkMessage
from pi05_ros.msg import PolicyStatus
from pi05_ros.node import qos
from pi05_ros.node.demo import Child
from pi05_ros.node.environment import isolated_environment
from pi05_ros.node.process import Spinner, run_process
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile, load_profile

HORIZON = 50
CPU_LIMIT, OVERHEAD_LIMIT_MS = 0.60, 5.0
_START_S = 120.0
_WARM_CHUNKS = 60
_HEAD = "# What the node costs without the model\n"


class InstantPolicy:
    """A policy that answers with zeros at once; the stage ``model`` is the time it took."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.checkpoint = SimpleNamespace(id="instant")
        self.contract = SimpleNamespace(table=lambda: "instant model: no contract")
        self._actions = np.zeros((HORIZON, len(profile.action.dims)), np.float32)

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        *,
        continuing: object = None,
    ) -> ActionChunk:
        started = time.perf_counter()
        dims = self.profile.action.dims
        chunk = ActionChunk(
            actions=self._actions.copy(),
            names=tuple(dim.name for dim in dims),
            units=tuple(dim.unit for dim in dims),
            control_modes=tuple(dim.control for dim in dims),
            step_time_s=None,
            executed_steps=None,
            prompt=observation.prompt or "",
            checkpoint_id=self.checkpoint.id,
            profile=self.profile.name,
            denoise_steps=1,
            noise_seed=seed,
            stamp_ns=observation.stamp_ns,
            input_stamps_ns=observation.input_stamps_ns,
            timings_ms={},
        )
        return replace(chunk, timings_ms={"model": (time.perf_counter() - started) * 1e3})

    def capture_pending(self) -> bool:
        return False

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Measured:
    """What came within ``seconds``.

    Attributes:
        cpu_share: CPU time of the node's process, all threads, as a share of one core.
        overhead_ms: [chunks] from the callback of the last input to the chunk, less the model's time.
        arrival_ms: [chunks] the same, but to the chunk's arrival in another process.
        wait_ms: [chunks] the part of it until the inference thread had the observation.
        latency_ms: [chunks] from the anchor image's stamp to the chunk's arrival in another process.
        rates_hz: messages a second, by input.
        dropped: messages that no chunk could use, by input.
        load: the machine's load average over the last minute.
    """

    seconds: float
    cpu_share: float
    overhead_ms: np.ndarray
    arrival_ms: np.ndarray
    wait_ms: np.ndarray
    latency_ms: np.ndarray
    rates_hz: dict[str, float]
    dropped: dict[str, int]
    load: float

    @property
    def fits(self) -> bool:
        """Whether both limits are kept."""
        return bool(self.cpu_share < CPU_LIMIT and np.percentile(self.overhead_ms, 50) <= OVERHEAD_LIMIT_MS)

    def table(self) -> str:
        """Markdown."""
        rates = ", ".join(f"{name} {rate:.1f} Hz" for name, rate in self.rates_hz.items())
        dropped = ", ".join(f"{name} {count}" for name, count in self.dropped.items())
        rows = [
            ("CPU of the node's process, of one core", f"{100 * self.cpu_share:.0f} %", f"{100 * CPU_LIMIT:.0f} %"),
            (
                "overhead, last input's callback to chunk, less the model, p50 / p95",
                self._p(self.overhead_ms),
                f"{OVERHEAD_LIMIT_MS:g} ms (p50)",
            ),
            ("of it until the inference thread has the observation, p50 / p95", self._p(self.wait_ms), "-"),
            ("overhead to the chunk's arrival in another process, p50 / p95", self._p(self.arrival_ms), "-"),
            ("anchor image's stamp to the chunk's arrival, p50 / p95", self._p(self.latency_ms), "-"),
            ("chunks", f"{len(self.overhead_ms) / self.seconds:.1f} Hz", "-"),
            ("inputs", rates, "-"),
            ("dropped", dropped, "-"),
        ]
        lines = ["| what | measured | at most |", "|---|---|---|"]
        return "\n".join(lines + [f"| {what} | {value} | {limit} |" for what, value, limit in rows])

    @staticmethod
    def _p(values: np.ndarray) -> str:
        return "{:.2f} / {:.2f} ms".format(*np.percentile(values, (50, 95)))


class _NodeChild(Child):
    """The measured process."""

    @property
    def pid(self) -> int:
        return self._popen.pid


class Probe:
    """This process's side: every chunk with its arrival, the last status, and the lifecycle."""

    def __init__(self) -> None:
        rclpy.init(args=[])
        self.chunks: list[tuple[int, ActionChunkMessage]] = []
        self.status: PolicyStatus | None = None
        self._node = rclpy.create_node("benchmark")
        # Deeper than the node's own class, so that a busy measuring process loses none.
        depth = qos.override(qos.CHUNK, "depth=100", "chunk")
        self._node.create_subscription(ActionChunkMessage, "/policy/chunk", self._on_chunk, depth)
        self._node.create_subscription(PolicyStatus, "/policy/status", self._on_status, qos.STATUS)
        self._client: Any = self._node.create_client(ChangeState, "/policy/change_state")
        self._spinner = Spinner("benchmark")
        self._spinner.add(self._node)
        self._spinner.start()

    def close(self) -> None:
        self._spinner.stop()
        self._node.destroy_node()
        rclpy.try_shutdown()

    def is_up(self) -> bool:
        return bool(self._client.service_is_ready())

    def change_state(self, transition: int) -> None:
        request = ChangeState.Request()
        request.transition.id = transition
        future = self._client.call_async(request)
        wait_for(future.done, f"transition {transition}")
        if not future.result().success:
            raise RequestError("transition", f"the node refused transition {transition}: {self.status}")

    def _on_chunk(self, chunk: ActionChunkMessage) -> None:
        self.chunks.append((time.time_ns(), chunk))

    def _on_status(self, status: PolicyStatus) -> None:
        self.status = status


def wait_for(done: Callable[[], bool], what: str) -> None:
    """Raises RequestError when it takes too long."""
    deadline = time.monotonic() + _START_S
    while not done():
        if time.monotonic() > deadline:
            raise RequestError("timeout", f"{what} took more than {_START_S:g} s")
        time.sleep(0.02)


def measure(seconds: float, folder: Path) -> Measured:
    """Start robot and node, and measure for ``seconds`` once chunks come.

    Raises:
        RequestError: a process ended, or something took too long.
    """
    environment = isolated_environment()
    environment.setdefault("ROS_LOG_DIR", str(folder))
    os.environ.update(environment)
    profile = _three_raw_cameras(folder)
    node = _NodeChild("node", ["node-benchmark", "--node", str(profile)], environment, folder)
    children = [Child("robot", ["robot", "--profile", str(profile)], environment, folder), node]
    try:
        probe = Probe()
        try:

            def checked(done: Callable[[], bool]) -> Callable[[], bool]:
                def check() -> bool:
                    for child in children:
                        child.check()
                    return done()

                return check

            wait_for(checked(probe.is_up), "the start of the node")
            probe.change_state(Transition.TRANSITION_CONFIGURE)
            probe.change_state(Transition.TRANSITION_ACTIVATE)
            wait_for(
                checked(lambda: len(probe.chunks) >= _WARM_CHUNKS and probe.status is not None), "the first chunks"
            )
            return _measure(probe, node, seconds)
        finally:
            probe.close()
    finally:
        for child in children:
            child.end()


def _measure(probe: Probe, node: _NodeChild, seconds: float) -> Measured:
    before, first, cpu, began = _next_status(probe), len(probe.chunks), _cpu_seconds(node.pid), time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    cpu = _cpu_seconds(node.pid) - cpu
    chunks, after = probe.chunks[first:], _next_status(probe)
    node.check()
    told_s = (after.header.stamp.sec - before.header.stamp.sec) + (
        after.header.stamp.nanosec - before.header.stamp.nanosec
    ) * 1e-9
    streams = list(zip(before.streams, after.streams, strict=True))
    rows = []
    for arrived_ns, chunk in chunks:
        stage = dict(zip(chunk.stage_names, chunk.stage_ms, strict=True))
        stamp_ns = chunk.header.stamp.sec * 1_000_000_000 + chunk.header.stamp.nanosec
        ages = dict(zip(chunk.input_names, chunk.input_ages, strict=True))
        started_ns = stamp_ns + ages["base"] * 1e9
        overhead = stage["wait"] + stage["total"] - stage["model"]
        arrival = stage["wait"] + (arrived_ns - started_ns) / 1e6 - stage["model"]
        rows.append((overhead, arrival, stage["wait"], (arrived_ns - stamp_ns) / 1e6))
    overhead_ms, arrival_ms, wait_ms, latency_ms = np.array(rows).T
    return Measured(
        seconds=elapsed,
        cpu_share=cpu / elapsed,
        overhead_ms=overhead_ms,
        arrival_ms=arrival_ms,
        wait_ms=wait_ms,
        latency_ms=latency_ms,
        rates_hz={new.name: (new.received - old.received) / told_s for old, new in streams},
        dropped={new.name: new.dropped - old.dropped for old, new in streams},
        load=os.getloadavg()[0],
    )


def _next_status(probe: Probe) -> PolicyStatus:
    """A status that comes after this call."""
    last = probe.status
    wait_for(lambda: probe.status is not last, "a status message")
    assert probe.status is not None
    return probe.status


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads (proc_pid_stat(5))."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _three_raw_cameras(folder: Path) -> Path:
    """Profile demo with all three cameras raw."""
    content = load_profile("demo").model_dump(mode="json", exclude_none=True)
    for name, camera in content["cameras"].items():
        camera |= {"topic": f"{name}/image_raw", "type": "image"}
    path = folder / "three_raw.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def _run_node(profile: str) -> int:
    from pi05_ros.node.policy_node import PolicyNode

    def load(_: str | None, profile: Profile, *__: object, **___: object) -> Any:
        return InstantPolicy(profile)

    given = ["checkpoint:=instant", f"profile:={profile}", "trigger:=continuous"]
    arguments = [argument for parameter in given for argument in ("-p", parameter)]
    return run_process(lambda: [PolicyNode(load)], [sys.argv[0], "--ros-args", *arguments])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure (default: %(default)g)")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=Path("docs/benchmarks_node.md"), metavar="FILE",
        help="write the table to a file as well (default: %(const)s)",
    )  # fmt: skip
    parser.add_argument("--node", metavar="PROFILE", help="run only the measured node; the benchmark starts it so")


def run(options: argparse.Namespace) -> int:
    """Measure and print; 1 when a limit is not kept."""
    if options.node is not None:
        return _run_node(options.node)
    measured = measure(options.seconds, Path(tempfile.mkdtemp(prefix="pi05_ros-benchmark-")))
    print(measured.table())
    if options.write is not None:
        options.write.write_text(_document(measured, options.seconds), encoding="utf-8")
    return 0 if measured.fits else 1


def _document(measured: Measured, seconds: float) -> str:
    machine = f"{_processor()}, {os.cpu_count()} cores, load average {measured.load:.1f}"
    versions = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    command = f"pi05-ros node-benchmark --seconds {seconds:g} --write"
    said = (
        f"`{command}`, {time.strftime('%Y-%m-%d')}.\n{machine}, {versions}.\n"
        "Three raw 640x480 cameras at 30 Hz and joints at 50 Hz from another process; a model that answers at once,\n"
        "asked for every observation."
    )
    return f"{_HEAD}\n{said}\n\n{measured.table()}\n"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
