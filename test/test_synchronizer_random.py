"""The synchroniser against a plain specification: random streams with jitter, drops, reordering and repeats."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from pi05_ros.streams import CameraInput, StateInput
from pi05_ros.synchronizer import SynchronizedSet, Synchronizer, SyncSettings

MS = 1_000_000
START_MS = 100_000
SLOP_MS, MAX_AGE_MS, JOINT_AGE_MS, FUTURE_MS = 20, 150, 200, 10
CAMERAS = {"anchor": CameraInput("a"), "left": CameraInput("l"), "extra": CameraInput("e", optional=True)}
STATE = (StateInput("arm", "a"), StateInput("arm", "b"), StateInput("hand", "grip", "effort"))


@dataclass(frozen=True)
class Event:
    """Something that happens at ``at`` (ms): an image or joints with a stamp, or a take."""

    at: int
    stream: str
    stamp: int = 0
    joints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Expected:
    """What the specification gives: stamps in ms of the images, and of each state dimension."""

    images: dict[str, int]
    state: tuple[int, ...]


class Specification:
    """Written down as said in words, with no thought for speed: every message is kept for ever."""

    def __init__(self, image_depth: int) -> None:
        self.image_depth = image_depth
        self.images: dict[str, list[int]] = {name: [] for name in CAMERAS}
        self.joints: list[tuple[str, tuple[str, ...], int]] = []
        self.taken = 0

    def add(self, event: Event) -> None:
        if not 0 < event.stamp <= event.at + FUTURE_MS:
            return
        if event.joints:
            if (event.stream, event.joints, event.stamp) not in self.joints:
                self.joints.append((event.stream, event.joints, event.stamp))
        elif event.stamp not in self.images[event.stream]:
            self.images[event.stream].append(event.stamp)

    def kept(self, camera: str) -> list[int]:
        return sorted(self.images[camera])[-self.image_depth :]

    def find(self, now: int, after: int) -> Expected | None:
        for anchor in sorted(self.kept("anchor"), reverse=True):
            if anchor <= after or now - anchor > MAX_AGE_MS:
                continue
            images = {"anchor": anchor}
            for camera in ("left", "extra"):
                young = [stamp for stamp in self.kept(camera) if now - stamp <= MAX_AGE_MS]
                near = [stamp for stamp in young if abs(stamp - anchor) <= SLOP_MS]
                if near:
                    images[camera] = min(near, key=lambda stamp: (abs(stamp - anchor), stamp))
                elif young or camera == "left":
                    break
            else:
                state = []
                for dim in STATE:
                    stamps = [
                        stamp
                        for source, names, stamp in self.joints
                        if source == dim.source and dim.joint in names and now - stamp <= JOINT_AGE_MS
                    ]
                    if stamps:
                        state.append(min(stamps, key=lambda stamp: (abs(stamp - anchor), stamp)))
                if len(state) == len(STATE):
                    return Expected(images, tuple(state))
        return None

    def in_order(self, now: int) -> bool:
        """No reason to complain: a set exists, or the last one is young and so is every input that is needed."""
        needed = [self.images["anchor"], self.images["left"]]
        for dim in STATE:
            needed.append(
                [stamp for source, names, stamp in self.joints if dim.source == source and dim.joint in names]
            )
        ages = [MAX_AGE_MS] * 2 + [JOINT_AGE_MS] * len(STATE)
        live = all(stamps and now - max(stamps) <= age for stamps, age in zip(needed, ages, strict=True))
        return self.find(now, 0) is not None or (live and now - self.taken <= MAX_AGE_MS)


def stamps_in_ms(taken: SynchronizedSet | None) -> Expected | None:
    if taken is None:
        return None
    for name, frame in taken.images.items():
        assert frame.payload == (name, frame.stamp_ns), "a payload changed its stamp"
        assert taken.input_stamps_ns[name] == frame.stamp_ns
    arm, hand = taken.state_stamps_ns[:2], taken.state_stamps_ns[2:]
    assert (taken.input_stamps_ns["arm"], taken.input_stamps_ns["hand"]) == (min(arm), min(hand))
    # Every value tells which joint and field it is and when it was sent.
    for value, stamp, offset in zip(taken.state, taken.state_stamps_ns, (0.25, 0.5, 0.75), strict=True):
        assert value == stamp // MS + offset
    assert taken.stamp_ns == taken.images["anchor"].stamp_ns
    return Expected(
        {name: frame.stamp_ns // MS for name, frame in taken.images.items()},
        tuple(stamp // MS for stamp in taken.state_stamps_ns),
    )


def play(events: list[Event], image_depth: int) -> tuple[int, int]:
    """Both sides through the same events; (sets given, takes)."""
    synchronizer = Synchronizer(
        CAMERAS,
        {"arm": "arm/joint_states", "hand": "hand/joint_states"},
        STATE,
        SyncSettings(
            anchor="anchor",
            slop_s=SLOP_MS / 1000,
            max_age_s=MAX_AGE_MS / 1000,
            max_age_by_stream={"arm": JOINT_AGE_MS / 1000, "hand": JOINT_AGE_MS / 1000},
            future_tolerance_s=FUTURE_MS / 1000,
            image_depth=image_depth,
        ),
    )
    specification = Specification(image_depth)
    given_sets = takes = 0
    for event in events:
        now_ns, stamp_ns = event.at * MS, event.stamp * MS
        if event.stream == "take":
            takes += 1
            pending = specification.find(event.at, specification.taken)
            reason = synchronizer.reason(now_ns)
            assert (reason is None) == specification.in_order(event.at), reason
            taken = synchronizer.take(now_ns)
            assert stamps_in_ms(taken) == pending
            if pending is not None:
                assert pending.images["anchor"] > specification.taken
                specification.taken = pending.images["anchor"]
                given_sets += 1
        elif event.joints:
            value = {"a": event.stamp + 0.25, "b": event.stamp + 0.5, "grip": event.stamp + 0.75, "other": 1e9}
            values = [value[joint] for joint in event.joints]
            nothing = [-1e9] * len(values)
            hand = event.stream == "hand"
            synchronizer.add_joints(
                event.stream, stamp_ns, now_ns, event.joints, nothing if hand else values, (), values if hand else ()
            )
            specification.add(event)
        else:
            synchronizer.add_image(event.stream, stamp_ns, now_ns, (event.stream, stamp_ns))
            specification.add(event)
    for report in synchronizer.reports(events[-1].at * MS if events else START_MS * MS):
        assert report.dropped <= report.received
    return given_sets, takes


def random_streams(choose: random.Random, length: int, faults: float) -> list[Event]:
    """Periodic streams for ``length`` ms; some messages are lost, late, repeated or stamped wrongly.

    Often all times lie on a coarse grid, so that stamps meet limits exactly and neighbours are equally near.
    """
    grid = choose.choice([1, 5, 10])

    def on_grid(time_ms: int) -> int:
        return time_ms // grid * grid

    layouts: dict[str, tuple[tuple[str, ...], ...]] = {
        "anchor": ((),),
        "left": ((),),
        "extra": ((),),
        "arm": choose.choice([(("a", "b"),), (("a",), ("b",)), (("a", "b"), ("b", "a", "other"), ("b",))]),
        "hand": (("grip",),),
    }
    events: list[Event] = []
    for stream, names in layouts.items():
        if stream == "extra" and choose.random() < 0.3:
            continue
        period, jitter, latency = choose.randint(10, 60), choose.randint(0, 8), choose.randint(0, 40)
        start, end = choose.choice([0, 0, 100]), choose.choice([length, length, length // 2])
        for nominal in range(START_MS + start + choose.randint(0, period), START_MS + end, period):
            stamp = on_grid(nominal + choose.randint(-jitter, jitter))
            at = on_grid(stamp + latency)
            fate = choose.choice(["lost", "slow", "twice", "zero", "future"]) if choose.random() < faults else "sent"
            if fate == "slow":
                at += on_grid(choose.randint(0, 250))
            elif fate == "zero":
                stamp = 0
            elif fate == "future":
                stamp = at + on_grid(choose.randint(0, 3 * FUTURE_MS))
            events += [Event(at, stream, stamp, choose.choice(names))] * (fate != "lost")
            if fate == "twice":
                events.append(Event(at + on_grid(choose.randint(0, 30)), stream, stamp, events[-1].joints))
    at = START_MS
    while at < START_MS + length:
        at += choose.choice([0, 5, 10, 10, 10, 20, 150])
        events.append(Event(at, "take"))
    # Messages of the same instant come in any order; a take sees all that came at its instant.
    choose.shuffle(events)
    return sorted(events, key=lambda event: (event.at, event.stream == "take"))


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(10, 600),
    faults=st.sampled_from([0.0, 0.1, 0.4]),
    image_depth=st.sampled_from([1, 2, 4, 16]),
)
def test_every_take_gives_what_the_specification_says(seed: int, length: int, faults: float, image_depth: int) -> None:
    play(random_streams(random.Random(seed), length, faults), image_depth)


def test_the_random_streams_do_make_sets() -> None:
    counts = [play(random_streams(random.Random(seed), 500, 0.1), 16) for seed in range(40)]
    given_sets, takes = (sum(column) for column in zip(*counts, strict=True))
    assert given_sets > takes / 10


def steady(latencies: dict[str, int], take_every: int, lost: dict[str, set[int]] | None = None) -> list[Event]:
    """30 Hz cameras and 50 Hz joints for 2 s, each with its latency in ms."""
    events = []
    for stream in ("anchor", "left", "extra"):
        for number in range(60):
            stamp = START_MS + round(number * 1000 / 30) + len(stream)
            if number not in (lost or {}).get(stream, set()):
                events.append(Event(stamp + latencies.get(stream, 5), stream, stamp))
    for number in range(100):
        stamp = START_MS + 20 * number
        events.append(Event(stamp + latencies.get("arm", 1), "arm", stamp, ("a", "b")))
        events.append(Event(stamp + latencies.get("arm", 1), "hand", stamp, ("grip",)))
    events += [Event(START_MS + at, "take") for at in range(0, 2000, take_every)]
    return sorted(events, key=lambda event: (event.at, event.stream == "take"))


def test_a_steady_robot_loses_no_anchor_image() -> None:
    for latencies in ({}, {"left": 60}, {"anchor": 90}, {"extra": 80, "arm": 70}):
        given_sets, _ = play(steady(latencies, take_every=10), image_depth=16)
        assert given_sets >= 57


def test_lost_frames_cost_only_the_sets_that_need_them() -> None:
    given_sets, _ = play(steady({}, take_every=10, lost={"left": {10, 20, 21, 30}}), image_depth=16)
    assert given_sets == 60 - 4
