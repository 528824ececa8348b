"""How time and memory grow: linear in steps, less than linear in the group, not at all with requests."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import engine, observations

from pi05_ros.engine.engine import InferenceOptions


def least(function: Callable[[], object], repeats: int) -> float:
    """Processor seconds of the fastest of some runs: what other programs take away does not count."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        function()
        times.append(time.process_time() - started)
    return min(times)


def test_time_is_linear_in_steps():
    one, member = engine(), observations()[:1]

    def denoise(steps: int) -> float:
        return least(lambda: one.run(member, [InferenceOptions(seed=0, num_steps=steps)]), 5)

    times = {steps: denoise(steps) for steps in (1, 10, 20, 40)}
    per_step = [(times[more] - times[less]) / (more - less) for less, more in ((1, 10), (10, 20), (20, 40))]
    assert max(per_step) <= 1.5 * statistics.median(per_step), times


def test_a_group_is_cheaper_than_its_members():
    """Where the costs of a pass weigh more than its arithmetic; docs/benchmarks.md tells larger networks' figures."""
    one, members = engine(), [observations()[0], *observations()[:2], observations()[3]]
    members = [replace(each) for each in members]  # four observations, no candidates
    how = [InferenceOptions(seed=index) for index in range(4)]

    def singles() -> None:
        for each, options in zip(members, how, strict=True):
            one.run([each], [options])

    one.run(members, how)
    singles()
    group, single = zip(*[(least(lambda: one.run(members, how), 1), least(singles, 1)) for _ in range(8)], strict=True)
    assert min(group) <= 0.85 * min(single), (group, single)


def resident_bytes() -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.soak
def test_ten_thousand_requests_leave_no_memory_behind():
    one = engine(prefix_cache_entries=4, max_plans=4)
    members = observations()

    def requests(count: int) -> None:
        for index in range(count):
            group = [members[index % 4]] if index % 3 else [members[index % 4], members[(index + 1) % 4]]
            options = [InferenceOptions(seed=index, num_steps=1 + index % 2) for _ in group]
            one.run(group, options)

    requests(500)
    gc.collect()
    before = resident_bytes()
    requests(10_000)
    gc.collect()
    assert resident_bytes() - before < 8 * 2**20
    assert len(one.plans) == 4 and one.cache_counters.entries == 4
