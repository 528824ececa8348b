"""Fuzzing of the live doors: mutated requests of every kind. None may give a 500, hang, or leave the server ill."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from serving_stubs import StubPolicy, http, image, request_of, serving, websocket

from pi05_ros.errors import ObservationError
from pi05_ros.guard import check_state
from pi05_ros.observation import Observation
from pi05_ros.serving.app import Server
from pi05_ros.serving.codec import packb, unpackb

PROFILES = ("aloha", "droid", "libero", "ur5e")
_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**64, 2**70, -(2**63), 1e308, float("nan"), float("inf"), "", "x" * 300, "\x00", "\ud800",
    b"", b"\xff" * 10, [], {}, [[]], [{}], {"values": []}, {"base64": ""}, {"base64": "////"}, {"": {}},
    {"__ndarray__": True, "data": b"", "dtype": "<f4", "shape": [0]},
    {"__ndarray__": True, "data": b"abc", "dtype": "|O", "shape": [1]},
    {"__npgeneric__": True, "data": 1, "dtype": "<f2"}, {"nd": True},
    {"__numpy__": "AAAA", "dtype": "|u1", "shape": [3]},    {"data": [1, 2], "shape": [2, 1], "dtype": "float32"},
)  # fmt: skip
_KEYS = (
    "state", "prompt", "task", "images", "input", "observation", "parameters", "runtime", "model", "id", "request_id",
    "noise", "image_masks", "seed", "num_inference_steps", "action_horizon", "num_candidates", "timeout_ms",
    "output_format", "response_format", "action_space", "enable_prefix_cache", "observation.state", "cam_high",
)  # fmt: skip


class RefusingPolicy(StubPolicy):
    """Refuses, as the real policy does, what the doors cannot know to be wrong."""

    def prepare(self, observation: Observation, **how: Any) -> Any:
        check_state(observation.state.astype(np.float64), [])
        if observation.state.size == 0 or observation.state[0] == -1:
            raise ObservationError("state_width", "state: numbers expected")
        return super().prepare(observation, **how)


def odd_array(rng: random.Random) -> np.ndarray:
    shape = tuple(rng.choice((0, 1, 2, 3, 7, 14, 24)) for _ in range(rng.randrange(5)))
    dtype = rng.choice(("u1", "i8", "f4", ">f8", "?", "c8", "f2", "u8"))
    return np.full(shape, rng.choice((0, 1, 255)), dtype=dtype)


def mutate(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A copy of ``value`` with a few keys dropped, added, renamed or given nonsense."""
    if isinstance(value, dict) and depth < 5:
        changed = {}
        for key, item in value.items():
            roll = rng.random()
            if roll < 0.05:
                continue
            if roll < 0.08:
                key = rng.choice(_KEYS)
            changed[key] = mutate(rng, item, depth + 1)
        if rng.random() < 0.1:
            changed[rng.choice(_KEYS)] = rng.choice(_ODD)
        return changed
    roll = rng.random()
    if roll < 0.08:
        return rng.choice(_ODD)
    if roll < 0.12:
        return odd_array(rng)
    return value


def seeds(profile: str) -> list[dict[str, Any]]:
    """Proper requests to start from; ``demo`` is asked by generic names."""
    if profile == "demo":
        frames = {f"observation.images.{name}": image() for name in ("base", "left_wrist", "right_wrist")}
        raw = {**frames, "observation.state": np.zeros(7, np.float32), "prompt": "pick up the red block"}
    else:
        raw = request_of(profile)
    cameras = {"aloha": ("cam_high", "cam_left_wrist", "cam_right_wrist")}
    inner = {"images": {name: image() for name in cameras.get(profile, ())}, "state": np.zeros(14, np.float32)}
    envelope = {
        "model": "stub/checkpoint",
        "id": "a",
        "input": {"task": "x", "observation": inner},
        "parameters": {"num_inference_steps": 3, "seed": 1, "num_candidates": 2, "action_horizon": 4},
        "runtime": {"prefix_cache": "auto", "timeout_ms": 2000, "output_format": "list", "response_format": "raw"},
    }
    controls = {"noise": np.zeros((8, 32), np.float32), "request_id": 1, "timeout_ms": 1000, "seed": 3}
    return [raw, {**raw, **controls}, envelope]


def as_json(value: Any) -> bytes:
    def plain(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return item.tolist() if item.dtype.kind != "c" else None
        return item.decode("latin1") if isinstance(item, bytes) else str(item)

    return json.dumps(value, default=plain, skipkeys=True).encode("utf-8", "surrogatepass")


def as_msgpack(value: Any) -> bytes | None:
    try:
        return packb(value)
    except (TypeError, ValueError, OverflowError):
        return None  # what msgpack cannot say (integers beyond 64 bits, lone surrogates)


def scramble(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed) + 1)
        if rng.random() < 0.5:
            changed[at : at + 1] = rng.randbytes(1)
        else:
            del changed[at : at + rng.randrange(1, 20)]
    return bytes(changed)


def attack(server: Server, rng: random.Random, profile: str, count: int) -> dict[Any, int]:
    """Send ``count`` requests by every door; outcomes by status (HTTP) or kind of frame (websockets)."""
    outcomes: dict[Any, int] = {}
    sockets: dict[str, Any] = {}
    contexts: dict[str, Any] = {}
    for _ in range(count):
        value = mutate(rng, rng.choice(seeds(profile)))
        door = rng.choice(("json", "msgpack", "/", "/v1/actions/realtime"))
        data = as_json(value) if door == "json" else as_msgpack(value)
        if data is None:
            continue
        if rng.random() < 0.15:
            data = scramble(rng, data)
        if door in ("json", "msgpack"):
            status, _, body = http(server, "/v1/actions/generations", data, Content_Type=f"application/{door}")
            assert status in (200, 400, 404, 413, 415, 422, 429, 504), (status, body, value)
            assert "Traceback" not in str(body)
            outcomes[status] = outcomes.get(status, 0) + 1
            continue
        if door not in sockets:
            contexts[door] = websocket(server, door)
            sockets[door] = contexts[door].__enter__()
        sockets[door].send(data)
        reply = sockets[door].recv(timeout=20)
        kind = "text" if isinstance(reply, str) else "error" if b"error" in reply[:8] else "answer"
        assert "internal" not in str(reply[:40]), (reply, value)
        outcomes[door, kind] = outcomes.get((door, kind), 0) + 1
    for context in contexts.values():
        context.__exit__(None, None, None)
    return outcomes


def fuzz(count: int, seed: int) -> dict[Any, int]:
    """Attack a server for every robot, and see that each answers a proper request afterwards."""
    rng = random.Random(seed)
    outcomes: dict[Any, int] = {}
    for profile in PROFILES:
        with serving(RefusingPolicy(8, 14), profile=profile) as server:
            for outcome, number in attack(server, rng, profile, count // len(PROFILES)).items():
                outcomes[outcome] = outcomes.get(outcome, 0) + number
            with websocket(server) as connection:
                connection.send(packb(request_of(profile, 3.0)))
                assert unpackb(connection.recv(timeout=10))["actions"][0, 0] == 3.0
            assert http(server, "/healthz")[0] == 200
    return outcomes
