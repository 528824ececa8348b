"""Profiles and a live graph: drafts leave open what nobody can know, and what does not fit is named."""

from __future__ import annotations

import array
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rclpy.qos import QoSProfile, ReliabilityPolicy
from ros_helpers import Graph, jpeg, repeating
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.checkpoint.formats import open_checkpoint
from pi05_ros.cli import main
from pi05_ros.errors import ConfigurationError, ProfileError
from pi05_ros.paths import builtin_checkpoint
from pi05_ros.profile import load_profile, open_questions, parse_profile
from pi05_ros.survey import COMPRESSED, IMAGE, JOINTS, SeenJoint, SeenPublisher, SeenTopic, Survey
from pi05_ros.synchronizer import SyncSettings
from pi05_ros.tools.live_check import compare
from pi05_ros.tools.profile_draft import draft_profile, write_draft

ARM = {
    "name": "arm",
    "cameras": {
        "front": {"slot": "base_0_rgb", "topic": "front/image_raw"},
        "wrist": {"slot": "left_wrist_0_rgb", "topic": "wrist/compressed", "type": "compressed"},
    },
    "absent_slots": ["right_wrist_0_rgb"],
    "anchor": "front",
    "state": {
        "sources": {"joints": {"topic": "joint_states"}},
        "dims": [{"name": "shoulder", "unit": "rad"}, {"name": "gripper", "unit": "fraction"}],
    },
    "action": {"dims": [{"name": "shoulder", "unit": "rad", "control": "position"}]},
    "timing": {"rate_hz": 10},
}
NAMES = {
    "front/image_raw": "/front/image_raw",
    "wrist/compressed": "/wrist/compressed",
    "joint_states": "/joint_states",
}
NUMBER = SeenJoint(frozenset({"position"}))


def publisher(kind: str, node: str = "/driver", qos_problem: str = "") -> SeenPublisher:
    return SeenPublisher(node, kind, qos_problem)


HEALTHY = {
    "/front/image_raw": SeenTopic(
        "/front/image_raw", (publisher(IMAGE),), 60, 30.0, pictures=(("rgb8", 640, 480),), lead_s=-0.001, age_s=0.004
    ),
    "/wrist/compressed": SeenTopic(
        "/wrist/compressed", (publisher(COMPRESSED),), 60, 30.0, pictures=(("jpeg", 640, 480),), age_s=0.01
    ),
    "/joint_states": SeenTopic(
        "/joint_states",
        (publisher(JOINTS),),
        100,
        50.0,
        layouts=(("gripper", "shoulder"),),
        joints={"gripper": NUMBER, "shoulder": NUMBER},
    ),
}  # fmt: skip


def survey(**changes: Any) -> Survey:
    """A healthy survey in which topics, by the first word of their name, are changed."""
    topics = dict(HEALTHY)
    for word, change in changes.items():
        name = next(name for name in topics if name[1:].startswith(word))
        topics[name] = replace(topics[name], **change)
    return Survey(2.0, topics, observations=20)


def findings(seen: Survey, settings: SyncSettings | None = None) -> list[str]:
    found = compare(parse_profile(ARM, "arm.yaml"), seen, NAMES, settings)
    return [f"{finding.level} {finding.subject}: {finding.sentence}" for finding in found]


def test_a_graph_that_fits_gives_no_finding() -> None:
    assert findings(survey()) == []


TWO = (publisher(IMAGE, "/one"), publisher(IMAGE, "/two"))
TWO_ARMS = (publisher(JOINTS, "/one"), publisher(JOINTS, "/two"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"front": {"publishers": (), "messages": 0}}, ["error camera front", "no node publishes /front/image_raw"]),
        ({"front": {"publishers": (publisher(COMPRESSED),)}}, ["error camera front", IMAGE, COMPRESSED, "/driver"]),
        ({"front": {"publishers": (publisher(IMAGE, qos_problem="asks x"),)}}, ["error camera front", "asks x"]),
        ({"front": {"messages": 0}}, ["error camera front", "no message came"]),
        ({"front": {"publishers": TWO}}, ["error camera front", "/one", "/two", "take turns"]),
        ({"joint": {"publishers": TWO_ARMS}}, ["error state source joints", "/one", "/two", "take turns"]),
        (
            {"joint": {"publishers": TWO_ARMS, "layouts": (("shoulder",), ("gripper",))}},
            ["note state source joints", "each with joints of its own"],
        ),
        ({"joint": {"layouts": (("a",),), "joints": {"a": NUMBER}}}, ["['shoulder', 'gripper']", "['a']"]),
        ({"joint": {"layouts": (("gripper", "shoulder", "shoulder"),)}}, ["['shoulder']", "twice"]),
        (
            {"joint": {"joints": {"gripper": NUMBER, "shoulder": SeenJoint(frozenset({"velocity"}))}}},
            ["error state source joints", "position of shoulder", "velocity"],
        ),
        (
            {"joint": {"joints": {"gripper": NUMBER, "shoulder": SeenJoint(frozenset({"position"}), True)}}},
            ["error state source joints", "shoulder", "NaN"],
        ),
        ({"wrist": {"unreadable": ("observation.image_encoding: mono8",)}}, ["error camera wrist", "mono8"]),
        ({"wrist": {"pictures": (("jpeg", 640, 480), ("jpeg", 320, 240))}}, ["error camera wrist", "(320, 240)"]),
        ({"wrist": {"pictures": (("jpeg", 224, 224),)}}, ["note camera wrist", "224x224", "padding"]),
        ({"front": {"zero_stamps": 60}}, ["error camera front", "60 of 60", "zero", "stamp_source"]),
        ({"front": {"lead_s": 0.2}}, ["error camera front", "0.200 s ahead", "0.05"]),
        ({"front": {"age_s": 3.0}}, ["error camera front", "3.000 s old", "0.5"]),
        ({"front": {"rate_hz": 1.0}}, ["error camera front", "1.0 messages", "0.5 s"]),
        ({"front": {"rate_hz": 5.0}}, ["note camera front", "5.0 messages", "training data had 10"]),
    ],
)  # fmt: skip
def test_every_difference_is_named(changes: dict[str, Any], said: list[str]) -> None:
    (finding,) = findings(survey(**changes))
    for part in said:
        assert part in finding


def test_stamps_do_not_count_where_arrival_does() -> None:
    seen = survey(front={"zero_stamps": 60}, wrist={"lead_s": 9.0}, joint={"age_s": 9.0})
    assert len(findings(seen)) == 3
    assert findings(seen, SyncSettings(stamp_source="receive")) == []


def test_inputs_that_never_meet_are_named() -> None:
    seen = replace(survey(), observations=0, reason="input.unsynchronised: camera wrist")
    assert findings(seen) == ["error observations: none could be made in 2 s: input.unsynchronised: camera wrist"]


def draft_of(seen: Survey, **changes: Any) -> dict[str, Any]:
    checkpoint = replace(open_checkpoint(builtin_checkpoint()), **changes)
    content = draft_profile("arm", seen, checkpoint)
    written = yaml.safe_load(write_draft(content, seen, checkpoint))
    assert written == content
    with pytest.raises(ProfileError) as caught:
        parse_profile(written, "arm.yaml")
    assert caught.value.code == "profile.open_question"
    for key, question in open_questions(content):
        assert f"{key}: {question}" in str(caught.value)
    return content


def questions(content: dict[str, Any]) -> set[str]:
    return {key for key, _ in open_questions(content)}


def test_what_the_checkpoint_states_is_not_asked() -> None:
    content = draft_of(survey())
    asked = questions(content)
    assert {
        "cameras.front.slot",
        "cameras.wrist.slot",
        "anchor",
        "absent_slots",
        "state.order",
        "timing.rate_hz",
    } <= asked
    assert "timing.executed_steps" not in asked and "action.order" not in asked
    assert not any("relative" in key or key.endswith(".name") for key in asked)
    assert [dim["name"] for dim in content["action"]["dims"]][-1] == "gripper"
    assert [dim["name"] for dim in content["state"]["dims"]] == ["gripper", "shoulder"]


def test_what_openpi_leaves_open_is_asked() -> None:
    content = draft_of(
        survey(), format="openpi", action_names=None, executed_steps=None, state_in_prompt=None, action_dim=32
    )
    asked = questions(content)
    assert {"timing.executed_steps", "model.state_in_prompt", "action.order", "action.dims.0.relative"} <= asked


def test_a_lerobot_action_without_names_has_its_width() -> None:
    content = draft_of(survey(), action_names=None)
    assert {f"action.dims.{index}.name" for index in range(7)} <= questions(content)


def test_only_an_equal_name_or_alias_feeds_a_slot() -> None:
    topics = {
        f"/{name}/image_raw": replace(HEALTHY["/front/image_raw"], topic=f"/{name}/image_raw")
        for name in ("base_0_rgb", "right_wrist", "left_wrist_0_rgb_2")
    }
    seen = Survey(1.0, {**topics, "/joint_states": HEALTHY["/joint_states"]})
    content = draft_of(seen, camera_aliases={"right_wrist": "right_wrist_0_rgb"})
    cameras = content["cameras"]
    assert cameras["base_0_rgb"]["slot"] == "base_0_rgb"
    assert cameras["right_wrist"]["slot"] == "right_wrist_0_rgb"
    assert cameras["left_wrist_0_rgb_2"]["slot"].startswith("?: which slot")
    assert "left_wrist_0_rgb" in content["absent_slots"] and "'base_0_rgb'" not in content["absent_slots"]


def test_two_ways_to_one_camera_are_a_question() -> None:
    both = {
        "/front/image_raw": HEALTHY["/front/image_raw"],
        "/front/image_raw/compressed": replace(HEALTHY["/wrist/compressed"], topic="/front/image_raw/compressed"),
        "/joint_states": HEALTHY["/joint_states"],
    }
    content = draft_of(Survey(1.0, both))
    assert list(content["cameras"]) == ["front"]
    assert {"cameras.front.topic", "cameras.front.type"} <= questions(content)


def test_unusable_and_silent_topics_are_said() -> None:
    depth = replace(HEALTHY["/front/image_raw"], topic="/depth/image", pictures=(), unreadable=("16UC1 is no colour",))
    silent = replace(HEALTHY["/front/image_raw"], topic="/side/image", pictures=(), messages=0)
    content = draft_of(Survey(1.0, {**HEALTHY, "/depth/image": depth, "/side/image": silent}))
    assert "depth" not in content["cameras"]
    assert "/depth/image" in content["left_out"] and "16UC1" in content["left_out"]
    assert "cameras.side.unseen" in questions(content)


def test_arms_with_the_same_joint_names_stay_apart() -> None:
    topics = {f"/{arm}/joint_states": replace(HEALTHY["/joint_states"], topic=f"/{arm}/joint_states") for arm in "lr"}
    content = draft_of(Survey(1.0, {"/front/image_raw": HEALTHY["/front/image_raw"], **topics}))
    dims = content["state"]["dims"]
    assert [(dim["name"], dim["joint"], dim["source"]) for dim in dims[1:3]] == [
        ("l_shoulder", "shoulder", "l"),
        ("r_gripper", "gripper", "r"),
    ]
    assert content["state"]["sources"]["r"] == {"topic": "/r/joint_states"}


def test_without_a_robot_there_is_no_draft() -> None:
    with pytest.raises(ConfigurationError, match="ROS_DOMAIN_ID"):
        draft_profile("arm", Survey(1.0, {}), open_checkpoint(builtin_checkpoint()))


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


class Robot:
    """The robot of `ARM` in the test's own participant; ``change`` may spoil a message before it is sent."""

    def __init__(self, graph: Graph, change: Callable[[str, Any], None] = lambda topic, message: None) -> None:
        self._graph = graph
        self._change = change
        self._lock = threading.Lock()
        best_effort = QoSProfile(depth=5, reliability=ReliabilityPolicy.BEST_EFFORT)
        create = graph.node.create_publisher
        self._publishers = {
            "front": create(Image, "front/image_raw", best_effort),
            "wrist": create(CompressedImage, "wrist/compressed", 5),
            "joints": create(JointState, "joint_states", 5),
        }
        self._pixels = np.full((48, 64, 3), 90, np.uint8)
        self._jpeg = array.array("B", jpeg(self._pixels))

    def publish(self) -> None:
        pixels = array.array("B", self._pixels.tobytes())
        messages = {
            "front": Image(height=48, width=64, encoding="rgb8", step=192, data=pixels),
            "wrist": CompressedImage(format="jpeg", data=self._jpeg),
            "joints": JointState(name=["gripper", "shoulder"], position=[0.5, 0.1]),
        }
        for topic, message in messages.items():
            message.header.stamp = self._graph.node.get_clock().now().to_msg()
            self._change(topic, message)
            self._publishers[topic].publish(message)


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(ARM), encoding="utf-8")
    return path


def check(arm: Path, *options: str) -> int:
    return main(["profile", "check", str(arm), "--live", "--seconds", "1", *options])


def test_a_robot_that_fits(graph: Graph, arm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with repeating(Robot(graph).publish, 0.05):
        assert check(arm) == 0
    said = capsys.readouterr().out
    for part in ("rgb8 64x48", "jpeg 64x48", "gripper, shoulder", "profile arm fits the live graph"):
        assert part in said


def no_stamp(topic: str, message: Any) -> None:
    message.header.stamp.sec = message.header.stamp.nanosec = 0


def future(topic: str, message: Any) -> None:
    if topic == "wrist":
        message.header.stamp.sec += 2


def mono(topic: str, message: Any) -> None:
    if topic == "front":
        message.encoding, message.step = "mono8", 192


def other_names(topic: str, message: Any) -> None:
    if topic == "joints":
        message.name = ["a", "b"]


def nan(topic: str, message: Any) -> None:
    if topic == "joints":
        message.position = [0.5, float("nan")]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (no_stamp, [], ["camera front", "camera wrist", "state source joints", "header stamps are zero"]),
        (future, [], ["camera wrist", "ahead of this clock"]),
        (mono, [], ["camera front", "mono8", "observations: none could be made"]),
        (other_names, [], ["['shoulder', 'gripper'] expected", "['a', 'b']"]),
        (nan, [], ["shoulder carried NaN", "observation.nan"]),
        (
            lambda topic, message: None,
            ["--qos", "front/image_raw:reliable"],
            ["camera front", "asks for reliable", "offers best_effort"],
        ),
    ],
)
def test_a_robot_that_does_not_fit(
    graph: Graph,
    arm: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[str, Any], None],
    options: list[str],
    said: list[str],
) -> None:
    with repeating(Robot(graph, change).publish, 0.05):
        assert check(arm, *options) == 2
    error = capsys.readouterr().err
    assert "contract.graph" in error
    for part in said:
        assert part in error


def test_drivers_without_stamps_fit_where_arrival_counts(graph: Graph, arm: Path) -> None:
    with repeating(Robot(graph, no_stamp).publish, 0.05):
        assert check(arm, "--stamp-source", "receive") == 0


def test_absent_mistyped_and_doubled_topics(graph: Graph, arm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = yaml.safe_load(arm.read_text())
    content["cameras"]["front"] |= {"type": "compressed"}
    content["cameras"]["side"] = {"slot": "right_wrist_0_rgb", "topic": "side/image_raw"}
    del content["absent_slots"]
    arm.write_text(yaml.safe_dump(content))
    with Graph() as other, repeating(Robot(graph).publish, 0.05), repeating(Robot(other).publish, 0.05):
        time.sleep(0.5)
        assert check(arm) == 2
    error = capsys.readouterr().err
    assert "camera front: /front/image_raw: sensor_msgs/msg/CompressedImage expected" in error
    assert "camera side: no node publishes /side/image_raw" in error
    assert "camera wrist: /wrist/compressed is published by 2 nodes" in error
    assert "/joint_states is published by 2 nodes" in error


def test_a_draft_of_a_live_robot_becomes_a_profile_that_fits_it(
    graph: Graph, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "drafted.yaml"
    with repeating(Robot(graph).publish, 0.05):
        assert main(["profile", "new", str(path), "--seconds", "1"]) == 0
        assert "open questions" in capsys.readouterr().out
        with pytest.raises(ProfileError, match="state.order"):
            load_profile(path)
        assert main(["profile", "new", str(path)]) == 2  # what one has answered is never overwritten
        assert "left alone" in capsys.readouterr().err

        content = yaml.safe_load(path.read_text())
        assert content["cameras"]["wrist"]["topic"] == "/wrist/compressed"
        assert content["cameras"]["wrist"]["type"] == "compressed"
        content["cameras"]["front"]["slot"] = "base_0_rgb"
        content["cameras"]["wrist"]["slot"] = "left_wrist_0_rgb"
        content["absent_slots"] = ["right_wrist_0_rgb"]
        content["anchor"] = "front"
        del content["state"]["order"]
        content["state"]["dims"].reverse()
        for dim in [*content["state"]["dims"], *content["action"]["dims"]]:
            dim["unit"] = "rad"
        for dim in content["action"]["dims"]:
            dim["control"] = "position"
        content["timing"]["rate_hz"] = 10
        path.write_text(yaml.safe_dump(content))
        assert [dim.joint_name for dim in load_profile(path).state.dims] == ["shoulder", "gripper"]
        assert check(path) == 0
