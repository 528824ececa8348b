"""Our doors against the published OpenPI protocol on the plain `websockets` library, in one run.

    python test/soak/bench_doors.py [--json FILE]

Three pictures of 224x224 a request. One client with an instant stub shows what the server itself costs; eight clients
with a stub of 20 ms (25 ms for a group of four) show what sharing passes gives. Each server runs in a process of its
own; the clients are websockets' own synchronous client, as in openpi-client, and alternate between the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import websockets.asyncio.server
import websockets.sync.client

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving_stubs import StubPolicy, facts, observation

from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.serving.app import Server
from pi05_ros.serving.codec import packb, unpackb
from pi05_ros.serving.settings import ServerSettings

ONE_MS, GROUP_MS = 20.0, 25.0


def plain(port: Any, seconds: float) -> None:
    """openpi's websocket policy server: decode, infer, encode, all on the event loop."""
    import msgpack

    def pack(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
        return value

    def unpack(value: dict) -> Any:
        if b"__ndarray__" in value:
            return np.ndarray(buffer=value[b"data"], dtype=np.dtype(value[b"dtype"]), shape=value[b"shape"])
        return value

    actions = np.zeros((50, 7), np.float32)

    async def serve(connection: Any) -> None:
        await connection.send(msgpack.packb({}))
        async for message in connection:
            started = time.monotonic()
            msgpack.unpackb(message, object_hook=unpack)
            if seconds:
                time.sleep(seconds)
            timing = {"infer_ms": (time.monotonic() - started) * 1e3}
            await connection.send(msgpack.packb({"actions": actions, "server_timing": timing}, default=pack))

    async def run() -> None:
        async with websockets.asyncio.server.serve(serve, "127.0.0.1", 0, compression=None, max_size=None) as server:
            port.send(next(iter(server.sockets)).getsockname()[1])
            await asyncio.Future()

    asyncio.run(run())


class ReadyPolicy:
    """Its answer is made beforehand, as the plain server's is; only the time passes."""

    def __init__(self, seconds: float) -> None:
        stub = StubPolicy(50, 7)
        prepared = stub.prepare(observation())
        self._chunk = stub.finish(prepared, stub.run([prepared], [None])[0])
        self._seconds = seconds

    def prepare(self, observation: Any) -> Any:
        return None

    def run(self, members: Sequence[Any], options: Sequence[Any]) -> Sequence[Any]:
        if self._seconds:
            time.sleep(self._seconds + (len(members) > 1) * (GROUP_MS - ONE_MS) / 1e3)
        return members

    def finish(self, prepared: Any, result: Any) -> Any:
        return self._chunk


def ours(port: Any, seconds: float) -> None:
    scheduler = Scheduler(max_group=4)
    scheduler.start()
    scheduler.activate(ReadyPolicy(seconds))
    server = Server(facts("demo", horizon=50), scheduler, ServerSettings(port=0))
    server.start()
    port.send(server.address[1])
    threading.Event().wait()


def start(target: Callable[..., None], seconds: float) -> tuple[Any, str]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=target, args=(sender, seconds), daemon=True)
    process.start()
    return process, f"ws://127.0.0.1:{receiver.recv()}"


def message() -> bytes:
    picture = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    images = dict.fromkeys(("base", "left_wrist", "right_wrist"), picture)
    return packb({"images": images, "state": np.zeros(7, np.float32), "prompt": "fold the towel"})


def connect(url: str) -> Any:
    connection = websockets.sync.client.connect(url, compression=None, max_size=None)
    connection.recv()
    return connection


def one_client(urls: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each request, the servers taking turns request by request."""
    data = message()
    connections = {name: connect(url) for name, url in urls.items()}
    times: dict[str, list[float]] = {name: [] for name in urls}
    for index in range(rounds + 50):
        for name, connection in connections.items():
            started = time.perf_counter()
            connection.send(data)
            reply = connection.recv()
            if index >= 50:
                times[name].append((time.perf_counter() - started) * 1e3)
    assert unpackb(reply)["actions"].shape == (50, 7)
    return times


def many_clients(url: str, clients: int, rounds: int) -> list[float]:
    data = message()
    times: list[list[float]] = [[] for _ in range(clients)]
    barrier = threading.Barrier(clients)

    def run(own: list[float]) -> None:
        connection = connect(url)
        barrier.wait()
        for _ in range(rounds):
            started = time.perf_counter()
            connection.send(data)
            connection.recv()
            own.append((time.perf_counter() - started) * 1e3)

    threads = [threading.Thread(target=run, args=(own,)) for own in times]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [value for own in times for value in own[5:]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    servers = {"websockets": start(plain, 0.0), "pi05_ros": start(ours, 0.0)}
    times = one_client({name: url for name, (_, url) in servers.items()}, options.rounds)
    for process, _ in servers.values():
        process.kill()
    single = {name: float(np.median(values)) for name, values in times.items()}

    crowd = {}
    for name, target in (("websockets", plain), ("pi05_ros", ours)):
        process, url = start(target, ONE_MS / 1e3)
        crowd[name] = float(np.percentile(many_clients(url, 8, max(20, options.rounds // 10)), 95))
        process.kill()

    result = {
        "single_median_ms": single,
        "single_ratio": single["pi05_ros"] / single["websockets"],
        "crowd_p95_ms": crowd,
        "crowd_ratio": crowd["pi05_ros"] / crowd["websockets"],
    }
    print("| measurement | websockets | pi05_ros | ratio | goal |\n|---|---|---|---|---|")
    for name, values, ratio, goal in (
        ("1 client, instant stub, median ms", single, result["single_ratio"], 1.25),
        ("8 clients, 20 ms stub, p95 ms", crowd, result["crowd_ratio"], 0.5),
    ):
        print(f"| {name} | {values['websockets']:.2f} | {values['pi05_ros']:.2f} | {ratio:.2f} | <= {goal} |")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if result["single_ratio"] <= 1.25 and result["crowd_ratio"] <= 0.5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
