"""``pi05-ros player``: the chunk player beside a running policy node."""

from __future__ import annotations

import argparse

from rclpy.parameter import Parameter

from pi05_ros.node.chunk_player import ChunkPlayer
from pi05_ros.node.process import run_process
from pi05_ros.paths import config_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--profile", help="name of a robot profile or path of a YAML file, with an output section")
    parser.add_argument(
        "--live", action="store_true", help="command the robot's controllers; without it the player runs dry"
    )
    parser.add_argument(
        "--params-file",
        metavar="FILE",
        default=str(config_dir() / "player.yaml"),
        help="parameter file; the options above win over it (default: %(default)s)",
    )
    parser.add_argument("--namespace", default="", help="namespace of the node and its topics")
    parser.add_argument(
        "--autostart", action=argparse.BooleanOptionalAction, default=True, help="configure and activate at once"
    )
    parser.add_argument(
        "--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS: -r, -p, ..."
    )


def run(options: argparse.Namespace) -> int:
    """Run the player until SIGINT or SIGTERM; the motion itself begins with the service ~/start."""
    arguments = ["pi05-ros player", "--ros-args", "--params-file", options.params_file]
    if options.namespace:
        arguments += ["-r", f"__ns:=/{options.namespace.strip('/')}"]
    arguments += options.ros_args
    overrides = [] if options.profile is None else [Parameter("profile", value=options.profile)]
    if options.live:
        overrides.append(Parameter("dry_run", value=False))
    return run_process(lambda: [ChunkPlayer(parameter_overrides=overrides)], arguments, autostart=options.autostart)
