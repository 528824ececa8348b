"""``pi05-ros check``: inspect a bag against a profile, and against a checkpoint's statistics."""

from __future__ import annotations

import argparse
from pathlib import Path

from pi05_ros.profile import load_profile
from pi05_ros.recording.bag import messages, open_bag
from pi05_ros.recording.check import Inspection, report, statistics_spans


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("bag", type=Path, help="rosbag2 folder, .mcap or .db3 file")
    parser.add_argument("--profile", default="demo", help="robot profile (default: %(default)s)")
    parser.add_argument("--checkpoint", help="compare ranges with its statistics: folder, hub id or `builtin`")


def run(options: argparse.Namespace) -> int:
    """Print the report; 1 when there is an error in it."""
    profile = load_profile(options.profile)
    spans = statistics_spans(profile, options.checkpoint) if options.checkpoint else {}
    inspection = Inspection(profile, spans)
    with open_bag(options.bag) as reader:
        for topic, kind, arrival_ns, message in messages(reader):
            inspection.add(topic, kind, arrival_ns, message)
    findings = inspection.findings()
    print(report(findings))
    return int(any(finding.level == "error" for finding in findings))
