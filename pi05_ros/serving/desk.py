"""Where every network door hands in its requests: decode, check, schedule, wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pi05_ros.engine.scheduler import Answer, Scheduler, Served, Ticket, Work, deadline_error
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
        self._unread: deque[tuple[bool, Answer | None, BaseException | None]] = deque()
        self._workers = ThreadPoolExecutor(2, "pi05_decode")

    def observe(self, served: Served) -> None:
        """Called by the scheduler after each request, on its thread, before the request is answered."""
        if served.answer is not None:
            self.board.see(served)
        # Only what is counted is kept until then: not the request's pictures.
        self._unread.append((served.work.control, served.answer, served.error))

    def catch_up(self) -> None:
        """Count what the scheduler did; the inference thread must not spend its time on that."""
        while self._unread:
            control, answer, error = self._unread.popleft()
            if answer is not None:
                self.metrics.observe(control, answer)
            self.board.observe(control, answer, error)

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
        if form == "msgpack" and (value := self.decode_now(data)) is not None:
            return value
        return await self.in_worker(parse_json if form == "json" else unpackb, data, self.settings.limits)

    async def read(self, body: Any, size: int) -> Ask:
        """Check a decoded body of ``size`` bytes on the wire."""
        ask = self.read_now(body, size)
        return await self.in_worker(self._reader.read, body) if ask is None else ask

    def read_now(self, body: Any, size: int) -> Ask | None:
        """As `read`, at once; ``None`` where that would hold up the event loop."""
        return None if size > _INLINE_BYTES or _has_encoded_image(body) else self._reader.read(body)

    def decode_now(self, data: bytes) -> Any:
        """The value of a msgpack message at once; ``None`` where that would hold up the event loop."""
        return None if len(data) > _INLINE_BYTES else unpackb(data, self.settings.limits)

    def submit(self, ask: Ask, source: Hashable) -> Submitted:
        """Put a request in the queue.

        Raises:
            RequestError: ``request.inactive`` or ``request.queue_full``.
        """
        patience = self.settings.timeout_s if ask.timeout_s is None else ask.timeout_s
        submitted = Submitted(ask, source, time.monotonic() + patience, [])
        self._submit_some(submitted, 0)
        return submitted

    async def answers(self, submitted: Submitted) -> list[Answer]:
        """Wait for one answer for each candidate.

        Raises:
            Pi05Error: failed, or not answered before its deadline.
        """
        answers: list[Answer] = []
        try:
            while True:
                for ticket in submitted.tickets[len(answers) :]:
                    answers.append(await _wait(ticket, submitted.deadline))
                if len(answers) == len(submitted.ask.options):
                    return answers
                self._submit_some(submitted, len(answers))
        except BaseException:
            # Also when the client has gone: nobody waits for these any more.
            submitted.cancel()
            raise

    def _submit_some(self, submitted: Submitted, start: int) -> None:
        """As many candidates as may wait together, from ``start`` on."""
        ask = submitted.ask
        together = max(1, min(self.scheduler.max_group, self.scheduler.max_per_source))
        try:
            for options in ask.options[start : start + together]:
                work = Work(
                    ask.observation,
                    options,
                    ask.how,
                    source=submitted.source,
                    group=ask.group,
                    deadline=submitted.deadline,
                )
                submitted.tickets.append(self.scheduler.submit(work))
        except BaseException:
            submitted.cancel()
            raise


@dataclass
class Submitted:
    """A request in the queue: its candidates' tickets, those that had to wait for the first ones not included."""

    ask: Ask
    source: Hashable
    deadline: float
    tickets: list[Ticket]

    def cancel(self) -> None:
        for ticket in self.tickets:
            ticket.cancel()


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
