"""The doors under attack and under load; the long runs belong to `make soak`, a hundredth of each runs always."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from serving_fuzz import fuzz
from serving_stubs import StubPolicy, http, request_of, serving, websocket

from pi05_ros.client import AsyncClient
from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.serving.codec import packb, unpackb


def assert_attacked(outcomes: dict) -> None:
    """Each door both answered and refused, so that the attack reached what lies behind the decoder."""
    assert outcomes[200] and outcomes[400]
    for door, refusal in (("/", "text"), ("/v1/actions/realtime", "error")):
        assert outcomes[door, "answer"] and outcomes[door, refusal]


def test_fuzzed_requests_never_give_a_500() -> None:
    assert_attacked(fuzz(400, seed=0))


@pytest.mark.soak
def test_fuzzed_requests_never_give_a_500_at_length() -> None:
    assert_attacked(fuzz(20_000, seed=1))


@pytest.mark.soak
def test_the_json_routes_keep_to_their_schema() -> None:
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    for number, profile in enumerate(("aloha", "droid")):
        with serving(profile=profile) as server:
            command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"]
            command += ["--checks", checks, "--max-examples", "500", "--seed", str(number), "--no-color"]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=1200)
            assert ran.returncode == 0, ran.stdout[-4000:]
            assert http(server, "/healthz")[0] == 200


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def crowd(url: str, clients: int, seconds: float) -> tuple[int, list[float]]:
    """Every client asks without pause, half of them by each protocol; answers in all, and memory once a second."""
    finish = time.monotonic() + seconds
    counted = 0
    memory: list[float] = []

    async def ask(number: int) -> None:
        nonlocal counted
        path = "/v1/actions/realtime" if number % 2 else "/"
        async with AsyncClient(url + path, timeout_s=30.0) as client:
            step = 0
            while time.monotonic() < finish:
                step += 1
                value, mine = float(number * 10_000 + step), f"{number}-{step}"
                reply = await client.infer({**request_of("aloha", value), "request_id": mine})
                actions = reply["data"][0]["action"]["values"] if number % 2 else reply["actions"]
                assert reply["id" if number % 2 else "request_id"] == mine
                np.testing.assert_array_equal(actions[:, 0], value + np.arange(8))
                counted += 1

    async def watch() -> None:
        while time.monotonic() < finish:
            memory.append(resident_mb())
            await asyncio.sleep(1.0)

    await asyncio.gather(watch(), *(ask(number) for number in range(clients)))
    return counted, memory


def loaded(clients: int, seconds: float) -> list[float]:
    policy = StubPolicy(8, 14, 0.005)
    with serving(policy, scheduler=Scheduler(max_group=4, max_queue=clients)) as server:
        counted, memory = asyncio.run(crowd(server.url, clients, seconds))
        served = sum(len(group) for group in policy.groups)
        text = http(server, "/metrics")[2].decode()
        ok = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("pi05_requests_total{")]
    # Nothing lost, nothing refused, nothing done twice.
    assert counted == served == sum(ok) > clients
    assert all('status="ok"' in line for line in text.splitlines() if line.startswith("pi05_requests_total{"))
    return memory


def test_many_clients_at_once() -> None:
    loaded(64, 2.0)


@pytest.mark.soak
def test_many_clients_for_a_minute_in_flat_memory() -> None:
    memory = loaded(64, 60.0)
    print(f"resident MB after 15 s and at the end: {memory[15]:.0f}, {memory[-1]:.0f}")
    assert memory[-1] < memory[15] * 1.05 + 5


@pytest.mark.soak
def test_a_model_that_takes_45_s_breaks_no_connection() -> None:
    policy = StubPolicy(8, 14, 45.0)
    with serving(policy) as server, websocket(server, ping_interval=5, ping_timeout=5) as connection:
        connection.send(packb(request_of("aloha", 1.0)))
        assert policy.started.wait(5)
        finish = time.monotonic() + 30.0
        while time.monotonic() < finish:
            for ask in (lambda: http(server, "/healthz"), lambda: _handshake(server)):
                started = time.monotonic()
                ask()
                assert time.monotonic() - started < 0.1
            time.sleep(1.0)
        assert unpackb(connection.recv(timeout=30))["actions"][0, 0] == 1.0


def _handshake(server) -> None:
    with websocket(server):
        pass
