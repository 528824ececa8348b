"""What happened, as Prometheus counts it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pi05_ros.engine.scheduler import Answer

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_RATE_WINDOW_S = 5.0


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(
        self, depth: Callable[[], float], active: Callable[[], bool], connections: Callable[[], float]
    ) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "pi05_requests",
            "Requests by door and status (ok or an error's code).",
            ("door", "status"),
            registry=self._registry,
        )
        self._stage = Histogram(
            "pi05_stage_seconds", "Duration of each stage.", ("stage",), buckets=_SECONDS, registry=self._registry
        )
        self._total = Histogram(
            "pi05_request_seconds", "From arrival to reply.", ("door",), buckets=_SECONDS, registry=self._registry
        )
        self._group = Histogram(
            "pi05_group_size", "Requests in one pass.", buckets=(1, 2, 3, 4, 6, 8, 16, 32), registry=self._registry
        )
        self._cache = Counter("pi05_prefix_cache", "Prefix cache results.", ("result",), registry=self._registry)
        self._chunks = Counter("pi05_chunks", "Chunks computed, by who asked.", ("loop",), registry=self._registry)
        self._age = Gauge(
            "pi05_input_age_seconds", "Age of each input of the node.", ("input",), registry=self._registry
        )
        for name, text, value in (
            ("pi05_queue_depth", "Requests that wait.", depth),
            ("pi05_active", "1 while requests are taken.", lambda: float(active())),
            ("pi05_connections", "Open connections.", connections),
            ("pi05_chunk_rate_hz", "Chunks per second over the last 5 s.", self.chunk_rate_hz),
        ):
            Gauge(name, text, registry=self._registry).set_function(value)
        self._finished: deque[float] = deque(maxlen=4096)

    def observe(self, control: bool, answer: Answer) -> None:
        """Count one answer of the scheduler."""
        self._finished.append(time.monotonic())
        self._chunks.labels("control" if control else "network").inc()
        self._group.observe(answer.group_size)
        self._stage.labels("queue").observe(answer.queue_ms / 1e3)
        for stage, milliseconds in answer.chunk.timings_ms.items():
            self._stage.labels(stage).observe(milliseconds / 1e3)
        self._cache.labels("hit" if answer.chunk.cache_hit else "miss").inc()

    def count(self, door: str, status: str, seconds: float) -> None:
        """Count one request of a door."""
        self.requests.labels(door, status).inc()
        self._total.labels(door).observe(seconds)

    def set_ages(self, ages_s: Mapping[str, float]) -> None:
        """Ages of the node's inputs in seconds, by name."""
        for name, age in ages_s.items():
            self._age.labels(name).set(age)

    def chunk_rate_hz(self) -> float:
        since = time.monotonic() - _RATE_WINDOW_S
        return sum(finished >= since for finished in list(self._finished)) / _RATE_WINDOW_S

    def text(self) -> bytes:
        return generate_latest(self._registry)
