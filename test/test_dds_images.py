"""Raw camera streams survive real DDS between two processes under the package's Fast DDS profile."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pi05_ros.errors import ConfigurationError
from pi05_ros.node import environment as dds
from pi05_ros.node.environment import (
    TRANSPORT_VARIABLES,
    dds_defaults,
    dds_profile,
    free_domain_id,
    isolated_environment,
)

FRAMES = 120
SCRIPT = Path(__file__).with_name("image_streams.py")


def test_three_raw_streams_arrive(tmp_path: Path) -> None:
    environment = isolated_environment()
    environment["ROS_LOG_DIR"] = str(tmp_path)

    def start(role: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), role],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    with start("receive") as receiver, start("publish") as publisher:
        try:
            received, _ = receiver.communicate(timeout=60)
            published, _ = publisher.communicate("\n", timeout=60)
        finally:
            receiver.kill()
            publisher.kill()
    assert json.loads(published)["seconds"] < 1.5 * FRAMES / 30, "the source itself did not keep 30 Hz"
    intact = json.loads(received)["intact"]
    assert min(intact) >= 0.99 * FRAMES, f"frames received intact of {FRAMES} per stream: {intact}"


@pytest.mark.parametrize("variable", TRANSPORT_VARIABLES)
def test_a_transport_chosen_by_the_user_stays(variable: str) -> None:
    assert dds_defaults({variable: "mine"}) == {}


def test_without_a_choice_the_profile_is_selected() -> None:
    assert list(dds_defaults({}).values()) == [str(dds_profile())]
    assert dds_profile().is_file()


def test_an_isolated_environment_has_no_way_out() -> None:
    robot = {
        "ROS_DOMAIN_ID": "0",
        "ROS_STATIC_PEERS": "10.0.0.7",
        "ROS_DISCOVERY_SERVER": "10.0.0.7:11811",
        "FASTDDS_DEFAULT_PROFILES_FILE": "/etc/robot.xml",
    }
    environment = isolated_environment(robot)
    assert environment["ROS_AUTOMATIC_DISCOVERY_RANGE"] == "LOCALHOST"
    assert environment["ROS_DOMAIN_ID"] != "0"
    values = " ".join(environment.values())
    assert "10.0.0.7" not in values
    assert "robot.xml" not in values
    assert str(dds_profile()) in values
    assert robot["ROS_DOMAIN_ID"] == "0"


def test_domains_are_never_given_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # With two ids left, another process takes one and keeps it; this one gets the other, and then none is left.
    ids = sorted((free_domain_id(), free_domain_id()))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(dds, "_DOMAIN_IDS", ids)
    code = f"""
import sys, tempfile
from pi05_ros.node import environment
tempfile.tempdir, environment._DOMAIN_IDS = {str(tmp_path)!r}, {ids}
print(environment.free_domain_id(), flush=True)
sys.stdin.readline()
"""
    command = [sys.executable, "-c", code]
    root = SCRIPT.parent.parent
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        assert {theirs, free_domain_id()} == set(ids)
        with pytest.raises(ConfigurationError, match="no_domain"):
            free_domain_id()
        other.stdin.close()
    assert free_domain_id() == theirs


def test_a_domain_with_a_participant_is_not_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    domain = free_domain_id()
    monkeypatch.setattr(dds, "_DOMAIN_IDS", range(domain, domain + 1))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its lock is out of sight; the port must tell
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as participant:
        participant.bind(("", 7410 + 250 * domain))
        with pytest.raises(ConfigurationError, match="no_domain"):
            free_domain_id()
    assert free_domain_id() == domain
