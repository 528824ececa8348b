"""``pi05-ros check``: inspect a bag, or the running graph, against a profile and a checkpoint's statistics."""

from __future__ import annotations

import argparse
from pathlib import Path

from pi05_ros.errors import ConfigurationError
from pi05_ros.profile import load_profile
from pi05_ros.recording.bag import messages, open_bag
from pi05_ros.recording.check import Inspection, report, statistics_spans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("bag", type=Path, nargs="?", help="rosbag2 folder, .mcap or .db3 file")
    parser.add_argument("--live", action="store_true", help="listen to the running graph instead of reading a bag")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to listen (default: %(default)g)")
    parser.add_argument("--profile", default="demo", help="robot profile (default: %(default)s)")
    parser.add_argument("--checkpoint", help="compare ranges with its statistics: folder, hub id or `builtin`")
    parser.add_argument("--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when there is an error in it."""
    if options.live == (options.bag is not None):
        raise ConfigurationError("check", "check: either a bag or --live is expected, got both or neither")
    if not 0.0 < options.seconds < 3600.0:
        raise ConfigurationError("seconds", f"--seconds: above 0 and below 3600 expected, got {options.seconds}")
    profile = load_profile(options.profile)
    spans = statistics_spans(profile, options.checkpoint) if options.checkpoint else {}
    inspection = Inspection(profile, spans)
    wrong_types: list[str] = []
    if options.live:
        from pi05_ros.node.listen import listen

        wrong_types = listen(inspection, options.seconds, options.ros_args)
    else:
        with open_bag(options.bag) as reader:
            for topic, kind, arrival_ns, message in messages(reader):
                inspection.add(topic, kind, arrival_ns, message)
    findings = inspection.findings()
    print(report(findings))
    for line in wrong_types:
        print(f"error    {line}")
    return int(bool(wrong_types) or any(finding.level == "error" for finding in findings))
