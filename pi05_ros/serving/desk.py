"""Where every network door hands in its requests: decode, check, schedule, wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pi05_ros.engine.scheduler import Answer, Scheduler, Served, Ticket, Work, deadline_error
from pi05_ros.observation import Observation
from pi05_ros.serving.board import Board
from pi05_ros.serving.codec import parse_json, unpackb
from pi05_ros.serving.facts import PolicyFacts
from pi05_ros.serving.metrics import Metrics
from pi05_ros.serving.schema import Ask, RequestReader
from pi05_ros.serving.settings import ServerSettings

_logger = logging.getLogger(__name__)
# Arrays in a frame up to this size are decoded faster than a thread could be asked to do it.
_INLINE_BYTES = 4 * 2**20
_CATCH_UP_S = 0.1

_WITHOUT_PICTURES = {control: Work(Observation({}, np.empty(0)), None, control=control) for control in (False, True)}


class Desk:
    """The policy as the network's doors see it. Used on the server's event loop only, but for `observe`."""

    def __init__(self, facts: PolicyFacts, scheduler: Scheduler, settings: ServerSettings) -> None:
        self.facts = facts
        self.scheduler = scheduler
        self.settings = settings
        self.connections = 0
        self.metrics = Metrics(lambda: scheduler.depth, lambda: scheduler.active, lambda: self.connections)
        self.board = Board(facts, scheduler)
        self._reader = RequestReader(facts)
        self._unread: deque[Served] = deque()
        self._workers = ThreadPoolExecutor(2, "pi05_decode")

    def observe(self, served: Served) -> None:
        """Called by the scheduler after each request, on its thread, before the request is answered."""
        if served.answer is not None:
            self.board.see(served)
            # Only what is counted is kept: not the request's pictures.
            served = replace(served, work=_WITHOUT_PICTURES[served.work.control], prepared=None)
        self._unread.append(served)

    def catch_up(self) -> None:
        """Count what the scheduler did; the inference thread must not spend its time on that."""
        while self._unread:
            served = self._unread.popleft()
            self.metrics.observe(served)
            self.board.observe(served)

    async def keep_up(self) -> None:
        """Catch up for as long as the server runs."""
        while True:
            self.catch_up()
            await asyncio.sleep(_CATCH_UP_S)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def in_worker(self, function: Any, *arguments: Any) -> Any:
        """Run something slow beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    async def decode(self, data: bytes, form: Literal["json", "msgpack"]) -> Any:
        """The value of a message; see `codec`."""
        decode = parse_json if form == "json" else unpackb
        if form == "msgpack" and len(data) <= _INLINE_BYTES:
            return decode(data, self.settings.limits)
        return await self.in_worker(decode, data, self.settings.limits)

    async def read(self, body: Any, size: int) -> Ask:
        """Check a decoded body of ``size`` bytes on the wire."""
        if size <= _INLINE_BYTES and not _has_encoded_image(body):
            return self._reader.read(body)
        return await self.in_worker(self._reader.read, body)

    async def answer(self, ask: Ask, source: Hashable) -> list[Answer]:
        """One answer for each candidate.

        Raises:
            Pi05Error: refused, failed, or not answered before its deadline.
        """
        patience = self.settings.timeout_s if ask.timeout_s is None else ask.timeout_s
        deadline = time.monotonic() + patience
        answers: list[Answer] = []
        together = max(1, min(self.scheduler.max_group, self.scheduler.max_per_source))
        for start in range(0, len(ask.options), together):
            tickets: list[Ticket] = []
            try:
                for options in ask.options[start : start + together]:
                    work = Work(ask.observation, options, ask.how, source=source, group=ask.group, deadline=deadline)
                    tickets.append(self.scheduler.submit(work))
                for ticket in tickets:
                    answers.append(await _wait(ticket, deadline))
            except BaseException:
                # Also when the client has gone: nobody waits for these any more.
                for ticket in tickets:
                    ticket.cancel()
                raise
        return answers


async def _wait(ticket: Ticket, deadline: float) -> Answer:
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def wake_from_thread(_: object) -> None:
        with suppress(RuntimeError):  # the server stopped meanwhile and its loop is closed
            loop.call_soon_threadsafe(wake)

    ticket.future.add_done_callback(wake_from_thread)
    timer = loop.call_later(max(0.0, deadline - time.monotonic()), wake)
    try:
        await woken
    finally:
        timer.cancel()
    if not ticket.future.done():
        raise deadline_error()
    return ticket.future.result()


def readable_id(body: Any) -> str | int | None:
    """The client's id, so that an error can carry it although the body could not be checked."""
    for key in ("request_id", "id"):
        value = body.get(key) if isinstance(body, dict) else None
        if (isinstance(value, str) and len(value) <= 256) or (isinstance(value, int) and not isinstance(value, bool)):
            return value
    return None


def _has_encoded_image(body: Any, depth: int = 0) -> bool:
    """Whether a map of the body carries base64, which is slow to decode."""
    if not isinstance(body, dict) or depth > 4:
        return False
    return any(
        key in ("base64", "b64_json") or (isinstance(value, dict) and _has_encoded_image(value, depth + 1))
        for key, value in body.items()
    )
