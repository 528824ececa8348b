"""Stand-ins for the policy: what the doors and the scheduler see of it, without a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from pi05_ros.chunk import ActionChunk
from pi05_ros.errors import ActionError
from pi05_ros.observation import Observation


class StubPolicy:
    """Answers with numbers that come from the observation, so that a mixed-up reply shows.

    ``actions[i, j]`` is ``state[0] + i``; the first state value -1 makes `run` fail, NaN makes `finish` fail.
    """

    def __init__(
        self,
        horizon: int = 8,
        action_dim: int = 4,
        seconds: float | Callable[[int], float] = 0.0,
        profile: Any = None,
        contract: Any = None,
        checkpoint: Any = None,
    ) -> None:
        self.horizon, self.action_dim = horizon, action_dim
        self.seconds = seconds
        self.groups: list[list[float]] = []
        self.threads: set[int] = set()
        self.started = threading.Event()
        self.profile, self.contract, self.checkpoint = profile, contract, checkpoint

    def prepare(self, observation: Observation, **how: Any) -> SimpleNamespace:
        self.threads.add(threading.get_ident())
        return SimpleNamespace(observation=observation, how=how)

    def run(self, members: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        values = [float(np.asarray(one.observation.state).reshape(-1)[0]) for one in members]
        self.groups.append(values)
        self.started.set()
        seconds = self.seconds(len(members)) if callable(self.seconds) else self.seconds
        if seconds:
            time.sleep(seconds)
        if -1.0 in values:
            raise RuntimeError("the network broke")
        return [(value, one) for value, one in zip(values, options, strict=True)]

    def finish(self, prepared: Any, result: Any) -> ActionChunk:
        value, options = result
        if np.isnan(value):
            raise ActionError("nan", "actions: finite numbers expected, got nan")
        actions = np.repeat(value + np.arange(self.horizon, dtype=np.float32)[:, None], self.action_dim, axis=1)
        names = (
            tuple(f"action_{index}" for index in range(self.action_dim))
            if self.contract is None
            else self.contract.action_names
        )
        return ActionChunk(
            actions=actions.astype(np.float32),
            names=names,
            units=("unitless",) * self.action_dim,
            control_modes=("unspecified",) * self.action_dim,
            step_time_s=0.02,
            executed_steps=self.horizon,
            prompt=prepared.observation.prompt,
            checkpoint_id="stub",
            profile="stub",
            denoise_steps=getattr(options, "num_steps", None) or 10,
            noise_seed=getattr(options, "seed", None),
            timings_ms={"preprocess": 0.1, "prefix": 0.2, "action_denoise": 0.3, "postprocess": 0.1},
        )


def observation(value: float = 0.0, prompt: str = "pick") -> Observation:
    return Observation(images={}, state=np.array([value, 0.0], np.float32), prompt=prompt)
