"""What tests of ROS processes share: an isolated graph, processes that always end, calls that never wait forever."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import rclpy
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from PIL import Image as PillowImage
from rcl_interfaces.srv import GetParameters, SetParameters
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from pi05_ros.msg import ActionChunk, PolicyStatus
from pi05_ros.node.environment import isolated_environment

ROOT = Path(__file__).parents[1]
TEST = Path(__file__).parent
STUB = [sys.executable, str(TEST / "stub_policy.py")]
COMMAND = [sys.executable, "-m", "pi05_ros.cli"]
TRANSITIONS = {
    "configure": Transition.TRANSITION_CONFIGURE,
    "activate": Transition.TRANSITION_ACTIVATE,
    "deactivate": Transition.TRANSITION_DEACTIVATE,
    "cleanup": Transition.TRANSITION_CLEANUP,
}
RELIABLE = QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
Message = TypeVar("Message")


@cache
def environment() -> dict[str, str]:
    """The environment of this test process's graph: its own domain, this machine only."""
    variables = isolated_environment()
    variables["ROS_LOG_DIR"] = tempfile.mkdtemp(prefix="pi05_ros-test-log-")
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(TEST), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables["PYTHONUNBUFFERED"] = "1"
    variables.setdefault("OMP_NUM_THREADS", "1")
    return variables


class Recording(list[Message]):
    """Messages of one topic, in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: list[float] = []
        self._news = threading.Condition()

    def add(self, message: Message) -> None:
        with self._news:
            self.append(message)
            self.arrived.append(time.monotonic())
            self._news.notify_all()

    def wait_for(self, fits: Callable[[Message], bool], timeout: float = 10.0, start: int = 0) -> Message:
        """The first message from number ``start`` on that fits; AssertionError when none comes in time."""
        found: list[Message] = []

        def search() -> bool:
            found[:] = [message for message in self[start:] if fits(message)][:1]
            return bool(found)

        with self._news:
            assert self._news.wait_for(search, timeout), f"nothing fits among {len(self)} messages; last: {self[-1:]}"
        return found[0]

    def wait_for_count(self, count: int, timeout: float = 10.0) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self) >= count, timeout), f"{len(self)} of {count} messages came"


class Process:
    """A child process whose output is kept; leaving the context ends it, whatever happened."""

    def __init__(self, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        self.output: list[str] = []
        self._news = threading.Condition()
        self._popen = subprocess.Popen(
            list(arguments),
            env={**environment(), **(extra or {})},
            cwd=tempfile.gettempdir(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def text(self) -> str:
        return "".join(self.output)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._news:
                self.output.append(line)
                self._news.notify_all()

    def wait_for_line(self, part: str, timeout: float = 30.0) -> str:
        def found() -> str | None:
            return next((line for line in self.output if part in line), None)

        with self._news:
            assert self._news.wait_for(found, timeout), f"no line with {part!r} in:\n{self.text}"
            return str(found())

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def wait(self, timeout: float = 10.0) -> int:
        """Exit status; subprocess.TimeoutExpired when it does not end."""
        code = self._popen.wait(timeout)
        self._reader.join(timeout)
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGINT)
            try:
                self._popen.wait(5.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._popen.pid, signal.SIGKILL)
                self._popen.wait(5.0)
        self._reader.join(5.0)
        if value is not None:
            print(f"--- output of {self._popen.args}:\n{self.text}")


class Graph:
    """This process's side of the isolated graph: one node, spun in a thread."""

    def __init__(self) -> None:
        os.environ.update(environment())
        self.context = rclpy.Context()
        rclpy.init(context=self.context)
        self.node = rclpy.create_node("probe", context=self.context)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self._ending = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self._ending:
            self._executor.spin_once(timeout_sec=0.1)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._thread.join(5.0)
        self.node.destroy_node()
        self._executor.shutdown()
        rclpy.shutdown(context=self.context)

    def record(self, kind: type[Message], topic: str, qos: QoSProfile = RELIABLE) -> Recording[Message]:
        recording: Recording[Message] = Recording()
        self.node.create_subscription(kind, topic, recording.add, qos)
        return recording

    def chunks(self, node: str = "/policy") -> Recording[ActionChunk]:
        return self.record(ActionChunk, f"{node}/chunk")

    def status(self, node: str = "/policy") -> Recording[PolicyStatus]:
        return self.record(PolicyStatus, f"{node}/status")

    def call(self, kind: Any, service: str, request: Any, timeout: float = 10.0) -> Any:
        """Answer of a service; AssertionError when there is none in time."""
        client = self.node.create_client(kind, service)
        try:
            assert client.wait_for_service(timeout), f"{service} is not there after {timeout} s"
            answered = threading.Event()
            future = client.call_async(request)
            future.add_done_callback(lambda _: answered.set())
            assert answered.wait(timeout), f"{service} did not answer within {timeout} s"
            return future.result()
        finally:
            self.node.destroy_client(client)

    def change_state(self, transition: str, node: str = "/policy", timeout: float = 30.0) -> bool:
        request = ChangeState.Request()
        request.transition.id = TRANSITIONS[transition]
        return bool(self.call(ChangeState, f"{node}/change_state", request, timeout).success)

    def send_configure(self, node: str = "/policy") -> None:
        """Ask for a configure whose answer nobody waits for."""
        client = self.node.create_client(ChangeState, f"{node}/change_state")
        assert client.wait_for_service(10.0)
        request = ChangeState.Request()
        request.transition.id = Transition.TRANSITION_CONFIGURE
        client.call_async(request)

    def shut_down(self, node: str = "/policy") -> bool:
        request = ChangeState.Request()
        request.transition.label = "shutdown"
        return bool(self.call(ChangeState, f"{node}/change_state", request).success)

    def state(self, node: str = "/policy") -> str:
        return str(self.call(GetState, f"{node}/get_state", GetState.Request()).current_state.label)

    def set_parameter(self, name: str, value: Any, node: str = "/policy") -> str:
        """Why it was refused, or an empty string."""
        request = SetParameters.Request(parameters=[Parameter(name, value=value).to_parameter_msg()])
        (result,) = self.call(SetParameters, f"{node}/set_parameters", request).results
        return "" if result.successful else (result.reason or "refused")

    def get_parameter(self, name: str, node: str = "/policy") -> Any:
        (value,) = self.call(GetParameters, f"{node}/get_parameters", GetParameters.Request(names=[name])).values
        return rclpy.parameter.parameter_value_to_python(value)


def stub_node(*parameters: str, namespace: str = "", **extra: str) -> Process:
    """A policy node with the stub policy; ``parameters`` are ``name:=value``, ``extra`` environment variables."""
    given = ["checkpoint:=stub", "profile:=demo", *parameters]
    arguments = [argument for parameter in given for argument in ("-p", parameter)]
    if namespace:
        arguments += ["-r", f"__ns:={namespace}"]
    return Process([*STUB, "--ros-args", *arguments], extra)


def stand_in_robot(*arguments: str) -> Process:
    return Process([*COMMAND, "robot", *arguments])


Result = TypeVar("Result")


def in_background(work: Callable[[], Result], timeout: float = 60.0) -> Callable[[], Result]:
    """Start ``work`` in a thread; the function returned waits for it and gives its result."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()

    def result() -> Result:
        thread.join(timeout)
        assert results, "the work in the background failed or did not end"
        return results[0]

    return result


@contextmanager
def repeating(work: Callable[[], object], period_s: float) -> Iterator[None]:
    """Do something again and again in a thread while the context lasts."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(period_s):
            work()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5.0)


def jpeg(pixels: np.ndarray) -> bytes:
    """uint8 [height, width, 3] RGB as a JPEG file."""
    buffer = io.BytesIO()
    PillowImage.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()
