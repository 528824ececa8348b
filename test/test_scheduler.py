"""The scheduler: whose turn it is, who shares a pass, and that nobody's failure is another's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest
from serving_stubs import StubPolicy, observation

from pi05_ros.engine.scheduler import ControlLoop, Scheduler, Served, Ticket, Work
from pi05_ros.errors import ActionError, RequestError


@pytest.fixture
def make() -> Iterator:
    made: list[tuple[Scheduler, Gate]] = []

    def build(policy: StubPolicy | None = None, **settings: object) -> tuple[Scheduler, Gate]:
        scheduler = Scheduler(**settings)  # type: ignore[arg-type]
        gate = Gate(policy or StubPolicy())
        scheduler.start()
        scheduler.activate(gate.policy)
        made.append((scheduler, gate))
        return scheduler, gate

    yield build
    for scheduler, gate in made:
        gate.open.set()
        assert scheduler.stop(5.0)


class Gate:
    """A policy that holds its first pass until opened, so that everything behind it waits in the queue."""

    def __init__(self, policy: StubPolicy) -> None:
        self.policy = policy
        self.open = threading.Event()
        self.open.set()

    def hold(self, scheduler: Scheduler) -> Ticket:
        self.open.clear()
        self.policy.seconds = lambda _: self.open.wait(10.0) * 0.0
        self.policy.started.clear()
        ticket = scheduler.submit(Work(observation(1000.0), None, source="holder"))
        assert self.policy.started.wait(5.0)
        return ticket


def submit(scheduler: Scheduler, value: float, source: object = None, **rest: object) -> Ticket:
    return scheduler.submit(Work(observation(value), None, source=source, **rest))  # type: ignore[arg-type]


def test_answers_come_from_one_thread(make) -> None:
    scheduler, gate = make()
    tickets = [submit(scheduler, value, source=value) for value in range(5)]
    assert [ticket.result(5).chunk.actions[0, 0] for ticket in tickets] == [0, 1, 2, 3, 4]
    assert len(gate.policy.threads) == 1
    assert scheduler.call(threading.get_ident).result(5) in gate.policy.threads


def test_the_control_loop_goes_first_and_alone(make) -> None:
    scheduler, gate = make(max_group=4)
    gate.hold(scheduler)
    network = [submit(scheduler, value, source=value, group="g") for value in range(3)]
    control = submit(scheduler, 50.0, control=True)
    gate.open.set()
    assert control.result(5).chunk.actions[0, 0] == 50.0
    for ticket in network:
        ticket.result(5)
    assert gate.policy.groups == [[1000.0], [50.0], [0.0, 1.0, 2.0]]


def test_the_control_loop_ends_the_gathering_of_a_group(make) -> None:
    scheduler, _gate = make(max_group=4, max_wait_ms=5000.0)
    waiting = submit(scheduler, 1.0, source="a", group="g")
    started = time.monotonic()
    assert submit(scheduler, 2.0, control=True).result(5).chunk.actions[0, 0] == 2.0
    assert time.monotonic() - started < 1.0
    assert not waiting.future.done()
    waiting.cancel()


def test_sources_take_turns(make) -> None:
    scheduler, gate = make()
    gate.hold(scheduler)
    greedy = [submit(scheduler, value, source="greedy") for value in range(4)]
    modest = submit(scheduler, 10.0, source="modest")
    late = submit(scheduler, 20.0, source="late")
    gate.open.set()
    for ticket in (*greedy, modest, late):
        ticket.result(5)
    assert gate.policy.groups[1:] == [[0.0], [10.0], [20.0], [1.0], [2.0], [3.0]]


def test_groups_hold_only_compatible_requests_and_spread_over_sources(make) -> None:
    scheduler, gate = make(max_group=3)
    gate.hold(scheduler)
    tickets = [submit(scheduler, value, source="a", group="ten") for value in range(3)]
    tickets += [submit(scheduler, 10.0, source="b", group="five"), submit(scheduler, 20.0, source="c", group="ten")]
    tickets += [submit(scheduler, 30.0, source="d")]
    gate.open.set()
    sizes = [ticket.result(5).group_size for ticket in tickets]
    assert gate.policy.groups[1:] == [[0.0, 20.0, 1.0], [10.0], [30.0], [2.0]]
    assert sizes == [3, 3, 1, 1, 3, 1]


def test_a_group_waits_for_its_members_at_most_max_wait(make) -> None:
    scheduler, _gate = make(max_group=2, max_wait_ms=150.0)
    started = time.monotonic()
    assert submit(scheduler, 1.0, source="a", group="g").result(5).group_size == 1
    assert 0.14 <= time.monotonic() - started < 1.0
    started = time.monotonic()
    pair = [submit(scheduler, value, source=value, group="g") for value in (1.0, 2.0)]
    assert [ticket.result(5).group_size for ticket in pair] == [2, 2]
    assert time.monotonic() - started < 0.14


def test_one_members_failure_harms_no_other(make) -> None:
    scheduler, gate = make(max_group=4)
    gate.hold(scheduler)
    tickets = [
        submit(scheduler, value, source=index, group="g") for index, value in enumerate((1.0, -1.0, np.nan, 3.0))
    ]
    gate.open.set()
    assert tickets[0].result(5).chunk.actions[0, 0] == 1.0
    assert tickets[3].result(5).chunk.actions[0, 0] == 3.0
    with pytest.raises(RuntimeError, match="network broke"):
        tickets[1].result(5)
    with pytest.raises(ActionError):
        tickets[2].result(5)
    assert submit(scheduler, 4.0).result(5).chunk.actions[0, 0] == 4.0


def test_the_queue_is_bounded_in_all_and_per_source(make) -> None:
    scheduler, gate = make(max_queue=3, max_per_source=2)
    gate.hold(scheduler)
    for value in range(2):
        submit(scheduler, value, source="a")
    with pytest.raises(RequestError) as caught:
        submit(scheduler, 2.0, source="a")
    assert caught.value.code == "request.queue_full"
    submit(scheduler, 3.0, source="b")
    with pytest.raises(RequestError, match="3 requests wait"):
        submit(scheduler, 4.0, source="c")
    control = submit(scheduler, 5.0, control=True)
    gate.open.set()
    control.result(5)


def test_work_past_its_deadline_and_work_given_up_never_reaches_the_model(make) -> None:
    scheduler, gate = make()
    gate.hold(scheduler)
    late = submit(scheduler, 1.0, source="a", deadline=time.monotonic() + 0.02)
    gone = submit(scheduler, 2.0, source="b")
    kept = submit(scheduler, 3.0, source="c")
    gone.cancel()
    assert scheduler.depth == 2
    time.sleep(0.05)
    gate.open.set()
    with pytest.raises(RequestError) as caught:
        late.result(5)
    assert caught.value.code == "request.deadline"
    with pytest.raises(CancelledError):
        gone.result(5)
    kept.result(5)
    assert gate.policy.groups == [[1000.0], [3.0]]


def test_deactivation_refuses_what_waits_and_throws_away_what_runs(make) -> None:
    scheduler, gate = make()
    running = gate.hold(scheduler)
    waiting = submit(scheduler, 1.0, source="a")
    scheduler.deactivate("deactivated by the operator")
    with pytest.raises(RequestError, match="deactivated by the operator"):
        waiting.result(1)
    with pytest.raises(RequestError) as caught:
        submit(scheduler, 2.0)
    assert caught.value.code == "request.inactive"
    scheduler.activate(gate.policy)
    after = submit(scheduler, 3.0)
    gate.open.set()
    with pytest.raises(RequestError):
        running.result(5)
    assert after.result(5).chunk.actions[0, 0] == 3.0


def test_before_activation_requests_are_refused_with_the_reason() -> None:
    scheduler = Scheduler()
    with pytest.raises(RequestError, match="not loaded"):
        submit(scheduler, 1.0)
    assert scheduler.stop(1.0)


def test_stopping_leaves_nobody_waiting(make) -> None:
    scheduler, gate = make()
    running = gate.hold(scheduler)
    waiting = submit(scheduler, 1.0, source="a")
    call = scheduler.call(lambda: None)
    assert not scheduler.stop(0.05)
    with pytest.raises(RequestError):
        waiting.result(1)
    assert call.cancelled()
    gate.open.set()
    assert scheduler.stop(5.0)
    with pytest.raises(RequestError):
        running.result(1)
    with pytest.raises(RequestError):
        submit(scheduler, 2.0)


def test_an_observer_sees_every_request_and_cannot_break_anything(make) -> None:
    seen: list[Served] = []

    def observe(served: Served) -> None:
        seen.append(served)
        raise ValueError("observer broke")

    scheduler, _ = make(observer=observe)
    submit(scheduler, 1.0).result(5)
    with pytest.raises(RuntimeError):
        submit(scheduler, -1.0).result(5)
    assert [one.answer is not None for one in seen] == [True, False]
    assert isinstance(seen[1].error, RuntimeError)


def test_the_control_loop_calls_it_like_a_policy(make) -> None:
    scheduler, gate = make()
    assert ControlLoop(scheduler).infer(observation(7.0), seed=3, num_steps=5).denoise_steps == 5
    gate.hold(scheduler)
    with pytest.raises(RequestError) as caught:
        ControlLoop(scheduler, timeout_s=0.05).infer(observation(8.0))
    assert caught.value.code == "request.deadline"
    gate.open.set()
    assert ControlLoop(scheduler, timeout_s=5.0).infer(observation(9.0)).actions[0, 0] == 9.0
    assert [8.0] not in gate.policy.groups


def test_idle_moments_are_used_and_requests_come_first() -> None:
    scheduler = Scheduler()
    done: list[float] = []

    def idle() -> bool:
        done.append(time.monotonic())
        if len(done) == 3:
            raise ValueError("capture failed")
        return len(done) < 2

    scheduler.start()
    scheduler.activate(StubPolicy(), idle)
    for _ in range(10):
        submit(scheduler, 1.0).result(5)
        time.sleep(0.05)
    assert not done
    time.sleep(0.7)
    assert len(done) == 2  # it said that nothing was left
    submit(scheduler, 1.0).result(5)
    time.sleep(0.4)
    assert len(done) == 3
    submit(scheduler, 1.0).result(5)
    assert scheduler.stop(5.0)


def test_nothing_is_lost_or_mixed_under_many_threads(make) -> None:
    scheduler, gate = make(max_group=4, max_queue=1000, max_per_source=1000)
    wrong: list[float] = []

    def client(source: int) -> None:
        for index in range(100):
            value = source * 1000.0 + index + 1
            got = submit(scheduler, value, source=source, group="g").result(10).chunk.actions[0, 0]
            if got != value:
                wrong.append(value)

    threads = [threading.Thread(target=client, args=(source,)) for source in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert sum(len(group) for group in gate.policy.groups) == 800
