"""The real policy behind the doors: the same observation and noise give the same bits through each; the commands."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from serving_fuzz import attack
from serving_stubs import http, websocket

import pi05_ros
from pi05_ros.engine.scheduler import ControlLoop, Scheduler
from pi05_ros.observation import Observation
from pi05_ros.policy import Policy, load_policy
from pi05_ros.serving.app import Server
from pi05_ros.serving.codec import packb, unpackb
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.settings import ServerSettings

SEED = 11


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(None, "demo", device="cpu")


@pytest.fixture(scope="module")
def server(policy: Policy) -> Iterator[Server]:
    scheduler = Scheduler(max_group=1)
    scheduler.start()
    names = ("demo-model",)
    facts = PolicyFacts.of(policy.contract, policy.checkpoint, dtype="float32", device="cpu", served_model_names=names)
    running = Server(facts, scheduler, ServerSettings(port=0))
    running.start()
    scheduler.activate(policy)
    yield running
    running.stop()
    assert scheduler.stop(10.0)


@pytest.fixture(scope="module")
def observation() -> Observation:
    rng = np.random.default_rng(3)
    images = {name: rng.integers(0, 256, (48, 64, 3), np.uint8) for name in ("base", "left_wrist", "right_wrist")}
    return Observation(images=images, state=np.linspace(-0.4, 0.4, 7), prompt="pick up the red block")


def as_raw(observation: Observation, **controls: object) -> dict:
    images = {f"observation.images.{name}": frame for name, frame in observation.images.items()}
    return {**images, "observation.state": observation.state, "prompt": observation.prompt, **controls}


def as_generation(observation: Observation, **changes: object) -> dict:
    inner = {"images": dict(observation.images), "state": observation.state}
    return {"input": {"task": observation.prompt, "observation": inner}, **changes}


def as_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {key: as_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_every_door_gives_the_same_bits(policy: Policy, server: Server, observation: Observation) -> None:
    expected = policy.infer(observation, seed=SEED).actions
    answers = {"control loop": ControlLoop(server._scheduler).infer(observation, seed=SEED).actions}
    for path in ("/", "/openpi/policy"):
        with websocket(server, path) as connection:
            connection.send(packb(as_raw(observation, seed=SEED)))
            answers[path] = unpackb(connection.recv(timeout=30))["actions"]
    request = as_generation(observation, parameters={"seed": SEED}, model="demo-model")
    with websocket(server, "/v1/actions/realtime") as connection:
        connection.send(packb(request))
        answers["realtime"] = unpackb(connection.recv(timeout=30))["data"][0]["action"]["values"]
    path = "/v1/actions/generations"
    answers["json"] = http(server, path, as_json(request))[2]["data"][0]["action"]["values"]
    answers["msgpack"] = http(server, path, packb(request), Content_Type="application/msgpack")[2]["data"][0]["action"][
        "values"
    ]
    request["runtime"] = {"response_format": "raw"}
    answers["raw"] = http(server, path, packb(request), Content_Type="application/msgpack")[2]["actions"]
    for door, actions in answers.items():
        np.testing.assert_array_equal(np.asarray(actions, np.float32), expected, err_msg=door)


def test_noise_steps_rows_and_candidates(policy: Policy, server: Server, observation: Observation) -> None:
    shape = (policy.contract.horizon, policy.model.config.action_dim)
    noise = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = policy.infer(observation, noise=noise, num_steps=3)
    with websocket(server) as connection:
        connection.send(packb(as_raw(observation, noise=noise, num_inference_steps=3)))
        reply = unpackb(connection.recv(timeout=30))
    np.testing.assert_array_equal(reply["actions"], expected.actions)
    request = as_generation(observation, parameters={"seed": SEED, "num_candidates": 3})
    body = http(server, "/v1/actions/generations", as_json(request))[2]
    for index, entry in enumerate(body["data"]):
        alone = policy.infer(observation, seed=SEED + index).actions
        np.testing.assert_array_equal(np.float32(entry["action"]["values"]), alone)
    request = as_generation(observation, parameters={"action_horizon": 4})
    assert http(server, "/v1/actions/generations", as_json(request))[2]["data"][0]["action"]["shape"] == [4, 7]


def test_normalized_space_is_the_opt_out(policy: Policy, server: Server, observation: Observation) -> None:
    request = as_generation(observation, parameters={"seed": SEED}, runtime={"action_space": "normalized"})
    action = http(server, "/v1/actions/generations", as_json(request))[2]["data"][0]["action"]
    assert action["space"] == "normalized"
    values = np.float32(action["values"])
    robot = policy.infer(observation, seed=SEED).actions
    assert not np.array_equal(values, robot)
    np.testing.assert_allclose(policy.contract.action_normalizer.unnormalize(values), robot, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"observation.state": np.zeros(8)}, "observation.state_width"),
        ({"observation.state": np.full(7, np.nan)}, "observation.nan"),
        ({"observation.state": np.full(7, 1e300)}, "observation.inf"),
        ({"noise": np.zeros((3, 3), np.float32)}, "observation.noise"),
        ({"prompt": "   "}, "observation.no_prompt"),
        ({"observation.images.base": np.zeros((1, 4000, 3), np.uint8)}, "observation.image_shape"),
    ],
)  # fmt: skip
def test_what_the_policy_refuses_is_the_clients_mistake(
    server: Server, observation: Observation, change: dict, code: str
) -> None:
    request = {**as_raw(observation), **change}
    status, _, body = http(
        server, "/v1/actions/generations", packb(request), Content_Type="application/msgpack", Accept="application/json"
    )
    assert isinstance(body, dict) and (status, body["error"]["code"]) == (400, code)


def test_fuzzed_requests_to_the_real_policy_never_give_a_500(server: Server) -> None:
    outcomes = attack(server, random.Random(0), "demo", 150)
    assert outcomes[200] and outcomes[400] and outcomes["/", "answer"] and outcomes["/", "text"]
    assert http(server, "/healthz")[0] == 200


def test_the_page_shows_what_the_model_saw(server: Server, observation: Observation) -> None:
    with websocket(server) as connection:
        connection.send(packb(as_raw(observation)))
        connection.recv(timeout=30)
    state = http(server, "/page/state")[2]
    assert state["active"] and state["chunk"]["names"][0] == "joint_1" and len(state["chunk"]["actions"]) == 50
    assert state["chunk"]["pictures"] == ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
    assert state["latency"]["p50_ms"] > 0 and sum(state["latency"]["counts"]) == state["count"]
    status, headers, picture = http(server, "/page/picture/base_0_rgb")
    assert status == 200 and headers["Content-Type"] == "image/jpeg" and picture[:2] == b"\xff\xd8"


def test_serve_and_infer_commands(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 64, 3), np.uint8)).save(tmp_path / "a.png")
    environment = {**os.environ, "PI05_ROS_API_KEY": "from-the-environment", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pi05_ros.cli"]
    root = Path(pi05_ros.__file__).parent.parent
    serve = subprocess.Popen(
        [*command, "serve", "--port", "0", "--profile", "demo", "--served-model-name", "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=root,
    )
    watchdog = threading.Timer(120, serve.kill)
    watchdog.start()
    try:
        assert serve.stdout is not None
        url = next(found[1] for line in serve.stdout if (found := re.match(r"ready: (\S+)", line)))
        images = [
            part for name in ("base", "left_wrist", "right_wrist") for part in ("--image", f"{name}={tmp_path}/a.png")
        ]
        ask = [*command, "infer", "--url", url, *images, "--state", "0,0,0,0,0,0,0.5", "--seed", "3"]
        told = subprocess.run(ask, capture_output=True, text=True, env=environment, cwd=root, check=True).stdout
        assert "50 steps of 40 ms" in told and "gripper" in told
        told = subprocess.run([*ask, "--json"], capture_output=True, text=True, env=environment, cwd=root, check=True)
        assert np.shape(json.loads(told.stdout)["actions"]) == (50, 7)
        wrong = subprocess.run(ask[:-4], capture_output=True, text=True, env=environment, cwd=root)
        assert wrong.returncode == 2 and "missing state" in wrong.stderr and "Traceback" not in wrong.stderr
        serve.send_signal(signal.SIGINT)
        assert serve.wait(10) == 0
    finally:
        watchdog.cancel()
        serve.kill()
        serve.communicate()
