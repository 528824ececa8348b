"""``pi05-ros replay``: put a bag through the policy and compare with the recorded chunks or actions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pi05_ros.errors import ConfigurationError
from pi05_ros.playback.leftover import RtcSettings
from pi05_ros.recording.replay import Comparison, error_table, read_recording, replay_actions, replay_chunks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("bag", type=Path, help="rosbag2 folder, .mcap or .db3 file")
    parser.add_argument("--checkpoint", default="builtin", help="folder or hub id (default: the small random one)")
    parser.add_argument("--profile", default="demo", help="robot profile (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float32 (default: %(default)s)")
    parser.add_argument(
        "--actions", metavar="TOPIC", help="compare with commands on this topic instead of recorded chunks"
    )
    parser.add_argument("--prompt", help="with --actions: the instruction (default: the profile's)")
    parser.add_argument("--every", type=int, default=1, help="with --actions: take every n-th picture (default: 1)")
    parser.add_argument(
        "--rtc", choices=("guided", "hard_prefix"), default="guided", help="as the recorded node had it"
    )
    parser.add_argument("--rtc-fade-rows", type=int, default=RtcSettings().fade_rows, help="(default: %(default)d)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw recorded and replayed actions")


def run(options: argparse.Namespace) -> int:
    """Print the table; 0 when anything could be compared."""
    from pi05_ros.policy import load_policy

    checkpoint = None if options.checkpoint == "builtin" else options.checkpoint
    policy = load_policy(checkpoint, options.profile, options.device, options.dtype)
    recording = read_recording(options.bag, policy.profile, options.actions)
    if options.actions:
        done = list(replay_actions(policy, recording, options.prompt, max(options.every, 1)))
    else:
        done = list(replay_chunks(policy, recording, RtcSettings(options.rtc, options.rtc_fade_rows)))
    if not done:
        raise ConfigurationError(
            "bag",
            f"bag {options.bag}: chunks or actions with their inputs expected, got {len(recording.chunks)} chunks and "
            f"pictures of {sorted(recording.images)} and joints of {sorted(recording.joints)}",
        )
    dims = policy.profile.action.dims
    print(f"{len(done)} answers of {len(recording.chunks) or len(done)} compared")
    print(error_table(done, [dim.name for dim in dims], [dim.unit for dim in dims]))
    if options.plot is not None:
        plot(done, [dim.name for dim in dims], options.plot)
    return 0


def plot(done: Sequence[Comparison], names: Sequence[str], path: Path) -> None:
    """First rows of every answer, recorded and replayed, one panel per joint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = (np.array([one.stamp_ns for one in done]) - done[0].stamp_ns) / 1e9
    figure, axes = pyplot.subplots(len(names), figsize=(9, 1.6 * len(names)), sharex=True, layout="constrained")
    for column, (axis, name) in enumerate(zip(np.atleast_1d(axes), names, strict=True)):
        axis.plot(at, [one.recorded[0, column] for one in done], label="recorded")
        axis.plot(at, [one.replayed[0, column] for one in done], linestyle="--", label="replayed")
        axis.set_ylabel(name, fontsize=8)
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].legend(fontsize=8)
    np.atleast_1d(axes)[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
