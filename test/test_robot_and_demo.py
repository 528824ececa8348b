"""What people run first: the stand-in robot and the demo, as processes."""

from __future__ import annotations

import io
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PillowImage
from ros_helpers import COMMAND, Graph, Process, stand_in_robot
from sensor_msgs.msg import CompressedImage, Image, JointState

from pi05_ros.profile import load_profile


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def ns(message: Image | CompressedImage | JointState) -> int:
    return int(message.header.stamp.sec) * 10**9 + int(message.header.stamp.nanosec)


def test_the_robot_publishes_what_the_demo_profile_subscribes_to(graph: Graph) -> None:
    with stand_in_robot():
        base = graph.record(Image, "base/image_raw")
        left = graph.record(Image, "left_wrist/image_raw")
        right = graph.record(CompressedImage, "right_wrist/image_raw/compressed")
        joints = graph.record(JointState, "joint_states")
        joints.wait_for_count(100)
        for recording, rate_hz in ((base, 30), (left, 30), (right, 30), (joints, 50)):
            stamps = np.array([ns(message) for message in recording][10:])
            assert np.diff(stamps).mean() == pytest.approx(1e9 / rate_hz, rel=0.1)
        for recording in (base, left):
            for message in recording[:5]:
                assert (message.height, message.width, message.encoding, message.step) == (480, 640, "rgb8", 1920)
            first, second = (np.frombuffer(m.data, np.uint8).reshape(480, 640, 3) for m in recording[:2])
            assert len(np.unique(first)) > 100, "a photograph, not a pattern"
            assert not np.array_equal(first, second)
            # Panned by two pixels and nothing else, so that the picture stays a photograph.
            assert np.array_equal(first[:, 2:], second[:, :-2])
        decoded = np.asarray(PillowImage.open(io.BytesIO(right[0].data.tobytes())))
        assert decoded.shape == (480, 640, 3)
        assert right[0].format.endswith("bgr8")
        assert list(joints[0].name) == [dim.joint_name for dim in load_profile("demo").state.dims]
        positions = np.array([message.position for message in joints])
        assert np.isfinite(positions).all()
        assert (np.ptp(positions, axis=0) > 0).all()
        assert positions[:, -1].min() >= 0.0  # the gripper: a fraction
        assert positions[:, -1].max() <= 1.0


def test_the_demo_ends_by_itself_with_a_plot(tmp_path: Path) -> None:
    with Process([*COMMAND, "demo", "--seconds", "4"], {"DEMO_DIR": str(tmp_path)}) as demo:
        assert demo.wait(90.0) == 0, demo.text
    assert "image to chunk" in demo.text
    for name in ("base", "left_wrist", "right_wrist", "joints"):
        assert re.search(rf"{name} [1-9]\d Hz \d+ ms \d+ dropped", demo.text), demo.text
    with PillowImage.open(tmp_path / "demo_chunk.png") as plot:
        assert plot.size[0] > 500
    assert str(tmp_path / "demo_chunk.png") in demo.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_ends_at_ctrl_c_and_leaves_nobody_behind(tmp_path: Path, number: signal.Signals) -> None:
    with Process([*COMMAND, "demo", "--seconds", "600"], {"DEMO_DIR": str(tmp_path)}) as demo:
        deadline = time.monotonic() + 90.0
        while not re.search(r"^[1-9]\d* chunks,", demo.text, re.MULTILINE):
            assert time.monotonic() < deadline, demo.text
            time.sleep(0.1)
        children = children_of(demo.pid)
        assert len(children) == 2
        demo.signal(number)
        assert demo.wait(10.0) == 0, demo.text
        assert not [child for child in children if Path(f"/proc/{child}").exists()]
        assert (tmp_path / "demo_chunk.png").is_file()


def test_the_demo_says_what_went_wrong(tmp_path: Path) -> None:
    with Process([*COMMAND, "demo", "--checkpoint", "/nowhere"], {"DEMO_DIR": str(tmp_path)}) as demo:
        assert demo.wait(90.0) == 1
        assert "/nowhere" in demo.text
        assert "no chunk came" in demo.text
        assert "Traceback" not in demo.text
    began = time.monotonic()
    with Process([*COMMAND, "demo"], {"DEMO_SECONDS": "soon"}) as demo:
        assert demo.wait(30.0) == 2
        assert "config.demo_seconds: DEMO_SECONDS: seconds above 0 expected, got 'soon'" in demo.text
        assert time.monotonic() - began < 20.0


def children_of(pid: int) -> list[int]:
    return [
        int(process.name)
        for process in Path("/proc").iterdir()
        if process.name.isdecimal() and parent_of(process) == pid
    ]


def parent_of(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
