"""The page at ``/``: what the policy sees, says and refuses, for a browser."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from aiohttp import web

from pi05_ros.errors import RequestError
from pi05_ros.serving.desk import Desk
from pi05_ros.serving.security import Doorkeeper

_ASSETS = Path(__file__).parent.parent / "assets" / "page"
_FILES: Final = {
    "index.html": "text/html",
    "login.html": "text/html",
    "page.js": "text/javascript",
    "page.css": "text/css",
}
_HEADERS: Final = {
    # Nothing from other hosts, and no other page may frame this one.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_MAX_LOGIN_BYTES = 4096
_UPGRADE = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Page:
    """``/`` for browsers. A websocket that comes to ``/`` is OpenPI's and is handed on."""

    def __init__(self, desk: Desk, doorkeeper: Doorkeeper, websocket: _UPGRADE) -> None:
        self._desk = desk
        self._doorkeeper = doorkeeper
        self._websocket = websocket
        self._files = {name: (_ASSETS / name).read_bytes() for name in _FILES}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.root, allow_head=False),
            web.post("/login", self.login),
            web.get("/page/state", self.state),
            web.get("/page/picture/{slot}", self.picture),
            web.get("/page/{name}", self.file),
        ]

    async def root(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            self._doorkeeper.check_key(request)
            return await self._websocket(request)
        self._check_on()
        if self._is_in(request):
            return self._send("index.html")
        return self._send("login.html", status=401)

    async def login(self, request: web.Request) -> web.Response:
        """Take the key once; from then on a cookie that scripts cannot read and other sites cannot send."""
        self._check_on()
        if request.content_length is None or request.content_length > _MAX_LOGIN_BYTES:
            raise RequestError("too_large", f"login: a form of at most {_MAX_LOGIN_BYTES} bytes is expected")
        given = (await request.post()).get("key")
        if not isinstance(given, str) or not self._doorkeeper.is_key(given):
            return self._send("login.html", status=401)
        response = web.Response(status=303, headers={"Location": "/", **_HEADERS})
        response.set_cookie(
            self._cookie_name(request),
            self._doorkeeper.open_session(),
            httponly=True,
            samesite="Strict",
            secure=request.secure,
            path="/",
        )
        return response

    async def file(self, request: web.Request) -> web.Response:
        self._check_on()
        name = request.match_info["name"]
        # Script and style hold no facts, and the login form needs the style.
        if name not in ("page.js", "page.css"):
            raise RequestError("not_found", f"no route {request.path[:100]!r}")
        return self._send(name)

    async def state(self, request: web.Request) -> web.Response:
        self._check_in(request)
        self._desk.catch_up()
        return web.json_response({"now": time.time(), **self._desk.board.state()}, headers=_HEADERS)

    async def picture(self, request: web.Request) -> web.Response:
        self._check_in(request)
        slot = request.match_info["slot"]
        picture = await self._desk.in_worker(self._desk.board.picture, slot)
        if picture is None:
            raise RequestError("not_found", f"no picture of {slot[:80]!r} yet")
        return web.Response(body=picture, content_type="image/jpeg", headers=_HEADERS)

    def _check_on(self) -> None:
        if not self._desk.settings.page:
            raise RequestError("not_found", "the page is switched off; this is a websocket")

    def _check_in(self, request: web.Request) -> None:
        self._check_on()
        self._doorkeeper.check_key(request, request.cookies.get(self._cookie_name(request)))

    def _is_in(self, request: web.Request) -> bool:
        try:
            self._check_in(request)
        except RequestError:
            return False
        return True

    @staticmethod
    def _cookie_name(request: web.Request) -> str:
        # Browsers share cookies between the ports of a host: two robots on one machine need two names.
        local = None if request.transport is None else request.transport.get_extra_info("sockname")
        return f"pi05_ros_{local[1]}" if isinstance(local, tuple) else "pi05_ros"

    def _send(self, name: str, status: int = 200) -> web.Response:
        return web.Response(
            status=status, body=self._files[name], content_type=_FILES[name], charset="utf-8", headers=_HEADERS
        )
