"""Clients as the reference document's examples write them, against a base-like checkpoint under the profile raw."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import websockets.sync.client

from pi05_ros.checkpoint.make import SIZES, write_lerobot
from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.policy import load_policy
from pi05_ros.serving.app import Server
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.settings import ServerSettings

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("checkpoint") / "base"
    write_lerobot(folder, replace(SIZES["tiny"], horizon=50))
    policy = load_policy(folder, device="cpu")
    scheduler = Scheduler()
    scheduler.start()
    facts = PolicyFacts.of(
        policy.contract, policy.checkpoint, dtype="float32", device="cpu", served_model_names=("lerobot/pi05_base",)
    )
    server = Server(facts, scheduler, ServerSettings(port=0))
    server.start()
    scheduler.activate(policy)
    yield server.url
    server.stop()
    assert scheduler.stop(10.0)


def post(url: str, body: bytes, headers: dict[str, str]) -> tuple[str, bytes]:
    request = urllib.request.Request(f"{url}/v1/actions/generations", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.headers["Content-Type"], response.read()


def pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return value


def unpack(spelled: dict) -> Any:
    """Reads keys of either kind, as the examples' clients do."""
    if spelled.get("__ndarray__") or spelled.get(b"__ndarray__"):
        data, dtype, shape = (spelled.get(key, spelled.get(key.encode())) for key in ("data", "dtype", "shape"))
        return np.ndarray(buffer=data, dtype=np.dtype(dtype), shape=shape)
    return spelled


def test_json_over_http(url: str) -> None:
    picture = np.zeros((224, 224, 3), np.uint8).tolist()
    observation = {"images": dict.fromkeys(CAMERAS, picture), "state": np.zeros(32, np.float32).tolist()}
    body = {
        "model": "lerobot/pi05_base",
        "input": {"task": "pick up the block", "observation": observation},
        "runtime": {"return_timing": True, "prefix_cache": "auto", "cuda_graph": "auto"},
    }
    kind, reply = post(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    data = json.loads(reply)
    actions = data["data"][0]["action"]["values"]
    assert kind.startswith("application/json") and np.shape(actions) == (50, 32)
    assert data["timings"]["action_denoise_ms"] > 0 and data["model"] == "lerobot/pi05_base"


def test_msgpack_with_the_raw_reply(url: str) -> None:
    picture = np.zeros((224, 224, 3), np.uint8)
    observation = {"images": dict.fromkeys(CAMERAS, picture), "state": np.zeros(32, np.float32)}
    body = {
        "model": "lerobot/pi05_base",
        "input": {"task": "pick up the block", "observation": observation},
        "runtime": {"return_timing": True, "prefix_cache": False, "cuda_graph": "auto", "response_format": "raw"},
    }
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    _, reply = post(url, msgpack.packb(body, default=pack, use_bin_type=True), headers)
    actions = msgpack.unpackb(reply, object_hook=unpack, raw=False)["actions"]
    assert actions.shape == (50, 32) and actions.dtype == np.float32


def test_the_openpi_websocket(url: str) -> None:
    picture = np.zeros((224, 224, 3), np.uint8)
    observation = {
        "task": "pick up the block",
        "observation.images.base_0_rgb": picture,
        "observation.images.left_wrist_0_rgb": picture,
        "observation.images.right_wrist_0_rgb": picture,
        "observation.state": np.zeros(32, np.float32),
    }
    address = url.replace("http", "ws", 1) + "/openpi/policy"
    with websockets.sync.client.connect(address, max_size=None, proxy=None) as connection:
        metadata = msgpack.unpackb(connection.recv(), object_hook=unpack, raw=False)
        assert metadata["input"]["image_keys"] == list(CAMERAS) and metadata["input"]["state_dim"] == 32
        connection.send(msgpack.packb(observation, default=pack, use_bin_type=True))
        result = msgpack.unpackb(connection.recv(), object_hook=unpack, raw=False)
    assert result["actions"].shape == (50, 32) and result["server_timing"]["infer_ms"] > 0
