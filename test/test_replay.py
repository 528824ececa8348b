"""Recordings: what the node writes, puts the policy through again, exactly; bags of both formats are read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from player_world import arm
from ros_helpers import COMMAND, Graph, Process, stand_in_robot
from rosbags.rosbag2 import StoragePlugin, Writer

from pi05_ros.chunk import ActionChunk
from pi05_ros.cli import main
from pi05_ros.errors import ConfigurationError
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import RtcSettings
from pi05_ros.policy import load_policy
from pi05_ros.recording.bag import CHUNK, messages, open_bag, typestore
from pi05_ros.recording.recorder import Recorder
from pi05_ros.recording.replay import error_table, read_recording, replay_actions, replay_chunks

NS = 10**9
STAMP = 1_700_000_000 * NS


@pytest.mark.usefixtures("threads_as_in_the_node")
@pytest.mark.parametrize("rtc", ["none", "guided"])
def test_a_recorded_run_gives_the_live_chunks_again(tmp_path: Path, rtc: str):
    parameters = [f"record:={tmp_path}", "trigger:=rate", "trigger_rate_hz:=4.0", f"rtc:={rtc}", "dtype:=float32"]
    given = [word for parameter in parameters for word in ("-p", parameter)]
    node = [*COMMAND, "node", "--no-autostart", "--checkpoint", "builtin", "--profile", "demo", "--ros-args", *given]
    with Graph() as graph, stand_in_robot("--camera-hz", "15"), Process(node):
        chunks = graph.chunks()
        assert graph.change_state("configure", timeout=60.0) and graph.change_state("activate")
        chunks.wait_for_count(6, 30.0)
        assert graph.change_state("deactivate") and graph.change_state("cleanup")
    (bag,) = tmp_path.glob("*/part_0000")
    policy = load_policy(profile="demo", dtype="float32", device="cpu")
    recording = read_recording(bag, policy.profile)
    assert len(recording.chunks) >= 6
    if rtc == "guided":
        assert [chunk.rtc_delay >= 0 for chunk in recording.chunks[:3]] == [False, True, True]
    done = list(replay_chunks(policy, recording, RtcSettings()))
    assert len(done) == len(recording.chunks)
    for live, one in zip(chunks, done, strict=False):
        np.testing.assert_array_equal(np.array(live.actions, dtype=np.float32), one.recorded.reshape(-1))
        np.testing.assert_array_equal(one.replayed, one.recorded)
    table = error_table(done, [dim.name for dim in policy.profile.action.dims], ["rad"] * 7)
    assert table.count("100.0 %") == 7
    policy.close()


def observation(index: int) -> Observation:
    stamp = STAMP + index * NS // 10
    picture = np.full((24, 32, 3), index % 256, dtype=np.uint8)
    stamps = {"front": stamp, "joints": stamp - 7}
    return Observation({"front": picture}, np.array([0.1, 0.2, 0.5]), "wave", stamp, stamps)


def empty_chunk(stamp_ns: int) -> bytes:
    types = typestore().types
    time_type = types["builtin_interfaces/msg/Time"]
    stamp = time_type(sec=stamp_ns // NS, nanosec=stamp_ns % NS)
    message = types[CHUNK](
        header=types["std_msgs/msg/Header"](stamp=stamp, frame_id=""),
        step_time=types["builtin_interfaces/msg/Duration"](sec=0, nanosec=NS // 20),
        names=["a", "b", "gripper"], units=["rad", "rad", "fraction"],
        control_modes=["position", "position", "gripper"], horizon=2, action_dim=3,
        actions=np.zeros(6, dtype=np.float32), executed_steps=2, prompt="wave", chunk_index=0, checkpoint_id="c",
        profile="arm", denoise_steps=10, noise_seed=1, input_names=["front", "joints"],
        input_stamps=[stamp, time_type(sec=(stamp_ns - 7) // NS, nanosec=(stamp_ns - 7) % NS)],
        input_ages=np.zeros(2), stage_names=[], stage_ms=np.zeros(0, dtype=np.float32), cache_hit=False,
        guard_flags=[], clamp_count=0, rtc_delay=-1,
    )  # fmt: skip
    return bytes(typestore().serialize_cdr(message, CHUNK))


def test_a_recorder_keeps_the_newest_within_its_bound(tmp_path: Path):
    recorder = Recorder(tmp_path, arm(), 200_000, "/policy/chunk")
    for index in range(200):
        recorder.put(observation(index), empty_chunk(STAMP + index * NS // 10))
        while recorder.written < index:
            time.sleep(0.001)
    recorder.close()
    assert recorder.written == 200 and recorder.dropped == 0 and not recorder.error
    parts = sorted(recorder.folder.iterdir())
    assert 3 <= len(parts) <= 4 and parts[0].name != "part_0000"
    size = sum(file.stat().st_size for part in parts for file in part.rglob("*.mcap"))
    assert 100_000 < size < 300_000
    newest = read_recording(parts[-1], arm())
    last = max(newest.images["front"])
    assert last == STAMP + 199 * NS // 10
    assert newest.images["front"][last].data[0] == 199


def test_a_recorder_that_cannot_keep_up_drops_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Recorder, "_write", lambda *_: time.sleep(0.05))
    recorder = Recorder(tmp_path, arm(), 200_000, "/policy/chunk")
    began = time.monotonic()
    for index in range(50):
        recorder.put(observation(index), b"")
    assert time.monotonic() - began < 0.05
    assert recorder.dropped >= 40
    recorder.close()


class Echo:
    """A policy that answers with the state it sees, in every row."""

    profile = arm()

    def infer(self, observation: Observation, **_: Any) -> ActionChunk:
        return ActionChunk(
            actions=np.tile(observation.state.astype(np.float32), (20, 1)), names=("a", "b", "gripper"),
            units=("rad", "rad", "fraction"), control_modes=("position", "position", "gripper"), step_time_s=0.05,
            executed_steps=10, prompt="wave", checkpoint_id="echo", profile="arm", denoise_steps=1, noise_seed=0,
            stamp_ns=observation.stamp_ns,
        )  # fmt: skip


def write_teleoperation(path: Path, plugin: StoragePlugin) -> None:
    """Two seconds of a run by hand: pictures at 10 Hz, joint states at 50 Hz, commands 0.1 rad beside them."""
    store = typestore()
    types = store.types
    header, stamp_type = types["std_msgs/msg/Header"], types["builtin_interfaces/msg/Time"]
    joint_state = types["sensor_msgs/msg/JointState"]
    with Writer(path, version=9, storage_plugin=plugin) as writer:
        kinds = {"/front/image_raw": "Image", "/joint_states": "JointState", "/commands": "JointState"}
        to = {
            topic: writer.add_connection(topic, f"sensor_msgs/msg/{kind}", typestore=store)
            for topic, kind in kinds.items()
        }
        for index in range(100):
            at = STAMP + index * NS // 50
            head = header(stamp_type(at // NS, at % NS), "")
            empty = np.zeros(0)
            state = joint_state(head, ["gripper", "b", "a"], np.array([0.5, 0.2, 0.1]), empty, empty)
            command = joint_state(head, ["a", "b"], np.array([0.2, 0.3]), empty, empty)
            for topic, message in (("/joint_states", state), ("/commands", command)):
                writer.write(to[topic], at, store.serialize_cdr(message, "sensor_msgs/msg/JointState"))
            if index % 5 == 0:
                pixels = np.zeros(4 * 4 * 3, dtype=np.uint8)
                picture = types["sensor_msgs/msg/Image"](head, 4, 4, "rgb8", 0, 12, pixels)
                writer.write(to["/front/image_raw"], at, store.serialize_cdr(picture, "sensor_msgs/msg/Image"))


@pytest.mark.parametrize("plugin", [StoragePlugin.MCAP, StoragePlugin.SQLITE3])
def test_recorded_commands_are_compared_joint_by_joint(tmp_path: Path, plugin: StoragePlugin):
    write_teleoperation(tmp_path / "bag", plugin)
    recording = read_recording(tmp_path / "bag", arm(), "/commands")
    done = list(replay_actions(Echo(), recording, "wave"))
    assert len(done) == 20
    table = error_table(done, ["a", "b", "gripper"], ["rad", "rad", "fraction"]).splitlines()
    assert table[2].startswith("| a | rad | 0.1 | 0.1 | 0.0 %") and table[3].startswith("| b | rad | 0.1 | 0.1")
    assert table[4].startswith("| gripper | fraction | not recorded")


def test_what_is_no_bag_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "noise.mcap").write_bytes(b"noise")
    for path in (tmp_path / "nowhere", tmp_path / "noise.mcap"):
        with pytest.raises(ConfigurationError, match=path.name):
            read_recording(path, arm())
    write_teleoperation(tmp_path / "bag", StoragePlugin.MCAP)
    with open_bag(tmp_path / "bag") as reader:
        assert sum(1 for _ in messages(reader)) == 220
    assert main(["replay", str(tmp_path / "bag"), "--profile", "demo"]) == 2
    assert "chunks or actions with their inputs expected" in capsys.readouterr().err
