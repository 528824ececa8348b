"""``pi05-ros player``: the chunk player beside a running policy node."""

from __future__ import annotations

import argparse

from rclpy.parameter import Parameter

from pi05_ros.node.chunk_player import ChunkPlayer
from pi05_ros.node.process import add_node_arguments, ros_command_line, run_process
from pi05_ros.paths import config_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--profile", help="name of a robot profile or path of a YAML file, with an output section")
    parser.add_argument(
        "--live", action="store_true", help="command the robot's controllers; without it the player runs dry"
    )
    add_node_arguments(parser, config_dir() / "player.yaml")


def run(options: argparse.Namespace) -> int:
    """Run the player until SIGINT or SIGTERM; the motion itself begins with the service ~/start."""
    arguments = ros_command_line("pi05-ros player", options)
    overrides = [] if options.profile is None else [Parameter("profile", value=options.profile)]
    if options.live:
        overrides.append(Parameter("dry_run", value=False))
    return run_process(lambda: [ChunkPlayer(parameter_overrides=overrides)], arguments, autostart=options.autostart)
