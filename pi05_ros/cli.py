"""``pi05-ros``: the package's one command. Every tool is a sub-command in a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from pi05_ros import __version__
from pi05_ros.errors import Pi05Error
from pi05_ros.node.environment import missing_ros

# Sub-command -> (module, one line of help). A module has add_arguments(parser) and run(args) -> exit status; it is
# imported only when its sub-command is called, so that `--help` needs neither torch nor rclpy.
COMMANDS = {
    "node": ("pi05_ros.node.command", "run the policy node (what `ros2 launch pi05_ros policy.launch.py` starts)"),
    "player": ("pi05_ros.node.player_command", "play the policy's chunks on a robot; dry unless told otherwise"),
    "check": ("pi05_ros.tools.check", "inspect a bag or the live graph: rates, stamps, names, ranges, frozen cameras"),
    "replay": ("pi05_ros.tools.replay", "put a bag through the policy and compare with what was recorded"),
    "rehearse": ("pi05_ros.tools.rehearse", "every hand-over against delayed inference, as a table and a plot"),
    "rehearse-topics": ("pi05_ros.node.rehearse_topics", "the same over topics; latency of stops"),
    "analytic-policy": ("pi05_ros.node.analytic_policy", "policy node with a known flow, for rehearsals"),
    "plant": ("pi05_ros.node.plant", "simulated robot that obeys the chunk player"),
    "demo": ("pi05_ros.node.demo", "stand-in robot and policy node together, with a live table"),
    "robot": ("pi05_ros.node.robot", "stand-in robot: cameras and joint states of a profile on its topics"),
    "serve": ("pi05_ros.tools.serve", "serve the policy over websocket and HTTP, without ROS"),
    "infer": ("pi05_ros.tools.infer", "ask a running server for one action chunk"),
    "profile": ("pi05_ros.tools.profile", "list, show, draft and check robot profiles"),
    "make-checkpoint": ("pi05_ros.tools.make_checkpoint", "write a small random checkpoint in a real format"),
    "parameters": ("pi05_ros.node.parameters", "print the node's parameters as a table"),
    "node-benchmark": ("pi05_ros.node.benchmark", "measure what the node costs without the model"),
    "bench": ("pi05_ros.tools.bench", "time the engine, alone or beside a reference implementation"),
    "gpu-check": ("pi05_ros.tools.gpu_check", "check graphs, precision, speed, memory and offload on a GPU"),
    "load-benchmark": ("pi05_ros.tools.load_benchmark", "measure how a checkpoint loads: time, bytes, memory"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="pi05-ros", description="Run the Pi0.5 policy on a robot with ROS 2.")
    parser.add_argument("--version", action="version", version=f"pi05_ros {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        for name, (module, help_line) in COMMANDS.items():
            command = commands.add_parser(name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".")
            if name == wanted:
                tool = import_module(module)
                tool.add_arguments(command)
                command.set_defaults(run=tool.run)
        options = parser.parse_args(arguments)
        return int(options.run(options))
    except ImportError as error:
        explained = missing_ros(error)
        if explained is None:
            raise
        print(f"pi05-ros {wanted}: {explained}", file=sys.stderr)
        return 2
    except Pi05Error as error:
        print(f"pi05-ros {wanted}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
