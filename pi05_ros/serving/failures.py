"""Exceptions to what a client is told: a status, a stable code, a message; never a traceback."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from pi05_ros.errors import Pi05Error

_logger = logging.getLogger(__name__)

_BY_CODE = {
    "request.unauthorized": 401,
    "request.forbidden": 403,
    "request.not_found": 404,
    "request.unknown_model": 404,
    "request.method": 405,
    "request.too_slow": 408,
    "request.too_large": 413,
    "request.media_type": 415,
    "request.queue_full": 429,
    "request.inactive": 503,
    "request.deadline": 504,
}
# 422: the request is well-formed, and the network's answer to it cannot be used.
_BY_FAMILY = {"observation": 400, "request": 400, "action": 422, "checkpoint": 503, "engine": 503}


@dataclass(frozen=True)
class Failure:
    """What is told about one exception. ``retry_after_s`` is set where asking again makes sense."""

    status: int
    code: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def retry_after_s(self) -> int | None:
        return 1 if self.status in (429, 503) else None

    def body(self, request_id: str | int | None = None) -> dict[str, Any]:
        told: dict[str, Any] = {"code": self.code, "message": self.message, "details": self.details}
        return {"error": told} if request_id is None else {"error": told, "id": request_id}

    def text(self) -> str:
        """One line, for clients that take a text frame for an error."""
        return f"{self.code}: {self.message}"


def describe(error: BaseException, request_id: str | int | None = None) -> Failure:
    """What a client is told about ``error``; one that was not raised on purpose goes to the log in full."""
    if isinstance(error, Pi05Error):
        status = _BY_CODE.get(error.code) or _BY_FAMILY.get(error.family, 500)
        return Failure(status, error.code, error.message, error.details)
    _logger.error("request %s failed", request_id, exc_info=error)
    return Failure(500, "internal", "the server failed on this request; its log says why")
