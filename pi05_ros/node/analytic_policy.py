"""``pi05-ros analytic-policy``: the policy node with a flow known in closed form, for rehearsals."""

from __future__ import annotations

import argparse
import random
import secrets
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from rclpy.parameter import Parameter

from pi05_ros.chunk import ActionChunk
from pi05_ros.errors import ConfigurationError
from pi05_ros.node.policy_node import PolicyNode
from pi05_ros.node.process import run_process
from pi05_ros.observation import Observation
from pi05_ros.playback.leftover import Continuation
from pi05_ros.playback.rehearsal import analytic_chunk
from pi05_ros.profile import Profile


class AnalyticPolicy:
    """Answers as `pi05_ros.playback.flow_target` says, after a delay. Its task began when the clock stood at 0.

    Args:
        delay_ms: shortest and longest; uniform between them.
        busy: spend the delay computing instead of sleeping, as a model on the CPU would.
    """

    def __init__(self, profile: Profile, delay_ms: tuple[float, float], busy: bool) -> None:
        self.profile = profile
        self.checkpoint = SimpleNamespace(id="analytic")
        self.contract = SimpleNamespace(table=lambda: "no checkpoint: the flow is known in closed form")
        self._delay_ms, self._busy = delay_ms, busy
        self._random = random.Random(0)

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        *,
        continuing: Continuation | None = None,
    ) -> ActionChunk:
        """As `pi05_ros.policy.Policy.infer`; ``noise`` and ``num_steps`` are not used."""
        from pi05_ros.playback.rtc import bound_to

        ready = time.monotonic() + self._random.uniform(*self._delay_ms) / 1e3
        bound = None if continuing is None else bound_to(continuing)
        seed = secrets.randbits(31) if seed is None else seed
        state = np.asarray(observation.state, dtype=np.float64)
        chunk = analytic_chunk(self.profile, state, observation.stamp_ns or 0, seed, 0, bound)
        while (left := ready - time.monotonic()) > 0.0:
            if self._busy:
                np.linalg.svd(np.ones((60, 60)))
            else:
                time.sleep(left)
        return chunk

    def warm_up(self) -> None:
        """Nothing is set up at first use."""

    def capture_pending(self) -> bool:
        """Nothing is captured."""
        return False

    def close(self) -> None:
        """Nothing is held."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options on the sub-command's parser."""
    parser.add_argument("--profile", default="simulated_arm", help="(default: %(default)s)")
    parser.add_argument(
        "--delay-ms", type=float, nargs=2, default=(100.0, 100.0), metavar=("LOW", "HIGH"), help="(default: 100 100)"
    )
    parser.add_argument("--busy", action="store_true", help="compute during the delay instead of sleeping")
    parser.add_argument("--ros-args", nargs=argparse.REMAINDER, default=[], metavar="...", help="passed to ROS")


def run(options: argparse.Namespace) -> int:
    """Run the node until SIGINT or SIGTERM."""
    low, high = options.delay_ms
    if not 0.0 <= low <= high:
        raise ConfigurationError("delay", f"--delay-ms: 0 <= LOW <= HIGH expected, got {low:g} {high:g}")

    def load(_: Any, profile: Profile, *__: Any, **___: Any) -> AnalyticPolicy:
        return AnalyticPolicy(profile, (low, high), options.busy)

    overrides = [
        Parameter("checkpoint", value="analytic"),
        Parameter("profile", value=options.profile),
        Parameter("trigger", value="request"),
    ]
    make: Callable[[], list[PolicyNode]] = lambda: [PolicyNode(load, parameter_overrides=overrides)]  # noqa: E731
    arguments = ["pi05-ros analytic-policy", "--ros-args", *options.ros_args]
    return run_process(make, arguments, autostart=True)
