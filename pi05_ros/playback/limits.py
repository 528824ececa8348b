"""The limits of commands: from the profile, tightened by a URDF; values beyond them are clamped and counted."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pi05_ros.errors import ConfigurationError
from pi05_ros.profile import Profile

_SI_UNITS = ("rad", "m", "rad/s", "m/s")  # what a URDF speaks
# Chunks carry float32: at a few radians and a hundred commands a second a clean one may exceed a limit by this much.
SLACK = 4e-6


@dataclass(frozen=True)
class JointLimit:
    """One joint's limits in a URDF, rad or m; ``None`` where it has none."""

    lower: float | None
    upper: float | None
    velocity: float | None


def read_urdf(path: str | Path) -> dict[str, JointLimit]:
    """Limits by joint name. (Four attributes of one tag: no URDF library comes with ROS wheels.)

    Raises:
        ConfigurationError: ``config.urdf``.
    """
    try:
        root = ElementTree.parse(Path(path).expanduser()).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ConfigurationError("urdf", f"urdf {path}: a URDF file expected, got {error}") from error
    found = {}
    for joint in root.iter("joint"):
        limit = joint.find("limit")
        name, kind = joint.get("name"), joint.get("type")
        if limit is None or name is None:
            continue
        try:
            numbers = {key: float(limit.get(key, "0")) for key in ("lower", "upper", "velocity")}
        except ValueError as error:
            raise ConfigurationError("urdf", f"urdf {path}, joint {name}: numbers expected: {error}") from error
        if not all(np.isfinite(list(numbers.values()))) or numbers["lower"] > numbers["upper"]:
            raise ConfigurationError("urdf", f"urdf {path}, joint {name}: lower <= upper expected, got {numbers}")
        ranged = kind in ("revolute", "prismatic")  # a continuous joint has no ends
        found[name] = JointLimit(
            lower=numbers["lower"] if ranged else None,
            upper=numbers["upper"] if ranged else None,
            velocity=numbers["velocity"] if numbers["velocity"] > 0 else None,
        )
    return found


@dataclass(frozen=True)
class Limits:
    """Limits of commands, float64 [dims] each, infinite where there is none.

    ``rate`` is per second: of a position its velocity, of a velocity its acceleration.
    """

    names: tuple[str, ...]
    low: np.ndarray
    high: np.ndarray
    rate: np.ndarray

    @classmethod
    def of_profile(cls, profile: Profile, urdf: Mapping[str, JointLimit] | None = None) -> Limits:
        """The profile's limits and, for positions of joints that the URDF knows, whichever is tighter.

        Raises:
            ConfigurationError: ``config.limits`` where the two leave nothing between them.
        """
        dims = profile.action.dims
        low = np.array([-np.inf if dim.limits is None else dim.limits[0] for dim in dims])
        high = np.array([np.inf if dim.limits is None else dim.limits[1] for dim in dims])
        rate = np.array([np.inf if dim.max_velocity is None else dim.max_velocity for dim in dims])
        joints = joint_names(profile)
        for index, dim in enumerate(dims):
            limit = (urdf or {}).get(joints[dim.name])
            if limit is None or dim.control not in ("position", "velocity") or dim.unit not in _SI_UNITS:
                continue
            if dim.control == "velocity":
                if limit.velocity is not None:
                    low[index], high[index] = max(low[index], -limit.velocity), min(high[index], limit.velocity)
                continue
            low[index] = max(low[index], -np.inf if limit.lower is None else limit.lower)
            high[index] = min(high[index], np.inf if limit.upper is None else limit.upper)
            rate[index] = min(rate[index], np.inf if limit.velocity is None else limit.velocity)
        bad = [dim.name for index, dim in enumerate(dims) if low[index] > high[index]]
        if bad:
            raise ConfigurationError(
                "limits", f"limits of profile {profile.name} and of the URDF exclude each other for {bad}"
            )
        return cls(tuple(dim.name for dim in dims), low, high, rate)

    def missing(self, profile: Profile) -> list[str]:
        """Dimensions that nothing keeps from a dangerous command: positions without ends or rate, velocities without
        ends."""
        return [
            dim.name
            for index, dim in enumerate(profile.action.dims)
            if dim.control in ("position", "velocity")
            and not (
                np.isfinite([self.low[index], self.high[index]]).all()
                and (dim.control == "velocity" or np.isfinite(self.rate[index]))
            )
        ]

    def apply(self, previous: np.ndarray, wanted: np.ndarray, elapsed_s: float) -> tuple[np.ndarray, np.ndarray]:
        """The command nearest to ``wanted`` that the limits allow ``elapsed_s`` after ``previous``.

        Where ``previous`` lies outside the position limits it moves back in no faster than ``rate``. NaN in
        ``previous`` stands for a value that is not known: only the position limits apply.

        Returns:
            The command, float64 [dims], and bool [dims] of what was clamped (by more than rounding).
        """
        known = np.where(np.isnan(previous), wanted, previous)
        inside = np.clip(wanted, self.low, self.high)
        limited = np.isfinite(self.rate)
        reach = np.where(limited, np.where(limited, self.rate, 0.0) * elapsed_s, np.inf)  # inf * 0 would be NaN
        with np.errstate(invalid="ignore"):
            command = np.clip(inside, known - reach, known + reach)
        command = np.where(np.isnan(previous), inside, command)
        return command, np.abs(command - wanted) > SLACK


def joint_names(profile: Profile) -> dict[str, str]:
    """Action dimension -> the name under which controllers and URDF know its joint."""
    measured = {dim.name: dim.joint_name for dim in profile.state.dims}
    names = {dim.name: measured.get(dim.name, dim.name) for dim in profile.action.dims}
    if profile.output is not None:
        for controller in profile.output.controllers.values():
            if controller.joints is not None:
                names.update(zip(controller.dims, controller.joints, strict=True))
    return names
