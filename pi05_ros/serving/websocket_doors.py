"""The websockets: OpenPI's at ``/`` and ``/openpi/policy``, and the realtime one."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import WSMsgType, web

from pi05_ros.engine.scheduler import Answer
from pi05_ros.errors import ObservationError, RequestError
from pi05_ros.serving import replies
from pi05_ros.serving.codec import packb
from pi05_ros.serving.desk import Desk, Submitted, readable_id
from pi05_ros.serving.failures import Failure, describe
from pi05_ros.serving.schema import Ask

_logger = logging.getLogger(__name__)
_PING_S = 30.0
# A client that sends on although its requests are refused is not listening.
_DEAF_FACTOR = 8


class WebsocketDoors:
    """Opens websocket sessions."""

    def __init__(self, desk: Desk, metadata: Callable[[], dict[str, Any]]) -> None:
        self._desk = desk
        self._metadata = metadata
        self._open: set[web.WebSocketResponse] = set()

    async def openpi(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, OpenPiSession)

    async def realtime(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, RealtimeSession)

    async def close(self) -> None:
        """Say goodbye to every client."""
        await asyncio.gather(
            *(socket.close(code=1001, message=b"the server is stopping") for socket in list(self._open)),
            return_exceptions=True,
        )

    async def _serve(self, request: web.Request, kind: type[Session]) -> web.StreamResponse:
        # The event loop never waits for the model, so pings are answered while it runs. Without compression: it costs
        # more time than it saves on pictures, and a small frame could unfold into gigabytes.
        socket = web.WebSocketResponse(
            compress=False, max_msg_size=self._desk.settings.limits.max_bytes, heartbeat=_PING_S, timeout=1.0
        )
        if not socket.can_prepare(request).ok:
            raise RequestError("upgrade", f"{request.path} is a websocket; connect with ws:// or wss://")
        await socket.prepare(request)
        session = kind(self._desk, socket)
        self._open.add(socket)
        try:
            await socket.send_bytes(packb(self._metadata()))
            await session.run()
        except ConnectionError:
            pass  # the client went while it was being answered
        finally:
            self._open.discard(socket)
            await session.end()
        return socket


@dataclass
class _Request:
    """One message on its way: ``data`` is still to be decoded, ``submitted`` waits for its answer, or it failed."""

    arrived: float
    data: bytes | None
    request_id: str | int | None = None
    submitted: Submitted | None = None
    error: Exception | None = None


class Session:
    """One connection. Each message becomes a task: the connection is always read (pings, a client that goes)."""

    door = ""
    in_order = False

    def __init__(self, desk: Desk, socket: web.WebSocketResponse) -> None:
        self._desk = desk
        self._socket = socket
        self._tasks: dict[asyncio.Task[None], _Request] = {}
        self._last: asyncio.Task[None] | None = None
        self._under_way = 0
        self._previous_total_ms: float | None = None

    async def run(self) -> None:
        """Serve until the client goes."""
        limit = self._desk.settings.max_in_flight
        async for message in self._socket:
            if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT):
                break
            if len(self._tasks) >= limit * _DEAF_FACTOR:
                await self._socket.close(code=1008, message=b"too many requests without reading the replies")
                break
            request = self._begin(message.data if message.type is WSMsgType.BINARY else None)
            task = asyncio.create_task(self._handle(request, self._last))
            self._tasks[task] = request
            task.add_done_callback(self._forget)
            if self.in_order:
                self._last = task

    async def end(self) -> None:
        """Drop what the client that has gone was waiting for."""
        tasks = dict(self._tasks)
        for task, request in tasks.items():
            task.cancel()
            if request.submitted is not None:
                # A task that was cancelled before its first step does not do this itself.
                request.submitted.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]

    def _begin(self, data: bytes | None) -> _Request:
        """Hand a request in at once where that is quick, so that the model starts before anything else happens."""
        request = _Request(time.monotonic(), data)
        self._under_way += 1
        try:
            if self._under_way > self._desk.settings.max_in_flight:
                raise RequestError(
                    "queue_full",
                    f"at most {self._desk.settings.max_in_flight} requests of one connection may be under way",
                )
            if data is None:
                raise ObservationError("malformed", "a binary msgpack frame is expected, got a text frame")
            body = self._desk.decode_now(data)
            request.request_id = readable_id(body)
            ask = None if body is None else self._desk.read_now(body, len(data))
            if ask is not None:
                self._submit(request, ask)
        except Exception as error:
            request.error = error
        return request

    async def _begin_slowly(self, request: _Request) -> None:
        assert request.data is not None
        body = await self._desk.decode(request.data, "msgpack")
        request.request_id = readable_id(body)
        self._submit(request, await self._desk.read(body, len(request.data)))

    def _submit(self, request: _Request, ask: Ask) -> None:
        self._check(ask)
        request.submitted = self._desk.submit(ask, self)
        request.data = None

    async def _handle(self, request: _Request, previous: asyncio.Task[None] | None) -> None:
        status = "ok"
        reply: bytes | str
        try:
            if request.error is not None:
                raise request.error
            if request.submitted is None:
                await self._begin_slowly(request)
            assert request.submitted is not None
            reply = self._reply(request.submitted.ask, await self._desk.answers(request.submitted))
        except asyncio.CancelledError:
            status = "gone"
            raise
        except Exception as error:
            failure = describe(error, request.request_id)
            status = failure.code
            self._desk.board.refuse(self.door, failure)
            reply = self._refusal(failure, request.request_id)
        finally:
            self._under_way -= 1
            if status == "gone":
                self._count(status, request)
        if previous is not None and not previous.done():
            await asyncio.wait([previous])
        try:
            if isinstance(reply, str):
                await self._socket.send_str(reply)
            else:
                await self._socket.send_bytes(reply)
        except ConnectionError:
            status = "gone"
        # Counted only now: the client need not wait for that.
        self._count(status, request)
        self._previous_total_ms = (time.monotonic() - request.arrived) * 1e3

    def _count(self, status: str, request: _Request) -> None:
        self._desk.metrics.count(self.door, status, time.monotonic() - request.arrived)
        _logger.debug("door=%s request_id=%s status=%s", self.door, request.request_id, status)

    def _check(self, ask: Ask) -> None:
        """Refuse what this protocol cannot answer."""
        raise NotImplementedError

    def _reply(self, ask: Ask, answers: list[Answer]) -> bytes:
        raise NotImplementedError

    def _refusal(self, failure: Failure, request_id: str | int | None) -> bytes | str:
        raise NotImplementedError


class OpenPiSession(Session):
    """OpenPI's protocol: replies in the order of the requests, an error is a text frame."""

    door = "openpi"
    in_order = True

    def _check(self, ask: Ask) -> None:
        if len(ask.options) > 1:
            raise ObservationError("malformed", "num_candidates: OpenPI's reply holds one chunk; use /v1/actions/...")

    def _reply(self, ask: Ask, answers: list[Answer]) -> bytes:
        return packb(replies.openpi(ask, answers[0], self._previous_total_ms))

    def _refusal(self, failure: Failure, request_id: str | int | None) -> str:
        return failure.text()


class RealtimeSession(Session):
    """The envelope over a websocket: replies carry the request's id and come as they are ready."""

    door = "realtime"

    def _check(self, ask: Ask) -> None:
        if ask.response_format == "raw":
            raise ObservationError("malformed", 'runtime.response_format: "raw" is for HTTP; here envelopes are sent')

    def _reply(self, ask: Ask, answers: list[Answer]) -> bytes:
        request_id = f"act-{secrets.token_hex(8)}" if ask.request_id is None else ask.request_id
        reply = replies.envelope(ask, answers, self._desk.facts, request_id, ask.output_format != "list")
        infer_ms = sum(answer.infer_ms for answer in answers)
        reply["server_timing"] = {"infer_ms": infer_ms, "queue_ms": answers[0].queue_ms}
        if self._previous_total_ms is not None:
            reply["server_timing"]["prev_total_ms"] = self._previous_total_ms
        return packb(reply)

    def _refusal(self, failure: Failure, request_id: str | int | None) -> bytes:
        return packb(failure.body(request_id))
