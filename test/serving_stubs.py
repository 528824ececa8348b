"""Stand-ins for the policy: what the doors and the scheduler see of it, without a network."""

from __future__ import annotations

import http.client as http_client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import websockets
import websockets.sync.client

from pi05_ros.chunk import ActionChunk
from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.errors import ActionError
from pi05_ros.observation import Observation
from pi05_ros.profile import load_profile
from pi05_ros.serving.app import Server
from pi05_ros.serving.codec import unpackb
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.settings import ServerSettings


class StubPolicy:
    """Answers with numbers that come from the observation, so that a mixed-up reply shows.

    ``actions[i, j]`` is ``state[0] + i``; the first state value -1 makes `run` fail, NaN makes `finish` fail.
    """

    def __init__(
        self,
        horizon: int = 8,
        action_dim: int = 4,
        seconds: float | Callable[[int], float] = 0.0,
        profile: Any = None,
        contract: Any = None,
        checkpoint: Any = None,
    ) -> None:
        self.horizon, self.action_dim = horizon, action_dim
        self.seconds = seconds
        self.groups: list[list[float]] = []
        self.threads: set[int] = set()
        self.started = threading.Event()
        self.profile, self.contract, self.checkpoint = profile, contract, checkpoint

    def prepare(self, observation: Observation, **how: Any) -> SimpleNamespace:
        self.threads.add(threading.get_ident())
        return SimpleNamespace(observation=observation, how=how)

    def run(self, members: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        values = [float(np.asarray(one.observation.state).reshape(-1)[0]) for one in members]
        self.groups.append(values)
        self.started.set()
        seconds = self.seconds(len(members)) if callable(self.seconds) else self.seconds
        if seconds:
            time.sleep(seconds)
        if -1.0 in values:
            raise RuntimeError("the network broke")
        return [(value, one) for value, one in zip(values, options, strict=True)]

    def finish(self, prepared: Any, result: Any) -> ActionChunk:
        value, options = result
        if np.isnan(value):
            raise ActionError("nan", "actions: finite numbers expected, got nan")
        actions = np.repeat(value + np.arange(self.horizon, dtype=np.float32)[:, None], self.action_dim, axis=1)
        names = (
            tuple(f"action_{index}" for index in range(self.action_dim))
            if self.contract is None
            else self.contract.action_names
        )
        return ActionChunk(
            actions=actions.astype(np.float32),
            names=names,
            units=("unitless",) * self.action_dim,
            control_modes=("unspecified",) * self.action_dim,
            step_time_s=0.02,
            executed_steps=self.horizon,
            prompt=prepared.observation.prompt,
            checkpoint_id="stub",
            profile="stub",
            denoise_steps=getattr(options, "num_steps", None) or 10,
            noise_seed=getattr(options, "seed", None),
            timings_ms={"preprocess": 0.1, "prefix": 0.2, "action_denoise": 0.3, "postprocess": 0.1},
        )


def observation(value: float = 0.0, prompt: str = "pick") -> Observation:
    return Observation(images={}, state=np.array([value, 0.0], np.float32), prompt=prompt)


def facts(profile: str = "aloha", horizon: int = 8, image_size: int = 224) -> PolicyFacts:
    """The facts of a stub behind a shipped profile; slots as a checkpoint for it would have them."""
    robot = load_profile(profile)
    slots = [(camera.slot, name) for name, camera in robot.cameras.items() if camera.slot is not None]
    slots += [(slot, None) for slot in robot.absent_slots]
    return PolicyFacts(
        profile=robot,
        slots=tuple(slots),
        checkpoint_id="stub/checkpoint",
        checkpoint_format="lerobot",
        served_model_names=("stub/checkpoint", "lerobot/pi05_base"),
        image_size=image_size,
        state_dim=len(robot.state.dims),
        action_dim=len(robot.action.dims),
        padded_action_dim=32,
        horizon=horizon,
        executed_steps=horizon,
        step_time_s=0.02,
        num_steps=10,
        normalization="quantile",
        prefix_length=968,
        dtype="float32",
        device="cpu",
    )


@contextmanager
def serving(
    policy: StubPolicy | None = None,
    profile: str = "aloha",
    scheduler: Scheduler | None = None,
    active: bool = True,
    port: int = 0,
    **settings: Any,
) -> Iterator[Server]:
    """A running server on a free port with a stub behind it."""
    known = facts(profile)
    scheduler = scheduler or Scheduler()
    scheduler.start()
    server = Server(known, scheduler, ServerSettings(port=port, **settings))
    server.start()
    if active:
        scheduler.activate(policy or StubPolicy(known.horizon, known.action_dim))
    try:
        yield server
    finally:
        server.stop()
        assert scheduler.stop(5.0)


def image(value: int = 0, shape: tuple[int, ...] = (24, 32, 3)) -> np.ndarray:
    return np.full(shape, value, np.uint8)


def request_of(profile: str, value: float = 0.0) -> dict[str, Any]:
    """What an OpenPI client of this robot sends; the first state value is ``value``."""

    def state(width: int) -> np.ndarray:
        numbers = np.zeros(width, np.float32)
        numbers[0] = value
        return numbers

    if profile == "aloha":
        cameras = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
        images = {name: image(shape=(3, 24, 32)) for name in cameras}
        return {"state": state(14), "images": images, "prompt": "fold the towel"}
    if profile == "droid":
        return {
            "observation/exterior_image_1_left": image(),
            "observation/wrist_image_left": image(),
            "observation/joint_position": state(7),
            "observation/gripper_position": np.zeros(1),
            "prompt": "open the drawer",
        }
    if profile in ("libero", "libero_openpi"):
        return {
            "observation/image": image(),
            "observation/wrist_image": image(),
            "observation/state": state(8),
            "prompt": "put the bowl on the plate",
        }
    if profile == "ur5e":
        return {
            "base_rgb": image(),
            "wrist_rgb": image(),
            "joints": state(6),
            "gripper": np.zeros(1),
            "prompt": "push the button",
        }
    raise ValueError(profile)


def http(
    server: Server, path: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """One HTTP request: status, headers, and the body (decoded where it is JSON or msgpack).

    ``body`` is sent as JSON unless it is bytes; header names are given with underscores.
    """
    connection = http_client.HTTPConnection(*server.address, timeout=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        sent.setdefault("Content-Type", "application/json")
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
        response = connection.getresponse()
        content: Any = response.read()
        kind = response.headers.get_content_type()
        if kind == "application/json":
            content = json.loads(content)
        elif kind == "application/msgpack":
            content = unpackb(content)
        return response.status, dict(response.headers), content
    finally:
        connection.close()


@contextmanager
def websocket(server: Server, path: str = "/", **options: Any) -> Iterator[Any]:
    """A websocket as openpi-client opens it; the metadata frame has been read."""
    url = server.url.replace("http", "ws", 1) + path
    with websockets.sync.client.connect(url, compression=None, max_size=None, proxy=None, **options) as connection:
        connection.metadata = unpackb(connection.recv(timeout=10))
        yield connection


def refused_status(server: Server, path: str, **options: Any) -> int:
    """The status that a websocket handshake is refused with."""
    try:
        with websocket(server, path, **options):
            return 101
    except websockets.InvalidStatus as error:
        return error.response.status_code
