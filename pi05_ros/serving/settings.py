"""How the server is to run; the node's parameters and `pi05-ros serve` both fill this."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from pi05_ros.errors import ConfigurationError
from pi05_ros.serving.codec import Limits

API_KEY_VARIABLE = "PI05_ROS_API_KEY"


@dataclass(frozen=True)
class ServerSettings:
    """Everything that may be chosen about the network doors.

    Attributes:
        port: 0 takes a free one.
        api_key: asked for on every route and websocket but ``/liveness``; ``None`` asks for none.
        allowed_hosts: names by which clients may address the server (Host) and pages may stand on (Origin), beside
            loopback and the address that was connected to.
        tls_certificate, tls_key: PEM files; both or neither.
        timeout_s: deadline of a request that states none.
        max_connections: open connections, idle ones included.
        max_in_flight: requests of one websocket that may be under way.
        page: whether ``/`` shows a browser the state of the policy.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    allowed_hosts: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    timeout_s: float = 60.0
    max_connections: int = 256
    max_in_flight: int = 8
    page: bool = True
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigurationError("tls", "tls_certificate and tls_key are given together or not at all")
        if self.api_key is not None and (len(self.api_key) < 8 or not self.api_key.isascii() or " " in self.api_key):
            raise ConfigurationError("api_key", "api_key: at least 8 ASCII characters without spaces are expected")
        if not self.timeout_s > 0:
            raise ConfigurationError("timeout", f"timeout_s: a positive number is expected, got {self.timeout_s}")


def read_api_key(file: str | Path | None) -> str | None:
    """The key from a file, else from the environment variable ``PI05_ROS_API_KEY``, else ``None``.

    Raises:
        ConfigurationError: ``config.api_key`` for a file that cannot be read or is empty.
    """
    if file is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("api_key", f"api_key_file {file}: {error}") from error
    if not key:
        raise ConfigurationError("api_key", f"api_key_file {file}: the file is empty")
    return key
