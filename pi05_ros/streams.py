"""What is kept of each input: the last messages in the order of their stamps, counters, and the last refusal."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

Refusal = tuple[str, str]  # a stable code and a sentence
Field = Literal["position", "velocity", "effort"]
StreamState = Literal["waiting", "live", "stale", "dead"]

NS = 1_000_000_000
_RATE_WINDOW_NS = 2 * NS
_RATE_SAMPLES = 256

by_stamp = attrgetter("stamp_ns")


@dataclass(frozen=True)
class CameraInput:
    """One camera: its topic (for messages to people) and whether a set may come without it."""

    topic: str
    optional: bool = False


@dataclass(frozen=True)
class StateInput:
    """Where one state dimension is read."""

    source: str
    joint: str
    field: Field = "position"


@dataclass(frozen=True)
class Frame:
    """One image as it came: stamp and arrival in ns of the node's clock, and the message."""

    stamp_ns: int
    receive_ns: int
    payload: Any


@dataclass
class Stored:
    """A frame in a buffer; ``partners``: the other cameras that had a frame within the slop of it."""

    stamp_ns: int
    frame: Frame
    partners: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Sample:
    """One JointState: the values of its layout's dimensions."""

    stamp_ns: int
    receive_ns: int
    values: tuple[float, ...]


class Stream:
    """What cameras and state sources have in common: counters and the last refusal."""

    def __init__(self, name: str, topic: str, what: str, max_age_ns: int) -> None:
        self.name = name
        self.topic = topic
        self.label = f"{what} {name} ({topic})"
        self.max_age_ns = max_age_ns
        self.received = 0
        self.dropped = 0
        self.last_error: tuple[str, str] | None = None
        self.error_ns = 0
        self.arrivals: deque[int] = deque(maxlen=_RATE_SAMPLES)

    def arrived(self, receive_ns: int) -> None:
        self.received += 1
        self.arrivals.append(receive_ns)

    def note(self, code: str, sentence: str, now_ns: int) -> None:
        self.last_error = (code, sentence)
        self.error_ns = now_ns

    def drop(self, code: str, sentence: str, now_ns: int) -> Refusal:
        self.dropped += 1
        self.note(code, f"{self.label}: {sentence}", now_ns)
        return code, f"{self.label}: {sentence}"

    def rate_hz(self, now_ns: int) -> float:
        recent = [arrival for arrival in self.arrivals if arrival > now_ns - _RATE_WINDOW_NS]
        if len(recent) < 2 or recent[-1] <= recent[0]:
            return 0.0
        period = (recent[-1] - recent[0]) / (len(recent) - 1)
        # A stream that has just stopped slows down instead of keeping its last rate.
        silence = max(0.0, now_ns - recent[-1] - period)
        return (len(recent) - 1) * NS / (recent[-1] - recent[0] + silence)

    def newest(self) -> tuple[int, int] | None:
        """Stamp and arrival of the newest usable input; of a state source, of the joint that is longest behind."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget every message; counters and the last refusal stay."""
        raise NotImplementedError

    def state(self, now_ns: int, dead_after_ns: int) -> StreamState:
        newest = self.newest()
        if newest is None:
            return "waiting"
        if now_ns - newest[1] > max(dead_after_ns, self.max_age_ns):
            return "dead"
        return "stale" if now_ns - newest[0] > self.max_age_ns else "live"


class CameraStream(Stream):
    def __init__(self, name: str, camera: CameraInput, max_age_ns: int) -> None:
        super().__init__(name, camera.topic, "camera", max_age_ns)
        self.optional = camera.optional
        self.clear()

    def clear(self) -> None:
        self.buffer: list[Stored] = []
        self.accepted: tuple[int, int] | None = None
        # After a frame was handed back the next ones may be as bad: only those that proved good count as usable.
        self.suspect = False
        self.proven: tuple[int, int] | None = None
        self.reference: Frame | None = None  # the first of a run of equal pictures
        self.same_for_ns = 0  # how long the run lasts, once it is too long
        self.arrivals.clear()

    def newest(self) -> tuple[int, int] | None:
        return self.proven if self.suspect else self.accepted

    def within(self, low_ns: int, high_ns: int) -> list[Stored]:
        """Stored frames with low <= stamp <= high."""
        buffer = self.buffer
        return buffer[bisect_left(buffer, low_ns, key=by_stamp) : bisect_right(buffer, high_ns, key=by_stamp)]

    def nearest(self, stamp_ns: int, slop_ns: int, oldest_ns: int) -> Frame | None:
        candidates = self.within(max(stamp_ns - slop_ns, oldest_ns), stamp_ns + slop_ns)
        return min(candidates, key=lambda stored: abs(stored.stamp_ns - stamp_ns)).frame if candidates else None


class Layout:
    """One list of joint names seen on a source: which state dimensions it carries, and its last messages."""

    def __init__(self, picks: Sequence[tuple[int, Field, int]]) -> None:
        self.picks = picks  # (state dimension, field, place in the message)
        self.dimensions = [dimension for dimension, _, _ in picks]
        self.fields = sorted({name for _, name, _ in picks})
        self.samples: list[Sample] = []
        self.accepted: tuple[int, int] | None = None

    def nearest(self, stamp_ns: int, oldest_ns: int) -> Sample | None:
        samples = self.samples
        first = bisect_left(samples, oldest_ns, key=by_stamp)
        after = bisect_left(samples, stamp_ns, lo=first, key=by_stamp)
        around = samples[max(first, after - 1) : after + 1]
        return min(around, key=lambda sample: abs(sample.stamp_ns - stamp_ns)) if around else None


class SourceStream(Stream):
    def __init__(self, name: str, topic: str, max_age_ns: int, dims: Mapping[int, StateInput]) -> None:
        super().__init__(name, topic, "state source", max_age_ns)
        self.dims = dims
        self.clear()

    def clear(self) -> None:
        self.layouts: dict[tuple[str, ...], Layout] = {}
        self.arrivals.clear()

    def add_layout(self, names: tuple[str, ...]) -> Layout:
        places = {name: place for place, name in enumerate(names)}
        layout = Layout([(i, dim.field, places[dim.joint]) for i, dim in self.dims.items() if dim.joint in places])
        self.layouts[names] = layout
        return layout

    def newest_of(self, dimension: int) -> tuple[int, int] | None:
        return max(
            (layout.accepted for layout in self.layouts.values() if layout.accepted and dimension in layout.dimensions),
            default=None,
        )

    def newest(self) -> tuple[int, int] | None:
        behind: tuple[int, int] | None = None
        for dimension in self.dims:
            newest = self.newest_of(dimension)
            if newest is None:
                return None
            behind = newest if behind is None else min(behind, newest)
        return behind

    def laggard(self) -> str:
        """The joint that is longest behind, for people."""
        return min(((self.newest_of(i) or (0, 0)), dim.joint) for i, dim in self.dims.items())[1]


def seconds(duration_ns: int) -> str:
    """A time for people."""
    return f"{duration_ns / NS:.3f} s"
