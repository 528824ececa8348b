"""What tests of the player share: a small robot, chunks for it, and a clock that only moves when told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pi05_ros.playback.gate import OfferedChunk
from pi05_ros.playback.limits import Limits
from pi05_ros.playback.plan import NS
from pi05_ros.playback.player import Player
from pi05_ros.playback.settings import Command, PlayerSettings
from pi05_ros.profile import Profile, parse_profile

ARM: dict[str, Any] = {
    "name": "arm",
    "cameras": {"front": {"slot": "base_0_rgb", "topic": "front/image_raw"}},
    "anchor": "front",
    "state": {
        "sources": {"joints": {"topic": "joint_states"}},
        "dims": [{"name": "a", "unit": "rad"}, {"name": "b", "unit": "rad"}, {"name": "gripper", "unit": "fraction"}],
    },
    "action": {
        "dims": [
            {"name": "a", "unit": "rad", "control": "position", "limits": [-1.0, 1.0], "max_velocity": 2.0},
            {"name": "b", "unit": "rad", "control": "position", "limits": [-1.0, 1.0], "max_velocity": 2.0},
            {"name": "gripper", "unit": "fraction", "control": "gripper"},
        ]
    },
    "output": {
        "rate_hz": 100,
        "controllers": {
            "arm": {"type": "multi_array", "topic": "arm/commands", "dims": ["a", "b"]},
            "gripper": {"type": "joint_state", "topic": "gripper/commands", "dims": ["gripper"]},
        },
        "stepwise": ["gripper"],
        "start_distance": 0.2,
    },
    "timing": {"rate_hz": 20, "horizon": 20, "executed_steps": 10},
    "prompt": "wave",
}
PERIOD_NS = NS // 100
STEP_NS = NS // 20
EPOCH_NS = 1_700_000_000 * NS


def arm() -> Profile:
    return parse_profile(ARM, origin="arm.yaml")


def wave(at_ns: np.ndarray | int) -> np.ndarray:
    """float64 [..., 3]: a motion within every limit of the arm, gripper included."""
    seconds = (np.asarray(at_ns) - EPOCH_NS) / NS
    return np.stack([0.5 * np.sin(seconds), 0.5 * np.cos(seconds) - 0.5, (seconds % 2.0 > 1.0) * 1.0], axis=-1)


class World:
    """A player of the arm in a world whose time stands still until `run`; the robot follows every command exactly."""

    def __init__(self, profile: Profile | None = None, **settings: Any) -> None:
        self.profile = profile or arm()
        self.player = Player(self.profile, Limits.of_profile(self.profile), PlayerSettings(**settings))
        self.now_ns = EPOCH_NS
        self.mono_s = 100.0
        self.pose = wave(EPOCH_NS)
        self.pose[2] = 0.0
        self.feedback_flows = True
        self.commands: list[tuple[int, Command]] = []

    def chunk(
        self, motion: Callable[[np.ndarray], np.ndarray] = wave, age_s: float = 0.0, **changes: Any
    ) -> OfferedChunk:
        """A chunk of ``motion`` for an observation made ``age_s`` ago."""
        stamp = self.now_ns - round(age_s * NS)
        rows = motion(stamp + np.arange(20, dtype=np.int64) * STEP_NS)
        dims = self.profile.action.dims
        fields: dict[str, Any] = {
            "stamp_ns": stamp,
            "step_ns": STEP_NS,
            "names": [dim.name for dim in dims],
            "units": [dim.unit for dim in dims],
            "control_modes": [dim.control for dim in dims],
            "horizon": 20,
            "action_dim": len(dims),
            "actions": rows.astype(np.float32).reshape(-1),
            "executed_steps": 10,
            "prompt": "wave",
            "profile": self.profile.name,
        }
        return OfferedChunk(**{**fields, **changes})

    def offer(self, offered: OfferedChunk) -> tuple[str, str] | None:
        return self.player.offer(offered, self.now_ns, self.mono_s)

    def say(self, prompt: str = "wave", state: str = "active", reason: tuple[str, str] | None = None) -> None:
        self.player.policy_says(state, reason, prompt, self.now_ns, self.now_ns, self.mono_s)

    def start(self) -> tuple[str, str] | None:
        self.feel()
        return self.player.start(self.mono_s)

    def feel(self) -> None:
        if self.feedback_flows:
            joints = dict(zip(["a", "b", "gripper"], self.pose.tolist(), strict=True))
            self.player.feedback("joints", joints, self.mono_s)

    def tick(self) -> Command:
        self.now_ns += PERIOD_NS
        self.mono_s += 0.01
        self.feel()
        command = self.player.tick(self.now_ns, self.mono_s)
        self.commands.append((self.now_ns, command))
        if command.send:
            self.pose = np.where(np.isnan(command.values), self.pose, command.values)
        return command

    def run(self, seconds: float, every_s: float | None = None, **chunk: Any) -> Command:
        """Let time pass, with a chunk offered every so often."""
        command = Command(self.pose, False, self.player.state)
        for number in range(round(seconds * 100)):
            if every_s is not None and number % round(every_s * 100) == 0:
                self.offer(self.chunk(**chunk))
            command = self.tick()
        return command

    def sent(self) -> np.ndarray:
        """float64 [N, dims]: all commands that went out."""
        return np.array([command.values for _, command in self.commands if command.send])


def running(**settings: Any) -> World:
    """A world whose player is in full motion, its ramp over."""
    world = World(**settings)
    assert world.start() is None
    world.run(1.5, every_s=0.3)
    assert world.player.state == "running", world.player.reason
    return world
