"""Which messages belong together, case by case; time is given, nothing sleeps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from pi05_ros.errors import ConfigurationError
from pi05_ros.streams import CameraInput, StateInput
from pi05_ros.synchronizer import StreamReport, SynchronizedSet, Synchronizer, SyncSettings

MS = 1_000_000
S = 1000 * MS
T = 50 * S  # some time on the clock
CAMERAS = {"front": CameraInput("front/image"), "wrist": CameraInput("wrist/image")}
STATE = (StateInput("arm", "a"), StateInput("arm", "b"))


class Streams:
    """A synchroniser for two cameras and one arm; messages arrive 1 ms after their stamp."""

    def __init__(
        self,
        cameras: dict[str, CameraInput] | None = None,
        state: Sequence[StateInput] = STATE,
        same_picture: Any = None,
        **settings: Any,
    ) -> None:
        self.synchronizer = Synchronizer(
            cameras or CAMERAS,
            {dim.source: f"{dim.source}/joint_states" for dim in state},
            state,
            SyncSettings(**{"anchor": "front", **settings}),
            same_picture,
        )

    def image(self, camera: str, stamp: int, arrival: int | None = None, payload: Any = None) -> str:
        """The code of the refusal, or an empty string."""
        refusal = self.synchronizer.add_image(camera, stamp, stamp + MS if arrival is None else arrival, payload)
        return refusal[0] if refusal else ""

    def joints(self, stamp: int, names: str = "ab", arrival: int | None = None, source: str = "arm") -> str:
        values = [stamp / S + index for index, _ in enumerate(names)]
        arrival = stamp + MS if arrival is None else arrival
        refusal = self.synchronizer.add_joints(source, stamp, arrival, list(names), values, (), ())
        return refusal[0] if refusal else ""

    def everything(self, stamp: int) -> None:
        for camera in CAMERAS:
            assert self.image(camera, stamp) == ""
        assert self.joints(stamp) == ""

    def take(self, now: int) -> SynchronizedSet | None:
        return self.synchronizer.take(now)

    def reason(self, now: int) -> tuple[str, str]:
        return self.synchronizer.reason(now) or ("", "")

    def report(self, name: str, now: int) -> StreamReport:
        return next(report for report in self.synchronizer.reports(now) if report.name == name)


def test_an_anchor_image_is_given_once() -> None:
    streams = Streams()
    streams.everything(T)
    taken = streams.take(T + 2 * MS)
    assert taken is not None and taken.stamp_ns == T
    assert taken.input_stamps_ns == {"front": T, "wrist": T, "arm": T}
    assert taken.newest_receive_ns == T + MS
    assert not streams.synchronizer.pending
    assert streams.take(T + 2 * MS) is None
    assert streams.reason(T + 2 * MS) == ("", "")
    assert streams.image("wrist", T + 3 * MS) == ""
    assert streams.take(T + 4 * MS) is None, "a new wrist image does not make the anchor a new one"


def test_the_newest_set_wins() -> None:
    streams = Streams()
    for frame in range(5):
        streams.everything(T + frame * 33 * MS)
    taken = streams.take(T + 140 * MS)
    assert taken is not None and taken.stamp_ns == T + 132 * MS
    assert streams.take(T + 140 * MS) is None, "what is older than a set that was given is never given"


def test_limits_are_meant_exactly() -> None:
    for beyond in (0, 1):
        streams = Streams(slop_s=0.02, max_age_s=0.1)
        streams.everything(T)
        assert (streams.take(T + 100 * MS + beyond) is None) == bool(beyond), "age"
        streams = Streams(slop_s=0.02)
        streams.image("front", T)
        streams.joints(T)
        streams.image("wrist", T - 20 * MS - beyond)
        assert (streams.take(T + 2 * MS) is None) == bool(beyond), "slop"
        streams = Streams(future_tolerance_s=0.05)
        assert bool(streams.image("front", T + 50 * MS + beyond, arrival=T)) == bool(beyond), "future"


def test_every_stream_may_have_its_own_age_limit() -> None:
    streams = Streams(slop_s=1.0, max_age_s=0.1, max_age_by_stream={"wrist": 0.4, "arm": 0.3})
    streams.image("wrist", T)
    streams.joints(T + 100 * MS)
    streams.image("front", T + 350 * MS)
    assert streams.take(T + 400 * MS) is not None
    streams.image("front", T + 390 * MS)
    assert streams.take(T + 401 * MS) is None
    code, sentence = streams.reason(T + 401 * MS)
    assert code == "input.stale" and "camera wrist (wrist/image)" in sentence and "0.400 s" in sentence


def test_a_slow_camera_serves_several_anchor_images() -> None:
    streams = Streams(slop_s=0.05)
    streams.image("wrist", T)
    for frame in range(-5, 6):
        streams.image("front", T + frame * 10 * MS, arrival=T + 60 * MS + frame * MS)
        streams.joints(T + frame * 10 * MS)
        taken = streams.take(T + 70 * MS)
        assert taken is not None and taken.images["wrist"].stamp_ns == T, frame


def test_messages_may_come_in_any_order() -> None:
    streams = Streams()
    for stamp in (T + 66 * MS, T, T + 33 * MS):
        assert streams.image("wrist", stamp, arrival=T + 80 * MS) == ""
        assert streams.joints(stamp, arrival=T + 80 * MS) == ""
        assert streams.image("front", stamp + 5 * MS, arrival=T + 80 * MS) == ""
    taken = streams.take(T + 80 * MS)
    assert taken is not None
    assert (taken.stamp_ns, taken.images["wrist"].stamp_ns) == (T + 71 * MS, T + 66 * MS)
    assert streams.image("front", T + 60 * MS, arrival=T + 81 * MS) == "input.late"
    assert streams.report("front", T + 81 * MS).dropped == 1


@pytest.mark.parametrize("stream", ["front", "wrist", "arm"])
def test_zero_and_future_stamps_are_refused_by_name(stream: str) -> None:
    streams = Streams()

    def send(stamp: int, arrival: int) -> str:
        if stream == "arm":
            return streams.joints(stamp, arrival=arrival)
        return streams.image(stream, stamp, arrival=arrival)

    assert send(0, T) == "input.zero_stamp"
    assert streams.report(stream, T).last_error.startswith("input.zero_stamp: ")
    assert send(T + S, T) == "input.future_stamp"
    report = streams.report(stream, T)
    assert (report.state, report.received, report.dropped, report.age) == ("waiting", 2, 2, -1.0)
    code, sentence = streams.reason(T)
    assert code == "input.future_stamp" and f" {stream} (" in sentence
    assert "51.000 s" in sentence and "50.000 s" in sentence


def test_receive_stamps_need_no_header() -> None:
    streams = Streams(stamp_source="receive")
    streams.image("front", 0, arrival=T)
    streams.image("wrist", T + 100 * S, arrival=T + 10 * MS)
    streams.joints(0, arrival=T + 5 * MS)
    taken = streams.take(T + 11 * MS)
    assert taken is not None
    assert taken.input_stamps_ns == {"front": T, "wrist": T + 10 * MS, "arm": T + 5 * MS}


def test_a_repeated_stamp_is_dropped() -> None:
    streams = Streams()
    streams.everything(T)
    assert streams.image("front", T, arrival=T + 10 * MS) == "input.repeated_stamp"
    assert streams.joints(T, arrival=T + 10 * MS) == "input.repeated_stamp"
    assert streams.report("front", T + 10 * MS).dropped == 1
    # A driver that repeats its last frame for ever is as good as dead.
    for again in range(1, 100):
        streams.image("front", T, arrival=T + again * 30 * MS)
    code, sentence = streams.reason(T + 3 * S)
    assert code == "input.dead" and "camera front" in sentence and "repeated_stamp" in sentence


def test_partial_joint_states_are_merged_by_joint_each_with_its_own_stamp() -> None:
    streams = Streams()
    streams.joints(T, "b")
    streams.joints(T + 40 * MS, "a")
    streams.joints(T + 60 * MS, "a")
    streams.image("front", T + 45 * MS)
    streams.image("wrist", T + 45 * MS)
    taken = streams.take(T + 70 * MS)
    assert taken is not None
    assert taken.state_stamps_ns == (T + 40 * MS, T)
    assert taken.state == (T / S + 0.04, T / S)
    assert taken.input_stamps_ns["arm"] == T, "the oldest joint"


def test_the_joint_that_stays_behind_is_named() -> None:
    streams = Streams()
    streams.joints(T, "b")
    streams.joints(T, "a")
    for step in range(30):
        now = T + step * 100 * MS
        streams.joints(now + MS, "a")
        streams.image("front", now + 2 * MS)
        streams.image("wrist", now + 2 * MS)
    now = T + 2902 * MS
    assert streams.take(now) is None
    code, sentence = streams.reason(now)
    assert code == "input.dead" and "joint b" in sentence and "arm/joint_states" in sentence
    assert streams.report("arm", now).state == "dead"


def test_a_fast_publisher_does_not_push_out_a_slow_one_on_the_same_topic() -> None:
    streams = Streams(joint_depth=4)
    streams.joints(T, "b")
    for step in range(1, 200):
        streams.joints(T + step * MS, "a")
    streams.image("front", T + 150 * MS)
    streams.image("wrist", T + 150 * MS)
    taken = streams.take(T + 201 * MS)
    assert taken is not None and taken.state_stamps_ns == (T + 196 * MS, T)


def test_a_missing_joint_is_named_with_what_came() -> None:
    streams = Streams()
    streams.joints(T, "ac")
    code, sentence = streams.reason(T + 2 * MS)
    assert code == "input.joint_missing"
    assert "['b']" in sentence and "['a', 'c']" in sentence and "arm/joint_states" in sentence
    streams = Streams()
    assert streams.joints(T, "xy") == "input.joint_missing"
    assert streams.report("arm", T).dropped == 1


def test_malformed_joint_states_are_refused() -> None:
    state = (StateInput("arm", "a"), StateInput("arm", "b", "velocity"))
    synchronizer = Streams(state=state).synchronizer

    def send(names: list[str], position: list[float], velocity: list[float]) -> str:
        refusal = synchronizer.add_joints("arm", T, T, names, position, velocity, ())
        return ": ".join(refusal) if refusal else ""

    short = send(["a", "b", "c"], [1.0, 2.0], [0.0] * 3)
    assert short.startswith("input.malformed") and "3 values of position" in short and "got 2" in short
    assert "3 values of velocity" in send(["a", "b", "c"], [1.0] * 3, [0.0] * 4)
    assert "velocity of ['a', 'b'] expected, got none" in send(["a", "b"], [1.0, 2.0], [])
    assert "position of ['a', 'b'] expected, got none" in send(["a", "b"], [], [1.0, 2.0])
    assert "['a'] more than once" in send(["a", "a", "b"], [1.0, 2.0, 3.0], [0.0] * 3)
    assert send(["a", "b"], [1.0, 2.0], [3.0, 4.0]) == ""


def test_endlessly_new_joint_names_do_not_fill_the_memory() -> None:
    streams = Streams()
    refusals = [
        streams.synchronizer.add_joints("arm", T + i, T + i, ["a", "b", f"joint_{i}"], [0.0] * 3, (), ())
        for i in range(100)
    ]
    assert sum(refusal is not None and refusal[0] == "input.malformed" for refusal in refusals) == 84
    streams.synchronizer.clock_jumped(T)
    assert streams.joints(T) == ""


def test_each_dimension_is_read_from_its_field() -> None:
    state = (StateInput("arm", "a", "effort"), StateInput("arm", "a", "position"), StateInput("arm", "a", "velocity"))
    streams = Streams(state=state)
    streams.image("front", T)
    streams.image("wrist", T)
    streams.synchronizer.add_joints("arm", T, T, ["a"], [1.0], [2.0], [3.0])
    taken = streams.take(T + MS)
    assert taken is not None and taken.state == (3.0, 1.0, 2.0)


def test_an_optional_camera_may_be_absent_but_not_out_of_step() -> None:
    cameras = {**CAMERAS, "wrist": CameraInput("wrist/image", optional=True)}
    streams = Streams(cameras)
    streams.image("front", T)
    streams.joints(T)
    taken = streams.take(T + 2 * MS)
    assert taken is not None and list(taken.images) == ["front"]
    assert streams.reason(T + 2 * MS) == ("", "")
    # Now it lives; a set without it would be another input to the model.
    streams.image("wrist", T + 10 * MS)
    streams.image("front", T + 100 * MS)
    streams.joints(T + 100 * MS)
    assert streams.take(T + 102 * MS) is None
    streams.image("wrist", T + 100 * MS)
    taken = streams.take(T + 103 * MS)
    assert taken is not None and list(taken.images) == ["front", "wrist"]
    # Once it has stopped for its maximum age, the others go on.
    streams.image("front", T + 700 * MS)
    streams.joints(T + 700 * MS)
    taken = streams.take(T + 702 * MS)
    assert taken is not None and list(taken.images) == ["front"]
    assert streams.report("wrist", T + 702 * MS).state == "stale"


def test_what_is_missing_is_named_in_order_of_urgency() -> None:
    streams = Streams()
    assert streams.reason(T)[0] == "input.waiting" and "camera front (front/image)" in streams.reason(T)[1]
    streams.image("front", T)
    streams.joints(T)
    code, sentence = streams.reason(T + MS)
    assert code == "input.waiting" and "camera wrist (wrist/image)" in sentence
    streams.image("wrist", T)
    assert streams.reason(T + MS) == ("", "")
    for step in range(1, 30):
        streams.image("wrist", T + step * 100 * MS)
        streams.joints(T + step * 100 * MS)
        now = T + step * 100 * MS + 2 * MS
        state = streams.report("front", now).state
        assert state == ("live" if step < 5 else "stale" if step < 20 else "dead"), step
        if step >= 5:
            code, sentence = streams.reason(now)
            assert code == f"input.{state}" and "camera front (front/image)" in sentence
    streams.image("front", now)
    assert streams.reason(now + 2 * MS) == ("", ""), "a stream that returns is used at once"
    assert streams.take(now + 2 * MS) is not None


def test_cameras_that_do_not_meet_are_named_with_their_distance() -> None:
    streams = Streams(slop_s=0.02)
    for frame in range(10):
        streams.image("front", T + frame * 100 * MS)
        streams.image("wrist", T + frame * 100 * MS + 40 * MS)
        streams.joints(T + frame * 100 * MS)
    now = T + 945 * MS
    assert streams.take(now) is None
    code, sentence = streams.reason(now)
    assert code == "input.unsynchronised"
    assert "camera wrist" in sentence and "camera front" in sentence
    assert "0.02 s" in sentence and "0.040 s after it" in sentence
    for name in ("front", "wrist"):
        report = streams.report(name, now)
        assert report.dropped >= 4 and "input.unsynchronised" in report.last_error


def test_frames_that_were_merely_overtaken_are_not_drops() -> None:
    streams = Streams()
    for frame in range(90):
        streams.everything(T + frame * 33 * MS)
        if frame % 10 == 9:
            assert streams.take(T + frame * 33 * MS + 2 * MS) is not None
    for report in streams.synchronizer.reports(T + 3 * S):
        assert (report.received, report.dropped, report.last_error) == (90, 0, "")


def test_a_late_camera_is_counted_per_stream() -> None:
    streams = Streams(max_age_s=0.2)
    for frame in range(30):
        stamp = T + frame * 33 * MS
        streams.image("front", stamp)
        streams.joints(stamp)
        streams.image("wrist", stamp - 10 * S, arrival=stamp + 2 * MS)
        assert streams.take(stamp + 3 * MS) is None
    now = T + 960 * MS
    assert streams.report("wrist", now).dropped == 30
    assert streams.report("front", now).dropped > 20, "these had no partner"
    assert streams.report("arm", now).dropped == 0
    code, sentence = streams.reason(now)
    assert code == "input.stale" and "camera wrist" in sentence and "10.0" in sentence


def test_rates_follow_what_arrives() -> None:
    streams = Streams()
    for frame in range(90):
        streams.everything(T + frame * S // 30)
    now = T + 3 * S
    assert streams.report("front", now).rate_hz == pytest.approx(30.0, rel=0.02)
    assert streams.report("front", now).age == pytest.approx(1 / 30)
    assert 0.0 < streams.report("front", now + S).rate_hz < 20.0
    assert streams.report("front", now + 3 * S).rate_hz == 0.0


def same(one: Any, other: Any) -> bool:
    return bool(one == other)


def test_a_frozen_picture_is_refused_until_it_changes() -> None:
    streams = Streams(same_picture=same, detect_frozen=True, frozen_after_s=0.5)
    given = []
    for frame in range(40):
        stamp = T + frame * 50 * MS
        streams.image("front", stamp, payload=frame)
        streams.image("wrist", stamp, payload=0 if frame < 30 else frame)
        streams.joints(stamp)
        given.append(streams.take(stamp + 2 * MS) is not None)
        if 11 <= frame < 30:
            code, sentence = streams.reason(stamp + 2 * MS)
            assert code == "input.frozen" and "camera wrist (wrist/image)" in sentence
            assert "input.frozen" in streams.report("wrist", stamp).last_error
        elif frame >= 30:
            assert streams.reason(stamp + 2 * MS) == ("", "")
    assert given == [True] * 10 + [False] * 20 + [True] * 10


def test_a_still_scene_is_no_error_unless_asked_for() -> None:
    streams = Streams(same_picture=same)
    for frame in range(40):
        streams.everything(T + frame * 50 * MS)
        assert streams.take(T + frame * 50 * MS + 2 * MS) is not None


def test_a_camera_slower_than_the_anchor_is_not_frozen() -> None:
    streams = Streams(same_picture=same, detect_frozen=True, frozen_after_s=0.1, slop_s=0.3)
    streams.image("wrist", T, payload=0)
    for frame in range(6):
        streams.image("front", T + frame * 50 * MS, payload=frame)
        streams.joints(T + frame * 50 * MS)
        assert streams.take(T + frame * 50 * MS + 2 * MS) is not None


def test_when_the_clock_jumps_back_everything_begins_anew() -> None:
    for told in (False, True):
        streams = Streams()
        streams.everything(T)
        assert streams.take(T + 2 * MS) is not None
        streams.everything(T + 33 * MS)
        earlier = T - 30 * S
        if told:
            streams.synchronizer.clock_jumped(earlier)
        assert streams.take(earlier) is None, "a set from the future of this clock"
        assert streams.reason(earlier)[0] == "input.waiting"
        streams.everything(earlier)
        taken = streams.take(earlier + 2 * MS)
        assert taken is not None and taken.stamp_ns == earlier
        assert streams.report("front", earlier).received == 3, "counters go on"


def test_when_the_clock_jumps_ahead_nothing_old_is_given() -> None:
    streams = Streams()
    streams.everything(T)
    assert streams.take(T + 60 * S) is None
    assert streams.reason(T + 60 * S)[0] == "input.dead"
    streams.everything(T + 60 * S)
    assert streams.take(T + 60 * S + 2 * MS) is not None


def test_simulated_time_that_has_not_begun_is_named() -> None:
    assert Streams().reason(0)[0] == "input.clock"


def test_an_image_that_cannot_be_used_is_handed_back() -> None:
    streams = Streams()
    streams.everything(T)
    streams.everything(T + 33 * MS)
    now = T + 40 * MS
    first = streams.take(now)
    assert first is not None and first.stamp_ns == T + 33 * MS
    streams.synchronizer.hand_back(first, "wrist", "observation.image_corrupt", "broken", now)
    second = streams.take(now)
    assert second is not None, "the anchor image is free again"
    assert (second.stamp_ns, second.images["wrist"].stamp_ns) == (T + 33 * MS, T)
    streams.synchronizer.hand_back(second, "wrist", "observation.image_corrupt", "broken", now)
    assert streams.take(now) is None
    report = streams.report("wrist", now)
    assert (report.state, report.dropped) == ("waiting", 2), "nothing usable has ever come"
    assert streams.reason(now) == ("observation.image_corrupt", "broken")
    streams.everything(T + 66 * MS)
    assert streams.take(T + 70 * MS) is not None


def test_a_stream_whose_images_turn_bad_ages_into_dead() -> None:
    streams = Streams()
    streams.everything(T)
    good = streams.take(T + 2 * MS)
    assert good is not None
    streams.synchronizer.accept(good)
    for frame in range(1, 80):
        stamp = T + frame * 33 * MS
        streams.everything(stamp)
        while (taken := streams.take(stamp + 2 * MS)) is not None:
            streams.synchronizer.hand_back(taken, "wrist", "observation.image_corrupt", "broken", stamp + 2 * MS)
        streams.image("wrist", stamp + 10 * MS)
        expected = "live" if frame <= 14 else "stale" if frame <= 60 else "dead"
        assert streams.report("wrist", stamp + 12 * MS).state == expected, (
            "a frame that nobody looked at proves nothing"
        )
    code, sentence = streams.reason(T + 79 * 33 * MS + 2 * MS)
    assert code == "input.dead" and "camera wrist" in sentence and "broken" in sentence
    streams.everything(T + 3 * S)
    good = streams.take(T + 3 * S + 2 * MS)
    assert good is not None
    streams.synchronizer.accept(good)
    assert streams.reason(T + 3 * S + 2 * MS) == ("", "")
    assert streams.report("wrist", T + 3 * S + 2 * MS).state == "live"


def test_an_optional_camera_that_turns_bad_is_left_out_once_it_is_stale() -> None:
    streams = Streams({**CAMERAS, "wrist": CameraInput("wrist/image", optional=True)}, slop_s=0.01)
    given = []
    for frame in range(30):
        stamp = T + frame * 33 * MS
        streams.everything(stamp)
        while (taken := streams.take(stamp + 2 * MS)) is not None:
            if frame == 0 or "wrist" not in taken.images:
                streams.synchronizer.accept(taken)
                given.append((frame, list(taken.images)))
                break
            streams.synchronizer.hand_back(taken, "wrist", "observation.image_corrupt", "broken", stamp + 2 * MS)
    assert given == [(0, ["front", "wrist"])] + [(frame, ["front"]) for frame in range(16, 30)]


def test_buffers_are_bounded() -> None:
    class Payload:
        pass

    streams = Streams(image_depth=8, max_age_s=100.0, max_age_by_stream={})
    alive: list[weakref.ref[Payload]] = []
    for frame in range(500):
        payload = Payload()
        alive.append(weakref.ref(payload))
        streams.image("front", T + frame * MS, payload=payload)
        streams.joints(T + frame * MS)
    del payload
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"anchor": None}, "front"),
        ({"anchor": "top"}, "top"),
        ({"slop_s": -1.0}, "slop_s"),
        ({"slop_s": float("nan")}, "slop_s"),
        ({"max_age_s": 0.0}, "max_age_s"),
        ({"max_age_by_stream": {"top": 1.0}}, "top"),
        ({"max_age_by_stream": {"front": -1.0}}, "front"),
        ({"stamp_source": "guess"}, "guess"),
        ({"image_depth": 0}, "image_depth"),
        ({"detect_frozen": True}, "detect_frozen"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as caught:
        Streams(**changes)
    assert caught.value.code == "config.sync"


def test_inputs_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="anchor"):
        Streams({"front": CameraInput("t", optional=True)})
    with pytest.raises(ConfigurationError, match="different names"):
        Streams(state=[StateInput("wrist", "a")])
    with pytest.raises(ConfigurationError, match="hand"):
        Synchronizer(CAMERAS, {"arm": "t"}, [StateInput("hand", "a")], SyncSettings(anchor="front"))
