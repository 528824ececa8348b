"""The server: one port, one asyncio loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aiohttp import web

from pi05_ros.engine.scheduler import Scheduler
from pi05_ros.errors import ConfigurationError
from pi05_ros.serving.desk import Desk
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.http_doors import HttpDoors
from pi05_ros.serving.page import Page
from pi05_ros.serving.security import Doorkeeper
from pi05_ros.serving.settings import ServerSettings
from pi05_ros.serving.websocket_doors import WebsocketDoors

_logger = logging.getLogger(__name__)
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_STOP_S = 3.0
# A connection that has not sent a whole request by then is closed.
_IDLE_S = 75.0


class Server:
    """Serves a policy on the network from `start` to `stop`.

    Liveness, metadata and handshakes answer at once; whether requests are taken, and why not, the scheduler says
    (`Scheduler.activate`, `deactivate`). The server neither starts nor stops the scheduler.
    """

    def __init__(self, facts: PolicyFacts, scheduler: Scheduler, settings: ServerSettings) -> None:
        self.settings = settings
        self._scheduler = scheduler
        self._desk = Desk(facts, scheduler, settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._address: tuple[str, int] | None = None
        self._stop: asyncio.Event | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that are listened on."""
        if self._address is None:
            raise RuntimeError("the server is not running")
        return self._address

    @property
    def url(self) -> str:
        host, port = self.address
        scheme = "http" if self.settings.tls_certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def start(self) -> None:
        """Bind and serve; returns when connections are taken.

        Raises:
            ConfigurationError: ``config.bind`` or ``config.tls``, naming address or file.
        """
        settings = self.settings
        tls = self._tls()
        try:
            listener = _listen(settings.host, settings.port)
        except OSError as error:
            raise ConfigurationError(
                "bind", f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}"
            ) from error
        if settings.api_key is None and not _is_loopback(listener.getsockname()[0]):
            _logger.warning(
                "anyone who reaches %s:%d can ask the policy: no api_key is set", *listener.getsockname()[:2]
            )
        self._address = listener.getsockname()[:2]
        self._scheduler.observer = self._desk.observe
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listener, tls, ready), name="pi05_server", daemon=True)
        self._thread.start()
        ready.result()

    def stop(self) -> None:
        """Close every connection and end the thread; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(_STOP_S + 2.0)
        self._scheduler.observer = None
        self._desk.close()
        self._address = None

    def publish_ages(self, ages_s: Mapping[str, float]) -> None:
        """Tell metrics and page how old the node's inputs are (seconds by name); from any thread."""
        self._desk.board.ages_s = dict(ages_s)
        self._desk.metrics.set_ages(ages_s)

    def describe_engine(self, *, prefix_cache: bool, cuda_graph: bool) -> None:
        """Tell metadata what the engine has, once it is loaded; from any thread."""
        self._desk.facts = replace(self._desk.facts, prefix_cache=prefix_cache, cuda_graph=cuda_graph)

    def metadata(self) -> dict[str, Any]:
        """``action.metadata`` as every door sends it."""
        return self._desk.facts.metadata(max_group=self._scheduler.max_group)

    def _tls(self) -> ssl.SSLContext | None:
        if self.settings.tls_certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.settings.tls_certificate, self.settings.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                "tls", f"{self.settings.tls_certificate} with {self.settings.tls_key} cannot be used: {error}"
            ) from error
        return context

    def _run(self, listener: socket.socket, tls: ssl.SSLContext | None, ready: Future[None]) -> None:
        try:
            asyncio.run(self._serve(listener, tls, ready))
        except BaseException as error:
            listener.close()
            if ready.done():
                _logger.exception("the server ended")
            else:
                ready.set_exception(error)

    async def _serve(self, listener: socket.socket, tls: ssl.SSLContext | None, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        doorkeeper = Doorkeeper(self.settings)
        http = HttpDoors(self._desk, doorkeeper, self.metadata)
        websockets = WebsocketDoors(self._desk, self.metadata)
        page = Page(self._desk, doorkeeper, websockets.openpi)
        app = web.Application(middlewares=[http.guard], client_max_size=self.settings.limits.max_bytes)
        app.add_routes(http.routes())
        app.add_routes(page.routes())
        app.add_routes(
            [web.get("/openpi/policy", websockets.openpi), web.get("/v1/actions/realtime", websockets.realtime)]
        )
        runner = web.AppRunner(
            app,
            access_log=None,
            # The work of a client that goes is dropped.
            handler_cancellation=True,
            # A small body must not unfold into a large one.
            auto_decompress=False,
            keepalive_timeout=_IDLE_S,
            shutdown_timeout=_STOP_S,
        )
        await runner.setup()
        gate = _Gate(runner, self._desk, self.settings.max_connections)
        server = await self._loop.create_server(gate, sock=listener, ssl=tls)
        keeping_up = self._loop.create_task(self._desk.keep_up())
        ready.set_result(None)
        try:
            await self._stop.wait()
        finally:
            server.close()
            keeping_up.cancel()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(websockets.close(), 1.0)
            await runner.cleanup()


class _Gate:
    """Makes the protocol of each new connection; over the limit, one that refuses and hangs up."""

    def __init__(self, runner: web.AppRunner, desk: Desk, limit: int) -> None:
        assert runner.server is not None
        self._server = runner.server
        self._desk = desk
        self._limit = limit

    def __call__(self) -> asyncio.Protocol:
        self._desk.connections = len(self._server.connections)
        if self._desk.connections >= self._limit:
            return _Busy()
        return self._server()


class _Busy(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_BUSY)
        transport.close()


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A restarted server takes its port at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
