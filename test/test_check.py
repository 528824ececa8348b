"""``pi05-ros check``: every kind of trouble in a bag is named with its subject."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from player_world import arm
from ros_helpers import COMMAND, environment, stand_in_robot
from rosbags.rosbag2 import StoragePlugin
from test_replay import write_teleoperation

from pi05_ros.cli import main
from pi05_ros.profile import load_profile
from pi05_ros.recording.check import Finding, Inspection, report, statistics_spans

NS = 10**9
STAMP = 1_700_000_000 * NS
IMAGE, JOINTS = "sensor_msgs/msg/Image", "sensor_msgs/msg/JointState"


def head(at: int) -> Any:
    return SimpleNamespace(stamp=SimpleNamespace(sec=at // NS, nanosec=at % NS))


def picture(at: int, value: int, encoding: str = "rgb8") -> Any:
    data = np.full(4 * 4 * 3, value % 256, dtype=np.uint8)
    return SimpleNamespace(header=head(at), height=4, width=4, encoding=encoding, step=12, is_bigendian=0, data=data)


def joints(at: int, names: list[str], values: list[float]) -> Any:
    empty = np.zeros(0)
    return SimpleNamespace(header=head(at), name=names, position=np.array(values), velocity=empty, effort=empty)


def inspect(trouble: str = "") -> list[Finding]:
    """Three seconds of a healthy arm, with one thing wrong."""
    spans = {"a": (-1.0, 1.0), "b": (-1.0, 1.0), "gripper": (0.5, 0.5) if trouble == "constant" else (0.0, 1.0)}
    inspection = Inspection(arm(), spans)
    for index in range(90):
        at = STAMP + index * NS // 30
        if trouble == "no camera" or (trouble == "gap" and 30 < index < 60) or (trouble == "slow" and index % 3):
            pass
        elif trouble == "type":
            inspection.add("/front/image_raw", "sensor_msgs/msg/CompressedImage", at, None)
        else:
            value = 7 if trouble == "frozen" else index
            stamp = {"no stamp": 0, "clock": at - 5 * NS, "backwards": at - (index % 7) * NS // 10}.get(trouble, at)
            encoding = "16UC1" if trouble == "encoding" else "rgb8"
            inspection.add("/front/image_raw", IMAGE, at, picture(stamp, value, encoding))
        names = ["a", "x", "gripper"] if trouble == "name" else ["a", "b", "gripper"]
        values = [0.5, np.nan if trouble == "nan" else 0.1, 0.5]
        if trouble == "degrees":
            values[0] *= 57.3
        inspection.add("/joint_states", JOINTS, at, joints(at, names, values))
    return inspection.findings()


def test_a_healthy_stream_is_all_right():
    findings = inspect()
    assert {finding.level for finding in findings} == {"ok"}
    assert "30.0 Hz, rgb8" in report(findings)


@pytest.mark.parametrize(
    ("trouble", "level", "subject", "words"),
    [
        ("no camera", "error", "front", "front/image_raw: no message"),
        ("type", "error", "front", "sensor_msgs/msg/Image expected"),
        ("encoding", "error", "front", "16UC1"),
        ("frozen", "error", "front", "did not change in a single byte for 3.0 s"),
        ("no stamp", "error", "front", "90 messages without a stamp"),
        ("clock", "error", "front", "5.00 s behind their arrival"),
        ("backwards", "error", "front", "stamps run backwards"),
        ("gap", "warning", "front", "1 gaps, the largest 1.00 s"),
        ("slow", "warning", "front", "10.0 Hz, and the checkpoint was trained at 20 Hz"),
        ("name", "error", "joints", "joints ['b'] expected"),
        ("nan", "error", "b", "90 of 90 values are not finite"),
        ("degrees", "error", "a", "are the units right?"),
        ("constant", "warning", "gripper", "hardly moved in training"),
    ],
)
def test_trouble_is_named(trouble: str, level: str, subject: str, words: str):
    matching = [one for one in inspect(trouble) if one.subject == subject and words in one.sentence]
    assert [one.level for one in matching] == [level], report(inspect(trouble))


def test_the_command_reads_bags_and_says_by_its_status_whether_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import yaml
    from player_world import ARM

    path = tmp_path / "arm.yaml"
    path.write_text(yaml.safe_dump(ARM))
    write_teleoperation(tmp_path / "bag", StoragePlugin.SQLITE3)
    assert main(["check", str(tmp_path / "bag"), "--profile", str(path)]) == 1
    assert "did not change in a single byte" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "bag"), "--profile", "demo"]) == 1
    assert "base/image_raw: no message" in capsys.readouterr().out


def test_statistics_are_said_in_robot_units():
    spans = statistics_spans(load_profile("demo"), "builtin")
    assert set(spans) == {dim.name for dim in load_profile("demo").state.dims}
    assert all(low < high for low, high in spans.values())


def test_the_live_graph_is_inspected_by_the_command() -> None:
    with stand_in_robot() as robot:
        robot.wait_for_line("publishes")
        asked = [*COMMAND, "check", "--live", "--seconds", "3", "--profile", "demo", "--checkpoint", "builtin"]
        done = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("base", "left_wrist", "right_wrist", "joints", "gripper"):
        assert re.search(rf"^ok\s+{name}\s", done.stdout, re.MULTILINE), done.stdout
    silent = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=90, check=False)
    assert silent.returncode == 1 and "error" in silent.stdout
