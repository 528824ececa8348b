"""``pi05-ros node``: the policy node with the same options as the launch file."""

from __future__ import annotations

import argparse

from rclpy.parameter import Parameter

from pi05_ros.node.policy_node import PolicyNode
from pi05_ros.node.process import run_process
from pi05_ros.paths import config_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--checkpoint", help="folder or hub id; `builtin` is the small random one")
    parser.add_argument("--profile", help="name of a robot profile or path of a YAML file")
    parser.add_argument("--prompt", help="the instruction")
    parser.add_argument(
        "--params-file",
        metavar="FILE",
        default=str(config_dir() / "policy.yaml"),
        help="parameter file; the options above win over it (default: %(default)s)",
    )
    parser.add_argument(
        "--serve", action=argparse.BooleanOptionalAction, help="serve the policy over websocket and HTTP too"
    )
    parser.add_argument("--namespace", default="", help="namespace of the node and its topics")
    parser.add_argument(
        "--autostart", action=argparse.BooleanOptionalAction, default=True, help="configure and activate at once"
    )
    parser.add_argument(
        "--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS: -r, -p, ..."
    )


def run(options: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    arguments = ["pi05-ros", "--ros-args", "--params-file", options.params_file]
    if options.namespace:
        arguments += ["-r", f"__ns:=/{options.namespace.strip('/')}"]
    arguments += options.ros_args
    given = {
        "checkpoint": options.checkpoint,
        "profile": options.profile,
        "prompt": options.prompt,
        "serve.enabled": options.serve,
    }
    overrides = [Parameter(name, value=value) for name, value in given.items() if value is not None]
    return run_process(lambda: [PolicyNode(parameter_overrides=overrides)], arguments, autostart=options.autostart)
