"""The closed loop in virtual time: player, simulated plant and analytic policy, without ROS and without waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.engine.chunking import RealTimeChunking
from pi05_ros.playback.figures import MotionFigures, motion_figures
from pi05_ros.playback.flow_target import denoise, paths, target_chunks
from pi05_ros.playback.gate import OfferedChunk
from pi05_ros.playback.leftover import Leftover, RtcSettings
from pi05_ros.playback.limits import Limits
from pi05_ros.playback.plan import NS
from pi05_ros.playback.plant import FirstOrderPlant
from pi05_ros.playback.player import Player
from pi05_ros.playback.rtc import bound_to
from pi05_ros.playback.settings import PlayerSettings
from pi05_ros.profile import Profile

_EPOCH_NS = 1_700_000_000 * NS
_PLANT_NS = NS // 200
_CAMERA_NS = NS // 30
DelayLaw = Callable[[np.random.Generator], float]


@dataclass(frozen=True)
class Rehearsal:
    """One run: times, commands and robot positions at every control period, and its figures."""

    times_s: np.ndarray
    commands: np.ndarray
    positions: np.ndarray
    figures: MotionFigures
    clamped: int


def analytic_chunk(
    profile: Profile,
    state: np.ndarray,
    stamp_ns: int,
    seed: int,
    origin_ns: int,
    rtc: RealTimeChunking | None = None,
) -> ActionChunk:
    """The analytic policy's answer for ``state`` (float [dims]); its task begins at ``origin_ns``.

    Gripper dimensions stay at 0: the targets are those of the other joints.
    """
    dims, timing = profile.action.dims, profile.timing
    if timing.horizon is None or timing.rate_hz is None:
        raise ValueError("the analytic policy needs timing.horizon and timing.rate_hz in the profile")
    step_s = 1.0 / timing.rate_hz
    moving = [index for index, dim in enumerate(dims) if dim.control == "position"]
    noise = np.random.default_rng(seed).standard_normal((timing.horizon, len(moving)))
    targets = target_chunks((stamp_ns - origin_ns) / NS, step_s, timing.horizon, state[moving])
    if rtc is not None:
        rtc = replace(rtc, leftover=rtc.leftover[:, moving])
    actions = np.zeros((timing.horizon, len(dims)), dtype=np.float32)
    actions[:, moving] = denoise(targets, noise, steps=10, rtc=rtc)
    return ActionChunk(
        actions=actions,
        names=tuple(dim.name for dim in dims),
        units=tuple(dim.unit for dim in dims),
        control_modes=tuple(dim.control for dim in dims),
        step_time_s=step_s,
        executed_steps=timing.executed_steps,
        prompt=profile.prompt,
        checkpoint_id="analytic",
        profile=profile.name,
        denoise_steps=10,
        noise_seed=seed,
        stamp_ns=stamp_ns,
    )


def rehearse(
    profile: Profile,
    settings: PlayerSettings,
    delay: DelayLaw,
    seconds: float = 20.0,
    seed: int = 0,
    rtc: RtcSettings | None = None,
    limits: Limits | None = None,
) -> Rehearsal:
    """Run the loop with the policy's answer arriving ``delay`` seconds after its request.

    Args:
        rtc: bind each chunk to the last one; normally together with the handover ``rtc``.
        limits: of the commands; none unless given, so that the hand-over is seen and not the clamp.
    """
    rng = np.random.default_rng(seed)
    none = np.full(len(profile.action.dims), np.inf)
    free = Limits(tuple(dim.name for dim in profile.action.dims), -none, none, none)
    player = Player(profile, limits or free, settings)
    plant = FirstOrderPlant(np.zeros(len(profile.state.dims)))
    moving = [index for index, dim in enumerate(profile.action.dims) if dim.control == "position"]
    plant.position[moving] = plant.command[moving] = paths(np.zeros(1), len(moving), 1, 0.0)[0, 0]
    joints = [dim.joint_name for dim in profile.state.dims]
    (source,) = profile.state.sources
    leftover = Leftover()
    period_ns = round(player.period_s * NS)
    now_ns, seen_ns = _EPOCH_NS, _EPOCH_NS
    seen_state = plant.position.copy()
    coming: list[tuple[int, ActionChunk]] = []
    played: list[ActionChunk] = []
    times, commands, positions = [], [], []
    for tick in range(round(seconds / player.period_s)):
        now_ns = _EPOCH_NS + tick * period_ns
        mono_s = tick * player.period_s
        if now_ns - seen_ns >= _CAMERA_NS:
            seen_ns, seen_state = now_ns, plant.position.copy()
        player.feedback(source, dict(zip(joints, plant.position.tolist(), strict=True)), mono_s)
        if tick == 0:
            player.start(mono_s)
        while coming and coming[0][0] <= now_ns:
            chunk = coming.pop(0)[1]
            leftover.sent(chunk, now_ns)
            if player.offer(_offered(chunk), now_ns, mono_s) is None:
                played.append(chunk)
        if not coming and player.request_due(now_ns, mono_s):
            found = None if rtc is None else leftover.continuation(seen_ns, profile.prompt or "", rtc)
            bound = None if found is None else bound_to(found)  # this policy's numbers are the robot's
            chunk = analytic_chunk(profile, seen_state, seen_ns, int(rng.integers(2**31)), _EPOCH_NS, bound)
            coming.append((now_ns + round(delay(rng) * NS), chunk))
        command = player.tick(now_ns, mono_s)
        if command.send:
            plant.command[:] = np.where(np.isnan(command.values), plant.command, command.values)
            times.append(mono_s)
            commands.append(command.values[moving])
            positions.append(plant.position[moving])
        for _ in range(period_ns // _PLANT_NS):
            plant.step(_PLANT_NS / NS)
    at = np.array(times)
    settled = at > at[0] + settings.ramp_s
    all_commands, all_positions = np.array(commands), np.array(positions)
    figures = motion_figures(
        at[settled],
        all_commands[settled],
        player.period_s,
        all_positions[settled],
        paths(at[settled], len(moving), 2, 0.3),
        [(chunk.actions[:, moving], chunk.step_time_s or 1.0) for chunk in played],
        player.counts.late,
        player.counts.late_s,
    )
    return Rehearsal(at, all_commands, all_positions, figures, player.counts.clamped)


def _offered(chunk: ActionChunk) -> OfferedChunk:
    return OfferedChunk(
        stamp_ns=chunk.stamp_ns or 0,
        step_ns=round((chunk.step_time_s or 0.0) * NS),
        names=chunk.names,
        units=chunk.units,
        control_modes=chunk.control_modes,
        horizon=chunk.horizon,
        action_dim=chunk.action_dim,
        actions=chunk.actions.reshape(-1),
        executed_steps=chunk.executed_steps or 0,
        prompt=chunk.prompt or "",
        profile=chunk.profile,
    )
