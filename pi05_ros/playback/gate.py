"""Which chunks may move the robot: those that fit the profile, are finite and rest on fresh observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pi05_ros.playback.plan import NS, TimedChunk
from pi05_ros.profile import Profile

Reason = tuple[str, str]  # a stable code and a sentence


@dataclass(frozen=True)
class OfferedChunk:
    """A chunk as it came over the wire, nothing of it checked; see ActionChunk.msg for the fields."""

    stamp_ns: int
    step_ns: int
    names: Sequence[str]
    units: Sequence[str]
    control_modes: Sequence[str]
    horizon: int
    action_dim: int
    actions: np.ndarray
    executed_steps: int
    prompt: str
    profile: str
    index: int = 0
    input_stamps_ns: Mapping[str, int] = field(default_factory=dict)


class ChunkGate:
    """Turns offered chunks into timed ones or says why not.

    Args:
        profile: names, units and control modes that a chunk must have, in this order.
        observation_timeout_s: how old the oldest input of a chunk may be when it is offered.
        future_tolerance_s: how far a stamp may lie ahead of the clock.
    """

    def __init__(self, profile: Profile, observation_timeout_s: float, future_tolerance_s: float = 0.05) -> None:
        dims = profile.action.dims
        self._profile = profile.name
        self._expected: dict[str, list[str]] = {
            "names": [dim.name for dim in dims],
            "units": [dim.unit for dim in dims],
            "control_modes": [dim.control for dim in dims],
        }
        self._timeout_s = observation_timeout_s
        self._tolerance_ns = round(future_tolerance_s * NS)

    def check(self, offered: OfferedChunk, now_ns: int) -> TimedChunk | Reason:
        """The chunk, or code and sentence of the first thing that is wrong with it."""
        if offered.profile != self._profile:
            return "chunk.profile", f"a chunk for profile {self._profile} expected, got one for {offered.profile!r}"
        for label, expected in self._expected.items():
            got = list(getattr(offered, label))
            if got != expected:
                return f"chunk.{label}", f"{label} {expected} expected, got {got}"
        shape = (offered.horizon, offered.action_dim)
        if offered.horizon < 2 or offered.action_dim != len(self._expected["names"]):
            return "chunk.shape", f"at least 2 rows of {len(self._expected['names'])} expected, got {list(shape)}"
        if offered.actions.size != offered.horizon * offered.action_dim:
            return "chunk.shape", f"{list(shape)} numbers expected, got {offered.actions.size}"
        if offered.step_ns <= 0:
            return "chunk.step_time", "a step time above 0 expected; give the profile timing.rate_hz"
        actions = np.array(offered.actions, dtype=np.float64).reshape(shape)
        for code, found in (("nan", np.isnan(actions)), ("inf", np.isinf(actions))):
            if found.any():
                named = [self._expected["names"][column] for column in np.flatnonzero(found.any(axis=0))]
                return f"chunk.{code}", f"finite numbers expected, got {code} in {named}; the whole chunk is dropped"
        if offered.stamp_ns > now_ns + self._tolerance_ns:
            ahead = (offered.stamp_ns - now_ns) / NS
            return "chunk.future", f"the stamp lies {ahead:.3f} s ahead of the clock; synchronise the clocks"
        inputs = {"the anchor": offered.stamp_ns, **offered.input_stamps_ns}
        oldest = min(inputs, key=lambda name: inputs[name])
        age_s = (now_ns - inputs[oldest]) / NS
        if age_s > self._timeout_s:
            return "observation.old", f"{oldest} is {age_s:.3f} s old, at most {self._timeout_s:g} s expected"
        chunk = TimedChunk(
            offered.stamp_ns,
            offered.step_ns,
            actions,
            offered.executed_steps or offered.horizon,
            offered.prompt,
            offered.index,
            inputs[oldest],
        )
        if chunk.end_ns <= now_ns:
            over = (now_ns - chunk.end_ns) / NS
            return "chunk.past", f"its last row was due {over:.3f} s ago; inference takes longer than the horizon"
        return chunk
