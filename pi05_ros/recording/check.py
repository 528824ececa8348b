"""Compares streams of messages with a profile: what would keep a policy from working, found before it runs."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pi05_ros.errors import ObservationError
from pi05_ros.node.images import to_rgb
from pi05_ros.profile import Profile
from pi05_ros.recording.bag import NS, same_topic, stamp_ns

Level = Literal["ok", "warning", "error"]
_GAP_PERIODS = 3.0
_FROZEN_NS = NS
_CLOCK_NS = NS // 2
_SLOP_NS = NS // 20
_OUTSIDE_SHARE = 0.05
_NEAR_CONSTANT = 1e-4
_TYPES = {"image": "sensor_msgs/msg/Image", "compressed": "sensor_msgs/msg/CompressedImage"}


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``subject`` is a camera, a state dimension or a state source."""

    level: Level
    subject: str
    sentence: str


@dataclass
class _Stream:
    topic: str
    type_name: str
    stamps: list[int] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    other_types: set[str] = field(default_factory=set)
    refusals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    encodings: set[str] = field(default_factory=set)
    same_since: int | None = None
    frozen_ns: int = 0
    digest: bytes = b""


class Inspection:
    """Takes messages one by one; `findings` says what is wrong with them.

    Args:
        spans: state dimension -> (low, high) that the checkpoint's statistics cover, in robot units.
    """

    def __init__(self, profile: Profile, spans: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._profile = profile
        self._spans = dict(spans or {})
        self._cameras = {
            name: _Stream(camera.topic, _TYPES[camera.type])
            for name, camera in profile.cameras.items()
            if camera.topic is not None
        }
        self._sources = {
            name: _Stream(source.topic, "sensor_msgs/msg/JointState") for name, source in profile.state.sources.items()
        }
        self._values: dict[str, list[float]] = {dim.name: [] for dim in profile.state.dims}
        self._names: dict[str, set[str]] = defaultdict(set)

    @property
    def topics(self) -> dict[str, str]:
        """Topic -> type of every stream that is looked at."""
        streams = [*self._cameras.values(), *self._sources.values()]
        return {stream.topic: stream.type_name for stream in streams}

    def add(self, topic: str, type_name: str, arrival_ns: int, message: Any) -> None:
        """One message; those of other topics are ignored."""
        for streams, take in ((self._cameras, self._take_image), (self._sources, self._take_joints)):
            for name, stream in streams.items():
                if not same_topic(topic, stream.topic):
                    continue
                if type_name != stream.type_name:
                    stream.other_types.add(type_name)
                    continue
                stream.stamps.append(stamp_ns(message))
                stream.arrivals.append(arrival_ns)
                take(name, stream, message)

    def _take_image(self, name: str, stream: _Stream, message: Any) -> None:
        stream.encodings.add(str(getattr(message, "encoding", None) or getattr(message, "format", "")))
        try:
            pixels = to_rgb(message, stream.topic)
        except ObservationError as error:
            stream.refusals[str(error)] += 1
            return
        digest = hashlib.blake2b(pixels.tobytes(), digest_size=16).digest()
        if digest != stream.digest or stream.same_since is None:
            stream.digest, stream.same_since = digest, stream.stamps[-1]
        stream.frozen_ns = max(stream.frozen_ns, stream.stamps[-1] - stream.same_since)

    def _take_joints(self, name: str, stream: _Stream, message: Any) -> None:
        self._names[name].update(message.name)
        for dim in self._profile.state.dims:
            if self._profile.source_of(dim) == name and dim.joint_name in message.name:
                values = getattr(message, dim.field)
                place = list(message.name).index(dim.joint_name)
                if place < len(values):
                    self._values[dim.name].append(float(values[place]))
                else:
                    stream.refusals[f"{dim.field} of {dim.joint_name} expected, got none"] += 1

    def findings(self) -> list[Finding]:
        """Everything that was found, errors first; a stream in order has one line that says so."""
        found: list[Finding] = []
        for name, stream in self._cameras.items():
            lines = self._timing(name, stream, self._profile.cameras[name].optional)
            if stream.frozen_ns >= _FROZEN_NS:
                seconds = stream.frozen_ns / NS
                lines.append(Finding("error", name, f"the picture did not change in a single byte for {seconds:.1f} s"))
            found += lines or [Finding("ok", name, f"{self._rate(stream)}, {', '.join(sorted(stream.encodings))}")]
        found += self._synchronisation()
        for name, stream in self._sources.items():
            lines = self._timing(name, stream, False)
            if stream.stamps:
                wanted = [d.joint_name for d in self._profile.state.dims if self._profile.source_of(d) == name]
                missing = [joint for joint in wanted if joint not in self._names[name]]
                if missing:
                    came = sorted(self._names[name])
                    lines.append(Finding("error", name, f"joints {missing} expected, the messages name {came}"))
            found += lines or [Finding("ok", name, f"{self._rate(stream)}, {len(self._names[name])} joints")]
        found += self._ranges()
        return sorted(found, key=lambda one: ("error", "warning", "ok").index(one.level))

    def _timing(self, name: str, stream: _Stream, optional: bool) -> list[Finding]:
        lines = []
        if stream.other_types:
            types = sorted(stream.other_types)
            lines.append(Finding("error", name, f"{stream.topic}: {stream.type_name} expected, got {types}"))
        if not stream.stamps:
            level: Level = "warning" if optional else "error"
            return lines or [Finding(level, name, f"{stream.topic}: no message")]
        for sentence, count in stream.refusals.items():
            lines.append(Finding("error", name, f"{sentence} ({count} messages)"))
        stamps, arrivals = np.array(stream.stamps), np.array(stream.arrivals)
        if (stamps == 0).any():
            lines.append(Finding("error", name, f"{int((stamps == 0).sum())} messages without a stamp"))
            return lines
        steps = np.diff(stamps)
        if (steps < 0).any():
            lines.append(Finding("error", name, f"stamps run backwards {int((steps < 0).sum())} times"))
        if (steps == 0).any():
            lines.append(Finding("warning", name, f"the same stamp comes again {int((steps == 0).sum())} times"))
        late = np.median(arrivals - stamps)
        if abs(late) > _CLOCK_NS:
            lines.append(Finding("error", name, f"stamps are {late / NS:.2f} s behind their arrival: clocks differ"))
        period = float(np.median(steps)) if len(steps) else 0.0
        if period > 0 and (gaps := steps[steps > _GAP_PERIODS * period]).size:
            said = f"{len(gaps)} gaps, the largest {gaps.max() / NS:.2f} s at {self._rate(stream)}"
            lines.append(Finding("warning", name, said))
        rate = self._profile.timing.rate_hz
        if name in self._cameras and period > 0 and rate is not None and NS / period < 0.9 * rate:
            said = f"{self._rate(stream)}, and the checkpoint was trained at {rate:g} Hz"
            lines.append(Finding("warning", name, said))
        return lines

    def _synchronisation(self) -> list[Finding]:
        anchor = self._profile.anchor or next(iter(self._cameras), "")
        if anchor not in self._cameras or not self._cameras[anchor].stamps:
            return []
        of_anchor = np.array(self._cameras[anchor].stamps)
        lines = []
        for name, stream in self._cameras.items():
            if name == anchor or not stream.stamps:
                continue
            others = np.sort(np.array(stream.stamps))
            after = np.minimum(np.searchsorted(others, of_anchor), len(others) - 1)
            before = np.maximum(after - 1, 0)
            nearest = np.minimum(np.abs(others[after] - of_anchor), np.abs(others[before] - of_anchor))
            share = float((nearest <= _SLOP_NS).mean())
            if share < 0.9:
                lines.append(
                    Finding("warning", name, f"within 50 ms of {anchor} for only {100 * share:.0f} % of its pictures")
                )
        return lines

    def _ranges(self) -> list[Finding]:
        lines = []
        for dim in self._profile.state.dims:
            values = np.array(self._values[dim.name])
            if not values.size:
                continue
            bad = int((~np.isfinite(values)).sum())
            if bad:
                lines.append(Finding("error", dim.name, f"{bad} of {values.size} values are not finite"))
                continue
            span = self._spans.get(dim.name)
            low, high = float(values.min()), float(values.max())
            if span is None:
                lines.append(Finding("ok", dim.name, f"{low:.3f} to {high:.3f} {dim.unit}"))
                continue
            outside = float(((values < span[0]) | (values > span[1])).mean())
            said = f"{low:.3f} to {high:.3f} {dim.unit}, trained on {span[0]:.3f} to {span[1]:.3f}"
            if span[1] - span[0] <= _NEAR_CONSTANT:
                lines.append(Finding("warning", dim.name, f"{said}: hardly moved in training"))
            elif outside > _OUTSIDE_SHARE:
                level: Level = "error" if outside > 0.5 else "warning"
                lines.append(Finding(level, dim.name, f"{said}: {100 * outside:.0f} % outside; are the units right?"))
            else:
                lines.append(Finding("ok", dim.name, said))
        return lines

    def _rate(self, stream: _Stream) -> str:
        steps = np.diff(stream.stamps)
        return f"{NS / float(np.median(steps)):.1f} Hz" if len(steps) and np.median(steps) > 0 else "one message"


def report(findings: Sequence[Finding]) -> str:
    """One line per finding, aligned."""
    width = max((len(one.subject) for one in findings), default=0)
    return "\n".join(f"{one.level:7}  {one.subject.ljust(width)}  {one.sentence}" for one in findings)


def statistics_spans(profile: Profile, checkpoint: str) -> dict[str, tuple[float, float]]:
    """State dimension -> q01 to q99 of the checkpoint's statistics, in robot units.

    Empty where the checkpoint carries no quantiles, or where robot and model units do not map dimension by dimension.
    """
    from pi05_ros.checkpoint.formats import open_checkpoint
    from pi05_ros.contract import check_contract
    from pi05_ros.paths import builtin_checkpoint

    opened = open_checkpoint(builtin_checkpoint() if checkpoint == "builtin" else checkpoint)
    check_contract(profile, opened)
    statistics = opened.state_statistics
    if statistics is None or statistics.q01 is None or statistics.q99 is None or profile.adapt_to_pi:
        return {}
    spans = {}
    for dim, low, high in zip(profile.state.dims, statistics.q01, statistics.q99, strict=False):
        scale, offset = dim.to_model()
        ends = sorted(((float(low) - offset) / scale, (float(high) - offset) / scale))
        spans[dim.name] = (ends[0], ends[1])
    return spans
