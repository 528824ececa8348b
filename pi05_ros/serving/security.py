"""Who may come in: the key, the Host and the Origin of a request."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections import OrderedDict
from urllib.parse import urlsplit

from aiohttp import web

from pi05_ros.errors import RequestError
from pi05_ros.serving.settings import ServerSettings

_MAX_SESSIONS = 64


class Doorkeeper:
    """Refuses requests before anything of them is read."""

    def __init__(self, settings: ServerSettings) -> None:
        self._key = None if settings.api_key is None else settings.api_key.encode()
        self._allowed = {name.lower().rstrip(".") for name in settings.allowed_hosts}
        self._sessions: OrderedDict[str, None] = OrderedDict()

    @property
    def asks_for_key(self) -> bool:
        return self._key is not None

    def check_address(self, request: web.Request) -> None:
        """A web page must not reach the robot: neither by a name that resolves to it nor from its own origin.

        Raises:
            RequestError: ``request.forbidden``.
        """
        name = _host_name(request.headers.get("Host", ""))
        if not self._is_ours(name, request):
            raise RequestError(
                "forbidden",
                f"Host {name[:100]!r} is neither loopback nor this server's address; name it in allowed_hosts",
            )
        origin = request.headers.get("Origin")
        if origin is not None:
            try:
                page = (urlsplit(origin).hostname or "").lower()
            except ValueError:
                page = ""
            if not self._is_ours(page, request):
                raise RequestError(
                    "forbidden",
                    f"Origin {origin[:100]!r} is neither loopback nor this server's address; name it in allowed_hosts",
                )

    def check_key(self, request: web.Request, cookie: str | None = None) -> None:
        """The key as ``Authorization: Api-Key`` or ``Bearer``, or ``x-api-key``; the page's cookie where it counts.

        Args:
            cookie: the value of the page's cookie, for routes that take it.

        Raises:
            RequestError: ``request.unauthorized``.
        """
        if self._key is None or self.is_session(cookie):
            return
        given = request.headers.get("x-api-key")
        if given is None:
            scheme, _, rest = request.headers.get("Authorization", "").partition(" ")
            given = rest.strip() if scheme.lower() in ("api-key", "bearer") else ""
        if not self.is_key(given):
            raise RequestError(
                "unauthorized", "a key is asked for: Authorization: Api-Key <key>, Bearer <key>, or x-api-key: <key>"
            )

    def is_key(self, given: str) -> bool:
        return self._key is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self._key)

    def open_session(self) -> str:
        """A token for the page's cookie; it opens the page and nothing that moves a robot."""
        token = secrets.token_urlsafe(32)
        self._sessions[token] = None
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return token

    def is_session(self, token: str | None) -> bool:
        return token is not None and any(
            hmac.compare_digest(token.encode(), known.encode()) for known in self._sessions
        )

    def _is_ours(self, name: str, request: web.Request) -> bool:
        if name == "localhost" or name in self._allowed:
            return True
        address = _address(name)
        if address is None:
            return False
        local = None if request.transport is None else request.transport.get_extra_info("sockname")
        # 0.0.0.0 is what OpenPI's client connects to unless told otherwise; it is this machine.
        return (
            address.is_loopback
            or address.is_unspecified
            or (isinstance(local, tuple) and address == _address(local[0]))
        )


def _host_name(header: str) -> str:
    """The name of a Host header without its port, lower case."""
    host = header.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped
