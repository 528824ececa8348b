"""A policy without a network, and a process that runs the node with it.

What it does is set by environment variables, so that a test can start it as a process:
STUB_LOAD_S and STUB_INFER_S (seconds), STUB_FAULT (load, load_unexpected, nan, infer_unexpected, close).
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.errors import ActionError, CheckpointError
from pi05_ros.observation import Observation
from pi05_ros.profile import Profile

HORIZON = 50


class StubPolicy:
    """Answers with noise drawn from the seed, plus the state's sum: enough to tell observations and seeds apart."""

    def __init__(self, profile: Profile, checkpoint: str | None = "stub") -> None:
        self.profile = profile
        self.checkpoint = SimpleNamespace(id=checkpoint or "builtin")
        self.contract = SimpleNamespace(table=lambda: "stub contract")
        self.closed = self.warm = False

    def capture_pending(self) -> bool:
        return False

    def infer(
        self,
        observation: Observation,
        noise: np.ndarray | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
    ) -> ActionChunk:
        assert self.warm, "the node activates only what was warmed up"
        started = time.perf_counter()
        time.sleep(float(os.environ.get("STUB_INFER_S", "0")))
        fault = os.environ.get("STUB_FAULT")
        if fault == "nan":
            raise ActionError("nan", "actions: finite numbers expected, got nan in ['joint_1']; nothing was executed")
        if fault == "infer_unexpected":
            raise RuntimeError("the stub broke")
        dims = self.profile.action.dims
        actions = np.random.default_rng(seed).standard_normal((HORIZON, len(dims))) + np.sum(observation.state)
        rate = self.profile.timing.rate_hz
        return ActionChunk(
            actions=actions.astype(np.float32),
            names=tuple(dim.name for dim in dims),
            units=tuple(dim.unit for dim in dims),
            control_modes=tuple(dim.control for dim in dims),
            step_time_s=1.0 / rate if rate else None,
            executed_steps=self.profile.timing.executed_steps,
            prompt=observation.prompt,
            checkpoint_id=self.checkpoint.id,
            profile=self.profile.name,
            denoise_steps=num_steps or 10,
            noise_seed=seed,
            stamp_ns=observation.stamp_ns,
            input_stamps_ns=observation.input_stamps_ns,
            timings_ms={"stub": (time.perf_counter() - started) * 1e3},
        )

    def warm_up(self) -> None:
        self.warm = True

    def close(self) -> None:
        if os.environ.get("STUB_FAULT") == "close":
            raise RuntimeError("the stub does not close")
        self.closed = True


def load_stub(checkpoint: str | None, profile: Profile, *_: object, **__: object) -> StubPolicy:
    """Stands in for `pi05_ros.load_policy`."""
    deadline = time.monotonic() + float(os.environ.get("STUB_LOAD_S", "0"))
    while time.monotonic() < deadline:
        time.sleep(0.01)
    fault = os.environ.get("STUB_FAULT")
    if fault == "load":
        raise CheckpointError("stub", "horizon: profile demo expects 50, checkpoint stub has 10")
    if fault == "load_unexpected":
        raise RuntimeError("the stub does not load")
    return StubPolicy(profile, checkpoint)


def main() -> int:
    from pi05_ros.node.policy_node import PolicyNode
    from pi05_ros.node.process import run_process

    return run_process(lambda: [PolicyNode(load_stub)], sys.argv, autostart="STUB_AUTOSTART" in os.environ)


if __name__ == "__main__":
    sys.exit(main())
