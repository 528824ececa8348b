"""Puts a recorded run through the policy again and compares what comes out with what was recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pi05_ros.errors import ConfigurationError
from pi05_ros.node.images import to_rgb
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import AnswersObservations, RtcSettings, continue_chunk
from pi05_ros.playback.plan import NS, Plan, TimedChunk
from pi05_ros.profile import Profile
from pi05_ros.recording.bag import CHUNK, messages, open_bag, same_topic, stamp_ns

_SLOP_NS = NS // 20


@dataclass
class Recording:
    """A bag's content that matters for a profile: messages by stamp, per camera and state source, and all chunks."""

    images: dict[str, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    joints: dict[str, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))
    chunks: list[Any] = field(default_factory=list)
    actions: list[tuple[int, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class Comparison:
    """One recorded answer and the replayed one, float [rows, dims] each, in robot units."""

    stamp_ns: int
    recorded: np.ndarray
    replayed: np.ndarray


def read_recording(path: Path, profile: Profile, actions_topic: str | None = None) -> Recording:
    """Read a bag. Pictures stay encoded as they are.

    Args:
        actions_topic: of JointState or Float64MultiArray commands that the answers are compared with, for bags that
            hold no chunks.

    Raises:
        ConfigurationError: ``config.bag``.
    """
    recording = Recording()
    columns = {dim.name: column for column, dim in enumerate(profile.action.dims)}
    columns |= {dim.joint_name: columns[dim.name] for dim in profile.state.dims if dim.name in columns}
    with open_bag(path) as reader:
        for topic, kind, receive_ns, message in messages(reader):
            if kind == CHUNK:
                recording.chunks.append(message)
            for name, camera in profile.cameras.items():
                if camera.topic is not None and same_topic(topic, camera.topic):
                    recording.images[name][stamp_ns(message)] = message
            for name, source in profile.state.sources.items():
                if same_topic(topic, source.topic) and kind == "sensor_msgs/msg/JointState":
                    at = recording.joints[name].setdefault(stamp_ns(message), {})
                    at.update({joint: (message, place) for place, joint in enumerate(message.name)})
            if actions_topic is not None and same_topic(topic, actions_topic):
                recording.actions.append(_action(message, receive_ns, columns))
    return recording


def _action(message: Any, receive_ns: int, columns: Mapping[str, int]) -> tuple[int, np.ndarray]:
    row = np.full(max(columns.values()) + 1, np.nan)
    if hasattr(message, "position"):
        for name, value in zip(message.name, message.position, strict=False):
            if name in columns:
                row[columns[name]] = value
        return stamp_ns(message) or receive_ns, row
    values = np.asarray(message.data, dtype=np.float64)
    row[: len(values)] = values[: len(row)]
    return receive_ns, row


def observation_at(
    recording: Recording, profile: Profile, wanted: Mapping[str, int], anchor_ns: int, prompt: str | None
) -> Observation | None:
    """The observation of the given input stamps; inputs without one are the nearest to the anchor.

    ``None`` where an input is not in the recording.
    """
    images, stamps = {}, {}
    for name, camera in profile.cameras.items():
        if camera.slot is None or camera.topic is None:
            continue
        found = wanted.get(name) if wanted else _nearest(recording.images[name], anchor_ns, _SLOP_NS)
        if found is None and camera.optional:
            continue
        if found is None or found not in recording.images[name]:
            return None
        images[name], stamps[name] = to_rgb(recording.images[name][found], camera.topic), found
    state = []
    for dim in profile.state.dims:
        source = profile.source_of(dim)
        of_joint = {
            at: joints[dim.joint_name] for at, joints in recording.joints[source].items() if dim.joint_name in joints
        }
        found = wanted.get(source)
        if found is None or found not in of_joint:
            found = _nearest(of_joint, anchor_ns, NS)
        if found is None:
            return None
        message, place = of_joint[found]
        state.append(float(getattr(message, dim.field)[place]))
        stamps[source] = min(stamps.get(source, found), found)
    return Observation(images, np.array(state), prompt, anchor_ns, stamps)


def _nearest(by_stamp: Mapping[int, Any], at_ns: int, within_ns: int) -> int | None:
    nearest = min(by_stamp, key=lambda stamp: abs(stamp - at_ns), default=None)
    return None if nearest is None or abs(nearest - at_ns) > within_ns else nearest


def replay_chunks(policy: AnswersObservations, recording: Recording, rtc: RtcSettings) -> Iterator[Comparison]:
    """Ask the policy again for every recorded chunk whose inputs are there: same inputs, prompt, seed and steps.

    Args:
        rtc: as the recorded node had it; used for chunks that continue another.
    """
    before: TimedChunk | None = None
    for message in recording.chunks:
        recorded = np.asarray(message.actions, dtype=np.float32).reshape(message.horizon, message.action_dim)
        at = stamp_ns(message)
        stamps = {name: stamp_ns(stamp) for name, stamp in zip(message.input_names, message.input_stamps, strict=True)}
        observation = observation_at(recording, policy.profile, stamps, at, message.prompt)
        continuing = None
        if message.rtc_delay >= 0 and before is not None:
            continuing = continue_chunk(before, at, int(message.rtc_delay), rtc)
        before = TimedChunk(at, stamp_ns(message.step_time), recorded.astype(np.float64), int(message.executed_steps))
        if observation is None or (message.rtc_delay >= 0 and continuing is None):
            continue
        chunk = policy.infer(
            observation, seed=int(message.noise_seed), num_steps=int(message.denoise_steps), continuing=continuing
        )
        yield Comparison(at, recorded, chunk.actions)


def replay_actions(
    policy: AnswersObservations, recording: Recording, prompt: str | None, every: int = 1, seed: int = 0
) -> Iterator[Comparison]:
    """Ask the policy at every ``every``-th anchor picture and compare the rows it wants executed with what was done."""
    profile = policy.profile
    anchor = profile.anchor or next(iter(profile.cameras))
    if len(recording.actions) < 2:
        raise ConfigurationError("bag", "recorded actions expected on the topic of --actions, and there are none")
    times = np.array([at for at, _ in recording.actions], dtype=np.int64)
    order = np.argsort(times, kind="stable")
    rows = np.stack([row for _, row in recording.actions])[order]
    done = Plan(times[order], rows, np.zeros(rows.shape[1], dtype=bool), int(times.max()))
    for at in sorted(recording.images[anchor])[::every]:
        observation = observation_at(recording, profile, {}, at, prompt)
        if observation is None:
            continue
        chunk = policy.infer(observation, seed=seed)
        if not chunk.step_time_s:
            raise ConfigurationError("bag", f"profile {profile.name}: timing.rate_hz expected, to place rows in time")
        executed = chunk.executed_steps or chunk.horizon
        due = at + np.round(np.arange(executed) * chunk.step_time_s * NS).astype(np.int64)
        inside = (due >= times.min()) & (due <= times.max())
        if inside.any():
            yield Comparison(at, done.sample(due[inside]), chunk.actions[:executed][inside])


def error_table(comparisons: Sequence[Comparison], names: Sequence[str], units: Sequence[str]) -> str:
    """Per joint: mean and largest absolute difference, and how many values were bit for bit the same."""
    recorded = np.concatenate([one.recorded for one in comparisons])
    replayed = np.concatenate([one.replayed for one in comparisons])
    difference = np.abs(recorded.astype(np.float64) - replayed)
    lines = ["| joint | unit | mean difference | largest | same |", "|---|---|---|---|---|"]
    for column, (name, unit) in enumerate(zip(names, units, strict=True)):
        values = difference[:, column]
        known = values[~np.isnan(values)]
        if not known.size:
            lines.append(f"| {name} | {unit} | not recorded | | |")
            continue
        same = float((known == 0.0).mean())
        lines.append(f"| {name} | {unit} | {known.mean():.3g} | {known.max():.3g} | {100.0 * same:.1f} % |")
    return "\n".join(lines)
