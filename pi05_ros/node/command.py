"""``pi05-ros node``: the policy node with the same options as the launch file."""

from __future__ import annotations

import argparse

from rclpy.parameter import Parameter

from pi05_ros.node.policy_node import PolicyNode
from pi05_ros.node.process import add_node_arguments, ros_command_line, run_process
from pi05_ros.paths import config_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--checkpoint", help="folder or hub id; `builtin` is the small random one")
    parser.add_argument("--profile", help="name of a robot profile or path of a YAML file")
    parser.add_argument("--prompt", help="the instruction")
    parser.add_argument(
        "--serve", action=argparse.BooleanOptionalAction, help="serve the policy over websocket and HTTP too"
    )
    add_node_arguments(parser, config_dir() / "policy.yaml")


def run(options: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    arguments = ros_command_line("pi05-ros", options)
    given = {
        "checkpoint": options.checkpoint,
        "profile": options.profile,
        "prompt": options.prompt,
        "serve.enabled": options.serve,
    }
    overrides = [Parameter(name, value=value) for name, value in given.items() if value is not None]
    return run_process(lambda: [PolicyNode(parameter_overrides=overrides)], arguments, autostart=options.autostart)
