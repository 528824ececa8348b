"""The node under random faults, through its topics and services alone: no crash, no stale answer, no leak.

    SOAK_SECONDS=600 SOAK_SEED=1 SOAK_REPORT=docs/soak_node.md pytest -m soak test/test_soak_node.py

Every message that the robot sends is remembered as good or bad, and every prompt with the time in which it was in
force, so that each chunk can be held against what it may rest on.
"""

from __future__ import annotations

import array
import math
import os
import platform
import random
import signal
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rclpy
import ros_helpers
from rclpy.qos import QoSProfile, ReliabilityPolicy
from ros_helpers import RELIABLE, Graph, Process, stub_node
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Empty, String

from pi05_ros.msg import ActionChunk
from pi05_ros.profile import load_profile
from pi05_ros.srv import SetPrompt
from pi05_ros.synchronizer import SyncSettings

SHORT_S, LONG_S = 20.0, 600.0
PERIOD_S = 0.05
CAMERAS = ("base", "left_wrist", "right_wrist")
STREAMS = (*CAMERAS, "joints")
SYNC = SyncSettings()
ANSWER_S = 20.0  # the machine that runs tests may be busy; a service that hangs takes longer
RECOVERY_S = 20.0
# Between the reading of the prompt and the clock's, the inference thread may have to wait for a processor.
PROMPT_SLACK_S = 0.25
SETTLING = 2  # rest points after which imports and caches are done
MB_KEPT = 12.0


class FaultyRobot:
    """Publishes profile demo's topics; streams can be stopped or spoilt. ``sent``: stream -> stamp -> fault."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._lock = threading.Lock()
        sensor = QoSProfile(depth=5, reliability=ReliabilityPolicy.RELIABLE)
        create = graph.node.create_publisher
        self._publishers = {
            "base": create(Image, "base/image_raw", sensor),
            "left_wrist": create(Image, "left_wrist/image_raw", sensor),
            "right_wrist": create(CompressedImage, "right_wrist/image_raw/compressed", sensor),
            "joints": create(JointState, "joint_states", sensor),
        }
        self._names = [dim.joint_name for dim in load_profile("demo").state.dims]
        pixels = np.full((48, 64, 3), 127, np.uint8)
        self._pixels = array.array("B", pixels.tobytes())
        self._jpeg = array.array("B", ros_helpers.jpeg(pixels))
        self.sent: dict[str, dict[int, str]] = {name: {} for name in STREAMS}
        self.faults: dict[str, str] = {}  # stream -> what is wrong with it

    def spoil(self, stream: str, fault: str) -> None:
        with self._lock:
            self.faults[stream] = fault

    def heal(self) -> None:
        with self._lock:
            self.faults.clear()

    def publish(self) -> None:
        with self._lock:
            for stream in STREAMS:
                self._publish(stream, self.faults.get(stream, ""))

    def _publish(self, stream: str, fault: str) -> None:
        if fault == "stopped":
            return
        stamp_ns = time.time_ns() + {"ahead": 3600, "behind": -3600}.get(fault, 0) * 10**9
        message = self._message(stream, fault)
        self.sent[stream][stamp_ns] = fault  # before it is sent: the node may answer at once
        message.header.stamp = rclpy.time.Time(nanoseconds=0 if fault == "unstamped" else stamp_ns).to_msg()
        self._publishers[stream].publish(message)

    def _message(self, stream: str, fault: str) -> Any:
        if stream == "joints":
            positions = [0.1] * len(self._names)
            if fault in ("nan", "inf"):
                positions[2] = float(fault)
            names = list(self._names)
            if fault == "missing":
                del names[2], positions[2]
            return JointState(name=names, position=positions)
        if stream == "right_wrist":
            data = {"corrupt": self._jpeg[:40], "empty": array.array("B")}.get(fault, self._jpeg)
            return CompressedImage(format="tiff" if fault == "encoding" else "jpeg", data=data)
        message = Image(height=48, width=64, encoding="rgb8", step=192, data=self._pixels)
        if fault == "encoding":
            message.encoding = "16UC1"
        elif fault == "corrupt":
            message.step = 100
        elif fault == "empty":
            message.height = message.width = 0
        return message


IMAGE_FAULTS = ("stopped", "ahead", "behind", "unstamped", "corrupt", "empty", "encoding")
JOINT_FAULTS = ("stopped", "ahead", "behind", "unstamped", "nan", "inf", "missing")
PARAMETERS: tuple[tuple[str, Any, bool], ...] = (
    ("trigger", "rate", True),
    ("trigger", "continuous", True),
    ("trigger", "request", True),
    ("trigger", "sometimes", False),
    ("trigger_rate_hz", 5.0, True),
    ("trigger_rate_hz", 50.0, True),
    ("trigger_rate_hz", -1.0, False),
    ("seed", 7, True),
    ("seed", -1, True),
    ("num_steps", 3, True),
    ("num_steps", 0, True),
    ("request_timeout_s", 0.05, True),
    ("prompt", 3, False),
)


@dataclass(frozen=True)
class Span:
    """Something that began between two instants (ns): when it was asked for, and when it was confirmed."""

    asked_ns: int
    confirmed_ns: int
    value: Any


@dataclass(frozen=True)
class Rest:
    """The process while nothing is configured."""

    at_s: float
    threads: int
    files: int
    rss_mb: float


class Soak:
    """Random faults, and what they are remembered by."""

    def __init__(self, graph: Graph, node: Process, robot: FaultyRobot, seed: int) -> None:
        self.graph, self.node, self.robot = graph, node, robot
        self.random = random.Random(seed)
        self.chunks, self.status = graph.chunks(), graph.status()
        self.prompt_topic = graph.node.create_publisher(String, "/policy/prompt", RELIABLE)
        self.requests = graph.node.create_publisher(Empty, "/policy/request", RELIABLE)
        self.prompts = [Span(0, 0, load_profile("demo").prompt)]
        self.activity: list[Span] = []  # True from an activate on, False from whatever ends it
        self.rests: list[Rest] = []
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()

    # One kind of fault each

    def spoil(self) -> None:
        stream = self.random.choice(STREAMS)
        fault = self.random.choice(JOINT_FAULTS if stream == "joints" else IMAGE_FAULTS)
        self.counts[f"{'joints' if stream == 'joints' else 'image'} {fault}"] += 1
        self.robot.spoil(stream, fault)

    def heal(self) -> None:
        self.counts["healed"] += 1
        self.robot.heal()

    def change_prompt(self) -> None:
        prompt = f"prompt {len(self.prompts)}"
        way = self.random.choice(("topic", "parameter", "service"))
        self.counts[f"prompt by {way}"] += 1
        asked = time.time_ns()
        if way == "topic":
            self.prompt_topic.publish(String(data=prompt))
            deadline = time.monotonic() + ANSWER_S
            while self.graph.get_parameter("prompt") != prompt:
                assert time.monotonic() < deadline, f"{prompt} never came into force"
                time.sleep(0.02)
        elif way == "parameter":
            assert self.graph.set_parameter("prompt", prompt) == ""
        else:
            answer = self.graph.call(SetPrompt, "/policy/set_prompt", SetPrompt.Request(prompt=prompt), ANSWER_S)
            assert answer.success, answer.message
        self.prompts.append(Span(asked, time.time_ns(), prompt))

    def change_parameter(self) -> None:
        name, value, fits = self.random.choice(PARAMETERS)
        self.counts["parameter changed" if fits else "parameter refused"] += 1
        refused = self.graph.set_parameter(name, value)
        assert (refused == "") == fits, (name, value, refused)

    def request(self) -> None:
        self.counts["request"] += 1
        self.requests.publish(Empty())

    def change_state(self) -> None:
        transition = self.random.choice(("configure", "activate", "activate", "deactivate", "cleanup"))
        before = self.graph.state()
        done = self._transition(transition)
        self.counts[f"{transition} {'done' if done else 'refused'}"] += 1
        fits = (before, transition) in {
            ("unconfigured", "configure"), ("inactive", "activate"), ("active", "deactivate"), ("inactive", "cleanup"),
        }  # fmt: skip
        assert done == fits, (before, transition, done)

    def _transition(self, transition: str) -> bool:
        asked = time.time_ns()
        done = self.graph.change_state(transition, timeout=ANSWER_S)
        if done and transition in ("activate", "deactivate"):
            self.activity.append(Span(asked, time.time_ns(), transition == "activate"))
        return done

    # What must always be possible

    def to_state(self, wanted: str) -> None:
        """The shortest way; every step must succeed."""
        ways = {
            "active": {"unconfigured": "configure", "inactive": "activate"},
            "unconfigured": {"active": "deactivate", "inactive": "cleanup"},
        }
        while (state := self.graph.state()) != wanted:
            assert self._transition(ways[wanted][state]), (state, wanted)

    def recover(self) -> None:
        """With everything in order, chunks come again and the node says that all is well."""
        self.robot.heal()
        assert self.graph.set_parameter("trigger", "continuous") == ""
        self.to_state("active")
        heard, told = len(self.chunks), len(self.status)
        self.chunks.wait_for_count(heard + 3, RECOVERY_S)
        self.status.wait_for(lambda s: s.state == "active" and s.reason == "", RECOVERY_S, told)
        self.counts["recovered"] += 1

    def rest(self) -> None:
        """Give everything back and look at what is left."""
        self.to_state("unconfigured")
        time.sleep(0.5)  # the thread that answered the last service call ends a moment later
        process = Path("/proc") / str(self.node.pid)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        self.rests.append(
            Rest(
                time.monotonic() - self.began,
                int(status["Threads"]),
                len(list((process / "fd").iterdir())),
                int(status["RssAnon"].split()[0]) / 1024,
            )
        )

    def tour(self) -> None:
        """Every fault once, for longer than an input may be old; images on one, two or three cameras."""
        for index, fault in enumerate([*IMAGE_FAULTS, *JOINT_FAULTS]):
            joints = index >= len(IMAGE_FAULTS)
            for stream in ("joints",) if joints else CAMERAS[index % 3 :]:
                self.counts[f"{'joints' if joints else 'image'} {fault}"] += 1
                self.robot.spoil(stream, fault)
            time.sleep(SYNC.max_age_s + 0.2)
            self.robot.heal()
            time.sleep(0.1)

    def run(self, seconds: float) -> None:
        kinds: tuple[Callable[[], None], ...] = (
            self.spoil, self.spoil, self.heal, self.change_prompt, self.change_parameter, self.request,
            self.change_state,
        )  # fmt: skip
        for _ in range(SETTLING):
            self.recover()
            self.rest()
        self.recover()
        self.tour()
        rest_every, rested = seconds / 20.0, time.monotonic()
        self.recover()
        while time.monotonic() - self.began < seconds:
            for _ in range(self.random.randint(1, 12)):
                self.random.choice(kinds)()
                time.sleep(self.random.choice((0.0, 0.05, 0.3, 1.0)))
            self.recover()
            if time.monotonic() - rested > rest_every:
                self.rest()
                rested = time.monotonic()
                self.recover()
        self.rest()

    # What every chunk is held against

    def check_chunks(self) -> tuple[float, int]:
        """The oldest input of all chunks (seconds), and the number of activations that gave one."""
        oldest, activations = 0.0, 0
        previous: ActionChunk | None = None
        for chunk in self.chunks:
            stamps = dict(zip(chunk.input_names, map(ns, chunk.input_stamps), strict=True))
            ages = dict(zip(chunk.input_names, chunk.input_ages, strict=True))
            where = f"chunk {chunk.chunk_index} of {ns(chunk.header.stamp)}: {ages}"
            assert set(stamps) == set(STREAMS), where
            for stream in STREAMS:
                # Joints are merged one by one: a message that lacks one is good for the others. The joint that it lacks
                # is the one that is NaN in others, so that no other bad message can be the oldest of a set.
                fault = self.robot.sent[stream].get(stamps[stream], "nobody sent it")
                assert fault in ("", "missing"), f"{where} rests on a message of {stream} that is {fault}"
                assert -SYNC.future_tolerance_s <= ages[stream] <= SYNC.max_age_s, where
            for camera in CAMERAS:
                assert abs(stamps[camera] - stamps["base"]) <= SYNC.slop_s * 1e9, where
            oldest = max(oldest, *ages.values())
            assert all(map(math.isfinite, chunk.actions)), where

            if chunk.chunk_index == 0:
                activations += 1
            else:
                assert previous is not None and chunk.chunk_index == previous.chunk_index + 1, where
                assert ns(chunk.header.stamp) > ns(previous.header.stamp), where
            started = stamps["base"] + round(ages["base"] * 1e9)
            assert chunk.prompt in self.in_force(started), f"{where}: {chunk.prompt!r} was not in force"
            assert self.may_answer(started), f"{where}: the node was not active"
            previous = chunk
        return oldest, activations

    def in_force(self, started_ns: int) -> list[str]:
        """Prompts that the inference may have seen: each from its asking to the confirmation of the next."""
        ends = [span.confirmed_ns for span in self.prompts[1:]] + [2**63]
        earliest = started_ns - round(PROMPT_SLACK_S * 1e9)
        return [
            span.value
            for span, end in zip(self.prompts, ends, strict=True)
            if span.asked_ns <= started_ns and end >= earliest
        ]

    def may_answer(self, started_ns: int) -> bool:
        """Whether the node was active, or between the asking for a change and its confirmation."""
        place = bisect_right([span.asked_ns for span in self.activity], started_ns) - 1
        if place < 0:
            return False
        span = self.activity[place]
        return bool(span.value) or started_ns <= span.confirmed_ns

    def check_leaks(self) -> None:
        settled, last = self.rests[SETTLING - 1], self.rests[-1]
        assert last.threads == settled.threads, self.rests
        assert last.files == settled.files, self.rests
        assert last.rss_mb - settled.rss_mb < MB_KEPT, self.rests

    def table(self, seconds: float, seed: int, oldest: float, activations: int, code: int, end_s: float) -> str:
        settled, last = self.rests[SETTLING - 1], self.rests[-1]
        reasons = Counter(status.reason.partition(":")[0] for status in self.status if status.reason)
        lines = [
            "| what | value |", "|---|---|",
            f"| duration | {seconds:.0f} s, seed {seed} |",
            f"| machine | {platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f}, "
            f"Python {platform.python_version()} |",
            f"| chunks | {len(self.chunks)} in {activations} activations |",
            f"| oldest input of a chunk | {oldest * 1e3:.0f} ms (limit {SYNC.max_age_s * 1e3:.0f} ms) |",
            f"| recoveries, each followed by chunks | {self.counts['recovered']} |",
            f"| threads at rest, settled and last | {settled.threads}, {last.threads} |",
            f"| open files at rest, settled and last | {settled.files}, {last.files} |",
            f"| private memory at rest, settled and last | {settled.rss_mb:.1f} MB, {last.rss_mb:.1f} MB "
            f"({len(self.rests)} rest points, at most {max(rest.rss_mb for rest in self.rests):.1f} MB) |",
            f"| SIGINT at the end | exit status {code} after {end_s:.1f} s |",
            "", "| fault | times |", "|---|---|",
            *(f"| {name} | {count} |" for name, count in sorted(self.counts.items()) if name != "recovered"),
            "", "| reason on the status topic | messages |", "|---|---|",
            *(f"| `{code}` | {count} |" for code, count in sorted(reasons.items())),
        ]  # fmt: skip
        return "\n".join(lines)


def ns(stamp: Any) -> int:
    return int(stamp.sec) * 10**9 + int(stamp.nanosec)


@pytest.mark.parametrize(
    "seconds",
    [SHORT_S, pytest.param(float(os.environ.get("SOAK_SECONDS", LONG_S)), marks=pytest.mark.soak, id="long")],
)
def test_random_faults(seconds: float) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    print(f"SOAK_SEED={seed}")
    with Graph() as graph, stub_node("trigger:=continuous", STUB_INFER_S="0.005") as node:
        robot = FaultyRobot(graph)
        soak = Soak(graph, node, robot, seed)
        with ros_helpers.repeating(robot.publish, PERIOD_S):
            soak.run(seconds)
        asked = time.monotonic()
        node.signal(signal.SIGINT)
        code = node.wait(10.0)
        end_s = time.monotonic() - asked
    oldest, activations = soak.check_chunks()
    table = soak.table(seconds, seed, oldest, activations, code, end_s)
    print(table)
    report = os.environ.get("SOAK_REPORT")
    if report:
        command = f"SOAK_SECONDS={seconds:.0f} SOAK_SEED={seed} pytest -m soak test/test_soak_node.py"
        Path(report).write_text(
            "# The node under random faults\n\n"
            f"Made on {time.strftime('%Y-%m-%d')} by `{command}` (`make soak` runs it as well).\n"
            "The policy is a stub of 5 ms; everything goes through topics and services. Each chunk was held against\n"
            "what the robot had sent: only good messages, none older than the limit, stamps rising within an\n"
            f"activation, a prompt that was in force, an active node.\n\n{table}\n",
            encoding="utf-8",
        )
    assert code == 0 and end_s < 2.0, node.text
    assert "Traceback" not in node.text and "callback failed" not in node.text, node.text
    assert soak.counts["recovered"] >= 4 and activations >= 3
    soak.check_leaks()
