"""What must not go further: numbers that are not finite, widths that do not fit, actions beyond the robot's limits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pi05_ros.errors import ActionError, ObservationError, Pi05Error
from pi05_ros.profile import ActionDimension

# Rounding of float32 subtraction at a few radians; a step this close to the velocity limit is not clamped or counted.
_STEP_SLACK = 1e-6


def _refuse_non_finite(values: np.ndarray, names: Sequence[str], what: str, error: type[Pi05Error]) -> None:
    """Raise ``<family>.nan`` or ``<family>.inf`` naming the dimensions; ``values`` is [..., dims]."""
    for reason, found in (("nan", np.isnan(values)), ("inf", np.isinf(values))):
        if found.any():
            columns = np.flatnonzero(found.reshape(-1, values.shape[-1]).any(axis=0))
            named = [names[column] if column < len(names) else str(column) for column in map(int, columns)]
            raise error(
                reason,
                f"{what}: finite numbers expected, got {reason} in {named}; nothing was executed",
                {"dimensions": named},
            )


def check_state(state: np.ndarray, names: Sequence[str]) -> None:
    """Refuse a state that is not finite.

    Raises:
        ObservationError: ``observation.nan`` or ``observation.inf`` with the dimensions' names.
    """
    _refuse_non_finite(state, names, "state", ObservationError)


def check_network_output(output: np.ndarray) -> None:
    """Refuse a model output [horizon, dims] that is not finite or exactly zero everywhere.

    An exact zero in every place is what a dead network gives (zeroed weights, a failed copy), never what noise is
    denoised to.

    Raises:
        ActionError: ``action.nan``, ``action.inf`` or ``action.zero``.
    """
    _refuse_non_finite(output, [f"output {i}" for i in range(output.shape[-1])], "model output", ActionError)
    if not output.any():
        raise ActionError(
            "zero",
            f"model output: every one of the {output.size} numbers is exactly zero, which no working network gives; "
            "check the weights",
        )


def check_actions(actions: np.ndarray, names: Sequence[str]) -> None:
    """Refuse actions [horizon, dims] in robot units that are not finite.

    Raises:
        ActionError: ``action.nan`` or ``action.inf`` with the dimensions' names.
    """
    _refuse_non_finite(actions, names, "actions", ActionError)


def apply_limits(
    actions: np.ndarray, dims: Sequence[ActionDimension], step_time_s: float | None
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """Clamp to the profile's limits; dimensions without limits are left alone.

    Positions first, then the change from row to row of dimensions with ``max_velocity``.

    Args:
        actions: float32 [horizon, dims] in robot units.
        dims: the profile's action dimensions.
        step_time_s: seconds between rows; needed only where a dimension has ``max_velocity``.

    Returns:
        The actions (the same array when nothing was clamped), the number of clamped values, and the flags
        ``limit.position:<name>`` and ``limit.velocity:<name>``.
    """
    result = actions
    clamped = np.zeros(actions.shape, dtype=bool)
    flags: list[str] = []
    for column, dim in enumerate(dims):
        if dim.limits is not None:
            values = np.clip(result[:, column], np.float32(dim.limits[0]), np.float32(dim.limits[1]))
            changed = values != result[:, column]
            if changed.any():
                result = result.copy() if result is actions else result
                result[:, column] = values
                clamped[:, column] |= changed
                flags.append(f"limit.position:{dim.name}")
        if dim.max_velocity is not None and step_time_s is not None:
            largest = dim.max_velocity * step_time_s
            if np.abs(np.diff(result[:, column])).max(initial=0.0) > largest + _STEP_SLACK:
                result = result.copy() if result is actions else result
                for row in range(1, len(result)):
                    before, wanted = result[row - 1, column], result[row, column]
                    allowed = before + np.clip(wanted - before, -largest, largest)
                    if abs(wanted - before) > largest + _STEP_SLACK:
                        result[row, column] = allowed
                        clamped[row, column] = True
                flags.append(f"limit.velocity:{dim.name}")
    return result, int(clamped.sum()), tuple(flags)
