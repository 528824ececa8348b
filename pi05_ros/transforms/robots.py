"""Robot conventions to model conventions: units, gripper ranges, ALOHA's joints, relative actions.

On the way in a state passes units, then ALOHA's adaptation; on the way out an action passes relative to absolute,
ALOHA's adaptation back, then units back. `StateActionConvention` holds one robot's steps, so that every door applies
the same ones.
All functions take float [..., D], return new arrays, and never clip.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pi05_ros.errors import ContractError, ProfileError
from pi05_ros.profile import AlohaGripper, Profile


class DimensionConversions:
    """Affine conversions of a vector's dimensions: model value = scale * robot value + offset.

    Degrees and radians, percent and fractions, a gripper's range onto another's are all of this kind. float32 stays
    float32, everything else becomes float64; the arithmetic is float64.

    Args:
        conversions: (scale, offset) per dimension.

    Raises:
        ProfileError: ``profile.conversion`` for a scale that is 0 or a number that is not finite.
    """

    def __init__(self, conversions: Sequence[tuple[float, float]]) -> None:
        table = np.array(conversions, dtype=np.float64).reshape(-1, 2)
        self._scale, self._offset = table[:, 0], table[:, 1]
        bad = np.flatnonzero(~np.isfinite(table).all(axis=1) | (self._scale == 0))
        if bad.size:
            raise ProfileError(
                "conversion", f"unit conversions need finite scales other than 0; dimensions {bad.tolist()} have none"
            )
        self.is_identity = bool((self._scale == 1).all() and (self._offset == 0).all())

    def to_model(self, values: np.ndarray) -> np.ndarray:
        """Float [..., D] in robot units to the model's units."""
        values = self._checked(values)
        return (values * self._scale + self._offset).astype(values.dtype, copy=False)

    def to_robot(self, values: np.ndarray) -> np.ndarray:
        """Float [..., D] in the model's units to robot units."""
        values = self._checked(values)
        return ((values - self._offset) / self._scale).astype(values.dtype, copy=False)

    def _checked(self, values: np.ndarray) -> np.ndarray:
        values = _as_float(values)
        _check_width("unit conversions", values, len(self._scale))
        return values


@dataclass(frozen=True)
class AlohaConvention:
    """ALOHA's 14 dimensions (left arm 6, gripper, right arm 6, gripper) against the pi convention.

    Joints 1, 2, 8 and 9 change sign. Grippers: ALOHA *reports* its linear opening (0..1 between two positions in
    metres), which a crank of the given geometry turns into an angle; it is *commanded* by the joint's angle, 0..1
    between two angles. State and action are therefore different maps, and each has its own inverse.
    Formulas: OpenPI, src/openpi/policies/aloha_policy.py (its ``adapt_to_pi``). float64 throughout.

    Attributes:
        gripper: the gripper's constants.
    """

    gripper: AlohaGripper = field(default_factory=AlohaGripper)

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        """Robot state [..., 14] to the model's."""
        gripper, out = self.gripper, self._flipped(state)
        linear = out[..., _GRIPPERS] * (gripper.linear_open - gripper.linear_closed) + gripper.linear_closed
        sine = (gripper.horn_radius**2 + linear**2 - gripper.arm_length**2) / (2 * gripper.horn_radius * linear)
        angle = np.arcsin(np.clip(sine, -1.0, 1.0))
        out[..., _GRIPPERS] = (angle - gripper.pi_angle_closed) / (gripper.pi_angle_open - gripper.pi_angle_closed)
        return out

    def state_to_robot(self, state: np.ndarray) -> np.ndarray:
        """Inverse of `state_to_model` where its arcsine is not cut off (the crank's law of cosines, solved)."""
        gripper, out = self.gripper, self._flipped(state)
        angle = out[..., _GRIPPERS] * (gripper.pi_angle_open - gripper.pi_angle_closed) + gripper.pi_angle_closed
        reach = np.sqrt(np.maximum(gripper.arm_length**2 - (gripper.horn_radius * np.cos(angle)) ** 2, 0.0))
        linear = gripper.horn_radius * np.sin(angle) + reach
        out[..., _GRIPPERS] = (linear - gripper.linear_closed) / (gripper.linear_open - gripper.linear_closed)
        return out

    def actions_to_robot(self, actions: np.ndarray) -> np.ndarray:
        """The model's absolute actions [..., 14] to the robot's."""
        gripper, out = self.gripper, self._flipped(actions)
        angle = out[..., _GRIPPERS] + gripper.pi_angle_closed
        out[..., _GRIPPERS] = (angle - gripper.joint_low) / (gripper.joint_high - gripper.joint_low)
        return out

    def actions_to_model(self, actions: np.ndarray) -> np.ndarray:
        """Inverse of `actions_to_robot`."""
        gripper, out = self.gripper, self._flipped(actions)
        angle = out[..., _GRIPPERS] * (gripper.joint_high - gripper.joint_low) + gripper.joint_low
        out[..., _GRIPPERS] = angle - gripper.pi_angle_closed
        return out

    def _flipped(self, values: np.ndarray) -> np.ndarray:
        values = np.asarray(values)
        _check_width("ALOHA's convention", values, len(_SIGNS))
        return values * _SIGNS


_SIGNS = np.array([1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0])
_GRIPPERS = [6, 13]


def delta_to_absolute(actions: np.ndarray, state: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Add the chunk's starting state to the masked dimensions.

    Args:
        actions: float [..., horizon, D].
        state: float [..., S] in the same units, S beyond the last true dimension of the mask.
        mask: bool [M], M at most D; dimensions beyond it are absolute.

    Returns:
        [..., horizon, D] in the dtype of ``actions``; unmasked dimensions bit for bit as they came.

    Raises:
        ContractError: ``contract.relative`` where the widths do not fit.
    """
    return _shift(actions, state, mask, +1)


def absolute_to_delta(actions: np.ndarray, state: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Inverse of `delta_to_absolute`: re-express absolute actions against ``state`` (for a leftover chunk)."""
    return _shift(actions, state, mask, -1)


def _shift(actions: np.ndarray, state: np.ndarray, mask: np.ndarray, sign: int) -> np.ndarray:
    out = np.array(_as_float(actions))
    state, mask = np.asarray(state), np.asarray(mask, dtype=bool)
    dims = np.flatnonzero(mask)
    needed = int(dims.max(initial=-1)) + 1
    if out.ndim < 2 or state.ndim < 1 or out.shape[-1] < len(mask) or state.shape[-1] < needed:
        raise ContractError(
            "relative",
            f"relative actions need actions [horizon, >= {len(mask)}] and a state [>= {needed}], got "
            f"{list(out.shape)} and {list(state.shape)}",
        )
    out[..., dims] += sign * state[..., None, dims]
    return out


@dataclass(frozen=True)
class StateActionConvention:
    """All steps between one robot's units and the numbers that statistics were computed from.

    Attributes:
        state_units, action_units: per-dimension conversions; ``None`` where both sides have the same units.
        aloha: ALOHA's adaptation; ``None`` switches it off (OpenPI's ``adapt_to_pi=False``).
        relative: bool [D] of the dimensions in which the model predicts differences to the state; ``None`` for none.
    """

    state_units: DimensionConversions | None = None
    action_units: DimensionConversions | None = None
    aloha: AlohaConvention | None = None
    relative: np.ndarray | None = field(default=None, compare=False)

    @classmethod
    def from_profile(cls, profile: Profile, relative: np.ndarray) -> StateActionConvention:
        """The convention of a profile's robot; ``relative`` (bool [D]) is what profile and checkpoint agreed on."""
        state = DimensionConversions([dim.to_model() for dim in profile.state.dims])
        action = DimensionConversions([dim.to_model() for dim in profile.action.dims])
        return cls(
            state_units=None if state.is_identity else state,
            action_units=None if action.is_identity else action,
            aloha=AlohaConvention(profile.aloha_gripper or AlohaGripper()) if profile.adapt_to_pi else None,
            relative=np.array(relative, dtype=bool) if np.any(relative) else None,
        )

    def state_to_model(self, state: np.ndarray) -> np.ndarray:
        """Robot state [..., S] to the model's units, not yet normalised."""
        state = np.array(_as_float(state))
        if self.state_units is not None:
            state = self.state_units.to_model(state)
        return state if self.aloha is None else self.aloha.state_to_model(state)

    def actions_to_robot(self, actions: np.ndarray, model_state: np.ndarray) -> np.ndarray:
        """Unnormalised model actions [..., horizon, D] to absolute actions in robot units.

        ``model_state`` is `state_to_model`'s answer for the observation that the chunk was computed from.
        """
        actions = np.array(_as_float(actions))
        if self.relative is not None:
            actions = delta_to_absolute(actions, model_state, self.relative)
        if self.aloha is not None:
            actions = self.aloha.actions_to_robot(actions)
        return actions if self.action_units is None else self.action_units.to_robot(actions)

    def actions_to_model(self, actions: np.ndarray, model_state: np.ndarray) -> np.ndarray:
        """Inverse of `actions_to_robot` against any state: a leftover chunk against the new observation's."""
        actions = np.array(_as_float(actions))
        if self.action_units is not None:
            actions = self.action_units.to_model(actions)
        if self.aloha is not None:
            actions = self.aloha.actions_to_model(actions)
        return actions if self.relative is None else absolute_to_delta(actions, model_state, self.relative)


def _as_float(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values)
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float64)


def _check_width(what: str, values: np.ndarray, width: int) -> None:
    if values.ndim == 0 or values.shape[-1] != width:
        raise ContractError(
            "conversion_width", f"{what} cover {width} dimensions, got values of shape {list(values.shape)}"
        )
