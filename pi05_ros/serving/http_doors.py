"""The HTTP routes."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from aiohttp import web

from pi05_ros.errors import ObservationError, RequestError
from pi05_ros.serving import replies
from pi05_ros.serving.codec import packb
from pi05_ros.serving.desk import Desk, readable_id
from pi05_ros.serving.failures import Failure, describe
from pi05_ros.serving.openapi import openapi
from pi05_ros.serving.security import Doorkeeper

_logger = logging.getLogger(__name__)
_BODY_TIMEOUT_S = 60.0
MSGPACK = "application/msgpack"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Routes that a request reaches without the key.
_OPEN = frozenset({"/liveness"})
# Routes that check the key themselves, because the page's cookie counts there.
_PAGE = frozenset({"/", "/login"})


class HttpDoors:
    """Handlers of the plain routes, and the middleware that stands before all of them."""

    def __init__(self, desk: Desk, doorkeeper: Doorkeeper, metadata: Callable[[], dict[str, Any]]) -> None:
        self._desk = desk
        self._doorkeeper = doorkeeper
        self._metadata = metadata
        self._started = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/liveness", self.liveness),
            web.get("/health", self.health),
            web.get("/healthz", self.health),
            web.get("/v1/models", self.models),
            web.get("/v1/actions/metadata", self.metadata),
            web.post("/v1/actions/generations", self.generations),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Address and key first; every error leaves as JSON (or msgpack, where the client speaks it)."""
        try:
            if request.path not in _OPEN:
                self._doorkeeper.check_address(request)
                if request.path not in _PAGE and not request.path.startswith("/page/"):
                    self._doorkeeper.check_key(request)
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return _refusal(request, _of_http(error, request))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            return _refusal(request, describe(error))

    async def liveness(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def health(self, request: web.Request) -> web.Response:
        scheduler = self._desk.scheduler
        if scheduler.active:
            return web.Response(text="OK")
        return web.Response(status=503, text=scheduler.reason, headers={"Retry-After": "1"})

    async def models(self, request: web.Request) -> web.Response:
        entries = [
            {"id": name, "object": "model", "created": self._started, "owned_by": "pi05_ros"}
            for name in self._desk.facts.served_model_names
        ]
        return web.json_response({"object": "list", "data": entries})

    async def metadata(self, request: web.Request) -> web.Response:
        described = self._metadata()
        if _speaks_msgpack(request):
            return web.Response(body=packb(described), content_type=MSGPACK)
        return web.json_response(described)

    async def metrics(self, request: web.Request) -> web.Response:
        self._desk.catch_up()
        body = self._desk.metrics.text()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(self, request: web.Request) -> web.Response:
        return web.json_response(openapi(self._doorkeeper.asks_for_key))

    async def generations(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/actions/generations``."""
        arrived = time.monotonic()
        request_id: str | int = f"act-{secrets.token_hex(8)}"
        status = "ok"
        try:
            content_type = request.headers.get("Content-Type", "").lower()
            form: Literal["msgpack", "json"] | None
            form = "msgpack" if "msgpack" in content_type else "json" if "json" in content_type else None
            if form is None or request.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise RequestError(
                    "media_type",
                    "application/json or application/msgpack without Content-Encoding expected, got "
                    f"{content_type[:80]!r} {request.headers.get('Content-Encoding', '')[:40]!r}",
                )
            data = await self._body(request)
            body = await self._desk.decode(data, form)
            if (given := readable_id(body)) is not None:
                request_id = given
            ask = await self._desk.read(body, len(data))
            numpy_reply = _speaks_msgpack(request)
            if ask.output_format == "numpy" and not numpy_reply:
                raise ObservationError(
                    "output_format", 'runtime.output_format "numpy" needs a msgpack reply: Accept: application/msgpack'
                )
            answers = await self._desk.answers(self._desk.submit(ask, source=request.transport))
            build = replies.raw if ask.response_format == "raw" else replies.envelope
            as_arrays = numpy_reply and ask.output_format != "list"
            reply = build(ask, answers, self._desk.facts, request_id, as_arrays)
            if numpy_reply:
                return web.Response(body=packb(reply), content_type=MSGPACK)
            return web.json_response(reply)
        except asyncio.CancelledError:
            status = "gone"
            raise
        except Exception as error:
            failure = _of_http(error, request) if isinstance(error, web.HTTPException) else describe(error, request_id)
            status = failure.code
            self._desk.board.refuse("http", failure)
            return _refusal(request, failure, request_id)
        finally:
            self._desk.metrics.count("http", status, time.monotonic() - arrived)
            _logger.debug("door=http request_id=%s status=%s", request_id, status)

    async def _body(self, request: web.Request) -> bytes:
        limit = self._desk.settings.limits.max_bytes
        if request.content_length is not None and request.content_length > limit:
            raise RequestError("too_large", f"body: at most {limit} bytes are taken, got {request.content_length}")
        try:
            return await asyncio.wait_for(request.read(), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise RequestError("too_slow", f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None


def _speaks_msgpack(request: web.Request) -> bool:
    return any("msgpack" in request.headers.get(header, "").lower() for header in ("Content-Type", "Accept"))


def _of_http(error: web.HTTPException, request: web.Request) -> Failure:
    """aiohttp's own refusals in our words."""
    known = {
        404: ("request.not_found", f"no route {request.path[:100]!r}"),
        405: ("request.method", f"{request.method} is not taken on {request.path[:100]!r}"),
        413: ("request.too_large", "the body is too large"),
    }
    code, message = known.get(error.status, ("request.refused", error.reason))
    return Failure(error.status, code, message)


def _refusal(request: web.Request, failure: Failure, request_id: str | int | None = None) -> web.Response:
    body = failure.body(request_id)
    headers = {} if failure.retry_after_s is None else {"Retry-After": str(failure.retry_after_s)}
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if "msgpack" in request.headers.get("Accept", "").lower() or (
        "Accept" not in request.headers and _speaks_msgpack(request)
    ):
        return web.Response(status=failure.status, body=packb(body), content_type=MSGPACK, headers=headers)
    return web.json_response(body, status=failure.status, headers=headers, dumps=_dumps)


def _dumps(value: Any) -> str:
    return json.dumps(value, default=str)
