"""The websockets: OpenPI's protocol at both paths, the realtime one, errors that keep the connection, a busy model."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
import websockets
from serving_stubs import StubPolicy, http, image, request_of, serving, websocket

from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.serving.codec import Limits, packb, unpackb

REALTIME = "/v1/actions/realtime"


@pytest.mark.parametrize("path", ["/", "/openpi/policy"])
def test_metadata_first_then_one_reply_per_observation(path: str) -> None:
    with serving() as server, websocket(server, path) as connection:
        assert connection.metadata["action_names"][0] == "left_waist"
        assert connection.metadata["camera_slots"]["base_0_rgb"] == "cam_high"
        for index in range(3):
            connection.send(packb({**request_of("aloha", index), "request_id": index}))
            reply = unpackb(connection.recv(timeout=5))
            assert reply["actions"].shape == (8, 14) and reply["actions"].dtype == np.float32
            assert reply["actions"][0, 0] == index and reply["request_id"] == index
            assert reply["policy_timing"]["infer_ms"] > 0 and reply["server_timing"]["infer_ms"] > 0
            assert ("prev_total_ms" in reply["server_timing"]) == (index > 0)
            # ActionChunkBroker slices every array along time.
            assert [key for key, value in reply.items() if isinstance(value, np.ndarray)] == ["actions"]


@pytest.mark.parametrize("profile", ["aloha", "droid", "libero", "libero_openpi", "ur5e"])
def test_every_family_is_answered(profile: str) -> None:
    with serving(profile=profile) as server, websocket(server) as connection:
        connection.send(packb(request_of(profile, 5.0)))
        assert unpackb(connection.recv(timeout=5))["actions"][0, 0] == 5.0


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b"", "observation.malformed"),
        (b"<html>", "observation.malformed"),
        ("text", "binary msgpack frame"),
        (packb([1]), "map of keys"),
        (packb({"state": np.zeros(14)}), "missing cameras"),
        (packb({**request_of("aloha"), "wrist": 1}), "unknown keys ['wrist']"),
        (packb(request_of("droid")), "images.cam_high"),
        (packb({**request_of("aloha"), "state": np.full(14, np.nan, np.float32)}), "action.nan"),
        (packb({**request_of("aloha"), "state": np.full(14, -1.0)}), "internal"),
    ],
)  # fmt: skip
def test_a_bad_observation_gets_text_and_the_connection_lives(frame: bytes | str, said: str) -> None:
    with serving() as server, websocket(server) as connection:
        connection.send(frame)
        told = connection.recv(timeout=5)
        assert isinstance(told, str) and said in told and "Traceback" not in told and "\n" not in told
        connection.send(packb(request_of("aloha", 1.0)))
        assert unpackb(connection.recv(timeout=5))["actions"][0, 0] == 1.0


def test_openpi_replies_keep_the_order_of_the_requests() -> None:
    with serving(StubPolicy(8, 14, 0.01)) as server, websocket(server) as connection:
        for value in (1.0, 2.0):
            connection.send(packb(request_of("aloha", value)))
        connection.send(b"bad")
        connection.send(packb(request_of("aloha", 3.0)))
        replies = [connection.recv(timeout=5) for _ in range(4)]
    assert isinstance(replies[2], str)
    assert [unpackb(replies[index])["actions"][0, 0] for index in (0, 1, 3)] == [1.0, 2.0, 3.0]


def generation(value: float, **changes: object) -> dict:
    images = {name: image() for name in ("cam_high", "cam_left_wrist", "cam_right_wrist")}
    state = np.full(14, value, np.float32)
    return {"input": {"task": "x", "observation": {"images": images, "state": state}}, **changes}


def test_realtime_sends_envelopes_and_binary_errors() -> None:
    with serving() as server, websocket(server, REALTIME) as connection:
        assert connection.metadata["object"] == "action.metadata"
        connection.send(packb(generation(2.0, request_id="a")))
        reply = unpackb(connection.recv(timeout=5))
        assert reply["id"] == "a" and reply["object"] == "action.generation" and "server_timing" in reply
        assert reply["data"][0]["action"]["values"][0, 0] == 2.0
        connection.send(packb(generation(2.0, request_id="b", parameters={"seed": -1})))
        told = unpackb(connection.recv(timeout=5))
        assert told["error"]["code"] == "observation.malformed" and told["id"] == "b"
        connection.send(packb({**request_of("aloha", 3.0), "request_id": "c"}))
        assert unpackb(connection.recv(timeout=5))["id"] == "c"
        connection.send("text")
        assert "error" in unpackb(connection.recv(timeout=5))


def test_more_requests_under_way_than_allowed_are_refused_by_id() -> None:
    with serving(StubPolicy(8, 14, 0.3), max_in_flight=2) as server, websocket(server, REALTIME) as connection:
        for index in range(4):
            connection.send(packb(generation(index, request_id=index)))
        replies = [unpackb(connection.recv(timeout=5)) for _ in range(4)]
        refused = [reply for reply in replies if "error" in reply]
        assert len(refused) == 2 and all(reply["error"]["code"] == "request.queue_full" for reply in refused)
        assert sorted(reply["id"] for reply in replies if "error" not in reply) == [0, 1]


def test_a_client_that_only_sends_is_hung_up_on() -> None:
    with serving(StubPolicy(8, 14, 2.0), max_in_flight=1) as server, websocket(server) as connection:
        connection.send(packb(request_of("aloha", 1.0)))
        with pytest.raises(websockets.ConnectionClosed) as caught:
            for _ in range(200):
                connection.send(b"\x00")
                time.sleep(0.005)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1008


def test_while_the_model_runs_everybody_else_is_answered_at_once() -> None:
    policy = StubPolicy(8, 14, 3.0)
    with serving(policy) as server, websocket(server) as connection:
        connection.send(packb(request_of("aloha", 1.0)))
        assert policy.started.wait(5)
        for _ in range(5):
            started = time.monotonic()
            assert http(server, "/healthz")[0] == 200
            assert time.monotonic() - started < 0.1
            started = time.monotonic()
            with websocket(server):
                assert time.monotonic() - started < 0.1
            started = time.monotonic()
            assert connection.ping().wait(1.0)
            assert time.monotonic() - started < 0.1
        assert unpackb(connection.recv(timeout=10))["actions"][0, 0] == 1.0


def test_the_waiting_work_of_a_connection_that_goes_is_dropped() -> None:
    policy = StubPolicy(8, 14, 0.4)
    with serving(policy) as server:
        with websocket(server) as busy:
            busy.send(packb(request_of("aloha", 1.0)))
            assert policy.started.wait(5)
            with websocket(server) as gone:
                gone.send(packb(request_of("aloha", 2.0)))
                while server._scheduler.depth == 0:
                    time.sleep(0.005)
                gone.socket.shutdown(socket.SHUT_RDWR)
            busy.recv(timeout=5)
            busy.send(packb(request_of("aloha", 3.0)))
            busy.recv(timeout=5)
    assert policy.groups == [[1.0], [3.0]]


def test_not_active_is_told_and_the_connection_waits_for_better_times() -> None:
    with serving(active=False) as server, websocket(server) as connection:
        assert connection.metadata["object"] == "action.metadata"
        connection.send(packb(request_of("aloha", 1.0)))
        told = connection.recv(timeout=5)
        assert isinstance(told, str) and told.startswith("request.inactive: ") and "not loaded" in told
        server._scheduler.activate(StubPolicy(8, 14))
        connection.send(packb(request_of("aloha", 1.0)))
        assert isinstance(connection.recv(timeout=5), bytes)


def test_a_deadline_is_told() -> None:
    with serving(StubPolicy(8, 14, 0.5)) as server, websocket(server) as connection:
        connection.send(packb({**request_of("aloha", 1.0), "timeout_ms": 50}))
        assert connection.recv(timeout=5).startswith("request.deadline")


def test_groups_are_made_of_connections() -> None:
    policy = StubPolicy(8, 14, 0.05)
    with serving(policy, scheduler=Scheduler(max_group=4)) as server, ExitStack() as stack:
        connections = [stack.enter_context(websocket(server)) for _ in range(5)]
        for index, connection in enumerate(connections):
            connection.send(packb(request_of("aloha", index)))
        for index, connection in enumerate(connections):
            assert unpackb(connection.recv(timeout=5))["actions"][0, 0] == index
    assert max(len(group) for group in policy.groups) >= 3


def test_a_frame_over_the_limit_closes_the_connection_alone() -> None:
    with serving(limits=Limits(max_bytes=10_000)) as server:
        with websocket(server) as connection, pytest.raises(websockets.ConnectionClosed) as caught:
            connection.send(bytes(10_001))
            connection.recv(timeout=5)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
        with websocket(server):
            pass


def test_compression_is_never_agreed_on() -> None:
    with serving() as server:
        url = server.url.replace("http", "ws", 1)
        with websockets.sync.client.connect(url, compression="deflate", proxy=None) as connection:
            assert "Sec-WebSocket-Extensions" not in connection.response.headers


def test_stopping_hangs_up_and_frees_the_port() -> None:
    with serving() as server, websocket(server) as connection:
        port = server.address[1]
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2.0
        with pytest.raises(websockets.ConnectionClosed) as caught:
            connection.recv(timeout=5)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1001
    with serving(port=port) as server, websocket(server) as connection:
        connection.send(packb(request_of("aloha", 1.0)))
        assert isinstance(connection.recv(timeout=5), bytes)


def test_stopping_does_not_wait_for_the_model() -> None:
    policy = StubPolicy(8, 14, 3.0)
    with serving(policy) as server, websocket(server) as connection:
        connection.send(packb(request_of("aloha", 1.0)))
        assert policy.started.wait(5)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2.0


def test_many_clients_lose_and_mix_nothing() -> None:
    wrong: list[tuple] = []

    def client(server, number: int) -> None:
        with websocket(server, REALTIME if number % 2 else "/") as connection:
            for step in range(20):
                value = 1000.0 * number + step
                connection.send(packb({**request_of("aloha", value), "request_id": f"{number}-{step}"}))
                reply = unpackb(connection.recv(timeout=20))
                actions = reply["data"][0]["action"]["values"] if number % 2 else reply["actions"]
                if actions[0, 0] != value or reply["id" if number % 2 else "request_id"] != f"{number}-{step}":
                    wrong.append((number, step))

    with serving(scheduler=Scheduler(max_group=4, max_queue=64)) as server:
        threads = [threading.Thread(target=client, args=(server, number)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        ok = [line for line in http(server, "/metrics")[2].decode().splitlines() if 'status="ok"' in line]
        assert sum(float(line.split()[-1]) for line in ok if line.startswith("pi05_requests_total")) == 320
