"""Which messages belong together: the newest consistent set of camera images and joint values, by their stamps.

Time comes in as arguments only and nothing here blocks or runs by itself, so the whole behaviour can be compared with
a plain specification. Not thread-safe; the owner holds one lock around every call.

A set is consistent at ``now`` when

* its anchor image is newer than the anchor of every set given before and at most the anchor's maximum age old,
* of every other camera it has the image nearest to the anchor, among those within ``slop_s`` of the anchor and within
  their own maximum age; an optional camera may be missing while none of its images is young enough,
* of every joint it has the value nearest to the anchor, among those within the source's maximum age. Joints are looked
  up one by one, so that a source may send them in several partial messages.

Of all consistent sets the one with the newest anchor is given. Between two that are equally near, the older is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pi05_ros.errors import ConfigurationError
from pi05_ros.streams import (
    NS,
    CameraInput,
    CameraStream,
    Frame,
    Refusal,
    Sample,
    SourceStream,
    StateInput,
    Stored,
    Stream,
    StreamState,
    by_stamp,
    seconds,
)

# Different lists of joint names on one topic; a publisher that never repeats itself must not fill the memory.
_MAX_LAYOUTS = 16
# Between a callback and the thread that takes sets, the order of two clock readings is not certain.
_CLOCK_SLACK_NS = NS // 2


@dataclass(frozen=True)
class SyncSettings:
    """How images and joints are put together. Times in seconds.

    Attributes:
        anchor: the camera whose stamps decide; ``None`` leaves the choice to the profile.
        slop_s: how far another camera's stamp may be from the anchor's.
        max_age_s: how old an input may be when a set is taken.
        max_age_by_stream: exceptions to ``max_age_s``, by camera or state source.
        dead_after_s: a stream from which nothing usable came for so long is called dead.
        stamp_source: ``header`` takes the publisher's stamps, ``receive`` the time of arrival.
        future_tolerance_s: how far a header stamp may lie ahead of the node's clock.
        detect_frozen: refuse a camera that sends the same picture, byte for byte, with new stamps.
        frozen_after_s: for how long the picture must have been the same.
        image_depth: images kept of each camera.
        joint_depth: messages kept of each set of joints of a state source.
    """

    anchor: str | None = None
    slop_s: float = 0.05
    max_age_s: float = 0.5
    max_age_by_stream: Mapping[str, float] = field(default_factory=dict)
    dead_after_s: float = 2.0
    stamp_source: Literal["header", "receive"] = "header"
    future_tolerance_s: float = 0.05
    detect_frozen: bool = False
    frozen_after_s: float = 1.0
    image_depth: int = 16
    joint_depth: int = 256

    def __post_init__(self) -> None:
        for name in ("slop_s", "future_tolerance_s"):
            if not 0.0 <= getattr(self, name) < 3600.0:
                raise ConfigurationError("sync", f"{name}: 0 to 3600 seconds expected, got {getattr(self, name)}")
        limits = {name: getattr(self, name) for name in ("max_age_s", "dead_after_s", "frozen_after_s")}
        limits |= {f"max_age_by_stream of {name}": age for name, age in self.max_age_by_stream.items()}
        for name, value in limits.items():
            if not 0.0 < value < 3600.0:
                raise ConfigurationError(
                    "sync", f"{name}: more than 0 and less than 3600 seconds expected, got {value}"
                )
        if self.image_depth < 1 or self.joint_depth < 1:
            raise ConfigurationError("sync", "image_depth and joint_depth: at least 1 expected")
        if self.stamp_source not in ("header", "receive"):
            raise ConfigurationError("sync", f"stamp_source: header or receive expected, got {self.stamp_source!r}")


@dataclass(frozen=True)
class SynchronizedSet:
    """Images and joint values that belong together.

    Attributes:
        stamp_ns: the anchor image's stamp.
        images: camera -> frame; absent optional cameras are left out.
        state: one value for each state dimension, in their order.
        state_stamps_ns: the stamp of each of these values.
        input_stamps_ns: input -> stamp: cameras, then state sources (the oldest joint of each).
        newest_receive_ns: when the last of these inputs arrived.
    """

    stamp_ns: int
    images: Mapping[str, Frame]
    state: tuple[float, ...]
    state_stamps_ns: tuple[int, ...]
    input_stamps_ns: Mapping[str, int]
    newest_receive_ns: int


@dataclass(frozen=True)
class StreamReport:
    """The fields of pi05_ros/StreamStatus."""

    name: str
    topic: str
    state: StreamState
    rate_hz: float
    age: float
    received: int
    dropped: int
    last_error: str


@dataclass(frozen=True)
class Finding:
    """Why no set exists: a stable code, a sentence, and the stream it is about."""

    code: str
    sentence: str
    stream: str


class Synchronizer:
    """Keeps the last messages of every input and gives the newest consistent set, each anchor image at most once.

    Args:
        cameras: the cameras that are used.
        sources: state source -> topic.
        state: where each state dimension is read.
        settings: with ``anchor`` set to one of the cameras.
        same_picture: tells whether two payloads show the same, byte for byte; needed for ``detect_frozen``.

    Raises:
        ConfigurationError: ``config.sync``.
    """

    def __init__(
        self,
        cameras: Mapping[str, CameraInput],
        sources: Mapping[str, str],
        state: Sequence[StateInput],
        settings: SyncSettings,
        same_picture: Callable[[Any, Any], bool] | None = None,
    ) -> None:
        _check(cameras, sources, state, settings, same_picture)
        self.settings = settings
        ages = {
            name: round(settings.max_age_by_stream.get(name, settings.max_age_s) * NS) for name in (*cameras, *sources)
        }
        self._slop_ns = round(settings.slop_s * NS)
        self._dead_after_ns = round(settings.dead_after_s * NS)
        self._same_picture = same_picture if settings.detect_frozen else None
        self._cameras = {name: CameraStream(name, camera, ages[name]) for name, camera in cameras.items()}
        self._anchor = self._cameras[settings.anchor or ""]
        self._others = [stream for stream in self._cameras.values() if stream is not self._anchor]
        self._required = {stream.name for stream in self._others if not stream.optional}
        self._sources = {
            name: SourceStream(name, topic, ages[name], {i: d for i, d in enumerate(state) if d.source == name})
            for name, topic in sources.items()
        }
        self._width = len(state)
        self._taken: int | None = None  # anchor stamp of the set given last
        self._taken_before: int | None = None
        self._given: SynchronizedSet | None = None
        self._clock_ns = 0

    def add_image(self, camera: str, stamp_ns: int, receive_ns: int, payload: Any) -> Refusal | None:
        """Store an image.

        Args:
            camera: its name.
            stamp_ns: header stamp.
            receive_ns: the node's clock on arrival.
            payload: handed through untouched.

        Returns:
            ``None``, or code and sentence of the refusal.
        """
        stream = self._cameras[camera]
        stamp_ns, refusal = self._enter(stream, stamp_ns, receive_ns)
        if refusal is not None:
            return refusal
        place = bisect_left(stream.buffer, stamp_ns, key=by_stamp)
        if place < len(stream.buffer) and stream.buffer[place].stamp_ns == stamp_ns:
            return stream.drop("input.repeated_stamp", f"stamp {seconds(stamp_ns)} came before", receive_ns)
        stream.accepted = max(stream.accepted or (stamp_ns, receive_ns), (stamp_ns, receive_ns))
        if stamp_ns < receive_ns - stream.max_age_ns:
            return stream.drop("input.late", self._too_old(stream, stamp_ns, receive_ns), receive_ns)
        if self._taken is not None and stamp_ns < self._taken - (0 if stream is self._anchor else self._slop_ns):
            return stream.drop("input.late", f"stamp {seconds(stamp_ns)} came after newer ones were used", receive_ns)
        stored = Stored(stamp_ns, Frame(stamp_ns, receive_ns, payload))
        stream.buffer.insert(place, stored)
        self._pair(stream, stored)
        self._trim(stream, receive_ns)
        return None

    def add_joints(
        self,
        source: str,
        stamp_ns: int,
        receive_ns: int,
        names: Sequence[str],
        position: Sequence[float],
        velocity: Sequence[float],
        effort: Sequence[float],
    ) -> Refusal | None:
        """Store a JointState, which may carry only some of the source's joints.

        Each of the three arrays is empty or as long as ``names``; one that the profile reads must not be empty.

        Returns:
            ``None``, or code and sentence of the refusal.
        """
        stream = self._sources[source]
        stamp_ns, refusal = self._enter(stream, stamp_ns, receive_ns)
        if refusal is not None:
            return refusal
        values: dict[str, Sequence[float]] = {"position": position, "velocity": velocity, "effort": effort}
        for name, array in values.items():
            if len(array) not in (0, len(names)):
                return stream.drop(
                    "input.malformed", f"{len(names)} values of {name} expected for {list(names)}, got {len(array)}",
                    receive_ns,
                )  # fmt: skip
        key = tuple(names)
        layout = stream.layouts.get(key)
        if layout is None:
            if len(set(key)) < len(key):
                twice = sorted({name for name in key if key.count(name) > 1})
                return stream.drop(
                    "input.malformed", f"every joint once expected, got {twice} more than once", receive_ns
                )
            if len(stream.layouts) >= _MAX_LAYOUTS:
                return stream.drop(
                    "input.malformed", f"at most {_MAX_LAYOUTS} lists of joint names expected, got one more: {key}",
                    receive_ns,
                )  # fmt: skip
            layout = stream.add_layout(key)
        if not layout.picks:
            expected = [dim.joint for dim in stream.dims.values()]
            return stream.drop("input.joint_missing", f"joints {expected} expected, got {list(key)}", receive_ns)
        for name in layout.fields:
            if not values[name]:
                return stream.drop("input.malformed", f"{name} of {list(key)} expected, got none", receive_ns)
        samples = layout.samples
        place = bisect_left(samples, stamp_ns, key=by_stamp)
        if place < len(samples) and samples[place].stamp_ns == stamp_ns:
            return stream.drop("input.repeated_stamp", f"stamp {seconds(stamp_ns)} came before", receive_ns)
        layout.accepted = max(layout.accepted or (stamp_ns, receive_ns), (stamp_ns, receive_ns))
        oldest_ns = receive_ns - stream.max_age_ns
        if stamp_ns < oldest_ns:
            return stream.drop("input.late", self._too_old(stream, stamp_ns, receive_ns), receive_ns)
        picked = tuple(float(values[name][index]) for _, name, index in layout.picks)
        samples.insert(place, Sample(stamp_ns, receive_ns, picked))
        expired = bisect_left(samples, oldest_ns, key=by_stamp)
        del samples[: max(expired, len(samples) - self.settings.joint_depth)]
        return None

    @property
    def pending(self) -> bool:
        """Whether an anchor image waits that no set was given for."""
        buffer = self._anchor.buffer
        return bool(buffer) and (self._taken is None or buffer[-1].stamp_ns > self._taken)

    def take(self, now_ns: int) -> SynchronizedSet | None:
        """Newest consistent set whose anchor is newer than that of every set given before; ``None`` without one."""
        self._watch_clock(now_ns)
        found = self._find(now_ns, self._taken)
        if found is None:
            return None
        # Every camera is looked at, so that one that thaws is seen whatever the others do.
        frozen = [name for name, frame in found.images.items() if self._frozen(name, frame, now_ns)]
        if frozen:
            return None
        self._taken_before, self._taken, self._given = self._taken, found.stamp_ns, found
        return found

    def accept(self, taken: SynchronizedSet) -> None:
        """Say that the images of the set given last could be used."""
        if self._given is taken:
            for name, frame in taken.images.items():
                stream = self._cameras[name]
                stream.proven, stream.suspect = (frame.stamp_ns, frame.receive_ns), False

    def hand_back(self, taken: SynchronizedSet, camera: str, code: str, sentence: str, now_ns: int) -> None:
        """Refuse one image of the set given last (its content cannot be used); the others may be given again."""
        if self._given is not taken:
            return
        self._given = None
        self._taken = self._taken_before
        stream, stamp_ns = self._cameras[camera], taken.images[camera].stamp_ns
        stream.buffer = [stored for stored in stream.buffer if stored.stamp_ns != stamp_ns]
        stream.suspect = True
        stream.dropped += 1
        stream.note(code, sentence, now_ns)

    def count_lost(self, stream: str, messages: int) -> None:
        """Count messages that the middleware lost before they came here."""
        (self._cameras.get(stream) or self._sources[stream]).dropped += messages

    def clock_jumped(self, now_ns: int) -> None:
        """Forget every message: the clock went to ``now_ns`` and older stamps say nothing any more."""
        for stream in (*self._cameras.values(), *self._sources.values()):
            stream.clear()
        self._taken = self._taken_before = self._given = None
        self._clock_ns = now_ns

    def reason(self, now_ns: int) -> Refusal | None:
        """Code and sentence why there is no set.

        ``None`` while every input that is needed is young enough and so is the newest set, given or not.
        """
        finding = self.diagnose(now_ns)
        return None if finding is None else (finding.code, finding.sentence)

    def diagnose(self, now_ns: int) -> Finding | None:
        """`reason` with the stream it is about."""
        if now_ns <= 0:
            return Finding("input.clock", "the node's clock stands at 0: simulated time expected on /clock", "")
        findings: list[Finding] = []
        required = [self._anchor, *(stream for stream in self._others if not stream.optional)]
        for stream in (*required, *self._sources.values()):
            finding = self._finding(stream, now_ns)
            if finding is not None:
                findings.append(finding)
        if findings:
            return min(findings, key=lambda finding: _URGENCY.get(finding.code, 1))
        for camera in (self._anchor, *self._others):
            if camera.same_for_ns:
                return Finding(
                    "input.frozen",
                    f"{camera.label}: the picture has not changed in a single byte for {seconds(camera.same_for_ns)}",
                    camera.name,
                )
        given_lately = self._taken is not None and now_ns - self._taken <= self._anchor.max_age_ns
        if given_lately or self._find(now_ns, None) is not None:
            return None
        return self._unsynchronised(now_ns)

    def reports(self, now_ns: int) -> list[StreamReport]:
        """One report per input: cameras, then state sources."""
        reports = []
        for stream in (*self._cameras.values(), *self._sources.values()):
            newest = stream.newest()
            reports.append(
                StreamReport(
                    name=stream.name,
                    topic=stream.topic,
                    state=stream.state(now_ns, self._dead_after_ns),
                    rate_hz=stream.rate_hz(now_ns),
                    age=-1.0 if newest is None else (now_ns - newest[0]) / NS,
                    received=stream.received,
                    dropped=stream.dropped,
                    last_error=": ".join(stream.last_error or ()),
                )
            )
        return reports

    def _enter(self, stream: Stream, stamp_ns: int, receive_ns: int) -> tuple[int, Refusal | None]:
        """Count a message and choose its stamp; the refusal if that cannot be used."""
        self._watch_clock(receive_ns)
        stream.arrived(receive_ns)
        if self.settings.stamp_source == "receive":
            return receive_ns, None
        if stamp_ns <= 0:
            return 0, stream.drop(
                "input.zero_stamp",
                "a header stamp expected, got 0; stamp it in the driver, or set stamp_source to receive", receive_ns,
            )  # fmt: skip
        if stamp_ns > receive_ns + round(self.settings.future_tolerance_s * NS):
            return 0, stream.drop(
                "input.future_stamp",
                f"stamp {seconds(stamp_ns)} lies {seconds(stamp_ns - receive_ns)} ahead of the node's clock "
                f"{seconds(receive_ns)}, at most {self.settings.future_tolerance_s:g} s expected; both need the same "
                "clock (use_sim_time, chrony)", receive_ns,
            )  # fmt: skip
        return stamp_ns, None

    def _too_old(self, stream: Stream, stamp_ns: int, receive_ns: int) -> str:
        return (
            f"stamp {seconds(stamp_ns)} was {seconds(receive_ns - stamp_ns)} old on arrival, "
            f"at most {seconds(stream.max_age_ns)} expected; a slow link, or a clock that is behind the node's"
        )

    def _watch_clock(self, now_ns: int) -> None:
        if now_ns < self._clock_ns - _CLOCK_SLACK_NS:
            self.clock_jumped(now_ns)
        self._clock_ns = max(self._clock_ns, now_ns)

    def _pair(self, stream: CameraStream, stored: Stored) -> None:
        """Note who has a frame within the slop of whom, so that frames without partners can be counted."""
        low_ns, high_ns = stored.stamp_ns - self._slop_ns, stored.stamp_ns + self._slop_ns
        for other in self._others if stream is self._anchor else [self._anchor]:
            for partner in other.within(low_ns, high_ns):
                partner.partners.add(stream.name)
                stored.partners.add(other.name)

    def _trim(self, stream: CameraStream, now_ns: int) -> None:
        """Forget frames that are too old, superseded by the set before the last one, or too many."""
        oldest_ns = now_ns - stream.max_age_ns
        if self._taken_before is not None:
            oldest_ns = max(oldest_ns, self._taken_before - self._slop_ns)
        gone = bisect_left(stream.buffer, oldest_ns, key=by_stamp)
        gone = max(gone, len(stream.buffer) - self.settings.image_depth)
        needed = self._required if stream is self._anchor else {self._anchor.name}
        for stored in stream.buffer[:gone]:
            alone = needed - stored.partners
            if alone:
                stream.drop(
                    "input.unsynchronised",
                    f"no image of {sorted(alone)} came within {self.settings.slop_s:g} s of stamp "
                    f"{seconds(stored.stamp_ns)}", now_ns,
                )  # fmt: skip
        del stream.buffer[:gone]

    def _find(self, now_ns: int, after_ns: int | None) -> SynchronizedSet | None:
        oldest_ns = now_ns - self._anchor.max_age_ns
        for stored in reversed(self._anchor.buffer):
            if stored.stamp_ns < oldest_ns or (after_ns is not None and stored.stamp_ns <= after_ns):
                return None
            images = self._images(stored.frame, now_ns)
            if images is not None:
                return self._with_state(stored.frame, images, now_ns)
        return None

    def _images(self, anchor: Frame, now_ns: int) -> dict[str, Frame] | None:
        chosen = {}
        for name, stream in self._cameras.items():
            oldest_ns = now_ns - stream.max_age_ns
            if stream is self._anchor:
                chosen[name] = anchor
                continue
            frame = stream.nearest(anchor.stamp_ns, self._slop_ns, oldest_ns)
            if frame is not None:
                chosen[name] = frame
            elif not stream.optional or (stream.newest() or (oldest_ns - 1, 0))[0] >= oldest_ns:
                return None
        return chosen

    def _with_state(self, anchor: Frame, images: dict[str, Frame], now_ns: int) -> SynchronizedSet | None:
        best: dict[int, tuple[Sample, float]] = {}
        stamps = {name: frame.stamp_ns for name, frame in images.items()}
        receive_ns = max(frame.receive_ns for frame in images.values())
        for name, source in self._sources.items():
            for layout in source.layouts.values():
                sample = layout.nearest(anchor.stamp_ns, now_ns - source.max_age_ns)
                if sample is None:
                    continue
                distance = (abs(sample.stamp_ns - anchor.stamp_ns), sample.stamp_ns)
                for dimension, value in zip(layout.dimensions, sample.values, strict=True):
                    known = best.get(dimension)
                    if known is None or distance < (abs(known[0].stamp_ns - anchor.stamp_ns), known[0].stamp_ns):
                        best[dimension] = (sample, value)
            samples = [best[dimension][0] for dimension in source.dims if dimension in best]
            if len(samples) < len(source.dims):
                return None
            stamps[name] = min(sample.stamp_ns for sample in samples)
            receive_ns = max(receive_ns, *(sample.receive_ns for sample in samples))
        order = range(self._width)
        return SynchronizedSet(
            stamp_ns=anchor.stamp_ns,
            images=images,
            state=tuple(best[dimension][1] for dimension in order),
            state_stamps_ns=tuple(best[dimension][0].stamp_ns for dimension in order),
            input_stamps_ns=stamps,
            newest_receive_ns=receive_ns,
        )

    def _frozen(self, camera: str, frame: Frame, now_ns: int) -> bool:
        if self._same_picture is None:
            return False
        stream, reference = self._cameras[camera], self._cameras[camera].reference
        if reference is not None and frame.stamp_ns <= reference.stamp_ns:
            return stream.same_for_ns > 0
        if reference is None or not self._same_picture(reference.payload, frame.payload):
            stream.reference, stream.same_for_ns = frame, 0
            return False
        same_for_ns = frame.stamp_ns - reference.stamp_ns
        if same_for_ns < round(self.settings.frozen_after_s * NS):
            return False
        if not stream.same_for_ns:
            stream.note("input.frozen", f"{stream.label}: the picture does not change in a single byte", now_ns)
        stream.same_for_ns = same_for_ns
        return True

    def _finding(self, stream: Stream, now_ns: int) -> Finding | None:
        state, newest = stream.state(now_ns, self._dead_after_ns), stream.newest()
        if state == "live":
            return None
        if newest is not None:
            what = f"{stream.label}: "
            if isinstance(stream, SourceStream) and len(stream.layouts) > 1:
                what += f"joint {stream.laggard()}: "
            if state == "dead":
                what += f"nothing usable came for {seconds(now_ns - newest[1])}"
            else:
                what += f"the newest stamp is {seconds(now_ns - newest[0])} old"
            what += f", at most {seconds(self._dead_after_ns if state == 'dead' else stream.max_age_ns)} expected"
            if stream.last_error is not None and stream.error_ns > newest[1]:
                what += f"; last refusal: {': '.join(stream.last_error)}"
            return Finding(f"input.{state}", what, stream.name)
        if isinstance(stream, SourceStream) and stream.layouts:
            missing = [dim.joint for i, dim in stream.dims.items() if stream.newest_of(i) is None]
            came = sorted({name for names in stream.layouts for name in names})
            if not set(missing) & set(came):
                return Finding(
                    "input.joint_missing", f"{stream.label}: joints {missing} expected, the messages name {came}",
                    stream.name,
                )  # fmt: skip
        if stream.last_error is not None:
            return Finding(*stream.last_error, stream.name)
        return Finding("input.waiting", f"{stream.label}: no message yet", stream.name)

    def _unsynchronised(self, now_ns: int) -> Finding:
        """Which camera keeps the newest anchor image from being used."""
        anchor = next((stored for stored in reversed(self._anchor.buffer)), None)
        anchor_label = self._anchor.label
        if anchor is None:
            return Finding("input.waiting", f"{anchor_label}: no image that could be used", self._anchor.name)
        for stream in self._others:
            live = stream.state(now_ns, self._dead_after_ns) == "live"
            if stream.nearest(anchor.stamp_ns, self._slop_ns, now_ns - stream.max_age_ns) is None and (
                live or not stream.optional
            ):
                offsets = [stored.stamp_ns - anchor.stamp_ns for stored in stream.buffer]
                offset = min(offsets, key=abs, default=None)
                got = (
                    "none is there"
                    if offset is None
                    else f"the nearest is {seconds(abs(offset))} {'after' if offset > 0 else 'before'} it"
                )
                return Finding(
                    "input.unsynchronised",
                    f"{stream.label}: an image within {self.settings.slop_s:g} s of the anchor expected "
                    f"({anchor_label}), {got}",
                    stream.name,
                )
        return Finding("input.unsynchronised", f"{anchor_label}: no image with all other inputs", self._anchor.name)


# Lower comes first when several things are wrong; codes of refusals rank between.
_URGENCY = {"input.dead": 0, "input.waiting": 2, "input.stale": 3}


def _check(
    cameras: Mapping[str, CameraInput],
    sources: Mapping[str, str],
    state: Sequence[StateInput],
    settings: SyncSettings,
    same_picture: Callable[[Any, Any], bool] | None,
) -> None:
    if settings.anchor is None or settings.anchor not in cameras or cameras[settings.anchor].optional:
        always = sorted(name for name, camera in cameras.items() if not camera.optional)
        raise ConfigurationError(
            "sync", f"anchor: one of the cameras that are always there expected, {always}; got {settings.anchor}"
        )
    both = sorted(set(cameras) & set(sources))
    if both:
        raise ConfigurationError("sync", f"cameras and state sources need different names; both have {both}")
    unknown = sorted(set(settings.max_age_by_stream) - set(cameras) - set(sources))
    if unknown:
        raise ConfigurationError("sync", f"max age: names of {sorted([*cameras, *sources])} expected, got {unknown}")
    read = {dim.source for dim in state}
    if read != set(sources):
        raise ConfigurationError("sync", f"state: read from {sorted(read)}, and the sources are {sorted(sources)}")
    if settings.detect_frozen and same_picture is None:
        raise ConfigurationError("sync", "detect_frozen: a comparison of pictures expected, got none")
