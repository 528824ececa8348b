"""Clients of a Pi0.5 server: OpenPI's protocol and the generic one, asynchronous (`AsyncClient`) and plain (`Client`).

    with Client("ws://robot:8000") as client:
        reply = client.infer({"observation.images.base_0_rgb": image, "observation.state": state, "prompt": "..."})
        reply["actions"]  # float32 [horizon, dims]

The path chooses the protocol: ``/v1/actions/realtime`` speaks envelopes, any other OpenPI's. A lost connection is
opened again by the next request, never in the middle of one: the answer to an observation that had to be sent twice
would be late without saying so.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from pi05_ros.errors import ConfigurationError, RequestError
from pi05_ros.serving.codec import Limits, packb, unpackb

_LIMITS = Limits(max_bytes=256 * 2**20)
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
_REALTIME = "/v1/actions/realtime"
Result = TypeVar("Result")


class AsyncClient:
    """One connection to a server.

    Args:
        url: ``ws://host:port``, ``wss://``, ``http://`` or ``https://``; the path chooses the protocol.
        api_key: sent as ``Authorization: Api-Key``.
        timeout_s: for connecting (which is retried that long) and for each request.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url if "://" in url else f"ws://{url}")
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        if scheme not in ("ws", "wss") or not parts.hostname:
            raise ConfigurationError("url", f"url: ws://host:port or http://host:port expected, got {url!r}")
        self.url = urlunsplit((scheme, parts.netloc, parts.path or "/", parts.query, ""))
        self.realtime = parts.path.rstrip("/") == _REALTIME
        self.timeout_s = timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Api-Key {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse[bool] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._metadata: dict[str, Any] = {}
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._connecting = asyncio.Lock()
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def metadata(self) -> dict[str, Any]:
        """What the server says of itself when it is connected to.

        Raises:
            RequestError: as `infer`.
        """
        await self._connect()
        return self._metadata

    async def infer(self, request: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Send one observation (or, to the realtime websocket, one generation request) and wait for its answer.

        Raises:
            RequestError: ``request.unreachable``, ``request.unauthorized``, ``request.lost`` (the connection broke
                before the answer; the next call connects again), ``request.timeout``, ``request.protocol``, or
                ``request.refused`` with the server's own words.
        """
        patience = self.timeout_s if timeout_s is None else timeout_s
        try:
            return await asyncio.wait_for(self._infer(request), patience)
        except asyncio.TimeoutError:
            raise RequestError("timeout", f"{self.url}: no answer within {patience:g} s") from None

    async def close(self) -> None:
        """Hang up; the client can be used again."""
        await self._disconnect("the client was closed")
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _infer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self.realtime:
            return await self._exchange(request)
        # OpenPI's replies carry no id of their own, so one request at a time is under way.
        async with self._turn:
            return await self._exchange(request)

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
        await self._connect()
        socket = self._socket
        assert socket is not None
        key = f"c{next(self._ids)}" if self.realtime else "turn"
        sent = {**request, "request_id": key} if self.realtime else dict(request)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = reply
        try:
            await socket.send_bytes(packb(sent))
            answer = await reply
        except ConnectionError as error:
            await self._disconnect(str(error))
            raise RequestError("lost", f"{self.url}: the connection broke while sending: {error}") from error
        except asyncio.CancelledError:
            if not self.realtime:
                # Its reply would be taken for the next request's.
                await self._disconnect("a request was given up")
            raise
        finally:
            self._waiting.pop(key, None)
        return self._checked(answer, request)

    def _checked(self, answer: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(answer, str):
            raise RequestError("refused", f"{self.url}: {answer}")
        if not isinstance(answer, dict):
            raise RequestError("protocol", f"{self.url}: a map was expected, got {type(answer).__name__}")
        error = answer.get("error")
        if isinstance(error, dict):
            raise RequestError("refused", f"{self.url}: {error.get('code')}: {error.get('message')}", error)
        if self.realtime:
            given = request.get("request_id", request.get("id"))
            if given is not None:
                answer["id"] = given
        return answer

    async def _connect(self) -> None:
        async with self._connecting:
            if self._socket is not None and not self._socket.closed:
                return
            await self._disconnect("the connection was closed")
            if self._session is None:
                self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=self.timeout_s))
            loop = asyncio.get_running_loop()
            give_up = loop.time() + self.timeout_s
            for attempt in itertools.count():
                try:
                    socket = await self._session.ws_connect(
                        self.url, headers=self._headers, max_msg_size=_LIMITS.max_bytes, compress=0, heartbeat=20.0
                    )
                    break
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403):
                        raise RequestError(
                            "unauthorized", f"{self.url}: refused with status {error.status}; check key and host"
                        ) from None
                    if error.status != 503:
                        raise RequestError(
                            "protocol",
                            f"{self.url}: a websocket handshake was expected, got status {error.status}; is this a "
                            "Pi0.5 server, and is no proxy in between?",
                        ) from None
                    problem: Exception = error
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                    problem = error
                pause = _RETRY_S[min(attempt, len(_RETRY_S) - 1)]
                if loop.time() + pause >= give_up:
                    raise RequestError(
                        "unreachable", f"{self.url}: no connection within {self.timeout_s:g} s: {problem}"
                    ) from None
                await asyncio.sleep(pause)
            try:
                first = await socket.receive(self.timeout_s)
                self._metadata = self._decode(first)
            except BaseException:
                await socket.close()
                raise
            self._socket = socket
            self._receiver = asyncio.create_task(self._receive(socket))

    def _decode(self, message: Any) -> Any:
        if message.type is aiohttp.WSMsgType.BINARY:
            try:
                return unpackb(message.data, _LIMITS)
            except Exception as error:
                raise RequestError("protocol", f"{self.url}: msgpack was expected: {error}") from None
        if message.type is aiohttp.WSMsgType.TEXT:
            return message.data
        raise RequestError("lost", f"{self.url}: the server closed the connection ({message.data or 'no reason'})")

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        reason = "the server closed the connection"
        try:
            async for message in socket:
                answer = self._decode(message)
                key = answer.get("id") if self.realtime and isinstance(answer, dict) else "turn"
                waiting = self._waiting.get(str(key))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (RequestError, ConnectionError) as error:
            reason = str(error)
        finally:
            if self._socket is socket:
                self._socket = None
            self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        message = f"{self.url}: the connection broke before the answer: {reason}"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RequestError("lost", message))

    async def _disconnect(self, reason: str) -> None:
        socket, self._socket = self._socket, None
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
        self._abandon(reason)
        if socket is not None:
            await socket.close()


class Client:
    """`AsyncClient` for code without an event loop; may be used from several threads."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 30.0) -> None:
        self._client = AsyncClient(url, api_key, timeout_s)
        self.url = self._client.url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pi05_client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def metadata(self) -> dict[str, Any]:
        """See `AsyncClient.metadata`."""
        return self._run(self._client.metadata())

    def infer(self, request: Mapping[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """See `AsyncClient.infer`."""
        return self._run(self._client.infer(request, timeout_s))

    def close(self) -> None:
        """Hang up and end the thread; the client cannot be used again."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._thread.is_alive():
            work.close()
            raise RequestError("closed", "the client has been closed")
        future: Future[Result] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()
