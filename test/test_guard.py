"""The guard: nothing that is not finite goes further, limits clamp and count, clean chunks raise no alarm."""

from __future__ import annotations

import numpy as np
import pytest

from pi05_ros.errors import ActionError, ObservationError
from pi05_ros.guard import apply_limits, check_actions, check_network_output, check_state
from pi05_ros.profile import ActionDimension

NAMES = ("a", "b")


@pytest.mark.parametrize(("value", "code"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "inf")])
def test_non_finite_is_refused_by_name_and_cause(value: float, code: str):
    with pytest.raises(ObservationError, match="b") as caught:
        check_state(np.array([0.0, value]), NAMES)
    assert caught.value.code == f"observation.{code}"
    actions = np.zeros((4, 2), np.float32)
    actions[2, 1] = value
    with pytest.raises(ActionError, match="b") as caught_action:
        check_actions(actions, NAMES)
    assert caught_action.value.code == f"action.{code}"
    assert caught_action.value.details == {"dimensions": ["b"]}


def test_zero_is_a_cause_of_its_own():
    with pytest.raises(ActionError) as caught:
        check_network_output(np.zeros((4, 2), np.float32))
    assert caught.value.code == "action.zero"
    check_network_output(np.eye(4, 2, dtype=np.float32))


def dim(**given: object) -> ActionDimension:
    return ActionDimension(name="a", unit="rad", control="position", **given)  # type: ignore[arg-type]


def test_no_limits_no_change():
    actions = np.array([[1e9], [-1e9]], np.float32)
    result, count, flags = apply_limits(actions, [dim()], 0.02)
    assert result is actions and count == 0 and flags == ()


def test_position_limit_clamps_and_counts():
    actions = np.array([[0.5], [1.5], [-3.0]], np.float32)
    result, count, flags = apply_limits(actions, [dim(limits=(-1.0, 1.0))], 0.02)
    assert result.ravel().tolist() == [0.5, 1.0, -1.0]
    assert (count, flags) == (2, ("limit.position:a",))
    assert actions[1, 0] == 1.5, "the caller's array is not written to"


def test_velocity_limit_bounds_every_step():
    actions = np.array([[0.0], [1.0], [1.0], [0.95]], np.float32)
    result, count, flags = apply_limits(actions, [dim(max_velocity=10.0)], 0.05)
    assert np.abs(np.diff(result[:, 0])).max() <= 0.5 + 1e-6
    assert result.ravel().tolist() == pytest.approx([0.0, 0.5, 1.0, 0.95])
    assert (count, flags) == (1, ("limit.velocity:a",))


def test_chunk_exactly_at_its_limits_raises_no_alarm():
    ramp = (np.arange(50, dtype=np.float32) * np.float32(0.02))[:, None]
    result, count, flags = apply_limits(ramp, [dim(limits=(0.0, 1.0), max_velocity=1.0)], 0.02)
    assert result is ramp and count == 0 and flags == ()
