"""The node's network doors: the same observation gives the same bits on the topic, the websocket and over HTTP."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from ros_helpers import COMMAND, Graph, Process, stand_in_robot
from test_node_chunks import CAMERAS, Recorder, observation

from pi05_ros.client import Client
from pi05_ros.errors import RequestError
from pi05_ros.profile import load_profile

COMPARED = 5


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def get(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def test_one_policy_behind_three_doors(graph: Graph) -> None:
    recorder = Recorder(graph)
    parameters = ["serve.enabled:=true", "serve.port:=0", "seed:=7", "num_steps:=2", "trigger_rate_hz:=5.0"]
    arguments = [part for parameter in parameters for part in ("-p", parameter)]
    command = [*COMMAND, "node", "--checkpoint", "builtin", "--profile", "demo", "--no-autostart"]
    with stand_in_robot(), Process([*command, "--ros-args", *arguments]) as node:
        assert graph.change_state("configure", timeout=90.0)
        found = re.search(r"http://127\.0\.0\.1:\d+", node.wait_for_line("network doors at"))
        assert found is not None
        url = found.group()
        assert get(f"{url}/liveness") == 200 and get(f"{url}/healthz") == 503
        with Client(url) as client:
            assert client.metadata()["profile"]["name"] == "demo"
            black = {f"observation.images.{name}": np.zeros((8, 8, 3), np.uint8) for name in CAMERAS}
            with pytest.raises(RequestError, match="takes no requests"):
                client.infer({**black, "observation.state": np.zeros(7), "prompt": "wait"})

            assert graph.change_state("activate")
            assert get(f"{url}/healthz") == 200
            deadline = time.monotonic() + 60.0
            while len(recorder.answered) < COMPARED:
                assert time.monotonic() < deadline, f"{len(recorder.answered)} chunks came"
                time.sleep(0.05)
            state_names = [dim.joint_name for dim in load_profile("demo").state.dims]
            for chunk, named in recorder.answered[:COMPARED]:
                topic = np.asarray(chunk.actions, np.float32).reshape(chunk.horizon, chunk.action_dim)
                seen = observation(chunk, named, state_names)
                images = {name: np.ascontiguousarray(image) for name, image in seen.images.items()}
                noise = torch.randn(50, 32, generator=torch.Generator().manual_seed(chunk.noise_seed))
                asked = {f"observation.images.{name}": image for name, image in images.items()}
                asked |= {"observation.state": seen.state, "prompt": chunk.prompt}
                reply = client.infer({**asked, "noise": noise.numpy(), "num_inference_steps": 2})
                assert np.array_equal(reply["actions"], topic)
            body = {
                "input": {
                    "task": chunk.prompt,
                    "observation": {
                        "images": {name: image.tolist() for name, image in images.items()},
                        "state": seen.state.tolist(),
                    },
                },
                "parameters": {"seed": int(chunk.noise_seed), "num_inference_steps": 2},
            }
            answered = post(f"{url}/v1/actions/generations", body)["data"][0]["action"]["values"]
            assert np.array_equal(np.asarray(answered, np.float32), topic)

            with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
                counted = re.search(r'pi05_chunks_total\{loop="control"\} (\d+)', reply.read().decode())
            assert counted is not None and int(counted.group(1)) >= COMPARED, "the server sees the control loop too"

            assert graph.change_state("deactivate")
            assert get(f"{url}/healthz") == 503
            with pytest.raises(RequestError, match="takes no requests"):
                client.infer({**asked, "noise": noise.numpy()})
        assert graph.change_state("cleanup")
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{url}/liveness", timeout=2)


def test_a_port_that_is_taken_fails_the_configure(graph: Graph) -> None:
    with Process([*COMMAND, "serve", "--port", "0"]) as other:
        line = other.wait_for_line("listening on", timeout=60.0)
        port = re.search(r":(\d+)", line.split("listening on")[1])
        assert port is not None
        arguments = ["-p", "serve.enabled:=true", "-p", f"serve.port:={port.group(1)}"]
        command = [*COMMAND, "node", "--checkpoint", "builtin", "--no-autostart"]
        with Process([*command, "--ros-args", *arguments]) as node:
            assert not graph.change_state("configure", timeout=60.0)
            assert graph.state() == "unconfigured"
            assert port.group(1) in node.wait_for_line("config.bind")
