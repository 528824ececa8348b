"""Topics in, chunks out, over real DDS between processes: every chunk is what the Python API answers to the same input.

The recorder in this process rebuilds the observation of a chunk from the messages whose stamps the chunk names, with
code of its own: plain numpy for the raw images, Pillow for the JPEG, joints by name.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from builtin_interfaces.msg import Time
from PIL import Image as PillowImage
from rclpy.qos import QoSProfile, ReliabilityPolicy
from ros_helpers import COMMAND, Graph, Process, stand_in_robot
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros import load_policy
from pi05_ros.msg import ActionChunk
from pi05_ros.observation import Observation
from pi05_ros.profile import load_profile

pytestmark = pytest.mark.usefixtures("threads_as_in_the_node")
CHUNKS = 200
SEED = 1000
CAMERAS = {
    "base": (Image, "base/image_raw"),
    "left_wrist": (Image, "left_wrist/image_raw"),
    "right_wrist": (CompressedImage, "right_wrist/image_raw/compressed"),
}
KEPT = 120  # messages of each input: four seconds of images


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def ns(stamp: Time) -> int:
    return int(stamp.sec) * 10**9 + int(stamp.nanosec)


class Recorder:
    """The last messages of every input by stamp, and for each chunk those that it names, taken when it arrives."""

    def __init__(self, graph: Graph) -> None:
        self._lock = threading.Lock()
        self._messages: dict[str, dict[int, Any]] = {name: {} for name in (*CAMERAS, "joints")}
        self.answered: list[tuple[ActionChunk, dict[str, Any]]] = []
        self.enough = threading.Event()
        # Reliable and deep: what the node saw must not be missing here.
        sensor = QoSProfile(depth=30, reliability=ReliabilityPolicy.RELIABLE)
        for name, (kind, topic) in CAMERAS.items():
            graph.node.create_subscription(kind, topic, self._keeper(name), sensor)
        graph.node.create_subscription(JointState, "joint_states", self._keeper("joints"), sensor)
        chunk = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
        graph.node.create_subscription(ActionChunk, "policy/chunk", self._on_chunk, chunk)

    def _keeper(self, name: str) -> Any:
        def keep(message: Any) -> None:
            with self._lock:
                kept = self._messages[name]
                kept[ns(message.header.stamp)] = message
                if len(kept) > KEPT:
                    del kept[next(iter(kept))]

        return keep

    def _on_chunk(self, chunk: ActionChunk) -> None:
        with self._lock:
            named = {
                name: self._messages[name].get(ns(stamp))
                for name, stamp in zip(chunk.input_names, chunk.input_stamps, strict=True)
            }
        if not self.answered and None in named.values():
            return  # made of what was sent before this process was discovered
        self.answered.append((chunk, named))
        if len(self.answered) >= CHUNKS:
            self.enough.set()


def observation(chunk: ActionChunk, named: dict[str, Any], state_names: list[str]) -> Observation:
    images = {}
    for name, (kind, _) in CAMERAS.items():
        message = named[name]
        if kind is Image:
            assert message.encoding == "rgb8"
            images[name] = np.frombuffer(message.data, np.uint8).reshape(message.height, message.width, 3)
        else:
            images[name] = np.asarray(PillowImage.open(io.BytesIO(message.data.tobytes())))
    positions = dict(zip(named["joints"].name, named["joints"].position, strict=True))
    return Observation(images, np.array([positions[name] for name in state_names]), chunk.prompt)


def test_two_hundred_chunks_equal_the_python_api_s(graph: Graph) -> None:
    recorder = Recorder(graph)
    parameters = ["-p", f"seed:={SEED}", "-p", "trigger_rate_hz:=20.0", "-p", "num_steps:=3"]
    with (
        stand_in_robot(),
        Process([*COMMAND, "node", "--checkpoint", "builtin", "--profile", "demo", "--ros-args", *parameters]),
    ):
        assert recorder.enough.wait(240.0), f"{len(recorder.answered)} of {CHUNKS} chunks came"

    policy = load_policy(profile="demo")
    profile = load_profile("demo")
    state_names = [dim.joint_name for dim in profile.state.dims]
    assert len({ns(chunk.header.stamp) for chunk, _ in recorder.answered}) == len(recorder.answered)
    newest = 0
    # Chunks sent before this process was discovered are nobody's loss; from the first one on none may be missing.
    first = recorder.answered[0][0].chunk_index
    for index, (chunk, named) in enumerate(recorder.answered[:CHUNKS], start=first):
        assert list(chunk.input_names) == [*CAMERAS, "joints"]
        stamps = dict(zip(chunk.input_names, map(ns, chunk.input_stamps), strict=True))
        assert ns(chunk.header.stamp) == stamps["base"] > newest
        newest = stamps["base"]
        assert all(message is not None for message in named.values()), f"chunk {index} names a stamp nobody sent"
        assert all(abs(stamps[camera] - stamps["base"]) <= 50_000_000 for camera in CAMERAS)
        assert all(0.0 <= age < 1.0 for age in chunk.input_ages)

        direct = policy.infer(observation(chunk, named, state_names), seed=chunk.noise_seed, num_steps=3)
        sent = torch.tensor(chunk.actions, dtype=torch.float32).reshape(chunk.horizon, chunk.action_dim)
        assert torch.equal(sent, torch.from_numpy(direct.actions)), f"chunk {index} is not what the policy answers"

        assert chunk.chunk_index == index
        assert chunk.noise_seed == SEED + index
        assert chunk.denoise_steps == 3
        assert (chunk.horizon, chunk.action_dim) == direct.actions.shape == (50, 7)
        assert list(chunk.names) == [dim.name for dim in profile.action.dims]
        assert list(chunk.units) == [dim.unit for dim in profile.action.dims]
        assert list(chunk.control_modes) == [dim.control for dim in profile.action.dims]
        assert (chunk.step_time.sec, chunk.step_time.nanosec) == (0, 40_000_000)
        assert chunk.executed_steps == 25
        assert chunk.prompt == profile.prompt
        assert chunk.profile == "demo"
        assert chunk.checkpoint_id == direct.checkpoint_id
        assert list(chunk.guard_flags) == list(direct.guard_flags)
        assert chunk.clamp_count == direct.clamp_count
        timings = dict(zip(chunk.stage_names, chunk.stage_ms, strict=True))
        assert list(timings) == ["wait", *direct.timings_ms, "total"]
        assert timings["total"] >= timings["prefix"] + timings["action_denoise"] > 0.0


def test_other_observations_and_seeds_give_other_chunks() -> None:
    # What the equality above would not notice: a model that answers everything alike.
    policy = load_policy(profile="demo")
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, (480, 640, 3), dtype=np.uint8) for name in CAMERAS}
    state = np.zeros(7)
    base = policy.infer(Observation(images, state, "pick"), seed=0, num_steps=3).actions
    dark = {**images, "right_wrist": images["right_wrist"] // 2}
    for other in (
        policy.infer(Observation(dark, state, "pick"), seed=0, num_steps=3),
        policy.infer(Observation(images, state + 0.3, "pick"), seed=0, num_steps=3),
        policy.infer(Observation(images, state, "place"), seed=0, num_steps=3),
        policy.infer(Observation(images, state, "pick"), seed=1, num_steps=3),
    ):
        assert not np.array_equal(other.actions, base)
