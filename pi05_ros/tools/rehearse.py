"""``pi05-ros rehearse``: every hand-over against delayed inference, in virtual time, as a table and a plot."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pi05_ros.playback.figures import MotionFigures
from pi05_ros.playback.flow_target import paths
from pi05_ros.playback.handover import HANDOVERS
from pi05_ros.playback.leftover import RtcSettings
from pi05_ros.playback.rehearsal import DelayLaw, Rehearsal, rehearse
from pi05_ros.playback.settings import PlayerSettings
from pi05_ros.profile import load_profile

DELAYS_MS: tuple[tuple[float, float], ...] = ((0, 0), (50, 50), (100, 100), (200, 200), (400, 400), (50, 250))
HEADER = "| hand-over | delay ms | tracking rms | largest step | / largest in chunks | jerk rms | stalls | stalled s |"


def delay_law(low_ms: float, high_ms: float) -> DelayLaw:
    """Delays in seconds, uniform between the two."""
    return lambda rng: float(rng.uniform(low_ms, high_ms)) / 1e3


def row(handover: str, delay_ms: tuple[float, float], figures: MotionFigures) -> str:
    """One line of the table."""
    low, high = delay_ms
    delay = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return (
        f"| {handover} | {delay} | {figures.tracking_rms:.3f} | {figures.largest_step:.4f} | {figures.step_ratio:.2f} "
        f"| {figures.jerk_rms:.0f} | {figures.stalls} | {figures.stalled_s:.2f} |"
    )


def plot(runs: Sequence[tuple[str, Rehearsal]], path: Path, seconds: float = 6.0) -> None:
    """One panel per run: the first joint's command over the ways to do the task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), figsize=(9, 2.1 * len(runs)), sharex=True, layout="constrained")
    for axis, (title, run) in zip(np.atleast_1d(axes), runs, strict=True):
        shown = (run.times_s > 2.0) & (run.times_s < 2.0 + seconds)
        for way in paths(run.times_s[shown], run.commands.shape[1], 2, 0.3):
            axis.plot(run.times_s[shown], way[:, 0], color="grey", linestyle=":", linewidth=1)
        axis.plot(run.times_s[shown], run.commands[shown, 0], linewidth=1.2)
        axis.set_ylabel(f"{title}\nrad", fontsize=8)
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--profile", default="simulated_arm", help="with an output section (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of delays and chunks (default: %(default)d)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the commands at 200 ms")


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    profile = load_profile(options.profile)
    print(HEADER)
    print("|" + "---|" * 8)
    shown = []
    for handover in HANDOVERS:
        for delay_ms in DELAYS_MS:
            done = rehearse(
                profile,
                PlayerSettings(handover=handover),
                delay_law(*delay_ms),
                options.seconds,
                options.seed,
                RtcSettings() if handover == "rtc" else None,
            )
            print(row(handover, delay_ms, done.figures), flush=True)
            if min(delay_ms) == max(delay_ms) == 200.0:
                shown.append((handover, done))
    if options.plot is not None:
        plot(shown, options.plot)
    return 0
