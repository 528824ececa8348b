"""Real-time chunking: a new chunk that continues what is still being executed of the last one.

Guided: Black, Galliker & Levine, 2025, arXiv:2506.07339, with the identity for the Jacobian as LeRobot has it. Hard
prefix: Black et al., 2025, arXiv:2512.05964, for checkpoints that were trained with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pi05_ros.errors import ObservationError

Mode = Literal["guided", "hard_prefix"]
Schedule = Literal["zeros", "ones", "linear", "exp"]


@dataclass(frozen=True)
class RealTimeChunking:
    """What is left of the last chunk, and how firmly the new one is bound to it.

    Attributes:
        leftover: float32 [L, dims], normalised actions; row 0 is due when the new chunk's row 0 is. L is at most the
            horizon, dims at most the padded width; what is missing counts as 0.
        delay: rows that will have been executed when the new chunk arrives.
        mode: ``guided`` pulls the new chunk towards the leftover; ``hard_prefix`` keeps the first ``delay`` rows.
        execution_horizon: first row that is free again (guided).
        schedule: how the pull fades from ``delay`` to ``execution_horizon`` (guided).
        max_guidance_weight: bound of the pull (guided).
    """

    leftover: np.ndarray
    delay: int
    mode: Mode = "guided"
    execution_horizon: int = 10
    schedule: Schedule = "linear"
    max_guidance_weight: float = 10.0

    @property
    def binds(self) -> bool:
        """Whether there is anything to continue."""
        return self.leftover.shape[0] > 0 and (self.mode == "guided" or self.delay > 0)

    def check(self, horizon: int, action_dim: int) -> None:
        """Refuse what cannot be meant.

        Raises:
            ObservationError: ``observation.rtc``.
        """
        left = self.leftover
        problem = ""
        if not isinstance(left, np.ndarray) or left.ndim != 2 or left.dtype.kind not in "fiu":
            problem = "leftover: numbers [rows, dims] expected"
        elif left.shape[0] > horizon or left.shape[1] > action_dim:
            problem = f"leftover: at most [{horizon}, {action_dim}] expected, got {list(left.shape)}"
        elif not np.isfinite(left).all():
            problem = "leftover: finite numbers expected, got nan or inf"
        elif self.mode not in ("guided", "hard_prefix"):
            problem = f"mode: guided or hard_prefix expected, got {self.mode!r}"
        elif self.schedule not in ("zeros", "ones", "linear", "exp"):
            problem = f"schedule: zeros, ones, linear or exp expected, got {self.schedule!r}"
        elif not 0 <= self.delay <= horizon:
            problem = f"delay: 0 to {horizon} rows expected, got {self.delay}"
        elif self.mode == "hard_prefix" and self.delay > left.shape[0]:
            problem = f"delay: {self.delay} rows shall be kept, and only {left.shape[0]} are left over"
        elif not self.execution_horizon >= 1:
            problem = f"execution_horizon: at least 1 row expected, got {self.execution_horizon}"
        elif not 0 <= self.max_guidance_weight < math.inf:
            problem = f"max_guidance_weight: a finite number of at least 0 expected, got {self.max_guidance_weight}"
        if problem:
            raise ObservationError("rtc", f"rtc.{problem}")

    def padded_leftover(self, horizon: int, action_dim: int) -> Tensor:
        """float32 [horizon, action_dim], zeros where nothing is left over."""
        padded = torch.zeros(horizon, action_dim)
        rows, dims = self.leftover.shape
        padded[:rows, :dims] = torch.from_numpy(np.asarray(self.leftover, dtype=np.float32))
        return padded

    def row_weights(self, horizon: int) -> Tensor:
        """float32 [horizon]: 1 before ``delay``, 0 from ``execution_horizon``, fading between as scheduled.

        The execution horizon is cut to the leftover's length. For ``hard_prefix``: 1 for the rows that are kept.
        """
        weights = torch.zeros(horizon)
        if self.mode == "hard_prefix":
            weights[: self.delay] = 1.0
            return weights
        end = min(self.execution_horizon, self.leftover.shape[0])
        start = min(self.delay, end)
        weights[: end if self.schedule == "ones" else start] = 1.0
        between = min(end, horizon) - start
        if self.schedule in ("linear", "exp") and between > 0:
            fading = torch.linspace(1, 0, between + 2)[1:-1]
            if self.schedule == "exp":
                fading = fading * torch.expm1(fading) / (math.e - 1)
            weights[start : start + between] = fading
        return weights

    def guidance(self, times: list[float]) -> Tensor:
        """float32 [steps]: how strongly each step is corrected, at flow times 1 ... 1/N."""
        most = torch.tensor(self.max_guidance_weight, dtype=torch.float32)
        tau = torch.tensor([1 - time for time in times], dtype=torch.float32)
        remaining = (1 - tau) ** 2
        odds = torch.nan_to_num((1 - tau) / tau, posinf=self.max_guidance_weight)
        wanted = odds * ((remaining + tau**2) / remaining)
        return torch.minimum(torch.nan_to_num(wanted, posinf=self.max_guidance_weight), most)
