"""What a chunk continues: the last one at the new chunk's instants, in the network's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pi05_ros.checkpoint.statistics import Statistics
from pi05_ros.chunk import ActionChunk
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import Continuation, Leftover, RtcSettings
from pi05_ros.playback.rtc import model_leftover
from pi05_ros.policy import load_policy
from pi05_ros.profile import load_profile
from pi05_ros.transforms.normalization import Normalizer
from pi05_ros.transforms.robots import StateActionConvention

NS = 10**9
STAMP = 1_700_000_000 * NS
STEP_S = 0.05
RTC = RtcSettings()


def chunk(stamp_ns: int = STAMP, horizon: int = 20, **changes: Any) -> ActionChunk:
    rows = np.arange(horizon, dtype=np.float32)[:, None] * np.array([1.0, -2.0], dtype=np.float32)
    fields: dict[str, Any] = {
        "actions": rows, "names": ("a", "b"), "units": ("rad", "rad"), "control_modes": ("position", "position"),
        "step_time_s": STEP_S, "executed_steps": 10, "prompt": "wave", "checkpoint_id": "c", "profile": "p",
        "denoise_steps": 10, "noise_seed": 0, "stamp_ns": stamp_ns,
    }  # fmt: skip
    return ActionChunk(**{**fields, **changes})


def after(*latencies_s: float, **changes: Any) -> Leftover:
    """A leftover that has seen chunks sent so long after their stamps; the last one is of `STAMP`."""
    leftover = Leftover(transport_s=0.0)
    for latency in latencies_s:
        leftover.sent(chunk(**changes), STAMP + round(latency * NS))
    return leftover


def test_row_i_is_the_last_chunk_at_new_stamp_plus_i_steps():
    leftover = after(0.1, 0.1)
    found = leftover.continuation(STAMP + round(7.25 * STEP_S * NS), "wave", RTC)
    assert found is not None
    assert found.rows.shape == (12, 2)  # rows 7.25 ... 18.25 of 0 ... 19
    np.testing.assert_allclose(found.rows[:, 0], np.arange(12) + 7.25)
    assert found.delay == 2


def test_there_is_nothing_to_continue_at_first_and_after_flush_prompt_change_and_the_end():
    assert Leftover().continuation(STAMP, "wave", RTC) is None
    leftover = after(0.1)
    assert leftover.continuation(STAMP + NS // 2, "wave", RTC) is not None
    assert leftover.continuation(STAMP + NS // 2, "another", RTC) is None
    assert leftover.continuation(STAMP + NS, "wave", RTC) is None  # the last row was due at 0.95 s
    assert leftover.continuation(STAMP, "wave", RTC) is None
    leftover.flush()
    assert leftover.continuation(STAMP + NS // 2, "wave", RTC) is None
    assert after(0.1, step_time_s=None).continuation(STAMP + NS // 2, "wave", RTC) is None


def test_the_delay_is_a_percentile_of_ages_without_the_warm_up():
    assert after(0.7).continuation(STAMP + 1, "wave", RTC).delay == 14  # type: ignore[union-attr]  # all there is
    assert after(0.7, 0.11, 0.12, 0.13).continuation(STAMP + 1, "wave", RTC).delay == 3  # type: ignore[union-attr]


def test_a_leftover_shorter_than_the_delay_is_extended_by_its_last_row():
    found = after(0.4, 0.4).continuation(STAMP + round(17 * STEP_S * NS), "wave", RTC)
    assert found is not None and found.delay == 8
    np.testing.assert_allclose(found.rows[:, 0], [17, 18, 19, 19, 19, 19, 19, 19])


@pytest.mark.parametrize("name", ["ur5e", "aloha", "so101"])
@pytest.mark.parametrize("style", ["lerobot", "openpi"])
def test_in_the_networks_numbers_it_is_what_would_be_made_of_it_again(name: str, style: Any):
    profile = load_profile(name)
    dims = len(profile.action.dims)
    relative = np.array([bool(dim.relative) for dim in profile.action.dims])
    convention = StateActionConvention.from_profile(profile, relative)
    rng = np.random.default_rng(1)
    spread = rng.uniform(0.5, 2.0, dims)
    normalizer = Normalizer(Statistics(q01=-spread, q99=spread), "quantile", style, "action")
    rows, state = rng.uniform(-0.5, 0.5, (12, dims)), rng.uniform(0.1, 0.4, len(profile.state.dims))
    model_state = convention.state_to_model(state)
    rtc = model_leftover(Continuation(rows, 4, RtcSettings(fade_rows=6)), convention, normalizer, model_state)
    rtc.check(50, 32)
    back = convention.actions_to_robot(normalizer.unnormalize(rtc.leftover), model_state)
    np.testing.assert_allclose(back, rows, atol=1e-5)
    # The whole delay is bound, however long it is, and fades behind it.
    weights = rtc.row_weights(50).numpy()
    assert (weights[:4] == 1.0).all() and (np.diff(weights[3:11]) < 0.0).all() and (weights[10:] == 0.0).all()
    # Against another state the same rows are other numbers wherever the model is relative, and only there.
    moved = model_leftover(Continuation(rows, 4, RTC), convention, normalizer, model_state + 0.1)
    assert (np.abs(moved.leftover - rtc.leftover).max(axis=0) > 1e-3).tolist() == relative.tolist()


def test_the_policy_continues_a_chunk_and_says_so():
    policy = load_policy(profile="demo")
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 255, (48, 64, 3), dtype=np.uint8) for name in policy.profile.cameras}
    state = np.linspace(-0.2, 0.2, 7)

    def ask(stamp_ns: int, **how: Any) -> ActionChunk:
        return policy.infer(Observation(images, state, "wave", stamp_ns), **how)

    first, free = ask(STAMP, seed=1), ask(STAMP + NS // 5, seed=2)
    leftover = Leftover(transport_s=0.0)
    leftover.sent(first, STAMP + NS // 5)
    found = leftover.continuation(STAMP + NS // 5, "wave", RTC)
    assert found is not None and found.delay == 5
    bound = ask(STAMP + NS // 5, seed=2, continuing=found)
    assert free.rtc_delay is None and bound.rtc_delay == 5

    def apart(chunk: ActionChunk) -> float:
        return float(np.abs(chunk.actions[: found.delay] - found.rows[: found.delay]).mean())

    assert apart(bound) < 0.3 * apart(free)
    policy.close()
