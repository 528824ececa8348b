"""The one exception family of the package.

Every error carries a stable ``code`` (``family.reason``), a message that names what was expected, what came and
what to do, and optional ``details`` (JSON-serialisable) for the network doors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Pi05Error(Exception):
    """Base of all errors raised on purpose by this package."""

    family = "error"

    def __init__(self, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = f"{self.family}.{reason}"
        self.message = message
        self.details: dict[str, Any] = dict(details or {})

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class CheckpointError(Pi05Error):
    """A checkpoint folder, its weights, configuration, statistics or tokenizer cannot be used."""

    family = "checkpoint"


class ProfileError(Pi05Error):
    """A robot profile is malformed."""

    family = "profile"


class ContractError(Pi05Error):
    """Two sides that are each valid do not fit together (profile and checkpoint, profile and live graph)."""

    family = "contract"


class ObservationError(Pi05Error):
    """An observation or a request is malformed, incomplete or not finite."""

    family = "observation"


class ActionError(Pi05Error):
    """The model's output must not go further (not finite, wrong width)."""

    family = "action"


class ConfigurationError(Pi05Error):
    """A parameter, option or environment setting cannot be used."""

    family = "config"


class EngineError(Pi05Error):
    """The engine cannot run a request (memory, capture, unsupported plan)."""

    family = "engine"


class RequestError(Pi05Error):
    """A request could not be served now (queue full, deadline passed, policy not active)."""

    family = "request"
