"""The launch file, run by the real launch where it exists (no registry has it as a wheel)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("launch_ros", reason="launch_ros comes only with a ROS 2 distribution")

from ros_helpers import LATCHED, Graph, Process

from pi05_ros.msg import PlayerStatus

RUN = """
import sys
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

file = PathJoinSubstitution([FindPackageShare("pi05_ros"), "launch", "policy.launch.py"])
arguments = [argument.split(":=", 1) for argument in sys.argv[1:]]
service = LaunchService()
policy = IncludeLaunchDescription(PythonLaunchDescriptionSource(file), launch_arguments=arguments)
service.include_launch_description(LaunchDescription([policy]))
sys.exit(service.run())
"""


def launched(*arguments: str) -> Process:
    # As an activated environment of wheels or a sourced workspace has it.
    prefixes = [prefix for prefix in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if prefix]
    return Process(
        [sys.executable, "-c", RUN, *arguments],
        {
            "AMENT_PREFIX_PATH": os.pathsep.join([*prefixes, sys.prefix]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
    )


@pytest.fixture
def graph() -> Iterator[Graph]:
    with Graph() as graph:
        yield graph


def test_without_arguments_the_builtin_checkpoint_becomes_active(graph: Graph) -> None:
    with launched() as launch:
        status = graph.status()
        active = status.wait_for(lambda message: message.state == "active", timeout=60.0)
        assert active.profile == "demo"
        assert graph.get_parameter("checkpoint") == "builtin"
        launch.signal(signal.SIGINT)
        assert launch.wait(15.0) == 0


def test_arguments_reach_the_node_and_empty_ones_do_not(graph: Graph, tmp_path: Path) -> None:
    parameters = tmp_path / "mine.yaml"
    parameters.write_text(
        "/**:\n  ros__parameters: {checkpoint: builtin, profile: demo, prompt: wave, trigger: request}\n",
        encoding="utf-8",
    )
    with launched("autostart:=false", "namespace:=left", f"params_file:={parameters}", "prompt:=yes"):
        assert graph.state("/left/policy") == "unconfigured"
        node = "/left/policy"
        assert graph.get_parameter("prompt", node) == "yes", "a word that YAML takes for a boolean stays a word"
        assert graph.get_parameter("profile", node) == "demo"
        assert graph.get_parameter("checkpoint", node) == "builtin"
        assert graph.get_parameter("trigger", node) == "request"
        assert graph.change_state("configure", node, timeout=60.0)
        assert graph.state(node) == "inactive"


def test_the_player_comes_along_dry_and_asks_for_chunks(graph: Graph) -> None:
    with launched("player:=true", "profile:=demo"):
        status = graph.record(PlayerStatus, "/player/status", LATCHED)
        up = status.wait_for(lambda message: message.lifecycle == "active", timeout=60.0)
        assert up.dry_run and up.state == "idle"
        assert graph.get_parameter("profile", "/player") == "demo"
        assert graph.get_parameter("trigger") == "request"
