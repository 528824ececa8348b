"""Shares one policy between the robot's own control loop and the network: one thread alone touches the model.

Order: the control loop's request, then calls (warm-up, maintenance), then network requests in turn between sources. A
control request runs alone and ends the gathering of a group; it waits at most for the pass that is already running.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.errors import RequestError
from pi05_ros.observation import Observation

_logger = logging.getLogger(__name__)
_IDLE_AFTER_S = 0.25


class RunsPolicy(Protocol):
    """What the scheduler needs of `pi05_ros.policy.Policy`; see there for the meaning."""

    @property
    def prepare(self) -> Callable[..., Any]: ...

    def run(self, members: Sequence[Any], options: Sequence[Any]) -> Sequence[Any]: ...

    def finish(self, prepared: Any, result: Any) -> ActionChunk: ...


@dataclass(frozen=True)
class Work:
    """One request to the policy.

    Attributes:
        options: the engine's `InferenceOptions`.
        how: further keyword arguments of `Policy.prepare`.
        source: who asks (a connection); sources are served in turn.
        control: the robot's own control loop: goes first and alone.
        group: requests with equal keys may share one pass through the network; ``None`` runs alone.
        deadline: `time.monotonic` seconds; work that has not been answered by then is not worth answering.
    """

    observation: Observation
    options: Any
    how: Mapping[str, Any] = field(default_factory=dict)
    source: Hashable = None
    control: bool = False
    group: Hashable = None
    deadline: float | None = None


@dataclass(frozen=True)
class Answer:
    """A chunk and how it came about; durations in milliseconds."""

    chunk: ActionChunk
    queue_ms: float
    infer_ms: float
    group_size: int


@dataclass(frozen=True)
class Served:
    """What an observer of the scheduler is told about each request: ``answer`` or ``error``, never both."""

    work: Work
    prepared: Any = None
    answer: Answer | None = None
    error: BaseException | None = None


class Ticket:
    """A submitted request. ``future`` gives the `Answer` or raises the request's error."""

    def __init__(self, scheduler: Scheduler, work: Work) -> None:
        self.work = work
        self.future: Future[Answer] = Future()
        self.submitted = time.monotonic()
        self._scheduler = scheduler

    def cancel(self) -> None:
        """Give up: waiting work is dropped at once, the result of running work is thrown away."""
        self._scheduler._drop(self)
        self.future.cancel()

    def result(self, timeout: float | None = None) -> Answer:
        return self.future.result(timeout)


class Scheduler:
    """One inference thread and the bounded queue before it.

    Args:
        max_queue: network requests that may wait in all; control requests are not counted.
        max_per_source: requests of one source that may wait.
        max_group: network requests that may share one pass; 1 never groups.
        max_wait_ms: how long the oldest waiting request may be held back to fill its group.
        observer: called on the inference thread after each request; must return fast and not raise.
    """

    def __init__(
        self,
        *,
        max_queue: int = 64,
        max_per_source: int = 8,
        max_group: int = 1,
        max_wait_ms: float = 0.0,
        observer: Callable[[Served], None] | None = None,
    ) -> None:
        self.max_queue = max_queue
        self.max_per_source = max_per_source
        self.max_group = max_group
        self.max_wait_ms = max_wait_ms
        self.observer = observer
        self._changed = threading.Condition()
        self._control: deque[Ticket] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._queues: OrderedDict[Hashable, deque[Ticket]] = OrderedDict()
        self._waiting = 0
        self._policy: RunsPolicy | None = None
        self._reason = "the policy is not loaded yet"
        self._activation = 0
        self._when_idle: Callable[[], bool] | None = None
        self._idle: Callable[[], bool] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="pi05_inference", daemon=True)

    @property
    def active(self) -> bool:
        return self._policy is not None

    @property
    def reason(self) -> str:
        """Why requests are refused; empty while they are taken."""
        return "" if self.active else self._reason

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return self._waiting + len(self._control)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> bool:
        """Refuse everything that waits, let the running pass end, end the thread.

        Returns:
            Whether the thread ended within ``timeout`` seconds; it is a daemon and never keeps the process alive.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.deactivate("the server is stopping")
        with self._changed:
            calls, self._calls = list(self._calls), deque()
        for _, future in calls:
            future.cancel()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def activate(self, policy: RunsPolicy, idle: Callable[[], bool] | None = None) -> None:
        """Take requests from now on and answer them with ``policy``.

        Args:
            idle: called on the inference thread when nothing has come for a quarter of a second, and again for as long
                as it returns True (`Engine.capture_pending`). A request that comes meanwhile waits for it.
        """
        with self._changed:
            self._policy = policy
            self._activation += 1
            self._when_idle = self._idle = idle
            self._changed.notify_all()

    def deactivate(self, reason: str) -> None:
        """Refuse what waits and what comes; the answer of a pass that is running is thrown away."""
        with self._changed:
            self._policy = None
            self._reason = reason
            self._activation += 1
            refused = [*self._control, *(ticket for queue in self._queues.values() for ticket in queue)]
            self._control.clear()
            self._queues.clear()
            self._waiting = 0
            self._changed.notify_all()
        for ticket in refused:
            self._fail(ticket, self._inactive())

    def submit(self, work: Work) -> Ticket:
        """Queue a request.

        Raises:
            RequestError: ``request.inactive`` or ``request.queue_full``.
        """
        ticket = Ticket(self, work)
        with self._changed:
            if self._policy is None or self._stopping:
                raise self._inactive()
            if work.control:
                self._control.append(ticket)
            else:
                queue = self._queues.get(work.source)
                if self._waiting >= self.max_queue or (queue is not None and len(queue) >= self.max_per_source):
                    raise RequestError(
                        "queue_full",
                        f"{self._waiting} requests wait already (at most {self.max_queue} in all and "
                        f"{self.max_per_source} per connection); ask again later",
                    )
                if queue is None:
                    queue = self._queues[work.source] = deque()
                queue.append(ticket)
                self._waiting += 1
            self._changed.notify_all()
        return ticket

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run a function on the inference thread (warm-up, a change of weights); works while inactive too.

        Raises:
            RequestError: ``request.inactive`` while stopping.
        """
        future: Future[Any] = Future()
        with self._changed:
            if self._stopping:
                raise self._inactive()
            self._calls.append((function, future))
            self._changed.notify_all()
        return future

    def _inactive(self) -> RequestError:
        return RequestError("inactive", f"the policy takes no requests: {self._reason}", {"reason": self._reason})

    def _drop(self, ticket: Ticket) -> None:
        with self._changed:
            queue = self._queues.get(ticket.work.source)
            if queue is not None and ticket in queue:
                queue.remove(ticket)
                self._waiting -= 1
                if not queue:
                    del self._queues[ticket.work.source]
            elif ticket in self._control:
                self._control.remove(ticket)

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            job()
            # Nothing of a finished pass is kept alive while waiting for the next.
            del job

    def _next(self) -> Callable[[], None] | None:
        """Wait for something to do; ``None`` means stop."""
        with self._changed:
            while not self._stopping:
                if expired := self._take_expired():
                    return partial(self._expire, expired)
                if self._control and self._policy is not None:
                    return partial(self._run_group, [self._control.popleft()], self._policy, self._activation)
                if self._calls:
                    return partial(self._run_call, *self._calls.popleft())
                if not self._queues or self._policy is None:
                    idle = self._idle if self._policy is not None else None
                    if not self._changed.wait(None if idle is None else _IDLE_AFTER_S) and idle is not None:
                        return partial(self._run_idle, idle)
                    continue
                group = self._gather()
                patience = group[0].submitted + self.max_wait_ms / 1e3 - time.monotonic()
                if group[0].work.group is None or len(group) >= self.max_group or patience <= 0:
                    for ticket in group:
                        self._take(ticket)
                    return partial(self._run_group, group, self._policy, self._activation)
                self._changed.wait(patience)
        return None

    def _expire(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self._fail(ticket, deadline_error())

    def _gather(self) -> list[Ticket]:
        """The request whose turn it is and those that can share its pass, at most one per source and round."""
        queues = list(self._queues.values())
        first = queues[0][0]
        group = [first]
        position = [1] + [0] * (len(queues) - 1)
        found = first.work.group is not None
        while found and len(group) < self.max_group:
            found = False
            for index, queue in enumerate(queues[1:] + queues[:1], start=1):
                index %= len(queues)
                if len(group) >= self.max_group or position[index] >= len(queue):
                    continue
                ticket = queue[position[index]]
                if ticket.work.group == first.work.group:
                    group.append(ticket)
                    position[index] += 1
                    found = True
        return group

    def _take(self, ticket: Ticket) -> None:
        """Remove a waiting request; its source goes to the end of the line."""
        source = ticket.work.source
        self._queues[source].popleft()
        self._waiting -= 1
        if self._queues[source]:
            self._queues.move_to_end(source)
        else:
            del self._queues[source]

    def _take_expired(self) -> list[Ticket]:
        now = time.monotonic()
        expired = [
            ticket
            for queue in (self._control, *self._queues.values())
            for ticket in queue
            if ticket.work.deadline is not None and ticket.work.deadline <= now
        ]
        for ticket in expired:
            self._drop(ticket)  # takes the lock again: a Condition's own lock is re-entrant
        return expired

    def _run_idle(self, function: Callable[[], bool]) -> None:
        try:
            more = function()
        except Exception:
            _logger.exception("work for idle moments failed and is not tried again before the next request")
            more = False
        if not more:
            self._idle = None

    @staticmethod
    def _run_call(function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _run_group(self, tickets: list[Ticket], policy: RunsPolicy, activation: int) -> None:
        started = time.monotonic()
        self._idle = self._when_idle
        members: list[tuple[Ticket, Any]] = []
        for ticket in tickets:
            if ticket.future.cancelled():
                continue
            try:
                members.append((ticket, policy.prepare(ticket.work.observation, **ticket.work.how)))
            except Exception as error:
                self._fail(ticket, error)
        results = self._run(policy, members)
        for (ticket, prepared), result in zip(members, results, strict=True):
            if isinstance(result, Exception):
                self._fail(ticket, result, prepared)
                continue
            try:
                chunk = policy.finish(prepared, result)
            except Exception as error:
                self._fail(ticket, error, prepared)
                continue
            if activation != self._activation:
                self._fail(ticket, self._inactive(), prepared)
                continue
            queue_ms = (started - ticket.submitted) * 1e3
            infer_ms = (time.monotonic() - started) * 1e3
            answer = Answer(chunk, queue_ms, infer_ms, len(members))
            # First the observer, so that what an answered client then reads of the server includes its own request.
            self.observe(Served(ticket.work, prepared, answer))
            with suppress(InvalidStateError):  # cancelled while it ran
                ticket.future.set_result(answer)

    def _run(self, policy: RunsPolicy, members: list[tuple[Ticket, Any]]) -> list[Any]:
        """Results in order, an exception in the place of what failed; a failed group is tried again one by one."""
        if not members:
            return []
        try:
            results = policy.run([prepared for _, prepared in members], [one.work.options for one, _ in members])
            if len(results) != len(members):
                raise RuntimeError(f"{len(members)} results expected of the policy, got {len(results)}")
            return list(results)
        except Exception as error:
            if len(members) == 1:
                return [error]
            _logger.warning("a group of %d failed (%s); its members are run alone", len(members), error)
            return [self._run(policy, [member])[0] for member in members]

    def _fail(self, ticket: Ticket, error: Exception, prepared: Any = None) -> None:
        self.observe(Served(ticket.work, prepared, error=error))
        with suppress(InvalidStateError):
            ticket.future.set_exception(error)

    def observe(self, served: Served) -> None:
        """Tell the observer of a request; also of one that was computed by `call`."""
        if self.observer is None:
            return
        try:
            self.observer(served)
        except Exception:
            _logger.exception("the scheduler's observer failed")


class ControlLoop:
    """The policy as the robot's control loop calls it: `Policy.infer`, through the scheduler, ahead of all others.

    Args:
        timeout_s: for one answer; ``None`` waits as long as the scheduler runs.
    """

    def __init__(self, scheduler: Scheduler, timeout_s: float | None = None) -> None:
        self._scheduler = scheduler
        self._timeout_s = timeout_s

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
    ) -> ActionChunk:
        """See `pi05_ros.policy.Policy.infer`.

        Raises:
            RequestError: ``request.inactive`` or ``request.deadline``.
        """
        # Here, not above: it brings torch, and the node imports this module before it is up.
        from pi05_ros.engine.requests import InferenceOptions

        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        options = InferenceOptions(noise=noise, seed=seed, num_steps=num_steps)
        ticket = self._scheduler.submit(Work(observation, options, source=self, control=True, deadline=deadline))
        try:
            return ticket.result(self._timeout_s).chunk
        except FutureTimeout:
            ticket.cancel()
            raise deadline_error() from None


def deadline_error() -> RequestError:
    """The answer to work whose deadline has passed."""
    return RequestError("deadline", "the request's deadline passed before an answer was there; raise timeout_ms")
