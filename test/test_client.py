"""Our clients against the real server: both protocols, reconnection, timeouts, and replies that find their requests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import numpy as np
import pytest
from serving_stubs import StubPolicy, image, request_of, serving

from pi05_ros.client import AsyncClient, Client
from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.errors import ConfigurationError, RequestError


def generation(value: float) -> dict:
    cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")
    state = [value] + [0.0] * 13
    return {"input": {"task": "x", "observation": {"images": {name: image() for name in cameras}, "state": state}}}


def test_openpi_protocol() -> None:
    with serving() as server, Client(server.url) as client:
        assert client.metadata()["profile"]["name"] == "aloha"
        for value in range(5):
            reply = client.infer(request_of("aloha", value))
            assert reply["actions"].shape == (8, 14) and reply["actions"][0, 0] == value
        with pytest.raises(RequestError, match="missing cameras") as caught:
            client.infer({"state": np.zeros(14), "prompt": "x"})
        assert caught.value.code == "request.refused"
        assert client.infer(request_of("aloha", 9.0))["actions"][0, 0] == 9.0


def test_realtime_protocol_matches_replies_to_requests() -> None:
    policy = StubPolicy(8, 14, 0.005)

    async def run(url: str) -> list:
        async with AsyncClient(f"{url}/v1/actions/realtime") as client:
            assert (await client.metadata())["object"] == "action.metadata"
            replies = await asyncio.gather(*(client.infer({**generation(v), "id": f"mine-{v}"}) for v in range(6)))
            with pytest.raises(RequestError, match="observation.malformed"):
                await client.infer({"input": 3})
            return replies

    with serving(policy, scheduler=Scheduler(max_group=2)) as server:
        replies = asyncio.run(run(server.url))
    for value, reply in enumerate(replies):
        assert reply["id"] == f"mine-{value}"
        assert reply["data"][0]["action"]["values"][0, 0] == value
        assert reply["server_timing"]["infer_ms"] > 0


def test_the_key_is_sent() -> None:
    with serving(api_key="correct-horse") as server:
        with Client(server.url, "correct-horse") as client:
            client.infer(request_of("aloha"))
        with Client(server.url, "wrong-horse", timeout_s=5.0) as client:
            with pytest.raises(RequestError) as caught:
                client.metadata()
        assert caught.value.code == "request.unauthorized"


def test_a_lost_connection_is_opened_again_by_the_next_request() -> None:
    with serving() as first:
        port = first.address[1]
        client = Client(f"ws://127.0.0.1:{port}", timeout_s=10.0)
        client.infer(request_of("aloha"))
    restarted: list = []

    def restart() -> None:
        time.sleep(0.3)
        scheduler = Scheduler()
        context = serving(scheduler=scheduler, port=port)
        restarted.append(context)
        context.__enter__()

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        # Asked before the server is back: it is waited for.
        assert client.infer(request_of("aloha", 2.0))["actions"][0, 0] == 2.0
    finally:
        thread.join(10)
        client.close()
        restarted[0].__exit__(None, None, None)


def test_a_request_that_was_under_way_is_not_sent_twice() -> None:
    policy = StubPolicy(8, 14, 1.0)
    with serving(policy) as server:
        client = Client(server.url)
        client.metadata()
        failed: list[RequestError] = []

        def ask() -> None:
            try:
                client.infer(request_of("aloha", 1.0))
            except RequestError as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert policy.started.wait(5)
        server.stop()
        thread.join(5)
        assert [error.code for error in failed] in (["request.lost"], ["request.refused"])
        client.close()
    assert policy.groups == [[1.0]]


@pytest.mark.parametrize("path", ["", "/v1/actions/realtime"])
def test_after_a_timeout_the_late_reply_is_nobodys(path: str) -> None:
    policy = StubPolicy(8, 14, 0.4)
    with serving(policy) as server, Client(server.url + path) as client:
        request = (lambda value: generation(value)) if path else (lambda value: request_of("aloha", value))
        client.metadata()
        with pytest.raises(RequestError) as caught:
            client.infer(request(1.0), timeout_s=0.1)
        assert caught.value.code == "request.timeout"
        reply = client.infer(request(2.0))
        actions = reply["data"][0]["action"]["values"] if path else reply["actions"]
        assert actions[0, 0] == 2.0


def test_nobody_there_and_something_else_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url, timeout_s=0.3) as client, pytest.raises(RequestError) as caught:
            client.infer(request_of("aloha"))
        assert caught.value.code == "request.unreachable" and url in caught.value.message
    with serving() as server, Client(f"{server.url}/healthz", timeout_s=2.0) as client:
        with pytest.raises(RequestError) as caught:
            client.metadata()
        assert caught.value.code == "request.protocol" and "proxy" in caught.value.message
    with pytest.raises(ConfigurationError, match="ws://"):
        Client("ftp://robot")


def test_a_closed_client_says_so() -> None:
    with serving() as server:
        client = Client(server.url)
        client.close()
        client.close()
        with pytest.raises(RequestError, match="closed"):
            client.infer(request_of("aloha"))


def test_many_threads_share_a_client() -> None:
    with serving(scheduler=Scheduler(max_group=4)) as server, Client(server.url) as client:
        wrong: list[float] = []

        def ask(value: float) -> None:
            for step in range(10):
                if client.infer(request_of("aloha", value + step))["actions"][0, 0] != value + step:
                    wrong.append(value + step)

        threads = [threading.Thread(target=ask, args=(100.0 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not wrong
