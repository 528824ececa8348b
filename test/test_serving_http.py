"""The HTTP routes: every format, every refusal with its status, and no traceback anywhere."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from serving_stubs import StubPolicy, http, image, request_of, serving

from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.serving.app import Server
from pi05_ros.serving.codec import Limits, packb

CAMERAS = ("cam_high", "cam_left_wrist", "cam_right_wrist")
GENERATIONS = "/v1/actions/generations"
MSGPACK = {"Content_Type": "application/msgpack"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(scheduler=Scheduler(max_group=4)) as running:
        yield running


def generation(value: float = 0.0, **changes: object) -> dict:
    observation = {
        "images": {name: image().tolist() for name in CAMERAS},
        "state": [value] + [0.0] * 13,
    }
    return {"input": {"task": "fold", "observation": observation}, **changes}


def test_the_envelope_in_json(server: Server) -> None:
    status, headers, body = http(server, GENERATIONS, generation(2.0, request_id="r-1"))
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert body["id"] == "r-1" and body["object"] == "action.generation" and body["model"] == "stub/checkpoint"
    assert abs(body["created"] - time.time()) < 60
    (entry,) = body["data"]
    assert (entry["index"], entry["input_index"], entry["candidate_index"]) == (0, 0, 0)
    action = entry["action"]
    assert (action["type"], action["dtype"], action["shape"]) == ("continuous", "float32", [8, 14])
    np.testing.assert_array_equal(np.array(action["values"])[:, 0], 2.0 + np.arange(8))
    assert body["usage"] == {
        "batch_size": 1,
        "action_horizon": 8,
        "action_dim": 14,
        "denoise_steps": 10,
        "prefix_cache_hit": False,
    }
    assert set(body["timings"]) == {
        "preprocess_ms",
        "cache_lookup_ms",
        "prefix_ms",
        "action_denoise_ms",
        "postprocess_ms",
    }
    assert set(body["cache"]) == {"hit", "scope", "mode", "prefix_len"} and body["parallel"]


def test_json_and_msgpack_mix_as_the_headers_say(server: Server) -> None:
    arrays = generation(1.0)
    arrays["input"]["observation"] = {"images": {name: image() for name in CAMERAS}, "state": np.eye(1, 14)[0]}
    status, headers, body = http(server, GENERATIONS, packb(arrays), **MSGPACK)
    assert status == 200 and headers["Content-Type"] == "application/msgpack"
    assert body["data"][0]["action"]["values"].dtype == np.float32
    _, _, body = http(server, GENERATIONS, generation(1.0), Accept="application/msgpack")
    assert isinstance(body["data"][0]["action"]["values"], np.ndarray)
    arrays["runtime"] = {"output_format": "list", "response_format": "raw"}
    _, _, body = http(server, GENERATIONS, packb(arrays), Content_Type="application/x-msgpack")
    # A nested list of numbers is an array again for this codec; on the wire it is a list.
    assert np.shape(body["actions"]) == (8, 14) and "data" not in body
    assert body["parameters"]["num_inference_steps"] == 10 and "request_id" in body
    status, _, body = http(server, GENERATIONS, generation(runtime={"output_format": "numpy"}))
    assert status == 400 and "msgpack" in body["error"]["message"]


def test_a_body_without_input_is_a_raw_observation(server: Server) -> None:
    status, _, body = http(server, GENERATIONS, packb({**request_of("aloha", 4.0), "request_id": "q"}), **MSGPACK)
    assert status == 200 and body["id"] == "q" and body["data"][0]["action"]["values"][0, 0] == 4.0


def test_rows_and_candidates_are_really_given(server: Server) -> None:
    request = generation(parameters={"action_horizon": 3, "num_candidates": 3, "seed": 5})
    _, _, body = http(server, GENERATIONS, request)
    assert [entry["candidate_index"] for entry in body["data"]] == [0, 1, 2]
    assert all(entry["action"]["shape"] == [3, 14] for entry in body["data"])
    assert body["seeds"] == [5, 6, 7] and body["usage"]["action_horizon"] == 3
    request["runtime"] = {"response_format": "raw", "return_timing": False}
    _, _, body = http(server, GENERATIONS, request)
    assert np.shape(body["actions"]) == (3, 3, 14) and "timings" not in body


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {"Content_Type": "application/json"}, 400, "observation.malformed"),
        (b"\xc1", MSGPACK, 400, "observation.malformed"),
        (b"[" * 5000, {"Content_Type": "application/json"}, 400, "observation.malformed"),
        ([], {}, 400, "observation.malformed"),
        ({"input": {}}, {}, 400, "observation.malformed"),
        ({"a": 1}, {}, 400, "observation.keys"),
        (generation(model="other"), {}, 404, "request.unknown_model"),
        (generation(parameters={"action_horizon": 900}), {}, 400, "observation.action_horizon"),
        (generation(float("nan")), {}, 422, "action.nan"),
        (generation(-1.0), {}, 500, "internal"),
        (b"x=1", {"Content_Type": "application/x-www-form-urlencoded"}, 415, "request.media_type"),
        (b"{}", {"Content_Type": "text/plain"}, 415, "request.media_type"),
        (b"{}", {"Content_Type": "application/json", "Content_Encoding": "gzip"}, 415, "request.media_type"),
    ],
)  # fmt: skip
def test_refusals(server: Server, body: object, headers: dict, status: int, code: str) -> None:
    got, _, told = http(server, GENERATIONS, body, **headers)
    assert (got, told["error"]["code"]) == (status, code)
    assert set(told["error"]) == {"code", "message", "details"}
    assert "Traceback" not in str(told) and "network broke" not in str(told)
    assert http(server, GENERATIONS, generation())[0] == 200


def test_an_error_carries_the_clients_id_and_format(server: Server) -> None:
    status, headers, body = http(server, GENERATIONS, packb({"input": 3, "request_id": "r-9"}), **MSGPACK)
    assert status == 400 and headers["Content-Type"] == "application/msgpack" and body["id"] == "r-9"


def test_unknown_routes_and_methods(server: Server) -> None:
    assert http(server, "/nothing")[0] == 404
    status, _, body = http(server, GENERATIONS)
    assert status == 405 and body["error"]["code"] == "request.method"
    status, _, body = http(server, "/openpi/policy")
    assert status == 400 and "ws://" in body["error"]["message"]


def test_facts(server: Server) -> None:
    assert http(server, "/liveness")[::2] == (200, b"OK")
    assert http(server, "/healthz")[::2] == (200, b"OK") and http(server, "/health")[0] == 200
    names = [entry["id"] for entry in http(server, "/v1/models")[2]["data"]]
    assert names == ["stub/checkpoint", "lerobot/pi05_base"]
    _, _, facts = http(server, "/v1/actions/metadata")
    assert facts["object"] == "action.metadata" and facts["policy_family"] == "pi05"
    assert facts["input"] == {"image_keys": list(CAMERAS), "image_size": [224, 224], "state_dim": 14}
    assert facts["output"]["action_horizon"] == 8 and facts["output"]["padded_action_dim"] == 32
    assert facts["camera_slots"]["base_0_rgb"] == "cam_high"
    assert facts["action"][6] == {
        "name": "left_gripper",
        "unit": "fraction",
        "control_mode": "gripper",
        "limits": None,
    }
    document = http(server, "/openapi.json")[2]
    assert document["openapi"].startswith("3.1") and GENERATIONS in document["paths"]


def test_metrics_count_what_happened() -> None:
    with serving() as server:
        http(server, GENERATIONS, generation())
        http(server, GENERATIONS, {"a": 1})
        server.publish_ages({"cam_high": 0.02})
        text = http(server, "/metrics")[2].decode()
    assert 'pi05_requests_total{door="http",status="ok"} 1.0' in text
    assert 'pi05_requests_total{door="http",status="observation.keys"} 1.0' in text
    assert 'pi05_stage_seconds_count{stage="action_denoise"} 1.0' in text
    assert "pi05_group_size_count 1.0" in text and 'pi05_prefix_cache_total{result="miss"} 1.0' in text
    assert 'pi05_input_age_seconds{input="cam_high"} 0.02' in text and "pi05_active 1.0" in text
    assert "pi05_queue_depth 0.0" in text and "pi05_chunk_rate_hz 0.2" in text


def test_not_active_is_503_and_says_why() -> None:
    with serving(active=False) as server:
        assert http(server, "/liveness")[0] == 200
        status, headers, text = http(server, "/healthz")
        assert status == 503 and b"not loaded" in text and headers["Retry-After"] == "1"
        assert http(server, "/v1/actions/metadata")[0] == 200
        status, headers, body = http(server, GENERATIONS, generation())
        assert status == 503 and body["error"]["code"] == "request.inactive" and headers["Retry-After"] == "1"
        server._scheduler.activate(StubPolicy(8, 14))
        assert http(server, "/healthz")[0] == 200 and http(server, GENERATIONS, generation())[0] == 200
        server._scheduler.deactivate("stopped by the operator")
        assert b"stopped by the operator" in http(server, "/healthz")[2]


def test_deadline_and_full_queue() -> None:
    with serving(StubPolicy(8, 14, 0.5), scheduler=Scheduler(max_queue=1)) as server:
        started = time.monotonic()
        status, _, body = http(server, GENERATIONS, generation(runtime={"timeout_ms": 100}))
        assert (status, body["error"]["code"]) == (504, "request.deadline") and time.monotonic() - started < 0.45
        results: list[int] = []
        threads = [
            threading.Thread(target=lambda: results.append(http(server, GENERATIONS, generation())[0]))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert 429 in results and 200 in results and set(results) <= {200, 429}


def test_the_work_of_a_client_that_hangs_up_is_dropped() -> None:
    policy = StubPolicy(8, 14, 0.3)
    with serving(policy) as server:
        busy = threading.Thread(target=http, args=(server, GENERATIONS, generation(1.0)))
        busy.start()
        assert policy.started.wait(5)
        body = packb(request_of("aloha", 2.0))
        with socket.create_connection(server.address) as gone:
            head = f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\n"
            gone.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            deadline = time.monotonic() + 2
            while server._scheduler.depth == 0 and time.monotonic() < deadline:
                time.sleep(0.005)
            assert server._scheduler.depth == 1
        busy.join(5)
        assert http(server, GENERATIONS, generation(3.0))[0] == 200
    assert policy.groups == [[1.0], [3.0]]


def test_size_limits() -> None:
    with serving(limits=Limits(max_bytes=20_000)) as server:
        status, _, body = http(server, GENERATIONS, b" " * 20_001, Content_Type="application/json")
        assert (status, body["error"]["code"]) == (413, "request.too_large")
        # Without a length the body is counted as it comes.
        with socket.create_connection(server.address, timeout=5) as raw:
            raw.sendall(
                f"POST {GENERATIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                "Transfer-Encoding: chunked\r\n\r\n".encode()
            )
            raw.sendall((b"4e20\r\n" + b" " * 20_000 + b"\r\n") * 2 + b"0\r\n\r\n")
            assert b" 413 " in raw.recv(100)
        assert http(server, "/healthz")[0] == 200


def test_connections_are_bounded_and_come_back() -> None:
    with serving(max_connections=4) as server:
        held = [socket.create_connection(server.address) for _ in range(4)]
        time.sleep(0.2)
        assert http(server, "/liveness")[0] == 503
        for connection in held:
            connection.close()
        deadline = time.monotonic() + 5
        while http(server, "/liveness")[0] != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_broken_http_neither_hangs_nor_harms(server: Server) -> None:
    for text in (
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
    ):
        with socket.create_connection(server.address, timeout=5) as raw:
            raw.sendall(text)
            raw.shutdown(socket.SHUT_WR)
            told = raw.recv(4000)
            assert b"Traceback" not in told and b'File "' not in told
    assert http(server, "/healthz")[0] == 200
